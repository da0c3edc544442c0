//! Rest: how long nothing was heard of a client that means work, so that it may go off the card by itself.

use nvshare_proto::{ClientMessage, Counters};

use crate::Time;

/// See the [module's documentation](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rest {
    /// Since when nothing was heard that means work.
    pub(crate) since: Time,
    /// The client was asked for its counters since then: its gate may be open.
    pub(crate) is_asked: bool,
    /// How often the client went off the card by itself, or was to, and had no work when it came back, in a row.
    pub(crate) in_vain: u32,
    /// When the core looks whether the client has rested for long enough.
    pub(crate) look_at: Option<Time>,
    /// The client goes off the card, or is off it, because it rested.
    pub(crate) is_cause: bool,
}

impl Rest {
    pub(crate) fn since(now: Time) -> Self {
        Self { since: now, is_asked: false, in_vain: 0, look_at: None, is_cause: false }
    }

    /// Notes that the client has work, or had until now.
    pub(crate) fn interrupt(&mut self, now: Time) {
        (self.since, self.is_asked) = (now, false);
    }

    /// Notes that the client came back, or did not go, without having work.
    pub(crate) fn note_in_vain(&mut self) {
        if std::mem::take(&mut self.is_cause) {
            self.in_vain = self.in_vain.saturating_add(1);
        }
    }

    /// Takes in a message of the client, which has said these counters before.
    pub(crate) fn hear(&mut self, message: &ClientMessage, before: &Counters, now: Time) {
        use ClientMessage as M;
        match message {
            M::ReqLock | M::LockReleased { .. } | M::DropDeferred { .. } | M::Idle { .. } => {
                self.interrupt(now)
            }
            M::NeedRoom(room) if room.bytes > 0 => self.interrupt(now),
            M::Counters(counters) if counters.gated == before.gated => {}
            M::Counters(_) | M::Running { .. } => {
                self.interrupt(now);
                (self.in_vain, self.is_cause) = (0, false);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nvshare_proto::{Amount, Epoch, GpuUuid};

    use super::*;

    const EPOCH: Epoch = Epoch { boot: 1, counter: 1 };

    #[test]
    fn what_means_work_interrupts_a_rest() {
        let room = |bytes| Amount { gpu: GpuUuid([1; 16]), bytes };
        let counters = |gated| ClientMessage::Counters(Counters { gated, ..Counters::default() });
        let before = Counters { gated: 5, ..Counters::default() };
        for (message, interrupts) in [
            (ClientMessage::ReqLock, true),
            (ClientMessage::Running { epoch: EPOCH }, true),
            (ClientMessage::Idle { epoch: EPOCH }, true),
            (ClientMessage::LockReleased { epoch: EPOCH }, true),
            (ClientMessage::NeedRoom(room(1)), true),
            (ClientMessage::NeedRoom(room(0)), false),
            (counters(5), false),
            (counters(6), true),
            (ClientMessage::Ping, false),
            (ClientMessage::Room(room(1)), false),
        ] {
            let mut rest = Rest { is_asked: true, ..Rest::since(Duration::ZERO) };
            rest.hear(&message, &before, Duration::from_secs(9));
            let expected = if interrupts { (Duration::from_secs(9), false) } else { (Duration::ZERO, true) };
            assert_eq!((rest.since, rest.is_asked), expected, "{message:?}");
        }
    }

    #[test]
    fn only_going_by_itself_counts_as_in_vain_until_the_client_has_work() {
        let mut rest = Rest::since(Duration::ZERO);
        rest.note_in_vain();
        assert_eq!(rest.in_vain, 0, "an administrator had ordered it");
        for times in 1..=3 {
            rest.is_cause = true;
            rest.note_in_vain();
            rest.note_in_vain();
            assert_eq!(rest.in_vain, times);
        }
        rest.hear(&ClientMessage::Running { epoch: EPOCH }, &Counters::default(), Duration::ZERO);
        assert_eq!(rest.in_vain, 0);
    }
}
