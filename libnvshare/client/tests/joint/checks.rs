//! Rules that hold in every world, by what the processes do and not by what the core believes.

use std::time::Duration;

use nvshare_proto::{GpuUuid, InitialState, SchedulerMessage};

use crate::library::{Device, GateState};
use crate::world::{CAPACITY, GIB, GPUS, MS, Process, World, gpu};

impl World {
    /// The core's sums are right, and its events tell where each client stands.
    pub(crate) fn audit(&self) {
        if let Err(wrong) = self.core.audit() {
            panic!("at {:?}: {wrong}", self.now);
        }
        self.follower.agrees(&self.core, self.silent);
    }

    /// The invariants, by what the processes do.
    pub(crate) fn check(&self) {
        for n in 0..GPUS {
            let gpu = gpu(n);
            let (mut resident, mut demand, mut running, mut absent) = (0, 0, 0, 0);
            for process in &self.processes {
                let Some(device) = process.library.devices.iter().find(|device| device.gpu == gpu) else {
                    continue;
                };
                // A process that is dying has its memory until it is gone.
                if process.is_dead || !process.has_started {
                    continue;
                }
                let account = device.account();
                resident += account.charged() + account.unused_room();
                if process.is_running() {
                    running += 1;
                    demand += account.charged();
                    // It runs without the room that it was refused. In a drain nothing is submitted, and a copy on its way is given up.
                    let is_draining = process.library.gate == GateState::Closed;
                    absent += if process.is_refused || is_draining { 0 } else { account.absent() };
                }
            }
            if self.was_killed {
                continue;
            }
            assert!(resident <= CAPACITY, "{} GiB resident on {gpu}", resident as f64 / GIB as f64);
            assert!(!self.config.exclusive || running <= 1, "{running} run where one may");
            if running > 1 {
                assert!(demand <= CAPACITY, "a run set of {} GiB", demand / GIB);
                assert_eq!(absent, 0, "a member runs with memory absent");
            }
        }
    }

    /// Whether a process may be told this.
    pub(crate) fn check_message(&self, i: usize, message: &SchedulerMessage) {
        let process = &self.processes[i];
        match message {
            SchedulerMessage::Registered { hold, .. } => {
                let ran = process.plan.runs_already || self.was_killed;
                assert!(ran || *hold == InitialState::Parked, "process {i} is taken for one that runs");
            }
            // Nobody is refused room while everybody gives way.
            SchedulerMessage::NoRoom { gpu } if !self.was_killed && !self.has_outgrown(i, *gpu) => {
                let was_stopped = |p: &Process| p.stopped_until > Duration::ZERO;
                let excused = |p: &Process| p.plan.cannot_evict || p.plan.dies_at.is_some() || was_stopped(p);
                assert!(self.processes.iter().any(excused), "no room, though everybody gives way");
                // It asks again when a process that was stopped goes on.
                if self.processes.iter().any(was_stopped) {
                    return;
                }
                let device = process.library.devices.iter().find(|device| device.gpu == *gpu);
                let absent = device.map_or(0, |device| device.account().absent());
                assert!(
                    absent == 0 || !process.is_recalled,
                    "process {i} is called back where there is no room"
                );
            }
            _ => {}
        }
    }

    /// Whether the gang of a process has more memory than a GPU has.
    fn has_outgrown(&self, i: usize, gpu: GpuUuid) -> bool {
        let gang = self.processes[i].plan.gang;
        let members = self.processes.iter().filter(|process| gang.is_some() && process.plan.gang == gang);
        let devices = members.flat_map(|process| &process.library.devices).filter(|device| device.gpu == gpu);
        let needs = |device: &Device| device.account().allocated() + device.account().lacking();
        devices.map(needs).sum::<u64>() > CAPACITY
    }

    /// Whether a process may lack this room on one of its devices when a restore is over.
    pub(crate) fn check_lacking(&self, i: usize, device: usize, lacking: u64) {
        let process = &self.processes[i];
        // A process that had begun to leave when it was told to go on has given some of its room back, and one that was stopped
        // answers when nobody waits for its answer any more. An allocation of another thread may be told too late.
        if process.stopped_until > Duration::ZERO
            || process.plan.grows_in_drains
            || process.is_recalled
            || process.plan.runs_already
            || self.was_killed
        {
            return;
        }
        let since = process.library.devices[device].account().allocated() - process.known_at_grant[device];
        // The core counted this room as the process's own.
        let crossed = process.returned.crossed(process.library.devices[device].gpu);
        assert!(
            lacking <= since + crossed,
            "process {i} lacks {lacking} bytes of what it had when it was granted, and gave back {crossed}"
        );
    }

    /// Runs for as long as it takes to serve everybody, and looks whether that was so.
    pub(crate) fn serves_everybody(&mut self) {
        // Everybody's work one after the other, its pauses, and as much again and more for hand-overs.
        self.serves_everybody_within(6);
    }

    /// The same in `times` times the time that everybody's work and pauses take one after the other, and a minute.
    pub(crate) fn serves_everybody_within(&mut self, times: u64) {
        let total: u64 = self.processes.iter().map(|p| p.plan.work + p.plan.work / 100 * p.plan.pause).sum();
        self.run(MS(60_000 + total * times));
        for (i, process) in self.processes.iter().enumerate() {
            if !process.is_over() && process.plan.dies_at.is_none() {
                assert!(
                    process.program.served >= MS(process.plan.work),
                    "process {i} got {:?} of {} ms: {:?}",
                    process.program.served,
                    process.plan.work,
                    self.core.client_status()
                );
            }
        }
    }

    /// The GPU time that a process's work has had.
    pub(crate) fn served(&self, i: usize) -> Duration {
        let process = &self.processes[i];
        let since = process.library.submits_since.map_or(Duration::ZERO, |since| self.now - since);
        process.program.served + since
    }

    /// The longest time that a process's work has waited for the lock, the wait that is not over included.
    pub(crate) fn longest_wait(&self, i: usize) -> Duration {
        let program = &self.processes[i].program;
        let waits = program.wanted_since.map_or(Duration::ZERO, |since| self.now.saturating_sub(since));
        program.longest_wait.max(waits)
    }

    /// How long a process held the lock, by the core's account.
    pub(crate) fn held(&self, i: usize) -> Duration {
        let client = self.processes[i].client;
        let rows = self.core.client_status();
        rows.iter().find(|row| Some(row.client) == client).map_or(Duration::ZERO, |row| MS(row.held_ms))
    }
}
