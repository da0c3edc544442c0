//! Names of streams, and the ways in which streams are created.

use crate::driver::types::{CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, CUstream};

/// A stream by its handle. Default streams are named by their explicit handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StreamKey(usize);

impl StreamKey {
    pub(crate) const LEGACY: Self = Self(CU_STREAM_LEGACY);
    pub(crate) const PER_THREAD: Self = Self(CU_STREAM_PER_THREAD);

    /// `per_thread`: the null stream means the per-thread stream and not the legacy stream.
    #[inline(always)]
    pub(crate) fn new(stream: CUstream, per_thread: bool) -> Self {
        match stream.0 as usize {
            0 if per_thread => Self::PER_THREAD,
            0 => Self::LEGACY,
            address => Self(address),
        }
    }

    /// The null stream means the legacy stream.
    pub(crate) fn with_legacy(stream: CUstream) -> Self {
        Self::new(stream, false)
    }

    /// The null stream means the per-thread stream.
    pub(crate) fn with_per_thread(stream: CUstream) -> Self {
        Self::new(stream, true)
    }

    #[inline(always)]
    pub(crate) fn address(self) -> usize {
        self.0
    }

    /// Whether it is the per-thread stream of the calling thread.
    pub(crate) fn is_per_thread(self) -> bool {
        self == Self::PER_THREAD
    }

    pub(crate) fn handle(self) -> CUstream {
        CUstream(self.0 as *mut _)
    }
}

/// How a stream was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The stream synchronises with its context's legacy stream.
    Blocking,
    /// The stream does not synchronise with it.
    NonBlocking,
    /// A function without a hook created it.
    Foreign,
}
