//! Functions that create and end streams.

use std::ffi::{c_int, c_uint};

use crate::driver;
use crate::driver::functions::signatures;
use crate::driver::types::{CU_STREAM_NON_BLOCKING, CUevent, CUgreenCtx, CUresult, CUstream};
use crate::work::stream_key::Kind;
use crate::work::streams;
use crate::work::{captures, contexts};

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn create(
    real: signatures::cuStreamCreate,
    stream: *mut CUstream,
    flags: c_uint,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(stream, flags) };
    // SAFETY: the driver answered for this place.
    unsafe { made(result, stream, flags) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn create_with_priority(
    real: signatures::cuStreamCreateWithPriority,
    stream: *mut CUstream,
    flags: c_uint,
    priority: c_int,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(stream, flags, priority) };
    // SAFETY: the driver answered for this place.
    unsafe { made(result, stream, flags) }
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn create_green(
    real: signatures::cuGreenCtxStreamCreate,
    stream: *mut CUstream,
    green: CUgreenCtx,
    flags: c_uint,
    priority: c_int,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(stream, green, flags, priority) };
    // SAFETY: the driver answered for this place.
    unsafe { made(result, stream, flags) }
}

/// # Safety
/// `stream` is valid if `result` is success.
unsafe fn made(result: CUresult, stream: *mut CUstream, flags: c_uint) -> CUresult {
    if result == CUresult::SUCCESS && !stream.is_null() {
        // SAFETY: the driver wrote it.
        let stream = unsafe { *stream };
        let kind = if flags & CU_STREAM_NON_BLOCKING != 0 { Kind::NonBlocking } else { Kind::Blocking };
        let of_stream = driver::context_of(stream).ok();
        contexts::learn_current();
        streams::made(stream, kind, of_stream.and_then(contexts::find));
    }
    result
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn destroy(real: signatures::cuStreamDestroy, stream: CUstream) -> CUresult {
    // SAFETY: the caller's argument.
    streams::end(stream, || unsafe { real(stream) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn wait_event(
    real: signatures::cuStreamWaitEvent,
    stream: CUstream,
    event: CUevent,
    flags: c_uint,
) -> CUresult {
    // SAFETY: the caller's arguments.
    captures::spread(stream, || unsafe { real(stream, event, flags) })
}
