//! The place of a client in the order of turns: the smallest virtual time first, then the longest wait.

use crate::Time;
use crate::state::client::ClientId;
use crate::state::virtual_time::VirtualTime;

/// See the module's documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) time: VirtualTime,
    /// Since when the client has waited.
    pub(crate) since: Time,
    pub(crate) client: ClientId,
}

impl Place {
    /// Returns a placeholder for a client that is in no order; it must never be compared.
    pub(crate) fn nowhere(client: ClientId) -> Self {
        Self { time: 0, since: Time::ZERO, client }
    }

    /// Returns the absolute place of one that counts from the clock.
    pub(in crate::state) fn to_absolute(self, clock: VirtualTime) -> Self {
        Self { time: self.time.saturating_add(clock), ..self }
    }

    /// Returns the place with its time counted from the clock: the opposite of [`Self::to_absolute`].
    pub(in crate::state) fn relative_to(self, clock: VirtualTime) -> Self {
        Self { time: self.time.saturating_sub(clock), ..self }
    }
}
