//! `cuInit`, the first function that a program calls.

use std::ffi::c_uint;
use std::sync::Once;

use super::nvml;
use crate::driver::functions::signatures;
use crate::driver::types::CUresult;
use crate::lookup::{self, Table};
use crate::memory::sleep;
use crate::process::{config, lifecycle};

/// Fails if the environment has a limit that cannot be parsed, before the program can allocate anything.
///
/// # Safety
/// As for the driver's function.
pub(crate) unsafe fn cu_init(real: signatures::cuInit, flags: c_uint, table: &'static Table) -> CUresult {
    if config::get().is_err() {
        return CUresult::INVALID_VALUE;
    }
    if config::sleeps() {
        sleep::prepare(Box::new(move || linked_past(table)));
    }
    // SAFETY: the caller's argument.
    let result = unsafe { real(flags) };
    if result == CUresult::SUCCESS {
        lifecycle::watch_exit();
        static LOOK: Once = Once::new();
        LOOK.call_once(|| lookup::warn_of_linked(table));
    }
    result
}

/// The functions that loaded objects are linked to, and whose calls do not look at the door.
fn linked_past(table: &'static Table) -> Vec<String> {
    let is_like = |name: &str| lookup::is_of_driver(name) || nvml::unhooked::has_thunk(name.as_bytes());
    lookup::linked(is_like, |needed| {
        lookup::is_past(table, needed) || nvml::unhooked::has_thunk(needed.name.as_bytes())
    })
}
