//! A card that is full: memory that managed memory of one program has given up stays with the driver, and another program that
//! needs physical memory gets it back at a price for each call that asks.

use nvshare_harness::{PlayedScheduler, Program, Running, World, wait_until};
use nvshare_proto::units::{GIB, MIB};
use nvshare_proto::{Amount, ClientMessage, Epoch, SchedulerMessage};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64"), ("NVSIM_KEEPS_PAGES", "1")];
/// Memory of the program beside which managed memory is given up: 24 chunks. The card has 256 MiB that nobody has given up.
const BYTES: u64 = 768 * MIB;

/// A program without nvshare that has managed memory and gives it up.
struct Giver {
    running: Running,
    gave: usize,
}

impl Giver {
    fn start(world: &World) -> Self {
        let again = world.dir().join("again");
        let running = Program::guest(world, "gives_up", &[]).alone().until_told();
        let running = running.env("AGAIN", &again.to_string_lossy()).start();
        let mut giver = Self { running, gave: 0 };
        giver.wait();
        giver
    }

    fn wait(&mut self) {
        self.gave += 1;
        wait_until("managed memory has left the card", || {
            assert!(self.running.lives(), "{}", self.running.log());
            self.running.out().matches("gave up\n").count() == self.gave
        });
    }

    fn again(&mut self, world: &World) {
        std::fs::write(world.dir().join("again"), "").expect("a file");
        self.wait();
    }
}

fn taken_back(world: &World) -> u64 {
    world.observe().0.taken_back
}

/// Waits for what a program says.
fn says(program: &Running, text: &str) {
    wait_until("the program says so", || {
        assert!(program.lives(), "{} {}", program.out(), program.log());
        program.out().contains(text)
    });
}

#[test]
fn an_allocation_takes_what_was_given_up_by_one_call() {
    let world = World::with_memory("swap", CARD);
    let giver = Giver::start(&world);
    Program::guest(&world, "takes_at_once", &[]).start().finish().passed();
    assert_eq!(taken_back(&world), 1);
    world.stop();
    giver.running.finish().passed();
}

#[test]
fn memory_that_comes_back_takes_what_was_given_up_by_one_call() {
    let world = World::with_memory("swap", CARD);
    let (mut client, guest, gpu) = PlayedScheduler::of_waiting_guest(&world);
    let room = Amount { gpu, bytes: BYTES };
    let epoch = |counter| Epoch { boot: 1, counter };
    let grant = |client: &mut PlayedScheduler, counter| {
        client.say(&[SchedulerMessage::LockOk {
            epoch: epoch(counter),
            quantum_ms: 60_000,
            room: vec![room],
        }]);
        client.until_running();
    };
    client.say(&[SchedulerMessage::Capacity(Amount { gpu, bytes: GIB })]);
    says(&guest, "has memory\n");
    grant(&mut client, 0);
    let mut giver = None;
    for turn in 1..=3 {
        client.say(&[SchedulerMessage::DropLock { epoch: epoch(turn - 1), patience_ms: 60_000 }]);
        client.until(|m| {
            matches!(m, ClientMessage::LockReleased { .. } | ClientMessage::Idle { .. }).then_some(())
        });
        client.say(&[SchedulerMessage::Evict(room)]);
        client.until(|m| matches!(m, ClientMessage::Evicted { .. }).then_some(()));
        match &mut giver {
            None => giver = Some(Giver::start(&world)),
            Some(giver) => giver.again(&world),
        }
        world.wake();
        grant(&mut client, turn);
        assert_eq!(taken_back(&world), turn, "one call for all of it");
    }
    world.stop();
    guest.finish().passed();
    giver.expect("it was started").running.finish().passed();
}
