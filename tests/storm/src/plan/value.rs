//! The contents of a region: two numbers give every word.

/// The words of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Value {
    pub(crate) base: u32,
    /// Whether each word differs by its place, as the kernel `fill` writes it.
    pub(crate) pattern: bool,
}

impl Value {
    pub(crate) fn plain(base: u32) -> Self {
        Self { base, pattern: false }
    }

    pub(crate) fn pattern(base: u32) -> Self {
        Self { base, pattern: true }
    }

    /// Adds to each word, modulo 2^32.
    pub(crate) fn plus(self, value: u32) -> Self {
        Self { base: self.base.wrapping_add(value), ..self }
    }

    /// The word at an index of the region.
    pub(crate) fn word(self, index: u64) -> u32 {
        if !self.pattern {
            return self.base;
        }
        self.base
            .wrapping_add(((index >> 19) as u32).wrapping_mul(0x9e37_79b1))
            .wrapping_add((index & 1023) as u32 * 2_654_435)
    }
}
