//! `dist/`, and the tarball of it.

use std::path::{Path, PathBuf};
use std::process::Command;

use nvshare_harness::Artifacts;

use crate::papers;
use crate::shipped::DOCUMENTS;

/// The oldest glibc that a portable build runs with.
const OLDEST_GLIBC: &str = "2.17";

/// Makes `dist/` from a release build, and packs it.
///
/// With cargo-zigbuild and patchelf at hand the build is portable: it runs with any glibc since 2.17, needs no libgcc_s,
/// and a musl program that inherits the preload still starts. Otherwise the build needs the glibc that it was built with.
pub(crate) fn run() -> Result<(), String> {
    let workspace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let artifacts = match portable(&workspace)? {
        Some(artifacts) => artifacts,
        None => {
            println!("not portable: cargo-zigbuild (with ziglang) and patchelf are not at hand");
            Artifacts {
                storm: Artifacts::storm(),
                device_plugin: Artifacts::device_plugin(),
                ..Artifacts::build(true)
            }
        }
    };
    let dist = workspace.join("dist");
    let _ = std::fs::remove_dir_all(&dist);
    let places = [
        (&artifacts.scheduler, "bin/nvshare-scheduler"),
        (&artifacts.ctl, "bin/nvshare-ctl"),
        (&artifacts.library, "lib/nvshare/libnvshare.so"),
        // Not for users: what the image has, and programs that the tests need on a machine without a toolchain.
        (&artifacts.device_plugin, "libexec/nvshare-device-plugin"),
        (&artifacts.workload, "libexec/nvshare-workload"),
        (&artifacts.storm, "libexec/nvshare-storm"),
        (&artifacts.simulator, "libexec/simulated/libcuda.so.1"),
    ];
    for (from, to) in places {
        let to = dist.join(to);
        std::fs::create_dir_all(to.parent().unwrap_or(&dist))
            .map_err(|e| format!("{}: {e}", to.display()))?;
        call(Command::new("strip").args(["--strip-unneeded", "-o"]).arg(&to).arg(from))?;
    }
    if artifacts.library.starts_with(portable_target(&workspace)) {
        // The loader is loaded anyway; where it has another name, as with musl, the dependency could not be found.
        let library = dist.join("lib/nvshare/libnvshare.so");
        call(Command::new("patchelf").args(["--remove-needed", LOADER]).arg(library))?;
    }
    for document in DOCUMENTS {
        copy(&workspace.join(document), &dist.join(document))?;
    }
    papers::write(&dist)?;
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

#[cfg(target_arch = "x86_64")]
const LOADER: &str = "ld-linux-x86-64.so.2";
#[cfg(target_arch = "aarch64")]
const LOADER: &str = "ld-linux-aarch64.so.1";

fn portable_target(workspace: &Path) -> PathBuf {
    workspace.join("target/portable")
}

/// Builds against an old glibc, if the tools for it are at hand.
fn portable(workspace: &Path) -> Result<Option<Artifacts>, String> {
    let has = |program: &str| {
        Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
    };
    if !has("cargo-zigbuild") || !has("patchelf") {
        return Ok(None);
    }
    let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let target = portable_target(workspace);
    let packages = [
        "libnvshare",
        "nvshare-sim",
        "nvshare-scheduler",
        "nvshare-ctl",
        "nvshare-device-plugin",
        "nvshare-workload",
        "nvshare-storm",
    ];
    call(
        Command::new("cargo-zigbuild")
            .args(["zigbuild", "--quiet", "--release", "--target"])
            .arg(format!("{triple}.{OLDEST_GLIBC}"))
            .args(packages.map(|package| format!("--package={package}")))
            .arg("--target-dir")
            .arg(&target)
            .current_dir(workspace),
    )?;
    let built = target.join(triple).join("release");
    Ok(Some(Artifacts {
        library: built.join("libnvshare.so"),
        scheduler: built.join("nvshare-scheduler"),
        ctl: built.join("nvshare-ctl"),
        workload: built.join("nvshare-workload"),
        storm: built.join("nvshare-storm"),
        device_plugin: built.join("nvshare-device-plugin"),
        simulator: built.join("libcuda.so"),
    }))
}

/// Copies a file, or a folder with all that is in it.
fn copy(from: &Path, to: &Path) -> Result<(), String> {
    let describe = |error: std::io::Error| format!("{}: {error}", from.display());
    if from.is_dir() {
        return std::fs::read_dir(from).map_err(describe)?.try_for_each(|entry| {
            let entry = entry.map_err(describe)?;
            copy(&entry.path(), &to.join(entry.file_name()))
        });
    }
    std::fs::create_dir_all(to.parent().unwrap_or(to)).map_err(describe)?;
    std::fs::copy(from, to).map(|_| ()).map_err(describe)
}

pub(crate) fn call(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let status = command.status().map_err(|error| format!("{name}: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{name}: {status}")) }
}
