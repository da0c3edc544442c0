//! NVML's view of memory: the limit and what is used of it, as `cuMemGetInfo` has it.
//!
//! Programs that only look, `nvidia-smi` first of all, never initialise CUDA: they get a short question to the
//! scheduler instead of a session, and no thread.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use nvshare_proto::GpuUuid;

use crate::quota::Mapped;
use crate::{config, devices, gate, session};

/// `nvmlDevice_t`
type Handle = *mut c_void;
/// `nvmlReturn_t`
type Return = c_int;
type MemoryInfo = unsafe extern "C-unwind" fn(Handle, *mut c_void) -> Return;
type Uuid = unsafe extern "C-unwind" fn(Handle, *mut c_char, c_uint) -> Return;
type Index = unsafe extern "C-unwind" fn(Handle, *mut c_uint) -> Return;

const SUCCESS: Return = 0;
/// `NVML_ERROR_FUNCTION_NOT_FOUND`
const FUNCTION_NOT_FOUND: Return = 13;

/// `nvmlMemory_t`
#[repr(C)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`
#[repr(C)]
struct MemoryV2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// NVML's own functions.
struct Real {
    memory: Option<MemoryInfo>,
    memory_v2: Option<MemoryInfo>,
    uuid: Option<Uuid>,
    index: Option<Index>,
}

fn real() -> &'static Real {
    static REAL: OnceLock<Real> = OnceLock::new();
    REAL.get_or_init(|| {
        // SAFETY: its initialisers are what the program is about to run anyway.
        let library = unsafe { Library::open(Some("libnvidia-ml.so.1"), RTLD_NOW | RTLD_LOCAL) };
        let handle = library.map_or(std::ptr::null_mut(), Library::into_raw);
        let find = |name: &CStr| {
            if handle.is_null() {
                return None;
            }
            // SAFETY: an open library's handle, never closed, and a C string.
            let found = unsafe { crate::dl::real_dlsym(handle, name.as_ptr()) };
            (!found.is_null()).then_some(found)
        };
        // SAFETY: NVML's functions of these names have these signatures.
        unsafe {
            Real {
                memory: find(c"nvmlDeviceGetMemoryInfo")
                    .map(|f| std::mem::transmute::<*mut c_void, MemoryInfo>(f)),
                memory_v2: find(c"nvmlDeviceGetMemoryInfo_v2")
                    .map(|f| std::mem::transmute::<*mut c_void, MemoryInfo>(f)),
                uuid: find(c"nvmlDeviceGetUUID").map(|f| std::mem::transmute::<*mut c_void, Uuid>(f)),
                index: find(c"nvmlDeviceGetIndex").map(|f| std::mem::transmute::<*mut c_void, Index>(f)),
            }
        }
    })
}

/// The hook that stands for one of NVML's functions.
pub(crate) fn hook_of(name: &[u8]) -> Option<*mut c_void> {
    match name {
        b"nvmlDeviceGetMemoryInfo" => Some(nvmlDeviceGetMemoryInfo as *mut c_void),
        b"nvmlDeviceGetMemoryInfo_v2" => Some(nvmlDeviceGetMemoryInfo_v2 as *mut c_void),
        _ => None,
    }
}

/// # Safety
/// As for NVML's function.
#[allow(non_snake_case, reason = "NVML's own name")]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C-unwind" fn nvmlDeviceGetMemoryInfo(
    device: Handle,
    memory: *mut c_void,
) -> Return {
    let Some(get) = real().memory else { return FUNCTION_NOT_FOUND };
    // SAFETY: the caller's arguments.
    let result = unsafe { get(device, memory) };
    // SAFETY: NVML wrote one.
    let memory = unsafe { memory.cast::<Memory>().as_mut() };
    if let (SUCCESS, Some(memory)) = (result, memory)
        && let Some((total, used)) = view(device, memory.total, memory.used)
    {
        *memory = Memory { total, free: total - used, used };
    }
    result
}

/// # Safety
/// As for NVML's function.
#[allow(non_snake_case, reason = "NVML's own name")]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C-unwind" fn nvmlDeviceGetMemoryInfo_v2(
    device: Handle,
    memory: *mut c_void,
) -> Return {
    let Some(get) = real().memory_v2 else { return FUNCTION_NOT_FOUND };
    // SAFETY: the caller's arguments.
    let result = unsafe { get(device, memory) };
    // SAFETY: NVML wrote one.
    let memory = unsafe { memory.cast::<MemoryV2>().as_mut() };
    if let (SUCCESS, Some(memory)) = (result, memory)
        && let Some((total, used)) = view(device, memory.total, memory.used)
    {
        *memory = MemoryV2 { version: memory.version, total, reserved: 0, free: total - used, used };
    }
    result
}

/// Total and used bytes as the program is to see them; `None`: as NVML says.
fn view(handle: Handle, total: u64, used: u64) -> Option<(u64, u64)> {
    // In a forked child our locks may be held for ever.
    if gate::is_forked() {
        return None;
    }
    let config = config::get().ok()?;
    let uuid = uuid_of(handle)?;
    let device = devices::by_uuid(uuid);
    let account = device.map(devices::Device::account);
    // Without CUDA, the program's own index is NVML's: as good as any.
    let limit = match device {
        Some(device) => device.limit,
        None => config.limit(index_of(handle)?),
    };
    let total = limit.into_iter().chain(account.and_then(|account| account.capacity)).min()?.min(total);
    let used = account.map(|account| account.used()).or_else(|| used_by_tenant(uuid)).unwrap_or(used);
    Some((total, used.min(total)))
}

fn uuid_of(handle: Handle) -> Option<GpuUuid> {
    let mut text = [0u8; 96];
    // SAFETY: a buffer of the given length; NVML ends what it writes with a zero.
    let result = unsafe { real().uuid?(handle, text.as_mut_ptr().cast(), text.len() as c_uint) };
    let text = CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?;
    (result == SUCCESS).then(|| text.parse().ok()).flatten()
}

fn index_of(handle: Handle) -> Option<usize> {
    let mut index = 0;
    // SAFETY: a place for the answer.
    let result = unsafe { real().index?(handle, &raw mut index) };
    (result == SUCCESS).then_some(index as usize)
}

/// How long what the scheduler said is good: a program may watch memory for hours.
const FRESH: Duration = Duration::from_secs(5);

/// What the tenant's processes use of a GPU, as their page says, if there is a scheduler to ask.
fn used_by_tenant(gpu: GpuUuid) -> Option<u64> {
    static KNOWN: Mutex<Option<(Instant, Option<Option<Mapped>>)>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let page = match *known {
        Some((asked, page)) if asked.elapsed() < FRESH => page,
        _ => {
            // The scheduler may be another one by now, and have another page.
            let page = session::look();
            if let Some((_, Some(Some(old)))) = known.replace((Instant::now(), page)) {
                // SAFETY: nobody but this function had it, and nobody has it any more.
                unsafe { old.unmap() };
            }
            page
        }
    };
    Some(page?.and_then(|page| page.seat(gpu)).map_or(0, |seat| seat.used()))
}
