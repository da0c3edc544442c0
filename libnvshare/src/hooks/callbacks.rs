//! Functions of the program that the driver runs on its own threads. Those threads are [marked](crate::work::callbacks).

use std::ffi::{c_uint, c_void};
use std::mem::transmute;

use crate::driver;
use crate::driver::functions::signatures;
use crate::driver::types::{CUresult, CUstream};
use crate::work::callbacks::Running;
use crate::work::stream_key::StreamKey;

/// `CUhostFn`
type HostFunc = unsafe extern "C-unwind" fn(*mut c_void);
/// `CUstreamCallback`
type StreamCallback = unsafe extern "C-unwind" fn(CUstream, CUresult, *mut c_void);

/// The function that the program asked the driver to run, and its argument.
struct Wanted {
    function: *const c_void,
    data: *mut c_void,
}

impl Wanted {
    fn keep(function: *const c_void, data: *mut c_void) -> *mut c_void {
        Box::into_raw(Box::new(Self { function, data })).cast()
    }

    /// # Safety
    /// A pointer that [`keep`](Self::keep) returned, for the first time.
    unsafe fn take(kept: *mut c_void) -> (*const c_void, *mut c_void) {
        // SAFETY: promised by the caller; no other call takes it.
        let kept = unsafe { Box::from_raw(kept.cast::<Self>()) };
        (kept.function, kept.data)
    }
}

unsafe extern "C-unwind" fn run_host_func(kept: *mut c_void) {
    // SAFETY: the driver passes the pointer on once for each time that the library passed it to the driver.
    let (function, data) = unsafe { Wanted::take(kept) };
    let _running = Running::mark();
    // SAFETY: the program's own function, which the hook has found not to be null, and its argument.
    unsafe { transmute::<*const c_void, HostFunc>(function)(data) };
}

unsafe extern "C-unwind" fn run_callback(stream: CUstream, status: CUresult, kept: *mut c_void) {
    // SAFETY: the driver passes the pointer on once for each time that the library passed it to the driver.
    let (function, data) = unsafe { Wanted::take(kept) };
    let _running = Running::mark();
    // SAFETY: the program's own function, which the hook has found not to be null, and its arguments.
    unsafe { transmute::<*const c_void, StreamCallback>(function)(stream, status, data) };
}

/// Passes a function of the program to the driver by `call`, inside a function of the library that marks the thread
/// (`between`).
///
/// The hook passes the gate as for other work: the driver moves no managed memory of the process while such a function runs
/// (measured). A function that waited for a thread at the closed gate would keep the memory from coming back.
///
/// In a capture, the driver gets the program's own function, and the thread is not marked. A graph runs the function at each
/// launch, and the program may read and change it. The program itself orders this call against the beginning of a capture, so
/// no lock is held between the question and the call. The call may have to wait, in a full queue, for another thread of the
/// program.
fn wrapped(
    function: *const c_void,
    data: *mut c_void,
    between: *const c_void,
    stream: StreamKey,
    call: impl FnOnce(*const c_void, *mut c_void) -> CUresult,
) -> CUresult {
    if function.is_null() || driver::is_capturing(stream.handle()) {
        call(function, data)
    } else {
        // If the call reports an error of earlier work, the driver may run the function all the same. So the few bytes are
        // not freed then.
        call(between, Wanted::keep(function, data))
    }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn launch_host_func<const PER_THREAD: bool>(
    real: signatures::cuLaunchHostFunc,
    stream: CUstream,
    function: *const c_void,
    data: *mut c_void,
) -> CUresult {
    wrapped(
        function,
        data,
        run_host_func as *const c_void,
        StreamKey::new(stream, PER_THREAD),
        |function, data| {
            // SAFETY: the caller's arguments, or ours in their place.
            unsafe { real(stream, function, data) }
        },
    )
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn launch_host_func_v2<const PER_THREAD: bool>(
    real: signatures::cuLaunchHostFunc_v2,
    stream: CUstream,
    function: *const c_void,
    data: *mut c_void,
    mode: c_uint,
) -> CUresult {
    wrapped(
        function,
        data,
        run_host_func as *const c_void,
        StreamKey::new(stream, PER_THREAD),
        |function, data| {
            // SAFETY: the caller's arguments, or ours in their place.
            unsafe { real(stream, function, data, mode) }
        },
    )
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn add_callback<const PER_THREAD: bool>(
    real: signatures::cuStreamAddCallback,
    stream: CUstream,
    function: *const c_void,
    data: *mut c_void,
    flags: c_uint,
) -> CUresult {
    wrapped(
        function,
        data,
        run_callback as *const c_void,
        StreamKey::new(stream, PER_THREAD),
        |function, data| {
            // SAFETY: the caller's arguments, or ours in their place.
            unsafe { real(stream, function, data, flags) }
        },
    )
}
