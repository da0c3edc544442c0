//! The tests' programs that cargo has built, and what they say of a test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

/// A program of tests.
struct Program {
    package: String,
    /// The package's folder, in which cargo would start the program.
    folder: PathBuf,
    path: PathBuf,
    /// The names of its tests, with their modules.
    tests: Vec<String>,
}

/// The verdict of a run on a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Verdict {
    Green,
    /// The program ended without success, and named no test that was red.
    DidNotSay,
    Red,
}

/// A run of a test.
pub(super) struct Ran {
    pub(super) verdict: Verdict,
    pub(super) printed: String,
}

impl Ran {
    /// The last lines of what was printed.
    pub(super) fn end(&self) -> String {
        let lines: Vec<&str> = self.printed.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}

/// All programs of tests of a build.
pub(super) struct Programs {
    programs: Vec<Program>,
    target: PathBuf,
}

impl Programs {
    /// Those that cargo names among what it printed, one JSON object a line. `target`: its target folder.
    pub(super) fn among(printed: &str, target: &Path) -> Result<Self, String> {
        let programs = printed
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok())
            .filter(|message| message["profile"]["test"] == true)
            .filter_map(|message| {
                let path = PathBuf::from(message["executable"].as_str()?);
                let manifest = PathBuf::from(message["manifest_path"].as_str()?);
                Some((package(message["package_id"].as_str()?), manifest.parent()?.to_owned(), path))
            })
            .map(|(package, folder, path)| {
                Ok(Program { package, tests: list(&path, &folder)?, folder, path })
            })
            .collect::<Result<_, String>>()?;
        Ok(Self { programs, target: target.to_owned() })
    }

    /// Runs the tests of a package whose names contain `test`. `broken`: the rule that is broken, and how long a test then waits for
    /// what may never come.
    pub(super) fn run(
        &self,
        package: &str,
        test: &str,
        broken: Option<(usize, Duration)>,
    ) -> Result<Ran, String> {
        let has = |program: &&Program| {
            program.package == package && program.tests.iter().any(|name| name.contains(test))
        };
        let (mut verdict, mut all) = (None, String::new());
        for program in self.programs.iter().filter(has) {
            let mut command = Command::new(&program.path);
            command.arg(test).current_dir(&program.folder).env("CARGO_TARGET_DIR", &self.target);
            // A failing property must not be shrunk, nor recorded.
            command.env("PROPTEST_MAX_SHRINK_ITERS", "0");
            command.env("PROPTEST_RNG_SEED", "1").env("PROPTEST_CASES", "1500");
            command.env("CARGO_MANIFEST_DIR", &program.folder).env_remove("NVSHARE_BROKEN_RULE");
            if let Some((number, patience)) = broken {
                command.env("NVSHARE_BROKEN_RULE", number.to_string());
                command.env("NVSHARE_TEST_PATIENCE", patience.as_secs().to_string());
            }
            let output = command.output().map_err(|error| format!("{}: {error}", program.path.display()))?;
            let printed = String::from_utf8_lossy(&output.stdout);
            // Of several programs with such a test, one is enough.
            verdict = verdict.max(Some(if output.status.success() {
                Verdict::Green
            } else if printed.contains(test) && printed.contains("test result: FAILED") {
                Verdict::Red
            } else {
                Verdict::DidNotSay
            }));
            all.push_str(&printed);
            all.push_str(&String::from_utf8_lossy(&output.stderr));
        }
        let verdict = verdict.ok_or_else(|| format!("{package} has no test {test}"))?;
        Ok(Ran { verdict, printed: all })
    }
}

/// The name of a package, from what cargo calls its identity: `path+file:///folder#name@version`, or `…/name#version`.
fn package(identity: &str) -> String {
    let (folder, rest) = identity.split_once('#').unwrap_or((identity, ""));
    let name = match rest.split_once('@') {
        Some((name, _)) => name,
        None => folder.rsplit('/').next().unwrap_or(folder),
    };
    name.to_owned()
}

/// The names of a program's tests.
fn list(path: &Path, folder: &Path) -> Result<Vec<String>, String> {
    let mut command = Command::new(path);
    command.args(["--list", "--format", "terse"]).current_dir(folder);
    let listed = command.output().map_err(|error| format!("{}: {error}", path.display()))?;
    let text = String::from_utf8_lossy(&listed.stdout);
    Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::package;

    #[test]
    fn the_name_of_a_package_is_in_its_identity() {
        assert_eq!(package("path+file:///a/tests/e2e#nvshare-e2e@0.1.0"), "nvshare-e2e");
        assert_eq!(package("path+file:///a/libnvshare#0.1.0"), "libnvshare");
    }
}
