//! Everything fails open: a scheduler that is absent, dies, comes back, or is started twice.

use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use nvshare_harness::{Program, Running, Scheduler, Status, World, wait_until};
use nvshare_proto::ClientState;

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];
/// The log line of a program that has lost its scheduler.
const LOST: &str = "connection to the scheduler lost";
/// A parked program whose scheduler is away for longer runs on beside the others, and its memory comes by faults.
const GOES_ALONE_AFTER: Duration = Duration::from_secs(5);
const JOB: &str = "--memory 768MiB --block 64MiB --kernel-us 1000";

nvshare_harness::with_both_memories! {
    without_a_scheduler_programs_run_and_join_later
    a_scheduler_that_is_killed_stops_nobody_and_gets_everybody_back
    parked_programs_go_on_when_a_scheduler_does_not_come_back
    programs_go_on_when_a_scheduler_takes_no_connection
    a_stopped_program_holds_up_nobody_that_fits_beside_it
    a_stopped_program_that_waits_is_passed_over_until_it_goes_on
    the_end_of_a_process_is_waited_for
    a_process_that_becomes_another_program_leaves_its_room
}

fn without_a_scheduler_programs_run_and_join_later(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let job = Program::workload(&world, "early", JOB).until_told().waits_for_go().start();
    Running::go(&[&job]);
    let warnings = |log: &str| log.lines().filter(|line| line.starts_with("[NVSHARE][WARN]")).count();
    assert_eq!(warnings(&job.log()), 1, "{}", job.log());
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    Scheduler::until(&world, "it joins", |status| {
        status
            .find(job.pid())
            .is_some_and(|client| client.state == ClientState::Running && client.resident == 768 << 20)
    });
    world.stop();
    let job = job.finish();
    job.intact();
    assert_eq!(warnings(&job.log), 1, "{}", job.log);
}

fn a_scheduler_that_is_killed_stops_nobody_and_gets_everybody_back(memory: &str) {
    // On a busy machine the next scheduler may come too late for programs that wait.
    assert!((0..3).any(|_| gets_everybody_back_in_time(memory)), "no scheduler came back in time");
}

/// Returns whether the next scheduler came before anybody went on alone. Then no memory has moved by faults.
fn gets_everybody_back_in_time(memory: &str) -> bool {
    let world = World::with_memory(memory, CARD);
    let arguments = ["--gpu-memory", "1GiB", "--tq", "0.4"];
    let scheduler = Scheduler::start(&world, &arguments);
    let jobs = ["a", "b"].map(|name| {
        let job = Program::workload(&world, name, &format!("{JOB} --full-check"));
        job.until_told().waits_for_go().start()
    });
    Running::go(&[&jobs[0], &jobs[1]]);
    Scheduler::until_turns(&world, &[&jobs[0], &jobs[1]], 2);
    let killed = Instant::now();
    scheduler.kill();
    wait_until("both notice", || jobs.iter().all(|job| job.log().contains(LOST)));
    let _scheduler = Scheduler::start(&world, &arguments);
    Scheduler::until(&world, "both are back", |status| {
        status.clients.iter().filter(|client| !client.gone).count() == 2
    });
    let back = killed.elapsed();
    Scheduler::until(&world, "both take turns", |status| {
        status.clients.iter().filter(|client| !client.gone).count() == 2
            && status.gpus.first().is_some_and(|gpu| gpu.turns >= 4)
    });
    world.stop_intact(jobs);
    let is_in_time = back < GOES_ALONE_AFTER;
    if is_in_time {
        world.moved_when_told();
    }
    is_in_time
}

fn parked_programs_go_on_when_a_scheduler_does_not_come_back(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "60"]);
    let jobs =
        ["a", "b"].map(|name| Program::workload(&world, name, JOB).until_told().waits_for_go().start());
    Running::go(&[&jobs[0], &jobs[1]]);
    Scheduler::until(&world, "one is parked", |status| status.gpus[0].waiters.len() == 1);
    scheduler.kill();
    wait_until("both notice", || jobs.iter().all(|job| job.log().contains(LOST)));
    world.stop_intact(jobs);
}

/// A scheduler that is stopped takes no connection. Its queue is full of those that their programs have closed.
fn programs_go_on_when_a_scheduler_takes_no_connection(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let listener = UnixListener::bind(world.socket()).expect("a socket");
    // A second call sets the length of the queue (listen(2)): it has one place.
    // SAFETY: a listening socket of ours.
    assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
    drop(UnixStream::connect(world.socket()).expect("the place"));
    let job = Program::workload(&world, "job", &format!("{JOB} --steps 5")).start().finish();
    job.intact();
    // It has found the scheduler, and has waited for it as for one that does not answer.
    let is_full = format!("(os error {})", libc::EAGAIN);
    assert!(job.log.contains(&is_full) && job.log.contains("does not answer"), "{}", job.log);
}

#[test]
fn a_second_scheduler_refuses_and_names_the_first() {
    let world = World::simulated(CARD);
    let first = Scheduler::start(&world, &[]);
    let second = Scheduler::command(&world, &[]).output().expect("the scheduler runs");
    assert!(!second.status.success());
    let log = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(
        log.contains("another scheduler serves") && log.contains(&format!("pid {}", first.pid())),
        "{log}"
    );
    // The first one is not disturbed.
    assert_eq!(Scheduler::status(&world).scheduler.pid, first.pid());
}

#[test]
fn stale_sockets_are_replaced_and_anything_else_is_left_alone() {
    let world = World::simulated(CARD);
    // A socket that nobody listens on any more.
    drop(UnixListener::bind(world.socket()).expect("a socket"));
    assert!(world.socket().exists());
    drop(Scheduler::start(&world, &[]));
    assert!(!world.socket().exists(), "a scheduler takes its sockets with it");

    for (what, make) in [
        ("a directory", (|path| std::fs::create_dir(path)) as fn(&std::path::Path) -> std::io::Result<()>),
        ("a file", |path| std::fs::write(path, "precious")),
    ] {
        make(&world.socket()).expect("something in the way");
        let output = Scheduler::command(&world, &[]).output().expect("the scheduler runs");
        assert!(!output.status.success());
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(log.contains(&format!("is {what}, not a socket")), "{log}");
        assert!(world.socket().exists());
        let _ = std::fs::remove_dir(world.socket());
        let _ = std::fs::remove_file(world.socket());
    }

    // A folder where nobody may make a file, not even root.
    let output = Scheduler::command(&world, &["--socket", "/proc/nvshare/scheduler.sock"])
        .output()
        .expect("the scheduler runs");
    assert!(!output.status.success());
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(log.contains("/proc/nvshare"), "{log}");
}

fn a_stopped_program_holds_up_nobody_that_fits_beside_it(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.2", "--grace", "600"]);
    // The program has its memory and waits for a word that never comes, away from the simulator and its locks.
    let stopped = Program::workload(&world, "stopped", JOB).waits_for_go().start();
    wait_until("it is set up", || stopped.is_ready());
    stopped.signal(libc::SIGSTOP);
    let small =
        Program::workload(&world, "small", "--memory 128MiB --block 64MiB --steps 20").start().finish();
    small.intact();
    let large = Program::workload(&world, "large", &format!("{JOB} --steps 5")).start();
    wait_until("the stopped one is reported", || scheduler.log().contains("is stopped"));
    stopped.signal(libc::SIGKILL);
    let _ = stopped.finish();
    large.finish().intact();
}

fn a_stopped_program_that_waits_is_passed_over_until_it_goes_on(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "60"]);
    let jobs =
        ["a", "b"].map(|name| Program::workload(&world, name, JOB).until_told().waits_for_go().start());
    Running::go(&[&jobs[0], &jobs[1]]);
    let is_passed_over = |job: &Running| {
        let pid = job.pid();
        move |status: &Status| {
            status.find(pid).is_some_and(|client| client.state == ClientState::Waiting && client.stuck)
        }
    };
    let mut waits = 0;
    wait_until("the one that waits is seen to be stopped", || {
        Scheduler::until(&world, "one runs and the other waits", |status| {
            let state = |job: &Running| status.find(job.pid()).map(|client| client.state);
            waits = usize::from(state(&jobs[0]) == Some(ClientState::Running));
            state(&jobs[waits]) == Some(ClientState::Waiting)
                && state(&jobs[1 - waits]) == Some(ClientState::Running)
        });
        // It sleeps at its gate, away from the simulator and its locks, when all that it was asked for has left.
        wait_until("its memory has left", || {
            let log = jobs[waits].log();
            let count = |what: &str| log.matches(what).count();
            count("received Evict(") == count("sent Evicted")
        });
        let pid = jobs[waits].pid();
        jobs[waits].signal(libc::SIGSTOP);
        Scheduler::until(&world, "it is seen to be stopped", |status| status.client(pid).stuck);
        // On a busy machine the other one can have looked idle, so that this one was granted the lock before it was stopped.
        let waits_still = is_passed_over(&jobs[waits])(&Scheduler::status(&world));
        if !waits_still {
            jobs[waits].signal(libc::SIGCONT);
            Scheduler::until(&world, "it goes on", |status| !status.client(pid).stuck);
        }
        waits_still
    });
    world.stop();
    let [a, b] = jobs;
    let (runs, waits) = if waits == 1 { (a, b) } else { (b, a) };
    runs.finish().intact();
    let small =
        Program::workload(&world, "small", "--memory 128MiB --block 64MiB --steps 20").start().finish();
    small.intact();
    Scheduler::until(&world, "nothing was granted to it", is_passed_over(&waits));
    waits.signal(libc::SIGCONT);
    waits.finish().intact();
    scheduler.wait_for_log("is stopped, and keeps");
}

/// It cannot move its memory any more, and all of it is free in a moment.
fn the_end_of_a_process_is_waited_for(memory: &str) {
    let world = World::with_memory(memory, CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    let says = |program: &Running, text: &str| {
        wait_until("the program says so", || {
            assert!(program.lives(), "{}", program.log());
            program.out().ends_with(text)
        });
    };
    let end = world.dir().join("end");
    let ends = Program::guest(&world, "ends_slowly", &[]).env("END", &end.to_string_lossy());
    let ends = ends.waits_for_go().start();
    says(&ends, "has memory\n");
    let wake = world.dir().join("wake");
    let other =
        Program::guest(&world, "ends_slowly", &["other"]).env("WAKE", &wake.to_string_lossy()).start();
    says(&other, "has memory\n");
    std::fs::write(world.dir().join("go"), "").expect("a file");
    says(&ends, "ends\n");
    let asked = || ends.log().matches("received Evict(").count();
    let before = asked();
    std::fs::write(wake, "").expect("a file");
    wait_until("it is asked for more room while it ends", || asked() > before || !other.lives());
    // If it said that it has none to give, the other one would be refused by now.
    std::thread::sleep(Duration::from_secs(1));
    std::fs::write(end, "").expect("a file");
    other.finish().passed();
    ends.finish().passed();
}

/// The card has room for both here: a simulated driver's memory stays with a process that lives on.
fn a_process_that_becomes_another_program_leaves_its_room(memory: &str) {
    let world = World::with_memory(memory, &[("NVSIM_MEMORY", "2GiB"), CARD[1]]);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--grace", "1"]);
    let becomes = Program::guest(&world, "becomes", &["768"]).start();
    wait_until("it has become another program", || {
        std::fs::read_to_string(format!("/proc/{}/comm", becomes.pid())).is_ok_and(|name| name == "sleep\n")
    });
    let other = Program::workload(&world, "other", "--memory 768MiB --block 64MiB --steps 3").start();
    other.finish().intact();
    assert!(becomes.lives());
}
