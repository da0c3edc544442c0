//! The files of `docs/recipes`, as far as they run without a card and a cluster. `tests/manifests/recipes.py` looks at those that are data.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nvshare_harness::{Artifacts, Program, Running, Scheduler, World, executable, wait_until};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];
const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

fn recipe(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/recipes").join(file)
}

/// Puts a script into the world's folder of programs.
fn program(world: &World, name: &str, text: &str) {
    let programs = world.dir().join("programs");
    fs::create_dir_all(&programs).expect("a folder");
    let source = programs.join(format!("{name}.txt"));
    fs::write(&source, text).expect("a file");
    executable(&source, &programs.join(name));
}

fn path(world: &World) -> String {
    format!("{}:{}", world.dir().join("programs").display(), std::env::var("PATH").unwrap_or_default())
}

/// A program in vLLM's place: it measures, refuses to start where less is free than it wants, takes its part, waits until the others
/// have theirs, and works on.
const VLLM: &str = r#"#!/usr/bin/env python3
import ctypes, os, sys, time
model, options = sys.argv[2], dict(zip(sys.argv[3::2], sys.argv[4::2]))
cuda = ctypes.CDLL("libcuda.so.1")
def ok(result):
    if result: sys.exit(f"CUDA error {result}")
context, memory, free, total = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_size_t()
ok(cuda.cuInit(0))
ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
ok(cuda.cuCtxSetCurrent(context))
ok(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
wanted = int(total.value * float(options["--gpu-memory-utilization"]))
if free.value < wanted: sys.exit(f"Free memory on device ({free.value}/{total.value}) is less than desired")
ok(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(wanted)))
ok(cuda.cuMemsetD8_v2(memory, 1, ctypes.c_size_t(wanted)))
ok(cuda.cuCtxSynchronize())
open(f"serves.{options['--port']}", "w").write(f"{model} {total.value}")
while not (os.path.exists("serves.8001") and os.path.exists("serves.8002")): time.sleep(0.01)
ok(cuda.cuMemsetD8_v2(memory, 2, ctypes.c_size_t(wanted)))
ok(cuda.cuCtxSynchronize())
open(f"done.{options['--port']}", "w").close()
"#;

/// Runs the recipe with this limit on a card of 1 GiB. Returns what each server saw as the size of its GPU.
fn serve_two(limit: &str) -> [u64; 2] {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "0.1"]);
    program(&world, "vllm", VLLM);
    program(&world, "nvshare-ctl", &format!("#!/bin/sh\nexec {} \"$@\"\n", Artifacts::get().ctl.display()));
    let output = Command::new("timeout")
        .args(["--kill-after=5", &nvshare_harness::patience().as_secs().to_string()])
        .arg(recipe("vllm/serve-two"))
        .args(["first", "second"])
        .current_dir(world.dir())
        .envs(world.environment())
        .env("PATH", path(&world))
        .env("NVSHARE_LIBRARY", &Artifacts::get().library)
        .env("LIMIT", limit)
        .stdin(Stdio::null())
        .output()
        .expect("the recipe runs");
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{}: {log}", output.status);
    [("first", 8001), ("second", 8002)].map(|(model, port)| {
        let said = fs::read_to_string(world.dir().join(format!("serves.{port}")))
            .unwrap_or_else(|error| panic!("port {port}: {error}\n{log}"));
        let total = said.strip_prefix(model).unwrap_or_else(|| panic!("port {port} serves {said}"));
        assert!(world.dir().join(format!("done.{port}")).exists(), "{log}");
        total.trim().parse().expect("a size")
    })
}

#[test]
fn two_servers_start_side_by_side_within_their_limits() {
    assert_eq!(serve_two("448m"), [448 * MIB; 2]);
}

#[test]
fn two_servers_start_though_each_takes_the_whole_gpu() {
    assert_eq!(serve_two(""), [GIB; 2]);
}

/// The workstation's script with the library of this build, for users that `id` knows by these numbers.
fn workstation(world: &World) -> PathBuf {
    workstation_with(world, &Artifacts::get().library)
}

/// The same with another library.
fn workstation_with(world: &World, library: &Path) -> PathBuf {
    let names = "2001) echo anna ;; 2002) echo ben ;; 2003) echo chris ;; 2004) echo dora ;; *) echo ${NAME:-nobody} ;;";
    program(world, "id", &format!("#!/bin/sh\ncase $(/usr/bin/id -u) in {names} esac\n"));
    let text = fs::read_to_string(recipe("workstation/nvshare.sh")).expect("the recipe");
    let installed = "/usr/lib/nvshare/libnvshare.so";
    assert_eq!(text.matches(installed).count(), 1);
    let script = world.dir().join("nvshare.sh");
    fs::write(&script, text.replace(installed, &library.to_string_lossy())).expect("a file");
    script
}

/// A program that a login shell starts; `user` is a number, or empty for the test's own user.
fn login(world: &World, script: &Path, user: &str, name: &str) -> Running {
    let workload = Artifacts::get().workload.display();
    // The simulated card is a file of the one who comes first.
    let line = format!(
        "umask 0; . {} && exec {workload} {name} --memory 128MiB --block 64MiB --kernel-us 1000",
        script.display()
    );
    let mut command = match user {
        "" => Command::new("sh"),
        user => {
            let mut command = Command::new("setpriv");
            command.args(["--reuid", user, "--regid", user, "--clear-groups", "sh"]);
            command
        }
    };
    command.args(["-c", &line]);
    Program::of(world, name, command).env("PATH", &path(world)).until_told().start()
}

fn wait_for(world: &World, programs: &[&Running]) {
    Scheduler::until(world, "all have their memory", |status| {
        let has = |client: &nvshare_proto::ClientStatus| {
            client.usage.iter().any(|usage| usage.allocated >= 128 * MIB)
        };
        programs.iter().all(|program| status.find(program.pid()).is_some_and(has))
    });
}

#[test]
fn each_user_of_the_workstation_is_given_a_share() {
    let world = World::simulated(CARD);
    let script = workstation(&world);
    for (name, share) in [
        ("anna", "24g 100 1 none"),
        ("ben", "24g 100 1 none"),
        ("chris", "12g 50 1 none"),
        ("dora", "12g 50 1 low"),
        ("root", "none none none none"),
    ] {
        let variables =
            ["MEM_LIMIT", "WEIGHT", "RUN", "PRIORITY"].map(|name| format!("${{NVSHARE_{name}:-none}}"));
        let line = format!(". {}; echo {}", script.display(), variables.join(" "));
        let output =
            Command::new("sh").args(["-euc", &line]).env("PATH", path(&world)).env("NAME", name).output();
        let output = output.expect("a shell");
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), share, "{name}: {output:?}");
    }
}

#[test]
fn a_login_without_the_library_is_as_before() {
    let world = World::simulated(CARD);
    let script = workstation_with(&world, Path::new("/no/such/libnvshare.so"));
    let output = Command::new("sh")
        .args(["-euc", &format!(". {}; env", script.display())])
        .env("PATH", path(&world))
        .env("NAME", "anna")
        .env_remove("LD_PRELOAD")
        .output()
        .expect("a shell");
    let said = String::from_utf8_lossy(&output.stdout);
    let set: Vec<_> = said
        .lines()
        .filter(|line| {
            ["LD_PRELOAD=", "NVSHARE_MEM", "NVSHARE_RUN="].iter().any(|name| line.starts_with(name))
        })
        .collect();
    assert!(output.status.success() && said.contains("PATH="), "{output:?}");
    assert!(set.is_empty() && output.stderr.is_empty(), "{set:?} {output:?}");
}

#[test]
fn the_programs_of_a_user_are_one_tenant() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let script = workstation(&world);
    program(&world, "id", "#!/bin/sh\necho chris\n");
    let [one, two] = ["one", "two"].map(|name| login(&world, &script, "", name));
    wait_for(&world, &[&one, &two]);
    let status = Scheduler::status(&world);
    let client = status.client(one.pid());
    assert_eq!((client.share.processes, client.share.weight), (2, 50));
    assert_eq!(client.usage[0].limit, 12 * GIB);
    // An administrator's word to one of them is for both.
    let number = client.client.to_string();
    assert!(Scheduler::ctl(&world, &["set-limit", &number, "--memory", "512MiB"]).status.success());
    wait_until("both have the limit", || {
        let status = Scheduler::status(&world);
        [&one, &two].iter().all(|program| status.client(program.pid()).usage[0].limit == 512 * MIB)
    });
    world.stop_intact([one, two]);
}

#[test]
#[ignore = "needs root, to be somebody else; .ci/run runs this test where it is root"]
fn four_users_of_the_workstation_have_their_own_shares() {
    let world = World::simulated(CARD);
    fs::set_permissions(world.dir(), Permissions::from_mode(0o777)).expect("our directory");
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB"]);
    let script = workstation(&world);
    let users = ["2001", "2002", "2003", "2004"];
    let programs = users.map(|user| login(&world, &script, user, user));
    let second = login(&world, &script, "2001", "second");
    wait_for(&world, &programs.iter().chain([&second]).collect::<Vec<_>>());
    let status = Scheduler::status(&world);
    for ((program, user), (processes, limit, weight)) in
        programs.iter().zip(users).zip([(2, 24, 100), (1, 24, 100), (1, 12, 50), (1, 12, 50)])
    {
        let client = status.client(program.pid());
        assert_eq!(client.process.as_ref().map(|process| process.user.to_string()).as_deref(), Some(user));
        let has = (client.share.processes, client.usage[0].limit / GIB, client.share.weight);
        assert_eq!(has, (processes, limit, weight), "{user}");
    }
    world.stop();
    for program in programs.into_iter().chain([second]) {
        program.finish().intact();
    }
}
