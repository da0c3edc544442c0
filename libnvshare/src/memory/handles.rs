//! Handles of the library (CUDA IPC), and the words that processes exchange about them.

use crate::driver::types::{CUipcMemHandle, CUresult};
use crate::process::answering::{self, QUESTION};

/// The begin of the library's handles. The driver's do not (measured: the first word of those is small).
const MAGIC: [u8; 8] = *b"nvshare\x01";
/// The begin of what a process says that has closed the memory of a handle. The rest is the handle's.
const MAGIC_OF_RETURN: [u8; 8] = *b"nvshare\x02";

/// A handle of the library. A program passes it on as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handle {
    /// The address at which the process with the memory answers.
    pub(crate) exporter: answering::Name,
    /// The number of the allocation.
    pub(super) allocation: u64,
    /// Only those that have the handle know it; the address can be read by anybody.
    pub(super) secret: [u8; 16],
}

impl Handle {
    pub(crate) fn bytes(self) -> CUipcMemHandle {
        CUipcMemHandle(self.bytes_behind(&MAGIC))
    }

    fn bytes_behind(self, magic: &[u8; 8]) -> [u8; QUESTION] {
        let parts = [&magic[..], &self.exporter, &self.allocation.to_ne_bytes(), &self.secret];
        let mut bytes = [0; QUESTION];
        bytes.iter_mut().zip(parts.into_iter().flatten()).for_each(|(place, byte)| *place = *byte);
        bytes
    }

    /// `None`: it is not of this library.
    pub(crate) fn read(CUipcMemHandle(bytes): &CUipcMemHandle) -> Option<Self> {
        Self::read_behind(&MAGIC, bytes)
    }

    fn read_behind(expected: &[u8; 8], bytes: &[u8; QUESTION]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (exporter, rest) = rest.split_first_chunk()?;
        let (allocation, rest) = rest.split_first_chunk()?;
        let (secret, rest) = rest.split_first_chunk()?;
        let is_ours = magic == expected && rest.iter().all(|byte| *byte == 0);
        let allocation = u64::from_ne_bytes(*allocation);
        is_ours.then_some(Self { exporter: *exporter, allocation, secret: *secret })
    }
}

/// A process says this to the one that the memory is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Word {
    /// It asks for the memory.
    Get(Handle),
    /// It has unmapped the memory, as often as it says this.
    Return(Handle),
}

impl Word {
    pub(super) fn bytes(self) -> [u8; QUESTION] {
        match self {
            Self::Get(handle) => handle.bytes_behind(&MAGIC),
            Self::Return(handle) => handle.bytes_behind(&MAGIC_OF_RETURN),
        }
    }

    pub(super) fn read(bytes: &[u8; QUESTION]) -> Option<Self> {
        let get = || Handle::read_behind(&MAGIC, bytes).map(Self::Get);
        get().or_else(|| Handle::read_behind(&MAGIC_OF_RETURN, bytes).map(Self::Return))
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
    pub(super) fn bytes(&self) -> Vec<u8> {
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

/// The answer of a process whose memory is lost: the error that its own calls get. It is one word, which is no [`Extent`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Lost(pub(super) CUresult);

impl Lost {
    pub(super) fn bytes(self) -> [u8; 8] {
        i64::from(self.0.0).to_ne_bytes()
    }

    /// Reads an answer; success is none.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let error = CUresult(i64::from_ne_bytes(bytes.try_into().ok()?).try_into().ok()?);
        (error != CUresult::SUCCESS).then_some(Self(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_told_from_the_drivers() {
        let handle = Handle { exporter: [1; 16], allocation: 1 << 50, secret: [3; 16] };
        let bytes = handle.bytes();
        assert_eq!(Handle::read(&bytes), Some(handle));
        for word in [Word::Get(handle), Word::Return(handle)] {
            assert_eq!(Word::read(&word.bytes()), Some(word));
        }
        assert_eq!(Word::Get(handle).bytes(), bytes.0, "as earlier versions ask");
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
    fn lost_memory_is_told_from_memory() {
        let lost = Lost(CUresult::NOT_READY);
        assert_eq!(Lost::read(&lost.bytes()), Some(lost));
        assert!(Extent::read(&lost.bytes()).is_none(), "earlier versions take it for no answer");
        assert_eq!(Lost::read(&Extent { offset: 0, asked: 1, parts: vec![1] }.bytes()), None);
        for other in [&[][..], &[1], &[0; 8], &[0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0]] {
            assert_eq!(Lost::read(other), None, "{other:?}");
        }
    }
}
