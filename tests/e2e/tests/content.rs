//! Memory that the library maps: zeros and what has not changed are not copied, and come back as they were.

use nvshare_harness::{Finished, Program, Running, Scheduler, World, wait_until};
use nvshare_proto::Counters;
use nvshare_proto::units::MIB;

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_TO_HOST", "6"), ("NVSHARE_MEMORY", "swap")];

/// The library says so when it can look at memory.
const LOADED: &str = "the kernel that looks at memory is loaded";

/// 12 allocations of 64 MiB, so that two programs do not fit. Each step changes those that are neither zeros nor still.
const JOB: &str = "--memory 768MiB --block 64MiB --kernel-us 500 --full-check";

/// MiB of zeros, and MiB that had not changed, that each eviction of a program left out, as its log says.
fn left_out(log: &str) -> Vec<(u64, u64)> {
    let line = |line: &str| {
        let (_, rest) = line.split_once("not copied: ")?;
        let (zeros, rest) = rest.split_once(" MiB of zeros, ")?;
        let (unchanged, _) = rest.split_once(" MiB that had not changed")?;
        Some((zeros.parse().ok()?, unchanged.parse().ok()?))
    };
    log.lines().filter_map(line).collect()
}

/// The sums of [`left_out`].
fn in_all(log: &str) -> (u64, u64) {
    left_out(log).into_iter().fold((0, 0), |(a, b), (zeros, unchanged)| (a + zeros, b + unchanged))
}

/// MiB that evictions left out, as the lines say that tell how much of the memory that left was copied.
fn not_copied(log: &str) -> u64 {
    let line = |line: &str| {
        let (left, rest) = line.split_once("evicted ")?.1.split_once(" MiB in ")?;
        let left: u64 = left.parse().ok()?;
        let copied = rest.split_once('(')?.1.split_once(" MiB copied, ");
        Some(left - copied.map_or(Some(left), |(copied, _)| copied.parse().ok())?)
    };
    log.lines().filter_map(line).sum()
}

/// A world in which two jobs take turns: `job`, and one that changes all of its memory.
struct Turns {
    world: World,
    jobs: [Running; 2],
    /// Bytes of both logs when all memory had its contents: what was not filled yet is zero.
    set_up: [usize; 2],
    _scheduler: Scheduler,
}

impl Turns {
    fn begin(more: &[(&str, &str)], job: &str) -> Self {
        let world = World::simulated(&[CARD, more].concat());
        let scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
        let jobs = [("job", job), ("other", "")].map(|(name, more)| {
            let program = Program::workload(&world, name, &format!("{JOB} {more}"));
            program.until_told().until_woken().waits_for_go().start()
        });
        Running::go(&[&jobs[0], &jobs[1]]);
        let set_up = [0, 1].map(|job: usize| jobs[job].log().len());
        Self { world, jobs, set_up, _scheduler: scheduler }
    }

    /// Waits until the job's log says something.
    fn until_logged(&self, what: &str, is_so: impl Fn(&str) -> bool) {
        Scheduler::until(&self.world, what, |_| is_so(&self.jobs[0].log()) || !self.jobs[0].lives());
    }

    /// Waits for `more` turns from now on.
    fn turns(&self, more: u64) {
        let [job, other] = &self.jobs;
        let so_far = Scheduler::status(&self.world).client(job.pid()).counters.hand_overs;
        Scheduler::until_turns(&self.world, &[job, other], so_far + more);
    }

    /// Waits until the counters of the job and of the other one say something: they may be told some turns later.
    fn until_counted(&self, is_so: impl Fn([Counters; 2]) -> bool) {
        Scheduler::until(&self.world, "moves are counted", |status| {
            is_so([0, 1].map(|job: usize| status.client(self.jobs[job].pid()).counters))
        });
    }

    fn end(self) -> [Finished; 2] {
        self.world.stop();
        self.jobs.map(Running::finish)
    }
}

#[test]
fn zeros_are_not_copied_and_stay_zeros() {
    let turns = Turns::begin(&[], "--zeros 8");
    turns.until_logged("zeros are left out", |log| in_all(log).0 >= 512);
    turns.turns(2);
    // Zeros are counted among what left and came back, and not among what was copied.
    turns.until_counted(|[job, other]| {
        let zeros = [job.evicted.saturating_sub(job.copied_out), job.restored.saturating_sub(job.copied_in)];
        // It may be zeros alone that leave again and again; of the other one, all is copied.
        let copied = [other.copied_out, other.copied_in];
        zeros.iter().all(|&zeros| zeros >= 512 * MIB) && copied.iter().all(|&copied| copied > 0)
    });
    let set_up = turns.set_up;
    let [job, other] = turns.end();
    job.intact();
    other.intact();
    // All memory that leaves is looked at: not a MiB of it is zero but those of 8 allocations.
    assert!(
        left_out(&job.log[set_up[0]..]).iter().all(|&(zeros, _)| zeros <= 512),
        "{:?}",
        left_out(&job.log[set_up[0]..])
    );
    assert_eq!(in_all(&other.log[set_up[1]..]).0, 0, "the other job has no zeros");
    let (zeros, unchanged) = in_all(&job.log);
    assert_eq!(not_copied(&job.log), zeros + unchanged, "both lines say the same");
}

#[test]
fn memory_that_has_not_changed_is_copied_once() {
    let turns = Turns::begin(&[], "--still 8");
    turns.until_logged("unchanged memory is left out", |log| in_all(log).1 >= 512);
    turns.turns(2);
    // Memory of which the host has a copy is not copied out; back it is.
    turns.until_counted(|[job, _]| {
        job.evicted.saturating_sub(job.copied_out) >= 512 * MIB && job.copied_in > 512 * MIB
    });
    let set_up = turns.set_up;
    let [job, other] = turns.end();
    job.intact();
    other.intact();
    let log = left_out(&job.log[set_up[0]..]);
    assert!(log.iter().all(|&(zeros, unchanged)| zeros == 0 && unchanged <= 512), "{log:?}");
}

#[test]
fn a_chunk_of_zeros_and_others_comes_back_piece_by_piece() {
    let turns = Turns::begin(&[], "--mixed 8");
    turns.until_logged("both are left out", |log| in_all(log).0 >= 256 && in_all(log).1 >= 512);
    turns.turns(2);
    let set_up = turns.set_up;
    let [job, other] = turns.end();
    job.intact();
    other.intact();
    // 11 of the 32 pieces of each allocation are zero.
    assert!(
        left_out(&job.log[set_up[0]..]).iter().all(|&(zeros, _)| zeros <= 8 * 22),
        "{:?}",
        left_out(&job.log[set_up[0]..])
    );
    let (zeros, unchanged) = in_all(&job.log);
    assert_eq!(not_copied(&job.log), zeros + unchanged, "both lines say the same");
}

#[test]
fn zeros_and_still_memory_that_change_are_copied() {
    let turns = Turns::begin(&[], "--zeros 4 --still 4");
    turns.until_logged("both are left out", |log| in_all(log).0 >= 512 && in_all(log).1 >= 512);
    turns.world.wake();
    Scheduler::until(&turns.world, "all memory has changed", |_| turns.jobs[0].is_awake());
    let before = in_all(&turns.jobs[0].log()).0;
    turns.turns(4);
    let after = in_all(&turns.jobs[0].log()).0;
    let [job, other] = turns.end();
    job.intact();
    other.intact();
    assert_eq!(before, after, "nothing is zero any more");
}

#[test]
fn in_mode_zeros_the_host_keeps_nothing_and_off_looks_at_nothing() {
    for (content, zeros) in [("zeros", true), ("off", false)] {
        let turns = Turns::begin(&[("NVSHARE_CONTENT", content)], "--zeros 4 --still 4");
        turns.turns(4);
        if zeros {
            turns.until_logged("zeros are left out", |log| in_all(log).0 >= 512);
        } else {
            // Counters change one after the other; in the end both have everything.
            turns.until_counted(|both| {
                both.iter().all(|counters| {
                    let moved = (counters.evicted, counters.restored);
                    moved.0.min(moved.1) > 0 && moved == (counters.copied_out, counters.copied_in)
                })
            });
        }
        let [job, other] = turns.end();
        job.intact();
        other.intact();
        let (left_zeros, unchanged) = in_all(&job.log);
        assert_eq!((left_zeros > 0, unchanged), (zeros, 0), "{content}");
    }
}

#[test]
fn without_the_kernel_everything_is_copied_and_a_line_says_so() {
    let turns = Turns::begin(&[("NVSIM_REFUSED_PTX", "nvshare_content")], "--zeros 4 --still 4");
    turns.turns(4);
    let [job, other] = turns.end();
    job.intact();
    other.intact();
    assert_eq!(in_all(&job.log), (0, 0));
    let said = job.log.lines().filter(|line| line.contains("memory is copied whole")).count();
    assert_eq!(said, 1, "{}", job.log);
}

#[test]
fn a_test_mode_finds_pieces_that_are_not_what_they_seem() {
    for lie in ["zeros", "unchanged"] {
        let settings = [("NVSHARE_CONTENT", "check"), ("NVSIM_LIE", lie)];
        let turns = Turns::begin(&settings, "");
        let found = |log: &str| log.lines().filter(|line| line.contains("was not what it seemed")).count();
        turns.until_logged("wrong pieces are found", |log| found(log) > 64);
        turns.turns(2);
        let [job, other] = turns.end();
        // The copy counts, so nothing is lost.
        job.intact();
        other.intact();
        assert!(found(&job.log) > 64, "{lie}");
    }
}

#[test]
fn a_test_mode_finds_nothing_where_nothing_is_wrong() {
    let turns = Turns::begin(&[("NVSHARE_CONTENT", "check")], "--zeros 4 --still 4");
    turns.until_logged("both are left out", |log| in_all(log).0 >= 256 && in_all(log).1 >= 256);
    turns.turns(2);
    for job in turns.end() {
        job.intact();
        assert!(!job.log.contains("was not what it seemed"), "{}", job.log);
    }
}

#[test]
fn memory_that_is_freed_takes_its_copies_along() {
    // Copies that stayed behind would soon leave no memory of the host for what has to leave.
    let turns = Turns::begin(&[("NVSIM_MOST_LOCKED", "640MiB")], "--still 4 --churn");
    turns.turns(6);
    let [job, other] = turns.end();
    job.intact();
    other.intact();
}

/// A guest under nvshare, which goes on until the world stops.
fn under(world: &World, name: &str) -> Program {
    Program::guest(world, name, &[]).until_told().until_woken()
}

/// A program beside the one whose copies give way, with settings of its own.
fn beside(world: &World, name: &str, args: &str, settings: &[(&str, &str)]) -> Program {
    let job = Program::workload(world, name, args);
    settings.iter().fold(job, |job, (name, value)| job.env(name, value))
}

/// A program with 512 MiB, of which 256 that do not change have copies on the host, and 256 MiB more. The host has memory for so much.
/// `settings`: of the program that is beside it until then.
fn full_of_copies(world: &World, settings: &[(&str, &str)]) -> Running {
    let job = under(world, "copies_give_way").start();
    wait_until("the program has memory", || job.out().contains("still") || !job.lives());
    // 512 MiB and 768.
    let args = "--memory 768MiB --block 64MiB --seconds 600";
    let large = beside(world, "large", args, settings).start();
    wait_until("unchanged memory is left out", || in_all(&job.log()).1 >= 512 || !job.lives());
    drop(large);
    world.wake();
    wait_until("the program has more memory", || job.out().contains("large") || !job.lives());
    job
}

/// The program's new memory leaves, though the host is full of copies.
fn copies_give_way(world: &World, options: &[&str], settings: &[(&str, &str)]) {
    let _scheduler = Scheduler::start(world, &[&["--gpu-memory", "1GiB", "--tq", "0.1"], options].concat());
    let job = full_of_copies(world, settings);
    // 768 MiB and 512: the large allocation leaves first.
    let small = beside(world, "small", "--memory 512MiB --block 64MiB", settings).until_told().start();
    Scheduler::until_turns(world, &[&small], 2);
    world.stop();
    small.finish().intact();
    let job = job.finish();
    assert!(job.status.success() && job.out.contains("right"), "{} {}", job.out, job.log);
    assert!(job.log.contains("of copies of memory that is on the card"), "{}", job.log);
}

#[test]
fn copies_of_memory_on_the_card_give_way_to_what_has_to_leave() {
    // The host has room for what the library itself needs there, too.
    let world = World::simulated(&[CARD, &[("NVSIM_MOST_LOCKED", "272MiB")]].concat());
    copies_give_way(&world, &[], &[]);
}

#[test]
fn copies_of_memory_on_the_card_give_way_where_the_budget_is_reached() {
    // Memory of its own a program has for the list of pieces alone; those beside it use nothing else.
    let world = World::simulated(&[CARD, &[("NVSIM_MOST_PRIVATE", "4MiB")]].concat());
    let own = [("NVSIM_MOST_PRIVATE", "1GiB"), ("NVSIM_LOCK_SHARED", "0")];
    copies_give_way(&world, &["--host-memory", "272MiB"], &own);
}

#[test]
fn a_reset_takes_the_kernel_and_all_copies_along() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.05"]);
    let args = "--memory 896MiB --block 64MiB --kernel-us 500";
    let other = Program::workload(&world, "other", args).until_told().start();
    let job = under(&world, "resets_in_turns").start();
    wait_until("both are left out", || {
        let (zeros, unchanged) = in_all(&job.log());
        zeros >= 256 && unchanged >= 256 || !job.lives()
    });
    world.stop();
    other.finish().intact();
    let job = job.finish();
    assert!(job.status.success() && job.out.contains("right"), "{} {}", job.out, job.log);
}

#[test]
fn a_free_does_not_wait_for_a_look_beside_the_programs_work() {
    beside_a_look(&[]);
}

#[test]
fn an_allocation_waits_for_no_look_at_memory_that_is_freed_on_its_way() {
    beside_a_look(&["2"]);
    beside_a_look(&["1"]);
}

/// A guest frees memory while a look at it is held up, and then goes on in turns with another program.
fn beside_a_look(arguments: &[&str]) {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "300"]);
    // A look is held up before the kernel is in its stream: no work of the device is in the way.
    let held = world.dir().join("held");
    let guest =
        Program::guest(&world, "frees_beside_look", arguments).holds_up("look", &held).until_told().start();
    wait_until("the guest has its memory, and it can be looked at", || {
        assert!(guest.lives(), "{}", guest.log());
        guest.out().contains("ready") && guest.log().contains(LOADED)
    });
    // It is looked at as soon as a program waits that does not fit beside it.
    let other = Program::workload(&world, "other", "--memory 640MiB --block 64MiB").until_told().start();
    wait_until("memory is freed beside the look", || {
        assert!(guest.lives(), "{}", guest.log());
        held.with_extension("waits").exists() && !held.exists()
    });
    assert!(Scheduler::ctl(&world, &["set-tq", "0.1"]).status.success());
    Scheduler::until_turns(&world, &[&guest, &other], 5);
    world.stop_guest(guest, other);
}

#[test]
fn the_kernel_is_loaded_beside_work_that_does_not_end_and_holds_nobody_up() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let guest = Program::guest(&world, "warm_up_beside_work", &[]).until_woken().until_told().start();
    wait_until("the guest goes on", || guest.out().contains("went on") || !guest.lives());
    assert!(!guest.out().contains("over"), "its work was to be in flight all the time");
    world.wake();
    // Then the kernel is there, and what leaves is looked at.
    let other = Program::workload(&world, "other", "--memory 1000MiB --block 8MiB").until_told().start();
    wait_until("zeros are left out", || in_all(&guest.log()).0 > 0 || !guest.lives() || !other.lives());
    Scheduler::until_turns(&world, &[&guest, &other], 2);
    let guest = world.stop_guest(guest, other);
    assert!(!guest.log.contains("memory is copied whole"), "{}", guest.log);
}
