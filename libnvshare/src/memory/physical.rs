//! Physical memory that the program creates and maps itself.
//!
//! With `NVSHARE_MEMORY=swap` it moves, and the handle that the program gets is the library's: the driver's come and go with the
//! memory. Other such memory is the driver's: it is charged, and stays. The books list the objects of either, how often each has to be
//! released, the mappings, and the reserved addresses. So they answer while the memory is away. An object lives, and its charge with
//! it, while it has a handle or is mapped, as in the driver.
//!
//! Memory that others can reach (other processes, other devices) is [*pinned*](super::pins): it stays on the card until it ends.

pub(crate) mod drivers;
mod reach;

use std::collections::BTreeMap;
use std::ffi::c_ulonglong;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::admission;
use super::allocations::{Allocation, Kind};
use super::backing::AllocationRequest;
use super::charge::Charge;
use super::devices::Device;
use super::free;
use super::mapping::{GRANULE, Mapped};
use super::pins;
use super::plain;
use super::slabs;
use crate::driver::types::{
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUmemHandle,
    CUresult,
};
use crate::work::contexts;

/// `CUmemGenericAllocationHandle`
pub(crate) type Handle = c_ulonglong;

/// The upper bits of the library's handles. The driver's are addresses of the host (measured), and no address is like this.
const MARK: Handle = 0x6e76;
const MARK_SHIFT: u32 = 48;

/// Whether the library made a handle.
pub(crate) fn is_ours(handle: Handle) -> bool {
    handle >> MARK_SHIFT == MARK
}

/// Memory that the program created.
#[derive(Debug)]
struct Object {
    allocation: Arc<Allocation>,
    /// How often its handle has to be released.
    releases: u32,
    /// How often it is mapped.
    views: u32,
}

/// The memory behind a mapping.
#[derive(Debug, Clone)]
enum Of {
    /// The library's, by its handle.
    Library(Handle),
    /// The driver's, which does not move; with its charge, if it was created in this process.
    Driver(Option<Arc<Charge>>),
}

/// A mapping that the program made.
#[derive(Debug, Clone)]
struct Mapping {
    bytes: u64,
    of: Of,
}

impl Mapping {
    /// The library's handle of the memory, if it is the library's.
    fn handle(&self) -> Option<Handle> {
        match self.of {
            Of::Library(handle) => Some(handle),
            Of::Driver(_) => None,
        }
    }
}

#[derive(Debug)]
struct Books {
    objects: BTreeMap<Handle, Object>,
    /// The driver's memory by its handle: the charge, once for each time that the handle has to be released.
    charges: BTreeMap<Handle, Vec<Arc<Charge>>>,
    mappings: BTreeMap<CUdeviceptr, Mapping>,
    /// Reserved addresses: begin and length.
    reserved: BTreeMap<CUdeviceptr, u64>,
    /// Handles that were given out.
    made: u64,
}

impl Books {
    const fn new() -> Self {
        Self {
            objects: BTreeMap::new(),
            charges: BTreeMap::new(),
            mappings: BTreeMap::new(),
            reserved: BTreeMap::new(),
            made: 0,
        }
    }
}

static BOOKS: RwLock<Books> = RwLock::new(Books::new());

fn read() -> RwLockReadGuard<'static, Books> {
    BOOKS.read().unwrap_or_else(PoisonError::into_inner)
}

fn write() -> RwLockWriteGuard<'static, Books> {
    BOOKS.write().unwrap_or_else(PoisonError::into_inner)
}

/// The ranges of a map that an address, or a range of addresses, touches.
fn touched<T: Clone>(
    map: &BTreeMap<CUdeviceptr, T>,
    at: CUdeviceptr,
    bytes: u64,
    length: impl Fn(&T) -> u64,
) -> Vec<(CUdeviceptr, T)> {
    let end = at.saturating_add(bytes);
    let before = map.range(..at).next_back().filter(|(begin, of)| begin.saturating_add(length(of)) > at);
    before.into_iter().chain(map.range(at..end)).map(|(&begin, of)| (begin, of.clone())).collect()
}

/// A part of a range that the program names: a whole mapping, or what lies between the library's mappings.
#[derive(Debug, PartialEq, Eq)]
enum Part {
    Ours(CUdeviceptr, Handle),
    /// Begin and length: the driver's business.
    Drivers(CUdeviceptr, u64),
}

impl Books {
    fn mappings_in(&self, at: CUdeviceptr, bytes: u64) -> Vec<(CUdeviceptr, Mapping)> {
        touched(&self.mappings, at, bytes, |mapping| mapping.bytes)
    }

    fn mapped(&self, handle: Handle) -> Option<&Mapped> {
        self.objects.get(&handle)?.allocation.mapped.as_ref()
    }

    /// The reserved range of an address: begin and length.
    fn reservation(&self, at: CUdeviceptr) -> Option<(CUdeviceptr, u64)> {
        touched(&self.reserved, at, 1, |length| *length).first().copied()
    }

    /// The parts of a range. `None`: none of it is the library's. An error: a mapping of the library's is in it in part.
    fn parts(&self, at: CUdeviceptr, bytes: u64) -> Option<Result<Vec<Part>, CUresult>> {
        let end = at.saturating_add(bytes);
        let ours: Vec<(CUdeviceptr, u64, Handle)> = self
            .mappings_in(at, bytes)
            .into_iter()
            .filter_map(|(begin, mapping)| Some((begin, mapping.bytes, mapping.handle()?)))
            .collect();
        if ours.is_empty() {
            return None;
        }
        let (mut parts, mut next) = (Vec::new(), at);
        for (begin, bytes, handle) in ours {
            if begin < next || begin + bytes > end {
                return Some(Err(CUresult::INVALID_VALUE));
            }
            if begin > next {
                parts.push(Part::Drivers(next, begin - next));
            }
            parts.push(Part::Ours(begin, handle));
            next = begin + bytes;
        }
        if next < end {
            parts.push(Part::Drivers(next, end - next));
        }
        Some(Ok(parts))
    }

    /// Takes an object off the books that has neither a handle nor a mapping.
    fn end(&mut self, handle: Handle) -> Option<Arc<Allocation>> {
        let object = self.objects.get(&handle)?;
        if object.releases > 0 || object.views > 0 {
            return None;
        }
        self.objects.remove(&handle).map(|object| object.allocation)
    }
}

fn end(ended: impl IntoIterator<Item = Arc<Allocation>>) {
    for allocation in ended {
        // Unmapping does not wait for work, as in the driver.
        free::free_hidden(&allocation);
    }
}

/// Creates memory that moves. Returns its handle; `None`: such memory does not move, and the driver is to create it.
pub(crate) fn create(
    device: &'static Device,
    bytes: u64,
    properties: &CUmemAllocationProp,
    flags: u64,
) -> Option<Result<Handle, CUresult>> {
    let is_ordinary = properties.is_ordinary() && properties.location.id == device.ordinal;
    let is_reached = || properties.is_for_rdma() && reach::is_open();
    let can_be_shared = || {
        properties.handle_types() != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || device.shares_by_descriptor()
    };
    if !is_ordinary
        || flags != 0
        || bytes == 0
        || !bytes.is_multiple_of(GRANULE)
        || !can_be_shared()
        || is_reached()
        || plain::needs_plain(bytes)
    {
        return None;
    }
    // Copies need a context. The driver's own memory needs none.
    let context = contexts::lasting(device.ordinal)?;
    let created = Some(*properties);
    let request =
        AllocationRequest { created, ..AllocationRequest::new(device, context, Kind::Mapped, bytes) };
    // No function of the driver makes such memory.
    let allocation = match admission::make(&request, || Err(CUresult::NOT_SUPPORTED)) {
        Ok(allocation) => allocation,
        Err(error) => return Some(Err(error)),
    };
    let mut books = write();
    books.made += 1;
    let handle = MARK << MARK_SHIFT | books.made;
    books.objects.insert(handle, Object { allocation, releases: 1, views: 0 });
    Some(Ok(handle))
}

/// Releases a handle of the library's once.
pub(crate) fn release(handle: Handle) -> CUresult {
    let mut books = write();
    let Some(object) = books.objects.get_mut(&handle).filter(|object| object.releases > 0) else {
        return CUresult::INVALID_VALUE;
    };
    object.releases -= 1;
    let ended = books.end(handle);
    drop(books);
    end(ended);
    CUresult::SUCCESS
}

/// The library's handle of the memory that is mapped at an address, to be released once more. `None`: it has none.
pub(crate) fn retain(at: CUdeviceptr) -> Option<Handle> {
    let mut books = write();
    let handle = books.mappings_in(at, 1).first()?.1.handle()?;
    books.objects.get_mut(&handle)?.releases += 1;
    Some(handle)
}

/// The properties with which memory was created.
pub(crate) fn properties(handle: Handle) -> Option<CUmemAllocationProp> {
    read().mapped(handle)?.properties()
}

/// Notes addresses that the program has reserved, or that it has freed.
pub(crate) fn note_reserved(at: CUdeviceptr, bytes: u64) {
    write().reserved.insert(at, bytes);
}

/// Frees addresses by `call`, if the library has nothing mapped there.
pub(crate) fn free_addresses(at: CUdeviceptr, bytes: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    let mut books = write();
    if books.mappings_in(at, bytes).iter().any(|(_, mapping)| mapping.handle().is_some()) {
        return CUresult::INVALID_VALUE;
    }
    let result = call();
    if result == CUresult::SUCCESS {
        books.reserved.remove(&at);
    }
    result
}

/// Whether addresses are in one range that the program has reserved. If not, the driver has to say whether memory can be
/// mapped there.
pub(crate) fn is_reserved(at: CUdeviceptr, bytes: u64) -> bool {
    let end = at.saturating_add(bytes);
    read().reservation(at).is_some_and(|(begin, length)| end <= begin + length)
}

/// Maps memory of the library's. Errors are the driver's (measured).
pub(crate) fn map(at: CUdeviceptr, bytes: u64, offset: u64, handle: Handle, flags: u64) -> CUresult {
    let mut books = write();
    let Some(object) = books.objects.get(&handle).filter(|object| object.releases > 0) else {
        return CUresult::INVALID_VALUE;
    };
    if flags != 0 || bytes == 0 || !at.is_multiple_of(GRANULE) || !bytes.is_multiple_of(GRANULE) {
        return CUresult::INVALID_VALUE;
    }
    // Memory is mapped as a whole.
    if offset != 0 || bytes != object.allocation.size {
        return CUresult::NOT_SUPPORTED;
    }
    if at == 0 || !books.mappings_in(at, bytes).is_empty() {
        return CUresult::INVALID_VALUE;
    }
    let allocation = Arc::clone(&object.allocation);
    if let Some(Err(error)) = allocation.mapped.as_ref().map(|mapped| mapped.add_view(at)) {
        return error;
    }
    books.mappings.insert(at, Mapping { bytes, of: Of::Library(handle) });
    if let Some(object) = books.objects.get_mut(&handle) {
        object.views += 1;
    }
    CUresult::SUCCESS
}

/// Unmaps whole mappings; `call` unmaps the driver's.
pub(crate) fn unmap(at: CUdeviceptr, bytes: u64, call: impl Fn(CUdeviceptr, u64) -> CUresult) -> CUresult {
    let mut books = write();
    let parts = match books.parts(at, bytes) {
        None => vec![Part::Drivers(at, bytes)],
        Some(Ok(parts)) => parts,
        Some(Err(error)) => return error,
    };
    let (mut ended, mut gone, mut result) = (Vec::new(), Vec::new(), CUresult::SUCCESS);
    for part in parts {
        let unmapped = match part {
            Part::Drivers(at, bytes) => call(at, bytes).ok(),
            Part::Ours(at, handle) => books.mapped(handle).map_or(Ok(()), |mapped| mapped.remove_view(at)),
        };
        if let Err(error) = unmapped {
            result = error;
            break;
        }
        match part {
            Part::Drivers(at, bytes) => {
                let inside = books.mappings_in(at, bytes);
                gone.extend(inside.iter().filter_map(|(begin, _)| books.mappings.remove(begin)));
            }
            Part::Ours(at, handle) => {
                books.mappings.remove(&at);
                if let Some(object) = books.objects.get_mut(&handle) {
                    object.views -= 1;
                }
                ended.extend(books.end(handle));
            }
        }
    }
    drop(books);
    // Charges are given back without the lock.
    drop(gone);
    end(ended);
    result
}

/// The need of a change of access to a range.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// The driver alone is concerned.
    Drivers,
    /// The books take it; the driver, too, where the memory is on the card.
    Noted,
    /// The memory has to be on the card.
    Present,
}

/// Finds the need of a change of access to a range.
pub(crate) fn access_needs(at: CUdeviceptr, bytes: u64, access: &[CUmemAccessDesc]) -> Access {
    let books = read();
    let handles: Vec<Handle> =
        books.mappings_in(at, bytes).iter().filter_map(|(_, mapping)| mapping.handle()).collect();
    let is_ordinary = |handle: &Handle| {
        let device = books.objects.get(handle).map(|object| object.allocation.device);
        device.is_some_and(|device| access.iter().all(|access| access.is_ordinary(device)))
    };
    match () {
        () if handles.is_empty() => Access::Drivers,
        () if handles.iter().all(is_ordinary) => Access::Noted,
        () => Access::Present,
    }
}

/// Sets the access to whole mappings; `call` sets it for the driver's.
pub(crate) fn set_access(
    at: CUdeviceptr,
    bytes: u64,
    access: &[CUmemAccessDesc],
    call: impl Fn(CUdeviceptr, u64) -> CUresult,
) -> CUresult {
    let books = read();
    let parts = match books.parts(at, bytes) {
        None => return call(at, bytes),
        Some(Ok(parts)) => parts,
        Some(Err(error)) => return error,
    };
    let set = |part: &Part| match *part {
        Part::Drivers(at, bytes) => call(at, bytes).ok(),
        Part::Ours(at, handle) => {
            let Some(object) = books.objects.get(&handle) else { return Ok(()) };
            let Some(mapped) = &object.allocation.mapped else { return Ok(()) };
            mapped.set_access(at, access)?;
            let device = object.allocation.device;
            if access.iter().any(|access| access.flags != 0 && !access.location.is_device(device)) {
                pins::pin(&object.allocation, "another device can reach them");
            }
            Ok(())
        }
    };
    // The driver is asked first: if it refuses, nothing is changed.
    let (drivers, ours): (Vec<&Part>, Vec<&Part>) =
        parts.iter().partition(|part| matches!(part, Part::Drivers(..)));
    drivers.into_iter().chain(ours).try_for_each(set).err().unwrap_or(CUresult::SUCCESS)
}

/// The driver's handles of memory of the library's, with offset and length. `None`: not all of it is on the card, or the
/// handle has ended.
pub(crate) fn handles(handle: Handle) -> Option<Vec<(u64, u64, CUmemHandle)>> {
    read().mapped(handle)?.handles()
}

/// From now on the memory of a handle stays on the card.
pub(crate) fn pin(handle: Handle, why: &str) {
    let books = read();
    books.objects.get(&handle).into_iter().for_each(|object| pins::pin(&object.allocation, why));
}

/// From now on the memory that is mapped in a range stays on the card.
pub(crate) fn pin_range(at: CUdeviceptr, bytes: u64, why: &str) {
    let books = read();
    for handle in books.mappings_in(at, bytes).iter().filter_map(|(_, mapping)| mapping.handle()) {
        books.objects.get(&handle).into_iter().for_each(|object| pins::pin(&object.allocation, why));
    }
}

/// From now on an allocation stays on the card, and the slab that it is in.
pub(crate) fn pin_allocated(allocation: &Allocation, why: &str) {
    if let Some(part) = &allocation.part {
        slabs::close(&part.slab);
    }
    pins::pin(allocation.holder(), why);
}

/// A mapping of memory of the library's, for questions about a pointer into it.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) allocation: Arc<Allocation>,
    pub(crate) at: CUdeviceptr,
    /// The reserved addresses around it: begin and length.
    pub(crate) reserved: (CUdeviceptr, u64),
    pub(crate) properties: CUmemAllocationProp,
    pub(crate) access: Vec<CUmemAccessDesc>,
}

/// The mapping of memory of the library's to which a pointer leads.
pub(crate) fn view_at(pointer: CUdeviceptr) -> Option<View> {
    let books = read();
    let (at, mapping) = books.mappings_in(pointer, 1).pop()?;
    let allocation = Arc::clone(&books.objects.get(&mapping.handle()?)?.allocation);
    let mapped = allocation.mapped.as_ref()?;
    let (properties, access) = (mapped.properties()?, mapped.access(at));
    let reserved = books.reservation(at).unwrap_or((at, mapping.bytes));
    Some(View { allocation, at, reserved, properties, access })
}

/// Others reach memory of the process that is the driver's own, or the process reaches memory of others.
static REACHED: AtomicBool = AtomicBool::new(false);

/// Notes that others reach memory that is the driver's own, or that the process has mapped memory of others. When that ends is not known.
pub(crate) fn note_reached() {
    REACHED.store(true, Ordering::Relaxed);
}

/// Whether others may reach memory of the process, or it theirs, in ways of which the library does not know whether they have ended.
pub(crate) fn is_reached() -> bool {
    REACHED.load(Ordering::Relaxed)
}

/// Whether a range has memory of the library's in it.
pub(crate) fn is_in(at: CUdeviceptr, bytes: u64) -> bool {
    read().mappings_in(at, bytes).iter().any(|(_, mapping)| mapping.handle().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn books(mappings: &[(CUdeviceptr, u64, Option<Handle>)]) -> Books {
        let of = |handle: Option<Handle>| handle.map_or(Of::Driver(None), Of::Library);
        let mappings = mappings.iter().map(|&(at, bytes, handle)| (at, Mapping { bytes, of: of(handle) }));
        Books { mappings: mappings.collect(), ..Books::new() }
    }

    #[test]
    fn a_range_consists_of_whole_mappings_of_ours_and_of_the_drivers_business() {
        let books = books(&[(10, 10, Some(1)), (20, 5, None), (30, 10, Some(2))]);
        let parts = |at, bytes| books.parts(at, bytes);
        assert_eq!(parts(0, 10), None);
        assert_eq!(parts(20, 10), None);
        assert_eq!(parts(10, 10), Some(Ok(vec![Part::Ours(10, 1)])));
        let all = vec![Part::Ours(10, 1), Part::Drivers(20, 10), Part::Ours(30, 2), Part::Drivers(40, 5)];
        assert_eq!(parts(10, 35), Some(Ok(all)));
        for (at, bytes) in [(10, 5), (15, 5), (15, 30), (25, 10)] {
            assert_eq!(parts(at, bytes), Some(Err(CUresult::INVALID_VALUE)), "{at} {bytes}");
        }
    }

    #[test]
    fn handles_are_told_from_the_drivers() {
        assert!(is_ours(MARK << MARK_SHIFT | 1));
        assert!(!is_ours(0) && !is_ours(1) && !is_ours(0x7fff_ffff_ffff) && !is_ours(u64::MAX));
    }
}
