//! When a client that is to sleep is told so, and when one that is off the card may come back.
//!
//! The driver brings all of a process back at once. If it finds too little memory, the program is lost. So a
//! client is woken only when what it had on the GPU fits beside the room that others have, and beside what
//! comes back at the same time. Of the memory that sleepers have left, as much stays free as the one needs
//! that had most: each one of them can come back. The rest is given to others.

use std::time::Duration;

use nvshare_proto::units::saturate;

/// A client that has the lock has this long to show that it does nothing.
pub(crate) const MAX_WAIT_FOR_IDLE: Duration = Duration::from_secs(2);

/// A client whose memory has left is shown by NVML within this time, or stays: it is looked at each second.
pub(crate) const MAX_WAIT_FOR_LOOK: Duration = Duration::from_secs(10);

/// How often it is looked whether another GPU has room for a client that waits for its way back.
pub(crate) const LOOK_ELSEWHERE_EVERY: Duration = Duration::from_secs(1);

/// A client that is to sleep.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Candidate {
    /// It wants the lock, or an allocation of it waits for room.
    pub(crate) has_work: bool,
    /// It has the lock, and it is not known that it does nothing.
    pub(crate) runs: bool,
    /// It has the lock and does nothing.
    pub(crate) is_idle: bool,
    /// How long it has been ordered to sleep, or to give back its room.
    pub(crate) ordered_for: Duration,
    /// It was asked for room and has not answered.
    pub(crate) is_asked: bool,
    /// Bytes of its room that can be moved.
    pub(crate) movable: u64,
    /// It was asked for all of its room already.
    pub(crate) was_asked: bool,
    /// Its contexts and modules were seen since its memory has left, or nobody measures.
    pub(crate) is_seen: bool,
    /// A look at them was asked for since then.
    pub(crate) is_looked_at: bool,
    /// They can be seen at all, or nobody measures.
    pub(crate) is_visible: bool,
}

/// The next step with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// It is at work: it stays on the card.
    StaysAtWork,
    /// Its memory does not leave: it stays on the card.
    StaysFull,
    /// Nobody knows what it needs to come back: it stays on the card.
    StaysUnseen,
    /// An answer, or a measurement, comes first.
    Wait,
    /// The lock is taken from it.
    Leave,
    /// It is asked for all of its room.
    Evict,
    /// Its GPUs are measured.
    Look,
    /// It is told to go.
    Tell,
}

/// Returns what is done about a client that is to sleep.
#[must_use]
pub(crate) fn next_step(candidate: Candidate) -> Step {
    match candidate {
        Candidate { has_work: true, .. } => Step::StaysAtWork,
        Candidate { runs: true, ordered_for, .. } if ordered_for >= MAX_WAIT_FOR_IDLE => Step::StaysAtWork,
        Candidate { runs: true, .. } => Step::Wait,
        Candidate { is_idle: true, .. } => Step::Leave,
        Candidate { is_visible: false, .. } => Step::StaysUnseen,
        Candidate { is_asked: true, .. } => Step::Wait,
        Candidate { movable: 1.., was_asked: false, .. } => Step::Evict,
        Candidate { movable: 1.., .. } => Step::StaysFull,
        Candidate { is_seen: false, ordered_for, .. } if ordered_for >= MAX_WAIT_FOR_LOOK => {
            Step::StaysUnseen
        }
        Candidate { is_seen: false, is_looked_at: false, .. } => Step::Look,
        Candidate { is_seen: false, .. } => Step::Wait,
        _ => Step::Tell,
    }
}

/// A GPU to which a client is to come back, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Card {
    /// The GPU's memory, less what processes without the library have there.
    pub(crate) available: u64,
    /// Bytes that are left to contexts and the driver: half of them are the driver's.
    pub(crate) reserve: u64,
    /// Bytes that contexts and modules take there.
    pub(crate) overhead: u64,
    /// Bytes that others need which are on their way back.
    pub(crate) waking: u64,
    /// Bytes that no process had when it was last measured, or `None` if it was not.
    pub(crate) free: Option<u64>,
}

impl Card {
    /// Returns how much room clients may have while one comes back that needs so much.
    #[must_use]
    pub(crate) fn most_room(self, needs: u64) -> u64 {
        saturate(u128::from(self.available).saturating_sub(self.taken(needs)))
    }

    /// Returns the bytes that room does not have while one comes back that needs so much.
    fn taken(self, needs: u64) -> u128 {
        [self.reserve / 2, self.overhead, self.waking, needs].into_iter().map(u128::from).sum()
    }

    /// Whether a client that needs so much may come back beside this much room of all clients. `own`: the part of that room
    /// that is its own, or of clients on their way back. Where nothing was measured, nothing is known to be needed, and
    /// nothing was given away.
    #[must_use]
    pub(crate) fn has_place(self, needs: u64, own: u64, room: u128) -> bool {
        needs == 0 || self.fits_beside(needs, room) && self.has_free(needs, own)
    }

    /// Whether a client that needs so much fits beside this much room of all clients, whatever the last measurement shows.
    #[must_use]
    pub(crate) fn fits_beside(self, needs: u64, room: u128) -> bool {
        room.saturating_add(self.taken(needs)) <= u128::from(self.available)
    }

    /// Whether the last measurement shows free memory for a client, and for those on their way back. Memory that does not
    /// move comes with them: `own`.
    #[must_use]
    pub(crate) fn has_free(self, needs: u64, own: u64) -> bool {
        self.free
            .is_none_or(|free| u128::from(free) >= [needs, own, self.waking].map(u128::from).iter().sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_without_work_gives_its_room_back_and_is_told() {
        let idle = Candidate {
            has_work: false,
            runs: false,
            is_idle: false,
            ordered_for: Duration::ZERO,
            is_asked: false,
            movable: 0,
            was_asked: false,
            is_seen: true,
            is_looked_at: false,
            is_visible: true,
        };
        for (candidate, step) in [
            (idle, Step::Tell),
            (Candidate { has_work: true, ..idle }, Step::StaysAtWork),
            (Candidate { has_work: true, is_asked: true, movable: 5, ..idle }, Step::StaysAtWork),
            (Candidate { movable: 5, ..idle }, Step::Evict),
            (Candidate { runs: true, movable: 5, ..idle }, Step::Wait),
            (Candidate { runs: true, ordered_for: MAX_WAIT_FOR_IDLE, ..idle }, Step::StaysAtWork),
            (Candidate { is_idle: true, movable: 5, ordered_for: MAX_WAIT_FOR_IDLE, ..idle }, Step::Leave),
            // It is asked by others already: not all of it may leave.
            (Candidate { movable: 5, is_asked: true, ..idle }, Step::Wait),
            (Candidate { movable: 5, is_asked: true, was_asked: true, ..idle }, Step::Wait),
            (Candidate { movable: 5, was_asked: true, ..idle }, Step::StaysFull),
            (Candidate { was_asked: true, ..idle }, Step::Tell),
            (Candidate { is_seen: false, ..idle }, Step::Look),
            (Candidate { is_seen: false, is_asked: true, ..idle }, Step::Wait),
            (Candidate { is_seen: false, is_looked_at: true, ..idle }, Step::Wait),
            (Candidate { is_visible: false, movable: 5, ..idle }, Step::StaysUnseen),
            (Candidate { is_seen: false, ordered_for: MAX_WAIT_FOR_LOOK, ..idle }, Step::StaysUnseen),
            (
                Candidate { is_seen: false, is_asked: true, ordered_for: MAX_WAIT_FOR_LOOK, ..idle },
                Step::Wait,
            ),
            (Candidate { movable: 5, is_seen: false, ..idle }, Step::Evict),
        ] {
            assert_eq!(next_step(candidate), step, "{candidate:?}");
        }
    }

    #[test]
    fn a_client_comes_back_where_all_fit_and_the_card_is_free() {
        let card = Card { available: 100, reserve: 10, overhead: 5, waking: 0, free: None };
        for (card, needs, room, may) in [
            (card, 20, 70, true),
            (card, 20, 71, false),
            (Card { waking: 10, ..card }, 20, 60, true),
            (Card { waking: 10, ..card }, 20, 61, false),
            (Card { free: Some(25), ..card }, 20, 70, true),
            (Card { free: Some(24), ..card }, 20, 70, false),
            (Card { free: Some(35), waking: 10, ..card }, 20, 60, true),
            (Card { free: Some(34), waking: 10, ..card }, 20, 60, false),
            // Nothing is known of it.
            (Card { free: Some(0), ..card }, 0, 500, true),
            (card, 90, 0, true),
            (card, 91, 0, false),
            (card, u64::MAX, 1, false),
        ] {
            assert_eq!(card.has_place(needs, 5, room), may, "{card:?} {needs} {room}");
        }
    }
}
