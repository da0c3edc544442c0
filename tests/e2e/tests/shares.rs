//! Shares of the GPU's time, on simulated cards: measured by the kernels that ran, as the card recorded them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nvshare_harness::{Artifacts, Program, Running, Scheduler, World, wait_until};
use nvshare_proto::Priority;

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];
const MIB: u64 = 1 << 20;

/// A program that keeps the card busy with kernels of 2 ms until it is told to stop.
fn busy(world: &World, name: &str, variables: &[(&str, &str)]) -> Running {
    let arguments = "--memory 64MiB --block 64MiB --kernel-us 2000 --ahead";
    let program = Program::workload(world, name, arguments).until_told().waits_for_go();
    variables.iter().fold(program, |program, (name, value)| program.env(name, value)).start()
}

/// Milliseconds of kernels of each program, between two moments in nanoseconds of the card's clock.
fn ran(world: &World, programs: &[&Running], from: u64, to: u64) -> Vec<f64> {
    let (_, kernels) = world.observe();
    let of = |program: &&Running| {
        let own = kernels.iter().filter(|kernel| kernel.process == program.pid());
        let within = own.map(|kernel| kernel.end_ns.min(to).saturating_sub(kernel.begin_ns.max(from)));
        within.sum::<u64>() as f64 / 1e6
    };
    programs.iter().map(of).collect()
}

/// When the last kernel ended, and how many kernels ran.
fn latest(world: &World) -> u64 {
    world.observe().1.iter().map(|kernel| kernel.end_ns).max().unwrap_or(0)
}

/// Waits until the card has gone on for so long, by the card's own clock.
fn goes_on_for(world: &World, from: u64, time: Duration) -> u64 {
    let until = from + time.as_nanos() as u64;
    wait_until("the card goes on", || {
        std::thread::sleep(Duration::from_millis(100));
        latest(world) >= until
    });
    until
}

fn close(got: &[f64], expected: &[f64], by: f64) {
    let (sum, of): (f64, f64) = (got.iter().sum(), expected.iter().sum());
    for (got, expected) in got.iter().zip(expected) {
        let (got, expected) = (got / sum, expected / of);
        assert!((got - expected).abs() <= expected * by, "{got:.3} of the time, not {expected:.3}");
    }
}

#[test]
fn limits_of_20_30_and_40_come_out_two_to_three_to_four() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let programs: Vec<Running> = [("a", "20"), ("b", "30"), ("c", "40")]
        .iter()
        .map(|(name, percent)| busy(&world, name, &[("CUDA_DEVICE_SM_LIMIT", percent)]))
        .collect();
    let programs: Vec<&Running> = programs.iter().collect();
    let begin = Running::go(&programs) + 1_000_000_000;
    let end = goes_on_for(&world, begin, Duration::from_secs(15));
    let got = ran(&world, &programs, begin, end);
    let status = Scheduler::status(&world);
    assert!(status.gpus[0].slices, "{status:?}");
    assert_eq!(status.client(programs[0].pid()).share.compute[0].percent, 20);
    world.stop();
    close(&got, &[2.0, 3.0, 4.0], 0.05);
}

/// The spells of a program that began after a moment, from the opening of its gate until its work was complete: by the scheduler's own
/// clock, in microseconds of the system's time.
fn spells(world: &World, program: &Running, after: u64) -> Vec<(u64, u64)> {
    let output = Scheduler::ctl(world, &["watch", "--json", "--no-follow"]);
    let text = String::from_utf8_lossy(&output.stdout);
    let events = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let mut spells = Vec::new();
    let mut began = None;
    for event in events.filter(|event| event["pid"] == program.pid()) {
        let at = event["time_us"].as_u64().expect("a time");
        match event["event"].as_str() {
            Some("running") => began = began.or(Some(at)),
            Some("released" | "idle") => spells.extend(began.take().map(|began| (began, at))),
            _ => {}
        }
    }
    spells.retain(|(began, _)| *began >= after);
    spells
}

/// The system's time, and by how much it is ahead of the card's clock; in microseconds.
fn clocks() -> (u64, u64) {
    let mut card = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a place for the answer.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut card) };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_micros() as u64;
    (now, now - (card.tv_sec as u64 * 1_000_000 + card.tv_nsec as u64 / 1000))
}

/// A program with an enforced limit holds the card for this part of the time, and runs no kernel beyond that. Whole spells with the rests
/// behind them are measured: a busy machine makes some longer, and then the rest as well. Its kernels fill the spells but for what a
/// launch and a drain take. A busy machine delays them, so this has to be so for a few spells in a row, sooner or later.
fn holds(world: &World, job: &Running, expected: f64, by: f64) {
    const IN_A_ROW: usize = 4;
    let (after, ahead) = clocks();
    // The new limit is seen within a second.
    let after = after + 1_000_000;
    wait_until("it has had many spells", || {
        std::thread::sleep(Duration::from_millis(250));
        spells(world, job, after).len() > 24
    });
    let had = spells(world, job, after);
    let (&(begin, _), &(end, _)) = had.first().zip(had.last()).expect("spells");
    let length =
        |spells: &[(u64, u64)]| spells.iter().map(|(began, ended)| ended - began).sum::<u64>() as f64;
    let part = length(&had[..had.len() - 1]) / (end - begin) as f64;
    assert!((part - expected).abs() <= by, "{part:.3} of the time: {had:?}");
    let on_card = |micros: u64| (micros - ahead) * 1000;
    let ran_in_all = ran(world, &[job], on_card(begin), on_card(end))[0] * 1e3 / (end - begin) as f64;
    assert!(ran_in_all <= expected + by, "its kernels ran for {ran_in_all:.3} of the time");
    wait_until("its kernels fill what it is granted", || {
        let had = spells(world, job, after);
        let (_, kernels) = world.observe();
        let filled = |row: &[(u64, u64)]| {
            let within = row.iter().flat_map(|&(began, ended)| {
                let (from, to) = (on_card(began), on_card(ended));
                let own = kernels.iter().filter(|kernel| kernel.process == job.pid());
                own.map(move |kernel| kernel.end_ns.min(to).saturating_sub(kernel.begin_ns.max(from)))
            });
            within.sum::<u64>() as f64 / 1e3 / length(row)
        };
        std::thread::sleep(Duration::from_millis(250));
        had.windows(IN_A_ROW).any(|row| filled(row) >= 1.0 - by / expected)
    });
}

#[test]
fn an_enforced_limit_is_a_part_of_each_second_and_another_is_seen_at_once() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let variables = [("NVSHARE_COMPUTE_LIMIT", "25"), ("GPU_CORE_UTILIZATION_POLICY", "force")];
    let job = busy(&world, "job", &variables);
    Running::go(&[&job]);
    holds(&world, &job, 0.25, 0.02);
    let client = Scheduler::status(&world).client(job.pid()).client.to_string();
    let set = Scheduler::ctl(&world, &["set-limit", &client, "--compute", "60"]);
    assert!(set.status.success(), "{set:?}");
    let said = String::from_utf8_lossy(&set.stdout).into_owned();
    assert!(said.contains("compute limit 60 %"), "{said}");
    holds(&world, &job, 0.60, 0.04);
    world.stop();
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
        (&["set-limit", &client], "nothing"),
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
    wait_until("it stands still", || {
        let before = latest(&world);
        std::thread::sleep(Duration::from_millis(500));
        latest(&world) == before
    });
    assert!(share().paused);
    let before = latest(&world);
    assert!(ctl(&["resume", &client]).0);
    wait_until("it goes on", || latest(&world) > before);
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
    let fewer = run(&["--weight", "20", "--", "sh", "-c", "echo $NVSHARE_WEIGHT"]);
    assert_eq!(String::from_utf8_lossy(&fewer.stdout).trim(), "20", "{fewer:?}");
}
