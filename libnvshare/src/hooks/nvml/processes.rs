//! Lists of processes: the processes of the tenant, with the bytes that each has allocated.
//!
//! NVML itself shows only plain memory. In a container it shows no process, or all processes of the machine.

use std::ffi::{c_uint, c_void};

use super::{Handle, INSUFFICIENT_SIZE, Return, SUCCESS, View};

type List = unsafe extern "C-unwind" fn(Handle, *mut c_void, *mut c_void) -> Return;
type Details = unsafe extern "C-unwind" fn(Handle, *mut c_void) -> Return;

/// An entry of a list.
pub(super) trait Entry: Copy {
    fn new(pid: u32, used: u64) -> Self;
    fn pid(&self) -> u32;
}

/// Where there is no GPU instance.
const NO_INSTANCE: c_uint = c_uint::MAX;

/// `nvmlProcessInfo_v1_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct V1 {
    pid: c_uint,
    used: u64,
}

/// `nvmlProcessInfo_v2_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct V2 {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// `nvmlProcessDetail_v1_t`
#[repr(C)]
#[derive(Clone, Copy)]
struct Detail {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
    used_protected: u64,
}

impl Entry for V1 {
    fn new(pid: u32, used: u64) -> Self {
        Self { pid, used }
    }

    fn pid(&self) -> u32 {
        self.pid
    }
}

impl Entry for V2 {
    fn new(pid: u32, used: u64) -> Self {
        Self { pid, used, gpu_instance: NO_INSTANCE, compute_instance: NO_INSTANCE }
    }

    fn pid(&self) -> u32 {
        self.pid
    }
}

impl Entry for Detail {
    fn new(pid: u32, used: u64) -> Self {
        let (gpu_instance, compute_instance) = (NO_INSTANCE, NO_INSTANCE);
        Self { pid, used, gpu_instance, compute_instance, used_protected: 0 }
    }

    fn pid(&self) -> u32 {
        self.pid
    }
}

/// `nvmlProcessDetailList_v1_t`
#[repr(C)]
struct DetailList {
    version: c_uint,
    mode: c_uint,
    count: c_uint,
    list: *mut Detail,
}

/// `NVML_PROCESS_MODE_COMPUTE`, `NVML_PROCESS_MODE_ALL`
const COMPUTING: [c_uint; 2] = [0, 3];

/// Fills the list of processes that compute: the processes of the tenant.
///
/// # Safety
/// There is room for `room` entries.
unsafe fn fill<E: Entry>(own: &[(u32, u64)], room: usize, count: &mut c_uint, list: *mut E) -> Return {
    *count = own.len() as c_uint;
    if own.len() > room || (list.is_null() && !own.is_empty()) {
        return INSUFFICIENT_SIZE;
    }
    for (at, &(pid, used)) in own.iter().enumerate() {
        // SAFETY: within what there is room for.
        unsafe { list.add(at).write(E::new(pid, used)) };
    }
    SUCCESS
}

/// Removes processes of other tenants from a list of processes that do not compute.
///
/// # Safety
/// NVML wrote `count` entries.
unsafe fn keep<E: Entry>(own: &[(u32, u64)], count: &mut c_uint, list: *mut E) {
    let mut kept = 0;
    for at in 0..*count as usize {
        // SAFETY: promised by the caller; what is kept moves forward.
        unsafe {
            let entry = list.add(at).read();
            if own.iter().any(|&(pid, _)| pid == entry.pid()) {
                list.add(kept).write(entry);
                kept += 1;
            }
        }
    }
    *count = kept as c_uint;
}

/// # Safety
/// As for NVML's function.
pub(super) unsafe fn compute<E: Entry>(
    real: List,
    device: Handle,
    count: *mut c_void,
    list: *mut c_void,
) -> Return {
    // SAFETY: null, or the caller's count.
    let room = unsafe { count.cast::<c_uint>().as_ref() }.copied();
    // SAFETY: the caller's arguments.
    let result = unsafe { real(device, count, list) };
    // SAFETY: as above.
    let count = unsafe { count.cast::<c_uint>().as_mut() };
    if let (SUCCESS | INSUFFICIENT_SIZE, Some(room), Some(count)) = (result, room, count)
        && let Some(own) = View::of(device, real as *const c_void).and_then(|view| view.processes())
    {
        // SAFETY: the caller says that there is room for this many.
        return unsafe { fill::<E>(&own, room as usize, count, list.cast()) };
    }
    result
}

/// # Safety
/// As for NVML's function.
pub(super) unsafe fn others<E: Entry>(
    real: List,
    device: Handle,
    count: *mut c_void,
    list: *mut c_void,
) -> Return {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(device, count, list) };
    // SAFETY: null, or the count that NVML wrote.
    let count = unsafe { count.cast::<c_uint>().as_mut() };
    if let (SUCCESS, Some(count), false) = (result, count, list.is_null())
        && let Some(own) = View::of(device, real as *const c_void).and_then(|view| view.processes())
    {
        // SAFETY: NVML wrote this many.
        unsafe { keep::<E>(&own, count, list.cast()) };
    }
    result
}

/// # Safety
/// As for NVML's function.
pub(super) unsafe fn details(real: Details, device: Handle, list: *mut c_void) -> Return {
    // SAFETY: null, or the caller's list.
    let room = unsafe { list.cast::<DetailList>().as_ref() }.map(|list| list.count);
    // SAFETY: the caller's arguments.
    let result = unsafe { real(device, list) };
    // SAFETY: as above.
    let list = unsafe { list.cast::<DetailList>().as_mut() };
    if let (SUCCESS | INSUFFICIENT_SIZE, Some(room), Some(list)) = (result, room, list)
        && let Some(own) = View::of(device, real as *const c_void).and_then(|view| view.processes())
    {
        if COMPUTING.contains(&list.mode) {
            // SAFETY: the caller says that there is room for this many.
            return unsafe { fill(&own, room as usize, &mut list.count, list.list) };
        }
        if result == SUCCESS && !list.list.is_null() {
            // SAFETY: NVML wrote this many.
            unsafe { keep(&own, &mut list.count, list.list) };
        }
    }
    result
}
