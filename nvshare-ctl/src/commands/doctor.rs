//! `nvshare-ctl doctor`

use std::collections::BTreeSet;
use std::env;
use std::path::{Path, PathBuf};

use clap::Args;
use object::read::elf::ElfFile64;
use object::{Object, ObjectSymbol};
use serde::Serialize;

use crate::commands::run;
use crate::connection::Scheduler;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The driver to look at [default: where the loader would find libcuda.so.1]
    #[arg(long, value_name = "PATH")]
    driver: Option<PathBuf>,

    #[command(flatten)]
    library: run::Library,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What is known of this machine.
#[derive(Debug, Serialize)]
struct Findings {
    driver: Option<PathBuf>,
    /// Entry points that the driver exports.
    exports: usize,
    /// Those that the library does not know: work submitted through them would pass by the gate.
    unknown: Vec<String>,
    library: Option<PathBuf>,
    /// The version of the scheduler that answers.
    scheduler: Option<String>,
    problems: Vec<String>,
}

/// The page that is generated from the library's table.
const PAGE: &str = include_str!("../../../docs/entry-points.md");

/// Every entry point that the library knows: the first column of the page.
fn known() -> BTreeSet<&'static str> {
    let first = PAGE.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    first.filter(|name| is_entry_point(name)).collect()
}

pub(crate) fn run(scheduler: &Scheduler, options: &Options) -> Result<(), String> {
    let mut problems = Vec::new();
    let driver = options.driver.clone().or_else(find_driver);
    let exports = match &driver {
        Some(path) => exports(path).unwrap_or_else(|error| {
            problems.push(error);
            BTreeSet::new()
        }),
        None => {
            problems.push("libcuda.so.1 is not found: is NVIDIA's driver installed?".to_owned());
            BTreeSet::new()
        }
    };
    let known = known();
    let unknown: Vec<String> =
        exports.iter().filter(|name| !known.contains(name.as_str())).cloned().collect();
    if !unknown.is_empty() {
        problems.push(format!(
            "{} entry points of this driver are unknown: work submitted through them passes by the gate",
            unknown.len()
        ));
    }
    let library = options.library.find().map_err(|error| problems.push(error)).ok();
    let status = scheduler.status().map_err(|error| problems.push(error)).ok();
    let findings = Findings {
        driver,
        exports: exports.len(),
        unknown,
        library,
        scheduler: status.map(|status| status.scheduler.version),
        problems,
    };
    if options.json {
        println!("{}", serde_json::to_string_pretty(&findings).map_err(|error| error.to_string())?);
    } else {
        print(&findings);
    }
    match findings.problems.len() {
        0 => Ok(()),
        1 => Err("1 problem".to_owned()),
        more => Err(format!("{more} problems")),
    }
}

fn print(findings: &Findings) {
    let path =
        |path: &Option<PathBuf>| path.as_ref().map_or("-".to_owned(), |path| path.display().to_string());
    println!("driver     {} ({} entry points)", path(&findings.driver), findings.exports);
    println!("library    {}", path(&findings.library));
    println!("scheduler  {}", findings.scheduler.as_deref().unwrap_or("-"));
    for problem in &findings.problems {
        println!("problem    {problem}");
    }
    for name in &findings.unknown {
        println!("unknown    {name}");
    }
}

/// The driver's functions that a file exports.
fn exports(path: &Path) -> Result<BTreeSet<String>, String> {
    let describe = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let bytes = std::fs::read(path).map_err(|error| describe(&error))?;
    let file: ElfFile64<'_> = ElfFile64::parse(&*bytes).map_err(|error| describe(&error))?;
    let names = file.dynamic_symbols().filter(|symbol| symbol.is_definition());
    let names = names.filter_map(|symbol| symbol.name().ok().map(str::to_owned));
    Ok(names.filter(|name| is_entry_point(name)).collect())
}

/// `cuInit`, and not `cudbgMain`: debuggers talk to that.
fn is_entry_point(name: &str) -> bool {
    name.strip_prefix("cu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
}

fn find_driver() -> Option<PathBuf> {
    const USUAL: [&str; 6] = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/nvidia/lib64",
        "/usr/lib/wsl/lib",
    ];
    let asked = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    env::split_paths(&asked)
        .chain(USUAL.map(PathBuf::from))
        .map(|directory| directory.join("libcuda.so.1"))
        .find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_entry_points() {
        let known = known();
        assert!(known.len() > 600, "{}", known.len());
        assert!(known.contains("cuLaunchKernel") && known.contains("cuTexRefSetArray"));
    }

    #[test]
    fn what_debuggers_use_is_no_entry_point() {
        for (name, expected) in [("cuInit", true), ("cudbgMain", false), ("cudaMalloc", false), ("cu", false)]
        {
            assert_eq!(is_entry_point(name), expected, "{name}");
        }
    }
}
