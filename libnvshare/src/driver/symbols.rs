//! The driver's library and the addresses of what it exports.

use std::ffi::{CString, c_void};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::process::{c_library, log};

const LIBRARY: &str = "libcuda.so.1";

/// The driver's library, which is never closed.
#[derive(Debug)]
pub(super) struct Symbols {
    handle: *mut c_void,
}

/// Loads the driver's library. Its initialisers run, which may look up symbols.
pub(super) fn load() -> Option<Symbols> {
    log::remember_standard_error();
    // SAFETY: the driver's initialisers are what the program is about to run anyway.
    match unsafe { Library::open(Some(LIBRARY), RTLD_NOW | RTLD_LOCAL) } {
        Ok(library) => Some(Symbols { handle: library.into_raw() }),
        Err(error) => {
            log::error(format_args!("{LIBRARY} cannot be opened: {error}"));
            None
        }
    }
}

impl Symbols {
    /// The address that the library exports under a name; null: none.
    pub(super) fn address(&self, name: &str) -> *mut c_void {
        let Ok(name) = CString::new(name) else { return std::ptr::null_mut() };
        // SAFETY: an open library's handle and a C string. Our own `dlsym` is not asked: it would answer with the hook.
        unsafe { c_library::dlsym(self.handle, name.as_ptr()) }
    }
}
