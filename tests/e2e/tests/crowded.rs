//! Seats with more processes than their limits, or their places at the scheduler, are for: limits fail closed.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nvshare_harness::{Program, Running, Scheduler, World, guest, patience, wait_until};
use nvshare_proto::{NO_PLACE, Register, Reply, Request, TenantSettings, codec};

use crate::seats::{CARDS, MIB, Places, make, seat};

const LIMITED: TenantSettings = TenantSettings {
    weight: None,
    priority: None,
    compute: None,
    enforcement: None,
    memory: Some(100 * MIB),
    paused: None,
};

/// A program whose first use of the GPU is to take 60 MiB, at the same time as others like it.
fn taker(world: &World, name: &str, socket: &Path) -> Running {
    taker_by("takes_first", world, name, socket)
}

fn taker_by(source: &str, world: &World, name: &str, socket: &Path) -> Running {
    let program = Program::of(world, name, Command::new(guest(source, false))).preloaded();
    program.env("NVSHARE_SOCKET", &socket.to_string_lossy()).waits_for_go().until_told().start()
}

fn have_said(takers: &[Running], lines: usize) -> bool {
    takers.iter().all(|taker| taker.out().lines().count() == lines)
}

/// Lets them take their memory.
fn let_go(world: &World, takers: &[Running]) {
    wait_until("all are up", || have_said(takers, 1));
    std::fs::write(world.dir().join("go"), "").expect("a file");
}

/// Returns the driver's answer to each.
fn answers(takers: &[Running]) -> Vec<String> {
    wait_until("each has an answer", || have_said(takers, 2));
    takers.iter().map(|taker| taker.out().lines().last().expect("an answer").to_owned()).collect()
}

/// Lets them end.
fn end(world: &World, takers: impl IntoIterator<Item = Running>) {
    world.stop();
    for taker in takers {
        taker.finish().passed();
    }
}

/// One of the processes has its 60 MiB, of the seat's 100.
fn one_has_memory(answered: &[String]) {
    assert_eq!(answered.iter().filter(|answer| *answer == "0").count(), 1, "{answered:?}");
}

/// The others are refused by the limit that all of them have, and not for want of a scheduler that tells it.
fn others_have_the_same_limit(takers: &[Running], answered: &[String]) {
    const WHY: &str =
        "an allocation of 60 MiB is refused: the limit of the program's processes has 100 MiB, ";
    for (taker, _) in takers.iter().zip(answered).filter(|(_, answer)| *answer != "0") {
        assert!(taker.log().contains(WHY), "{}", taker.log());
    }
}

#[test]
fn processes_of_a_seat_that_begin_at_once_have_one_limit() {
    let world = World::simulated(CARDS);
    let places = Places::of(&world);
    let _scheduler = places.start(&world);
    let name = make(&world, &seat(0, 0, LIMITED));
    let takers: Vec<_> = (0..10).map(|n| taker(&world, &format!("taker{n}"), &places.socket(name))).collect();
    let_go(&world, &takers);
    let answered = answers(&takers);
    one_has_memory(&answered);
    others_have_the_same_limit(&takers, &answered);
    end(&world, takers);
}

#[test]
fn processes_of_a_seat_wait_for_a_scheduler_that_does_not_answer() {
    let world = World::simulated(CARDS);
    let places = Places::of(&world);
    let scheduler = places.start(&world);
    let name = make(&world, &seat(0, 0, LIMITED));
    let takers = ["first", "second"].map(|taken| taker(&world, taken, &places.socket(name)));
    scheduler.signal(libc::SIGSTOP);
    let_go(&world, &takers);
    wait_until("each has waited for a second", || {
        takers.iter().all(|taker| taker.log().contains("does not answer; the program waits for it"))
    });
    // A program that shares its limit with nobody waits for four seconds more.
    std::thread::sleep(Duration::from_secs(7));
    let heard_nothing = have_said(&takers, 1);
    scheduler.signal(libc::SIGCONT);
    let answered = answers(&takers);
    assert!(heard_nothing, "{answered:?}");
    one_has_memory(&answered);
    end(&world, takers);
}

/// Connections that take all places which one user, or one seat, has there.
fn take_all_places(socket: &Path) -> Vec<UnixStream> {
    let mut taken = Vec::new();
    loop {
        let mut stream = UnixStream::connect(socket).expect("it serves");
        stream.set_read_timeout(Some(patience())).expect("a time");
        let register = Request::Register(Register::newcomer(1, "x"));
        stream.write_all(&codec::encode(&register).expect("a frame")).expect("sent");
        let mut answer = [0; 8192];
        let read = stream.read(&mut answer).expect("an answer");
        match codec::decode(&answer[..read]).expect("a frame") {
            Some((_, Reply::Refused { reason })) => {
                assert_eq!(reason, NO_PLACE);
                return taken;
            }
            answer => assert!(answer.is_some()),
        }
        taken.push(stream);
    }
}

#[test]
fn a_process_for_which_its_seat_has_no_place_gets_no_memory() {
    let world = World::simulated(CARDS);
    let places = Places::of(&world);
    // Few descriptors are few places.
    let scheduler = Scheduler::command(&world, &places.options());
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -n 256; exec \"$0\" \"$@\""]).arg(scheduler.get_program());
    limited.args(scheduler.get_args()).envs(world.environment());
    let _scheduler = Scheduler::start_by(&world, limited);
    let name = make(&world, &seat(0, 0, LIMITED));
    let [own, common] = [places.socket(name), PathBuf::from(&places.common)];
    let taken = [&own, &common].map(|socket| take_all_places(socket));
    let takers = [taker(&world, "seated", &own), taker(&world, "unseated", &common)];
    // Without a seat, a program runs as if alone.
    let_go(&world, &takers);
    assert_eq!(answers(&takers), ["2", "0"]);
    let [seated, unseated] = &takers;
    let why = "the scheduler refuses this process: too many connections";
    // It has not waited for the answer.
    wait_until("it hears that it is refused", || unseated.log().contains(&format!("{why}\n")));
    let why = format!("{why}; all places of its seat are taken, so it gets no memory\n");
    assert!(seated.log().contains(&why), "{}", seated.log());
    end(&world, takers);
    drop(taken);
}

#[test]
fn a_process_of_a_seat_that_cannot_start_threads_gets_no_memory() {
    let world = World::simulated(CARDS);
    let places = Places::of(&world);
    let _scheduler = places.start(&world);
    let name = make(&world, &seat(0, 0, LIMITED));
    let of = |socket| taker_by("takes_first_without_threads", &world, "taker", socket);
    let taker = of(&places.socket(name));
    let_go(&world, std::slice::from_ref(&taker));
    assert_eq!(answers(std::slice::from_ref(&taker)), ["2"]);
    assert!(taker.log().contains("cannot start threads"), "{}", taker.log());
    end(&world, [taker]);
}
