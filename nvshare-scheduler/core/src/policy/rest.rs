//! When a client that rests goes off the card by itself: `--sleep-after`.
//!
//! It goes if it has rested for long enough and others lack memory. A program that is woken and has no work would come and go without
//! end, so it rests longer each time.

use std::time::Duration;

/// While a client goes off the card by itself, or is asked what it does, others are looked at again after this time.
const SOON: Duration = Duration::from_secs(1);
/// A client that has rested for long enough is looked at again after this time at most, while nobody lacks its memory.
const LATER: Duration = Duration::from_secs(60);
/// The time after which a client goes by itself doubles this often at most.
const MAX_DOUBLINGS: u32 = 6;

/// A client that may go off the card by itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resting {
    /// How long nothing was heard of it that means work.
    pub(crate) rested: Duration,
    /// The time after which clients go: `--sleep-after`.
    pub(crate) after: Duration,
    /// How often it went by itself and had no work when it came back. A program that asks for the free memory now and then would
    /// go and come back without end.
    pub(crate) in_vain: u32,
    /// Its gate is open: it may work without a word.
    pub(crate) is_gate_open: bool,
    /// It was asked for its counters meanwhile.
    pub(crate) is_asked: bool,
    /// It has not answered.
    pub(crate) owes_answer: bool,
    /// Others lack memory of its GPUs.
    pub(crate) is_in_the_way: bool,
    /// Another client is on its way off the card.
    pub(crate) is_another_going: bool,
}

/// The next step with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// It is looked at again after this time.
    LookAgain(Duration),
    /// It is asked for its counters, and looked at again after this time.
    Ask { look_in: Duration },
    /// It goes.
    Go,
}

/// Returns what is done about a client that may go off the card by itself.
#[must_use]
pub(crate) fn next_step(client: Resting) -> Step {
    let Resting { rested, after, in_vain, .. } = client;
    let patience = after.saturating_mul(1 << in_vain.min(MAX_DOUBLINGS));
    let left = patience.saturating_sub(rested);
    if !left.is_zero() {
        // Work makes the time shorter again.
        Step::LookAgain(left.min(after))
    } else if !client.is_in_the_way {
        Step::LookAgain(after.clamp(SOON, LATER))
    } else if client.is_gate_open && !client.is_asked {
        Step::Ask { look_in: SOON }
    } else if client.owes_answer || client.is_another_going {
        Step::LookAgain(SOON)
    } else {
        Step::Go
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_has_rested_goes_if_it_is_in_the_way() {
        const S: fn(u64) -> Duration = Duration::from_secs;
        let rests = Resting {
            rested: S(60),
            after: S(60),
            in_vain: 0,
            is_gate_open: false,
            is_asked: false,
            owes_answer: false,
            is_in_the_way: true,
            is_another_going: false,
        };
        for (client, step) in [
            (rests, Step::Go),
            (Resting { rested: S(59), ..rests }, Step::LookAgain(S(1))),
            (Resting { in_vain: 1, ..rests }, Step::LookAgain(S(60))),
            (Resting { in_vain: 2, rested: S(240), ..rests }, Step::Go),
            (Resting { in_vain: u32::MAX, rested: S(60 * 64), ..rests }, Step::Go),
            (Resting { is_in_the_way: false, ..rests }, Step::LookAgain(S(60))),
            (Resting { is_in_the_way: false, after: S(5), ..rests }, Step::LookAgain(S(5))),
            (
                Resting { is_in_the_way: false, after: S(900), rested: S(900), ..rests },
                Step::LookAgain(S(60)),
            ),
            (Resting { is_gate_open: true, ..rests }, Step::Ask { look_in: S(1) }),
            (Resting { is_gate_open: true, is_asked: true, ..rests }, Step::Go),
            (
                Resting { is_gate_open: true, is_asked: true, owes_answer: true, ..rests },
                Step::LookAgain(S(1)),
            ),
            (Resting { is_another_going: true, ..rests }, Step::LookAgain(S(1))),
            (Resting { after: Duration::MAX, in_vain: 9, ..rests }, Step::LookAgain(Duration::MAX - S(60))),
            (Resting { in_vain: 6, ..rests }, Step::LookAgain(S(60))),
        ] {
            assert_eq!(next_step(client), step, "{client:?}");
        }
    }
}
