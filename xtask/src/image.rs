//! The container image.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::dist::{self, call};

/// The options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// A distribution that is there already, instead of a new one
    #[arg(long, value_name = "DIR")]
    dist: Option<PathBuf>,
    /// The image's name
    #[arg(long, default_value = "localhost/nvshare")]
    name: String,
}

/// The users in the image, so that programs that look up users find some.
const USERS: &str = "root:x:0:0:root:/:/usr/bin/false\nnonroot:x:65532:65532:nonroot:/:/usr/bin/false\n";

/// The C library, and what else of it NVIDIA's libraries link, which NVIDIA's runtime puts into a container: NVML needs these. With glibc 2.34 and
/// later our own programs link few of them.
const FOR_NVIDIA: [&str; 5] = ["libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1"];

/// Builds the image with buildah, or with podman.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    let workspace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let dist = match &options.dist {
        Some(dist) => dist.clone(),
        None => {
            dist::run()?;
            workspace.join("dist")
        }
    };
    let builder = ["buildah", "podman"]
        .into_iter()
        .find(|builder| {
            Command::new(builder).arg("--version").output().is_ok_and(|output| output.status.success())
        })
        .ok_or("neither buildah nor podman is installed: apt-get install buildah")?;
    let context = workspace.join("target/image");
    let root = context.join("rootfs");
    let _ = fs::remove_dir_all(&context);
    let mut libraries = BTreeSet::new();
    for (from, to) in [
        ("bin/nvshare-scheduler", "usr/bin/nvshare-scheduler"),
        ("bin/nvshare-ctl", "usr/bin/nvshare-ctl"),
        ("libexec/nvshare-device-plugin", "usr/bin/nvshare-device-plugin"),
        ("lib/nvshare/libnvshare.so", "usr/lib/nvshare/libnvshare.so"),
        ("LICENSE", "usr/share/doc/nvshare/LICENSE"),
    ] {
        copy(&dist.join(from), &root.join(to))?;
        if to.starts_with("usr/bin/") {
            libraries.extend(linked(&dist.join(from))?);
        }
    }
    for paper in nvshare_ctl::papers() {
        copy(&dist.join(&paper), &root.join("usr").join(&paper))?;
    }
    libraries.extend(for_nvidia(&libraries)?);
    for library in libraries {
        let place = library.strip_prefix("/").map_err(|error| error.to_string())?;
        copy(&library, &root.join(place))?;
    }
    fs::create_dir_all(root.join("etc")).map_err(|error| error.to_string())?;
    fs::write(root.join("etc/passwd"), USERS).map_err(|error| error.to_string())?;
    // NVIDIA's hook enters the folder of the driver's libraries into a cache that is there, and makes none.
    call(Command::new("/sbin/ldconfig").arg("-r").arg(&root))?;
    let version = env!("CARGO_PKG_VERSION");
    call(
        Command::new(builder)
            .args(["build", "--quiet", "--file"])
            .arg(workspace.join("Containerfile"))
            .arg(format!("--build-arg=VERSION={version}"))
            .arg(format!("--build-arg=REVISION={}", revision(&workspace)))
            .arg(format!("--tag={}:{version}", options.name))
            .arg(format!("--tag={}:latest", options.name))
            .arg(&context),
    )?;
    println!("{}:{version}, {} KiB of files", options.name, size(&root)? >> 10);
    Ok(())
}

/// The loader and the libraries that a program needs, where they are on this machine.
fn linked(program: &Path) -> Result<Vec<PathBuf>, String> {
    let output = Command::new("ldd").arg(program).output().map_err(|error| format!("ldd: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() || text.contains("not found") {
        return Err(format!("{}: {text}{}", program.display(), String::from_utf8_lossy(&output.stderr)));
    }
    // `libc.so.6 => /lib/… (0x…)`, and the loader by its path alone.
    Ok(text
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(PathBuf::from)
        .collect())
}

/// The libraries that NVIDIA's need, beside the C library among these.
fn for_nvidia(linked: &BTreeSet<PathBuf>) -> Result<Vec<PathBuf>, String> {
    let libc = linked.iter().find(|library| library.ends_with("libc.so.6"));
    let libc = libc.ok_or("the programs link no libc.so.6, which NVIDIA's libraries need")?;
    let beside = |name: &&str| {
        let library = libc.with_file_name(name);
        if library.is_file() {
            Ok(library)
        } else {
            Err(format!("{}: there is no such file, and NVIDIA's libraries need it", library.display()))
        }
    };
    FOR_NVIDIA.iter().map(beside).collect()
}

fn copy(from: &Path, to: &Path) -> Result<(), String> {
    let describe = |error: std::io::Error| format!("{}: {error}", from.display());
    fs::create_dir_all(to.parent().unwrap_or(to)).map_err(describe)?;
    fs::copy(from, to).map(|_| ()).map_err(describe)
}

fn revision(workspace: &Path) -> String {
    let output = Command::new("git").args(["rev-parse", "HEAD"]).current_dir(workspace).output();
    let output = output.ok().filter(|output| output.status.success());
    output.map_or_else(
        || "unknown".to_owned(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    )
}

/// Bytes of all files in a folder.
fn size(folder: &Path) -> Result<u64, String> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder).map_err(|error| error.to_string())? {
        let entry = entry.map_err(|error| error.to_string())?;
        let metadata = entry.metadata().map_err(|error| error.to_string())?;
        bytes += if metadata.is_dir() { size(&entry.path())? } else { metadata.len() };
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_has_what_nvidias_libraries_need() {
        let folder = std::env::temp_dir().join(format!("nvshare-image-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let needed = ["libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1"];
        let needed = needed.map(|name| folder.join(name));
        needed.iter().for_each(|library| fs::write(library, "").unwrap());
        let linked = BTreeSet::from([PathBuf::from("/lib64/ld-linux-x86-64.so.2"), folder.join("libc.so.6")]);
        assert_eq!(for_nvidia(&linked), Ok(needed.to_vec()));

        let missing = folder.join("librt.so.1");
        fs::remove_file(&missing).unwrap();
        let told = for_nvidia(&linked).unwrap_err();
        assert!(told.starts_with(&missing.display().to_string()), "{told}");
        assert!(for_nvidia(&BTreeSet::new()).is_err());
        fs::remove_dir_all(&folder).unwrap();
    }
}
