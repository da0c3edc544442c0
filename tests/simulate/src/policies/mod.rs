//! The policies that are compared.

mod by_turns;
mod ours;

use std::time::Duration;

use nvshare_core::Time;
use nvshare_proto::{ClientMessage, SchedulerMessage};

pub(crate) use by_turns::{ByTurns, Rule};
pub(crate) use ours::{Ours, number, uuid};

/// A new client, as the scheduler knows it. Sizes in bytes.
#[derive(Debug, Clone)]
pub(crate) struct Newcomer {
    pub(crate) client: usize,
    pub(crate) gpus: Vec<usize>,
    pub(crate) bytes: u64,
    pub(crate) weight: u32,
}

/// Bytes that page faults bring to a card, and bytes that leave to make room for them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Faults {
    pub(crate) gpu: usize,
    pub(crate) come: u64,
    pub(crate) leave: u64,
}

/// A scheduler: takes messages of clients, and gives messages to them.
pub(crate) trait Scheduler {
    fn comes(&mut self, newcomer: &Newcomer, now: Time);
    fn says(&mut self, client: usize, message: ClientMessage, now: Time);
    fn goes(&mut self, client: usize, now: Time);
    /// The time that [`Scheduler::deadline`] named has come.
    fn due(&mut self, now: Time);
    fn deadline(&self) -> Option<Time>;
    /// The next message, and the client that it is for.
    fn told(&mut self) -> Option<(usize, SchedulerMessage)>;
    /// Time without work after which a client reports that it is idle; `None`: as the library finds by the program's pauses.
    fn idle_after(&self) -> Option<Duration>;
    /// Page faults when a client runs; none: memory moves by orders.
    fn faults(&mut self, client: usize) -> Option<Vec<Faults>>;
}
