//! Thunks in front of NVML's functions that have no hook, for a program whose process may go off the card.
//!
//! NVML has hundreds of functions, and gets more. So the thunks are a pool: each address that the program finds gets the next one. If
//! there is none left, the program gets the address itself, and its process stays on the card ([`door::pass_by`]).
//!
//! The driver's lock waits for calls of the driver. That it waits for calls of NVML is not known. So a thunk of NVML does not jump, as
//! those of the driver do: it calls, and the call is counted at the door.
//!
//! The driver must not wait here for its own way back. Calls by the library's threads do not wait at the door, and these make the
//! checkpoint. Calls from inside one that is counted do not wait either. A call from inside a thunk of the driver would wait, and so would
//! one by a thread of the driver's own. No such call is known: on a card, PyTorch programs slept and came back before they loaded NVML.
//! One that waits before the checkpoint keeps the process on the card. A later one has the session bring it back.
//!
//! To load NVML and to look its functions up needs no GPU, so neither waits.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::{FUNCTION_NOT_FOUND, Hook, at_door, hooked};
use crate::process::config;
use crate::work::gate::door;

/// A thunk, and the function that it stands before: null until it is handed out.
struct Thunk {
    code: Hook,
    real: AtomicPtr<c_void>,
}

const COLUMNS: usize = 16;

macro_rules! pool {
    ($($row:literal)*) => {
        [$(
            new::<$row, 0>(), new::<$row, 1>(), new::<$row, 2>(), new::<$row, 3>(),
            new::<$row, 4>(), new::<$row, 5>(), new::<$row, 6>(), new::<$row, 7>(),
            new::<$row, 8>(), new::<$row, 9>(), new::<$row, 10>(), new::<$row, 11>(),
            new::<$row, 12>(), new::<$row, 13>(), new::<$row, 14>(), new::<$row, 15>(),
        )*]
    };
}

/// More than the functions of NVML 580, which are about 400.
static POOL: [Thunk; 32 * COLUMNS] =
    pool!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31);

const fn new<const ROW: usize, const COLUMN: usize>() -> Thunk {
    Thunk { code: Hook(thunk::<ROW, COLUMN> as *mut c_void), real: AtomicPtr::new(ptr::null_mut()) }
}

/// All of NVML's functions have this form: integers and pointers, at most six, and an integer or a pointer as the answer. Two more are
/// handed on, for functions to come: what a caller did not pass is read and not used.
type Function = unsafe extern "C-unwind" fn(usize, usize, usize, usize, usize, usize, usize, usize) -> usize;

/// # Safety
/// As for NVML's function.
#[allow(clippy::too_many_arguments, reason = "registers")]
unsafe extern "C-unwind" fn thunk<const ROW: usize, const COLUMN: usize>(
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
    g: usize,
    h: usize,
) -> usize {
    // SAFETY: the caller's arguments.
    unsafe { call(ROW * COLUMNS + COLUMN, [a, b, c, d, e, f, g, h]) }
}

/// The part that thunks have in common, once.
///
/// # Safety
/// The arguments are those of the function at this place of the pool.
#[inline(never)]
unsafe fn call(place: usize, [a, b, c, d, e, f, g, h]: [usize; 8]) -> usize {
    let real = POOL.get(place).map_or(ptr::null_mut(), |thunk| thunk.real.load(Ordering::Relaxed));
    if real.is_null() {
        return FUNCTION_NOT_FOUND as usize;
    }
    // SAFETY: the program found this address under the name of a function of NVML, and all of these have this form.
    let real = unsafe { std::mem::transmute::<*mut c_void, Function>(real) };
    // SAFETY: promised by the caller.
    at_door(|| unsafe { real(a, b, c, d, e, f, g, h) })
}

/// Returns private tables of NVML, whose functions have no thunks.
const TABLES: &[u8] = b"nvmlInternalGetExportTable";

/// Whether a function of NVML without a hook gets a thunk in this process.
pub(in super::super) fn has_thunk(name: &[u8]) -> bool {
    is_function(name) && config::sleeps() && hooked(name).is_none()
}

fn is_function(name: &[u8]) -> bool {
    name.strip_prefix(b"nvml").and_then(<[u8]>::first).is_some_and(u8::is_ascii_uppercase)
}

/// The thunk for a function that was found under this name; the function itself if it gets none.
pub(super) fn swap(found: *mut c_void, name: &[u8]) -> *mut c_void {
    let thunk = if name == TABLES { None } else { thunk_for(found) };
    thunk.unwrap_or_else(|| {
        door::pass_by(name);
        found
    })
}

/// The thunk of a function. It is the same one each time.
fn thunk_for(found: *mut c_void) -> Option<*mut c_void> {
    let is_its = |thunk: &&Thunk| {
        let real = &thunk.real;
        let taken = real.compare_exchange(ptr::null_mut(), found, Ordering::Relaxed, Ordering::Relaxed);
        taken.is_ok() || taken == Err(found)
    };
    POOL.iter().find(is_its).map(|thunk| thunk.code.0)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn functions_of_nvml_are_known_by_their_names() {
        for (name, is) in [
            ("nvmlInit_v2", true),
            ("nvmlDeviceGetIndex", true),
            ("nvml", false),
            ("nvml_init", false),
            ("cuInit", false),
        ] {
            assert_eq!(is_function(name.as_bytes()), is, "{name}");
            assert!(!has_thunk(name.as_bytes()), "this process does not sleep");
        }
    }

    #[test]
    fn each_function_has_a_thunk_of_its_own_until_there_are_none() {
        let function = |number: usize| ptr::without_provenance_mut(number + 1);
        let thunks: HashSet<_> = (0..POOL.len()).filter_map(|number| thunk_for(function(number))).collect();
        assert_eq!(thunks.len(), POOL.len());
        assert_eq!(thunk_for(function(7)), POOL.get(7).map(|thunk| thunk.code.0));
        assert_eq!(thunk_for(function(POOL.len())), None);
    }
}
