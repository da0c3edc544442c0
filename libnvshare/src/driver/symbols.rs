//! The driver's shared library and the addresses of its symbols.

use std::ffi::{CString, c_void};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::process::{c_library, log};

const LIBRARY: &str = "libcuda.so.1";

/// The driver's library. It is never closed.
#[derive(Debug)]
pub(super) struct Symbols {
    handle: *mut c_void,
}

/// Loads the driver's library. This runs its initialisers, which may look up symbols.
pub(super) fn load() -> Option<Symbols> {
    log::remember_standard_error();
    // SAFETY: the program is about to run the driver's initialisers anyway.
    match unsafe { Library::open(Some(LIBRARY), RTLD_NOW | RTLD_LOCAL) } {
        Ok(library) => Some(Symbols { handle: library.into_raw() }),
        Err(error) => {
            log::error(format_args!("{LIBRARY} cannot be opened: {error}"));
            None
        }
    }
}

// SAFETY: the handle of a library that is never closed; any thread may look symbols up in it.
unsafe impl Send for Symbols {}
// SAFETY: as above.
unsafe impl Sync for Symbols {}

impl Symbols {
    /// The address of an exported symbol; null if there is none.
    pub(super) fn address(&self, name: &str) -> *mut c_void {
        let Ok(name) = CString::new(name) else { return std::ptr::null_mut() };
        // SAFETY: an open library's handle. The process's `dlsym` would return the hook.
        unsafe { c_library::dlsym_quietly(self.handle, &name) }
    }
}
