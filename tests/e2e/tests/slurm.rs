//! Slurm: jobs by control groups that are made up as Slurm makes them, and the scripts of `packaging/slurm` with made-up variables.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use nvshare_harness::{Artifacts, ControlGroup, Finished, Scheduler, World, executable};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];
const MIB: u64 = 1 << 20;

/// The nodes of a test, one in each hierarchy: where the groups of their jobs are. Slurm gives such names where a machine plays several nodes.
fn nodes(test: &str) -> Vec<PathBuf> {
    let name = format!("nvshare-test-{}-{test}", std::process::id());
    let second = ControlGroup::second().map(|root| root.join(format!("{name}_slurmstepd.scope")));
    let first = ControlGroup::first("freezer").map(|root| root.join(format!("slurm_{name}/uid_1000")));
    let nodes: Vec<PathBuf> = second.into_iter().chain(first).collect();
    assert!(!nodes.is_empty(), "no hierarchy of control groups is mounted");
    nodes
}

fn step(node: &Path, job: u32, step: &str) -> ControlGroup {
    ControlGroup::at(&node.join(format!("job_{job}/{step}")))
}

fn ctl(world: &World, arguments: &[&str]) -> String {
    let output = Scheduler::ctl(world, arguments);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).expect("a text").trim().to_owned()
}

/// Another process of a job, which has 128 MiB if it may.
fn more(world: &World, group: &ControlGroup, name: &str) -> Finished {
    group.workload(world, name, "--memory 128MiB --block 64MiB --steps 1 --kernel-us 100").start().finish()
}

fn is_over_its_limit(program: &Finished) -> bool {
    let outcome = program.outcome.as_ref().expect("an account");
    outcome.error.as_deref() == Some("cuMemAlloc: CUDA error 2")
}

#[test]
#[ignore = "needs root and control groups; .ci/run runs this test where they are there"]
fn a_job_is_one_tenant_and_has_the_limits_that_a_prolog_gave_it() {
    for (node, job) in nodes("limits").iter().zip([410, 420]) {
        let world = World::simulated(CARD);
        let scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
        let name = format!("job:{job}");
        let said = ctl(&world, &["set-limit", &name, "--memory", "256MiB", "--compute", "60"]);
        assert_eq!(said, format!("job {job}: compute limit 60 %, memory limit 256.0 MiB"));

        let (task, batch) = (step(node, job, "step_0/user/task_0"), step(node, job, "step_batch"));
        let other = step(node, job + 1, "step_0");
        let args = "--memory 192MiB --block 64MiB --kernel-us 1000";
        let holder = task.workload(&world, "holder", args).until_told().start();
        Scheduler::until(&world, "the job has its memory", |status| {
            status
                .find(holder.pid())
                .is_some_and(|client| client.usage.iter().any(|usage| usage.allocated >= 192 * MIB))
        });
        assert!(is_over_its_limit(&more(&world, &batch, "batch")), "another step is of the same tenant");
        more(&world, &other, "other").intact();

        let has_limits = || {
            Scheduler::until(&world, "the job has its limits", |status| {
                status.find(holder.pid()).is_some_and(|client| {
                    let share = client.share.compute.iter().map(|limit| limit.percent).min();
                    client.usage.iter().any(|usage| usage.limit == 256 * MIB) && share == Some(60)
                })
            });
        };
        has_limits();
        let process = Scheduler::status(&world).client(holder.pid()).process.clone().expect("a process");
        assert_eq!(process.job, Some(job.to_string()));
        assert!(ctl(&world, &["status"]).contains(&format!("job {job}")));

        // The limits are there again after a restart, for a process that was there before and for others.
        scheduler.kill();
        let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
        has_limits();
        assert!(is_over_its_limit(&more(&world, &batch, "again")));
        ctl(&world, &["set-weight", &name, "50"]);
        assert_eq!(Scheduler::status(&world).client(holder.pid()).share.weight, 50);
        ctl(&world, &["set-limit", &name, "--memory", "none", "--compute", "none"]);
        more(&world, &batch, "free").intact();
        world.stop();
        holder.finish().intact();
    }
}

#[test]
#[ignore = "needs root and control groups; .ci/run runs this test where they are there"]
fn a_group_that_a_user_made_is_no_job() {
    for (node, job) in nodes("forged").iter().zip([430, 440]) {
        let world = World::simulated(CARD);
        let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
        ctl(&world, &["set-limit", &format!("job:{job}"), "--memory", "64MiB"]);
        let group = step(node, job, "step_0");
        assert!(is_over_its_limit(&more(&world, &group, "real")));
        chown(node.join(format!("job_{job}")), Some(1000), None).expect("a group of somebody's");
        let forged = more(&world, &group, "forged");
        forged.intact();
        let process = Scheduler::status(&world).client(forged.pid).process.clone().expect("a process");
        assert_eq!(process.job, None);
    }
}

/// It has the same number, and may come to the same node. An administrator may have named a client instead of the job.
#[test]
#[ignore = "needs root and control groups; .ci/run runs this test where they are there"]
fn a_job_that_is_queued_again_starts_without_words_about_its_clients() {
    for (node, job) in nodes("again").iter().zip([450, 460]) {
        let world = World::simulated(CARD);
        let scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
        let group = step(node, job, "step_0");
        let args = "--memory 64MiB --block 64MiB --kernel-us 1000";
        let first = group.workload(&world, "first", args).until_told().start();
        Scheduler::until(&world, "it is there", |status| status.find(first.pid()).is_some());
        let client = Scheduler::status(&world).client(first.pid()).client.to_string();
        ctl(&world, &["set-limit", &client, "--memory", "96MiB"]);
        ctl(&world, &["pause", &client]);
        drop(first);
        scheduler.wait_for_log("is gone");
        let ended = script(&world, "epilog", &[("SLURM_JOB_ID", &job.to_string())], "", "");
        assert!(ended.status.success(), "{ended:?}");
        more(&world, &group, "second").intact();
    }
}

/// A script of `packaging/slurm` as Slurm runs it: with these variables, and `squeue` that says this of job 7, between two others of an array.
fn script(world: &World, name: &str, variables: &[(&str, &str)], tres: &str, nodes: &str) -> Output {
    let programs = world.dir().join("programs");
    fs::create_dir_all(&programs).expect("a folder");
    let squeue = format!(
        "#!/bin/sh\nlines() {{ printf '%s   \\n' \"6   $1\" \"7   $2\" \"77   $1\"; }}\n\
         case \"$*\" in\n*JobID:32,tres-alloc*) lines 'gres/shard=1' '{tres}' ;;\n\
         *JobID:32,numnodes*) lines 64 '{nodes}' ;;\nesac\n"
    );
    let ctl = format!("#!/bin/sh\nexec {} \"$@\"\n", Artifacts::get().ctl.display());
    for (name, text) in [("squeue", squeue), ("nvshare-ctl", ctl)] {
        let source = programs.join(format!("{name}.txt"));
        fs::write(&source, text).expect("a file");
        executable(&source, &programs.join(name));
    }
    // It waits for as long as the tests have it wait.
    let of_package = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/slurm").join(name);
    let text = fs::read_to_string(of_package).expect("the script");
    let source = programs.join(format!("{name}.txt"));
    fs::write(&source, text.replace("patience=5 ", "patience=${PATIENCE:-1} ")).expect("a file");
    executable(&source, &programs.join(name));
    let mut command = Command::new(programs.join(name));
    command.env_clear().envs(world.environment()).env_remove("LD_PRELOAD");
    command.env("PATH", format!("{}:/usr/bin:/bin", programs.display()));
    command.envs(variables.iter().copied()).output().expect("the script runs")
}

/// The lines that a task gets from its prolog.
fn exports(variables: &[(&str, &str)]) -> Vec<String> {
    let output = script(&World::simulated(CARD), "task-prolog", variables, "", "");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).expect("a text").lines().map(str::to_owned).collect()
}

#[test]
fn the_prolog_gives_a_job_what_its_shards_are() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &[]);
    let job = [("SLURM_JOB_ID", "7"), ("SLURM_JOB_GPUS", "0")];
    let run = |tres, nodes| script(&world, "prolog", &job, tres, nodes);
    for (tres, nodes, said) in [
        ("cpu=4,mem=8G,node=1,billing=4,gres/shard=8", "1", "compute limit 10 %, memory limit 8.00 GiB"),
        ("cpu=4,gres/shard=8,gres/shard:h100=8", "1", "compute limit 10 %, memory limit 8.00 GiB"),
        ("cpu=8,node=2,gres/shard=160", "2", "compute limit 100 %, memory limit 80.00 GiB"),
        ("gres/shard=1", "4", "compute limit 1 %, memory limit 256.0 MiB"),
    ] {
        let output = run(tres, nodes);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), format!("job 7: {said}\n"));
    }
    let state = fs::read_to_string(world.dir().join("nvshare-state.toml")).expect("what was set");
    assert!(state.contains("[job.7]\ncompute = 1\nmemory = 268435456\n"), "{state}");
    let whole = run("cpu=4,gres/gpu=1,gres/gpu:h100=1", "1");
    assert!(whole.status.success() && whole.stdout.is_empty(), "{whole:?}");
    let uncounted = run("cpu=4,mem=8G,node=1", "1");
    assert!(!uncounted.status.success(), "no job runs without its limits: {uncounted:?}");
    assert!(String::from_utf8_lossy(&uncounted.stderr).contains("AccountingStorageTRES"));
    let without = script(&world, "prolog", &job[..1], "gres/shard=8", "1");
    assert!(without.status.success() && without.stdout.is_empty(), "no GPU: {without:?}");

    let other = script(&world, "prolog", &[("SLURM_JOB_ID", "8"), job[1]], "gres/shard=8", "1");
    assert!(!other.status.success(), "squeue says nothing of this one: {other:?}");
    assert!(String::from_utf8_lossy(&other.stderr).contains("no line of job 8"), "{other:?}");

    // An administrator's word goes with the prolog's.
    ctl(&world, &["set-weight", "job:7", "50"]);
    ctl(&world, &["set-priority", "job:7", "high"]);
    let ended = script(&world, "epilog", &job[..1], "", "");
    assert!(ended.status.success(), "{ended:?}");
    assert!(!world.dir().join("nvshare-state.toml").exists(), "nothing is left of the job");
}

/// It may be starting again: a node is not drained for that.
#[test]
fn the_prolog_waits_for_a_scheduler_and_for_slurm() {
    let world = World::simulated(CARD);
    let job = [("SLURM_JOB_ID", "7"), ("SLURM_JOB_GPUS", "0"), ("PATIENCE", "60")];
    let output = std::thread::scope(|threads| {
        let prolog = threads.spawn(|| script(&world, "prolog", &job, "gres/shard=8", "1"));
        std::thread::sleep(Duration::from_millis(1500));
        assert!(!prolog.is_finished(), "nobody answers yet");
        let scheduler = Scheduler::start(&world, &[]);
        let output = prolog.join().expect("the script runs");
        drop(scheduler);
        output
    });
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("memory limit 8.00 GiB"), "{output:?}");
    let silent = script(&world, "prolog", &job[..2], "' && exit 1 && echo '", "1");
    assert!(!silent.status.success(), "{silent:?}");
    assert!(String::from_utf8_lossy(&silent.stderr).contains("squeue does not say"), "{silent:?}");
}

#[test]
fn without_a_scheduler_no_job_with_shards_starts_and_every_one_ends() {
    let world = World::simulated(CARD);
    let job = [("SLURM_JOB_ID", "7"), ("SLURM_JOB_GPUS", "0")];
    assert!(!script(&world, "prolog", &job, "gres/shard=8", "1").status.success());
    assert!(script(&world, "epilog", &job, "", "").status.success());
}

#[test]
fn tasks_get_the_library_and_ranks_their_gang() {
    // The package's library, or the tarball's.
    let places = ["/usr/lib/nvshare/libnvshare.so", "/usr/local/lib/nvshare/libnvshare.so"];
    let library = &*format!("export LD_PRELOAD={}", places[usize::from(!Path::new(places[0]).exists())]);
    let step = |tasks, node, gpus| {
        let own = [("SLURM_STEP_ID", "3"), ("SLURM_STEP_TASKS_PER_NODE", tasks), ("SLURM_NODEID", node)];
        exports(&[&own[..], &[("SLURM_STEP_GPUS", gpus)]].concat())
    };
    let [alone, gang] = [vec![library], vec![library, "export NVSHARE_GANG=step-3"]];
    assert!(exports(&[("SLURM_STEP_ID", "3")]).is_empty(), "no GPU");
    assert_eq!(exports(&[("SLURM_JOB_GPUS", "0,1")]), alone, "a batch script");
    assert_eq!(step("4", "0", "0,1,2,3"), gang);
    assert_eq!(step("1", "0", "0,1"), alone, "one task");
    assert_eq!(step("4", "0", "0"), alone, "tasks that share a GPU");
    assert_eq!(step("2(x3),1", "2", "4,6"), gang);
    assert_eq!(step("2(x3),1", "3", "4,6"), alone, "the last node has one task");
    let own = [("SLURM_STEP_TASKS_PER_NODE", "2"), ("SLURM_STEP_GPUS", "0,1"), ("SLURM_STEP_ID", "3")];
    assert_eq!(exports(&[&own[..], &[("NVSHARE_GANG", "mine")]].concat()), alone, "the user's own stays");
    // Any library that is there: the script's own programs load it.
    let other = Artifacts::get().library.to_string_lossy();
    let preloaded = exports(&[("SLURM_JOB_GPUS", "0"), ("LD_PRELOAD", &other)]);
    assert_eq!(preloaded, [format!("{library}:{other}")]);
}
