//! Functions that begin and end stream captures.

use std::ffi::{c_int, c_void};

use crate::driver::functions::signatures;
use crate::driver::types::{CUgraph, CUresult, CUstream};
use crate::work::stream_key::StreamKey;
use crate::work::{captures, streams};

/// Begins a capture by `call`.
fn begin_by<const PER_THREAD: bool>(stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    let stream = StreamKey::new(stream, PER_THREAD);
    captures::begin(stream, streams::kind_of(stream), call)
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn begin_v1<const PER_THREAD: bool>(
    real: signatures::cuStreamBeginCapture,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's arguments.
    begin_by::<PER_THREAD>(stream, || unsafe { real(stream) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn begin<const PER_THREAD: bool>(
    real: signatures::cuStreamBeginCapture_v2,
    stream: CUstream,
    mode: c_int,
) -> CUresult {
    // SAFETY: the caller's arguments.
    begin_by::<PER_THREAD>(stream, || unsafe { real(stream, mode) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn begin_to_graph<const PER_THREAD: bool>(
    real: signatures::cuStreamBeginCaptureToGraph,
    stream: CUstream,
    graph: CUgraph,
    dependencies: *const c_void,
    data: *const c_void,
    count: usize,
    mode: c_int,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { real(stream, graph, dependencies, data, count, mode) };
    begin_by::<PER_THREAD>(stream, call)
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn begin_again<const PER_THREAD: bool>(
    real: signatures::cuStreamBeginRecaptureToGraph,
    stream: CUstream,
    mode: c_int,
    graph: CUgraph,
    callback: *const c_void,
    data: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    begin_by::<PER_THREAD>(stream, || unsafe { real(stream, mode, graph, callback, data) })
}

/// A capture into a command buffer of a graphics interface: nothing runs before that is submitted there.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn begin_for_graphics<const PER_THREAD: bool>(
    real: signatures::cuStreamBeginCaptureToCig,
    stream: CUstream,
    params: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    begin_by::<PER_THREAD>(stream, || unsafe { real(stream, params) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn end_for_graphics<const PER_THREAD: bool>(
    real: signatures::cuStreamEndCaptureToCig,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's arguments.
    captures::end(StreamKey::new(stream, PER_THREAD), || unsafe { real(stream) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn end<const PER_THREAD: bool>(
    real: signatures::cuStreamEndCapture,
    stream: CUstream,
    graph: *mut CUgraph,
) -> CUresult {
    // SAFETY: the caller's arguments.
    captures::end(StreamKey::new(stream, PER_THREAD), || unsafe { real(stream, graph) })
}
