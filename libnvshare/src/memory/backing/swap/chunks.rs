//! Chunks that move: who may move one, and the copies of its granules.

use std::sync::Arc;

use crate::driver::types::{CUdeviceptr, CUresult, CUstream};
use crate::memory::allocations::Allocation;
use crate::memory::mapping::copies::HostCopy;
use crate::memory::mapping::host_pool::Slot;
use crate::memory::mapping::{Chunk, GRANULE, Mapped};
use crate::process::threads;
use crate::work::contexts::Context;
use crate::work::event::{Event, Outcome};

/// Takes a chunk for a move, if `look` finds something to move there; returns its result.
pub(super) fn take<T>(
    allocation: &Allocation,
    mapped: &Mapped,
    index: usize,
    look: impl FnOnce(&mut Chunk) -> Option<T>,
) -> Option<T> {
    let mut chunks = mapped.lock();
    let chunk = chunks.get_mut(index).filter(|chunk| !chunk.moving)?;
    if allocation.is_leaving() {
        return None;
    }
    let taken = look(chunk)?;
    chunk.moving = true;
    Some(taken)
}

impl Mapped {
    /// The number of chunks.
    pub(super) fn count(&self) -> usize {
        self.lock().len()
    }

    /// The chunk's move is over; `settle` notes where the chunk is now.
    pub(super) fn settle<T>(&self, index: usize, settle: impl FnOnce(&mut Chunk) -> T) -> Option<T> {
        let mut chunks = self.lock();
        let chunk = chunks.get_mut(index)?;
        chunk.moving = false;
        chunk.guessed = false;
        let settled = settle(chunk);
        drop(chunks);
        self.stopped.notify_all();
        Some(settled)
    }
}

/// Begins work on the library's own stream; the event is behind it.
pub(super) fn begin(
    context: &Arc<Context>,
    work: impl FnOnce(CUstream) -> Result<(), CUresult>,
) -> Result<Event, CUresult> {
    context.begin_move(|stream| {
        work(stream)?;
        Event::behind_stream(context, stream)
    })
}

/// Waits for work that was begun. With an error it is over as well.
pub(super) fn wait(behind: Option<&Event>) -> Result<(), Option<CUresult>> {
    let Some(behind) = behind else { return Ok(()) };
    loop {
        match behind.outcome() {
            Outcome::Done => return Ok(()),
            Outcome::NotYet => threads::pause(),
            Outcome::Failed(error) => {
                // An event that cannot be queried says nothing about the work.
                quiesce(behind.context());
                return Err(error);
            }
        }
    }
}

/// Waits for work of the library's own that no event tells of: it must not reach memory that belongs to others by then.
pub(super) fn quiesce(context: &Context) {
    let _ = context.with(|| context.move_in_order(|_| Ok(())));
}

/// What is done with a granule that moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Nothing,
    Zero,
    /// It is copied to or from a slot.
    Copied(Slot),
}

impl From<&HostCopy> for Part {
    fn from(copy: &HostCopy) -> Self {
        match copy {
            HostCopy::None => Self::Nothing,
            HostCopy::Zero => Self::Zero,
            HostCopy::Data { slot, .. } => Self::Copied(*slot),
        }
    }
}

impl Part {
    /// Whether one call does this granule and the next one.
    fn goes_with(self, next: Self) -> bool {
        match (self, next) {
            (Self::Copied(slot), Self::Copied(next)) => slot.is_before(next),
            _ => self == next,
        }
    }
}

/// Calls `each` for each run of granules from an address on that one call can do: with the first, the run's address and its bytes.
pub(super) fn copy_parts(
    at: CUdeviceptr,
    parts: impl Iterator<Item = Part>,
    each: impl Fn(Part, CUdeviceptr, u64) -> Result<(), CUresult>,
) -> Result<(), CUresult> {
    let parts: Vec<Part> = parts.collect();
    let mut at = at;
    for run in parts.chunk_by(|part, next| part.goes_with(*next)) {
        let bytes = run.len() as u64 * GRANULE;
        if let Some(first) = run.first() {
            each(*first, at, bytes)?;
        }
        at += bytes;
    }
    Ok(())
}
