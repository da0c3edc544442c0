//! The program's functions that the driver runs on threads of its own: those threads are [marked](crate::work::callbacks).

use std::ffi::{c_uint, c_void};
use std::mem::transmute;

use crate::driver;
use crate::driver::functions::signatures;
use crate::driver::types::{CUresult, CUstream};
use crate::session;
use crate::work::callbacks::Running;
use crate::work::gate::{self, FrameMark};
use crate::work::stream_key::StreamKey;

/// `CUhostFn`
type HostFunc = unsafe extern "C-unwind" fn(*mut c_void);
/// `CUstreamCallback`
type StreamCallback = unsafe extern "C-unwind" fn(CUstream, CUresult, *mut c_void);

/// What the program asked to be run.
struct Wanted {
    function: *const c_void,
    data: *mut c_void,
}

impl Wanted {
    fn keep(function: *const c_void, data: *mut c_void) -> *mut c_void {
        Box::into_raw(Box::new(Self { function, data })).cast()
    }

    /// # Safety
    /// What [`keep`](Self::keep) returned, for the first time.
    unsafe fn take(kept: *mut c_void) -> (*const c_void, *mut c_void) {
        // SAFETY: promised by the caller; nobody else will come for it.
        let kept = unsafe { Box::from_raw(kept.cast::<Self>()) };
        (kept.function, kept.data)
    }
}

unsafe extern "C-unwind" fn run_host_func(kept: *mut c_void) {
    // SAFETY: the driver hands on what it was given, once for each time that it was told to.
    let (function, data) = unsafe { Wanted::take(kept) };
    let _running = Running::mark();
    // SAFETY: the program's own function and argument, not null: the hook looked.
    unsafe { transmute::<*const c_void, HostFunc>(function)(data) };
}

unsafe extern "C-unwind" fn run_callback(stream: CUstream, status: CUresult, kept: *mut c_void) {
    // SAFETY: the driver hands on what it was given, once for each time that it was told to.
    let (function, data) = unsafe { Wanted::take(kept) };
    let _running = Running::mark();
    // SAFETY: the program's own function and arguments, not null: the hook looked.
    unsafe { transmute::<*const c_void, StreamCallback>(function)(stream, status, data) };
}

/// Has the driver run a function of the program, by `call`, between two of ours.
///
/// It passes the gate as other work does: the driver moves no managed memory of the process while such a function runs
/// (measured), so one that waited for a thread at the closed gate would keep the memory from coming back.
///
/// Not in a capture: in a graph it runs as often as the graph does, and the program may ask for it and change it. It is
/// the program's own there, and unmarked. Whether the stream captures is the program's to order with this call, so
/// nothing is locked between the look and the call: the call may wait, in a full queue, for another thread of the program.
fn wrapped(
    function: *const c_void,
    data: *mut c_void,
    between: *const c_void,
    stream: StreamKey,
    call: impl FnOnce(*const c_void, *mut c_void) -> CUresult,
) -> CUresult {
    let mark = FrameMark::new();
    let pass = gate::enter(stream, &mark, session::start);
    let result = if function.is_null() || driver::is_capturing(stream.handle()) {
        call(function, data)
    } else {
        // If it fails, it may be for what went wrong earlier, and be run all the same: then the few bytes stay.
        call(between, Wanted::keep(function, data))
    };
    gate::leave(pass, &mark, result);
    result
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
