//! The driver, found the way the CUDA runtime finds it: `dlopen`, `dlsym` of `cuGetProcAddress`, all other functions
//! through that, and functions that `cuGetProcAddress` does not know by `dlsym`.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::mem::transmute_copy;
use std::ptr;
use std::sync::RwLock;

/// A call that did not succeed: its name and the driver's code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CudaError(pub(crate) c_int, pub(crate) &'static str);

impl std::fmt::Display for CudaError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} returned {}", self.1, self.0)
    }
}

pub(crate) const OUT_OF_MEMORY: c_int = 2;
pub(crate) const NOT_FOUND: c_int = 500;
pub(crate) const NOT_READY: c_int = 600;

type GetProcAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

/// An open driver.
#[derive(Debug)]
pub(crate) struct Driver {
    library: usize,
    get_proc_address: GetProcAddress,
    known: RwLock<HashMap<&'static str, usize>>,
}

/// Calls a function of the driver by its name: each argument with its type. The result is `Ok` or the driver's code.
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
                    code => Err($crate::driver::CudaError(code, $name)),
                }
            }
        }
    }};
}
pub(crate) use cu;

impl Driver {
    /// Opens and initialises the driver.
    pub(crate) fn open() -> Result<Self, String> {
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

    pub(crate) fn has(&self, name: &'static str) -> bool {
        self.find(name).is_ok()
    }

    pub(crate) fn find(&self, name: &'static str) -> Result<usize, CudaError> {
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
}
