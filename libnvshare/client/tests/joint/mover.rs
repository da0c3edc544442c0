//! A process's mover: it drains, restores and evicts as the library's does, and takes its time.

use std::collections::VecDeque;
use std::time::Duration;

use nvshare_client::machine::ROOM_IS_LATE;
use nvshare_client::{Done, MoverOrder, Ticket};
use nvshare_proto::Amount;

use crate::agenda::Later;
use crate::world::{GIB, MS, World};

/// The work of a thread of the mover.
#[derive(Debug)]
enum Task {
    Drain { ticket: Ticket },
    Probe { submissions: u64 },
    Restore(Restore),
    Evict(Evict),
}

#[derive(Debug)]
struct Restore {
    /// Allocations that it has still to look at, by number, the last one next.
    left: Vec<usize>,
    /// The allocation that is on its way, and the bytes that are charged for it.
    moving: Option<(usize, u64)>,
    /// Bytes that each device lacks.
    lacks: Vec<u64>,
    /// It waits where room is lacking.
    is_ahead: bool,
    /// When the last room came.
    came_at: Duration,
}

#[derive(Debug)]
struct Evict {
    room: Amount,
    moved: u64,
    /// Steps that it takes.
    steps: u64,
}

/// A thread of the mover: the first one, or one that evicts a device's memory in a process with several.
#[derive(Debug, Default)]
pub(crate) struct Lane {
    queue: VecDeque<(MoverOrder, u64)>,
    task: Option<(Task, u64)>,
    /// Which of the events that were planned for it counts.
    pub(crate) planned: u64,
    is_planned: bool,
    /// The task was given up.
    is_given_up: bool,
}

impl Lane {
    /// Whether it has nothing to do.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.task.is_none() && self.queue.is_empty()
    }
}

impl World {
    /// Gives orders to the threads of a process's mover.
    pub(crate) fn start_lanes(&mut self, i: usize) {
        let process = &mut self.processes[i];
        let several = process.library.devices.len() > 1;
        while let Some((order, generation)) = process.library.orders.pop_front() {
            let lane = match &order {
                MoverOrder::Evict(room) if several => {
                    1 + process.library.devices.iter().position(|device| device.gpu == room.gpu).unwrap()
                }
                _ => 0,
            };
            process.lanes[lane].queue.push_back((order, generation));
        }
        let generation = process.library.generation;
        for lane in 0..process.lanes.len() {
            let this = &mut self.processes[i].lanes[lane];
            match &this.task {
                None if !this.queue.is_empty() && !this.is_planned => self.plan(i, lane, 5, 50),
                Some((Task::Evict(_), _)) | None => {}
                Some((task, given)) if *given != generation && !this.is_given_up => {
                    // A piece that is on its way is waited for.
                    let most = if matches!(task, Task::Restore(_)) { 6000 } else { 100 };
                    this.is_given_up = true;
                    self.plan(i, lane, 10, most);
                }
                Some(_) => {}
            }
        }
    }

    /// Plans the next step of a thread, after `least` to `most` microseconds.
    fn plan(&mut self, i: usize, lane: usize, least: u64, most: u64) {
        let delay = Duration::from_micros(least + self.random(most - least + 1));
        self.plan_at(i, lane, self.now + delay);
    }

    fn plan_at(&mut self, i: usize, lane: usize, at: Duration) {
        let this = &mut self.processes[i].lanes[lane];
        this.planned += 1;
        this.is_planned = true;
        let planned = this.planned;
        self.at(at, Later::Move(i, lane, planned));
    }

    /// A thread of the mover goes on.
    pub(crate) fn go_on(&mut self, i: usize, lane: usize) {
        let this = &mut self.processes[i].lanes[lane];
        this.is_planned = false;
        let is_given_up = std::mem::take(&mut this.is_given_up);
        match this.task.take() {
            None => self.begin_task(i, lane),
            Some((Task::Restore(restore), _)) if is_given_up => {
                self.give_up_restore(i, restore);
                self.next_task(i, lane);
            }
            Some((Task::Probe { .. }, _)) if is_given_up => {
                self.report(i, Done::Busy);
                self.next_task(i, lane);
            }
            Some((Task::Drain { .. }, _)) if is_given_up => self.next_task(i, lane),
            Some((Task::Drain { ticket }, generation)) => self.drain(i, lane, ticket, generation),
            Some((Task::Probe { submissions }, generation)) => self.probe(i, lane, submissions, generation),
            Some((Task::Restore(restore), generation)) => self.restore(i, lane, restore, generation),
            Some((Task::Evict(evict), generation)) => self.evict(i, lane, evict, generation),
        }
    }

    fn next_task(&mut self, i: usize, lane: usize) {
        if !self.processes[i].lanes[lane].queue.is_empty() {
            self.plan(i, lane, 1, 10);
        }
    }

    fn begin_task(&mut self, i: usize, lane: usize) {
        let process = &mut self.processes[i];
        let now = process.library.generation;
        let next = std::iter::from_fn(|| process.lanes[lane].queue.pop_front())
            .find(|(order, generation)| matches!(order, MoverOrder::Evict(_)) || *generation == now);
        let Some((order, generation)) = next else { return };
        match order {
            MoverOrder::Drain(ticket) => self.drain(i, lane, ticket, generation),
            MoverOrder::Probe => {
                let submissions = nvshare_client::Host::submissions(&self.processes[i].library);
                self.probe(i, lane, submissions, generation);
            }
            MoverOrder::Restore | MoverOrder::RestoreEarly => {
                let library = &process.library;
                let left = (0..library.allocations.len()).map(|at| library.allocations[at].number).rev();
                let restore = Restore {
                    left: left.collect(),
                    moving: None,
                    lacks: vec![0; library.devices.len()],
                    is_ahead: order == MoverOrder::RestoreEarly,
                    came_at: self.now,
                };
                self.keep(i, lane, Task::Restore(restore), generation);
                self.plan(i, lane, 50, 100);
            }
            MoverOrder::Sleep | MoverOrder::Wake => unreachable!("no scheduler says so here"),
            MoverOrder::Evict(room) => {
                let steps = 1 + self.random(3);
                self.keep(i, lane, Task::Evict(Evict { room, moved: 0, steps }), generation);
                self.plan(i, lane, 10, 60_000);
            }
        }
    }

    fn keep(&mut self, i: usize, lane: usize, task: Task, generation: u64) {
        self.processes[i].lanes[lane].task = Some((task, generation));
    }

    /// A report of work that is done reaches the session a moment later, in its order.
    fn report(&mut self, i: usize, done: Done) {
        let time =
            (self.now + Duration::from_micros(1 + self.random(100))).max(self.processes[i].reported_at);
        self.processes[i].reported_at = time;
        self.at(time, Later::Done(i, done));
    }

    fn drain(&mut self, i: usize, lane: usize, ticket: Ticket, generation: u64) {
        let library = &mut self.processes[i].library;
        if library.is_complete() {
            library.progress += 1;
            self.report(i, Done::Drained(ticket));
            self.next_task(i, lane);
            return;
        }
        let (is_inside, complete_at) = (library.is_inside, library.complete_at);
        self.keep(i, lane, Task::Drain { ticket }, generation);
        match complete_at {
            _ if is_inside => self.plan_at(i, lane, self.now + MS(1)),
            Some(at) if self.processes[i].plan.drains_slowly => {
                self.processes[i].library.progress += 1;
                self.plan_at(i, lane, at.min(self.now + MS(100)));
            }
            Some(at) => self.plan_at(i, lane, at),
            // It depends on a thread that sleeps at the gate: only giving it up ends it.
            None => {}
        }
    }

    fn probe(&mut self, i: usize, lane: usize, submissions: u64, generation: u64) {
        let library = &self.processes[i].library;
        if nvshare_client::Host::submissions(library) != submissions || library.is_inside {
            self.report(i, Done::Busy);
        } else if library.is_complete() {
            self.report(i, Done::Quiet { submissions });
        } else {
            self.keep(i, lane, Task::Probe { submissions }, generation);
            self.plan_at(i, lane, self.now + MS(1));
            return;
        }
        self.next_task(i, lane);
    }

    /// Memory on its way arrives, and the next allocation's absent bytes follow, as far as there is room.
    fn restore(&mut self, i: usize, lane: usize, mut restore: Restore, generation: u64) {
        let process = &mut self.processes[i];
        if process.lanes[1..].iter().any(|lane| lane.task.is_some()) {
            // Memory that was ordered out is out before anything comes back in.
            self.keep(i, lane, Task::Restore(restore), generation);
            self.plan_at(i, lane, self.now + MS(5));
            return;
        }
        let library = &mut process.library;
        if let Some((number, charged)) = restore.moving.take() {
            library.allocation(number).residency.restored(charged);
        }
        while let Some(number) = restore.left.pop() {
            let allocation = library.allocation(number);
            let (device, absent) = (allocation.device, allocation.residency.absent_bytes());
            if absent == 0 {
                continue;
            }
            let piece = if restore.is_ahead { absent.min(GIB) } else { absent };
            let charged = library.devices[device].update(|account| account.charge(piece));
            if restore.is_ahead {
                if charged < absent {
                    restore.left.push(number);
                }
                if charged == 0 {
                    if self.now - restore.came_at >= ROOM_IS_LATE {
                        self.next_task(i, lane);
                        return;
                    }
                    self.keep(i, lane, Task::Restore(restore), generation);
                    self.plan(i, lane, 100, 2000);
                    return;
                }
                restore.came_at = self.now;
            } else {
                restore.lacks[device] += absent - charged;
            }
            if charged > 0 {
                let several = library.allocations.len() as u64;
                restore.moving = Some((number, charged));
                let longest = if restore.is_ahead { 25_000 } else { 400_000 / several };
                self.keep(i, lane, Task::Restore(restore), generation);
                self.plan(i, lane, 10, longest);
                return;
            }
        }
        let lacks = |(device, lacks): (&crate::library::Device, u64)| {
            let bytes = device.account().to_ask_for_after_restore(lacks, 0);
            (bytes > 0).then_some(Amount { gpu: device.gpu, bytes })
        };
        let lacking = library.devices.iter().zip(restore.lacks.iter().copied()).filter_map(lacks).collect();
        for (device, lacks) in restore.lacks.into_iter().enumerate() {
            self.check_lacking(i, device, lacks);
        }
        self.report(i, Done::Restored { lacking });
        self.next_task(i, lane);
    }

    /// Half of what was on its way has come; the rest is absent still.
    fn give_up_restore(&mut self, i: usize, restore: Restore) {
        let library = &mut self.processes[i].library;
        if let Some((number, charged)) = restore.moving {
            let allocation = library.allocation(number);
            let came = charged / 2;
            allocation.residency.restored(came);
            let device = allocation.device;
            library.devices[device].update(|account| account.uncharge(charged - came));
        }
    }

    fn evict(&mut self, i: usize, lane: usize, mut evict: Evict, generation: u64) {
        let process = &mut self.processes[i];
        let mut host = if process.plan.cannot_evict { 0 } else { u64::MAX };
        let Amount { gpu, bytes } = evict.room;
        let library = &mut process.library;
        assert!(!library.has_work(), "memory leaves under work in flight");
        let device = library.devices.iter().position(|device| device.gpu == gpu).unwrap();
        let step = (bytes - evict.moved).div_ceil(evict.steps);
        let before = evict.moved;
        for allocation in &mut library.allocations {
            if allocation.device != device || !allocation.kind.is_movable() {
                continue;
            }
            while evict.moved - before < step
                && let Some(piece) = allocation.residency.next_out(step - (evict.moved - before), host)
            {
                allocation.residency.evicted(piece);
                host -= piece.fresh;
                evict.moved += piece.bytes();
                library.devices[device].update(|account| account.discharge(piece.bytes()));
            }
        }
        evict.steps -= 1;
        if evict.moved > before {
            self.report(i, Done::Evicted(gpu));
        }
        if evict.steps > 0 && evict.moved > before && evict.moved < bytes {
            self.keep(i, lane, Task::Evict(evict), generation);
            self.plan(i, lane, 10, 60_000);
        } else {
            self.processes[i].library.evictions -= 1;
            let short = bytes.saturating_sub(evict.moved);
            self.report(i, Done::EvictionEnds { gpu, short });
            self.next_task(i, lane);
        }
    }
}
