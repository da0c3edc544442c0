//! Programs of a few pieces of memory that hand their card over as fast as they can, and look at every word of it after each
//! step. A turn takes 10 ms at least, which the processor mostly sleeps through; so there are several cards, each with programs
//! of its own.
//!
//! `HAND_OVERS=N` is how many hand-overs there are, of all programs together (500 unless it is set), and `CARDS=N` on how many
//! cards (2); the counts are printed:
//! `HAND_OVERS=100000 CARDS=8 cargo test -p nvshare-e2e every_word:: -- --nocapture`

use std::time::{Duration, Instant};

use nvshare_harness::{Program, Running, Scheduler, Status, World, patience};
use nvshare_proto::units::MIB;

/// A card keeps every byte that a program sees, and moves them faster than programs look at them.
const CARD: &[(&str, &str)] = &[
    ("NVSIM_MEMORY", "64MiB"),
    ("NVSIM_SCALE", "1"),
    ("NVSIM_SPARSE", "0"),
    ("NVSIM_TO_DEVICE", "100"),
    ("NVSIM_COPY_OUT", "100"),
];

/// The least capacity of a GPU is more than these programs need: so much of it another one has, whose memory does not move.
const TAKEN: &str = "--memory 58MiB --block 58MiB --kernel-us 100";

/// Any two of them do not fit beside that. The first changes all of its memory; the second has pieces that are zero and pieces that
/// do not change; the third frees and allocates a part anew in each step.
const PROGRAMS: [(&str, &str); 3] = [
    ("changes", "--memory 4MiB --block 4MiB"),
    ("keeps", "--memory 4MiB --block 2MiB --still 1"),
    ("churns", "--memory 4MiB --block 2MiB --zeros 1 --churn"),
];

fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

/// The programs of a card: the one whose memory does not move, and those that take turns.
fn begin(world: &World, card: u64) -> (Running, Vec<Running>) {
    let on_card = |name: &str, line: &str| {
        let program = Program::workload(world, &format!("{name}-{card}"), line);
        program.env("CUDA_VISIBLE_DEVICES", &card.to_string())
    };
    let go = world.dir().join("never");
    let taken = on_card("taken", TAKEN).env("NVSHARE_PLAIN", "all").env("GO", &go.to_string_lossy()).start();
    Scheduler::until(world, "a part of the card is taken", |status| {
        status.find(taken.pid()).is_some_and(|client| client.usage.iter().any(|u| u.immovable >= 58 * MIB))
    });
    let job = |(name, arguments): &(&str, &str)| {
        let line = format!("{arguments} --kernel-us 100 --check-steps");
        // Their logs would be longer than all memory that moves.
        let program = on_card(name, &line).env("NVSHARE_LOG", "warn");
        program.until_told().until_woken().waits_for_go().start()
    };
    (taken, PROGRAMS.iter().map(job).collect())
}

fn hand_overs(status: &Status) -> u64 {
    status.clients.iter().map(|client| client.counters.hand_overs).sum()
}

/// How often a long run says how far it is.
const TELL: Duration = Duration::from_secs(20);
/// Most that a card takes on the disk: its memory, what of it is on the host, and logs.
const DISK_OF_CARD: u64 = 256 * MIB;

/// Waits for `wanted` hand-overs; however long they take, they have to go on, and take no more of the disk than they did.
fn until_hand_overs(world: &World, jobs: &[Running], wanted: u64, cards: u64) -> Status {
    let begin = Instant::now();
    let (mut seen, mut since, mut told) = (0, begin, begin);
    loop {
        let status = Scheduler::status(world);
        let now = hand_overs(&status);
        if now >= wanted || jobs.iter().any(|job| !job.lives()) {
            return status;
        }
        if now > seen {
            (seen, since) = (now, Instant::now());
        }
        assert!(since.elapsed() < patience(), "no hand-over after {now} of {wanted}");
        let disk = world.disk_bytes();
        if told.elapsed() >= TELL {
            told = Instant::now();
            let rate = now as f64 / begin.elapsed().as_secs_f64();
            println!("{now} of {wanted} hand-overs, {rate:.0} a second, {} MiB of the disk", disk / MIB);
        }
        assert!(disk < cards * DISK_OF_CARD, "{} MiB of the disk after {now} hand-overs", disk / MIB);
        // Each look has every client tell its counters.
        std::thread::sleep(Duration::from_millis(500));
    }
}

#[test]
fn every_word_is_right_after_each_of_many_hand_overs() {
    let (wanted, cards) = (number("HAND_OVERS", 500), number("CARDS", 2));
    let count = cards.to_string();
    let world = World::with_memory("swap", &[CARD, &[("NVSIM_GPUS", count.as_str())]].concat());
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "64MiB", "--tq", "0.01", "--log", "warn"]);
    let (_taken, jobs): (Vec<Running>, Vec<Vec<Running>>) =
        (0..cards).map(|card| begin(&world, card)).unzip();
    let jobs: Vec<Running> = jobs.into_iter().flatten().collect();
    Running::go(&jobs.iter().collect::<Vec<_>>());
    let begin = Instant::now();
    let status = until_hand_overs(&world, &jobs, wanted, cards);
    let (made, took) = (hand_overs(&status), begin.elapsed());
    let moved = |which: fn(&nvshare_proto::Counters) -> u64| {
        status.clients.iter().map(|client| which(&client.counters)).sum::<u64>()
    };
    let (out, back) = (moved(|counters| counters.evicted), moved(|counters| counters.restored));
    for job in &jobs {
        assert!(status.client(job.pid()).counters.hand_overs > 0, "{status:?}");
    }
    world.stop();
    let (mut checks, mut words) = (0, 0);
    for job in jobs {
        let job = job.finish();
        let outcome = job.intact();
        assert!(!job.log.contains("[ERROR]"), "{}", job.log);
        checks += outcome.full_checks;
        words += outcome.words_checked;
    }
    println!(
        "{made} hand-overs on {cards} cards in {:.0} s ({:.0} a second): {} MiB out, {} MiB back, every word checked {checks} times, {words} words in all, none wrong",
        took.as_secs_f64(),
        made as f64 / took.as_secs_f64(),
        out / MIB,
        back / MIB
    );
    assert!(made >= wanted);
    // It is memory that changes hands: of two programs that follow each other, 2 MiB do not fit.
    assert!(out / MIB >= made && back / MIB >= made, "{out} {back} {made}");
}
