//! Programs that an administrator sends to sleep, with the real scheduler.

use nvshare_harness::{Program, Running, Scheduler, World, wait_until};
use nvshare_proto::{ClientState, Usage};

const CARD: [(&str, &str); 4] =
    [("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64"), ("NVSIM_CONTEXT", "96MiB"), ("NVSIM_MODULE", "4MiB")];
/// MiB that are free on the card while nobody is on it but the one that asks.
const ALL: u64 = 1024 - 96;

struct Asleep {
    world: World,
    scheduler: Scheduler,
}

impl Asleep {
    fn start() -> Self {
        Self::with(&["--tq", "1"])
    }

    fn with(options: &[&str]) -> Self {
        Self::on(&CARD, options)
    }

    fn on(cards: &[(&str, &str)], options: &[&str]) -> Self {
        let world = World::with_memory("swap", cards);
        let scheduler = Scheduler::start(&world, options);
        Self { world, scheduler }
    }

    /// A guest that is idle until it is told to make a call.
    fn guest(&self, call: &str, environment: &[(&str, &str)]) -> Running {
        let go = self.world.dir().join("go");
        let mut program = Program::guest(&self.world, "sleeper", &[call])
            .env("GO", &go.to_string_lossy())
            .env("NVSHARE_SLEEP", "1");
        for (name, value) in environment {
            program = program.env(name, value);
        }
        let guest = program.start();
        wait_until("the guest is idle", || guest.out() == "ready\n" || !guest.lives());
        guest
    }

    /// The answer of the command line.
    fn ctl(&self, command: &str, guest: &Running) -> String {
        let id = Scheduler::status(&self.world).client(guest.pid()).client.to_string();
        let output = Scheduler::ctl(&self.world, &[command, &id]);
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    }

    fn until(&self, guest: &Running, state: ClientState) {
        let log = || self.scheduler.log();
        Scheduler::until(&self.world, &format!("the guest is {state:?}: {}", log()), |status| {
            status.find(guest.pid()).is_some_and(|client| client.state == state)
        });
    }

    /// A neighbour of another weight takes turns with the guests, which give the lock away as they are idle.
    fn rest(&self, guests: &[&Running]) {
        let work = Program::workload(&self.world, "other", "--memory 64MiB --block 64MiB --steps 20");
        work.env("NVSHARE_WEIGHT", "3").start().finish().intact();
        Scheduler::until(&self.world, "the guests rest", |status| {
            let rests =
                |guest: &&Running| status.find(guest.pid()).is_some_and(|c| c.state != ClientState::Running);
            guests.iter().all(rests)
        });
    }

    fn sleep(&self, guest: &Running) {
        let said = self.ctl("sleep", guest);
        assert!(said.contains("is to go to sleep"), "{said}");
        self.until(guest, ClientState::Asleep);
    }

    fn go(&self) {
        std::fs::write(self.world.dir().join("go"), "").expect("a file");
    }

    fn free(&self) -> u64 {
        let asks = Program::guest(&self.world, "free_bytes", &[]).alone().start().finish();
        asks.passed().out.trim().parse().expect("a number")
    }
}

fn expect_all_done(guest: Running) {
    let finished = guest.finish();
    finished.passed();
    assert_eq!(finished.out, "ready\ncalled\ndone\n");
}

/// Nobody waits for the GPU, so the idle program has the lock.
#[test]
fn an_administrator_sends_an_idle_program_to_sleep_and_its_next_call_wakes_it() {
    let asleep = Asleep::start();
    let guest = asleep.guest("event_query", &[]);
    asleep.until(&guest, ClientState::Running);
    assert!(asleep.ctl("wake", &guest).contains("is awake"));
    asleep.sleep(&guest);
    assert_eq!(asleep.free(), ALL);
    assert!(asleep.ctl("sleep", &guest).contains("asleep already"));
    asleep.ctl("wake", &guest);
    Scheduler::until(&asleep.world, "it is awake", |status| {
        status.find(guest.pid()).is_some_and(|client| client.state != ClientState::Asleep)
    });
    asleep.sleep(&guest);
    asleep.go();
    expect_all_done(guest);
}

/// Others can get its memory, and have none yet. One that opens it brings it back.
#[test]
fn a_program_with_a_handle_goes_to_sleep_and_an_opening_wakes_it() {
    let asleep = Asleep::start();
    let guest = Program::guest(&asleep.world, "shares_memory", &["asleep"]).env("NVSHARE_SLEEP", "1");
    let guest = guest.until_woken().start();
    wait_until("it has a handle", || guest.out() == "ready\n" || !guest.lives());
    asleep.sleep(&guest);
    asleep.world.wake();
    guest.finish().passed();
}

/// Not all memory of the programs fits. One that works on stays.
#[test]
fn idle_programs_go_to_sleep_by_themselves_and_their_next_calls_wake_them() {
    let asleep = Asleep::with(&["--tq", "1", "--gpu-memory", "80MiB", "--sleep-after", "1"]);
    let guests = ["event_query", "copy"].map(|call| asleep.guest(call, &[]));
    let stays = asleep.guest("launch", &[("NVSHARE_SLEEP", "0")]);
    let busy = Program::workload(&asleep.world, "busy", "--memory 64MiB --block 64MiB --full-check");
    let busy = busy.env("NVSHARE_SLEEP", "1").until_told().start();
    guests.iter().for_each(|guest| asleep.until(guest, ClientState::Asleep));
    wait_until("one says why it stays", || asleep.scheduler.log().contains("NVSHARE_SLEEP is not 1"));
    let has_gone = |guest: &Running| {
        let id = Scheduler::status(&asleep.world).client(guest.pid()).client;
        asleep.scheduler.log().contains(&format!("client {id} is asleep"))
    };
    assert!(!has_gone(&busy) && !has_gone(&stays), "{}", asleep.scheduler.log());
    asleep.go();
    guests.into_iter().chain([stays]).for_each(expect_all_done);
    asleep.world.stop();
    busy.finish().intact();
}

/// Their contexts alone would fill the card twice: not all of them could be awake.
#[test]
fn many_idle_programs_go_one_after_the_other_and_all_come_back() {
    const ON_THE_CARD: usize = 7;
    const PROGRAMS: usize = 20;
    let asleep = Asleep::with(&["--tq", "1", "--gpu-memory", "64MiB", "--sleep-after", "1"]);
    let mut guests: Vec<Running> = Vec::new();
    for number in 0..PROGRAMS {
        // The memory of the first few does not fit together.
        if number >= ON_THE_CARD {
            asleep.until(&guests[number - ON_THE_CARD], ClientState::Asleep);
        }
        guests.push(asleep.guest("launch", &[]));
    }
    guests.iter().for_each(|guest| asleep.until(guest, ClientState::Asleep));
    assert_eq!(asleep.free(), ALL);
    asleep.go();
    guests.into_iter().for_each(expect_all_done);
}

#[test]
fn several_sleep_while_another_works_and_all_wake() {
    let asleep = Asleep::start();
    let guests = ["launch", "event_query", "copy"].map(|call| asleep.guest(call, &[]));
    asleep.rest(&guests.each_ref());
    guests.iter().for_each(|guest| asleep.sleep(guest));
    assert_eq!(asleep.free(), ALL);
    // The card is nearly full meanwhile.
    let neighbour =
        Program::workload(&asleep.world, "neighbour", "--memory 640MiB --block 64MiB --steps 20").start();
    neighbour.finish().intact();
    asleep.go();
    guests.into_iter().for_each(expect_all_done);
}

#[test]
fn a_program_that_never_sleeps_says_so() {
    let asleep = Asleep::start();
    let guest = asleep.guest("copy", &[("NVSHARE_SLEEP", "0")]);
    asleep.rest(&[&guest]);
    asleep.ctl("sleep", &guest);
    wait_until("it is known", || asleep.ctl("sleep", &guest).contains("NVSHARE_SLEEP is not 1"));
    asleep.go();
    expect_all_done(guest);
}

#[test]
fn the_scheduler_starts_again_beside_a_program_that_sleeps() {
    let Asleep { world, scheduler } = Asleep::start();
    let asleep = Asleep { world, scheduler };
    let guest = asleep.guest("stream_query", &[]);
    asleep.rest(&[&guest]);
    asleep.sleep(&guest);
    let Asleep { world, scheduler } = asleep;
    scheduler.kill();
    let scheduler = Scheduler::start(&world, &["--tq", "1"]);
    let asleep = Asleep { world, scheduler };
    asleep.until(&guest, ClientState::Asleep);
    asleep.go();
    expect_all_done(guest);
}

#[test]
fn scheduling_that_is_switched_off_wakes_a_program() {
    let asleep = Asleep::start();
    let guest = asleep.guest("context_synchronize", &[]);
    asleep.rest(&[&guest]);
    asleep.sleep(&guest);
    assert!(Scheduler::ctl(&asleep.world, &["off"]).status.success());
    // Before any call of its own.
    asleep.until(&guest, ClientState::Free);
    asleep.go();
    expect_all_done(guest);
}

/// A program that sleeps is sent for by `wake`, while its own card has no room for it. Its turn there would come after a minute.
fn wake_on_another_card(wake: impl FnOnce(&Asleep, &Running)) {
    let cards = [&CARD[..], &[("NVSIM_GPUS", "2")]].concat();
    let asleep = Asleep::on(&cards, &["--tq", "60", "--gpu-memory", "64MiB", "--wake-elsewhere"]);
    let guest = asleep.guest("launch", &[]);
    asleep.sleep(&guest);
    let busy = Program::workload(&asleep.world, "busy", "--memory 60MiB --block 4MiB --full-check");
    let busy = busy.env("CUDA_VISIBLE_DEVICES", "0").until_told().start();
    Scheduler::until(&asleep.world, "all of its memory is there", |status| {
        let has_all = |usage: &Usage| usage.allocated >= 60 << 20;
        status.find(busy.pid()).is_some_and(|client| client.usage.iter().any(has_all))
    });
    wake(&asleep, &guest);
    asleep.scheduler.wait_for_log("comes back to GPU-");
    asleep.scheduler.wait_for_log("is awake again");
    asleep.go();
    expect_all_done(guest);
    asleep.world.stop();
    busy.finish().intact();
}

#[test]
fn a_program_wakes_on_another_card_where_its_own_has_no_room() {
    wake_on_another_card(|asleep, _| asleep.go());
}

/// No call of the program waits.
#[test]
fn an_administrator_wakes_a_program_on_another_card() {
    wake_on_another_card(|asleep, guest| {
        let said = asleep.ctl("wake", guest);
        assert!(said.contains("wakes up"), "{said}");
    });
}
