//! The Debian package.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::dist::{self, call};

/// The options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Use dist/ as it is, instead of making it anew
    #[arg(long)]
    keep_dist: bool,
    /// Revision of the package, for several of one version
    #[arg(long, default_value = "1")]
    revision: String,
}

/// Packs `dist/` by cargo-deb, as `[package.metadata.deb]` of the scheduler's Cargo.toml says.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    let workspace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    if !options.keep_dist {
        dist::run()?;
    }
    let has = Command::new("cargo-deb").arg("--version").output();
    if !has.is_ok_and(|output| output.status.success()) {
        return Err("cargo-deb is not installed: cargo install --locked cargo-deb".to_owned());
    }
    let debian = workspace.join("target/debian");
    fs::create_dir_all(&debian).map_err(|error| format!("{}: {error}", debian.display()))?;
    let changelog = debian.join("changelog");
    fs::write(&changelog, entry(&workspace, &options.revision)?)
        .map_err(|error| format!("{}: {error}", changelog.display()))?;
    call(
        Command::new("cargo-deb")
            .args(["--package=nvshare-scheduler", "--no-build", "--no-strip", "--deb-revision"])
            .arg(&options.revision)
            .arg("--output")
            .arg(format!("{}/", debian.display()))
            .current_dir(&workspace),
    )
}

/// Debian's own changelog, which says where the changes are. Its time is that of the last commit, so that the same sources
/// give the same package.
fn entry(workspace: &Path, revision: &str) -> Result<String, String> {
    let output = Command::new("git")
        .args(["log", "-1", "--format=%aD"])
        .current_dir(workspace)
        .output()
        .map_err(|error| format!("git: {error}"))?;
    let date = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if date.is_empty() {
        return Err("git knows no last commit, and so no date for the package".to_owned());
    }
    Ok(format!(
        "nvshare ({}-{revision}) unstable; urgency=medium\n\n  * /usr/share/doc/nvshare/CHANGELOG.md has the changes.\n\n \
         -- nvshare maintainers <maintainers@nvshare.invalid>  {date}\n",
        env!("CARGO_PKG_VERSION")
    ))
}
