//! Memory comes to the card while that of the program before leaves it, and nothing that happens in the middle loses any.

use std::path::PathBuf;

use nvshare_harness::{Program, Running, Scheduler, World, wait_until};
use nvshare_proto::units::MIB;
use nvshare_proto::{ClientState, ClientStatus};

/// A card of 1 GiB. Memory leaves it so slowly that a test can look in the middle.
const SLOW: &[(&str, &str)] =
    &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64"), ("NVSIM_TO_DEVICE", "12"), ("NVSIM_COPY_OUT", "0.5")];
/// A program that does not answer is waited for as long as a test may take.
const SCHEDULER: &[&str] = &["--gpu-memory", "1GiB", "--tq", "0.3", "--grace", "600"];
/// Two programs have so much each, and this part of it stays on the card while the other one runs.
const EACH: u64 = 768 * MIB;
const STAYS: u64 = 256 * MIB;

/// Bytes of a program that are on the card, as it says itself.
fn on_card(client: &ClientStatus) -> u64 {
    client.usage.iter().map(|usage| usage.allocated - usage.absent).sum()
}

/// Two programs in the middle of an exchange. A part of what has to leave has left, and copies of the rest are held.
struct Exchange {
    world: World,
    scheduler: Scheduler,
    leaves: Running,
    comes: Running,
    hold: InitialState,
}

/// Holds what a program copies from the card.
struct InitialState(PathBuf);

impl InitialState {
    fn is_met(&self) -> bool {
        self.0.with_extension("waits").exists()
    }

    fn begin(&self) {
        let _ = std::fs::remove_file(self.0.with_extension("waits"));
        std::fs::write(&self.0, "").expect("a file");
    }

    fn end(&self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Exchange {
    fn in_its_middle() -> Self {
        let world = World::with_memory("swap", SLOW);
        let scheduler = Scheduler::start(&world, SCHEDULER);
        let args = "--memory 768MiB --block 64MiB --kernel-us 1000 --full-check";
        let mut jobs = ["a", "b"].map(|name| {
            let hold = world.dir().join(format!("held-{name}"));
            let program = Program::workload(&world, name, args).until_told().waits_for_go();
            (program.holds_up("out", &hold).start(), InitialState(hold))
        });
        Running::go(&[&jobs[0].0, &jobs[1].0]);
        // The scheduler has been told of room that the first of the two has made, and that is not all of it.
        let is_in_the_middle = |[(leaves, _), (comes, _)]: &[(Running, InitialState); 2]| {
            let status = Scheduler::status(&world);
            let leaves = status.client(leaves.pid()).resident;
            status.client(comes.pid()).state == ClientState::Next && leaves < EACH && leaves > STAYS
        };
        wait_until("a program is held in the middle of an eviction", || {
            jobs.swap(0, 1);
            if !is_in_the_middle(&jobs) {
                return false;
            }
            let hold = &jobs[0].1;
            hold.begin();
            wait_until("a copy is held, or the last is done", || hold.is_met() || !is_in_the_middle(&jobs));
            let stays = hold.is_met() && is_in_the_middle(&jobs);
            if !stays {
                hold.end();
            }
            stays
        });
        let [(leaves, hold), (comes, _)] = jobs;
        Self { world, scheduler, leaves, comes, hold }
    }

    /// Waits until memory has come that there was no room for before.
    fn comes(&self) {
        wait_until("memory comes while the rest is still to leave", || {
            let status = Scheduler::status(&self.world);
            let (leaves, comes) = (status.client(self.leaves.pid()), status.client(self.comes.pid()));
            assert_eq!(comes.state, ClientState::Next, "the gate stays closed");
            assert!(leaves.resident > STAYS, "the copies of the program that leaves are held");
            on_card(comes) > STAYS
        });
    }
}

/// Programs that run on end with all of their data.
fn end_intact(world: &World, programs: Vec<Running>) {
    let all: Vec<&Running> = programs.iter().collect();
    Scheduler::until_more_turns(world, &all, 2);
    world.stop();
    for program in programs {
        program.finish().intact();
    }
    world.moved_when_told();
}

#[test]
fn memory_comes_before_the_last_has_left() {
    let exchange = Exchange::in_its_middle();
    exchange.comes();
    exchange.hold.end();
    let Exchange { world, scheduler: _scheduler, leaves, comes, .. } = exchange;
    end_intact(&world, vec![leaves, comes]);
}

#[test]
fn the_program_that_is_next_is_killed_in_the_middle() {
    let exchange = Exchange::in_its_middle();
    exchange.comes();
    exchange.comes.signal(libc::SIGKILL);
    exchange.hold.end();
    let Exchange { world, scheduler: _scheduler, leaves, comes, .. } = exchange;
    assert!(!comes.finish().status.success());
    Scheduler::until(&world, "the other one runs with all of its memory", |status| {
        let client = status.client(leaves.pid());
        client.state == ClientState::Running && on_card(client) == EACH
    });
    world.stop();
    leaves.finish().intact();
}

#[test]
fn the_program_that_leaves_is_killed_in_the_middle() {
    let exchange = Exchange::in_its_middle();
    exchange.comes();
    exchange.leaves.signal(libc::SIGKILL);
    let Exchange { world, scheduler: _scheduler, leaves, comes, .. } = exchange;
    assert!(!leaves.finish().status.success());
    Scheduler::until(&world, "the other one runs with all of its memory", |status| {
        let client = status.client(comes.pid());
        client.state == ClientState::Running && on_card(client) == EACH
    });
    world.stop();
    comes.finish().intact();
}

#[test]
fn the_scheduler_is_killed_in_the_middle() {
    let exchange = Exchange::in_its_middle();
    exchange.comes();
    let Exchange { world, scheduler, leaves, comes, hold } = exchange;
    scheduler.kill();
    hold.end();
    let _scheduler = Scheduler::start(&world, SCHEDULER);
    end_intact(&world, vec![leaves, comes]);
}

#[test]
fn scheduling_is_switched_off_in_the_middle_and_on_again() {
    let exchange = Exchange::in_its_middle();
    exchange.comes();
    let Exchange { world, scheduler: _scheduler, leaves, comes, hold } = exchange;
    let off = Scheduler::ctl(&world, &["off", "--force"]);
    assert!(off.status.success(), "{off:?}");
    hold.end();
    wait_until("the program that is next goes on alone", || comes.log().contains("received SchedOff"));
    let on = Scheduler::ctl(&world, &["on"]);
    assert!(on.status.success(), "{on:?}");
    end_intact(&world, vec![leaves, comes]);
}

/// Its room comes before the first copy is done, so the memory of the other program can come meanwhile.
#[test]
fn what_needs_no_copy_leaves_before_what_is_copied() {
    const CHANGES: u64 = 256 * MIB;
    let world = World::with_memory("swap", &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")]);
    let held = world.dir().join("held");
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1", "--grace", "600"]);
    let guest = Program::guest(&world, "leaves_in_order", &[]).until_told();
    let guest = guest.holds_up("out", &held).start();
    // 384 MiB of the guest's 512 have to leave: by their size, first those that change.
    let other = Program::workload(&world, "other", "--memory 896MiB --block 64MiB --kernel-us 1000");
    let other = other.until_told().start();
    // The host has copies of everything by then.
    Scheduler::until_turns(&world, &[&guest, &other], 3);
    // Stopped while its gate is open, the other one keeps the card: nothing of the guest is on its way out.
    wait_until("the other program is stopped while it runs", || {
        let state = || Scheduler::status(&world).client(other.pid()).state;
        if state() != ClientState::Running {
            return false;
        }
        other.signal(libc::SIGSTOP);
        let stays = matches!(state(), ClientState::Running | ClientState::Draining);
        if !stays {
            other.signal(libc::SIGCONT);
        }
        stays
    });
    std::fs::write(&held, "").expect("a file");
    other.signal(libc::SIGCONT);
    Scheduler::until(&world, "what has not changed has left, and no copy is done", |status| {
        held.with_extension("waits").exists() && on_card(status.client(guest.pid())) == CHANGES + 128 * MIB
    });
    std::fs::remove_file(&held).expect("the file");
    Scheduler::until_turns(&world, &[&guest, &other], 5);
    world.stop_guest(guest, other);
    world.moved_when_told();
}

/// One for each would be a fifth of what a piece of 2 MiB costs.
#[test]
fn small_pieces_share_the_events_of_their_copies() {
    let settings = [("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64"), ("NVSHARE_CONTENT", "off")];
    let world = World::with_memory("swap", &settings);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let guest = Program::guest(&world, "many_pieces", &[]).until_told().start();
    let other = Program::workload(&world, "other", "--memory 896MiB --block 64MiB --kernel-us 1000");
    let other = other.until_told().start();
    // How many pieces come back in a turn depends on how far the exchange comes.
    Scheduler::until(&world, "256 pieces of 2 MiB have come back", |status| {
        status.find(guest.pid()).is_some_and(|client| client.counters.restored >= 512 * MIB)
    });
    let guest = world.stop_guest(guest, other);
    let counts: Vec<u64> = guest.out.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let &[mapped, events] = counts.as_slice() else { panic!("{}", guest.out) };
    // Pieces that have come back; as many have left.
    let moved = mapped - 256;
    assert!(moved >= 2 * 128 && events < moved, "{moved} pieces each way, {events} events");
}
