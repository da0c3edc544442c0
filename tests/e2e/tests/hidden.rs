//! A scheduler from which the kernel hides other users' processes, as on a machine whose `/proc` is mounted with `hidepid`.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Command;

use nvshare_harness::{Program, Scheduler, World, guest};
use nvshare_proto::units::MIB;

/// Runs a command as somebody else, in a pid namespace whose first process is root's and hidden. Before Linux 5.8 the option is for all
/// mounts of a namespace, so this machine's own is left alone. `unshare` does not end by SIGTERM, and all end with it.
const HIDING: &str = r#"trap 'kill -KILL $!' TERM
unshare --mount --pid --fork --mount-proc --kill-child sh -c 'mount -o remount,hidepid=2 /proc &&
    setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all --bounding-set=-all "$@"; exit' sh "$@" &
wait
wait"#;

#[test]
#[ignore = "needs root, and a /proc of its own; .ci/run runs this test where they are there"]
fn hidden_processes_are_told_of_and_their_memory_counts() {
    let world = World::simulated(&[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")]);
    fs::set_permissions(world.dir(), Permissions::from_mode(0o777)).expect("our folder");
    // NVML sees memory of the first process.
    fs::write(world.dir().join("processes"), format!("1 {}\n", 64 * MIB)).expect("a file");
    symlink(guest("nvml", true), world.dir().join("lib/libnvidia-ml.so.1")).expect("a link");
    let seeing = Scheduler::command(&world, &["--reserve", "256MiB"]);
    let mut command = Command::new("sh");
    command.args(["-c", HIDING, "sh"]).arg(seeing.get_program()).args(seeing.get_args());
    command.envs(world.environment());
    let scheduler = Scheduler::start_by(&world, command);
    let hidden = "processes of other users are hidden from the scheduler";
    scheduler.wait_for_log(hidden);

    let limit = Scheduler::ctl(&world, &["set-limit", "job:7", "--memory", "8g"]);
    assert!(!limit.status.success() && String::from_utf8_lossy(&limit.stderr).contains(hidden), "{limit:?}");
    assert!(!world.dir().join("nvshare-state.toml").exists(), "nothing is kept of it");
    let taken_back = Scheduler::ctl(&world, &["set-limit", "job:7", "--memory", "none", "--compute", "none"]);
    assert!(taken_back.status.success(), "{taken_back:?}");

    let args = "--memory 192MiB --block 64MiB --kernel-us 100";
    let program = Program::workload(&world, "program", args).until_told().start();
    Scheduler::until(&world, "the hidden process's memory counts", |status| {
        status.gpus.iter().any(|gpu| gpu.capacity == (1024 - 64 - 256) * MIB)
    });
    world.stop();
    program.finish().intact();
}
