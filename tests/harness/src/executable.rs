use std::path::Path;
use std::process::Command;

/// Copies a file to where it is run, with the rights of a program.
///
/// Another process does that. If this one opened the copy for writing, a child that another thread forks at that moment would have it
/// open as well until it becomes another program, and the kernel runs no file that somebody can write (`ETXTBSY`).
///
/// # Panics
/// When it cannot be copied.
pub fn executable(from: &Path, to: &Path) {
    let copied = Command::new("install").args(["-m", "755"]).args([from, to]).status().expect("install");
    assert!(copied.success(), "{}: {copied}", to.display());
}
