//! Breaks each safety rule on purpose and sees its test go red: a test that cannot fail proves nothing.
//!
//! Works on a copy of the tracked files, in a target folder of its own. All rules are patched into one build, each behind a
//! question that only one rule answers with yes: `NVSHARE_BROKEN_RULE` names that rule, by its place in the list.
//!
//! With `--storm`, random programs have to notice, for the rules that name a defect of theirs; the table in
//! `docs/testing.md` is the output of that.

mod rules;
mod shares;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Instant;

use rules::{RULES, Rule, STORM, Storm};
use shares::SHARES;

/// All rules, each with its number.
fn rules() -> impl Iterator<Item = (usize, &'static Rule)> {
    RULES.iter().chain(SHARES).enumerate()
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

/// A copy of the workspace with all rules patched in, built by cargo's `arguments`.
struct Patched {
    copy: PathBuf,
    target: PathBuf,
}

fn build(arguments: &[&str]) -> Result<Patched, String> {
    let workspace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let copy = workspace.join("target/broken/source");
    let target = workspace.join("target/broken/target");
    copy_tracked(&workspace, &copy)?;
    patch(&copy)?;
    let begin = Instant::now();
    let built = cargo(&copy, &target, arguments, None)?;
    if !built.status.success() {
        return Err(format!(
            "with its rules patched, it does not compile:\n{}",
            String::from_utf8_lossy(&built.stderr)
        ));
    }
    println!("built with {} rules in {:.0} s", rules().count(), begin.elapsed().as_secs_f64());
    Ok(Patched { copy, target })
}

/// `only`: rules whose text contains this.
pub(crate) fn run(only: Option<&str>) -> Result<(), String> {
    let packages: BTreeSet<&str> = rules().map(|(_, rule)| rule.package).collect();
    let mut arguments = vec!["test", "--no-run"];
    packages.iter().for_each(|package| arguments.extend(["-p", package]));
    let Patched { copy, target } = build(&arguments)?;
    let mut unnoticed = 0;
    for (number, rule) in rules() {
        if only.is_some_and(|only| !rule.what.contains(only) && !rule.test.contains(only)) {
            continue;
        }
        let begin = Instant::now();
        let noticed = break_one(&copy, &target, number, rule)?;
        let verdict = if noticed { "red, as it must be" } else { "NOT NOTICED" };
        println!("{verdict}: {} ({}, {:.0} s)", rule.what, rule.test, begin.elapsed().as_secs_f64());
        unnoticed += usize::from(!noticed);
    }
    if unnoticed == 0 { Ok(()) } else { Err(format!("{unnoticed} broken rules were not noticed")) }
}

/// Breaks each rule that random programs have to notice, and prints the seed at which they do.
pub(crate) fn storm(only: Option<&str>, seeds: u64) -> Result<(), String> {
    const PARTS: [&str; 5] =
        ["libnvshare", "nvshare-sim", "nvshare-scheduler", "nvshare-ctl", "nvshare-storm"];
    let mut arguments = vec!["build"];
    PARTS.iter().for_each(|package| arguments.extend(["-p", package]));
    let built = build(&arguments)?.target.join("debug");
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
        if good.matches(rule.from).count() != 1 {
            return Err(format!("{}: the place to break is not there once: {}", rule.file, rule.what));
        }
        let to = rule.to.replace("BROKEN", &format!("crate::broken_rule({number})"));
        std::fs::write(&path, good.replace(rule.from, &to)).map_err(|error| error.to_string())?;
        let source = Path::new(rule.file).ancestors().find(|dir| dir.ends_with("src"));
        crates.extend(source.map(|source| copy.join(source).join("lib.rs")));
    }
    for root in crates {
        let text = std::fs::read_to_string(&root).map_err(|error| format!("{}: {error}", root.display()))?;
        std::fs::write(&root, text + QUESTION).map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// Breaks one rule. Returns whether its test notices.
fn break_one(copy: &Path, target: &Path, number: usize, rule: &Rule) -> Result<bool, String> {
    let tested = cargo(copy, target, &["test", "-p", rule.package, rule.test], Some(number))?;
    let text = String::from_utf8_lossy(&tested.stdout);
    Ok(!tested.status.success() && text.contains(rule.test) && text.contains("FAILED"))
}

fn cargo(copy: &Path, target: &Path, arguments: &[&str], broken: Option<usize>) -> Result<Output, String> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).arg("--quiet").current_dir(copy);
    // A failing property must not be shrunk, nor recorded.
    command.env("CARGO_TARGET_DIR", target).env("PROPTEST_MAX_SHRINK_ITERS", "0");
    command.env("PROPTEST_RNG_SEED", "1").env("PROPTEST_CASES", "1500").env("NVSHARE_TEST_PATIENCE", "30");
    command.env_remove("CARGO_MANIFEST_DIR").env_remove("NVSHARE_BROKEN_RULE");
    if let Some(number) = broken {
        command.env("NVSHARE_BROKEN_RULE", number.to_string());
    }
    command.output().map_err(|error| format!("cargo: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The list names places by their text, so it has to follow each change of that text.
    #[test]
    fn every_place_to_break_is_there_once() {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let lost = |rule: &&'static Rule| {
            let text = std::fs::read_to_string(workspace.join(rule.file)).unwrap_or_default();
            text.matches(rule.from).count() != 1
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
