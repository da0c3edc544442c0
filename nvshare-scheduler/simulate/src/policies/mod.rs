//! The policies that are compared.

mod by_turns;
mod ours;

use nvshare_core::Time;
use nvshare_proto::{ClientMessage, SchedulerMessage};

pub(crate) use by_turns::{ByTurns, Rule};
pub(crate) use ours::{Ours, number, uuid};

/// A client as a scheduler meets it. Sizes in bytes.
#[derive(Debug, Clone)]
pub(crate) struct Newcomer {
    pub(crate) client: usize,
    pub(crate) gpus: Vec<usize>,
    pub(crate) bytes: u64,
}

/// Bytes that page faults bring to a card, and those that make room for them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Faults {
    pub(crate) gpu: usize,
    pub(crate) come: u64,
    pub(crate) leave: u64,
}

/// A scheduler: takes in what clients say, and says what they are to do.
pub(crate) trait Scheduler {
    fn comes(&mut self, newcomer: &Newcomer, now: Time);
    fn says(&mut self, client: usize, message: ClientMessage, now: Time);
    fn goes(&mut self, client: usize, now: Time);
    /// The time that [`Scheduler::deadline`] named has come.
    fn due(&mut self, now: Time);
    fn deadline(&self) -> Option<Time>;
    /// What is said next, and to whom.
    fn told(&mut self) -> Option<(usize, SchedulerMessage)>;
    /// How long clients are idle before they say so.
    fn idle_after_ms(&self) -> u64;
    /// What moves by page faults when a client runs; none: memory moves by orders.
    fn faults(&mut self, client: usize) -> Option<Vec<Faults>>;
}
