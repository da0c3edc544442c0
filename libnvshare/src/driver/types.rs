//! The types of the driver API that the library uses.
//!
//! Codes and flags are plain integers, never Rust enums. A newer driver may return values that no header has, and an unknown
//! value of a Rust enum would be undefined behaviour.

#![allow(non_camel_case_types, reason = "the driver API's own names")]

use std::ffi::{c_int, c_uint, c_void};
use std::fmt;

/// `CUresult`.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct CUresult(pub(crate) c_int);

impl CUresult {
    pub(crate) const SUCCESS: Self = Self(0);
    pub(crate) const INVALID_VALUE: Self = Self(1);
    pub(crate) const OUT_OF_MEMORY: Self = Self(2);
    pub(crate) const NOT_INITIALIZED: Self = Self(3);
    pub(crate) const DEINITIALIZED: Self = Self(4);
    pub(crate) const NOT_FOUND: Self = Self(500);
    pub(crate) const INVALID_CONTEXT: Self = Self(201);
    pub(crate) const OPERATING_SYSTEM: Self = Self(304);
    pub(crate) const INVALID_HANDLE: Self = Self(400);
    pub(crate) const ILLEGAL_STATE: Self = Self(401);
    pub(crate) const NOT_READY: Self = Self(600);
    pub(crate) const CONTEXT_IS_DESTROYED: Self = Self(709);
    /// The driver refuses calls from its own callbacks, in which no thread may wait.
    pub(crate) const NOT_PERMITTED: Self = Self(800);
    pub(crate) const NOT_SUPPORTED: Self = Self(801);

    /// Whether a stream capture is the cause of this error.
    pub(crate) fn is_of_capture(self) -> bool {
        (900..=908).contains(&self.0)
    }

    /// Whether no work of the context runs any more after this error. The driver has been shut down, the card is gone, or the
    /// context was destroyed. Or a kernel has left an error that only the end of the process clears.
    pub(crate) fn ends_all_work(self) -> bool {
        // Shut down; no such context. A kernel's illegal address, time-out, assertion, stack, instruction, alignment, address
        // space, program counter, failure, tensor memory. Context destroyed; ended by the MPS server; another device's error.
        self.is_of_card() || matches!(self.0, 4 | 201 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 810 | 911)
    }

    /// Whether the card is the cause of this error, and not the program's work.
    pub(crate) fn is_of_card(self) -> bool {
        // Not available; no device; not this device; uncorrectable memory error, broken link, contained error.
        matches!(self.0, 46 | 100 | 101 | 214 | 220 | 226)
    }

    pub(crate) fn ok(self) -> Result<(), Self> {
        if self == Self::SUCCESS { Ok(()) } else { Err(self) }
    }
}

impl fmt::Debug for CUresult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA error {}", self.0)
    }
}

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident)*) => {$(
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(crate) struct $name(pub(crate) *mut c_void);

        impl $name {
            #[allow(dead_code, reason = "not every kind of handle is ever made here")]
            pub(crate) const NULL: Self = Self(std::ptr::null_mut());
        }

        // SAFETY: the driver's handles are opaque words that it accepts from any thread.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    )*};
}

handles! {
    /// `CUcontext`
    CUcontext
    /// `CUstream`
    CUstream
    /// `CUevent`
    CUevent
    /// `CUgreenCtx`
    CUgreenCtx
    /// `CUfunction`
    CUfunction
    /// `CUmodule`
    CUmodule
    /// `CUgraphExec`
    CUgraphExec
    /// `CUgraph`
    CUgraph
    /// `CUarray`
    CUarray
    /// `CUmipmappedArray`
    CUmipmappedArray
    /// `CUmemoryPool`
    CUmemoryPool
}

/// `CUdeviceptr`: an address in the unified space.
pub(crate) type CUdeviceptr = u64;
/// `CUdeviceptr` of the driver API before 3.2.
pub(crate) type CUdeviceptrV1 = c_uint;
/// `CUdevice`: an ordinal in the program's own view.
pub(crate) type CUdevice = c_int;

/// `CUmemLocation`, which is passed by value.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CUmemLocation {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

impl CUmemLocation {
    /// Whether this is the memory of a device.
    pub(crate) fn is_device(self, device: CUdevice) -> bool {
        self == Self { kind: CU_MEM_LOCATION_TYPE_DEVICE, id: device }
    }

    /// The device that the memory is on, as a whole or in one of its parts. `None`: it is not on a device.
    pub(crate) fn device(self) -> Option<CUdevice> {
        match self.kind {
            CU_MEM_LOCATION_TYPE_DEVICE => Some(self.id),
            // The first byte is the device, the second one is the part.
            CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN => Some(CUdevice::from(self.id.to_ne_bytes()[0])),
            _ => None,
        }
    }
}

/// The beginning of `CUmemPoolProps`, and of `CUmemAllocationProp`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct MemoryProperties {
    pub(crate) kind: c_int,
    pub(crate) handle_types: c_int,
    pub(crate) location: CUmemLocation,
}

/// `CUmemGenericAllocationHandle`: physical memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CUmemHandle(pub(crate) u64);

/// `CUipcMemHandle`, which is passed by value.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CUipcMemHandle(pub(crate) [u8; 64]);

/// `CUmemAllocationProp`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CUmemAllocationProp {
    kind: c_int,
    handle_types: c_int,
    pub(crate) location: CUmemLocation,
    windows: usize,
    /// `allocFlags`: compression, RDMA, and two bytes of usage.
    flags: [u8; 8],
}

impl CUmemAllocationProp {
    /// Memory of a device that is not shared with other processes.
    pub(crate) fn on(device: CUdevice) -> Self {
        const PINNED: c_int = 1;
        let location = CUmemLocation { kind: CU_MEM_LOCATION_TYPE_DEVICE, id: device };
        Self { kind: PINNED, handle_types: 0, location, windows: 0, flags: [0; 8] }
    }

    /// The same, but descriptors can be made of it, by which other processes get the memory.
    pub(crate) fn shared_on(device: CUdevice) -> Self {
        Self { handle_types: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, ..Self::on(device) }
    }

    /// Whether such memory is neither compressed, nor for sparse arrays or other machines. It may differ from [`Self::on`] in
    /// two ways: descriptors of files can be made of it, and other devices may [reach](Self::is_for_rdma) it.
    pub(crate) fn is_ordinary(&self) -> bool {
        let plain = Self::on(self.location.id);
        let [compression, _, rest @ ..] = self.flags;
        self.kind == plain.kind
            && matches!(self.handle_types, 0 | CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
            && self.location == plain.location
            && (self.windows, compression, rest) == (0, 0, [0; 6])
    }

    /// Whether devices that are no GPUs may reach the memory (`gpuDirectRDMACapable`).
    pub(crate) fn is_for_rdma(&self) -> bool {
        let [_, rdma, ..] = self.flags;
        rdma != 0
    }

    /// The kinds of handles by which other processes may get the memory.
    pub(crate) fn handle_types(&self) -> c_int {
        self.handle_types
    }
}

/// `CUmemAccessDesc`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CUmemAccessDesc {
    pub(crate) location: CUmemLocation,
    pub(crate) flags: c_int,
}

impl CUmemAccessDesc {
    /// Whether this concerns a device alone, and the driver takes it: nothing, reading, or both (measured).
    pub(crate) fn is_ordinary(&self, device: CUdevice) -> bool {
        self.location.is_device(device) && matches!(self.flags, 0 | 1 | 3)
    }

    /// A device reads and writes.
    pub(crate) fn read_and_write(device: CUdevice) -> Self {
        const READ_AND_WRITE: c_int = 3;
        Self { flags: READ_AND_WRITE, ..Self::none(device) }
    }

    /// A device has no access.
    pub(crate) fn none(device: CUdevice) -> Self {
        Self { location: CUmemLocation { kind: CU_MEM_LOCATION_TYPE_DEVICE, id: device }, flags: 0 }
    }
}

const _: () = assert!(size_of::<CUmemAllocationProp>() == 32 && size_of::<CUmemAccessDesc>() == 12);

/// The legacy default stream's explicit handle.
pub(crate) const CU_STREAM_LEGACY: usize = 1;
/// The calling thread's default stream's explicit handle.
pub(crate) const CU_STREAM_PER_THREAD: usize = 2;
pub(crate) const CU_LIMIT_STACK_SIZE: c_int = 0;
pub(crate) const CU_STREAM_NON_BLOCKING: c_uint = 1;
pub(crate) const CU_STREAM_CAPTURE_STATUS_NONE: c_int = 0;
pub(crate) const CU_STREAM_CAPTURE_MODE_RELAXED: c_int = 2;
pub(crate) const CU_POINTER_ATTRIBUTE_MEMORY_TYPE: c_int = 2;
pub(crate) const CU_POINTER_ATTRIBUTE_IS_MANAGED: c_int = 8;
pub(crate) const CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: c_int = 9;
pub(crate) const CU_MEMORYTYPE_DEVICE: c_int = 2;
pub(crate) const CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: c_int = 4;
pub(crate) const CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: c_int = 5;
pub(crate) const CU_MEMPOOL_ATTR_USED_MEM_CURRENT: c_int = 7;
pub(crate) const CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT: c_int = 2;
pub(crate) const CU_EVENT_DISABLE_TIMING: c_uint = 2;
pub(crate) const CU_MEM_LOCATION_TYPE_DEVICE: c_int = 1;
/// A part of a device's memory, since CUDA 13.5.
pub(crate) const CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN: c_int = 6;
pub(crate) const CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: c_int = 1;
pub(crate) const CU_MEM_ATTACH_GLOBAL: c_uint = 1;
/// The host, as the target of a prefetch.
pub(crate) const CU_DEVICE_CPU: CUdevice = -1;
pub(crate) const CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: c_int = 16;
pub(crate) const CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: c_int = 75;
pub(crate) const CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: c_int = 76;
pub(crate) const CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS: c_int = 89;
pub(crate) const CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: c_int = 103;
pub(crate) const CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: c_int = 102;
pub(crate) const CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: c_int = 91;
pub(crate) const CU_MEMHOSTREGISTER_PORTABLE: c_uint = 1;

/// The stream that a `CUlaunchConfig` names.
///
/// # Safety
/// `config` is null or points to a `CUlaunchConfig`: seven 32-bit words (grid, block, shared memory), then the
/// stream, 8-byte aligned.
pub(crate) unsafe fn config_stream(config: *const c_void) -> CUstream {
    #[repr(C)]
    struct LaunchConfig {
        grid_block_shared: [c_uint; 7],
        stream: CUstream,
    }
    if config.is_null() {
        return CUstream::NULL;
    }
    // SAFETY: not null, so it points to a configuration that begins with these fields.
    unsafe { (*config.cast::<LaunchConfig>()).stream }
}
