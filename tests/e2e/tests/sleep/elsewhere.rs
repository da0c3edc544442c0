//! Programs that see two cards, and come back to the other one.

use nvshare_harness::{PlayedScheduler, Program};
use nvshare_proto::{Amount, ClientMessage, GpuUuid, SchedulerMessage, VERSION};

use super::{ALL, Answer, CONTEXT, Sleeper};

const TWO_CARDS: (&str, &str) = ("NVSIM_GPUS", "2");

impl Sleeper {
    /// The GPUs to which the process can come back instead: it has said so behind ASLEEP, or says something else before.
    fn elsewhere(&mut self) -> Vec<GpuUuid> {
        self.say(SchedulerMessage::AskCounters);
        self.until(|m| match m {
            ClientMessage::Elsewhere { gpus } => Some(gpus.clone()),
            m => matches!(m, ClientMessage::Counters(_)).then(Vec::new),
        })
    }

    /// Goes on as another scheduler of this version, where the process registers, which is asleep. Returns the GPU that it uses.
    fn accept_asleep(self, version: u16) -> (Self, GpuUuid) {
        let Self { world, guest, client, listener, gpu, grants } = self;
        drop(client);
        let (client, usage) = PlayedScheduler::accept_in(version, &listener);
        let mut next = Self { world, guest, client, listener, gpu, grants };
        next.until(|m| matches!(m, ClientMessage::Asleep).then_some(()));
        let [used] = usage.as_slice() else { panic!("{usage:?}") };
        next.say(SchedulerMessage::Capacity(Amount { gpu: used.gpu, bytes: 900 << 20 }));
        (next, used.gpu)
    }

    /// MiB that are free on each of two cards.
    fn free_on_each(&self) -> [u64; 2] {
        ["0", "1"].map(|card| {
            let asks = Program::guest(&self.world, "free_bytes", &[]).alone().env(TWO_CARDS.0, TWO_CARDS.1);
            let asked = asks.env("CUDA_VISIBLE_DEVICES", card).start().finish();
            asked.passed().out.trim().parse().expect("a number")
        })
    }
}

/// There and back again, with memory that the driver copies and memory that the library moves.
#[test]
fn it_comes_back_to_another_card_if_it_is_sent_there() {
    let mut sleeper = Sleeper::parked(&["launch"], &[TWO_CARDS]);
    let first = sleeper.gpu;
    let mut here = first;
    for card in [1, 0, 1] {
        assert_eq!(sleeper.sleep(), Answer::Asleep);
        let elsewhere = sleeper.elsewhere();
        let [there] = elsewhere[..] else { panic!("{elsewhere:?}") };
        assert_ne!(there, here);
        sleeper.say(SchedulerMessage::Move { from: here, to: there });
        let (next, used) = sleeper.accept_asleep(VERSION);
        assert_eq!(used, there);
        sleeper = next;
        assert_eq!(sleeper.elsewhere(), [here]);
        assert_eq!(sleeper.free_on_each(), [ALL; 2]);
        sleeper.wake();
        let free = sleeper.free_on_each();
        assert!(free[card] <= ALL - CONTEXT && free[1 - card] == ALL, "{free:?}");
        (here, sleeper.gpu) = (there, there);
    }
    assert_ne!(here, first);
    sleeper.finish();
}

#[test]
fn a_card_that_the_driver_refuses_is_not_tried_again_and_it_comes_back_to_its_own() {
    let refuses = ("NVSIM_FIXED_CARDS", "1");
    let mut sleeper = Sleeper::parked(&["launch"], &[TWO_CARDS, refuses]);
    let own = sleeper.gpu;
    assert_eq!(sleeper.sleep(), Answer::Asleep);
    let there = sleeper.elsewhere()[0];
    sleeper.say(SchedulerMessage::Move { from: own, to: there });
    let (mut sleeper, used) = sleeper.accept_asleep(VERSION);
    assert_eq!(used, there);
    sleeper.write("go", "");
    sleeper.until_wanted();
    sleeper.say(SchedulerMessage::Wake);
    let (mut sleeper, used) = sleeper.accept_asleep(VERSION);
    assert_eq!((used, sleeper.elsewhere()), (own, vec![]));
    assert_eq!(sleeper.free_on_each(), [ALL; 2]);
    sleeper.wake();
    let log = sleeper.finish().log;
    assert_eq!(log.matches("does not bring the process back to another GPU").count(), 1, "{log}");
}

#[test]
fn a_scheduler_of_the_version_before_is_not_told_of_other_cards() {
    let mut sleeper = Sleeper::parked(&["event_query"], &[TWO_CARDS]);
    assert_eq!(sleeper.sleep(), Answer::Asleep);
    // A word that it does not know would end the connection.
    let (mut sleeper, used) = sleeper.accept_asleep(VERSION - 1);
    assert_eq!((used, sleeper.elsewhere()), (sleeper.gpu, vec![]));
    sleeper.write("go", "");
    sleeper.until_wanted();
    sleeper.wake();
    sleeper.finish();
}
