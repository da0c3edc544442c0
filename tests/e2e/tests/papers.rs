//! The commands in the documents are run: a wrong document makes a test red.
//!
//! Each block of ```` ```sh ```` runs in a shell of its own, in a folder of its own, on the simulated GPU, and has to
//! succeed. A comment on the line before says if a block differs: `<!-- exit: 1 -->`, or `<!-- not run: REASON -->`. Blocks
//! that are not run are listed in `golden/papers_not_run.txt`.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::CommandFactory;
use nvshare_e2e::golden;
use nvshare_harness::{Artifacts, Scheduler, World, executable, patience};

/// Every document for users.
const PAPERS: [&str; 19] = [
    "README.md",
    "docs/reference.md",
    "docs/operations.md",
    "docs/tuning.md",
    "docs/shares.md",
    "docs/coming-from.md",
    "docs/kubernetes.md",
    "docs/slurm.md",
    "docs/recipes/jupyterhub.md",
    "docs/recipes/vllm.md",
    "docs/recipes/ci.md",
    "docs/recipes/workstation.md",
    "docs/troubleshooting.md",
    "docs/faq.md",
    "docs/status.md",
    "docs/events.md",
    "docs/metrics.md",
    "manifests/README.md",
    "CHANGELOG.md",
];

/// Commands that the administrators' socket alone takes.
const FOR_ADMINISTRATORS: [&str; 12] = [
    "set-tq",
    "set-limit",
    "set-weight",
    "set-priority",
    "pause",
    "resume",
    "sleep",
    "wake",
    "on",
    "off",
    "reset",
    "watch",
];

/// HAMi's variables, in the order of the alphabet.
const HAMI: [&str; 6] = [
    "CUDA_DEVICE_MEMORY_LIMIT",
    "CUDA_DEVICE_SM_LIMIT",
    "CUDA_OVERSUBSCRIBE",
    "CUDA_TASK_PRIORITY",
    "GPU_CORE_UTILIZATION_POLICY",
    "LIBCUDA_LOG_LEVEL",
];

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A block of commands.
struct Block {
    /// The document and the line.
    place: String,
    text: String,
    /// The exit code that the block has to have, or why it is not run.
    expected: Result<i32, String>,
}

fn blocks(paper: &str) -> Vec<Block> {
    let text = fs::read_to_string(workspace().join(paper)).unwrap_or_else(|error| panic!("{paper}: {error}"));
    let mut blocks = Vec::new();
    let mut above = "";
    let mut lines = (1..).zip(text.lines());
    while let Some((number, line)) = lines.next() {
        let fence = line.trim_start();
        if fence.starts_with("```") && fence.len() > 3 {
            let body: Vec<&str> =
                lines.by_ref().map(|(_, line)| line).take_while(|line| line.trim() != "```").collect();
            if fence == "```sh" {
                let note = |what: &str| above.strip_prefix(&format!("<!-- {what}: "))?.strip_suffix(" -->");
                let expected = match (note("not run"), note("exit")) {
                    (Some(reason), _) => Err(reason.to_owned()),
                    (None, code) => Ok(code.map_or(0, |code| code.parse().expect("an exit code"))),
                };
                blocks.push(Block { place: format!("{paper}:{number}"), text: body.join("\n"), expected });
            }
        } else if fence == "```" {
            // A picture, or the output of a program.
            let _ = lines.by_ref().take_while(|(_, line)| line.trim() != "```").count();
        }
        above = line;
    }
    blocks
}

/// The surroundings of a block: the programs, `sudo`, and a program that uses the GPU.
fn place(world: &World) -> PathBuf {
    let artifacts = Artifacts::get();
    let home = world.dir().join("home");
    let programs = home.join("bin");
    fs::create_dir_all(&programs).expect("a folder");
    symlink(&artifacts.ctl, programs.join("nvshare-ctl")).expect("a link");
    symlink(&artifacts.scheduler, programs.join("nvshare-scheduler")).expect("a link");
    fs::write(home.join("sudo.txt"), "#!/bin/sh\nexec \"$@\"\n").expect("a file");
    executable(&home.join("sudo.txt"), &programs.join("sudo"));
    // A busy machine takes longer to start what a block has just started.
    let waits = "#!/bin/sh\nuntil nvshare-ctl status >/dev/null 2>&1; do /bin/sleep 0.1; done\n";
    fs::write(home.join("sleep.txt"), waits).expect("a file");
    executable(&home.join("sleep.txt"), &programs.join("sleep"));
    let train = "import ctypes, sys\n\
                 cuda = ctypes.CDLL('libcuda.so.1')\n\
                 context, memory = ctypes.c_void_p(), ctypes.c_uint64()\n\
                 for result in (cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),\n\
                 \x20              cuda.cuCtxSetCurrent(context), cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 26)),\n\
                 \x20              cuda.cuMemsetD8_v2(memory, 1, ctypes.c_size_t(1 << 26)), cuda.cuMemFree_v2(memory)):\n\
                 \x20   sys.exit(result) if result else None\n";
    fs::write(home.join("train.py"), train).expect("a file");
    home
}

/// Runs a block. Returns what is wrong, if anything.
fn run(block: &Block, expected: i32) -> Result<(), String> {
    let world = World::simulated(&[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")]);
    // A block that starts a scheduler of its own finds none running.
    let scheduler = (!block.text.contains("nvshare-scheduler")).then(|| Scheduler::start(&world, &[]));
    let home = place(&world);
    let path = std::env::var("PATH").unwrap_or_default();
    // Processes that the block has started end with it.
    let script = format!(
        "trap 'code=$?; kill $(jobs -p) 2>/dev/null || true; wait; exit $code' EXIT\nset -eu\n{}\n",
        block.text
    );
    // A command that waits for ever is wrong as well.
    let output = Command::new("timeout")
        .args(["--kill-after=5", &patience().as_secs().to_string(), "bash", "-c", &script])
        .current_dir(&home)
        .envs(world.environment())
        .env("PATH", format!("{}:{path}", home.join("bin").display()))
        .env("NVSHARE_LIBRARY", &Artifacts::get().library)
        .stdin(Stdio::null())
        .output()
        .expect("bash runs");
    drop(scheduler);
    if output.status.code() == Some(expected) {
        return Ok(());
    }
    Err(format!(
        "{}: {} instead of {expected}\n{}\n{}{}",
        block.place,
        output.status,
        block.text,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    ))
}

#[test]
fn every_command_of_the_documents_works() {
    let (mut wrong, mut tried) = (Vec::new(), 0);
    let mut not_run = String::new();
    for block in PAPERS.iter().flat_map(|paper| blocks(paper)) {
        match &block.expected {
            Ok(code) => {
                tried += 1;
                wrong.extend(run(&block, *code).err());
            }
            Err(reason) => {
                let paper = block.place.split(':').next().unwrap_or_default();
                let _ = writeln!(not_run, "{paper}: {reason}");
                for line in block.text.lines() {
                    let _ =
                        writeln!(not_run, "    {}", line.split(" #").next().unwrap_or_default().trim_end());
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    assert!(tried >= 10, "{tried} blocks were run");
    golden("papers_not_run.txt", &not_run);
}

#[test]
fn commands_are_in_blocks_that_say_so() {
    // A block without a language is a picture, or the output of a program.
    for paper in PAPERS {
        let text = fs::read_to_string(workspace().join(paper)).expect("a document");
        let mut inside = None;
        for (number, line) in (1..).zip(text.lines()) {
            let fence = line.trim_start();
            if fence.starts_with("```") {
                inside = if inside.is_some() { None } else { Some(fence.to_owned()) };
            } else if inside.as_deref() == Some("```") {
                let first = line.split_whitespace().next().unwrap_or_default();
                let is_command =
                    ["sudo", "cargo", "nvshare-ctl", "kubectl", "docker", "podman"].contains(&first);
                assert!(!is_command, "{paper}:{number}: a command in a block without a language: {line}");
            }
        }
    }
}

#[test]
fn commands_that_need_rights_are_given_by_somebody_who_has_them() {
    let (mut wrong, mut looked) = (Vec::new(), 0);
    for block in PAPERS.iter().flat_map(|paper| blocks(paper)) {
        // A user may do all to a scheduler of their own.
        if block.text.contains("nvshare-scheduler --") {
            continue;
        }
        for line in block.text.lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            // The first word has none before it.
            for three in [&[""][..], &words].concat().windows(3) {
                let &[before, "nvshare-ctl", command] = three else { continue };
                if FOR_ADMINISTRATORS.contains(&command) {
                    looked += 1;
                    // `sudo`, or behind the `--` of `kubectl exec`.
                    if !["sudo", "--"].contains(&before) {
                        wrong.push(format!("{}: {line}", block.place));
                    }
                }
            }
        }
    }
    assert!(looked >= 15, "{looked} commands");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The sources that programs are made of, without comments and tests, with texts that continue in the next line joined.
fn sources(folder: &Path, text: &mut String) {
    for path in fs::read_dir(folder).expect("a folder").filter_map(Result::ok).map(|entry| entry.path()) {
        if path.is_dir() {
            if !path.ends_with("tests") {
                sources(&path, text);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let source = fs::read_to_string(&path).expect("a source");
            let source = source.split("#[cfg(test)]").next().unwrap_or_default();
            let is_code = |line: &&str| !line.trim_start().starts_with("//");
            let lines: Vec<&str> = source.lines().filter(is_code).collect();
            let joined = lines
                .iter()
                .map(|line| line.strip_suffix('\\').map_or_else(|| format!("{line}\n"), str::to_owned));
            // A text continues after the blanks of the next line.
            let mut goes_on = false;
            for (line, whole) in lines.iter().zip(joined) {
                text.push_str(if goes_on { whole.trim_start() } else { &whole });
                goes_on = line.ends_with('\\');
            }
        }
    }
}

#[test]
fn messages_that_troubleshooting_explains_are_said() {
    let mut said = String::new();
    for folder in ["libnvshare", "nvshare-scheduler", "nvshare-ctl", "nvshare-admin", "proto"] {
        sources(&workspace().join(folder), &mut said);
    }
    let page = fs::read_to_string(workspace().join("docs/troubleshooting.md")).expect("a document");
    let messages = page.lines().filter_map(|line| line.strip_prefix("| `")?.split("` ").next());
    let mut unknown = Vec::new();
    let mut looked = 0;
    // Words of the loader, and of the reader of TOML.
    let is_others = |message: &str| message.starts_with("object ") || message.contains("unknown field");
    for message in messages.filter(|message| !is_others(message)) {
        // The text between places for names, numbers and reasons.
        let is_place = |word: &str| {
            let word = word.trim_matches(|c: char| !c.is_alphanumeric() && c != '…');
            word.contains('…')
                || word.len() > 1 && word.chars().all(|c| c.is_ascii_uppercase())
                || ["N", "A", "B"].contains(&word)
        };
        let mut pieces = vec![String::new()];
        for word in message.split(' ') {
            if is_place(word) {
                pieces.push(String::new());
            } else if let Some(piece) = pieces.last_mut() {
                piece.push_str(if piece.is_empty() { "" } else { " " });
                piece.push_str(word);
            }
        }
        let pieces: Vec<&str> =
            pieces.iter().map(|piece| piece.trim_matches(['(', ')', ':', ';', ' '])).collect();
        let longest = pieces.iter().max_by_key(|piece| piece.len()).expect("a piece");
        looked += 1;
        if longest.len() < 8 || !said.contains(longest) {
            unknown.push(format!("{message}: {longest:?}"));
        }
    }
    assert!(looked > 20, "{looked} messages");
    assert!(unknown.is_empty(), "nothing says\n{}", unknown.join("\n"));
}

#[test]
fn variables_of_hami_have_the_effect_that_the_document_says() {
    let page = fs::read_to_string(workspace().join("docs/coming-from.md")).expect("a document");
    let mut looked = Vec::new();
    for row in page.lines() {
        let Some((there, here)) = row.strip_prefix("| ").and_then(|row| row.split_once(" | ")) else {
            continue;
        };
        let named = there.split('`').filter(|name| HAMI.contains(name));
        for name in named {
            let is_read = nvshare_proto::env::complaint(name).is_none();
            assert_eq!(here.starts_with("read as "), is_read, "{name}: {here}");
            assert_eq!(here.starts_with("has no effect"), !is_read, "{name}: {here}");
            looked.push(name);
        }
    }
    looked.sort_unstable();
    assert_eq!(looked, HAMI);
}

#[test]
fn the_reference_names_every_command_option_and_variable() {
    let text = fs::read_to_string(workspace().join("docs/reference.md")).expect("a document");
    let all = nvshare_ctl::command();
    let shown = |name: &&str| *name != "help";
    let commands =
        all.get_subcommands().filter(|command| !command.is_hide_set()).map(clap::Command::get_name);
    let commands =
        commands.filter(shown).map(|name| (format!("nvshare-ctl {name}"), format!("`{name}"))).chain(
            nvshare_proto::env::KNOWN
                .iter()
                .filter(|name| !name.contains("BENCH"))
                .map(|name| (format!("`{name}`"), format!("`{name}="))),
        );
    let scheduler = nvshare_scheduler::settings::Options::command();
    let options = scheduler
        .get_arguments()
        .filter(|option| !option.is_hide_set())
        .filter_map(|option| option.get_long());
    let of_commands = all.get_subcommands().filter(|command| !command.is_hide_set());
    let of_commands = of_commands.flat_map(clap::Command::get_arguments);
    let of_commands = of_commands.filter(|option| !option.is_hide_set()).filter_map(clap::Arg::get_long);
    let options =
        options.chain(of_commands).filter(shown).map(|long| (format!("`--{long}`"), format!("`--{long} ")));
    // `nvshare-ctl on`, `off` and the like share a row.
    let missing: Vec<String> = commands
        .chain(options)
        .filter(|(name, other)| !text.contains(name) && (other.is_empty() || !text.contains(other)))
        .map(|(name, _)| name)
        .collect();
    assert!(missing.is_empty(), "docs/reference.md does not name {missing:?}");
}
