//! The memory of this process that others may get, by the number of the allocation.
//!
//! The descriptors are made when the program asks for a handle, and kept as long as it has the allocation. So the thread that
//! hands them out never calls the driver. The memory itself lives while any process has it mapped.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, TryLockError};

use crate::driver::types::CUipcMemHandle;
use crate::process::answering::{self, QUESTION};
use crate::process::descriptor::Held;
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
pub(crate) struct Given {
    /// Bytes from the begin of the memory.
    pub(crate) offset: u64,
    /// Bytes of the allocation.
    pub(crate) asked: u64,
    /// Bytes of each part of the memory.
    pub(crate) parts: Vec<u64>,
}

impl Given {
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
#[derive(Debug)]
pub(crate) struct Export {
    /// The number of the allocation or slab.
    holder: u64,
    parts: Vec<(u64, Held)>,
}

#[derive(Debug)]
struct Entry {
    export: Arc<Export>,
    offset: u64,
    asked: u64,
    secret: [u8; 16],
}

static EXPORTS: Mutex<BTreeMap<u64, Entry>> = Mutex::new(BTreeMap::new());

/// The handle of an allocation, if it has one. Begins to answer again if the program has closed the socket.
///
/// # Errors
/// The system's: the process cannot answer.
pub(crate) fn handle_of(allocation: u64) -> Option<std::io::Result<CUipcMemHandle>> {
    let secret = lock(&EXPORTS).get(&allocation)?.secret;
    let handle = |exporter| Handle { exporter, allocation, secret }.bytes();
    Some(answering::listen(answer).map(handle))
}

/// The descriptors of an allocation or slab, if others may get it already.
pub(crate) fn find(holder: u64) -> Option<Arc<Export>> {
    lock(&EXPORTS).values().find(|entry| entry.export.holder == holder).map(|entry| Arc::clone(&entry.export))
}

/// Notes what others may get: the parts of an allocation or slab.
pub(crate) fn describe(holder: u64, parts: Vec<(u64, OwnedFd)>) -> Arc<Export> {
    let parts = parts.into_iter().map(|(bytes, descriptor)| (bytes, Held::new(descriptor))).collect();
    Arc::new(Export { holder, parts })
}

/// Others may get an allocation, which is at an offset in such memory, from now on.
///
/// # Errors
/// The system has no random numbers.
pub(crate) fn add(allocation: u64, export: Arc<Export>, offset: u64, asked: u64) -> std::io::Result<()> {
    let secret = answering::random().ok_or(std::io::ErrorKind::WouldBlock)?;
    lock(&EXPORTS).insert(allocation, Entry { export, offset, asked, secret });
    Ok(())
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
        (Arc::clone(export), Given { offset: *offset, asked: *asked, parts })
    };
    let numbers: Option<Vec<c_int>> = export.parts.iter().map(|(_, descriptor)| descriptor.get()).collect();
    let Some(numbers) = numbers else {
        log::warn(format_args!("the program has closed descriptors of memory that it shares"));
        return;
    };
    if let Err(error) = passing::send(asker, &given.bytes(), &numbers) {
        log::warn(format_args!("shared memory cannot be passed on: {error}"));
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
    exports.values().flat_map(|entry| &entry.export.parts).for_each(|(_, descriptor)| descriptor.close());
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
            Given::read(&bytes).map(|given| given.parts.len())
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
        assert!(Given::read(&[0; 25]).is_none());
    }

    #[test]
    fn a_wrong_secret_is_none() {
        assert!(agree(&[5; 16], &[5; 16]));
        let mut other = [5; 16];
        other[15] = 4;
        assert!(!agree(&[5; 16], &other) && !agree(&other, &[0; 16]));
    }
}
