//! The demonstration ends cleanly, however it is ended.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nvshare_harness::{Artifacts, wait_until};

/// A demonstration that takes minutes, in a temporary folder of its own.
fn start(folder: &Path) -> Child {
    std::fs::create_dir_all(folder).expect("a folder");
    Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["demo", "--simulate", "--seconds", "300", "--memory", "1g", "--gpu-memory", "1g"])
        .env("TMPDIR", folder)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("it runs")
}

/// Processes that have the folder as their place for temporary files: the task and all that it has started.
fn processes(folder: &Path) -> usize {
    let place = format!("TMPDIR={}/", folder.display());
    let processes = std::fs::read_dir("/proc").expect("processes").filter_map(Result::ok);
    let environments = processes.filter_map(|process| std::fs::read(process.path().join("environ")).ok());
    environments
        .filter(|text| text.split(|&byte| byte == 0).any(|line| line.starts_with(place.as_bytes())))
        .count()
}

fn folder(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("nvshare-demo-test-{}-{name}", std::process::id()))
}

#[test]
fn nothing_is_left_of_a_demonstration_that_was_interrupted() {
    // The parts that it would build are built, so that it does not wait for this program's cargo.
    Artifacts::get();
    for (signal, code) in [(libc::SIGINT, 130), (libc::SIGTERM, 143)] {
        let folder = folder(&signal.to_string());
        let mut demo = start(&folder);
        // The task, the scheduler and two programs.
        wait_until("programs run", || processes(&folder) >= 4);
        // SAFETY: a child of ours that was not waited for.
        assert_eq!(unsafe { libc::kill(demo.id().cast_signed(), signal) }, 0);
        let status = demo.wait().expect("it ends");
        assert_eq!((status.code(), status.signal()), (Some(code), None));
        wait_until("all of it has ended", || processes(&folder) == 0);
        let left = std::fs::read_dir(&folder).expect("the folder").count();
        assert_eq!(left, 0, "{}", folder.display());
        std::fs::remove_dir(&folder).expect("an empty folder");
    }
}
