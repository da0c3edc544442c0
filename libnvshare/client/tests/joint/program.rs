//! The program of a process: it allocates, computes in steps, pauses, and ends.

use std::collections::VecDeque;
use std::time::Duration;

use nvshare_client::Kind;
use nvshare_client::account::{Admission, Caller, Wait};

use crate::agenda::Later;
use crate::library::GateState;
use crate::plan::Plan;
use crate::world::{GIB, MS, Process, World};

/// A step of work.
const STEP: Duration = Duration::from_millis(100);

/// An allocation that the program asks for.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    device: usize,
    bytes: u64,
    kind: Kind,
    state: Wishes,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Wishes {
    NotYet,
    /// There was no room for this much, and until then its thread does not say so.
    Unsaid {
        until: Duration,
        bytes: u64,
    },
    /// It waits until there is room for this much.
    Waits {
        bytes: u64,
    },
    /// The driver makes it, until then; this much is charged.
    Made {
        until: Duration,
        charged: u64,
    },
}

#[derive(Debug)]
pub(crate) struct Program {
    /// GPU time that it had.
    pub(crate) served: Duration,
    pub(crate) wanted_since: Option<Duration>,
    pub(crate) longest_wait: Duration,
    /// Times that its gate was closed while it computed.
    pub(crate) drains: u64,
    /// Allocations that got out of memory.
    pub(crate) refused: u64,
    wanted: VecDeque<Wanted>,
    step_left: Duration,
    paused_until: Duration,
    grown_at: Duration,
    /// Which of the events that were planned for it counts.
    pub(crate) planned: u64,
}

impl Program {
    pub(crate) fn new(plan: &Plan) -> Self {
        let first = |device| Wanted {
            device,
            bytes: plan.gib * GIB,
            kind: Kind::DeviceAsManaged,
            state: Wishes::NotYet,
        };
        Self {
            served: Duration::ZERO,
            wanted_since: None,
            longest_wait: Duration::ZERO,
            drains: 0,
            refused: 0,
            wanted: (0..plan.gpus.len()).map(first).collect(),
            step_left: STEP,
            paused_until: Duration::ZERO,
            grown_at: Duration::ZERO,
            planned: 0,
        }
    }
}

impl World {
    /// Lets a program do what it can do now. True: its session has to look.
    pub(crate) fn advance(&mut self, i: usize) -> bool {
        let mut wakes = false;
        loop {
            if self.processes[i].is_over() {
                return wakes;
            }
            self.interrupt(i);
            if !self.allocate(i, &mut wakes) {
                return wakes;
            }
            let now = self.now;
            let process = &mut self.processes[i];
            let (program, library) = (&mut process.program, &mut process.library);
            if let Some(since) = library.submits_since {
                let end = since + program.step_left;
                if now < end {
                    self.wake_program(i, end);
                    return wakes;
                }
                program.served += library.stop_submitting();
                library.complete_at = Some(now);
                self.end_step(i);
                continue;
            }
            if library.gate != GateState::Closed && library.complete_at.is_none() {
                // The thread that slept at the gate goes on, and what depended on it completes.
                library.complete_at = Some(now);
            }
            if program.served >= MS(process.plan.work) {
                if process.plan.exits && process.library.gate != GateState::Closed {
                    self.end(i);
                }
                return wakes;
            }
            if now < program.paused_until {
                let until = program.paused_until;
                self.wake_program(i, until);
                return wakes;
            }
            if library.gate == GateState::Closed {
                wakes |= !std::mem::replace(&mut library.is_asleep, true);
                program.wanted_since.get_or_insert(now);
                return wakes;
            }
            library.is_asleep = false;
            library.begin_submitting();
            if let Some(since) = program.wanted_since.take() {
                program.longest_wait = program.longest_wait.max(now - since);
            }
        }
    }

    fn wake_program(&mut self, i: usize, at: Duration) {
        let program = &mut self.processes[i].program;
        program.planned += 1;
        let planned = program.planned;
        self.at(at, Later::Program(i, planned));
    }

    /// The gate was closed while the program computed: what it has in flight takes a while to complete.
    fn interrupt(&mut self, i: usize) {
        let process = &mut self.processes[i];
        if process.library.gate != GateState::Closed || process.library.submits_since.is_none() {
            return;
        }
        let ran = process.library.stop_submitting();
        let program = &mut process.program;
        program.served += ran;
        program.step_left = program.step_left.saturating_sub(ran);
        program.drains += 1;
        if process.plan.grows_in_drains {
            let kind = if process.plan.pools { Kind::ManagedPool } else { Kind::DeviceAsManaged };
            let more = |device| Wanted { device, bytes: GIB, kind, state: Wishes::NotYet };
            program.wanted.extend((0..process.plan.gpus.len()).map(more));
        }
        let is_stuck = process.plan.defers_every.is_some_and(|every| program.drains.is_multiple_of(every));
        let takes = match (process.plan.drains_in, process.plan.quick) {
            (0, false) => Duration::from_micros(10 + self.random(60_000)),
            (0, true) => Duration::from_micros(10 + self.random(20_000)),
            (drains_in, _) => MS(drains_in),
        };
        let is_stuck = is_stuck || self.waits_for_partner(i);
        self.processes[i].library.complete_at = (!is_stuck).then(|| self.now + takes);
    }

    /// Whether a rank's work waits for another one of its gang whose gate is closed.
    fn waits_for_partner(&self, i: usize) -> bool {
        let Some(gang) = self.processes[i].plan.gang else { return false };
        let of_gang = |p: &&Process| p.plan.gang.is_some_and(|other| other.number == gang.number);
        let all = || self.processes.iter().filter(of_gang);
        // Before all of them are there, they have nothing to wait for.
        let has_come = |p: &&Process| !p.is_over() && p.connection.is_some();
        let there = all().filter(has_come).count() == all().count();
        there && !all().all(|p| p.library.runs())
    }

    fn end_step(&mut self, i: usize) {
        let now = self.now;
        let process = &mut self.processes[i];
        let (program, plan) = (&mut process.program, &process.plan);
        program.step_left = STEP;
        if plan.pause > 0 {
            program.paused_until = now + MS(plan.pause);
        }
        if let Some(every) = plan.grows_every
            && program.served < MS(plan.work)
            && program.served >= program.grown_at + MS(every)
        {
            program.grown_at = program.served;
            let kind = if plan.pools { Kind::ManagedPool } else { Kind::DeviceAsManaged };
            let more = |device| Wanted { device, bytes: GIB, kind, state: Wishes::NotYet };
            program.wanted.extend((0..plan.gpus.len()).map(more));
        }
    }

    /// Makes the allocations that the program asks for. False: one takes a while, or waits for room.
    fn allocate(&mut self, i: usize, wakes: &mut bool) -> bool {
        while let Some(&wanted) = self.processes[i].program.wanted.front() {
            let Wanted { device, bytes, kind, state } = wanted;
            let now = self.now;
            let makes = Duration::from_micros(10 + self.random(2000));
            // A process that was there before its scheduler has its memory at once.
            let makes = if self.processes[i].was_there() { Duration::ZERO } else { makes };
            let process = &mut self.processes[i];
            let library = &mut process.library;
            let is_open = library.gate != GateState::Closed;
            let caller = if is_open { Caller::InsideGate } else { Caller::OutsideGate };
            let state = match state {
                Wishes::Made { until, .. } if now < until => {
                    self.wake_program(i, until);
                    return false;
                }
                Wishes::Made { charged, .. } => {
                    library.is_inside = false;
                    library.allocate(device, bytes, kind, charged);
                    *wakes |= library.devices[device].account().is_usage_stale();
                    None
                }
                Wishes::Unsaid { until, .. } if now < until => {
                    self.wake_program(i, until);
                    return false;
                }
                Wishes::Unsaid { bytes, .. } => {
                    library.devices[device].update(|account| account.begin_waiting(bytes, Wait::of(kind)));
                    *wakes = true;
                    Some(Wishes::Waits { bytes })
                }
                Wishes::Waits { bytes }
                    if library.devices[device].account().goes_on_waiting(bytes, Wait::of(kind)) =>
                {
                    return false;
                }
                Wishes::Waits { bytes } => {
                    let is_refused = library.devices[device].account().is_refused(bytes);
                    library.devices[device].update(|account| account.end_waiting(bytes));
                    *wakes = true;
                    (!is_refused).then_some(Wishes::NotYet)
                }
                Wishes::NotYet => match library.devices[device].update(|a| a.admit(bytes, kind, 0, caller)) {
                    Ok(Admission::Charged(charged)) => {
                        library.is_inside = is_open;
                        Some(Wishes::Made { until: now + makes, charged })
                    }
                    Ok(Admission::NeedsRoom(bytes)) => {
                        let until = now + Duration::from_micros(self.random(200));
                        self.processes[i].program.wanted[0].state = Wishes::Unsaid { until, bytes };
                        continue;
                    }
                    Ok(Admission::Again) => panic!("a device is held and the gate is closed"),
                    Err(_) => None,
                },
            };
            let program = &mut process.program;
            match state {
                Some(state) => program.wanted[0].state = state,
                None => {
                    let was_made = matches!(wanted.state, Wishes::Made { .. });
                    program.refused += u64::from(!was_made);
                    program.wanted.pop_front();
                }
            }
        }
        true
    }

    /// The program ends, with everything that it had, and the next one of its shell starts.
    fn end(&mut self, i: usize) {
        self.disconnect(i, false);
        self.processes[i].is_dead = true;
        let next = self.processes.iter().position(|process| process.plan.after == Some(i));
        if let Some(next) = next {
            self.at(self.now + MS(10), Later::Start(next));
        }
    }
}
