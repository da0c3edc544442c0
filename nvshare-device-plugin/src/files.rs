//! Files that others read while they change.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Makes a file, which everybody may read, have these contents. One that has others is replaced by a rename in its folder, so nobody sees a
/// part of it, and programs that have the old one mapped keep it. Returns whether it was written.
///
/// # Errors
/// The file cannot be written, with its path.
pub fn replace(path: &Path, contents: &[u8]) -> Result<bool, String> {
    write(path, contents).map_err(|error| format!("{}: {error}", path.display()))
}

/// Makes a file be gone.
///
/// # Errors
/// The file is there and cannot be removed, with its path.
pub fn remove(path: &Path) -> Result<(), String> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(format!("{}: {error}", path.display())),
        _ => Ok(()),
    }
}

/// Where a file is written before it is renamed. It is left behind where that was cut off.
#[must_use]
pub fn unfinished(path: &Path) -> PathBuf {
    // Engines read what ends in .json or .yaml; this name does not. Nor does `nvshare-ctl install-library` use it, perhaps just now.
    path.with_file_name(format!(".{}.device-plugin", path.file_name().unwrap_or_default().to_string_lossy()))
}

fn write(path: &Path, contents: &[u8]) -> io::Result<bool> {
    if fs::read(path).is_ok_and(|there| there == contents) {
        return Ok(false);
    }
    let folder = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder)?;
    let new = unfinished(path);
    let _ = fs::remove_file(&new);
    let mut file = OpenOptions::new().write(true).create_new(true).open(&new)?;
    file.write_all(contents)?;
    // The process's umask must not decide who may read it.
    file.set_permissions(Permissions::from_mode(0o644))?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    // The name is there after a crash as well.
    File::open(folder)?.sync_all()?;
    Ok(true)
}
