//! Peer access to memory that the library maps.
//!
//! `cuCtxEnablePeerAccess` gives a context access to what another device's context has by `cuMemAlloc`. It does not reach
//! mappings: their access is of devices, and is set for each mapping. So the library notes which contexts may reach which.
//! Wherever it maps memory of `cuMemAlloc`, at once and later, it names the devices of all that may. It takes the access
//! away when the last context of a device gives it up, or ends. A device whose [copies](crate::hooks::copies) need access
//! keeps it. Memory that the program maps itself has the access that the program gives it, as natively.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nvshare_proto::ThrottledLine;

use super::Mapped;
use crate::driver::types::{CUdevice, CUdeviceptr, CUmemAccessDesc, CUresult};
use crate::driver::{self, Relaxed};
use crate::process::lifecycle;
use crate::process::lock::lock;
use crate::process::log;
use crate::work::contexts::Context;

/// A context, and another whose memory it may reach.
#[derive(Debug)]
struct Peers {
    from: Arc<Context>,
    to: Arc<Context>,
}

static PEERS: Mutex<Vec<Peers>> = Mutex::new(Vec::new());
/// A device that copies without peer access, and another whose memory it may reach for that.
static COPIES: Mutex<Vec<(CUdevice, CUdevice)>> = Mutex::new(Vec::new());

/// The devices that may reach memory of this one, itself first.
fn reach(device: CUdevice) -> Vec<CUdevice> {
    let mut all = vec![device];
    let peers =
        lock(&PEERS).iter().map(|Peers { from, to }| (from.device(), to.device())).collect::<Vec<_>>();
    for (from, _) in peers.iter().chain(lock(&COPIES).iter()).filter(|(_, to)| *to == device) {
        if !all.contains(from) {
            all.push(*from);
        }
    }
    all
}

/// A context may reach another's memory from now on. Returns the device whose memory has one more that may reach it.
pub(crate) fn enable(from: &Arc<Context>, to: &Arc<Context>) -> Option<CUdevice> {
    let is_news = !reach(to.device()).contains(&from.device());
    lock(&PEERS).push(Peers { from: Arc::clone(from), to: Arc::clone(to) });
    is_news.then_some(to.device())
}

/// A device may reach another's memory from now on, since it copies without peer access. Returns whether this is news.
pub(crate) fn enable_copies(from: CUdevice, to: CUdevice) -> bool {
    let is_news = !reach(to).contains(&from);
    if is_news {
        lock(&COPIES).push((from, to));
    }
    is_news
}

/// A context may not reach another's memory any more. Returns the other's device, and the device that may reach less of it now.
pub(crate) fn disable(from: &Arc<Context>, to: &Arc<Context>) -> (CUdevice, CUdevice) {
    lock(&PEERS).retain(|peers| !Arc::ptr_eq(&peers.from, from) || !Arc::ptr_eq(&peers.to, to));
    (to.device(), from.device())
}

/// A context ends. Returns the result of [`disable`] for each pair that it was in.
pub(crate) fn forget_context(context: &Arc<Context>) -> Vec<(CUdevice, CUdevice)> {
    let is_its = |peers: &&Peers| Arc::ptr_eq(&peers.from, context) || Arc::ptr_eq(&peers.to, context);
    let pairs = lock(&PEERS);
    let its: Vec<_> = pairs.iter().filter(is_its).map(|p| (Arc::clone(&p.from), Arc::clone(&p.to))).collect();
    drop(pairs);
    its.iter().map(|(from, to)| disable(from, to)).collect()
}

/// Whether any device may reach another's memory.
pub(crate) fn are_any() -> bool {
    !lock(&PEERS).is_empty() || !lock(&COPIES).is_empty()
}

/// Makes memory that has been mapped on a device accessible to it, and to its peers.
pub(in crate::memory) fn allow(
    mapped: &Mapped,
    base: CUdeviceptr,
    bytes: u64,
    device: CUdevice,
) -> Result<(), CUresult> {
    if mapped.is_programs() {
        return driver::set_access(base, bytes, &[CUmemAccessDesc::read_and_write(device)]);
    }
    allow_all(base, bytes, device)
}

/// Makes a mapped range accessible to a device, and to its peers.
pub(in crate::memory) fn allow_all(base: CUdeviceptr, bytes: u64, device: CUdevice) -> Result<(), CUresult> {
    let access: Vec<_> = reach(device).into_iter().map(CUmemAccessDesc::read_and_write).collect();
    match driver::set_access(base, bytes, &access) {
        // Without this memory the program would not go on at all; it may never reach it from a peer.
        Err(error) if access.len() > 1 => {
            warn(base, bytes, error);
            driver::set_access(base, bytes, &[CUmemAccessDesc::read_and_write(device)])
        }
        set => set,
    }
}

fn warn(base: CUdeviceptr, bytes: u64, error: CUresult) {
    static FAILS: ThrottledLine = ThrottledLine::new(log::warn);
    FAILS.say(format_args!("the driver refuses peers access to {bytes} bytes at {base:#x}: {error:?}"));
}

/// Sets the access to a mapped range. The devices that may reach it get it. The one that `may_no_more` loses it, unless another of
/// its contexts may.
pub(in crate::memory) fn set(at: CUdeviceptr, bytes: u64, device: CUdevice, may_no_more: Option<CUdevice>) {
    let may_no_more = may_no_more.filter(|other| !reach(device).contains(other));
    let set = allow_all(at, bytes, device).and_then(|()| match may_no_more {
        Some(other) => driver::set_access(at, bytes, &[CUmemAccessDesc::none(other)]),
        _ => Ok(()),
    });
    if let Err(error) = set {
        warn(at, bytes, error);
    }
}

impl Mapped {
    /// [Sets](set) the access to the part of an allocation that is on the card. A chunk that comes now is waited for: it was mapped
    /// for those that could reach it before.
    pub(crate) fn set_peers(&self, base: CUdeviceptr, device: CUdevice, may_no_more: Option<CUdevice>) {
        if self.is_programs() {
            return;
        }
        let mut chunks = self.lock();
        while chunks.iter().any(|chunk| chunk.moving && chunk.physical.is_none()) && !lifecycle::is_exiting()
        {
            let wait = self.stopped.wait_timeout(chunks, Duration::from_millis(1));
            (chunks, _) = wait.unwrap_or_else(PoisonError::into_inner);
        }
        let _relaxed = Relaxed::begin();
        for chunk in chunks.iter().filter(|chunk| chunk.physical.is_some()) {
            set(base + chunk.offset, chunk.bytes, device, may_no_more);
        }
    }
}
