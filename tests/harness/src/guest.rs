//! Guests: small programs in C that do what host programs do (`tests/guests/`).

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use crate::World;

/// Compiles a guest, or a library that a guest opens, once in a process. Returns its path.
///
/// # Panics
/// When there is no C compiler, or it reports an error.
#[must_use]
pub fn guest(name: &str, shared: bool) -> PathBuf {
    static BUILT: Mutex<Option<HashMap<(String, bool), PathBuf>>> = Mutex::new(None);
    // Another test must not compile a guest while this one runs it.
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    let built = built.get_or_insert_default();
    built.entry((name.to_owned(), shared)).or_insert_with(|| compile(name, shared)).clone()
}

impl World {
    /// Compiles a guest that is linked to this world's driver. `how`: further words for the compiler.
    ///
    /// # Panics
    /// As [`guest`].
    pub fn link_to_driver(&self, out: &Path, source: &str, how: &[&str]) {
        let mut compile = Command::new("cc");
        compile
            .args(["-std=gnu11", "-w", "-pthread"])
            .args(how)
            .arg("-o")
            .arg(out)
            .arg(guests().join(source));
        compile.arg("-L").arg(self.dir().join("lib")).arg("-l:libcuda.so.1");
        assert!(compile.status().expect("a C compiler").success(), "{source}");
    }
}

fn guests() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../guests")
}

fn compile(name: &str, shared: bool) -> PathBuf {
    let built = std::env::temp_dir().join(format!("nvshare-guests-{}", std::process::id()));
    std::fs::create_dir_all(&built).expect("a folder");
    let out = built.join(if shared { format!("{name}.so") } else { name.to_owned() });
    // The driver's functions are called without prototypes, as old C allows.
    let mut compile = Command::new("cc");
    compile.args(["-std=gnu11", "-O1", "-w", "-pthread", "-o"]).arg(&out);
    if shared {
        compile.args(["-shared", "-fPIC", "-fexceptions"]);
    }
    let status = compile.arg(guests().join(format!("{name}.c"))).arg("-ldl").status().expect("a C compiler");
    assert!(status.success(), "{name}.c");
    out
}
