//! Stream captures that begin and end.

use std::ffi::{c_int, c_void};

use crate::driver::types::{CUgraph, CUresult, CUstream};
use crate::work::stream_key::StreamKey;
use crate::work::{captures, streams};

type BeginV1 = unsafe extern "C-unwind" fn(CUstream) -> CUresult;
type Begin = unsafe extern "C-unwind" fn(CUstream, c_int) -> CUresult;
type BeginToGraph =
    unsafe extern "C-unwind" fn(CUstream, CUgraph, *const c_void, *const c_void, usize, c_int) -> CUresult;
type End = unsafe extern "C-unwind" fn(CUstream, *mut CUgraph) -> CUresult;

/// Begins a capture by `call`.
fn begin_by<const PER_THREAD: bool>(stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    let stream = StreamKey::new(stream, PER_THREAD);
    captures::begin(stream, streams::kind_of(stream), call)
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn begin_v1<const PER_THREAD: bool>(real: BeginV1, stream: CUstream) -> CUresult {
    // SAFETY: the caller's arguments.
    begin_by::<PER_THREAD>(stream, || unsafe { real(stream) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn begin<const PER_THREAD: bool>(real: Begin, stream: CUstream, mode: c_int) -> CUresult {
    // SAFETY: the caller's arguments.
    begin_by::<PER_THREAD>(stream, || unsafe { real(stream, mode) })
}

/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn begin_to_graph<const PER_THREAD: bool>(
    real: BeginToGraph,
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
pub(crate) unsafe fn end<const PER_THREAD: bool>(
    real: End,
    stream: CUstream,
    graph: *mut CUgraph,
) -> CUresult {
    // SAFETY: the caller's arguments.
    captures::end(StreamKey::new(stream, PER_THREAD), || unsafe { real(stream, graph) })
}
