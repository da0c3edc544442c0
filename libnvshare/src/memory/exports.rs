//! The memory of this process that others may get, by the number of the allocation.
//!
//! The descriptors are made when the program asks for a handle, and kept as long as it has the allocation. So the thread that
//! hands them out never calls the driver. The memory itself lives while any process has it mapped.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, TryLockError};

use nvshare_proto::ThrottledLine;

use super::sharers;
use crate::driver::types::CUipcMemHandle;
use crate::process::answering::{self, QUESTION};
use crate::process::descriptor::{self, Held};
use crate::process::lock::lock;
use crate::process::{log, passing};

/// The begin of the library's handles. The driver's do not (measured: the first word of those is small).
const MAGIC: [u8; 8] = *b"nvshare\x01";

/// A handle of the library. A program passes it on as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handle {
    /// The address at which the process with the memory answers.
    pub(crate) exporter: answering::Name,
    /// The number of the allocation.
    allocation: u64,
    /// Only those who have the handle know it; the address can be read by anybody.
    secret: [u8; 16],
}

impl Handle {
    pub(crate) fn bytes(self) -> CUipcMemHandle {
        let parts = [&MAGIC[..], &self.exporter, &self.allocation.to_ne_bytes(), &self.secret];
        let mut bytes = [0; QUESTION];
        bytes.iter_mut().zip(parts.into_iter().flatten()).for_each(|(place, byte)| *place = *byte);
        CUipcMemHandle(bytes)
    }

    /// `None`: it is not of this library.
    pub(crate) fn read(CUipcMemHandle(bytes): &CUipcMemHandle) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (exporter, rest) = rest.split_first_chunk()?;
        let (allocation, rest) = rest.split_first_chunk()?;
        let (secret, rest) = rest.split_first_chunk()?;
        let is_ours = *magic == MAGIC && rest.iter().all(|byte| *byte == 0);
        let allocation = u64::from_ne_bytes(*allocation);
        is_ours.then_some(Self { exporter: *exporter, allocation, secret: *secret })
    }
}

/// Memory that others may get, and where in it an allocation is.
#[derive(Debug)]
pub(crate) struct Extent {
    /// Bytes from the begin of the memory.
    pub(crate) offset: u64,
    /// Bytes of the allocation.
    pub(crate) asked: u64,
    /// Bytes of each part of the memory.
    pub(crate) parts: Vec<u64>,
}

impl Extent {
    fn bytes(&self) -> Vec<u8> {
        let words = [self.offset, self.asked].into_iter().chain(self.parts.iter().copied());
        words.flat_map(u64::to_ne_bytes).collect()
    }

    /// Reads what a process says that it gives, if it makes sense.
    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        let (words, []) = bytes.as_chunks::<8>() else { return None };
        let mut words = words.iter().map(|word| u64::from_ne_bytes(*word));
        let (offset, asked, parts) = (words.next()?, words.next()?, words.collect::<Vec<_>>());
        let span = parts.iter().try_fold(0u64, |sum, part| sum.checked_add(*part))?;
        let is_within = offset.checked_add(asked).is_some_and(|end| end <= span);
        (asked > 0 && is_within && !parts.contains(&0)).then_some(Self { offset, asked, parts })
    }
}

/// The descriptors of memory: of an allocation, or of a slab.
///
/// The driver's descriptors are all of one file, so a number that the program has closed, and has anew, cannot be told from
/// it. A program that closes what it does not know closes the socket as well, which has a file of its own. So without the
/// socket that was there when they were made, the numbers are neither used nor closed.
#[derive(Debug)]
pub(crate) struct Export {
    /// The number of the allocation or slab.
    holder: u64,
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

#[derive(Debug)]
struct Entry {
    export: Arc<Export>,
    offset: u64,
    asked: u64,
    secret: [u8; 16],
}

static EXPORTS: Mutex<BTreeMap<u64, Entry>> = Mutex::new(BTreeMap::new());

/// Whether others can get memory of this process.
pub(crate) fn has_any() -> bool {
    !lock(&EXPORTS).is_empty()
}

/// The handle of an allocation, if others can get its memory by it.
pub(crate) fn handle_of(allocation: u64) -> Option<CUipcMemHandle> {
    let exports = lock(&EXPORTS);
    let Entry { export, secret, .. } = exports.get(&allocation).filter(|entry| entry.export.is_intact())?;
    Some(Handle { exporter: export.made_at, allocation, secret: *secret }.bytes())
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
    pub(crate) fn get() -> std::io::Result<Self> {
        let name = answering::listen(answer)?;
        let secret = answering::random().ok_or(std::io::ErrorKind::WouldBlock)?;
        Ok(Self { name, secret, descriptors: descriptors_left() })
    }
}

/// The number of descriptors that exports may have in addition.
pub(super) fn descriptors_left() -> usize {
    let most = usize::try_from(descriptor::limit() / 2).unwrap_or(usize::MAX);
    most.saturating_sub(open_descriptors())
}

/// The number of descriptors of all exports.
fn open_descriptors() -> usize {
    let exports = lock(&EXPORTS);
    let each: BTreeMap<u64, usize> =
        exports.values().map(|entry| (entry.export.holder, entry.export.parts.len())).collect();
    each.values().sum()
}

/// The descriptors of an allocation or slab, if others could get it before. They may not be intact any more.
pub(crate) fn find(holder: u64) -> Option<Arc<Export>> {
    lock(&EXPORTS).values().find(|entry| entry.export.holder == holder).map(|entry| Arc::clone(&entry.export))
}

/// Notes what others may get: the parts of an allocation or slab.
pub(crate) fn describe(holder: u64, means: &Means, parts: Vec<(u64, OwnedFd)>) -> Arc<Export> {
    let parts = parts.into_iter().map(|(bytes, descriptor)| (bytes, Held::new(descriptor))).collect();
    Arc::new(Export { holder, made_at: means.name, parts })
}

/// Others may get an allocation, which is at an offset in such memory, from now on. One that they could get before keeps its
/// secret, and others in the same memory get its new descriptors.
pub(crate) fn add(allocation: u64, export: &Arc<Export>, offset: u64, asked: u64, means: &Means) {
    let mut gone = Vec::new();
    let mut exports = lock(&EXPORTS);
    let secret = exports.get(&allocation).map_or(means.secret, |entry| entry.secret);
    gone.extend(exports.insert(allocation, Entry { export: Arc::clone(export), offset, asked, secret }));
    for entry in exports.values_mut().filter(|entry| entry.export.holder == export.holder) {
        let old = std::mem::replace(&mut entry.export, Arc::clone(export));
        gone.push(Entry { export: old, ..*entry });
    }
    drop(exports);
    sharers::note(&means.name);
    // Descriptors are closed without the lock.
    drop(gone);
}

/// The allocation has ended: nobody gets it any more. Those who have it keep it.
pub(crate) fn forget(allocation: u64) {
    // Descriptors are closed without the lock.
    let _gone = lock(&EXPORTS).remove(&allocation);
}

/// Whether a secret is the right one, in the same time for each that is not.
fn agree(one: &[u8; 16], other: &[u8; 16]) -> bool {
    one.iter().zip(other).fold(0, |differ, (one, other)| differ | (one ^ other)) == 0
}

/// Answers a question, which is a handle. On the thread that answers.
fn answer(question: &[u8; QUESTION], asker: c_int) {
    let Some(handle) = Handle::read(&CUipcMemHandle(*question)) else { return };
    let (export, given) = {
        let exports = lock(&EXPORTS);
        let known = exports.get(&handle.allocation).filter(|entry| agree(&entry.secret, &handle.secret));
        let Some(Entry { export, offset, asked, .. }) = known else { return };
        let parts = export.parts.iter().map(|(bytes, _)| *bytes).collect();
        (Arc::clone(export), Extent { offset: *offset, asked: *asked, parts })
    };
    static FAILS: ThrottledLine = ThrottledLine::new(log::warn);
    let Some(numbers) = export.numbers() else {
        FAILS.say(format_args!("the program has closed descriptors of memory that it shares"));
        return;
    };
    if let Err(error) = passing::send(asker, &given.bytes(), &numbers) {
        FAILS.say(format_args!("shared memory cannot be passed on: {error}"));
    }
}

/// Closes the parent's descriptors in a forked child, which would keep the memory alive. A lock is not waited for: a thread that
/// does not exist here may have it.
pub(crate) fn close_after_fork() {
    let exports = match EXPORTS.try_lock() {
        Ok(exports) => exports,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return,
    };
    let intact = exports.values().filter(|entry| entry.export.is_intact());
    intact.flat_map(|entry| &entry.export.parts).for_each(|(_, descriptor)| descriptor.close());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_told_from_the_drivers() {
        let handle = Handle { exporter: [1; 16], allocation: 1 << 50, secret: [3; 16] };
        let bytes = handle.bytes();
        assert_eq!(Handle::read(&bytes), Some(handle));
        for other in [[0; 64], [255; 64], [7; 64]] {
            assert_eq!(Handle::read(&CUipcMemHandle(other)), None);
        }
        let mut longer = bytes;
        longer.0[63] = 1;
        assert_eq!(Handle::read(&longer), None, "a later form of handles");
    }

    #[test]
    fn only_what_makes_sense_is_taken_in() {
        let read = |words: &[u64]| {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            Extent::read(&bytes).map(|given| given.parts.len())
        };
        assert_eq!(read(&[512, 512, 1024]), Some(1));
        assert_eq!(read(&[0, 3072, 1024, 2048]), Some(2));
        for wrong in [
            &[][..],
            &[0],
            &[0, 512],
            &[0, 0, 1024],
            &[512, 1024, 1024],
            &[u64::MAX, 2, 1024],
            &[0, 1, u64::MAX, 2],
            &[0, 1, 1024, 0],
        ] {
            assert_eq!(read(wrong), None, "{wrong:?}");
        }
        assert!(Extent::read(&[0; 25]).is_none());
    }

    #[test]
    fn a_wrong_secret_is_none() {
        assert!(agree(&[5; 16], &[5; 16]));
        let mut other = [5; 16];
        other[15] = 4;
        assert!(!agree(&[5; 16], &other) && !agree(&other, &[0; 16]));
    }
}
