//! The program's functions that the driver runs on threads of its own.
//!
//! A drain waits for the work on a stream, and so for the callbacks in it: a callback that slept at the gate, or
//! waited for room, would wait for itself. So those threads are marked, never wait, and get the driver's own
//! answers.

use std::cell::Cell;
use std::ffi::{c_int, c_uint, c_void};
use std::mem::transmute;

use crate::capture;
use crate::cuda::{CUresult, CUstream};
use crate::streams::StreamKey;

type LaunchHostFunc = unsafe extern "C-unwind" fn(CUstream, *const c_void, *mut c_void) -> CUresult;
type AddCallback = unsafe extern "C-unwind" fn(CUstream, *const c_void, *mut c_void, c_uint) -> CUresult;
/// `CUhostFn`
type HostFunc = unsafe extern "C-unwind" fn(*mut c_void);
/// `CUstreamCallback`
type StreamCallback = unsafe extern "C-unwind" fn(CUstream, CUresult, *mut c_void);

thread_local! {
    static RUNNING: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is the driver's, and runs a callback.
pub(crate) fn running() -> bool {
    RUNNING.try_with(Cell::get).unwrap_or(false)
}

/// While this lives, the thread is marked. What unwinds through the callback leaves no mark.
struct Mark;

impl Mark {
    fn set() -> Self {
        let _ = RUNNING.try_with(|running| running.set(true));
        Self
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        let _ = RUNNING.try_with(|running| running.set(false));
    }
}

/// What the program asked to be run.
struct Wanted {
    function: *const c_void,
    data: *mut c_void,
    /// It runs once. In a graph it runs each time that the graph does: nobody tells when the last time was.
    once: bool,
}

impl Wanted {
    fn keep(function: *const c_void, data: *mut c_void, stream: StreamKey) -> *mut c_void {
        let once = !capture::is_capturing(stream);
        Box::into_raw(Box::new(Self { function, data, once })).cast()
    }

    /// # Safety
    /// What [`keep`](Self::keep) returned, and if it runs once, for the first time.
    unsafe fn take(kept: *mut c_void) -> (*const c_void, *mut c_void) {
        let kept = kept.cast::<Self>();
        // SAFETY: promised by the caller.
        let (function, data, once) = unsafe { ((*kept).function, (*kept).data, (*kept).once) };
        if once {
            // SAFETY: as above, and nobody else will come for it.
            drop(unsafe { Box::from_raw(kept) });
        }
        (function, data)
    }
}

unsafe extern "C-unwind" fn run_host_func(kept: *mut c_void) {
    // SAFETY: the driver hands on what it was given, once for each time that it was told to.
    let (function, data) = unsafe { Wanted::take(kept) };
    let _mark = Mark::set();
    // SAFETY: the program's own function and argument, not null: the hook looked.
    unsafe { transmute::<*const c_void, HostFunc>(function)(data) };
}

unsafe extern "C-unwind" fn run_callback(stream: CUstream, status: CUresult, kept: *mut c_void) {
    // SAFETY: the driver hands on what it was given, once for each time that it was told to.
    let (function, data) = unsafe { Wanted::take(kept) };
    let _mark = Mark::set();
    // SAFETY: the program's own function and arguments, not null: the hook looked.
    unsafe { transmute::<*const c_void, StreamCallback>(function)(stream, status, data) };
}

/// Has the driver run a function of the program between ours.
///
/// # Safety
/// `call` hands on its argument to the driver as what its function gets.
unsafe fn wrapped(
    function: *const c_void,
    data: *mut c_void,
    stream: StreamKey,
    call: impl FnOnce(*mut c_void) -> CUresult,
) -> CUresult {
    let kept = Wanted::keep(function, data, stream);
    let result = call(kept);
    if result != CUresult::SUCCESS {
        // SAFETY: the driver refused it and will not run it.
        drop(unsafe { Box::from_raw(kept.cast::<Wanted>()) });
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn launch_host_func<const TWIN: bool>(
    real: LaunchHostFunc,
    stream: CUstream,
    function: *const c_void,
    data: *mut c_void,
) -> CUresult {
    if function.is_null() {
        // SAFETY: the caller's arguments.
        return unsafe { real(stream, function, data) };
    }
    // SAFETY: what the driver runs is given what was kept for it.
    unsafe {
        wrapped(function, data, StreamKey::new(stream, TWIN), |kept| {
            real(stream, run_host_func as *const c_void, kept)
        })
    }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn add_callback<const TWIN: bool>(
    real: AddCallback,
    stream: CUstream,
    function: *const c_void,
    data: *mut c_void,
    flags: c_uint,
) -> CUresult {
    if function.is_null() {
        // SAFETY: the caller's arguments.
        return unsafe { real(stream, function, data, flags) };
    }
    // SAFETY: what the driver runs is given what was kept for it.
    unsafe {
        wrapped(function, data, StreamKey::new(stream, TWIN), |kept| {
            real(stream, run_callback as *const c_void, kept, flags)
        })
    }
}

const _: () = assert!(size_of::<c_int>() == size_of::<CUresult>());
