//! Shares of the GPU's time, on simulated cards: what programs ask for reaches the scheduler's core, and the library obeys. How much of the
//! time each gets is a matter of virtual time (`libnvshare/client/tests/joint/shares.rs`), where no busy machine takes any of it away.

use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nvshare_harness::{Artifacts, Program, Ran, Running, Scheduler, World, wait_until};
use nvshare_proto::{ClientState, Priority};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];
const MIB: u64 = 1 << 20;

/// A program that keeps the card busy with kernels of 2 ms until it is told to stop.
fn busy(world: &World, name: &str, variables: &[(&str, &str)]) -> Running {
    let arguments = "--memory 64MiB --block 64MiB --kernel-us 2000 --ahead";
    let program = Program::workload(world, name, arguments).until_told().waits_for_go();
    variables.iter().fold(program, |program, (name, value)| program.env(name, value)).start()
}

/// A turn of a program: when it was granted, when its gate was open, and when all of its work was complete. In microseconds since 1970, as
/// the scheduler told of it.
#[derive(Debug, Clone, Copy)]
struct Turn {
    granted: u64,
    running: u64,
    ended: u64,
}

/// The events so far that the scheduler keeps.
fn events(world: &World) -> Vec<serde_json::Value> {
    let output = Scheduler::ctl(world, &["watch", "--json", "--no-follow"]);
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// The number of the last event so far.
fn last_event(world: &World) -> u64 {
    events(world).iter().filter_map(|event| event["seq"].as_u64()).max().unwrap_or(0)
}

/// The turns of a program that began after the event of this number and are over.
fn turns(world: &World, program: &Running, after: u64) -> Vec<Turn> {
    let mut turns = Vec::new();
    let (mut granted, mut running) = (None, None);
    let is_later = |event: &serde_json::Value| event["seq"].as_u64().is_some_and(|seq| seq > after);
    for event in events(world).iter().filter(|event| event["pid"] == program.pid() && is_later(event)) {
        let at = event["time_us"].as_u64().expect("a time");
        match event["event"].as_str() {
            Some("granted") => granted = Some(at),
            Some("running") => running = granted.map(|granted| (granted, at)),
            Some("released" | "idle") => {
                let turn = running.take().map(|(granted, running)| Turn { granted, running, ended: at });
                turns.extend(turn);
            }
            _ => {}
        }
    }
    turns
}

/// The part of the time that whole turns took, with the rests behind them: all of these turns but the last one.
fn part(turns: &[Turn]) -> f64 {
    let [first, .., last] = turns else { return 0.0 };
    let held: u64 = turns.iter().map(|turn| turn.ended - turn.running).sum();
    (held - (last.ended - last.running)) as f64 / (last.running - first.running) as f64
}

/// By how much the time of events is ahead of the card's clock, in microseconds.
fn ahead_of_card() -> u64 {
    let card = || {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: a place for the answer.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
        now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
    };
    loop {
        let before = card();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_micros() as u64;
        // Nothing came in between.
        if card() - before < 100 {
            return now - before;
        }
    }
}

/// A program with an enforced limit has the card for no more than this part of the time, though nobody else wants it: its turns end, the
/// rests behind them are as long as the scheduler's pace has them, and it runs nothing in them. A machine that holds a turn up holds up its
/// end as well, and the rest makes up for that; what is held up is the rest itself, mostly, so sooner or later a few turns in a row come out right.
fn assert_held_to(world: &World, job: &Running, limit: f64, after: u64) {
    const TURNS: usize = 17;
    const IN_A_ROW: usize = 5;
    /// The part of one turn's credit in the time of all turns, several times over.
    const BY: f64 = 0.05;
    let mut had = Vec::new();
    wait_until("it has had many turns", || {
        std::thread::sleep(Duration::from_millis(100));
        had = turns(world, job, after);
        had.len() >= TURNS
    });
    assert!(part(&had) <= limit + BY, "{:.3} of the time: {had:?}", part(&had));
    let ahead = ahead_of_card();
    // The clocks are compared to a tenth of this.
    let on_card = |micros: u64| (micros - ahead) * 1000;
    let inside = |kernel: &Ran, turn: &Turn| {
        kernel.begin_ns >= on_card(turn.granted - 1000) && kernel.end_ns <= on_card(turn.ended + 1000)
    };
    let (begin, end) = (on_card(had[0].granted), on_card(had[TURNS - 1].ended));
    let (_, kernels) = world.observe();
    let own = kernels.iter().filter(|kernel| kernel.process == job.pid());
    let own: Vec<&Ran> = own.filter(|kernel| kernel.begin_ns > begin && kernel.begin_ns < end).collect();
    assert!(!own.is_empty(), "it ran kernels");
    let outside: Vec<&&Ran> =
        own.iter().filter(|kernel| !had.iter().any(|turn| inside(kernel, turn))).collect();
    assert!(outside.is_empty(), "kernels outside of its turns: {outside:?} {had:?}");
    wait_until("it gets its part", || {
        std::thread::sleep(Duration::from_millis(100));
        turns(world, job, after).windows(IN_A_ROW).any(|row| part(row) >= limit - BY)
    });
}

/// How many kernels of a program have run.
fn kernels(world: &World, program: &Running) -> usize {
    world.observe().1.iter().filter(|kernel| kernel.process == program.pid()).count()
}

#[test]
fn limits_of_20_30_and_40_reach_the_core_and_have_programs_that_fit_take_turns() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let limits = [("a", "20"), ("b", "30"), ("c", "40")];
    let programs = limits.map(|(name, percent)| busy(&world, name, &[("CUDA_DEVICE_SM_LIMIT", percent)]));
    let all = programs.each_ref();
    let go = Running::go(&all);
    Scheduler::until_turns(&world, &all, 6);
    let status = Scheduler::status(&world);
    assert!(status.gpus[0].slices, "{status:?}");
    let percent = |program: &Running| status.client(program.pid()).share.compute[0].percent;
    assert_eq!(all.map(percent), [20, 30, 40]);
    let programs = world.stop_intact(programs);
    // A program's kernels run in its turns alone. The last turn of each may end with the program.
    let status = Scheduler::status(&world);
    let given_back: u64 = programs.iter().map(|program| status.client(program.pid).counters.hand_overs).sum();
    let changes = Ran::changes(&world.observe().1, go) as u64;
    assert!(changes < given_back + 3, "{changes} changes in {given_back} turns");
}

#[test]
fn an_enforced_limit_binds_a_program_that_is_alone_and_another_one_follows_at_once() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let variables = [("NVSHARE_COMPUTE_LIMIT", "25"), ("GPU_CORE_UTILIZATION_POLICY", "force")];
    let job = busy(&world, "job", &variables);
    Running::go(&[&job]);
    assert_held_to(&world, &job, 0.25, last_event(&world));
    let client = Scheduler::status(&world).client(job.pid()).client.to_string();
    let set = Scheduler::ctl(&world, &["set-limit", &client, "--compute", "60"]);
    assert!(set.status.success(), "{set:?}");
    let said = String::from_utf8_lossy(&set.stdout).into_owned();
    assert!(said.contains("compute limit 60 %"), "{said}");
    assert_held_to(&world, &job, 0.60, last_event(&world));
    world.stop();
    job.finish().intact();
}

#[test]
fn an_administrator_sets_limits_and_pauses_programs() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let job = busy(&world, "job", &[("NVSHARE_WEIGHT", "50"), ("NVSHARE_PRIORITY", "high")]);
    Running::go(&[&job]);
    let share = || Scheduler::status(&world).client(job.pid()).share.clone();
    // A program may ask for less than it was given, and not for more.
    assert_eq!((share().weight, share().priority), (50, Priority::Normal));
    let client = Scheduler::status(&world).client(job.pid()).client.to_string();
    let ctl = |arguments: &[&str]| {
        let output = Scheduler::ctl(&world, arguments);
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert!(ctl(&["set-priority", &client, "high"]).0);
    assert_eq!(share().priority, Priority::High);
    assert!(ctl(&["set-limit", &client, "--memory", "128MiB"]).0);
    Scheduler::until(&world, "the limit is in force", |status| {
        status.client(job.pid()).usage[0].limit == 128 * MIB
    });
    assert!(ctl(&["set-limit", &client, "--memory", "none"]).0);
    Scheduler::until(&world, "the limit is gone", |status| status.client(job.pid()).usage[0].limit == 0);
    for (wrong, why) in [
        (&["set-limit", &client, "--compute", "0"][..], "1 to 100"),
        (&["set-limit", &client, "--compute", "101"], "1 to 100"),
        (&["set-limit", &client, "--memory", "4"], "the least is 64.0 MiB"),
        (&["set-limit", &client, "--policy", "soft"], "default, force, disable"),
        (&["set-limit", &client], "say what to limit"),
        (&["set-weight", &client, "0"], "1 to 10000"),
        (&["set-weight", &client, "-1"], "1 to 10000"),
        (&["set-weight", "999", "50"], "there is no client 999"),
        (&["set-tq", "auto", "--overhead", "0%"], "0.1% to 90%"),
        (&["set-tq", "3", "--overhead", "5%"], "set-tq auto"),
    ] {
        let (done, said) = ctl(wrong);
        assert!(!done && said.contains(why), "{wrong:?}: {said}");
    }
    assert!(ctl(&["pause", &client]).0);
    assert!(share().paused);
    Scheduler::until(&world, "it has given the card back", |status| {
        status.client(job.pid()).state == ClientState::Waiting
    });
    let before = kernels(&world, &job);
    // Another one runs from its first step to its last meanwhile.
    Program::workload(&world, "other", "--memory 64MiB --block 64MiB --steps 20").start().finish().intact();
    assert_eq!(kernels(&world, &job), before, "it stands still");
    assert!(ctl(&["resume", &client]).0);
    wait_until("it goes on", || kernels(&world, &job) > before);
    world.stop();
    job.finish().intact();
}

#[test]
fn a_limit_below_what_a_client_has_says_that_it_keeps_it() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let job = Program::workload(&world, "job", "--memory 192MiB --block 64MiB --kernel-us 2000 --ahead");
    let job = job.until_told().start();
    Scheduler::until(&world, "it has its memory", |status| {
        status
            .find(job.pid())
            .is_some_and(|client| client.usage.iter().any(|usage| usage.allocated >= 192 * MIB))
    });
    let client = Scheduler::status(&world).client(job.pid()).client.to_string();
    let said = |limit: &str| {
        let set = Scheduler::ctl(&world, &["set-limit", &client, "--memory", limit]);
        String::from_utf8_lossy(&set.stdout).into_owned()
    };
    let keeps =
        "memory limit 128.0 MiB; it has 192.0 MiB and keeps them: new allocations fail until it is below";
    assert!(said("128MiB").contains(keeps), "{}", said("128MiB"));
    assert!(!said("256MiB").contains("keeps"), "{}", said("256MiB"));
    world.stop();
    job.finish().intact();
}

#[test]
fn a_variable_for_shares_that_cannot_be_read_fails_closed() {
    let world = World::simulated(CARD);
    for (variable, value) in [
        ("NVSHARE_WEIGHT", "0"),
        ("NVSHARE_WEIGHT", "-5"),
        ("NVSHARE_WEIGHT", "99999999999"),
        ("NVSHARE_COMPUTE_LIMIT", "0"),
        ("CUDA_DEVICE_SM_LIMIT", "150"),
        ("GPU_CORE_UTILIZATION_POLICY", "soft"),
        ("NVSHARE_GANG", "ranks:1"),
        ("NVSHARE_GANG", "ranks:1000"),
    ] {
        let job = Program::workload(&world, "odd", "--memory 64MiB --steps 1").env(variable, value);
        let job = job.start().finish();
        let line = job.log.lines().find(|line| line.contains(variable)).unwrap_or_default();
        assert!(line.starts_with("[NVSHARE][ERROR]"), "{variable}={value}: {}", job.log);
        let error = job.outcome.expect("an account").error.unwrap_or_default();
        assert!(error.starts_with("cuInit"), "{variable}={value}: {error}");
    }
}

#[test]
fn a_run_gives_weights_above_the_usual_only_as_an_administrator() {
    let world = World::simulated(CARD);
    let library = Artifacts::get().library.to_string_lossy();
    let run = |arguments: &[&str]| {
        let all: Vec<&str> = ["run", "--library", &library].iter().chain(arguments).copied().collect();
        Scheduler::ctl(&world, &all)
    };
    let no_scheduler = run(&["--weight", "200", "--", "true"]);
    assert_eq!(no_scheduler.status.code(), Some(125), "{no_scheduler:?}");
    // The administrators' socket of another scheduler would be asked.
    let mut other = Command::new(&Artifacts::get().ctl);
    other.env_remove("NVSHARE_ADMIN_SOCKET").args(["run", "--library", &library, "--socket", "/a/b"]);
    let other = other.args(["--weight", "200", "--", "true"]).output().expect("nvshare-ctl runs");
    assert_eq!(other.status.code(), Some(125), "{other:?}");
    assert!(
        String::from_utf8_lossy(&other.stderr).contains("NVSHARE_ADMIN_SOCKET has to name it"),
        "{other:?}"
    );
    let asks = ["--weight", "20", "--priority", "low", "--gang", "ranks:2", "--compute-policy", "force"];
    let says = "echo $NVSHARE_WEIGHT $NVSHARE_PRIORITY $NVSHARE_GANG $GPU_CORE_UTILIZATION_POLICY";
    let fewer = run(&[&asks[..], &["--", "sh", "-c", says]].concat());
    assert_eq!(String::from_utf8_lossy(&fewer.stdout).trim(), "20 low ranks:2 force", "{fewer:?}");

    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let workload = Artifacts::get().workload.to_string_lossy();
    let line =
        format!("run --library {library} --weight 200 --priority high -- {workload} job --memory 64MiB");
    let mut command = Command::new(&Artifacts::get().ctl);
    command.args(line.split(' '));
    let job = Program::of(&world, "job", command).until_told().start();
    Scheduler::until(&world, "it has the share", |status| {
        let share = status.find(job.pid()).map(|client| client.share.clone());
        share.is_some_and(|share| (share.weight, share.priority) == (200, Priority::High))
    });
    world.stop();
    job.finish().intact();
    // A gang's programs are one job, whatever runs they are of: one that inherits its gang, too.
    let of_gang = run(&["--gang", "ranks", "--weight", "200", "--", "echo", "it ran"]);
    let mut inherits = Command::new(&Artifacts::get().ctl);
    inherits.envs(world.environment()).env("NVSHARE_GANG", "ranks");
    inherits.args(["run", "--library", &library, "--weight", "200", "--", "echo", "it ran"]);
    for refused in [of_gang, inherits.output().expect("nvshare-ctl runs")] {
        assert!(refused.status.code() == Some(125) && refused.stdout.is_empty(), "{refused:?}");
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(said.contains("a gang share the time") && said.contains("set-weight CLIENT 200"), "{said}");
    }
    // A user who has the clients' socket alone.
    let mut user = Command::new(&Artifacts::get().ctl);
    user.env_remove("NVSHARE_ADMIN_SOCKET")
        .env_remove("XDG_RUNTIME_DIR")
        .env("NVSHARE_SOCKET", world.socket());
    user.args(["run", "--library", &library, "--weight", "200", "--", "echo", "it ran"]);
    let user = user.output().expect("nvshare-ctl runs");
    assert!(user.status.code() == Some(125) && user.stdout.is_empty(), "{user:?}");
    assert!(String::from_utf8_lossy(&user.stderr).contains("the administrators' socket"), "{user:?}");
}
