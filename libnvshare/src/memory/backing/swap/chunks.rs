//! Chunks that move: how a move takes one and ends, and the copies of its granules.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use nvshare_proto::units::MIB;

use crate::driver::types::{CUdeviceptr, CUresult, CUstream};
use crate::memory::allocations::Allocation;
use crate::memory::mapping::copies::HostCopy;
use crate::memory::mapping::host_pool::Slot;
use crate::memory::mapping::{Chunk, GRANULE, Mapped};
use crate::process::{lifecycle, threads};
use crate::work::contexts::Context;
use crate::work::event::{Event, Outcome};
use crate::work::life::Gone;

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

/// Bytes of a chunk that are begun at a time. Memory that others may get is one chunk, however large it is.
pub(super) const PART: u64 = 32 * MIB;
/// The number of parts of a chunk that are under way at a time. The link stays busy, and an unwanted move ends soon.
const PARTS_IN_FLIGHT: usize = 2;

/// Chunks of fewer bytes share an event, so that its cost is paid once for this many bytes.
pub(super) const BATCH: u64 = 16 * MIB;

/// Why a chunk does not move.
#[derive(Debug)]
pub(super) enum Cut {
    /// The move is not wanted any more.
    Unwanted,
    /// The context ends.
    Gone,
    /// The driver's error, if it tells one.
    Failed(Option<CUresult>),
}

/// Begins the work on a chunk at an address, part by part; `goes_on` is asked before each part but the first. `work` is told which
/// granules a part has, and its address. Returns the event behind the last part; none: the chunk is smaller than a [`BATCH`], and an event
/// has to be [recorded](event_behind) later. With an error, all of it is over.
pub(super) fn in_parts(
    context: &Arc<Context>,
    at: CUdeviceptr,
    bytes: u64,
    goes_on: impl Fn() -> bool,
    work: impl Fn(Range<usize>, CUdeviceptr, CUstream) -> Result<(), CUresult>,
) -> Result<Option<Event>, Cut> {
    let mut under_way = VecDeque::new();
    let mut one = |from: u64| {
        if under_way.len() == PARTS_IN_FLIGHT {
            wait(under_way.pop_front().as_ref()).map_err(Cut::Failed)?;
        }
        if from > 0 && !goes_on() {
            return Err(Cut::Unwanted);
        }
        let granules = (from / GRANULE) as usize..(bytes.min(from + PART) / GRANULE) as usize;
        match context.with(|| begin(context, |stream| work(granules, at + from, stream))) {
            Ok(Ok(event)) => under_way.push_back(event),
            Ok(Err(error)) => return Err(Cut::Failed(Some(error))),
            Err(_) => return Err(Cut::Gone),
        }
        Ok(())
    };
    let small =
        || context.with(|| context.begin_move(|stream| work(0..(bytes / GRANULE) as usize, at, stream)));
    let begun = if bytes < BATCH {
        match small() {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(Cut::Failed(Some(error))),
            Err(_) => Err(Cut::Gone),
        }
    } else {
        (0..bytes).step_by(PART as usize).try_for_each(&mut one)
    };
    if let Err(cut) = begun {
        // While the context ends, nothing else tells when its copies are over.
        under_way.iter().for_each(|event| _ = wait(Some(event)));
        // Some copies of the last part may have begun before one failed.
        quiesce(context);
        return Err(cut);
    }
    Ok(under_way.pop_back())
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

/// Records an event behind what was begun in a context. With an error, that is over.
pub(super) fn event_behind(context: &Arc<Context>) -> Result<Event, Option<CUresult>> {
    match context.with(|| begin(context, |_| Ok(()))) {
        Ok(Ok(event)) => Ok(event),
        Ok(Err(error)) => {
            quiesce(context);
            Err(Some(error))
        }
        Err(_) => {
            quiesce(context);
            Err(None)
        }
    }
}

/// Waits for work of the library's own that no event tells of: it must not reach memory that belongs to others by then. With
/// its context it is over.
pub(super) fn quiesce(context: &Context) {
    while !lifecycle::is_exiting() {
        match context.with(|| context.move_in_order(|_| Ok(()))) {
            Err(Gone::Ending) => threads::pause(),
            _ => return,
        }
    }
}

/// The treatment of a granule that moves.
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
