//! Exits that take long, and handlers that use the driver at exit. Handlers registered after `cuInit` run before the driver shuts down;
//! handlers registered earlier run after it. And a first thread that ends long before the process.

use nvshare_harness::{PlayedScheduler, Program, Running, Scheduler, World, wait_until};
use nvshare_proto::units::MIB;
use nvshare_proto::{Amount, ClientMessage, ClientState, Epoch, GpuUuid, SchedulerMessage};
use std::process::Command;

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];
const BYTES: u64 = 16 * MIB;

/// A guest that has worked, with the lock, and the scheduler that it has.
struct Exit {
    world: World,
    guest: Running,
    scheduler: PlayedScheduler,
    gpu: GpuUuid,
    granted: u64,
}

impl Exit {
    fn of(memory: &str, what: &str, when: &str) -> Self {
        let world = World::with_memory(memory, CARD);
        let listener = PlayedScheduler::listen(&world);
        let wake = world.dir().join("wake");
        let guest = Program::guest(&world, "at_exit", &[what, when]).until_told();
        let guest = guest.env("WAKE", &wake.to_string_lossy()).start();
        let (mut scheduler, usage) = PlayedScheduler::accept(&listener);
        let (mut gpu, mut waits) = (usage.first().map(|usage| usage.gpu), false);
        let gpu = scheduler.until(|message| {
            match message {
                ClientMessage::Usage(usage) => gpu = Some(usage.gpu),
                ClientMessage::ReqLock => waits = true,
                _ => {}
            }
            gpu.filter(|_| waits)
        });
        scheduler.say(&[SchedulerMessage::Capacity(Amount { gpu, bytes: 1 << 30 })]);
        let mut exit = Self { world, guest, scheduler, gpu, granted: 0 };
        exit.grant();
        exit.says("has worked\n");
        exit
    }

    fn grant(&mut self) {
        self.granted += 1;
        let (epoch, room) = (self.epoch(), vec![Amount { gpu: self.gpu, bytes: BYTES }]);
        self.scheduler.say(&[SchedulerMessage::LockOk { epoch, quantum_ms: 60_000, room }]);
        self.scheduler.until_running();
    }

    fn epoch(&self) -> Epoch {
        Epoch { boot: 1, counter: self.granted }
    }

    fn says(&self, text: &str) {
        wait_until("the guest says so", || self.guest.out().contains(text));
    }

    /// Asks for the lock. Returns whether the guest gives it back, instead of keeping it.
    fn ask_for_lock(&mut self) -> bool {
        self.scheduler.say(&[SchedulerMessage::DropLock { epoch: self.epoch(), patience_ms: 60_000 }]);
        self.scheduler.until(|m| match m {
            ClientMessage::LockReleased { .. } | ClientMessage::Idle { .. } => Some(true),
            ClientMessage::DropDeferred { .. } => Some(false),
            _ => None,
        })
    }

    /// Takes the lock and all memory away. Returns the bytes that could not leave.
    fn take_all(&mut self) -> u64 {
        assert!(self.ask_for_lock());
        self.scheduler.say(&[SchedulerMessage::Evict(Amount { gpu: self.gpu, bytes: BYTES })]);
        self.scheduler.until(|m| match m {
            ClientMessage::Evicted { short, .. } => Some(*short),
            _ => None,
        })
    }

    fn asks(&mut self) {
        self.scheduler.until(|m| matches!(m, ClientMessage::ReqLock).then_some(()));
    }

    fn out(self) -> String {
        let finished = self.guest.finish();
        assert!(finished.status.success(), "{} {}", finished.out, finished.log);
        finished.out
    }
}

fn an_exit_that_takes_long_gives_the_lock_back(memory: &str) {
    let mut exit = Exit::of(memory, "lingers", "after");
    exit.world.wake();
    exit.says("lingers\n");
    assert_eq!(exit.take_all(), 0, "the driver still moves memory");
    exit.world.stop();
    exit.out();
}

fn an_exit_behind_the_drivers_own_gives_the_lock_back(memory: &str) {
    let mut exit = Exit::of(memory, "lingers", "before");
    exit.world.wake();
    exit.says("lingers\n");
    assert_eq!(exit.take_all(), BYTES, "memory stays until the process has ended, and that is said");
    exit.world.stop();
    exit.out();
}

fn an_exit_handler_finds_its_memory(memory: &str) {
    let mut exit = Exit::of(memory, "reads", "after");
    assert_eq!(exit.take_all(), 0);
    exit.world.wake();
    exit.asks();
    exit.grant();
    let out = exit.out();
    assert!(out.ends_with("handler 0 0 7\nthread 0 0 7\n"), "{out}");
}

fn a_handler_behind_the_drivers_own_gets_its_answer(memory: &str) {
    let mut exit = Exit::of(memory, "reads", "before");
    assert_eq!(exit.take_all(), 0);
    exit.world.wake();
    let out = exit.out();
    assert!(out.ends_with("handler 4 4 0\nthread 4 4 0\n"), "{out}");
}

fn a_thread_at_the_gate_is_joined(memory: &str, when: &str, answer: &str) {
    let mut exit = Exit::of(memory, "joins", when);
    assert_eq!(exit.take_all(), 0);
    exit.world.wake();
    exit.asks();
    exit.world.stop();
    if when == "after" {
        // The driver still accepts calls of this thread, so the thread waits for its turn.
        exit.grant();
    }
    let out = exit.out();
    assert!(out.ends_with(answer), "{out}");
}

fn a_thread_at_the_gate_can_be_joined_at_exit(memory: &str) {
    a_thread_at_the_gate_is_joined(memory, "after", "worked 0\n");
}

fn a_thread_at_the_gate_can_be_joined_behind_the_drivers_own(memory: &str) {
    a_thread_at_the_gate_is_joined(memory, "before", "worked 4\n");
}

nvshare_harness::with_both_memories! {
    an_exit_that_takes_long_gives_the_lock_back
    an_exit_behind_the_drivers_own_gives_the_lock_back
    an_exit_handler_finds_its_memory
    a_handler_behind_the_drivers_own_gets_its_answer
    a_thread_at_the_gate_can_be_joined_at_exit
    a_thread_at_the_gate_can_be_joined_behind_the_drivers_own
}

#[test]
fn others_run_beside_an_exit_that_takes_long() {
    let world = World::with_memory("swap", CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.2"]);
    let wake = world.dir().join("wake");
    let guest = Program::guest(&world, "at_exit", &["lingers", "before"]).until_told();
    let guest = guest.env("WAKE", &wake.to_string_lossy()).start();
    wait_until("the guest has worked", || guest.out().contains("has worked\n"));
    world.wake();
    wait_until("the guest lingers", || guest.out().contains("lingers\n"));
    // It does not fit beside what the guest has, but for the lock.
    let other = Program::workload(&world, "other", "--memory 768MiB --block 64MiB --kernel-us 1000");
    let other = other.until_told().start();
    Scheduler::until(&world, "the other one runs", |status| {
        status.clients.iter().any(|client| client.pid == other.pid() && client.state == ClientState::Running)
    });
    world.stop();
    other.finish().intact();
    guest.finish().passed();
}

#[test]
fn what_an_executable_calls_is_seen_though_the_first_thread_has_ended() {
    for memory in ["managed", "swap"] {
        let world = World::with_memory(memory, CARD);
        let program = world.dir().join("main_has_ended");
        world.link_to_driver(&program, "main_has_ended.c", &[]);
        let finished = Program::of(&world, "linked", Command::new(&program)).preloaded().start().finish();
        finished.passed();
        assert_eq!(finished.out, "done\n");
    }
}
