//! Which hook stands for a function of the driver that the program looks up.
//!
//! Every address that the driver's own look-up returns is the address of an exported symbol. So the driver decides about
//! versions and flags, and the library swaps its answer by address. The library needs no table of versions.

pub(crate) mod get_proc_address;

use std::collections::{BTreeSet, HashSet};
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use nvshare_proto::MemoryMode;

use crate::driver::functions;
use crate::process::elf::{self, Needed};
use crate::process::{config, counters, log};

/// The driver's library: a part of its path.
const DRIVER: &str = "/libcuda.so";

/// A function of the driver that has a hook.
#[derive(Debug)]
pub(crate) struct Hook {
    /// The exported name.
    pub(crate) name: &'static str,
    /// The hook's address.
    pub(crate) address: HookAddress,
    /// The driver's own.
    pub(crate) real: &'static AtomicPtr<()>,
}

/// The address of a hook.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HookAddress(pub(crate) *const ());

// SAFETY: the address of a function, which is code.
unsafe impl Send for HookAddress {}
// SAFETY: as above.
unsafe impl Sync for HookAddress {}

/// Every function of the driver that is known.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) hooks: &'static [Hook],
    /// Names of functions without a hook.
    pub(crate) without_hook: &'static [&'static str],
    /// The thunk of each of these, with a place for the driver's own.
    pub(crate) thunks: &'static [Hook],
    /// Whether a function without a hook is one that the program reaches through its thunk, if the process may go off the card.
    pub(crate) has_thunk: fn(&str) -> bool,
}

impl Table {
    /// The names of all functions.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.hooks.iter().map(|hook| hook.name).chain(self.without_hook.iter().copied())
    }

    /// The thunks that this process uses.
    fn thunks_in_use(&self) -> impl Iterator<Item = &'static Hook> {
        let all: &'static [Hook] = if config::sleeps() { self.thunks } else { &[] };
        let has_thunk = self.has_thunk;
        all.iter().filter(move |thunk| has_thunk(thunk.name))
    }
}

/// A value that is computed once, or by several threads at the same time. None waits for another: the one may wait for the loader's lock,
/// which the other has.
fn computed<T>(cell: &'static OnceLock<T>, compute: impl FnOnce() -> T) -> &'static T {
    cell.get().unwrap_or_else(|| {
        let value = compute();
        cell.get_or_init(|| value)
    })
}

/// Whether the library has something to put in the place of a function.
pub(crate) fn is_hooked(table: &'static Table, name: &str) -> bool {
    static NAMES: OnceLock<Vec<&str>> = OnceLock::new();
    let names = computed(&NAMES, || {
        let mut names: Vec<&str> =
            table.hooks.iter().chain(table.thunks_in_use()).map(|hook| hook.name).collect();
        names.sort_unstable();
        names
    });
    names.binary_search(&name).is_ok()
}

/// Whether an object's calls of a function do not look at the door. Nothing stands for the function, or its address is the driver's own.
///
/// This does not take the lock of `dlopen`, as `dlsym` would. A thread that has it may wait at the gate for the one that asks.
pub(crate) fn is_past(table: &'static Table, needed: &Needed) -> bool {
    let name = needed.name.as_str();
    if is_named(table, name) {
        return elf::is_in_loaded(needed.bound_to, DRIVER);
    }
    let is_in_driver = |name: CString| !elf::find_in_loaded(&name, &[DRIVER]).is_null();
    is_of_driver(name) && CString::new(name).is_ok_and(is_in_driver)
}

/// The functions that loaded objects are linked to, as far as `is_it` says, each once. Only names that are `like` them are asked about:
/// objects have hundreds of thousands of others.
pub(crate) fn linked(like: fn(&str) -> bool, is_it: impl Fn(&Needed) -> bool) -> Vec<String> {
    let needed = elf::needed_in_loaded(like).into_iter().filter(is_it);
    needed.map(|needed| needed.name).collect::<BTreeSet<_>>().into_iter().collect()
}

/// Whether a function has a hook.
pub(crate) fn has_hook(table: &Table, name: &str) -> bool {
    table.hooks.iter().any(|hook| hook.name == name)
}

/// Whether a driver is loaded. The loader is asked no more once it is open: that takes a lock that a forked child may find held for ever.
fn is_driver_loaded() -> bool {
    functions::is_open() || elf::is_loaded(DRIVER)
}

/// The driver's own function, if a driver is loaded that has it; else null.
pub(crate) fn own_if_loaded(name: &[u8]) -> *mut c_void {
    let name = std::str::from_utf8(name).unwrap_or_default();
    if is_driver_loaded() && functions::open() { functions::exported(name) } else { ptr::null_mut() }
}

/// Whether the driver that is loaded lacks a function, or none is loaded: without the library, the program would not find it.
pub(crate) fn is_absent(name: &[u8]) -> bool {
    let name = std::str::from_utf8(name).unwrap_or_default();
    !is_driver_loaded() || functions::open() && functions::exported(name).is_null()
}

/// Whether `found` is the address of the hook, or the thunk, with this name, and not of the driver's function.
pub(crate) fn is_hook_of(table: &Table, found: *mut c_void, name: &[u8]) -> bool {
    let hook = table.hooks.iter().chain(table.thunks).find(|hook| hook.name.as_bytes() == name);
    hook.is_some_and(|hook| hook.address.0.cast::<c_void>() == found.cast_const())
}

/// The hook for an address of the driver that was found under a name; the address itself if there is no hook.
///
/// # Safety
/// The name is a C string.
pub(crate) unsafe fn swap(table: &Table, found: *mut c_void, name: *const c_char) -> *mut c_void {
    if found.is_null() {
        return found;
    }
    // SAFETY: promised by the caller.
    let name = unsafe { CStr::from_ptr(name) }.to_str().unwrap_or_default();
    hook_for(table, found, |of| of == name || base(of) == base(name)).unwrap_or(found)
}

/// The hook, or the thunk in use, for an address of the driver. A linker may place several functions at one address; `is_meant` then chooses by
/// name.
fn hook_for(table: &Table, address: *mut c_void, is_meant: impl Fn(&str) -> bool) -> Option<*mut c_void> {
    /// The driver's address, the name and the hook's address, sorted by the driver's address.
    static SWAPS: OnceLock<Vec<(usize, &'static str, usize)>> = OnceLock::new();
    // The driver's own initialisers get the driver's own functions.
    if !functions::open() {
        return None;
    }
    let swaps = computed(&SWAPS, || {
        let swap = |hook: &'static Hook, real: *mut ()| {
            (!real.is_null()).then_some((real as usize, hook.name, hook.address.0 as usize))
        };
        let hooks = table.hooks.iter().filter_map(|hook| swap(hook, hook.real.load(Ordering::Acquire)));
        let thunks = table.thunks_in_use().filter_map(|thunk| {
            let real = functions::exported(thunk.name).cast();
            // A thunk that was called before goes where its caller was linked to.
            let _ = thunk.real.compare_exchange(ptr::null_mut(), real, Ordering::AcqRel, Ordering::Acquire);
            swap(thunk, real)
        });
        let mut swaps: Vec<_> = hooks.chain(thunks).collect();
        swaps.sort_unstable();
        swaps
    });
    let first = swaps.partition_point(|&(real, ..)| real < address as usize);
    let here = || swaps.iter().skip(first).take_while(|(real, ..)| *real == address as usize);
    let meant = here().find(|(_, name, _)| is_meant(name)).or_else(|| here().next());
    meant.map(|&(.., hook)| hook as *mut c_void)
}

/// A function of the driver that the table does not name: it is newer than the library. Returns whether the program is not to have it.
///
/// Work that it submits passes no gate, and a handle or an address that the library stands for could reach the driver. Where
/// the library maps memory, that could end the program or spoil its data. So there it is refused, as by a driver that does not
/// have it.
pub(crate) fn refuses(table: &Table, found: *mut c_void, name: &str) -> bool {
    if !is_unknown(table, found) {
        return false;
    }
    let refuses = config::get().is_ok_and(|config| config.memory == MemoryMode::Swap);
    counters::unknown_entry_point(name, refuses);
    refuses
}

/// Whether an address is that of no function of the table.
fn is_unknown(table: &Table, address: *mut c_void) -> bool {
    static KNOWN: OnceLock<HashSet<usize>> = OnceLock::new();
    // The driver's own initialisers get the driver's own functions.
    if !functions::open() {
        return false;
    }
    // A driver that calls itself by its exported names finds the hooks and the thunks.
    let hooks = table.hooks.iter().chain(table.thunks).map(|hook| hook.address.0 as usize);
    let known = computed(&KNOWN, || {
        table.names().map(|name| functions::exported(name) as usize).chain(hooks).collect()
    });
    !known.contains(&(address as usize))
}

/// Whether a name is that of a function which the loaded driver exports and the table does not name.
pub(crate) fn is_newer(table: &Table, name: &str) -> bool {
    is_of_driver(name)
        && !is_named(table, name)
        && is_driver_loaded()
        && functions::open()
        && !functions::exported(name).is_null()
}

/// Whether what was found under a name is a function of the driver, and one that the program is [not to have](refuses).
pub(crate) fn is_refused(table: &Table, found: *mut c_void, name: &[u8]) -> bool {
    let name = std::str::from_utf8(name).unwrap_or_default();
    !found.is_null()
        && is_newer(table, name)
        && functions::exported(name) == found
        && refuses(table, found, name)
}

/// Warns of functions that the table does not name and that loaded objects are linked to: these cannot be refused.
pub(crate) fn warn_of_linked(table: &Table) {
    let linked = linked(is_of_driver, |needed| is_newer(table, &needed.name));
    if !linked.is_empty() {
        log::warn(format_args!(
            "the program is linked to functions of the driver that are newer than this library, and work that they submit passes no gate: {}",
            linked.join(", ")
        ));
    }
}

/// Whether a name looks like one of the driver's: `cudnn…` and `cublas…` do not.
pub(crate) fn is_of_driver(name: &str) -> bool {
    name.strip_prefix("cu").is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_uppercase()))
}

/// Whether the table names a function. Then this library exports the name.
pub(crate) fn is_named(table: &Table, name: &str) -> bool {
    static NAMES: OnceLock<HashSet<&str>> = OnceLock::new();
    NAMES.get_or_init(|| table.names().collect()).contains(name)
}

/// A name without its version and without the suffix for per-thread default streams: `cuMemcpyHtoD` for `cuMemcpyHtoD_v2_ptds`.
fn base(name: &str) -> &str {
    let name = name.strip_suffix("_ptds").or_else(|| name.strip_suffix("_ptsz")).unwrap_or(name);
    match name.rsplit_once("_v") {
        Some((base, version)) if version.len() == 1 && version.as_bytes().iter().all(u8::is_ascii_digit) => {
            base
        }
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bases() {
        for (name, expected) in [
            ("cuMemcpyHtoD_v2_ptds", "cuMemcpyHtoD"),
            ("cuGraphLaunch_ptsz", "cuGraphLaunch"),
            ("cuCtxCreate_v4", "cuCtxCreate"),
            ("cuInit", "cuInit"),
        ] {
            assert_eq!(base(name), expected);
        }
    }
}
