//! The program's view of a GPU through NVML: the same limit and use as through `cuMemGetInfo`, and the processes of its tenant.
//!
//! Programs such as `nvidia-smi` never initialise CUDA. For them the library sends one question to the scheduler and starts no
//! session and no thread.
//!
//! While the process is off the card, the driver suspends NVML too. So its functions pass the door: the hooks here, and the
//! [others](unhooked) by thunks.

mod memory;
mod processes;
pub(super) mod unhooked;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nvshare_client::TenantQuota;
use nvshare_proto::GpuUuid;

use crate::memory::devices::{self, Device};
use crate::memory::quota::MappedPage;
use crate::process::{c_library, config, elf, lifecycle};
use crate::session::{self, TenantPage};
use crate::work::gate::door;

/// `nvmlDevice_t`
type Handle = *mut c_void;
/// `nvmlReturn_t`
type Return = c_int;

const SUCCESS: Return = 0;
/// `NVML_ERROR_INSUFFICIENT_SIZE`
const INSUFFICIENT_SIZE: Return = 7;
/// `NVML_ERROR_FUNCTION_NOT_FOUND`
const FUNCTION_NOT_FOUND: Return = 13;

/// One of NVML's own functions, at the address that the program found or would find.
#[derive(Debug)]
struct NvmlFunction {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl NvmlFunction {
    const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(ptr::null_mut()) }
    }

    /// The function. For a program that is linked to NVML, this is the next symbol with the name. A plug-in may have NVML in its own
    /// scope alone: then there is no next one.
    fn get(&self) -> Option<*mut c_void> {
        let mut address = self.address.load(Ordering::Relaxed);
        if address.is_null() {
            // SAFETY: a pseudo-handle.
            address = unsafe { c_library::dlsym_quietly(libc::RTLD_NEXT, self.name) };
            if address.is_null() {
                address = in_nvml(self.name);
            }
            self.address.store(address, Ordering::Relaxed);
        }
        (!address.is_null()).then_some(address)
    }
}

/// A function of the NVML that is loaded, in any scope; null if there is none.
fn in_nvml(name: &CStr) -> *mut c_void {
    elf::find_in_loaded(name, &["/libnvidia-ml.so"]).cast_mut()
}

/// Makes the hooks of NVML's functions. All of them take a device and one or two pointers.
macro_rules! hooks {
    ($( $name:ident ($($arg:ident),*) = $handler:expr; )*) => {
        $(
            /// # Safety
            /// As for NVML's function.
            #[allow(non_snake_case, reason = "NVML's own name")]
            #[cfg_attr(not(test), unsafe(no_mangle))]
            unsafe extern "C-unwind" fn $name(device: Handle, $($arg: *mut c_void),*) -> Return {
                type Function = unsafe extern "C-unwind" fn(Handle, $(hooks!(@pointer $arg)),*) -> Return;
                let Some(real) = real::$name.get() else { return FUNCTION_NOT_FOUND };
                // SAFETY: NVML's function of this name has this signature.
                let real = unsafe { std::mem::transmute::<*mut c_void, Function>(real) };
                // SAFETY: the caller's arguments, and the function that it meant to call.
                at_door(|| unsafe { $handler(real, device, $($arg),*) })
            }
        )*

        #[allow(non_upper_case_globals, reason = "NVML's own names")]
        mod real {
            use super::NvmlFunction;
            $( pub(super) static $name: NvmlFunction = {
                match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => NvmlFunction::new(name),
                    Err(_) => unreachable!(),
                }
            }; )*
        }

        /// Each function with its hook.
        static HOOKS: &[(&NvmlFunction, Hook)] = &[$( (&real::$name, Hook($name as *mut c_void)) ),*];
    };
    (@pointer $arg:ident) => { *mut c_void };
}

/// Makes a call that is counted at the door, and waits there first while the process is off the card. An exception that unwinds through
/// it leaves the count as it is.
#[inline(always)]
fn at_door<T>(call: impl FnOnce() -> T) -> T {
    let entered = door::enter();
    let result = call();
    door::leave(entered);
    result
}

/// The address of a hook.
struct Hook(*mut c_void);

// SAFETY: the address of a function, which is code.
unsafe impl Sync for Hook {}

hooks! {
    nvmlDeviceGetMemoryInfo(memory) = memory::info;
    nvmlDeviceGetMemoryInfo_v2(memory) = memory::info_v2;
    nvmlDeviceGetComputeRunningProcesses(count, list) = processes::compute::<processes::V1>;
    nvmlDeviceGetComputeRunningProcesses_v2(count, list) = processes::compute::<processes::V2>;
    nvmlDeviceGetComputeRunningProcesses_v3(count, list) = processes::compute::<processes::V2>;
    nvmlDeviceGetGraphicsRunningProcesses(count, list) = processes::others::<processes::V1>;
    nvmlDeviceGetGraphicsRunningProcesses_v2(count, list) = processes::others::<processes::V2>;
    nvmlDeviceGetGraphicsRunningProcesses_v3(count, list) = processes::others::<processes::V2>;
    nvmlDeviceGetMPSComputeRunningProcesses(count, list) = processes::others::<processes::V1>;
    nvmlDeviceGetMPSComputeRunningProcesses_v2(count, list) = processes::others::<processes::V2>;
    nvmlDeviceGetMPSComputeRunningProcesses_v3(count, list) = processes::others::<processes::V2>;
    nvmlDeviceGetRunningProcessDetailList(list) = processes::details;
}

fn hooked(name: &[u8]) -> Option<&'static (&'static NvmlFunction, Hook)> {
    HOOKS.iter().find(|(real, _)| real.name.to_bytes() == name)
}

/// Whether one of NVML's functions has a hook, or a thunk.
pub(crate) fn is_ours(name: &[u8]) -> bool {
    (name.starts_with(b"nvmlDeviceGet") && hooked(name).is_some()) || unhooked::has_thunk(name)
}

/// The hook for one of NVML's functions, or the thunk. `found` is the address that the program's look-up found.
pub(crate) fn swap(found: *mut c_void, name: &[u8]) -> Option<*mut c_void> {
    if unhooked::has_thunk(name) {
        return Some(unhooked::swap(found, name));
    }
    let (real, hook) = hooked(name)?;
    if found != hook.0 {
        real.address.store(found, Ordering::Relaxed);
    }
    Some(hook.0)
}

/// Finds another function of NVML, in the library that contains `nvml`, a function that the program called. Another library may stand
/// before that function alone.
fn helper(nvml: *const c_void, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: zeroes are a valid answer, which the call fills. The name in it is the loader's and lives as long as the library,
    // which the call finds and does not load.
    unsafe {
        let mut place: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(nvml, &raw mut place) == 0 {
            return None;
        }
        let library = libc::dlopen(place.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if library.is_null() {
            return None;
        }
        let found = c_library::dlsym_quietly(library, name);
        // The library was loaded before, and stays loaded, as the program uses it.
        libc::dlclose(library);
        let found = if found.is_null() { in_nvml(name) } else { found };
        (!found.is_null()).then_some(found)
    }
}

fn uuid_of(handle: Handle, nvml: *const c_void) -> Option<GpuUuid> {
    type Uuid = unsafe extern "C-unwind" fn(Handle, *mut c_char, c_uint) -> Return;
    let mut text = [0u8; 96];
    // SAFETY: NVML's function has this signature; a buffer of the given length; NVML ends what it writes with a zero.
    let result = unsafe {
        let uuid = std::mem::transmute::<*mut c_void, Uuid>(helper(nvml, c"nvmlDeviceGetUUID")?);
        uuid(handle, text.as_mut_ptr().cast(), text.len() as c_uint)
    };
    let text = CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?;
    (result == SUCCESS).then(|| text.parse().ok()).flatten()
}

fn index_of(handle: Handle, nvml: *const c_void) -> Option<usize> {
    type Index = unsafe extern "C-unwind" fn(Handle, *mut c_uint) -> Return;
    let mut index = 0;
    // SAFETY: NVML's function has this signature; a place for the answer.
    let result = unsafe {
        let get = std::mem::transmute::<*mut c_void, Index>(helper(nvml, c"nvmlDeviceGetIndex")?);
        get(handle, &raw mut index)
    };
    (result == SUCCESS).then_some(index as usize)
}

/// A GPU as the program sees it.
struct View {
    gpu: GpuUuid,
    /// Bytes that the program may have on it, at most what the card has.
    total: u64,
    /// The process's device, if the process uses it.
    device: Option<&'static Device>,
}

impl View {
    /// `nvml` is a function of the library that the handle belongs to. `None`: NVML's own answer is right.
    fn of(handle: Handle, nvml: *const c_void) -> Option<Self> {
        // In a forked child, a lock may be held by a thread that does not exist there.
        if lifecycle::is_forked() {
            return None;
        }
        let config = config::get().ok()?;
        let gpu = uuid_of(handle, nvml)?;
        let device = devices::by_uuid(gpu);
        // Without CUDA, the program's own index is not known; NVML's is used.
        let limit = match device {
            Some(device) => device.allocation_limit(),
            None => config.limit(index_of(handle, nvml)?),
        };
        let shared = device.is_some_and(|device| device.account().capacity().is_some());
        let total = limit.or(shared.then_some(u64::MAX))?;
        Some(Self { gpu, total, device })
    }

    /// Bytes that the tenant's processes use on it. `None`: no scheduler answers.
    fn used(&self) -> Option<u64> {
        match self.device {
            Some(device) => Some(device.account().used()),
            None => tenant(|page| page.and_then(|page| page.cell(self.gpu)).map_or(0, |seat| seat.used())),
        }
    }

    /// The tenant's processes on it, and the bytes of each. `None`: no scheduler answers.
    fn processes(&self) -> Option<Vec<(u32, u64)>> {
        match self.device.map(Device::account) {
            Some(account) => {
                let mut processes = account.tenant().map_or_else(Vec::new, |seat| seat.processes());
                let me = std::process::id();
                if !processes.iter().any(|(pid, _)| *pid == me) {
                    processes.push((me, account.allocated() - account.aside()));
                }
                Some(processes)
            }
            None => tenant(|page| {
                page.and_then(|page| page.cell(self.gpu)).map_or_else(Vec::new, |seat| seat.processes())
            }),
        }
    }
}

/// How long an answer of the scheduler is used. A program may watch memory for hours.
const FRESH: Duration = Duration::from_secs(5);

/// An answer of the scheduler. Its page is mapped while the answer lives.
struct Answer {
    asked: Instant,
    page: TenantPage<MappedPage>,
}

impl Drop for Answer {
    fn drop(&mut self) {
        if let TenantPage::Page(page) = self.page {
            // SAFETY: only looks had the page, which have borrowed the answer.
            unsafe { page.unmap() };
        }
    }
}

/// Looks at the page of this process's tenant. A tenant has none while no process of it uses a GPU. Returns `None` if no
/// scheduler answers.
///
/// Nobody waits for the lock. In a forked child, the thread that holds it does not exist, and the child asks for itself.
fn tenant<T>(look: impl FnOnce(Option<MappedPage>) -> T) -> Option<T> {
    static KNOWN: Mutex<Option<Arc<Answer>>> = Mutex::new(None);
    let is_fresh = |answer: &Arc<Answer>| answer.asked.elapsed() < FRESH;
    let known = KNOWN.try_lock().ok().and_then(|known| known.clone().filter(is_fresh));
    let answer = known.unwrap_or_else(|| {
        // The scheduler may have been replaced, and have another page.
        let answer = Arc::new(Answer { page: session::ask_for_page(), asked: Instant::now() });
        let old = KNOWN.try_lock().ok().and_then(|mut known| known.replace(Arc::clone(&answer)));
        drop(old);
        answer
    });
    match answer.page {
        TenantPage::NoAnswer => None,
        TenantPage::None => Some(look(None)),
        TenantPage::Page(page) => Some(look(Some(page))),
    }
}
