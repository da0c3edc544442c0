//! Segments that were made before anybody asked for one. No client ever had one of them.

use std::os::fd::OwnedFd;

use super::processors::Processors;

/// Where a segment lies: near these processors, or anywhere.
pub(super) type Place = Option<Processors>;

/// A segment that nobody has.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) file: OwnedFd,
    pub(super) bytes: u64,
    pub(super) place: Place,
}

/// The segments that are ready. Dropping one gives its memory back.
#[derive(Debug, Default)]
pub(super) struct Stock {
    segments: Vec<Ready>,
}

impl Stock {
    pub(super) fn add(&mut self, ready: Ready) {
        self.segments.push(ready);
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.segments.len()
    }

    /// Their bytes together.
    pub(super) fn bytes(&self) -> u64 {
        self.segments.iter().map(|ready| ready.bytes).sum()
    }

    /// The bytes of those at a place.
    pub(super) fn at(&self, place: &Place) -> u64 {
        self.segments.iter().filter(|ready| ready.place == *place).map(|ready| ready.bytes).sum()
    }

    /// Takes one that lies at this place, for this many bytes. A segment of which less than half is used would have been made in vain:
    /// one of the right length is made as fast.
    pub(super) fn take_at(&mut self, place: &Place, bytes: u64) -> Option<Ready> {
        let suits = |ready: &Ready| ready.place == *place && bytes >= ready.bytes / 2;
        let found = self.segments.iter().position(suits)?;
        Some(self.segments.swap_remove(found))
    }

    /// Takes one, wherever it lies.
    pub(super) fn take_any(&mut self) -> Option<Ready> {
        self.segments.pop()
    }

    /// One that can be spared: the others at its place have as many bytes as are `wanted` there, or more.
    fn spare(&self, wanted: impl Fn(&Place) -> u64) -> Option<usize> {
        self.segments.iter().position(|ready| self.at(&ready.place) - ready.bytes >= wanted(&ready.place))
    }

    /// Whether one can be spared.
    pub(super) fn has_spare(&self, wanted: impl Fn(&Place) -> u64) -> bool {
        self.spare(wanted).is_some()
    }

    /// Takes one that can be spared.
    pub(super) fn take_spare(&mut self, wanted: impl Fn(&Place) -> u64) -> Option<Ready> {
        let found = self.spare(wanted)?;
        Some(self.segments.swap_remove(found))
    }
}
