//! Worlds of up to 200 clients, in virtual time, for rules that need many: how long somebody waits, how far equal jobs come
//! apart, what one event may cost, and that nobody's lies stop the others.
//!
//! Clients are behind [`Behaviour`]: a world delivers messages, and knows nothing of how a client answers.

mod cheats;
mod fair;
mod honest;
mod liar;
mod shares;
mod world;
mod worlds;

use std::time::Duration;

use nvshare_core::Identity;
use nvshare_proto::{ClientMessage, Register, SchedulerMessage};

/// An act of a client.
#[derive(Debug, Clone)]
pub(crate) enum Act {
    /// It says something.
    Say(ClientMessage),
    /// Something of its own: its number means something to itself alone.
    Own(u64),
    /// Its process ends; another client of the same behaviour comes after this long.
    End(Option<Duration>),
}

/// Acts of a client to come, each with the time until then.
pub(crate) type Plan = Vec<(Duration, Act)>;

/// How a client behaves.
pub(crate) trait Behaviour {
    /// It connects, for the first time or again.
    fn begins(&mut self, client: u64, now: Duration) -> (Identity, Register, Plan);
    /// Its scheduler has gone, and it registers with the next one.
    fn returns(&mut self, client: u64, now: Duration) -> (Identity, Register, Plan) {
        self.begins(client, now)
    }
    /// It is told something.
    fn hears(&mut self, message: SchedulerMessage, now: Duration) -> Plan;
    /// It does something of its own.
    fn does(&mut self, what: u64, now: Duration) -> Plan;
    /// It is looked at from outside.
    fn seen(&self) -> Seen;
}

/// A client as it is seen from outside.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Seen {
    /// The GPU that it uses.
    pub(crate) gpu: u8,
    /// Its bytes on the card, with those that it may still put there; none for a client that lies.
    pub(crate) resident: Option<u64>,
    /// It is between grant and drained.
    pub(crate) holds: bool,
    /// Its memory comes back to the card.
    pub(crate) restores: bool,
    /// Since when it waits for the lock.
    pub(crate) waits_since: Option<Duration>,
}
