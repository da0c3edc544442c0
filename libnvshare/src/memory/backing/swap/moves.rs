//! Chunks on their way: out to the host, back to the card.
//!
//! Copies are begun ahead as far as the link needs to stay busy, and no further. Copies of other programs wait until all
//! queued copies are over (measured). A chunk that is out is unmapped at once, so room appears while the next ones are
//! still under way. A chunk is given up only when its copy is known to be complete, and touched only when its copy back is.

mod back;
mod out;

use std::sync::Arc;

use nvshare_proto::ThrottledLine;
use nvshare_proto::units::MIB;

use super::chunks::Cut;
use super::flights::Flight;
use crate::driver::types::CUresult;
use crate::memory::allocations::{self, Allocation};
use crate::memory::mapping::Pin;
use crate::memory::pins;
use crate::process::log;
use crate::work::contexts::{self, Context};
pub(super) use back::restore;
pub(super) use out::evict;

/// The result of an attempt to begin a move.
enum Begun {
    Flying(Flight),
    /// This chunk has nothing to move.
    Nothing,
    /// There is no room at the chunk's destination.
    Full,
    /// The process lacks room for this many bytes of the chunk.
    Lacks(u64),
    /// No more of this allocation moves.
    Stopped,
}

/// The move stops because of a driver's error, or because the context ends.
fn stop(allocation: &Allocation, error: Option<CUresult>) -> Begun {
    match error {
        Some(error) if error.ends_all_work() => pin_context(&allocation.context_to_move_in(), error),
        Some(error) => {
            static FAILS: ThrottledLine = ThrottledLine::new(log::warn);
            FAILS.say(format_args!("moving memory at {:#x}: {error:?}", allocation.base));
        }
        None => {}
    }
    Begun::Stopped
}

/// A chunk stays where it was, though a part of it may have been copied.
fn stop_at_cut(allocation: &Allocation, cut: Cut) -> Begun {
    match cut {
        Cut::Unwanted => {
            log::debug(format_args!("a move at {:#x} is given up between two of its parts", allocation.base));
            Begun::Stopped
        }
        Cut::Gone => stop(allocation, None),
        Cut::Failed(error) => stop(allocation, error),
    }
}

/// Lets contexts end between two parts of a move. Returns whether the move goes on: not if the memory is being freed.
fn may_go_on(allocation: &Allocation) -> bool {
    contexts::let_them_end(|| allocation.is_leaving());
    !allocation.is_leaving()
}

/// A context is broken: its memory is not copied any more, and counts as immovable.
pub(super) fn pin_context(context: &Arc<Context>, error: CUresult) {
    let mut bytes = 0;
    allocations::each_mapped(|allocation| {
        let is_of_context = || Arc::ptr_eq(&allocation.context_to_move_in(), context);
        if allocation.mapped.is_some() && is_of_context() && pins::pin_for(allocation, Pin::ForGood) {
            bytes += allocation.residency().resident_bytes();
        }
    });
    if bytes > 0 {
        let why =
            if error.is_of_card() { "it is lost" } else { "the program's own work has broken its context" };
        log::warn(format_args!("{} MiB stay on the card: {why} ({error:?})", bytes / MIB));
    }
}
