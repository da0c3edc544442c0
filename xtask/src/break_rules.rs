//! Breaks each safety rule on purpose and sees its test go red: a test that cannot fail proves nothing.
//!
//! Works on a copy of the tracked files, in a target folder of its own. All rules are patched into one build, each behind a
//! question that only one rule answers with yes: `NVSHARE_BROKEN_RULE` names that rule, by its place in the list. The
//! programs of the tests that cargo has built then run by themselves: first each test, which has to be green with no rule
//! broken, then each rule's test with the rule broken.
//!
//! With `--storm`, random programs have to notice, for the rules that name a defect of theirs; the table in
//! `docs/internals/testing.md` is the output of that.

mod programs;
mod rules;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Condvar, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use nvshare_harness::Artifacts;

use programs::{Programs, Verdict};
use rules::{Rule, STORM, Storm};

/// All rules, each with its number.
fn rules() -> impl Iterator<Item = (usize, &'static Rule)> {
    rules::all().iter().enumerate()
}

/// The question that the patched crates ask.
const QUESTION: &str = "
/// Whether this rule is the one that is broken on purpose.
#[allow(missing_docs, clippy::missing_docs_in_private_items, dead_code)]
pub(crate) fn broken_rule(rule: usize) -> bool {
    static RULE: std::sync::OnceLock<Option<usize>> = std::sync::OnceLock::new();
    *RULE.get_or_init(|| std::env::var(\"NVSHARE_BROKEN_RULE\").ok()?.parse().ok()) == Some(rule)
}
";

/// A copy of the workspace with all rules patched in: the parts that programs of tests run, and what else cargo builds with these
/// `arguments`. Returns the build's target folder, and what cargo printed of the latter: one JSON object a line.
fn build(arguments: &[&str]) -> Result<(PathBuf, String), String> {
    let workspace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let copy = workspace.join("target/broken/source");
    let target = workspace.join("target/broken/target");
    copy_tracked(&workspace, &copy)?;
    patch(&copy)?;
    let begin = Instant::now();
    let run = |arguments: &[&str]| {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(arguments).args(["--quiet", "--message-format=json-render-diagnostics"]);
        cargo.current_dir(&copy).env("CARGO_TARGET_DIR", &target).env_remove("CARGO_MANIFEST_DIR");
        let built = cargo.output().map_err(|error| format!("cargo: {error}"))?;
        if built.status.success() {
            return Ok(String::from_utf8_lossy(&built.stdout).into_owned());
        }
        Err(format!(
            "with its rules patched, it does not compile:\n{}",
            String::from_utf8_lossy(&built.stderr)
        ))
    };
    // A test that built them would seem to take that long.
    run(&[&["build"], &packages(&Artifacts::PACKAGES)[..]].concat())?;
    let printed = run(arguments)?;
    println!("built with {} rules in {:.0} s", rules().count(), begin.elapsed().as_secs_f64());
    Ok((target, printed))
}

/// Cargo's arguments for these packages.
fn packages<'a>(names: &[&'a str]) -> Vec<&'a str> {
    names.iter().flat_map(|name| ["-p", name]).collect()
}

/// Tests that run at the same time, each in a process of its own: with more on two processors, tests are red that hold turns
/// to their times, with no rule broken.
const AT_ONCE: usize = 2;

/// A test that has run for this long with a rule broken, and for three times as long as with none, waits for what may never come, and
/// takes no processor: the next test begins beside it.
const WORKS_FOR: Duration = Duration::from_secs(3);
/// Tests that wait like this at the same time.
const WAITING_AT_ONCE: usize = 6;

/// With its rule broken, a test waits at least this long for what may never come, and at least twice as long as all of it took with no
/// rule broken: on a busy machine, a test whose patience is over too soon would be red whatever rule is broken.
const MIN_PATIENCE: Duration = Duration::from_secs(12);

/// `only`: rules whose text contains this.
pub(crate) fn run(only: Option<&str>) -> Result<(), String> {
    let is_chosen =
        |rule: &Rule| only.is_none_or(|only| rule.what.contains(only) || rule.test.contains(only));
    let chosen: Vec<_> = rules().filter(|(_, rule)| is_chosen(rule)).collect();
    if chosen.is_empty() {
        return Err("no rule, and no test of one, has this text".to_owned());
    }
    let tested: BTreeSet<&str> = rules().map(|(_, rule)| rule.package).collect();
    let tested: Vec<&str> = tested.into_iter().collect();
    let (target, printed) = build(&[&["test", "--no-run"], &packages(&tested)[..]].concat())?;
    let programs = Programs::among(&printed, &target)?;
    // A test that is red anyway says nothing about a rule. Red once may be the other's doing, which runs beside it.
    let tests: BTreeSet<_> = chosen.iter().map(|(_, rule)| (rule.package, rule.test)).collect();
    let begin = Instant::now();
    let red = Mutex::new(Vec::new());
    let green = Mutex::new(BTreeMap::new());
    let all_along = |_: &&(&str, &str)| Duration::MAX;
    each(tests.iter(), all_along, |&(package, test)| {
        let begin = Instant::now();
        if programs.run(package, test, None)?.verdict != Verdict::Green {
            red.lock().unwrap_or_else(PoisonError::into_inner).push((package, test));
        } else {
            let took = begin.elapsed();
            green.lock().unwrap_or_else(PoisonError::into_inner).insert((package, test), took);
        }
        Ok(())
    })?;
    let mut green = green.into_inner().unwrap_or_else(PoisonError::into_inner);
    for (package, test) in red.into_inner().unwrap_or_else(PoisonError::into_inner) {
        let begin = Instant::now();
        let alone = programs.run(package, test, None)?;
        if alone.verdict != Verdict::Green {
            return Err(format!("{test} is red with no rule broken:\n{}", alone.printed));
        }
        green.insert((package, test), begin.elapsed());
        println!("{test} was red beside another test with no rule broken, and is green alone");
    }
    println!(
        "{} tests are green with no rule broken, in {:.0} s",
        tests.len(),
        begin.elapsed().as_secs_f64()
    );
    let begin = Instant::now();
    let passed = Mutex::new(Vec::new());
    let unbroken = |rule: &Rule| green.get(&(rule.package, rule.test)).copied().unwrap_or_default();
    let works_for = |(_, rule): &&(usize, &Rule)| WORKS_FOR.max(unbroken(rule) * 3);
    let verdict = |number, rule: &Rule| {
        let begin = Instant::now();
        let patience = MIN_PATIENCE.max(unbroken(rule) * 2);
        let ran = programs.run(rule.package, rule.test, Some((number, patience)))?;
        let took = begin.elapsed().as_secs_f64();
        if ran.verdict == Verdict::Red {
            println!("red after {took:.0} s: {}", rule.what);
        } else {
            println!("NOT NOTICED after {took:.0} s: {}\n{}", rule.what, ran.end());
        }
        Ok::<_, String>(ran.verdict)
    };
    each(chosen.iter(), works_for, |&(number, rule)| {
        if verdict(number, rule)? != Verdict::Red {
            passed.lock().unwrap_or_else(PoisonError::into_inner).push((number, rule));
        }
        Ok(())
    })?;
    // As with no rule broken: once may be the other's doing, which runs beside it and takes the time that a test needs to notice.
    let mut unnoticed = Vec::new();
    for (number, rule) in passed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        match verdict(number, rule)? {
            Verdict::Red => println!("noticed only alone: {}", rule.what),
            other => unnoticed.push((rule, other)),
        }
    }
    if unnoticed.is_empty() {
        println!("{} broken rules are noticed, in {:.0} s", chosen.len(), begin.elapsed().as_secs_f64());
        return Ok(());
    }
    let line = |(rule, verdict): &(&Rule, Verdict)| format!("\n  {} ({}: {verdict:?})", rule.what, rule.test);
    Err(format!("broken rules that were not noticed:{}", unnoticed.iter().map(line).collect::<String>()))
}

/// Places for tests that run at the same time.
struct Places {
    /// Places for tests that work, and for tests whatever they do.
    free: Mutex<(usize, usize)>,
    changed: Condvar,
}

impl Places {
    fn change<T>(
        &self,
        until: impl Fn(&(usize, usize)) -> bool,
        change: impl FnOnce(&mut (usize, usize)) -> T,
    ) -> T {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free =
            self.changed.wait_while(free, |free| !until(free)).unwrap_or_else(PoisonError::into_inner);
        let changed = change(&mut free);
        self.changed.notify_all();
        changed
    }
}

/// Does something for each of these, [`AT_ONCE`] at the same time. Work that goes on beyond the time that it `works_for` only waits.
fn each<T: Copy + Send>(
    items: impl Iterator<Item = T>,
    works_for: impl Fn(&T) -> Duration,
    work: impl Fn(T) -> Result<(), String> + Sync,
) -> Result<(), String> {
    let places = Places { free: Mutex::new((AT_ONCE, AT_ONCE + WAITING_AT_ONCE)), changed: Condvar::new() };
    let failed = Mutex::new(None);
    thread::scope(|scope| {
        for item in items {
            places.change(
                |&(work, all)| work > 0 && all > 0,
                |(work, all)| (*work, *all) = (*work - 1, *all - 1),
            );
            if failed.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
                break;
            }
            let (is_over, over) = mpsc::channel();
            let (places, failed, work, time) = (&places, &failed, &work, works_for(&item));
            scope.spawn(move || {
                if let Err(error) = work(item) {
                    *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                }
                let _ = is_over.send(());
            });
            scope.spawn(move || {
                let _ = over.recv_timeout(time);
                places.change(|_| true, |(work, _)| *work += 1);
                let _ = over.recv();
                places.change(|_| true, |(_, all)| *all += 1);
            });
        }
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// Breaks each rule that random programs have to notice, and prints the seed at which they do.
pub(crate) fn storm(only: Option<&str>, seeds: u64) -> Result<(), String> {
    let built = build(&["build", "-p", "nvshare-storm"])?.0.join("debug");
    println!("| without the fix | run | seed | finding |\n|---|---|---|---|");
    let mut unnoticed = 0;
    for Storm { defect, rule, arguments } in STORM {
        let (number, rule) = rules()
            .find(|(_, known)| known.what.starts_with(rule))
            .ok_or_else(|| format!("there is no such rule: {rule}"))?;
        if only.is_some_and(|only| !rule.what.contains(only)) {
            continue;
        }
        let mut command = Command::new(built.join("nvshare-storm"));
        command.arg("storm").args(["--seeds", &seeds.to_string(), "--shrink-seconds", "0"]).args(*arguments);
        let parts = [
            ("--library", "libnvshare.so"),
            ("--scheduler", "nvshare-scheduler"),
            ("--ctl", "nvshare-ctl"),
            ("--simulator", "libcuda.so"),
        ];
        parts.iter().for_each(|(option, name)| _ = command.arg(option).arg(built.join(name)));
        let ran = command.env("NVSHARE_BROKEN_RULE", number.to_string()).output();
        let said = ran.map_err(|error| format!("nvshare-storm: {error}"))?.stdout;
        let said = String::from_utf8_lossy(&said);
        let found = said.lines().find_map(|line| {
            line.strip_prefix("storm: seed ").and_then(|rest| rest.split_once(", under nvshare: "))
        });
        let (seed, finding) = found.unwrap_or(("none", "NOT NOTICED"));
        let how =
            if arguments.is_empty() { "in turns".to_owned() } else { format!("`{}`", arguments.join(" ")) };
        println!("| {defect} | {how} | {seed} | {finding} |");
        unnoticed += usize::from(found.is_none());
    }
    if unnoticed == 0 { Ok(()) } else { Err(format!("{unnoticed} broken rules were not noticed")) }
}

fn copy_tracked(workspace: &Path, copy: &Path) -> Result<(), String> {
    let _ = std::fs::remove_dir_all(copy);
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"])
        .current_dir(workspace)
        .output()
        .map_err(|error| format!("git: {error}"))?;
    for file in String::from_utf8_lossy(&listed.stdout).split('\0').filter(|file| !file.is_empty()) {
        let to = copy.join(file);
        std::fs::create_dir_all(to.parent().unwrap_or(copy)).map_err(|error| error.to_string())?;
        std::fs::copy(workspace.join(file), to).map_err(|error| format!("{file}: {error}"))?;
    }
    Ok(())
}

/// Patches all rules into the copy.
fn patch(copy: &Path) -> Result<(), String> {
    let mut crates = BTreeSet::new();
    for (number, rule) in rules() {
        let path = copy.join(rule.file);
        let good = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", rule.file))?;
        if good.matches(&rule.from).count() != 1 {
            return Err(format!("{}: the place to break is not there once: {}", rule.file, rule.what));
        }
        let to = rule.to.replace("BROKEN", &format!("crate::broken_rule({number})"));
        std::fs::write(&path, good.replace(&rule.from, &to)).map_err(|error| error.to_string())?;
        let source = Path::new(rule.file).ancestors().find(|dir| dir.ends_with("src"));
        crates.extend(source.map(|source| copy.join(source).join("lib.rs")));
    }
    for root in crates {
        let text = std::fs::read_to_string(&root).map_err(|error| format!("{}: {error}", root.display()))?;
        std::fs::write(&root, text + QUESTION).map_err(|error| error.to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text of all sources below a folder.
    fn sources(folder: &Path) -> String {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let text = |path: PathBuf| {
            if path.is_dir() {
                return if path.ends_with("target") { String::new() } else { sources(&path) };
            }
            let is_source = path.extension().is_some_and(|extension| extension == "rs");
            if is_source { std::fs::read_to_string(path).unwrap() } else { String::new() }
        };
        entries.map(text).collect()
    }

    /// A name that no test has would be looked for, and not found, without an error.
    #[test]
    fn every_test_that_a_rule_names_is_there() {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let all: String = ["libnvshare", "nvshare-device-plugin", "nvshare-scheduler", "proto", "tests"]
            .map(|folder| sources(&workspace.join(folder)))
            .concat();
        let lost: Vec<_> = rules()
            .filter(|(_, rule)| !all.contains(&format!("fn {}(", rule.test)))
            .map(|(_, rule)| rule.test)
            .collect();
        assert!(lost.is_empty(), "{lost:#?}");
    }

    #[test]
    fn every_file_of_rules_is_in_the_list() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("rules");
        let texts = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap());
        let (known, unknown): (Vec<_>, Vec<_>) =
            texts.partition(|text| rules::LISTS.contains(&text.as_str()));
        assert!(unknown.is_empty() && known.len() == rules::LISTS.len(), "{unknown:?}");
    }

    /// The list names places by their text, so it has to follow each change of that text.
    #[test]
    fn every_place_to_break_is_there_once() {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let lost = |rule: &&'static Rule| {
            let text = std::fs::read_to_string(workspace.join(rule.file)).unwrap_or_default();
            text.matches(&rule.from).count() != 1
        };
        let lost: Vec<_> =
            rules().map(|(_, rule)| rule).filter(lost).map(|rule| (rule.file, rule.what)).collect();
        assert!(lost.is_empty(), "{lost:#?}");
        let unknown: Vec<_> = STORM
            .iter()
            .filter(|storm| !rules().any(|(_, rule)| rule.what.starts_with(storm.rule)))
            .collect();
        assert!(unknown.is_empty(), "{} rules of the storm are in no list", unknown.len());
    }
}
