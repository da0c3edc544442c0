//! A card that is lost, and a scheduler that is away, in the middle of what a program does.

use std::collections::BTreeMap;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use nvshare_harness::{Finished, PlayedScheduler, Program, Running, Scheduler, World, wait_until};
use nvshare_proto::{Amount, ClientMessage, ClientStatus, Epoch, GpuUuid, SchedulerMessage, Usage};

const CARD: [(&str, &str); 2] = [("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];
/// Memory of the guest on each card, in bytes.
const BYTES: u64 = 16 << 20;

nvshare_harness::with_both_memories! {
    calls_on_a_lost_card_answer_its_error
    an_allocation_waits_for_a_scheduler_that_is_away
}

/// A guest on some cards, and the scheduler that the test plays for it.
struct Played {
    world: World,
    guest: Running,
    client: PlayedScheduler,
    usage: BTreeMap<GpuUuid, Usage>,
    grants: u64,
}

impl Played {
    /// Until the guest has its memory, and the lock, and asks for nothing more.
    fn start(memory: &str, cards: usize) -> (Self, UnixListener) {
        Self::start_guest("loses_card", memory, cards)
    }

    /// The same for another guest, which asks and works in the same way.
    fn start_guest(guest: &str, memory: &str, cards: usize) -> (Self, UnixListener) {
        let gpus = cards.to_string();
        let world = World::with_memory(memory, &[&CARD[..], &[("NVSIM_GPUS", gpus.as_str())]].concat());
        let listener = PlayedScheduler::listen(&world);
        let file = |name: &str| world.dir().join(name).to_string_lossy().into_owned();
        let guest = Program::guest(&world, guest, &[&gpus]).env("NVSIM_LOST", &file("lost"));
        let guest = guest.holds_up("allocations", file("held"));
        let guest = guest.env("PARKED", &file("parked")).env("OVER", &file("over")).start();
        let (client, usage) = PlayedScheduler::accept(&listener);
        let usage = usage.into_iter().map(|usage| (usage.gpu, usage)).collect();
        let mut played = Self { world, guest, client, usage, grants: 0 };
        // Its first card, and each further one when it comes to that.
        played.until(|m| matches!(m, ClientMessage::ReqLock).then_some(()));
        while played.usage.len() < cards {
            played.grant(0);
            played.until(|m| matches!(m, ClientMessage::Usage(_)).then_some(()));
        }
        played.grant(0);
        played.until(|m| matches!(m, ClientMessage::Running { .. }).then_some(()));
        wait_until("the guest has its memory", || played.guest.out() == "ask 0\n" || !played.guest.lives());
        (played, listener)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.world.dir().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.file(name), text).expect("a file");
    }

    /// Waits for a message, and notes what the client says of its memory.
    fn until<T>(&mut self, mut which: impl FnMut(&ClientMessage) -> Option<T>) -> T {
        let usage = &mut self.usage;
        self.client.until(|message| {
            if let ClientMessage::Usage(now) = message {
                usage.insert(now.gpu, *now);
            }
            which(message)
        })
    }

    fn epoch(&self) -> Epoch {
        Epoch { boot: 1, counter: self.grants }
    }

    /// The lock, with room for all that the guest has, and for `more` bytes on each card.
    fn grant(&mut self, more: u64) {
        self.grants += 1;
        let room: Vec<Amount> = self.usage.keys().map(|&gpu| Amount { gpu, bytes: BYTES + more }).collect();
        for &Amount { gpu, .. } in &room {
            self.client.say(&[SchedulerMessage::Capacity(Amount { gpu, bytes: 1 << 30 })]);
        }
        self.client.say(&[SchedulerMessage::LockOk { epoch: self.epoch(), quantum_ms: 60_000, room }]);
    }

    fn take_the_lock(&mut self) {
        self.client.say(&[SchedulerMessage::DropLock { epoch: self.epoch(), patience_ms: 60_000 }]);
        let gone =
            |m: &ClientMessage| matches!(m, ClientMessage::LockReleased { .. } | ClientMessage::Idle { .. });
        self.until(|m| gone(m).then_some(()));
    }

    fn say_evict(&mut self) {
        for gpu in self.usage.keys().copied().collect::<Vec<_>>() {
            self.client.say(&[SchedulerMessage::Evict(Amount { gpu, bytes: BYTES })]);
        }
    }

    /// Waits until all that can leave has left.
    fn until_evicted(&mut self) {
        for _ in 0..self.usage.len() {
            let short = self.until(|m| match m {
                ClientMessage::Evicted { short, .. } => Some(*short),
                _ => None,
            });
            assert_eq!(short, 0, "all can leave");
        }
    }

    /// All that the guest has leaves the cards.
    fn evict(&mut self) {
        self.take_the_lock();
        self.say_evict();
        self.until_evicted();
        assert!(self.usage.values().all(|usage| usage.absent == BYTES), "{:?}", self.usage);
    }

    /// The guest works until it has said all, under the lock.
    fn work(&mut self) {
        self.write("parked", "");
        self.until(|m| matches!(m, ClientMessage::ReqLock).then_some(()));
        self.grant(BYTES);
        self.until(|m| matches!(m, ClientMessage::Running { .. }).then_some(()));
        wait_until("the guest has said all", || {
            self.guest.out().ends_with("over 0\n") || !self.guest.lives()
        });
    }

    fn finish(self) -> Finished {
        self.write("over", "");
        let finished = self.guest.finish();
        finished.passed();
        finished
    }
}

/// The answers of calls on the first card, by the guest's own lines.
fn answers(finished: &Finished) -> Vec<(&str, &str)> {
    let lines = finished.out.lines().filter_map(|line| line.split_once(' '));
    lines.filter(|(what, _)| !["ask", "over", "other"].contains(what)).collect()
}

fn calls_on_a_lost_card_answer_its_error(memory: &str) {
    let (mut played, _listener) = Played::start(memory, 1);
    played.evict();
    played.write("lost", "");
    played.work();
    played.take_the_lock();
    // Nothing waits for room, and nothing can leave.
    if memory == "swap" {
        let usage = played.usage.values().next().expect("one card");
        assert_eq!((usage.allocated, usage.absent), (0, 0), "{usage:?}");
    }
    let finished = played.finish();
    let answers = answers(&finished);
    assert!(answers.len() == 7 && answers.iter().all(|(_, code)| *code == "214"), "{answers:?}");
    if memory == "swap" {
        assert_eq!(finished.log.matches("CUDA error 214").count(), 1, "{}", finished.log);
    }
    assert!(!finished.log.contains("own work"), "{}", finished.log);
}

/// The driver does not say that all is over, and answers other calls as if all was well.
#[test]
fn an_error_that_does_not_pass_ends_the_restore() {
    let (mut played, _listener) = Played::start("swap", 1);
    played.evict();
    played.write("lost", "999 0 cuMemCreate");
    played.work();
    let finished = played.finish();
    // No work reaches addresses without memory.
    let (waits, others): (Vec<_>, Vec<_>) =
        answers(&finished).into_iter().partition(|(what, _)| *what == "wait");
    assert_eq!(waits, [("wait", "0")]);
    assert!(others.len() == 6 && others.iter().all(|(_, code)| *code == "999"), "{others:?}");
}

#[test]
fn memory_waits_for_a_card_that_is_full() {
    let (mut played, _listener) = Played::start("swap", 1);
    played.evict();
    played.write("lost", "2");
    played.write("parked", "");
    played.until(|m| matches!(m, ClientMessage::ReqLock).then_some(()));
    played.grant(BYTES);
    let room = played.until(|m| match m {
        ClientMessage::NeedRoom(room) => Some(*room),
        _ => None,
    });
    assert_eq!(played.guest.out(), "ask 0\n");
    std::fs::remove_file(played.file("lost")).expect("a file");
    played.client.say(&[SchedulerMessage::Room(room)]);
    played.until(|m| matches!(m, ClientMessage::Running { .. }).then_some(()));
    let finished = played.finish();
    let answers = answers(&finished);
    assert!(answers.len() == 7 && answers.iter().all(|(_, code)| *code == "0"), "{answers:?}");
}

#[test]
fn work_goes_on_beside_a_lost_card() {
    let (mut played, _listener) = Played::start("swap", 2);
    played.evict();
    played.write("lost", "214 0");
    played.work();
    let finished = played.finish();
    let answers = answers(&finished);
    assert!(answers.len() == 7 && answers.iter().all(|(_, code)| *code == "214"), "{answers:?}");
    assert_eq!(finished.out.matches("other 0\n").count(), 3, "{}", finished.out);
}

/// No context is left in which the memory of the first card could come back.
#[test]
fn work_goes_on_beside_memory_of_a_card_without_a_context() {
    let (mut played, _listener) = Played::start_guest("ends_last_context", "swap", 2);
    played.evict();
    played.work();
    let finished = played.finish();
    assert_eq!(finished.log.matches("16 MiB of the program's memory cannot come back").count(), 1);
}

/// It would be in the account for ever, and keep the gate shut once it has left the card.
#[test]
fn memory_that_was_being_made_when_its_context_ended_is_not_counted() {
    let world = World::with_memory("swap", &CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let guest = Program::guest(&world, "allocates_beside_reset", &[]).until_told();
    let guest = guest.holds_up("access", world.dir().join("held")).start();
    wait_until("it has begun anew", || guest.out() == "ready\n" || !guest.lives());
    Scheduler::until(&world, "its memory is what it has allocated since", |status| {
        assert!(guest.lives(), "{}", guest.log());
        let has = |client: &ClientStatus| client.usage.iter().map(|usage| usage.allocated).sum::<u64>();
        status.find(guest.pid()).is_some_and(|client| has(client) == BYTES)
    });
    world.stop();
    guest.finish().passed();
}

/// An eviction beside the restore would miss what is on its way.
#[test]
fn memory_leaves_after_a_restore_that_a_scheduler_has_ended() {
    let (mut played, listener) = Played::start("swap", 2);
    played.evict();
    // There is no scheduler until the program runs alone.
    drop(listener);
    std::fs::remove_file(played.world.socket()).expect("a socket");
    let Played { world, guest, client, usage, grants } = played;
    drop(client);
    std::fs::write(world.dir().join("held"), "").expect("a file");
    wait_until("its memory comes back", || world.dir().join("held.waits").exists() || !guest.lives());
    let listener = PlayedScheduler::listen(&world);
    let (client, _) = PlayedScheduler::accept(&listener);
    played = Played { world, guest, client, usage, grants };
    played.say_evict();
    played.client.say(&[SchedulerMessage::AskCounters]);
    played.until(|m| matches!(m, ClientMessage::Counters(_)).then_some(()));
    // One that has begun and ended by now has left what was on its way.
    assert_eq!(played.guest.threads("nvshare-evict"), 0, "it evicts beside the restore");
    std::fs::remove_file(played.file("held")).expect("a file");
    played.until_evicted();
    assert!(played.usage.values().all(|usage| usage.absent == BYTES), "{:?}", played.usage);
    played.work();
    let finished = played.finish();
    assert!(answers(&finished).iter().all(|(_, code)| *code == "0"), "{}", finished.out);
}

fn an_allocation_waits_for_a_scheduler_that_is_away(memory: &str) {
    let world = World::with_memory(memory, &CARD);
    let scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let guest = Program::guest(&world, "allocates_when_woken", &[]).until_woken().start();
    let other = Program::workload(&world, "other", "--memory 640MiB --block 64MiB --kernel-us 1000");
    let other = other.until_told().start();
    Scheduler::until(&world, "both have their memory on the card", |status| {
        let has = |program: &Running, bytes: u64| {
            assert!(program.lives(), "{}", program.log());
            status.find(program.pid()).is_some_and(|client| client.resident >= bytes)
        };
        has(&guest, 300 << 20) && has(&other, 640 << 20) && guest.out() == "ready\n"
    });
    scheduler.kill();
    wait_until("the guest knows that it is away", || {
        guest.log().contains("connection to the scheduler lost")
    });
    world.wake();
    // Managed memory exceeds the card meanwhile.
    wait_until("the guest waits for it, or need not", || {
        guest.log().contains("waits for the scheduler") || guest.out().contains("allocated") || !guest.lives()
    });
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    guest.finish().passed();
    world.stop_intact([other]);
}
