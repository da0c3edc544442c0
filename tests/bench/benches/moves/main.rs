//! How long a client of several GPUs takes to evict and to restore its memory on all of them, against a client of one: the bench
//! plays the scheduler, and times from its own message to the last answer. Simulated cards, each with a link of its own. Then what
//! hand-overs cost between two programs, whose memory goes and comes at once.
//!
//! `cargo bench -p nvshare-bench --bench moves`

mod exchange;

use std::collections::BTreeSet;
use std::process::Command;
use std::time::{Duration, Instant};

use nvshare_harness::{Artifacts, PlayedScheduler, Program, World, guest};
use nvshare_proto::units::MIB;
use nvshare_proto::{Amount, ClientMessage, Epoch, GpuUuid, SchedulerMessage};

/// Memory of the guest `many_gpus` on each GPU, in bytes.
const EACH: u64 = 512 * MIB;

/// One hand-over: how long the eviction took, and the restore.
type Took = (Duration, Duration);

struct Client {
    scheduler: PlayedScheduler,
    gpus: Vec<GpuUuid>,
    epoch: u64,
}

impl Client {
    fn room(&self) -> Vec<Amount> {
        self.gpus.iter().map(|&gpu| Amount { gpu, bytes: EACH }).collect()
    }

    /// Grants the lock with room for everything, and waits until the client runs.
    fn grant(&mut self) -> Duration {
        self.epoch += 1;
        let epoch = Epoch { boot: 1, counter: self.epoch };
        let room = self.room();
        let begin = Instant::now();
        self.scheduler.say(&[SchedulerMessage::LockOk { epoch, quantum_ms: 60_000, room }]);
        self.scheduler.until(|message| matches!(message, ClientMessage::Running { .. }).then_some(()));
        begin.elapsed()
    }

    /// Takes the lock, and then all memory.
    fn evict(&mut self) -> Duration {
        let epoch = Epoch { boot: 1, counter: self.epoch };
        self.scheduler.say(&[SchedulerMessage::DropLock { epoch, patience_ms: 60_000 }]);
        self.scheduler.until(|message| {
            matches!(message, ClientMessage::LockReleased { .. } | ClientMessage::Idle { .. }).then_some(())
        });
        let orders: Vec<SchedulerMessage> = self.room().into_iter().map(SchedulerMessage::Evict).collect();
        let mut left: BTreeSet<GpuUuid> = self.gpus.iter().copied().collect();
        let mut came = 0;
        let begin = Instant::now();
        self.scheduler.say(&orders);
        self.scheduler.until(|message| {
            match message {
                ClientMessage::Room(room) => came += room.bytes,
                ClientMessage::Evicted { gpu, .. } => drop(left.remove(gpu)),
                _ => {}
            }
            left.is_empty().then_some(())
        });
        let took = begin.elapsed();
        assert!(came >= EACH * self.gpus.len() as u64, "{came} bytes have left the cards");
        took
    }
}

fn measure(gpus: usize, memory: &str, rounds: usize) -> Vec<Took> {
    let (count, size) = (gpus.to_string(), "1GiB");
    let world = World::simulated(&[
        ("NVSIM_GPUS", &count),
        ("NVSIM_MEMORY", size),
        ("NVSIM_SCALE", "64"),
        ("NVSIM_TO_HOST", "4"),
        ("NVSIM_TO_DEVICE", "4"),
        ("NVSIM_COPY_OUT", "4"),
    ]);
    let listener = PlayedScheduler::listen(&world);
    let program = Program::of(&world, "job", Command::new(guest("many_gpus", false)))
        .env("LD_PRELOAD", &Artifacts::get().library.to_string_lossy())
        .env("NVSHARE_MEMORY", memory)
        // All of it moves: what the program has does not change.
        .env("NVSHARE_CONTENT", "off")
        .env("GPUS", &count);
    let program = program.until_told().start();
    let (scheduler, usage) = PlayedScheduler::accept(&listener);
    let mut client = Client { scheduler, gpus: usage.iter().map(|usage| usage.gpu).collect(), epoch: 0 };
    // It says of each GPU what it has allocated there, as it comes to it.
    let mut allocated: BTreeSet<GpuUuid> = BTreeSet::new();
    client.scheduler.until(|message| {
        if let ClientMessage::Usage(usage) = message
            && usage.allocated >= EACH
        {
            allocated.insert(usage.gpu);
        }
        (allocated.len() == gpus).then_some(())
    });
    client.gpus = allocated.into_iter().collect();
    let capacity = |&gpu: &GpuUuid| SchedulerMessage::Capacity(Amount { gpu, bytes: 2 * EACH });
    let capacities: Vec<SchedulerMessage> = client.gpus.iter().map(capacity).collect();
    client.scheduler.say(&capacities);
    client.grant();
    let took = (0..rounds).map(|_| (client.evict(), client.grant())).collect();
    world.stop();
    let finished = program.finish();
    assert!(finished.status.success(), "{}", finished.log);
    took
}

fn median(mut all: Vec<Duration>) -> Duration {
    all.sort_unstable();
    all[all.len() / 2]
}

fn main() {
    // Under `--test` it only has to run.
    let tests = std::env::args().any(|argument| argument == "--test");
    let (most, rounds) = if tests { (2, 1) } else { (8, 5) };
    println!(
        "{:<8} {:>5} {:>11} {:>7} {:>12} {:>7}",
        "memory", "GPUs", "evict ms", "of one", "restore ms", "of one"
    );
    for memory in ["managed", "swap"] {
        let mut one: Option<Took> = None;
        for gpus in [1, 2, 4, 8].into_iter().filter(|&gpus| gpus <= most) {
            let (out, back) = measure(gpus, memory, rounds).into_iter().unzip();
            let (out, back) = (median(out), median(back));
            let (out_of_one, back_of_one) = *one.get_or_insert((out, back));
            let of = |took: Duration, one: Duration| took.as_secs_f64() / one.as_secs_f64();
            println!(
                "{memory:<8} {gpus:>5} {:>11.1} {:>7.2} {:>12.1} {:>7.2}",
                out.as_secs_f64() * 1e3,
                of(out, out_of_one),
                back.as_secs_f64() * 1e3,
                of(back, back_of_one)
            );
        }
    }
    let (pairs, turns) = if tests { (1, 4) } else { (3, 8) };
    exchange::print(pairs, turns);
}
