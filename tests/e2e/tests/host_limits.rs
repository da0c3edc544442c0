//! Memory that the scheduler hands out, to programs that may have little: a control group with a limit that has no room for what
//! leaves the card, and fewer free descriptors than there are segments.

use std::fs::File;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use nvshare_harness::{MemoryGroup, PlayedScheduler, Program, Running, Scheduler, World, wait_until};
use nvshare_proto::{Amount, ClientMessage, Epoch, HostSegment, SchedulerMessage};

const MIB: u64 = 1 << 20;
const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_TO_HOST", "6"), ("NVSHARE_MEMORY", "swap")];
/// 12 allocations of 64 MiB, so that two programs do not fit: 512 MiB of each leave.
const JOB: &str = "--memory 768MiB --block 64MiB --kernel-us 500 --full-check";

fn scheduler(world: &World) -> Scheduler {
    Scheduler::start(world, &["--gpu-memory", "1GiB", "--tq", "0.1", "--host-memory", "4GiB"])
}

#[test]
#[ignore = "needs root and a control group with a limit of memory; .ci/run runs this test where they are there"]
fn more_leaves_than_the_limit_of_a_control_group_allows() {
    const LIMIT: u64 = 416 * MIB;
    let world = World::simulated(CARD);
    let _scheduler = scheduler(&world);
    // The simulated card's memory is charged to who uses it first.
    Program::workload(&world, "first", "--memory 1000MiB --block 8MiB --steps 1").start().finish().intact();
    let groups = [MemoryGroup::with_limit(LIMIT), MemoryGroup::with_limit(LIMIT)];
    let jobs = [("one", &groups[0]), ("two", &groups[1])]
        .map(|(name, group)| group.workload(&world, name, JOB).until_told().start());
    Scheduler::until_turns(&world, &[&jobs[0], &jobs[1]], 4);
    for job in &jobs {
        // A segment may be given back, and asked for again.
        Scheduler::until(&world, "more than its limit has left, to memory of the host", |status| {
            let client = status.client(job.pid());
            client.counters.evicted > LIMIT && client.host_memory > LIMIT
        });
    }
    let jobs = world.stop_intact(jobs);
    for (job, group) in jobs.iter().zip(&groups) {
        assert!(group.peak() <= LIMIT, "{}", group.peak());
        assert!(!job.log.contains("memory of its own"), "{}", job.log);
    }
}

/// A program that has used all of its descriptors but `left`.
fn few_descriptors(world: &World, left: &str) -> Program {
    let line = format!("ulimit -n 256; exec {}", nvshare_harness::guest("few_descriptors", false).display());
    let mut command = Command::new("sh");
    command.args(["-c", &line]);
    Program::of(world, "few", command).env("LEFT", left).preloaded().until_told()
}

/// All of the program's memory, more than one segment, has to leave for another one.
fn with_free_descriptors(left: &str) -> String {
    let world = World::simulated(CARD);
    let _scheduler = scheduler(&world);
    let few = few_descriptors(&world, left).start();
    wait_until("few are left", || few.out().contains("few are left") || !few.lives());
    let args = "--memory 1000MiB --block 8MiB --kernel-us 500 --full-check";
    let other = Program::workload(&world, "other", args).until_told().start();
    Scheduler::until_turns(&world, &[&few, &other], 3);
    let status = Scheduler::status(&world);
    if left != "0" {
        let has = status.client(few.pid()).host_memory;
        assert!(has >= 512 * MIB, "{has} {}", few.log());
    }
    world.stop_guest(few, other).log
}

#[test]
fn segments_come_through_the_only_free_descriptor() {
    with_free_descriptors("1");
}

#[test]
fn without_a_free_descriptor_a_program_uses_memory_of_its_own() {
    let log = with_free_descriptors("0");
    // How many it has made ahead depends on how fast the program fills the card: all of them are refused.
    let (before, _) = log.split_once(" segments of the scheduler's memory did not come").expect(&log);
    let counts: Vec<&str> = before.rsplit(' ').take(3).collect();
    assert!(matches!(counts[..], [all, "of", none] if all == none), "{log}");
}

/// Memory of `bytes` bytes, which may be sealed against growing, and another descriptor of it.
fn segment_with(number: u64, bytes: u64, seals: i32) -> (HostSegment, OwnedFd, File) {
    // SAFETY: a name, and plain numbers; the descriptor is new.
    let file = unsafe {
        let file = libc::memfd_create(c"nvshare-host".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
        assert!(file >= 0 && libc::ftruncate(file, bytes as i64) == 0);
        assert_eq!(libc::fcntl(file, libc::F_ADD_SEALS, seals), 0);
        File::from_raw_fd(file)
    };
    let other = file.try_clone().expect("a descriptor");
    (HostSegment { number, bytes }, other.into(), file)
}

/// A segment as the scheduler makes it.
fn segment(number: u64, bytes: u64) -> (HostSegment, OwnedFd, File) {
    segment_with(number, bytes, libc::F_SEAL_GROW)
}

/// Descriptors that a process has open.
fn open_files(of: &Running) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", of.pid())).expect("a process").count()
}

/// All memory of a program with `left` free descriptors leaves, and its question for memory of the host is answered by a frame of these
/// segments. `then` gets the program, what it has given back by then, and how many descriptors it had open before.
fn all_leaves(
    left: &str,
    made: Vec<(HostSegment, OwnedFd, File)>,
    then: impl FnOnce(&Running, Vec<u64>, Vec<File>, usize),
) {
    const ALL: u64 = 512 * MIB;
    // The first to ask is who needs it for what leaves.
    let world = World::simulated(&[CARD, &[("NVSHARE_CONTENT", "off")]].concat());
    let listener = PlayedScheduler::listen(&world);
    let few = few_descriptors(&world, left).start();
    let (mut client, usage) = PlayedScheduler::accept(&listener);
    let gpu = usage.first().map(|usage| usage.gpu);
    let gpu = gpu.unwrap_or_else(|| {
        client.until(|m| if let ClientMessage::Usage(u) = m { Some(u.gpu) } else { None })
    });
    let room = Amount { gpu, bytes: 1 << 30 };
    let grant = |counter| {
        let epoch = Epoch { boot: 1, counter };
        SchedulerMessage::LockOk { epoch, quantum_ms: 1000, room: vec![room] }
    };
    client.say(&[SchedulerMessage::Capacity(room), grant(1)]);
    wait_until("few are left", || few.out().contains("few are left") || !few.lives());
    let before = open_files(&few);
    let (lot, files): (Vec<_>, Vec<_>) =
        made.into_iter().map(|(segment, passed, file)| ((segment, passed), file)).unzip();
    client.hand_out(lot);
    let epoch = Epoch { boot: 1, counter: 1 };
    client.say(&[SchedulerMessage::DropLock { epoch, patience_ms: 60_000 }]);
    client.until(|m| {
        matches!(m, ClientMessage::LockReleased { .. } | ClientMessage::Idle { .. }).then_some(())
    });
    client.say(&[SchedulerMessage::Evict(Amount { gpu, bytes: ALL })]);
    let mut back = Vec::new();
    let short = client.until(|m| match m {
        ClientMessage::HostBack { segment } => {
            back.push(*segment);
            None
        }
        ClientMessage::Evicted { short, .. } => Some(*short),
        _ => None,
    });
    assert_eq!(short, 0, "{}", few.log());
    then(&few, back, files, before);
    client.say(&[grant(2)]);
    world.stop();
    few.finish().passed();
}

/// The kernel cuts a frame's descriptors off where the process has no numbers left: those before are the first segments'.
#[test]
fn of_a_frame_with_more_segments_than_free_descriptors_the_rest_is_given_back() {
    let made = [10, 11, 12, 13].map(|number| segment(number, 64 * MIB));
    all_leaves("2", made.into(), |few, back, files, before| {
        assert_eq!(back, [12, 13], "{}", few.log());
        // The first two are in use, and nothing has reached the others.
        let pages = files.iter().map(|file| file.metadata().expect("a file").blocks() > 0);
        assert_eq!(pages.collect::<Vec<_>>(), [true, true, false, false]);
        assert_eq!(open_files(few), before, "no descriptor stays");
        assert!(
            few.log().contains("2 of 4 segments of the scheduler's memory did not come"),
            "{}",
            few.log()
        );
    });
}

/// One is shorter than the scheduler says, one longer, and one can grow; nothing else comes.
#[test]
fn a_segment_that_is_not_what_it_should_be_is_given_back() {
    let sized = |number, bytes| {
        let (segment, passed, file) = segment(number, bytes);
        (HostSegment { bytes: 64 * MIB, ..segment }, passed, file)
    };
    let made = vec![sized(20, 32 * MIB), sized(21, 128 * MIB), segment_with(22, 64 * MIB, 0)];
    all_leaves("8", made, |few, back, files, before| {
        assert_eq!(back, [20, 21, 22], "{}", few.log());
        assert!(files.iter().all(|file| file.metadata().expect("a file").blocks() == 0));
        assert_eq!(open_files(few), before, "no descriptor stays");
    });
}
