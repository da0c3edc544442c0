//! The driver's functions by name, for programs that test nvshare. They are found as the CUDA runtime finds them: `dlopen`,
//! `dlsym` of `cuGetProcAddress`, every other function through that, and functions that it does not know by `dlsym`.

#![allow(
    clippy::macro_metavars_in_unsafe,
    reason = "the arguments of `cu!` are evaluated where they are handed to the driver's function"
)]

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::mem::transmute_copy;
use std::ptr;
use std::sync::RwLock;

/// A call that failed: the driver's code, and the name of the function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaError(pub c_int, pub &'static str);

impl std::fmt::Display for CudaError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: CUDA error {}", self.1, self.0)
    }
}

/// `CUDA_ERROR_OUT_OF_MEMORY`
pub const OUT_OF_MEMORY: c_int = 2;
/// `CUDA_ERROR_NOT_FOUND`
pub const NOT_FOUND: c_int = 500;
/// `CUDA_ERROR_NOT_READY`
pub const NOT_READY: c_int = 600;

type GetProcAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

/// An open driver.
#[derive(Debug)]
pub struct Driver {
    library: usize,
    get_proc_address: GetProcAddress,
    known: RwLock<HashMap<&'static str, usize>>,
}

/// Calls a function of the driver by its name: each argument with its type. The result is `Ok` or a [`CudaError`].
#[macro_export]
macro_rules! cu {
    ($driver:expr, $name:literal $(, $arg:expr => $ty:ty)* $(,)?) => {{
        match $driver.find($name) {
            Err(error) => Err(error),
            Ok(address) => {
                // SAFETY: the driver's function of this name has this signature.
                let function = unsafe {
                    std::mem::transmute_copy::<usize, unsafe extern "C" fn($($ty),*) -> std::ffi::c_int>(&address)
                };
                // SAFETY: the arguments are values, or point to memory that lives until the driver is done with it.
                match unsafe { function($($arg),*) } {
                    0 => Ok(()),
                    code => Err($crate::CudaError(code, $name)),
                }
            }
        }
    }};
}
impl Driver {
    /// Opens and initialises the driver.
    ///
    /// # Errors
    /// There is no driver, it is older than `cuGetProcAddress_v2`, or it cannot be initialised.
    pub fn open() -> Result<Self, String> {
        // SAFETY: a C string; the library stays open.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        if library.is_null() {
            return Err("libcuda.so.1 cannot be loaded".to_owned());
        }
        // SAFETY: an open library and a C string.
        let address = unsafe { libc::dlsym(library, c"cuGetProcAddress_v2".as_ptr()) };
        if address.is_null() {
            return Err("the driver has no cuGetProcAddress_v2".to_owned());
        }
        // SAFETY: the driver's function of this name has this signature.
        let get_proc_address = unsafe { transmute_copy::<*mut c_void, GetProcAddress>(&address) };
        let driver = Self { library: library as usize, get_proc_address, known: RwLock::default() };
        cu!(driver, "cuInit", 0 => u32).map_err(|error| error.to_string())?;
        Ok(driver)
    }

    /// Whether the driver has this function.
    pub fn has(&self, name: &'static str) -> bool {
        self.find(name).is_ok()
    }

    /// The address of a function, which is looked up once.
    ///
    /// # Errors
    /// The driver does not have it.
    ///
    /// # Panics
    /// Another thread has panicked in here.
    pub fn find(&self, name: &'static str) -> Result<usize, CudaError> {
        if let Some(&address) = self.known.read().expect("no panic inside").get(name) {
            return if address == 0 { Err(CudaError(NOT_FOUND, name)) } else { Ok(address) };
        }
        let text = CString::new(name).unwrap_or_default();
        let mut address = ptr::null_mut();
        // SAFETY: a C string and a place for the answer.
        let code =
            unsafe { (self.get_proc_address)(text.as_ptr(), &raw mut address, 12_000, 0, ptr::null_mut()) };
        if code != 0 || address.is_null() {
            // SAFETY: an open library and a C string.
            address = unsafe { libc::dlsym(self.library as *mut c_void, text.as_ptr()) };
        }
        self.known.write().expect("no panic inside").insert(name, address as usize);
        if address.is_null() { Err(CudaError(NOT_FOUND, name)) } else { Ok(address as usize) }
    }

    /// Launches a kernel with the parameters of [`Words`], in `blocks` blocks of `threads` threads each.
    ///
    /// # Errors
    /// The driver's.
    pub fn launch(
        &self,
        function: u64,
        [blocks, threads]: [u32; 2],
        words: Words,
        stream: usize,
    ) -> Result<(), CudaError> {
        let Words { mut address, mut words, mut value, mut micros } = words;
        let mut params: [*mut c_void; 4] = [
            (&raw mut address).cast(),
            (&raw mut words).cast(),
            (&raw mut value).cast(),
            (&raw mut micros).cast(),
        ];
        let params = params.as_mut_ptr();
        cu!(self, "cuLaunchKernel", function => u64, blocks => u32, 1 => u32, 1 => u32, threads => u32, 1 => u32,
            1 => u32, 0 => u32, stream => usize, params => *mut *mut c_void, ptr::null_mut() => *mut *mut c_void)
    }
}

/// The parameters of the kernels that the test programs launch: what is done to 32-bit words, and how long it takes.
#[derive(Debug, Clone, Copy)]
pub struct Words {
    /// Where they begin.
    pub address: u64,
    /// How many there are.
    pub words: u64,
    /// The value that is added to each, or written to it.
    pub value: u32,
    /// How long the kernel takes at the least, in microseconds.
    pub micros: u32,
}
