//! The part of one allocation that is on the card.
//!
//! The account of a device ([`crate::Account`]) knows sums alone; this says which bytes of an allocation are resident. Today
//! they are a prefix: eviction takes from the end, and restoring brings back the bytes behind the prefix. Callers use
//! [`Residency::next_out`] with [`Residency::evicted`], and [`Residency::next_in`] with [`Residency::restored`], which name
//! ranges. So a backing whose memory moves in chunks can keep another record behind the same calls.
//!
//! Invariants: `resident <= size`, `host_backed <= size`, and memory that was never resident has no contents.

use nvshare_proto::units::MIB;

/// The driver moves managed memory in blocks of this size, in bytes.
pub const BLOCK: u64 = 2 * MIB;
/// Bytes that one call takes off the card. Eviction is the slower way (16 GiB/s), and a program that frees the allocation
/// or ends a context waits for one piece: 4 ms.
pub const EVICT_PIECE: u64 = 64 * MIB;
/// Bytes that one call brings to the card. Larger pieces are hardly faster (measured: 45.2 GiB/s, and 46.5 in pieces of 1 GiB).
/// A program that frees the allocation or ends the context waits for one.
pub const RESTORE_PIECE: u64 = 256 * MIB;

/// The part of one allocation that is on the card. All sizes are bytes.
#[derive(Debug, Clone)]
pub struct Residency {
    size: u64,
    /// Bytes from the base that are charged, and so on the card. The bytes beyond are not, unless the device is
    /// oversubscribed: page faults may have brought them there.
    resident: u64,
    /// The allocation was on the card once: its absent bytes were evicted and have contents.
    has_contents: bool,
    /// Bytes up to the end of the allocation that have pages on the host. They were evicted once, and evicting them again needs
    /// no new host memory.
    host_backed: u64,
    /// The program freed the allocation.
    freed: bool,
}

/// The piece of an allocation that leaves the card next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The piece's begin, from the base of the allocation.
    pub from: u64,
    /// The piece's end.
    pub until: u64,
    /// Bytes of the piece that the host has no pages for yet.
    pub fresh: u64,
}

impl Piece {
    /// The piece's length.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.until - self.from
    }
}

impl Residency {
    /// A new allocation of `size` bytes, `charged` of which are on the card.
    #[must_use]
    pub fn new(size: u64, charged: u64) -> Self {
        debug_assert!(charged <= size);
        Self { size, resident: charged, has_contents: charged > 0, host_backed: 0, freed: false }
    }

    /// Bytes of the allocation that are charged.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        self.resident
    }

    /// Bytes that are not charged: evicted, or never brought to the card.
    #[must_use]
    pub fn absent_bytes(&self) -> u64 {
        self.size - self.resident
    }

    /// Whether the allocation was on the card once: its absent bytes were evicted then.
    #[must_use]
    pub fn has_contents(&self) -> bool {
        self.has_contents
    }

    /// Whether the program freed the allocation: nothing of it is moved any more.
    #[must_use]
    pub fn is_freed(&self) -> bool {
        self.freed
    }

    /// Bytes of the allocation, wherever they are.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The absent bytes never come back, and count no more. Returns how many that are; 0 if the allocation was freed.
    pub fn give_up_absent(&mut self) -> u64 {
        let absent = if self.freed { 0 } else { self.absent_bytes() };
        self.size -= absent;
        absent
    }

    /// The program has freed the allocation. Returns its charged bytes, which the account is to take back.
    pub fn free(&mut self) -> u64 {
        self.freed = true;
        self.resident
    }

    /// The range, from the base, to which the next bytes come back: `charged` bytes follow, in pieces of
    /// [`RESTORE_PIECE`] at most.
    #[must_use]
    pub fn next_in(&self, charged: u64) -> std::ops::Range<u64> {
        self.resident..self.size.min(self.resident.saturating_add(charged))
    }

    /// `bytes` came to the card, charged before.
    pub fn restored(&mut self, bytes: u64) {
        debug_assert!(bytes <= self.absent_bytes());
        self.resident = self.size.min(self.resident.saturating_add(bytes));
        self.has_contents |= bytes > 0;
    }

    /// Chooses the next piece to leave. It has about `wanted` bytes, rather a few more, in whole blocks counted from the base.
    /// The host has no pages yet for at most `host` bytes of it. `None`: nothing can leave, or the host has no memory for it.
    #[must_use]
    pub fn next_out(&self, wanted: u64, host: u64) -> Option<Piece> {
        if self.freed {
            return None;
        }
        let until = self.resident;
        let bytes = wanted.min(EVICT_PIECE).next_multiple_of(BLOCK).min(until);
        let from = (until - bytes).next_multiple_of(BLOCK).min(until.checked_sub(1)?);
        let fresh_until = until.min(self.size - self.host_backed);
        // Bytes that the host cannot take stay.
        let least = fresh_until.saturating_sub(host).next_multiple_of(BLOCK);
        let from = from.max(least);
        (from < until).then(|| Piece { from, until, fresh: fresh_until.saturating_sub(from) })
    }

    /// `bytes`, from anywhere in the allocation, have left the card: chunks of mapped memory leave one by one.
    pub fn left(&mut self, bytes: u64) {
        debug_assert!(bytes <= self.resident);
        self.resident = self.resident.saturating_sub(bytes);
    }

    /// This piece, of [`Self::next_out`], has left the card.
    pub fn evicted(&mut self, piece: Piece) {
        debug_assert_eq!(piece.until, self.resident);
        self.resident = piece.from;
        self.host_backed = self.host_backed.max(self.size - piece.from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_come_from_the_end_in_whole_blocks_that_the_host_can_take() {
        const NOTHING: Option<(u64, u64)> = None;
        let piece = |from, fresh| Some((from, fresh));
        for (size, resident, host_backed, wanted, host, expected) in [
            (64, 64, 0, 10, 1000, piece(54, 10)),
            (64, 64, 0, 9, 1000, piece(54, 10)),
            (64, 54, 10, 100, 1000, piece(0, 54)),
            (64, 0, 64, 10, 1000, NOTHING),
            // The last block may be a part.
            (63, 63, 0, 1, 1000, piece(62, 1)),
            // The host can take ten.
            (64, 64, 0, 64, 10, piece(54, 10)),
            (64, 64, 0, 64, 11, piece(54, 10)),
            (64, 54, 10, 64, 0, NOTHING),
            // Bytes that have pages on the host cost nothing.
            (64, 64, 30, 64, 0, piece(34, 0)),
            (64, 64, 30, 64, 10, piece(24, 10)),
            (64, 20, 64, 64, 0, piece(0, 0)),
            // At most as much as one call moves.
            (4096, 4096, 0, 4096, 5000, piece(4032, 64)),
        ] {
            let residency = Residency {
                size: size * MIB,
                resident: resident * MIB,
                has_contents: true,
                host_backed: host_backed * MIB,
                freed: false,
            };
            let chosen = residency.next_out(wanted * MIB, host * MIB);
            let told = chosen.map(|piece| (piece.from / MIB, piece.fresh / MIB));
            assert_eq!(told, expected, "{:?}", (size, resident, host_backed, wanted, host));
            assert!(chosen.is_none_or(|piece| piece.until == resident * MIB));
        }
    }

    #[test]
    fn bytes_evicted_twice_need_host_memory_once() {
        let mut residency = Residency::new(10 * MIB, 10 * MIB);
        let first = residency.next_out(4 * MIB, u64::MAX).unwrap();
        residency.evicted(first);
        assert_eq!((first.bytes(), first.fresh), (4 * MIB, 4 * MIB));
        assert_eq!(residency.next_in(u64::MAX), 6 * MIB..10 * MIB);
        residency.restored(4 * MIB);
        let again = residency.next_out(6 * MIB, 2 * MIB).unwrap();
        assert_eq!((again.bytes(), again.fresh), (6 * MIB, 2 * MIB));
    }

    #[test]
    fn memory_that_never_was_on_the_card_has_no_contents() {
        let mut residency = Residency::new(10 * MIB, 0);
        assert!(!residency.has_contents());
        assert_eq!(residency.next_out(MIB, u64::MAX), None);
        residency.restored(0);
        assert!(!residency.has_contents());
        residency.restored(3 * MIB);
        assert!(residency.has_contents());
        assert_eq!(residency.free(), 3 * MIB);
        assert!(residency.is_freed());
    }
}
