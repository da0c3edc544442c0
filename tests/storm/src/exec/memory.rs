//! Memory: the doors by which it is allocated, its copies, and its expected contents.

use super::{Fault, Run};
use crate::plan::{Door, Effect, HostKind, Id, Region, Value, Way};
use nvshare_test_cuda::{CudaError, Driver, cu};

const ROW: usize = 4096;

/// `CUDA_MEMCPY2D`
#[repr(C)]
#[derive(Debug, Default)]
struct Rows {
    from_x: usize,
    from_y: usize,
    from_kind: u32,
    from_host: usize,
    from_device: u64,
    from_array: usize,
    from_pitch: usize,
    to_x: usize,
    to_y: usize,
    to_kind: u32,
    to_host: usize,
    to_device: u64,
    to_array: usize,
    to_pitch: usize,
    width: usize,
    height: usize,
}

const HOST: u32 = 1;
const DEVICE: u32 = 2;

impl Rows {
    /// `bytes` bytes, row behind row, from memory of one kind to memory of another.
    fn new(from_kind: u32, to_kind: u32, bytes: usize) -> Self {
        let (from_pitch, to_pitch, width, height) = (ROW, ROW, ROW, bytes / ROW);
        Self { from_kind, to_kind, from_pitch, to_pitch, width, height, ..Self::default() }
    }

    fn copy(self, d: &Driver, stream: usize) -> Result<(), CudaError> {
        cu!(d, "cuMemcpy2DAsync_v2", &raw const self => *const Rows, stream => usize)
    }
}

impl Run {
    pub(super) fn allocate(&self, buffer: Id, door: Door, bytes: u64, stream: Id) -> Result<(), Fault> {
        let d = self.driver;
        let mut address = 0u64;
        let place = &raw mut address;
        let (size, stream) = (bytes as usize, self.stream(stream));
        match door {
            Door::Plain => cu!(d, "cuMemAlloc_v2", place => *mut u64, size => usize)?,
            Door::Managed => cu!(d, "cuMemAllocManaged", place => *mut u64, size => usize, 1 => u32)?,
            Door::Pitch => {
                let mut pitch = 0usize;
                cu!(d, "cuMemAllocPitch_v2", place => *mut u64, &raw mut pitch => *mut usize, ROW => usize,
                    size / ROW => usize, 4 => u32)?;
                if pitch != ROW {
                    return Err(Fault::Other(format!("rows are {pitch} bytes apart, expected {ROW}")));
                }
            }
            Door::Async => {
                cu!(d, "cuMemAllocAsync", place => *mut u64, size => usize, stream => usize)?;
            }
            Door::FromPool => {
                let (mut device, mut pool) = (0i32, 0u64);
                cu!(d, "cuCtxGetDevice", &raw mut device => *mut i32)?;
                cu!(d, "cuDeviceGetDefaultMemPool", &raw mut pool => *mut u64, device => i32)?;
                cu!(d, "cuMemAllocFromPoolAsync", place => *mut u64, size => usize, pool => u64,
                    stream => usize)?;
            }
            Door::Mapped => {
                let physical = map(d, size, &mut address)?;
                self.physical.set(buffer, physical);
            }
        }
        self.buffers.set(buffer, address);
        Ok(())
    }

    pub(super) fn free(&self, buffer: Id, door: Door, bytes: u64, stream: Option<Id>) -> Result<(), Fault> {
        let d = self.driver;
        let address = self.buffers.get(buffer);
        match (door, stream) {
            (Door::Mapped, _) => unmap(d, self.physical.get(buffer), address, bytes as usize)?,
            (_, Some(stream)) => {
                cu!(d, "cuMemFreeAsync", address => u64, self.stream(stream) => usize)?;
            }
            (_, None) => cu!(d, "cuMemFree_v2", address => u64)?,
        }
        Ok(())
    }

    pub(super) fn allocate_host(&self, host: Id, kind: HostKind, bytes: u64) -> Result<(), Fault> {
        let mut place = 0usize;
        let size = bytes as usize;
        if kind == HostKind::Pinned {
            cu!(self.driver, "cuMemHostAlloc", &raw mut place => *mut usize, size => usize, 1 => u32)?;
        } else {
            // SAFETY: any size; whole pages, as registering needs them.
            place = unsafe { libc::aligned_alloc(ROW, size) } as usize;
            if place == 0 {
                return Err(Fault::Other("the host has no memory".to_owned()));
            }
            if kind == HostKind::Registered {
                cu!(self.driver, "cuMemHostRegister_v2", place => usize, size => usize, 1 => u32)?;
            }
        }
        self.hosts.set(host, place as u64);
        self.host_bytes.set(host, bytes);
        Ok(())
    }

    pub(super) fn free_host(&self, host: Id, kind: HostKind) -> Result<(), Fault> {
        let place = self.hosts.get(host) as usize;
        match kind {
            HostKind::Pinned => cu!(self.driver, "cuMemFreeHost", place => usize)?,
            HostKind::Registered => cu!(self.driver, "cuMemHostUnregister", place => usize)?,
            HostKind::Pageable => {}
        }
        if kind != HostKind::Pinned {
            // SAFETY: from `aligned_alloc`; nothing is on its way to or from it.
            unsafe { libc::free(place as *mut libc::c_void) };
        }
        Ok(())
    }

    /// Words of host memory, which the plan gives to one step at a time.
    fn words(&self, host: Id) -> &'static mut [u32] {
        let (place, bytes) = (self.hosts.get(host), self.host_bytes.get(host));
        // SAFETY: an allocation of that size, which no other step uses before this one is over.
        unsafe { std::slice::from_raw_parts_mut(place as *mut u32, bytes as usize / 4) }
    }

    pub(super) fn write_host(&self, host: Id, value: Value) {
        for (i, word) in self.words(host).iter_mut().enumerate() {
            *word = value.word(i as u64);
        }
    }

    pub(super) fn check_host(&self, host: Id, value: Value, first: u64, bytes: u64) -> Result<(), Fault> {
        let words = &self.words(host)[..bytes as usize / 4];
        self.compare(words, value, first / 4)
    }

    pub(super) fn compare(&self, words: &[u32], value: Value, first: u64) -> Result<(), Fault> {
        let wrong = |(i, word): &(usize, &u32)| **word != value.word(first + *i as u64);
        let mut all = words.iter().enumerate().filter(wrong);
        if let Some((i, word)) = all.next() {
            let index = first + i as u64;
            return Err(Fault::Other(format!(
                "word {index} is {word:#010x}, expected {:#010x}; {} of {} words are wrong",
                value.word(index),
                all.count() + 1,
                words.len()
            )));
        }
        self.saw(words.len() as u64);
        Ok(())
    }

    /// Submits work that changes a region on the card. Calls that return only after their work are not captured.
    pub(super) fn effect(
        &self,
        module: Id,
        region: Region,
        effect: Effect,
        stream: Id,
        captured: bool,
    ) -> Result<(), Fault> {
        let d = self.driver;
        let (address, words) = (self.address(region), region.bytes as usize / 4);
        let handle = self.stream(stream);
        // Without a stream in its name the call uses the default stream, as handle 0 does.
        let plainly = !captured && handle == 0;
        match effect {
            Effect::Add(by, micros) => self.kernel(module, false, region, by, micros, stream)?,
            Effect::Pattern(base, micros) => self.kernel(module, true, region, base, micros, stream)?,
            Effect::Set(word, 1) => {
                cu!(d, "cuMemsetD8Async", address => u64, word as u8 => u8, words * 4 => usize,
                    handle => usize)?;
            }
            Effect::Set(word, 2) => {
                cu!(d, "cuMemsetD16Async", address => u64, word as u16 => u16, words * 2 => usize,
                    handle => usize)?;
            }
            Effect::Set(word, _) if plainly => {
                cu!(d, "cuMemsetD32_v2", address => u64, word => u32, words => usize)?;
            }
            Effect::Set(word, _) => {
                cu!(d, "cuMemsetD32Async", address => u64, word => u32, words => usize, handle => usize)?;
            }
            Effect::Copy(from) => {
                let (from, size) = (self.address(from), region.bytes as usize);
                if plainly {
                    cu!(d, "cuMemcpyDtoD_v2", address => u64, from => u64, size => usize)?;
                } else {
                    cu!(d, "cuMemcpyDtoDAsync_v2", address => u64, from => u64, size => usize,
                        handle => usize)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn copy_in(&self, region: Region, host: Id, stream: Id, way: Way) -> Result<(), Fault> {
        let d = self.driver;
        let (to, from, size) = (self.address(region), self.hosts.get(host), region.bytes as usize);
        let stream = self.stream(stream);
        match way {
            Way::Now => cu!(d, "cuMemcpyHtoD_v2", to => u64, from => u64, size => usize)?,
            Way::Async => {
                cu!(d, "cuMemcpyHtoDAsync_v2", to => u64, from => u64, size => usize, stream => usize)?;
            }
            Way::Rows => {
                let to = Rows { from_host: from as usize, to_device: to, ..Rows::new(HOST, DEVICE, size) };
                to.copy(d, stream)?;
            }
        }
        Ok(())
    }

    pub(super) fn copy_out(
        &self,
        region: Region,
        host: Id,
        first: u64,
        bytes: u64,
        stream: Id,
        way: Way,
    ) -> Result<(), Fault> {
        let d = self.driver;
        let (to, from, size) = (self.hosts.get(host), self.address(region) + first, bytes as usize);
        // The old contents must not look like the expected ones.
        self.words(host)[..size / 4].fill(0x5ca1_ab1e);
        let stream = self.stream(stream);
        match way {
            Way::Now => cu!(d, "cuMemcpyDtoH_v2", to => u64, from => u64, size => usize)?,
            Way::Async => {
                cu!(d, "cuMemcpyDtoHAsync_v2", to => u64, from => u64, size => usize, stream => usize)?;
            }
            Way::Rows => {
                let out = Rows { from_device: from, to_host: to as usize, ..Rows::new(DEVICE, HOST, size) };
                out.copy(d, stream)?;
            }
        }
        Ok(())
    }

    pub(super) fn peer_copy(
        &self,
        to: Region,
        from: Region,
        contexts: (Id, Id),
        stream: Id,
    ) -> Result<(), Fault> {
        let (into, of) = (self.contexts.get(contexts.0), self.contexts.get(contexts.1));
        let (target, source) = (self.address(to), self.address(from));
        Ok(cu!(self.driver, "cuMemcpyPeerAsync", target => u64, into => u64, source => u64, of => u64,
            to.bytes as usize => usize, self.stream(stream) => usize)?)
    }

    pub(super) fn host_touch(&self, region: Region, value: Value, new: Value) -> Result<(), Fault> {
        let place = self.address(region) as *mut u32;
        // SAFETY: managed memory of this size; the plan lets no other step use it before this step is over.
        let words = unsafe { std::slice::from_raw_parts_mut(place, region.bytes as usize / 4) };
        self.compare(words, value, 0)?;
        for (i, word) in words.iter_mut().enumerate() {
            *word = new.word(i as u64);
        }
        Ok(())
    }
}

/// `CUmemAllocationProp`, up to the last field that is used.
#[repr(C)]
#[derive(Debug, Default)]
struct Properties {
    kind: i32,
    handles: i32,
    location: i32,
    device: i32,
    rest: [u64; 2],
}

const PINNED: i32 = 1;
const ON_DEVICE: i32 = 1;
const READ_AND_WRITE: i32 = 3;

/// Maps physical memory at an address that the driver chooses.
pub(crate) fn map(d: &Driver, bytes: usize, address: &mut u64) -> Result<u64, CudaError> {
    let mut device = 0i32;
    cu!(d, "cuCtxGetDevice", &raw mut device => *mut i32)?;
    let properties = Properties { kind: PINNED, location: ON_DEVICE, device, ..Properties::default() };
    let (mut physical, mut place) = (0u64, 0u64);
    cu!(d, "cuMemCreate", &raw mut physical => *mut u64, bytes => usize, &raw const properties => *const Properties,
        0 => u64)?;
    cu!(d, "cuMemAddressReserve", &raw mut place => *mut u64, bytes => usize, 0 => usize, 0 => u64, 0 => u64)?;
    cu!(d, "cuMemMap", place => u64, bytes => usize, 0 => usize, physical => u64, 0 => u64)?;
    let access = [ON_DEVICE, device, READ_AND_WRITE];
    cu!(d, "cuMemSetAccess", place => u64, bytes => usize, access.as_ptr() => *const i32, 1 => usize)?;
    *address = place;
    Ok(physical)
}

/// Unmaps and releases what [`map`] made.
pub(crate) fn unmap(d: &Driver, physical: u64, address: u64, bytes: usize) -> Result<(), CudaError> {
    cu!(d, "cuMemUnmap", address => u64, bytes => usize)?;
    cu!(d, "cuMemRelease", physical => u64)?;
    cu!(d, "cuMemAddressFree", address => u64, bytes => usize)
}
