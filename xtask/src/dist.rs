//! `dist/`, and the tarball of it.

use std::path::{Path, PathBuf};
use std::process::Command;

use nvshare_harness::Artifacts;

/// Makes `dist/` from a release build, and packs it.
pub(crate) fn run() -> Result<(), String> {
    let artifacts = Artifacts::build(true);
    let workspace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let dist = workspace.join("dist");
    let _ = std::fs::remove_dir_all(&dist);
    let places = [
        (&artifacts.scheduler, "bin/nvshare-scheduler"),
        (&artifacts.ctl, "bin/nvshare-ctl"),
        (&artifacts.library, "lib/nvshare/libnvshare.so"),
        // Not for users: what the tests on a machine without a toolchain need.
        (&artifacts.workload, "libexec/nvshare-workload"),
    ];
    for (from, to) in places {
        let to = dist.join(to);
        std::fs::create_dir_all(to.parent().unwrap_or(&dist))
            .map_err(|e| format!("{}: {e}", to.display()))?;
        call(Command::new("strip").args(["--strip-unneeded", "-o"]).arg(&to).arg(from))?;
    }
    for paper in ["README.md", "LICENSE", "CHANGELOG.md"] {
        copy(&workspace.join(paper), &dist.join(paper))?;
    }
    let name = format!("nvshare-{}-{}-linux", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH);
    let tarball = workspace.join("target").join(format!("{name}.tar.gz"));
    call(
        Command::new("tar")
            .arg("--create")
            .arg("--gzip")
            .args(["--owner=0", "--group=0", "--sort=name", "--exclude=libexec"])
            .arg(format!("--transform=s,^\\.,{name},"))
            .arg("--file")
            .arg(&tarball)
            .arg("--directory")
            .arg(&dist)
            .arg("."),
    )?;
    println!("{}\n{}", dist.display(), tarball.display());
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<(), String> {
    std::fs::copy(from, to).map(|_| ()).map_err(|error| format!("{}: {error}", from.display()))
}

fn call(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let status = command.status().map_err(|error| format!("{name}: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{name}: {status}")) }
}
