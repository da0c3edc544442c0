//! The program's part of the driver: a context on the first device, two kernels and a stream.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr;

use nvshare_test_cuda::{CudaError, Driver as Functions, Words, cu};

/// The grid and the blocks of each kernel.
const SHAPE: [u32; 2] = [264, 256];

/// An open driver with a context on the first device, and a stream.
#[derive(Debug)]
pub(crate) struct Driver {
    functions: Functions,
    step: u64,
    fill: u64,
    /// The stream that kernels go to.
    pub(crate) stream: usize,
    /// Memory is allocated and freed in that stream's order.
    ordered: bool,
}

/// Which kernel is launched.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kernel {
    /// It writes a pattern that begins at a value.
    Fill,
    /// It adds a value to each word.
    Step,
}

impl Driver {
    /// Opens the driver and makes the primary context of the first device current.
    pub(crate) fn open(ordered: bool) -> Result<Self, String> {
        let functions = Functions::open()?;
        Self::begin(functions, ordered).map_err(|error| error.to_string())
    }

    fn begin(d: Functions, ordered: bool) -> Result<Self, CudaError> {
        let mut device = 0;
        cu!(d, "cuDeviceGet", &raw mut device => *mut i32, 0 => i32)?;
        let mut context = ptr::null_mut();
        cu!(d, "cuDevicePrimaryCtxRetain", &raw mut context => *mut *mut c_void, device => i32)?;
        cu!(d, "cuCtxSetCurrent", context => *mut c_void)?;
        let mut module = 0u64;
        let ptx = CString::new(include_str!("kernels.ptx")).unwrap_or_default();
        cu!(d, "cuModuleLoadData", &raw mut module => *mut u64, ptx.as_ptr() => *const c_char)?;
        let function = |name: &CStr| {
            let mut function = 0u64;
            cu!(d, "cuModuleGetFunction", &raw mut function => *mut u64, module => u64, name.as_ptr() => *const c_char)
                .map(|()| function)
        };
        let (step, fill) = (function(c"step")?, function(c"fill")?);
        let mut stream = 0usize;
        cu!(d, "cuStreamCreate", &raw mut stream => *mut usize, 1 => u32)?;
        Ok(Self { functions: d, step, fill, stream, ordered })
    }

    pub(crate) fn allocate(&self, bytes: u64) -> Result<u64, CudaError> {
        let d = &self.functions;
        let (mut address, bytes) = (0u64, bytes as usize);
        let place = &raw mut address;
        if self.ordered {
            cu!(d, "cuMemAllocAsync", place => *mut u64, bytes => usize, self.stream => usize)?;
        } else {
            cu!(d, "cuMemAlloc", place => *mut u64, bytes => usize)?;
        }
        Ok(address)
    }

    pub(crate) fn free(&self, address: u64) -> Result<(), CudaError> {
        if self.ordered {
            return cu!(self.functions, "cuMemFreeAsync", address => u64, self.stream => usize);
        }
        cu!(self.functions, "cuMemFree", address => u64)
    }

    pub(crate) fn memory(&self) -> Result<(u64, u64), CudaError> {
        let (mut free, mut total) = (0usize, 0usize);
        cu!(self.functions, "cuMemGetInfo", &raw mut free => *mut usize, &raw mut total => *mut usize)?;
        Ok((free as u64, total as u64))
    }

    /// Launches a kernel on the stream.
    pub(crate) fn launch(&self, kernel: Kernel, words: Words) -> Result<(), CudaError> {
        let function = match kernel {
            Kernel::Fill => self.fill,
            Kernel::Step => self.step,
        };
        self.functions.launch(function, SHAPE, words, self.stream)
    }

    /// Fills memory with zeros, on the stream.
    pub(crate) fn zero(&self, address: u64, bytes: u64) -> Result<(), CudaError> {
        let words = (bytes / 4) as usize;
        cu!(self.functions, "cuMemsetD32Async", address => u64, 0 => u32, words => usize, self.stream => usize)
    }

    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        cu!(self.functions, "cuStreamSynchronize", self.stream => usize)
    }

    pub(crate) fn read(&self, to: &mut [u32], from: u64) -> Result<(), CudaError> {
        let size = size_of_val(to);
        cu!(self.functions, "cuMemcpyDtoH", to.as_mut_ptr() => *mut u32, from => u64, size => usize)
    }

    /// Captures what `body` submits to the stream, into a graph that can be launched.
    pub(crate) fn capture(&self, body: impl FnOnce() -> Result<(), CudaError>) -> Result<u64, CudaError> {
        let d = &self.functions;
        cu!(d, "cuStreamBeginCapture", self.stream => usize, 0 => i32)?;
        let submitted = body();
        let (mut graph, mut exec) = (0u64, 0u64);
        cu!(d, "cuStreamEndCapture", self.stream => usize, &raw mut graph => *mut u64)?;
        submitted?;
        cu!(d, "cuGraphInstantiateWithFlags", &raw mut exec => *mut u64, graph => u64, 0 => u64)?;
        Ok(exec)
    }

    pub(crate) fn launch_graph(&self, exec: u64) -> Result<(), CudaError> {
        cu!(self.functions, "cuGraphLaunch", exec => u64, self.stream => usize)
    }
}
