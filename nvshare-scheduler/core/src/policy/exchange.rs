//! How much room the client that is next gets while others still make room for it.
//!
//! In an exchange, the memory of the client that is next comes to the GPU while that of others leaves. The
//! link carries both directions at once. The client's gate stays closed until everything is there, so the
//! room is the only thing that it gets early.
//!
//! piece = what is free, if that is [`ROOM_PIECE`] or more and at most what the client lacks.

use nvshare_proto::{MemoryMode, ROOM_PIECE};

/// Whose memory comes to the GPU while that of others leaves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Exchange {
    /// Nobody's: a client restores when it has all its room.
    Nobody,
    /// That of clients which copy their memory. The driver moves managed memory by one engine: measured, both
    /// ways at once are no faster than one way after the other.
    #[default]
    Swap,
    /// That of all clients whose memory can be moved.
    All,
}

impl std::str::FromStr for Exchange {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "nobody" => Ok(Self::Nobody),
            "swap" => Ok(Self::Swap),
            "all" => Ok(Self::All),
            _ => Err("must be nobody, swap or all"),
        }
    }
}

impl Exchange {
    fn serves(self, memory: MemoryMode) -> bool {
        match self {
            Self::Nobody => false,
            Self::Swap => memory == MemoryMode::Swap,
            Self::All => memory != MemoryMode::Off,
        }
    }

    /// Returns the bytes of room that the client that is next gets now. `free` is free for it, and it lacks
    /// `deficit`. 0: none.
    #[must_use]
    pub(crate) fn piece(self, memory: MemoryMode, free: u64, deficit: u64) -> u64 {
        if self.serves(memory) && free >= ROOM_PIECE { free.min(deficit) } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use nvshare_proto::units::MIB;

    use super::*;

    #[test]
    fn room_is_given_in_pieces_to_those_whose_memory_moves_both_ways() {
        use MemoryMode::{Managed, Off, Swap};
        const LACKS: u64 = 1000 * MIB;
        for (exchange, memory, free, deficit, expected) in [
            (Exchange::Swap, Swap, 64 * MIB, LACKS, 64 * MIB),
            (Exchange::Swap, Swap, 300 * MIB, LACKS, 300 * MIB),
            (Exchange::Swap, Swap, 2000 * MIB, LACKS, LACKS),
            (Exchange::Swap, Swap, 64 * MIB - 1, LACKS, 0),
            (Exchange::Swap, Swap, 0, LACKS, 0),
            (Exchange::Swap, Managed, 64 * MIB, LACKS, 0),
            (Exchange::All, Managed, 64 * MIB, LACKS, 64 * MIB),
            (Exchange::All, Off, 64 * MIB, LACKS, 0),
            (Exchange::Nobody, Swap, 64 * MIB, LACKS, 0),
        ] {
            assert_eq!(exchange.piece(memory, free, deficit), expected, "{exchange:?} {memory:?} {free}");
        }
    }
}
