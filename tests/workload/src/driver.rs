//! The driver, found the way the CUDA runtime finds it: `dlopen`, `dlsym` of `cuGetProcAddress`, everything else
//! through that.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::mem::transmute_copy;
use std::ptr;

/// The driver's error code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CudaError(pub(crate) c_int, pub(crate) &'static str);

impl std::fmt::Display for CudaError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: CUDA error {}", self.1, self.0)
    }
}

type GetProcAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

/// An open driver with a context on the first device, and a stream.
#[derive(Debug)]
pub(crate) struct Driver {
    get_proc_address: GetProcAddress,
    step: *mut c_void,
    fill: *mut c_void,
    /// The stream that kernels go to.
    pub(crate) stream: *mut c_void,
    /// Memory is allocated and freed in that stream's order.
    ordered: bool,
}

macro_rules! call {
    ($driver:expr, $name:literal, ($($ty:ty),*), $($arg:expr),* $(,)?) => {{
        let address = $driver.find($name)?;
        // SAFETY: the driver's function of this name has this signature.
        let function = unsafe { transmute_copy::<*mut c_void, unsafe extern "C" fn($($ty),*) -> c_int>(&address) };
        // SAFETY: the arguments are values, or point to what lives through the call.
        match unsafe { function($($arg),*) } {
            0 => Ok(()),
            code => Err(CudaError(code, $name)),
        }
    }};
}

impl Driver {
    /// Opens the driver and makes the primary context of the first device current.
    pub(crate) fn open(ordered: bool) -> Result<Self, String> {
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
        let mut driver = Self {
            get_proc_address,
            step: ptr::null_mut(),
            fill: ptr::null_mut(),
            stream: ptr::null_mut(),
            ordered,
        };
        driver.begin().map_err(|error| error.to_string())?;
        Ok(driver)
    }

    fn begin(&mut self) -> Result<(), CudaError> {
        call!(self, "cuInit", (c_uint), 0)?;
        let mut device = 0;
        call!(self, "cuDeviceGet", (*mut c_int, c_int), &raw mut device, 0)?;
        let mut context = ptr::null_mut();
        call!(self, "cuDevicePrimaryCtxRetain", (*mut *mut c_void, c_int), &raw mut context, device)?;
        call!(self, "cuCtxSetCurrent", (*mut c_void), context)?;
        let mut module = ptr::null_mut();
        let ptx = concat_nul(include_str!("kernels.ptx"));
        call!(self, "cuModuleLoadData", (*mut *mut c_void, *const c_char), &raw mut module, ptx.as_ptr())?;
        self.step = self.function(module, c"step")?;
        self.fill = self.function(module, c"fill")?;
        self.stream = self.new_stream()?;
        Ok(())
    }

    fn find(&self, name: &'static str) -> Result<*mut c_void, CudaError> {
        let text = concat_nul(name);
        let mut address = ptr::null_mut();
        // SAFETY: a C string and places for both answers.
        let code =
            unsafe { (self.get_proc_address)(text.as_ptr(), &raw mut address, 12_000, 0, ptr::null_mut()) };
        if code == 0 && !address.is_null() { Ok(address) } else { Err(CudaError(code, name)) }
    }

    fn function(&self, module: *mut c_void, name: &CStr) -> Result<*mut c_void, CudaError> {
        let mut function = ptr::null_mut();
        call!(
            self,
            "cuModuleGetFunction",
            (*mut *mut c_void, *mut c_void, *const c_char),
            &raw mut function,
            module,
            name.as_ptr()
        )?;
        Ok(function)
    }

    pub(crate) fn new_stream(&self) -> Result<*mut c_void, CudaError> {
        let mut stream = ptr::null_mut();
        call!(self, "cuStreamCreate", (*mut *mut c_void, c_uint), &raw mut stream, 1)?;
        Ok(stream)
    }

    pub(crate) fn allocate(&self, bytes: u64) -> Result<u64, CudaError> {
        let mut address = 0;
        let place = &raw mut address;
        if self.ordered {
            let stream = self.stream;
            call!(self, "cuMemAllocAsync", (*mut u64, usize, *mut c_void), place, bytes as usize, stream)?;
        } else {
            call!(self, "cuMemAlloc", (*mut u64, usize), place, bytes as usize)?;
        }
        Ok(address)
    }

    pub(crate) fn free(&self, address: u64) -> Result<(), CudaError> {
        if self.ordered {
            return call!(self, "cuMemFreeAsync", (u64, *mut c_void), address, self.stream);
        }
        call!(self, "cuMemFree", (u64), address)
    }

    pub(crate) fn memory(&self) -> Result<(u64, u64), CudaError> {
        let (mut free, mut total) = (0usize, 0usize);
        call!(self, "cuMemGetInfo", (*mut usize, *mut usize), &raw mut free, &raw mut total)?;
        Ok((free as u64, total as u64))
    }

    /// `fill` or `step` over a range, on the stream.
    pub(crate) fn launch(
        &self,
        fill: bool,
        address: u64,
        bytes: u64,
        value: u32,
        micros: u32,
    ) -> Result<(), CudaError> {
        let (mut address, mut words, mut value, mut micros) = (address, bytes / 4, value, micros);
        let mut params: [*mut c_void; 4] = [
            (&raw mut address).cast(),
            (&raw mut words).cast(),
            (&raw mut value).cast(),
            (&raw mut micros).cast(),
        ];
        let function = if fill { self.fill } else { self.step };
        call!(
            self,
            "cuLaunchKernel",
            (
                *mut c_void,
                c_uint,
                c_uint,
                c_uint,
                c_uint,
                c_uint,
                c_uint,
                c_uint,
                *mut c_void,
                *mut *mut c_void,
                *mut *mut c_void
            ),
            function,
            264,
            1,
            1,
            256,
            1,
            1,
            0,
            self.stream,
            params.as_mut_ptr(),
            ptr::null_mut()
        )
    }

    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        call!(self, "cuStreamSynchronize", (*mut c_void), self.stream)
    }

    pub(crate) fn read(&self, to: &mut [u32], from: u64) -> Result<(), CudaError> {
        call!(self, "cuMemcpyDtoH", (*mut c_void, u64, usize), to.as_mut_ptr().cast(), from, size_of_val(to))
    }

    /// Captures what `body` submits to the stream, into a graph that can be launched.
    pub(crate) fn capture(
        &self,
        body: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<*mut c_void, CudaError> {
        call!(self, "cuStreamBeginCapture", (*mut c_void, c_int), self.stream, 0)?;
        let submitted = body();
        let mut graph = ptr::null_mut();
        call!(self, "cuStreamEndCapture", (*mut c_void, *mut *mut c_void), self.stream, &raw mut graph)?;
        submitted?;
        let mut exec = ptr::null_mut();
        call!(
            self,
            "cuGraphInstantiateWithFlags",
            (*mut *mut c_void, *mut c_void, u64),
            &raw mut exec,
            graph,
            0
        )?;
        Ok(exec)
    }

    pub(crate) fn launch_graph(&self, exec: *mut c_void) -> Result<(), CudaError> {
        call!(self, "cuGraphLaunch", (*mut c_void, *mut c_void), exec, self.stream)
    }
}

fn concat_nul(text: &str) -> CString {
    CString::new(text).unwrap_or_default()
}
