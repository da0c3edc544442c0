//! Copies that the driver refuses because the library maps the memory.
//!
//! The driver copies memory of `cuMemAlloc` from card to card, and between the host and a card whose context is not current, without
//! peer access. Copies of mapped memory by a card without access are refused, but for those that name both contexts. The answer is
//! INVALID_VALUE, before anything is done (measured on two H200s). So a copy of bytes from device memory to device memory names
//! the contexts then. For other copies, such as those of the host, the card gains access, and the hook calls again. The same holds
//! for copies of graphs. A copy that names both contexts would end a capture, and a refusal leaves it as it is (measured). A card
//! keeps its access, and its kernels reach the memory as well; natively they would have to be given access. Cards without a way to
//! each other's memory cannot gain it, and the driver's answer stands.

use nvshare_proto::MemoryMode;

use super::contexts::{ACCESS_CHANGES, set_peers};
use super::pointers;
use crate::driver::types::{CUcontext, CUdeviceptr, CUresult, CUstream};
use crate::driver::{self, functions};
use crate::memory::allocations::Kind;
use crate::memory::mapping::{Mapped, peers};
use crate::memory::{devices, imports};
use crate::process::lifecycle;
use crate::process::lock::lock;
use crate::work::{callbacks, captures, contexts};

/// Whether the process has several cards. The copy may be the first that the program does with one of them.
fn are_several() -> bool {
    devices::all().nth(1).is_some() && !lifecycle::is_forked()
}

/// The context with which memory of `cuMemAlloc` ends, if the library maps it; or the one in which another process's was opened.
fn owner(address: CUdeviceptr) -> Option<CUcontext> {
    let Some(allocation) = pointers::allocation_of(address) else { return imports::context_of(address) };
    if allocation.kind != Kind::Mapped {
        return None;
    }
    let is_programs = allocation.mapped.as_ref().is_some_and(Mapped::is_programs);
    (!is_programs).then(|| allocation.context.handle())
}

/// The owners of both ends of a copy.
fn owners(to: CUdeviceptr, from: CUdeviceptr) -> Option<(CUcontext, CUcontext)> {
    if !are_several() {
        return None;
    }
    owner(to).zip(owner(from))
}

/// Makes a refused copy behind all work of both contexts. INVALID_VALUE: it is not one between two parts of such memory.
#[cold]
#[inline(never)]
pub(crate) fn at_once(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, per_thread: bool) -> CUresult {
    let call = if per_thread { functions::cuMemcpyPeer_ptds.get() } else { functions::cuMemcpyPeer.get() };
    let Some(((into, of), call)) = owners(to, from).zip(call) else { return CUresult::INVALID_VALUE };
    // SAFETY: the program's own arguments, and the contexts of this memory. The memory ends with its context, and the program promises
    // that the memory lives through its call.
    unsafe { call(to, into, from, of, bytes) }
}

/// The same for a copy in a stream's order. Nor is it made in a capture.
#[cold]
#[inline(never)]
pub(crate) fn in_order(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult {
    if captures::open() > 0 && driver::is_capturing(stream) {
        return CUresult::INVALID_VALUE;
    }
    let call = functions::cuMemcpyPeerAsync.get();
    let Some(((into, of), call)) = owners(to, from).zip(call) else { return CUresult::INVALID_VALUE };
    // SAFETY: as above; the stream is the caller's.
    unsafe { call(to, into, from, of, bytes, stream) }
}

/// The driver has refused a copy in a stream: gives the stream's card access to what the library maps on the program's other
/// cards. Returns whether it has some now, so that the copy may succeed.
#[cold]
#[inline(never)]
pub(crate) fn gain_access(stream: CUstream) -> bool {
    are_several() && driver::context_of(stream).is_ok_and(gain_access_of)
}

/// The same for a copy of a graph, which runs in this context; null: in the current one.
#[cold]
#[inline(never)]
pub(crate) fn gain_access_in(context: CUcontext) -> bool {
    are_several()
        && if context == CUcontext::NULL { gain_access(CUstream::NULL) } else { gain_access_of(context) }
}

fn gain_access_of(context: CUcontext) -> bool {
    if callbacks::are_running() {
        return false;
    }
    let Some(from) = contexts::find(context) else { return false };
    let is_other = |device: &&devices::Device| {
        device.ordinal != from.device()
            && (device.memory == MemoryMode::Swap || imports::are_any_on(device.ordinal))
            && driver::can_access_peer(from.device(), device.ordinal)
    };
    let _alone = lock(&ACCESS_CHANGES);
    let mut has_access = false;
    for device in devices::used().filter(is_other) {
        if peers::enable_copies(from.device(), device.ordinal) {
            set_peers(device.ordinal, None);
        }
        has_access = true;
    }
    has_access
}
