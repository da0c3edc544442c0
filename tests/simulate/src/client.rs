//! A modelled client: the work of its program, and the state of its library.

use std::time::Duration;

use nvshare_client::pauses::Pauses;
use nvshare_core::Time;
use nvshare_proto::{Counters, Epoch};

use crate::pieces::Pieces;
use crate::random::Random;
use crate::trace::{Gap, Job, Phase};

/// Work in flight when the gate closes is complete after so much time on the GPU, in milliseconds.
const IN_FLIGHT_MS: f64 = 20.0;
/// Less work than this, in milliseconds, counts as none.
pub(crate) const NOTHING: f64 = 1e-6;

/// The state of a client's library.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum State {
    /// The program has not started.
    Absent,
    Parked,
    Restoring(Epoch),
    Running(Epoch),
    Draining(Epoch),
    Idle(Epoch),
    /// The program has ended.
    Gone,
}

/// Times that a client measured.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    /// Time on the GPU, in milliseconds.
    pub(crate) done_ms: f64,
    /// Time in which the client had work, in milliseconds.
    pub(crate) wanted_ms: f64,
    /// Waits of work that found the gate closed, or had been interrupted, in milliseconds.
    pub(crate) waits: Vec<f32>,
    /// Lengths of the cycles that came to an end, in milliseconds.
    pub(crate) cycles: Vec<f32>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) job: Job,
    pub(crate) state: State,
    /// Bytes on each of the client's GPUs.
    pub(crate) resident: Vec<u64>,
    pub(crate) room: Vec<u64>,
    /// Memory on each of the GPUs that moves in pieces.
    pub(crate) pieces: Vec<Pieces>,
    pub(crate) bytes: u64,
    /// The client's memory was on the card before, so that it has contents to move.
    pub(crate) touched: bool,
    /// Time on the GPU that this cycle still needs, in milliseconds; 0: the client pauses.
    pub(crate) remaining: f64,
    /// The part of it that remains when the drain is complete.
    stops_at: f64,
    pub(crate) cycles_left: Option<u64>,
    pub(crate) began: Time,
    /// The time since when work waits at the client's gate.
    pub(crate) waits_since: Option<Time>,
    pub(crate) idle_since: Time,
    /// The pauses of its work.
    pub(crate) pauses: Pauses,
    /// The client was told that another client waits for what it holds.
    pub(crate) contested: bool,
    /// The client's memory comes by page faults.
    pub(crate) by_faults: bool,
    /// The client was asked for the lock before all of its memory had come by page faults.
    pub(crate) dropped: bool,
    /// The client's work is on the card.
    pub(crate) active: bool,
    rate: f64,
    settled_at: Time,
    /// The number of the last announced end of the client's work; earlier ones do not hold any more.
    pub(crate) version: u64,
    /// Launches of work that is done, and launches in a millisecond of the work under way.
    launched: f64,
    density: f64,
    random: Random,
    pub(crate) seen: Seen,
}

impl Client {
    pub(crate) fn new(job: Job, number: usize, card: u64, seed: u64) -> Self {
        let bytes = ((job.gib * (1u64 << 30) as f64) as u64).min(card);
        Self {
            state: State::Absent,
            resident: vec![0; job.gpus.len()],
            room: vec![0; job.gpus.len()],
            pieces: vec![Pieces::default(); job.gpus.len()],
            bytes,
            touched: false,
            remaining: 0.0,
            stops_at: 0.0,
            cycles_left: Some(job.cycles).filter(|&cycles| cycles > 0),
            began: Time::ZERO,
            waits_since: None,
            idle_since: Time::ZERO,
            pauses: Pauses::default(),
            contested: false,
            by_faults: false,
            dropped: false,
            active: false,
            rate: 0.0,
            settled_at: Time::ZERO,
            version: 0,
            launched: 0.0,
            density: 0.0,
            random: Random::new(seed ^ ((number as u64 + 1) << 20)),
            seen: Seen::default(),
            job,
        }
    }

    pub(crate) fn has_work(&self) -> bool {
        self.remaining > NOTHING
    }

    /// Whether the client's work can be on the card.
    pub(crate) fn runs(&self) -> bool {
        matches!(self.state, State::Running(_) | State::Draining(_))
    }

    pub(crate) fn next_busy_ms(&mut self, now: Time) -> f64 {
        let (from, to) = self.phase(now).map_or(self.job.busy_ms, |phase| phase.busy_ms);
        let (few, many) = self.job.launches;
        self.density = if few < many { self.random.between(few, many) } else { few };
        self.random.between(from, to)
    }

    /// The other work that the program does now, if it does.
    fn phase(&self, now: Time) -> Option<Phase> {
        let other = |phase: &Phase| (now.as_secs_f64() / phase.every_s) as u64 % 2 == 1;
        self.job.phase.filter(other)
    }

    /// The library's counters. While the gate is open, the program is a little ahead of its work.
    pub(crate) fn counters(&self) -> Counters {
        let ahead =
            if self.runs() && self.active { self.remaining.min(IN_FLIGHT_MS) * self.density } else { 0.0 };
        Counters { gated: (self.launched + ahead) as u64, ..Counters::default() }
    }

    pub(crate) fn next_gap(&mut self, now: Time) -> Duration {
        let ms = match self.phase(now).map_or(self.job.gap, |phase| phase.gap) {
            Gap::Fixed(ms) => ms,
            Gap::Between(from, to) => self.random.between(from, to),
            Gap::Random(mean) => self.random.exponential(mean),
        };
        Duration::from_secs_f64(ms / 1000.0)
    }

    /// Counts the work that the client did since the last time.
    pub(crate) fn settle(&mut self, now: Time) {
        let passed = (now - self.settled_at).as_secs_f64() * 1000.0;
        self.settled_at = now;
        if self.has_work() {
            self.seen.wanted_ms += passed;
        }
        if self.active {
            let done = (passed * self.rate).min(self.remaining);
            self.seen.done_ms += done;
            self.launched += done * self.density;
            self.remaining -= done;
        }
    }

    /// The client's work goes on at this rate. Returns when it stops, if nothing changes.
    pub(crate) fn goes_on(&mut self, rate: f64, now: Time) -> Time {
        self.rate = rate;
        self.version += 1;
        let stops_at = if matches!(self.state, State::Draining(_)) { self.stops_at } else { 0.0 };
        let left = (self.remaining - stops_at).max(0.0) / rate;
        // Rounded up, so that no work is left then.
        now + Duration::from_nanos((left * 1e6).ceil().min(1e18) as u64)
    }

    /// The client's gate is closed: work in flight goes on.
    pub(crate) fn drain(&mut self, epoch: Epoch) {
        self.state = State::Draining(epoch);
        self.stops_at = (self.remaining - IN_FLIGHT_MS).max(0.0);
    }

    /// Whether all work that was in flight is complete.
    pub(crate) fn is_drained(&self) -> bool {
        self.remaining <= self.stops_at + NOTHING
    }
}
