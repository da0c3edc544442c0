//! `nvshare-ctl top` in a terminal: driven by keys and read as a person reads it, through tmux.

use std::process::{Command, Output};

use nvshare_e2e::golden;
use nvshare_harness::{Artifacts, Program, Running, Scheduler, World, wait_until};
use nvshare_proto::ShareStatus;

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];
const JOB: &str = "--memory 768MiB --block 64MiB --kernel-us 1000";

/// A terminal with a program in it.
struct Terminal {
    server: String,
}

impl Terminal {
    /// A terminal of this size in which `top` runs, with these variables.
    fn start(world: &World, size: (u32, u32), variables: &[&str]) -> Self {
        let server = format!("nvshare-{}", world.dir().file_name().unwrap_or_default().to_string_lossy());
        let terminal = Self { server };
        let program = format!(
            "env NVSHARE_ADMIN_SOCKET={} {} {} top --interval 0.2; echo ended with $?; sleep 1000",
            world.admin_socket().display(),
            variables.join(" "),
            Artifacts::get().ctl.display()
        );
        let (width, height) = (size.0.to_string(), size.1.to_string());
        let started =
            terminal.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", &width, "-y", &height, &program]);
        assert!(started.status.success(), "{started:?}");
        terminal
    }

    fn tmux(&self, arguments: &[&str]) -> Output {
        Command::new("tmux").args(["-L", &self.server]).args(arguments).output().expect("tmux is installed")
    }

    fn screen(&self) -> String {
        let text = String::from_utf8_lossy(&self.tmux(&["capture-pane", "-p"]).stdout).into_owned();
        text.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
    }

    fn keys(&self, keys: &[&str]) {
        assert!(self.tmux(&[&["send-keys"], keys].concat()).status.success());
    }

    fn resize(&self, width: u32, height: u32) {
        let (width, height) = (width.to_string(), height.to_string());
        assert!(self.tmux(&["resize-window", "-x", &width, "-y", &height]).status.success());
    }

    fn until(&self, what: &str, is_so: impl Fn(&str) -> bool) -> String {
        let mut last = String::new();
        wait_until(what, || {
            last = self.screen();
            is_so(&last)
        });
        last
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.tmux(&["kill-server"]);
    }
}

#[test]
#[ignore = "needs tmux; .ci/run installs tmux and runs this test"]
fn top_shows_who_holds_and_obeys_keys() {
    let world = World::simulated(CARD);
    let scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "300"]);
    let first = Program::workload(&world, "a", JOB).until_told().waits_for_go().start();
    wait_until("the first is set up", || first.is_ready());
    let second = Program::workload(&world, "b", JOB).until_told().waits_for_go().start();
    Running::go(&[&first, &second]);
    Scheduler::until(&world, "one waits", |status| status.gpus[0].waiters.len() == 1);
    let terminal = Terminal::start(&world, (80, 24), &["NO_COLOR=1"]);
    let screen =
        terminal.until("it is drawn", |screen| screen.contains("running") && screen.contains("waiting  "));
    for part in [
        "nvshare-scheduler 0.1.0",
        "scheduling on  TQ 300 s",
        "/1.0 GiB, 1.5 allocated",
        "held by ",
        "   ID STATE     PROGRAM",
        "nvshare-workload a",
        "nvshare-workload b",
        "768.0 MiB",
        "q quit  ? keys  ↓ client  s sort by client  t set TQ  o scheduling off",
    ] {
        assert!(screen.contains(part), "{part}:\n{screen}");
    }
    assert!(screen.lines().all(|line| line.chars().count() <= 80), "{screen}");
    // The lines that do not depend on the moment; `top/view.rs` compares whole screens of known figures.
    let frame: String = screen
        .lines()
        .filter(|line| line.starts_with("   ID") || line.starts_with("q quit"))
        .map(|line| line.to_owned() + "\n")
        .collect();
    golden("top.txt", &frame);
    terminal.keys(&["s"]);
    terminal.until("it is sorted", |screen| screen.contains("s sort by user"));
    terminal.keys(&["t", "2", "Enter"]);
    terminal.until("the quantum is set", |screen| screen.contains("TQ 2 s"));
    assert_eq!(Scheduler::status(&world).scheduler.quantum_ms, 2000);
    changes_of_a_client(&world, &terminal);
    terminal.keys(&["o"]);
    terminal.until("a refusal is shown", |screen| screen.contains(": clients have 1.50 GiB"));
    terminal.resize(20, 5);
    let small = terminal.until("it is small", |screen| screen.contains("too small"));
    assert!(small.contains("20×5 is too small:\ntop needs 48×8\n"), "{small}");
    terminal.resize(100, 30);
    terminal.until("it is drawn again", |screen| screen.contains("nvshare-workload a --memory"));
    scheduler.kill();
    let lost =
        terminal.until("the loss is shown", |screen| screen.contains("no scheduler: it is looked for"));
    assert!(lost.contains("nvshare-workload a"), "what was seen last is still there: {lost}");
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "1GiB", "--tq", "5"]);
    // A setting made at run time survives.
    terminal.until("it is joined again", |screen| screen.contains("scheduling on  TQ 2 s"));
    terminal.keys(&["q"]);
    terminal.until("it has ended and left the terminal as it was", |screen| {
        screen.contains("ended with 0") && !screen.contains("nvshare-workload")
    });
    world.stop_intact([first, second]);
}

/// Each row: the typed keys, the answer of the scheduler, and whether the client then has that setting.
type Change = (&'static [&'static str], &'static str, fn(ShareStatus) -> bool);

const CHANGES: [Change; 6] = [
    (&["w", "4", "0", "0", "Enter"], "weight 400", |share| share.weight == 400),
    (&["l", "2", "5", "%", "Enter"], "compute limit 25 %", |share| share.compute[0].percent == 25),
    (&["p"], "paused", |share| share.paused),
    (&["p"], "resumed", |share| !share.paused),
    (&["l", "n", "o", "n", "e", "Enter"], "no compute limit", |share| share.compute.is_empty()),
    (&["w", "1", "0", "0", "Enter"], "weight 100", |share| share.weight == 100),
];

/// Keys that change what the selected client has.
fn changes_of_a_client(world: &World, terminal: &Terminal) {
    let share = |of: u64| {
        let clients = Scheduler::status(world).clients;
        clients.into_iter().find(|client| client.client == of).map(|client| client.share)
    };
    terminal.keys(&["w"]);
    terminal.until("nobody is selected", |screen| screen.contains("select a client first"));
    terminal.keys(&["?"]);
    terminal.until("the keys are shown", |screen| screen.contains("  p                pause it"));
    terminal.keys(&["?", "s", "s", "s", "s", "s", "Up", "Down"]);
    terminal.until("the second is selected", |screen| {
        screen.contains("\n>   2 ") && screen.contains("client 2:  w weight 100  l limit none")
    });
    for (keys, said, is_so) in CHANGES {
        terminal.keys(keys);
        terminal.until(said, |screen| screen.contains(&format!("): {said}")));
        assert!(share(2).is_some_and(is_so), "{said}");
    }
    terminal.keys(&["Escape"]);
    terminal.until("nobody is selected", |screen| screen.contains("q quit  ? keys"));
}

#[test]
fn without_a_terminal_top_says_what_to_use() {
    let world = World::simulated(CARD);
    let _scheduler = Scheduler::start(&world, &[]);
    let output = Scheduler::ctl(&world, &["top"]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(
        (output.status.code(), error.as_str()),
        (Some(1), "nvshare-ctl: top needs a terminal; `status` and `watch` do not\n")
    );
}
