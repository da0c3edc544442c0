//! `nvshare-ctl run`, `install` and `doctor`: the commands of a user's first hour.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use nvshare_harness::{
    Artifacts, Killed, Program, Running, Scheduler, Status, World, executable, wait_until,
};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];

fn text(output: &Output) -> (Option<i32>, String, String) {
    let read = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), read(&output.stdout), read(&output.stderr))
}

/// `nvshare-ctl run --library …`, with more arguments.
fn run(library: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(&Artifacts::get().ctl);
    command.args(["run", "--library"]).arg(library).args(arguments).env_remove("LD_PRELOAD");
    text(&command.output().expect("it runs"))
}

#[test]
fn run_becomes_the_program() {
    let library = &Artifacts::get().library;
    let (code, out, _) = run(library, &["--", "sh", "-c", "echo $LD_PRELOAD $NVSHARE_MEM_LIMIT; exit 42"]);
    assert_eq!((code, out.trim()), (Some(42), &*library.to_string_lossy()));
    // Options of `run` come before the program, and arguments after it are the program's.
    let (_, out, _) = run(library, &["--limit", "4g", "sh", "-c", "echo $NVSHARE_MEM_LIMIT $0", "--limit"]);
    assert_eq!(out, "4294967296 --limit\n");
    let (_, out, _) = run(library, &["--socket", "/a/b", "--", "sh", "-c", "echo $NVSHARE_SOCKET"]);
    assert_eq!(out, "/a/b\n");
}

/// The limits in the environment of a program that `run` starts with these options, where `run` itself has inherited others.
fn limits_of_a_program(options: &[&str]) -> Vec<String> {
    let output = Command::new(&Artifacts::get().ctl)
        .args(["run", "--library"])
        .arg(&Artifacts::get().library)
        .args(options)
        .args(["--", "env"])
        .env_remove("LD_PRELOAD")
        .envs(INHERITED)
        .output()
        .expect("it runs");
    let (code, out, error) = text(&output);
    assert_eq!(code, Some(0), "{error}");
    let mut limits: Vec<_> = out.lines().filter(|line| line.contains("_LIMIT")).map(str::to_owned).collect();
    limits.sort();
    limits
}

/// All forms of both limits, each larger than those that the test asks for.
const INHERITED: [(&str, &str); 9] = [
    ("CUDA_DEVICE_MEMORY_LIMIT", "16g"),
    ("CUDA_DEVICE_MEMORY_LIMIT_0", "16g"),
    ("CUDA_DEVICE_SM_LIMIT", "90"),
    ("CUDA_DEVICE_SM_LIMIT_0", "90"),
    ("NVSHARE_COMPUTE_LIMIT", "90"),
    ("NVSHARE_COMPUTE_LIMIT_1", "90"),
    ("NVSHARE_MEM_LIMIT", "16g"),
    ("NVSHARE_MEM_LIMIT_0", "16g"),
    ("NVSHARE_MEM_LIMIT_MB", "16384"),
];

#[test]
fn a_limit_of_run_replaces_every_inherited_one() {
    let all = INHERITED.map(|(name, value)| format!("{name}={value}"));
    let those = |name: &str| all.iter().filter(|limit| limit.contains(name)).cloned().collect::<Vec<_>>();
    let (memory, compute) = (those("_MEM"), [those("_SM_"), those("_COMPUTE_")].concat());
    let sorted = |mut limits: Vec<String>, given: &str| {
        limits.push(given.to_owned());
        limits.sort();
        limits
    };
    assert_eq!(limits_of_a_program(&[]), all);
    let limited = limits_of_a_program(&["--limit", "8g"]);
    assert_eq!(limited, sorted(compute, "NVSHARE_MEM_LIMIT=8589934592"));
    let limited = limits_of_a_program(&["--compute-limit", "30"]);
    assert_eq!(limited, sorted(memory, "NVSHARE_COMPUTE_LIMIT=30"));
}

#[test]
fn a_program_that_cannot_be_run_has_the_usual_exit_codes() {
    let world = World::simulated(CARD);
    let library = &Artifacts::get().library;
    let plain = world.dir().join("plain");
    std::fs::write(&plain, "no program").expect("a file");
    let (text, script) = (world.dir().join("script.txt"), world.dir().join("script"));
    std::fs::write(&text, "#!/no/such/interpreter\n").expect("a file");
    executable(&text, &script);
    for (program, code, why) in [
        (&*script.to_string_lossy(), 126, "its interpreter /no/such/interpreter is not there"),
        ("/no/such/program", 127, "No such file"),
        ("no-such-program-anywhere", 127, "No such file"),
        (&*plain.to_string_lossy(), 126, "is not executable"),
        ("/", 126, "Permission denied"),
    ] {
        let (got, out, error) = run(library, &["--", program]);
        assert!(got == Some(code) && out.is_empty(), "{program}: {got:?} {error}");
        assert!(error.starts_with(&format!("nvshare-ctl: {program}: ")) && error.contains(why), "{error}");
    }
    for (library, why) in [
        ("/no/such/library.so", "/no/such/library.so: no such library"),
        ("/etc/passwd", "/etc/passwd is not a 64-bit library"),
        (&*Artifacts::get().simulator.to_string_lossy(), "is not nvshare's library"),
        ("/dev/null", "/dev/null: no such library"),
    ] {
        let (got, _, error) = run(Path::new(library), &["--", "true"]);
        assert!(got == Some(125) && error.contains(why), "{library}: {got:?} {error}");
    }
}

#[test]
fn a_library_that_cannot_be_preloaded_by_its_name_is_refused() {
    let world = World::simulated(CARD);
    for folder in ["a b", "a:b", "a$b"] {
        let folder = world.dir().join(folder);
        std::fs::create_dir(&folder).expect("a folder");
        let library = folder.join("libnvshare.so");
        symlink(&Artifacts::get().library, &library).expect("a link");
        let (code, out, error) = run(&library, &["--", "echo", "it ran"]);
        assert!(code == Some(125) && out.is_empty(), "{out}{error}");
        assert!(error.contains("LD_PRELOAD cannot name a path with "), "{error}");
    }
}

#[test]
fn programs_that_cannot_be_preloaded_are_named() {
    let world = World::simulated(CARD);
    let library = &Artifacts::get().library;
    let source = world.dir().join("fixed.c");
    let fixed = world.dir().join("fixed");
    std::fs::write(&source, "int main(void) { return 7; }").expect("a file");
    let built =
        Command::new("cc").args(["-static", "-o"]).arg(&fixed).arg(&source).status().expect("a C compiler");
    assert!(built.success());
    let named = fixed.to_string_lossy().into_owned();
    let (code, _, error) = run(library, &["--", &named]);
    assert!(
        code == Some(7) && error.contains("fixed is statically linked: nothing can be preloaded"),
        "{error}"
    );
    // A static program is noticed behind a script's first line as well.
    let (text, script) = (world.dir().join("script.txt"), world.dir().join("script"));
    std::fs::write(&text, format!("#!{named}\n")).expect("a file");
    executable(&text, &script);
    let (code, _, error) = run(library, &["--", &script.to_string_lossy()]);
    assert!(code == Some(7) && error.contains("statically linked"), "{error}");
    let (code, _, error) = run(library, &["--", "true"]);
    assert!(code == Some(0) && error.is_empty(), "{error}");
}

#[test]
#[ignore = "needs root, to be somebody else; .ci/run runs this test where it is root"]
fn programs_that_get_rights_of_their_own_are_named() {
    let world = World::simulated(CARD);
    std::fs::set_permissions(world.dir(), Permissions::from_mode(0o755)).expect("a folder");
    let user = |file: &Path| {
        let mut ctl = Command::new("setpriv");
        ctl.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]).arg(&Artifacts::get().ctl);
        ctl.args(["run", "--library"]).arg(&Artifacts::get().library).arg("--").arg(file);
        text(&ctl.output().expect("setpriv runs"))
    };
    let program = |name: &str, mode: u32| {
        let file = world.dir().join(name);
        executable(Path::new("/bin/true"), &file);
        std::fs::set_permissions(&file, Permissions::from_mode(mode)).expect("a file");
        file
    };
    let capable = program("capable", 0o755);
    let set = Command::new("setcap").arg("cap_net_raw+ep").arg(&capable).status().expect("setcap runs");
    assert!(set.success());
    for (file, why) in [
        (program("setuid", 0o4755), "runs as another user or group"),
        (program("setgid", 0o2755), "runs as another user or group"),
        (capable, "has capabilities of its own"),
    ] {
        let (code, _, error) = user(&file);
        assert!(
            code == Some(0) && error.contains(why) && error.contains("it runs unshared"),
            "{code:?} {error}"
        );
    }
    let (code, _, error) = user(&program("plain", 0o755));
    assert!(code == Some(0) && error.is_empty(), "{code:?} {error}");
}

/// A folder with the files of a release.
fn distribution(folder: &Path) -> PathBuf {
    let artifacts = Artifacts::get();
    for (from, to) in [
        (&artifacts.ctl, "bin/nvshare-ctl"),
        (&artifacts.scheduler, "bin/nvshare-scheduler"),
        (&artifacts.library, "lib/nvshare/libnvshare.so"),
    ] {
        let to = folder.join(to);
        std::fs::create_dir_all(to.parent().expect("a folder")).expect("a folder");
        executable(from, &to);
    }
    folder.join("bin/nvshare-ctl")
}

fn call(program: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    text(&Command::new(program).args(arguments).env_remove("NVSHARE_LIBRARY").output().expect("it runs"))
}

#[test]
fn an_install_replaces_running_files_and_disturbs_nobody() {
    let world = World::simulated(CARD);
    let ctl = distribution(&world.dir().join("release"));
    let prefix = world.dir().join("usr local");
    let at = |prefix: &Path| prefix.to_string_lossy().into_owned();
    let (code, _, error) = call(&ctl, &["install", "--prefix", &at(&prefix)]);
    assert!(code == Some(1) && error.contains("LD_PRELOAD cannot name"), "{error}");
    assert!(!prefix.exists(), "nothing is left behind");

    let prefix = world.dir().join("local");
    let (code, out, error) = call(&ctl, &["install", "--prefix", &at(&prefix)]);
    assert!(code == Some(0) && out.matches("installed ").count() == 3, "{out}{error}");
    let library = prefix.join("lib/nvshare/libnvshare.so");
    // A scheduler and a program that run by the installed files.
    let scheduler = Command::new(prefix.join("bin/nvshare-scheduler"))
        .env("NVSHARE_SOCKET", world.socket())
        .env("NVSHARE_ADMIN_SOCKET", world.admin_socket())
        .env("NVSHARE_CONFIG", "/dev/null")
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("it runs");
    let mut scheduler = Killed::from(scheduler);
    nvshare_harness::wait_until("it serves", || world.admin_socket().exists());
    let job = Program::workload(&world, "job", "--memory 128MiB --block 64MiB --full-check")
        .env("LD_PRELOAD", &library.to_string_lossy())
        .until_told()
        .waits_for_go()
        .start();
    Running::go(&[&job]);
    let before = std::fs::metadata(&library).expect("the library").ino();
    let (code, _, error) = call(&ctl, &["install", "--prefix", &at(&prefix)]);
    assert_eq!(code, Some(0), "an upgrade over what runs: {error}");
    assert_ne!(std::fs::metadata(&library).expect("the library").ino(), before, "it is a new file");
    assert!(scheduler.try_wait().expect("a child").is_none(), "the scheduler goes on");
    // The installed command line does not install over itself, and finds its library.
    let installed = prefix.join("bin/nvshare-ctl");
    let (code, _, error) = call(&installed, &["install", "--prefix", &at(&prefix)]);
    assert!(code == Some(1) && error.contains("run `install` of the new distribution"), "{error}");
    let (code, out, _) = call(&installed, &["run", "--", "sh", "-c", "echo $LD_PRELOAD"]);
    assert_eq!((code, out.trim()), (Some(0), &*library.to_string_lossy()));

    let (code, out, error) = call(&installed, &["uninstall", "--prefix", &at(&prefix)]);
    assert!(code == Some(0) && out.matches("removed ").count() == 3, "{out}{error}");
    assert!(!prefix.join("lib/nvshare").exists());
    let left = std::fs::read_dir(prefix.join("bin")).expect("a folder").count();
    assert_eq!(left, 0, "nothing is left behind");
    let (code, _, error) = call(&ctl, &["uninstall", "--prefix", &at(&prefix)]);
    assert!(code == Some(1) && error.contains("nothing is installed under"), "{error}");
    world.stop();
    job.finish().intact();
}

#[test]
fn a_place_that_cannot_be_written_keeps_its_files() {
    let world = World::simulated(CARD);
    let ctl = distribution(&world.dir().join("release"));
    let (code, _, error) = call(&ctl, &["install", "--prefix", "/proc/nvshare"]);
    assert!(code == Some(1) && error.contains("/proc/nvshare/lib/nvshare/libnvshare.so: "), "{error}");
    // One of three cannot be replaced: the others are as they were.
    let prefix = world.dir().join("local");
    std::fs::create_dir_all(prefix.join("bin/nvshare-ctl/in the way")).expect("a folder");
    let (code, _, error) = call(&ctl, &["install", "--prefix", &prefix.to_string_lossy()]);
    assert!(code == Some(1) && error.contains("bin/nvshare-ctl: it is a folder"), "{error}");
    assert!(!prefix.join("bin/nvshare-scheduler").exists());
    assert!(!prefix.join("lib/nvshare/libnvshare.so").exists());
}

#[test]
fn the_library_alone_goes_into_a_folder() {
    let world = World::simulated(CARD);
    let ctl = distribution(&world.dir().join("release"));
    let folder = world.dir().join("shared/volume");
    let (code, out, error) = call(&ctl, &["install-library", &folder.to_string_lossy()]);
    assert_eq!(
        (code, out),
        (Some(0), format!("installed {}\n", folder.join("libnvshare.so").display())),
        "{error}"
    );
    assert_eq!(std::fs::read_dir(&folder).expect("a folder").count(), 1);
    let same =
        std::fs::read(folder.join("libnvshare.so")).ok() == std::fs::read(&Artifacts::get().library).ok();
    assert!(same, "it is the library");
}

/// `doctor`, with the loader's driver unless a driver is named.
fn doctor(
    world: &World,
    driver: Option<&Path>,
    variables: &[(&str, &str)],
) -> (Option<i32>, serde_json::Value, String) {
    let artifacts = Artifacts::get();
    let mut command = Command::new(&artifacts.ctl);
    command.args(["doctor", "--json", "--library"]).arg(&artifacts.library);
    if let Some(driver) = driver {
        command.arg("--driver").arg(driver);
    }
    command
        .env("NVSHARE_ADMIN_SOCKET", world.admin_socket())
        .env("NVSHARE_SOCKET", world.socket())
        .env("NVSIM_DIR", world.dir())
        .env("LD_LIBRARY_PATH", world.dir().join("lib"))
        .envs(variables.iter().copied());
    let (code, out, error) = text(&command.output().expect("it runs"));
    (code, serde_json::from_str(&out).unwrap_or_else(|_| panic!("JSON: {out}{error}")), error)
}

/// The finding about a subject, at a level.
fn found(findings: &serde_json::Value, level: &str, subject: &str) -> String {
    let findings = findings["findings"].as_array().expect("a list").iter();
    let texts = findings.filter(|finding| finding["level"] == level && finding["subject"] == subject);
    texts.map(|finding| format!("{} -> {}\n", finding["text"], finding["advice"])).collect()
}

#[test]
fn doctor_finds_nothing_wrong_where_nothing_is() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &[]);
    let (code, findings, error) = doctor(&world, None, &[]);
    assert_eq!(code, Some(0), "{findings} {error}");
    assert_eq!(findings["unknown"].as_array().map(Vec::len), Some(0), "{findings}");
    for subject in ["driver", "library", "gpus", "preload", "scheduler"] {
        assert_ne!(found(&findings, "ok", subject), "", "{subject}: {findings}");
    }
    assert!(found(&findings, "ok", "gpus").contains("GPU 0: "), "{findings}");
    let page = include_str!("../../../docs/status.md");
    let (_, page) = page.split_once("doctor --json").expect("a part about it");
    let fields = findings.as_object().expect("an object").keys();
    let fields = fields.chain(findings["findings"][0].as_object().expect("an object").keys());
    let unknown: Vec<_> = fields.filter(|field| !page.contains(&format!("`{field}`"))).collect();
    assert!(unknown.is_empty(), "docs/status.md does not say what these are: {unknown:?}");
}

#[test]
fn doctor_says_what_is_wrong_and_what_to_do() {
    let world = World::simulated(CARD);
    let (code, findings, error) = doctor(&world, None, &[]);
    assert!(code == Some(1) && error == "nvshare-ctl: 1 error\n", "{error}");
    let scheduler = found(&findings, "error", "scheduler");
    assert!(
        scheduler.contains("no scheduler answers at") && scheduler.contains("start one: "),
        "{scheduler}"
    );

    let _scheduler = Scheduler::start(&world, &[]);
    let (code, findings, _) =
        doctor(&world, None, &[("NVSHARE_MEMLIMIT", "4g"), ("CUDA_OVERSUBSCRIBE", "true")]);
    let environment = found(&findings, "warning", "environment");
    assert_eq!(code, Some(0), "a warning is no error");
    assert!(environment.contains("did you mean NVSHARE_MEM_LIMIT?"), "{environment}");
    assert!(environment.contains("CUDA_OVERSUBSCRIBE is HAMi's and has no effect"), "{environment}");
    // A limit that cannot be read: no program starts.
    let (code, findings, _) = doctor(&world, None, &[("NVSHARE_MEM_LIMIT", "lots")]);
    assert!(
        code == Some(1) && found(&findings, "error", "preload").contains("NVSHARE_MEM_LIMIT"),
        "{findings}"
    );
    let (code, findings, _) = doctor(&world, None, &[("CUDA_VISIBLE_DEVICES", "")]);
    assert!(
        code == Some(1) && found(&findings, "error", "gpus").contains("CUDA_VISIBLE_DEVICES is"),
        "{findings}"
    );
    let (code, findings, _) = doctor(&world, None, &[("LD_PRELOAD", "/x/libvgpu.so")]);
    assert!(code == Some(1) && found(&findings, "error", "environment").contains("HAMi"), "{findings}");
    let (code, findings, _) = doctor(&world, None, &[("NVSHARE_LIBRARY", "/etc/passwd")]);
    assert_eq!(code, Some(0), "an option overrules a variable: {findings}");
    let output = Scheduler::ctl(&world, &["doctor", "--library", "/etc/passwd"]);
    let (code, out, _) = text(&output);
    assert!(
        code == Some(1) && out.contains("ERROR    library      /etc/passwd is not a 64-bit library"),
        "{out}"
    );
}

#[test]
fn doctor_names_a_program_that_could_not_share_its_memory() {
    let world = World::with_memory("managed", CARD);
    let _scheduler = Scheduler::start(&world, &[]);
    let refused = || found(&doctor(&world, None, &[]).1, "warning", "sharing");
    let guest = Program::guest(&world, "ipc", &["refused"]).until_told().start();
    // It makes the simulated card, with its size: doctor asks that card, too.
    Scheduler::until(&world, "it is there", |status| status.find(guest.pid()).is_some());
    wait_until("doctor names it", || !refused().is_empty());
    let named = format!(" (pid {})\" -> \"start them with NVSHARE_MEMORY=swap\"", guest.pid());
    assert!(refused().contains(&named), "{}", refused());
    world.stop();
    guest.finish().passed();
    // A pool's memory has no handle, natively too.
    let world = World::with_memory("managed", CARD);
    let _scheduler = Scheduler::start(&world, &[]);
    let guest = Program::guest(&world, "ipc", &["of a pool"]).until_told().start();
    let allocated = |status: &Status| Some(status.find(guest.pid())?.usage.first()?.allocated);
    Scheduler::until(&world, "it has all", |status| allocated(status) >= Some(268 << 20));
    assert_eq!(found(&doctor(&world, None, &[]).1, "warning", "sharing"), "");
    world.stop();
    guest.finish().passed();
}

#[test]
fn doctor_names_functions_that_only_a_newer_driver_has() {
    let world = World::simulated(&[]);
    let _scheduler = Scheduler::start(&world, &[]);
    let (code, known, _) = doctor(&world, Some(&Artifacts::get().simulator), &[]);
    assert_eq!((code, known["unknown"].as_array().map(Vec::len)), (Some(0), Some(0)), "{known}");
    // The simulator with one more function.
    let newer = world.dir().join("newer.so");
    let source = world.dir().join("newer.c");
    std::fs::write(&source, "int cuInit(int f) { return f; } int cuLaunchTomorrow(void) { return 0; }")
        .expect("a file");
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&newer).arg(&source).status().expect("cc");
    assert!(built.success());
    let (code, unknown, _) = doctor(&world, Some(&newer), &[]);
    assert_eq!((code, &unknown["unknown"][0]), (Some(1), &"cuLaunchTomorrow".into()), "{unknown}");
    for nothing in [&source, Path::new("/no/such/driver"), Path::new("/"), &Artifacts::get().ctl] {
        let (code, findings, _) = doctor(&world, Some(nothing), &[]);
        assert!(code == Some(1) && !found(&findings, "error", "driver").is_empty(), "{findings}");
    }
}

/// A shared library of this source, in a world.
fn shared(world: &World, name: &str, source: &str) -> PathBuf {
    let (file, library) = (world.dir().join(format!("{name}.c")), world.dir().join(name));
    std::fs::write(&file, source).expect("a file");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(&file).status();
    assert!(built.expect("a C compiler").success());
    library
}

/// A driver may be where the loader's configuration, its cache, or its own way to read a list of folders says so, and nowhere else.
#[test]
fn doctor_finds_the_driver_where_the_loader_does() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &[]);
    let folder = world.dir().join("lib");
    let folders = format!("/nowhere;{}", folder.display());
    let (code, findings, error) = doctor(&world, None, &[("LD_LIBRARY_PATH", &folders)]);
    assert_eq!(code, Some(0), "{findings} {error}");
    assert_eq!(findings["driver"], folder.join("libcuda.so.1").to_str().expect("a text"));
}

#[test]
fn doctor_knows_machines_of_other_kinds() {
    // GPUs whose managed memory does not move, as on WSL.
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &[]);
    let (code, findings, _) = doctor(&world, None, &[("NVSIM_NO_CONCURRENT_ACCESS", "1")]);
    let gpus = found(&findings, "warning", "gpus");
    assert!(code == Some(0) && gpus.contains("concurrentManagedAccess is 0"), "{findings}");
    assert!(gpus.contains("all of it has to fit"), "{gpus}");

    // MPS: the kernel keeps the first fifteen letters of its name.
    let daemon = world.dir().join("nvidia-cuda-mps-control");
    executable(Path::new("/bin/sleep"), &daemon);
    let running = Killed::from(Command::new(&daemon).arg("1000").spawn().expect("it runs"));
    let (code, findings, _) = doctor(&world, None, &[]);
    drop(running);
    assert!(code == Some(0) && found(&findings, "warning", "mps").contains("MPS is running"), "{findings}");

    // A MIG instance, and NVML.
    let driver = "#include <string.h>
        int cuInit(unsigned f) { return 0; }
        int cuDeviceGetCount(int *n) { *n = 1; return 0; }
        int cuDeviceGet(int *d, int i) { *d = i; return 0; }
        int cuDeviceGetName(char *t, int n, int d) { strncpy(t, \"NVIDIA H100 MIG 1g.10gb\", n); return 0; }
        int cuDeviceTotalMem_v2(unsigned long *b, int d) { *b = 10ul << 30; return 0; }
        int cuDeviceGetAttribute(int *v, int a, int d) { *v = 1; return 0; }";
    let other = World::with_driver(&shared(&world, "mig.so", driver));
    shared(&other, "lib/libnvidia-ml.so.1", "int nvmlInit_v2(void) { return 0; }");
    let (_, findings, _) = doctor(&other, None, &[]);
    assert!(found(&findings, "ok", "mig").contains("counts as a GPU of its own"), "{findings}");
    assert!(found(&findings, "ok", "nvml").contains("loads"), "{findings}");
}
