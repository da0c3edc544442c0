//! The memory of this process that others may get, by the number of the allocation.
//!
//! Others get it by descriptors, which keep memory alive. They are made when the program asks for a handle. While another process has
//! the memory, it stays on the card. Otherwise it moves like all memory: the descriptors are closed when it leaves, and
//! [made anew](renew) when a process asks for it later. Memory that another process has mapped lives on after its free.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_int;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, TryLockError, Weak};

use nvshare_proto::ThrottledLine;

use super::allocations::Allocation;
use super::handles::{Extent, Handle};
use super::loans::Loans;
use super::sharers::Sharing;
use super::{loans, pins};
use crate::driver::Relaxed;
use crate::driver::types::{CUipcMemHandle, CUresult};
use crate::process::answering::{self, Asker, Tasks};
use crate::process::descriptor::{self, Held};
use crate::process::lock::lock;
use crate::process::{lifecycle, log};

/// The descriptors of memory: of an allocation, or of a slab.
///
/// The driver's descriptors are all of one file, so a number that the program has closed, and has anew, cannot be told from
/// it. A program that closes what it does not know closes the socket as well, which has a file of its own. So without the
/// socket that was there when they were made, the numbers are neither used nor closed.
#[derive(Debug)]
pub(crate) struct Export {
    /// The name at which the process listened.
    made_at: answering::Name,
    parts: Vec<(u64, Held)>,
}

impl Export {
    /// The descriptors, if the program has not closed any.
    fn numbers(&self) -> Option<Vec<c_int>> {
        let is_there = answering::own_name() == Some(self.made_at);
        is_there.then(|| self.parts.iter().map(|(_, descriptor)| descriptor.get()).collect())?
    }

    pub(crate) fn is_intact(&self) -> bool {
        self.numbers().is_some()
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        if answering::own_name() != Some(self.made_at) {
            self.parts.iter().for_each(|(_, descriptor)| descriptor.forget());
        }
    }
}

/// An allocation with a handle.
#[derive(Debug)]
struct Entry {
    /// The number of the allocation or slab that has the memory.
    holder: u64,
    offset: u64,
    asked: u64,
    secret: [u8; 16],
    /// The program has freed it: others get it no more, and those that have it may return it.
    is_freed: bool,
}

/// An allocation or slab that others may get.
#[derive(Debug)]
struct Holder {
    memory: Weak<Allocation>,
    /// The name at which the process listened when the last handle was made.
    made_at: answering::Name,
    /// None: the memory has left the card since they were made.
    export: Option<Arc<Export>>,
    loans: Loans,
    /// While there are loans: with those that got the memory by each name.
    sharing: Vec<(answering::Name, Sharing)>,
}

impl Holder {
    /// Keeps the memory on the card while another process has it.
    fn settle(&mut self) {
        if self.loans.is_empty() {
            self.sharing.clear();
        } else if self.sharing.iter().all(|(name, _)| *name != self.made_at) {
            self.sharing.push((self.made_at, Sharing::begin(&self.made_at)));
        }
        let Some(memory) = self.memory.upgrade() else { return };
        if self.loans.is_empty() { pins::take_back(&memory) } else { pins::lend(&memory) }
    }

    /// Whether the numbers of all descriptors that are kept here are the library's still.
    fn is_known(&self) -> bool {
        answering::own_name() == Some(self.made_at)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        if !self.is_known() {
            self.loans.forget_descriptors();
        }
    }
}

#[derive(Debug)]
struct Exports {
    entries: BTreeMap<u64, Entry>,
    holders: BTreeMap<u64, Holder>,
}

impl Exports {
    /// The entry that a handle is of.
    fn entry(&self, handle: &Handle) -> Option<&Entry> {
        self.entries.get(&handle.allocation).filter(|entry| agree(&entry.secret, &handle.secret))
    }

    /// The same, while others may get it.
    fn given(&self, handle: &Handle) -> Option<&Entry> {
        self.entry(handle).filter(|entry| !entry.is_freed)
    }

    /// Forgets what nobody can get, and nobody has. Returns descriptors, which are closed without the lock.
    fn tidy(&mut self, number: u64) -> Option<Arc<Export>> {
        let holder = self.holders.get_mut(&number)?;
        let is_its = |entry: &Entry| entry.holder == number;
        let can_be_got = self.entries.values().any(|entry| is_its(entry) && !entry.is_freed);
        let export = if can_be_got { None } else { holder.export.take() };
        if holder.loans.is_empty() {
            self.entries.retain(|_, entry| !is_its(entry) || !entry.is_freed);
            if !can_be_got {
                self.holders.remove(&number);
            }
        }
        export
    }
}

static EXPORTS: Mutex<Exports> = Mutex::new(Exports { entries: BTreeMap::new(), holders: BTreeMap::new() });

/// The handle of an allocation, if others can get its memory by it.
pub(crate) fn handle_of(allocation: u64) -> Option<CUipcMemHandle> {
    let exports = lock(&EXPORTS);
    let Entry { holder, secret, .. } = exports.entries.get(&allocation).filter(|entry| !entry.is_freed)?;
    let holder = exports.holders.get(holder)?;
    let can_be_got = holder.export.as_ref().map_or_else(|| holder.is_known(), |export| export.is_intact());
    let handle = Handle { exporter: holder.made_at, allocation, secret: *secret };
    can_be_got.then(|| handle.bytes())
}

/// The descriptors and the thread that an export needs.
#[derive(Debug)]
pub(crate) struct Means {
    name: answering::Name,
    secret: [u8; 16],
    /// The number of descriptors that exports may have in addition.
    pub(crate) descriptors: usize,
}

impl Means {
    /// Begins to answer, if the process does not, or if the program has closed the socket.
    ///
    /// # Errors
    /// The system's: no descriptor, no thread, or no random numbers.
    pub(super) fn get(tasks: Tasks) -> std::io::Result<Self> {
        let name = answering::listen(tasks)?;
        let secret = answering::random().ok_or(std::io::ErrorKind::WouldBlock)?;
        Ok(Self { name, secret, descriptors: descriptors_left() })
    }
}

/// The number of descriptors that exports may have in addition.
pub(super) fn descriptors_left() -> usize {
    let most = usize::try_from(descriptor::limit() / 2).unwrap_or(usize::MAX);
    most.saturating_sub(open_descriptors())
}

/// The number of descriptors of all exports, and of the processes that have some memory.
fn open_descriptors() -> usize {
    let exports = lock(&EXPORTS);
    let all = exports.holders.values().filter_map(|holder| holder.export.as_ref());
    let parts: usize = all.map(|export| export.parts.len()).sum();
    parts + loans::descriptors()
}

/// Whether others may get memory of the process.
pub(crate) fn has_any() -> bool {
    !lock(&EXPORTS).holders.is_empty()
}

/// The descriptors of an allocation or slab, if it has any. They may not be intact any more.
pub(crate) fn find(holder: u64) -> Option<Arc<Export>> {
    lock(&EXPORTS).holders.get(&holder)?.export.clone()
}

/// Notes descriptors of the parts of an allocation or slab.
pub(crate) fn describe(means: &Means, parts: Vec<(u64, OwnedFd)>) -> Arc<Export> {
    made(means.name, parts)
}

fn made(made_at: answering::Name, parts: Vec<(u64, OwnedFd)>) -> Arc<Export> {
    let parts = parts.into_iter().map(|(bytes, descriptor)| (bytes, Held::new(descriptor))).collect();
    Arc::new(Export { made_at, parts })
}

/// Others may get an allocation, which is at an offset in the memory of a holder, from now on. One that they could get before keeps its
/// secret, and others in the same memory get its new descriptors.
pub(crate) fn add(
    allocation: &Allocation,
    holder: &Arc<Allocation>,
    export: &Arc<Export>,
    offset: u64,
    asked: u64,
    means: &Means,
) {
    let mut exports = lock(&EXPORTS);
    let secret = exports.entries.get(&allocation.id).map_or(means.secret, |entry| entry.secret);
    let entry = Entry { holder: holder.id, offset, asked, secret, is_freed: false };
    exports.entries.insert(allocation.id, entry);
    let new = || Holder {
        memory: Arc::downgrade(holder),
        made_at: means.name,
        export: None,
        loans: Loans::default(),
        sharing: Vec::new(),
    };
    let known = exports.holders.entry(holder.id).or_insert_with(new);
    if !known.is_known() {
        known.loans.forget_descriptors();
    }
    known.made_at = means.name;
    // Descriptors are closed without the lock.
    let old = known.export.replace(Arc::clone(export));
    drop(exports);
    drop(old);
}

/// The allocation has ended: nobody gets it any more. Those that have it keep it.
pub(crate) fn forget(allocation: u64) {
    let mut exports = lock(&EXPORTS);
    let freed = exports.entries.get_mut(&allocation).map(|entry| {
        entry.is_freed = true;
        entry.holder
    });
    let gone = exports.holders.remove(&allocation);
    if gone.is_some() {
        exports.entries.retain(|_, entry| entry.holder != allocation);
    }
    let export = freed.and_then(|holder| exports.tidy(holder));
    drop(exports);
    // Descriptors are closed without the lock.
    drop((gone, export));
}

/// Whether two secrets are the same, in the same time for each that is not.
fn agree(one: &[u8; 16], other: &[u8; 16]) -> bool {
    one.iter().zip(other).fold(0, |differ, (one, other)| differ | (one ^ other)) == 0
}

/// The answer to a process that has asked for memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Given {
    /// The memory, or that there is none.
    Answered,
    /// None yet: the memory has no descriptors now.
    NotYet,
}

/// A process gets the memory of a handle. Returns the descriptors of it, and the memory's extent.
///
/// # Errors
/// The process gets none, or none yet.
fn begin_loan(handle: &Handle, process: libc::pid_t) -> Result<(Arc<Export>, Extent), Given> {
    let mut exports = lock(&EXPORTS);
    let &Entry { holder: number, offset, asked, .. } = exports.given(handle).ok_or(Given::Answered)?;
    let holder = exports.holders.get_mut(&number).ok_or(Given::Answered)?;
    let export = holder.export.clone().ok_or(Given::NotYet)?;
    let is_there = holder.loans.add(process);
    // Processes that have ended have lost their loans, whether or not there is a new one.
    holder.settle();
    if is_there {
        let parts = export.parts.iter().map(|(bytes, _)| *bytes).collect();
        return Ok((export, Extent { offset, asked, parts }));
    }
    let gone = exports.tidy(number);
    drop(exports);
    // Descriptors are closed without the lock.
    drop((export, gone));
    Err(Given::Answered)
}

/// Gives the memory of a handle to the process that asks for it. The driver is not called.
pub(super) fn give(handle: &Handle, asker: &Asker) -> Given {
    let Some(process) = asker.process() else { return Given::Answered };
    let (export, given) = match begin_loan(handle, process) {
        Ok(begun) => begun,
        Err(given) => return given,
    };
    static FAILS: ThrottledLine = ThrottledLine::new(log::warn);
    let sent = match export.numbers() {
        Some(numbers) => asker.send(&given.bytes(), &numbers).map_err(|error| error.to_string()),
        None => Err("the program has closed its descriptors".to_owned()),
    };
    if let Err(why) = sent {
        FAILS.say(format_args!("shared memory cannot be passed on: {why}"));
        take_back(handle, process);
    }
    Given::Answered
}

/// A process has returned the memory of a handle.
pub(super) fn take_back(handle: &Handle, process: libc::pid_t) {
    let mut exports = lock(&EXPORTS);
    let Some(number) = exports.entry(handle).map(|entry| entry.holder) else { return };
    if let Some(holder) = exports.holders.get_mut(&number) {
        holder.loans.end(process);
        holder.settle();
    }
    let gone = exports.tidy(number);
    drop(exports);
    drop(gone);
}

/// Descriptors that can be read when a process has ended that has memory of this one.
pub(super) fn watched() -> Vec<c_int> {
    let exports = lock(&EXPORTS);
    let known = exports.holders.values().filter(|holder| holder.is_known());
    // A process has one for all its loans, and `poll` takes no more entries than there may be descriptors.
    let all: BTreeSet<c_int> = known.flat_map(|holder| holder.loans.watched()).collect();
    all.into_iter().collect()
}

/// Takes memory back from processes that have ended.
pub(super) fn take_back_from_ended() {
    let mut exports = lock(&EXPORTS);
    let lent = exports.holders.iter_mut().filter(|(_, holder)| holder.is_known() && !holder.loans.is_empty());
    let numbers: Vec<u64> = lent
        .map(|(&number, holder)| {
            holder.loans.end_of_ended();
            holder.settle();
            number
        })
        .collect();
    let gone: Vec<Arc<Export>> = numbers.into_iter().filter_map(|number| exports.tidy(number)).collect();
    drop(exports);
    drop(gone);
}

/// Before memory leaves the card: from now on nobody gets it. Returns whether it may leave: not while another process has it.
pub(super) fn withdraw(holder: u64) -> bool {
    let gone = {
        let mut exports = lock(&EXPORTS);
        let Some(holder) = exports.holders.get_mut(&holder) else { return true };
        if !holder.loans.is_empty() {
            return false;
        }
        holder.export.take()
    };
    // Descriptors are closed without the lock.
    drop(gone);
    true
}

/// Closes the descriptors of memory that no other process has. They are made anew when one asks.
fn withdraw_unused() {
    let unused: Vec<Arc<Export>> = {
        let mut exports = lock(&EXPORTS);
        let unused = exports.holders.values_mut().filter(|holder| holder.loans.is_empty());
        unused.filter_map(|holder| holder.export.take()).collect()
    };
    // Descriptors are closed without the lock.
    drop(unused);
}

/// Makes descriptors anew for the memory of a handle that has none. The thread is inside the gate, so the memory does not leave.
///
/// # Errors
/// INVALID_VALUE: there is no such memory. OPERATING_SYSTEM: the process has no descriptors left. NOT_READY: not all of it is on the
/// card. Else the driver's.
pub(super) fn renew(handle: &Handle) -> Result<(), CUresult> {
    let _running = lifecycle::hold_off_exit().ok_or(CUresult::DEINITIALIZED)?;
    let (number, made_at, memory) = {
        let exports = lock(&EXPORTS);
        let number = exports.given(handle).ok_or(CUresult::INVALID_VALUE)?.holder;
        let holder = exports.holders.get(&number).ok_or(CUresult::INVALID_VALUE)?;
        if holder.export.is_some() {
            return Ok(());
        }
        if !holder.is_known() {
            return Err(CUresult::INVALID_VALUE);
        }
        (number, holder.made_at, holder.memory.upgrade().ok_or(CUresult::INVALID_VALUE)?)
    };
    let mapped = memory.mapped.as_ref().ok_or(CUresult::INVALID_VALUE)?;
    if descriptors_left() < mapped.parts() {
        withdraw_unused();
    }
    if descriptors_left() < mapped.parts() {
        return Err(CUresult::OPERATING_SYSTEM);
    }
    let _relaxed = Relaxed::begin();
    let new = made(made_at, mapped.describe(&memory.context_to_move_in())?);
    // Descriptors are closed without the lock.
    let _unneeded = match lock(&EXPORTS).holders.get_mut(&number) {
        Some(holder) if holder.export.is_none() => holder.export.replace(new),
        _ => Some(new),
    };
    Ok(())
}

/// The error for which memory was given up in the context of a handle's memory, if it was.
pub(super) fn failure(handle: &Handle) -> Option<CUresult> {
    let exports = lock(&EXPORTS);
    let memory = exports.holders.get(&exports.given(handle)?.holder)?.memory.upgrade()?;
    drop(exports);
    memory.context_to_move_in().failure()
}

/// Closes the parent's descriptors in a forked child, which would keep the memory alive. A lock is not waited for: a thread that
/// does not exist here may have it.
pub(crate) fn close_after_fork() {
    let exports = match EXPORTS.try_lock() {
        Ok(exports) => exports,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return,
    };
    for holder in exports.holders.values().filter(|holder| holder.is_known()) {
        holder.export.iter().flat_map(|export| &export.parts).for_each(|(_, descriptor)| descriptor.close());
        holder.loans.close_after_fork();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::types::CUcontext;
    use crate::memory::allocations::Kind;
    use crate::memory::mapping::Mapped;
    use crate::work::contexts;

    /// A holder whose memory is gone, with descriptors.
    fn holder() -> Holder {
        let export = Some(made([0; 16], Vec::new()));
        Holder { memory: Weak::new(), made_at: [0; 16], export, loans: Loans::default(), sharing: Vec::new() }
    }

    fn entry(holder: u64) -> Entry {
        Entry { holder, offset: 0, asked: 1, secret: [0; 16], is_freed: false }
    }

    #[test]
    fn memory_leaves_without_descriptors_and_not_while_it_is_lent() {
        let (me, number) = (std::process::id() as libc::pid_t, 1 << 60);
        let mut lent = holder();
        assert!(lent.loans.add(me));
        lock(&EXPORTS).holders.insert(number, lent);
        lock(&EXPORTS).entries.insert(number, entry(number));
        assert!(!withdraw(number) && find(number).is_some());
        take_back(&Handle { exporter: [0; 16], allocation: number, secret: [0; 16] }, me);
        assert!(withdraw(number) && find(number).is_none());
        forget(number);
        assert!(withdraw(number) && !lock(&EXPORTS).entries.contains_key(&number));
    }

    #[test]
    fn memory_is_shared_with_those_that_got_it_by_an_earlier_name_as_well() {
        let (me, mut lent) = (std::process::id() as libc::pid_t, holder());
        assert!(lent.loans.add(me));
        lent.settle();
        // The program has closed the socket, and has asked for the handle again.
        lent.made_at = [1; 16];
        lent.settle();
        let names = |holder: &Holder| holder.sharing.iter().map(|(name, _)| *name).collect::<Vec<_>>();
        assert_eq!(names(&lent), [[0; 16], [1; 16]]);
        lent.loans.end(me);
        lent.settle();
        assert!(names(&lent).is_empty());
    }

    #[test]
    fn memory_is_back_though_one_that_asks_for_it_has_ended_as_well() {
        let context = contexts::learn(CUcontext(0x64_0000 as *mut _), 64);
        let allocation = Allocation::new(0x64_1000, 8, 64, context, Kind::Mapped, 0);
        let (memory, number) = (Arc::new(allocation.with_chunks(Some(Mapped::of_nothing()))), 1 << 62);
        let sleep = || std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let (mut borrower, mut asker) = (sleep(), sleep());
        let mut lent = holder();
        lent.memory = Arc::downgrade(&memory);
        assert!(lent.loans.add(borrower.id() as libc::pid_t));
        lent.settle();
        assert!(memory.is_pinned() && !lent.sharing.is_empty());
        lock(&EXPORTS).holders.insert(number, lent);
        lock(&EXPORTS).entries.insert(number, entry(number));
        for child in [&mut borrower, &mut asker] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        let handle = Handle { exporter: [0; 16], allocation: number, secret: [0; 16] };
        assert_eq!(begin_loan(&handle, asker.id() as libc::pid_t).err(), Some(Given::Answered));
        assert!(lock(&EXPORTS).holders[&number].sharing.is_empty() && !memory.is_pinned());
        forget(number);
    }

    #[test]
    fn a_part_that_is_freed_can_be_returned_and_is_forgotten_then() {
        let (me, slab) = (std::process::id() as libc::pid_t, 1 << 61);
        let handle = |allocation| Handle { exporter: [0; 16], allocation, secret: [0; 16] };
        let mut exports = lock(&EXPORTS);
        exports.holders.insert(slab, holder());
        exports.entries.extend([(slab + 1, entry(slab)), (slab + 2, entry(slab))]);
        assert!(exports.holders.get_mut(&slab).is_some_and(|slab| slab.loans.add(me)));
        drop(exports);
        forget(slab + 1);
        assert!(find(slab).is_some(), "others can get the other part");
        forget(slab + 2);
        assert!(find(slab).is_none(), "nobody gets either part");
        assert!(lock(&EXPORTS).given(&handle(slab + 1)).is_none() && !withdraw(slab));
        take_back(&handle(slab + 1), me);
        assert!(withdraw(slab) && !lock(&EXPORTS).holders.contains_key(&slab));
        assert!(lock(&EXPORTS).entries.values().all(|entry| entry.holder != slab));
    }

    #[test]
    fn a_wrong_secret_is_none() {
        assert!(agree(&[5; 16], &[5; 16]));
        let mut other = [5; 16];
        other[15] = 4;
        assert!(!agree(&[5; 16], &other) && !agree(&other, &[0; 16]));
    }
}
