//! `dlsym` and `dlvsym`: programs find the driver's functions by name through them.
//!
//! Any other name goes to the C library's look-up by a tail jump. So `RTLD_NEXT` and `RTLD_DEFAULT` mean what they mean
//! for the caller. With an ordinary function call, the C library would take this library for the caller.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr;

use super::nvml;
use super::table::TABLE;
use crate::lookup;
use crate::process::c_library;
use crate::work::gate::door;

mod shims {
    use super::*;

    /// Jumps to the C library's `dlsym`, or to [`our_dlsym`] for a name of ours.
    #[unsafe(naked)]
    #[cfg_attr(not(test), unsafe(no_mangle))]
    pub(crate) unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
        std::arch::naked_asm!(
            #[cfg(target_arch = "x86_64")]
            concat!(
                "push rdi\n",
                "push rsi\n",
                "sub rsp, 8\n",
                "call {choose}\n",
                "add rsp, 8\n",
                "pop rsi\n",
                "pop rdi\n",
                "jmp rax\n",
            ),
            #[cfg(target_arch = "aarch64")]
            concat!(
                "stp x29, x30, [sp, #-32]!\n",
                "stp x0, x1, [sp, #16]\n",
                "bl {choose}\n",
                "mov x16, x0\n",
                "ldp x0, x1, [sp, #16]\n",
                "ldp x29, x30, [sp], #32\n",
                "br x16\n",
            ),
            choose = sym choose_dlsym,
        )
    }

    /// Jumps to the C library's `dlvsym`, or to [`our_dlvsym`] for a name of ours.
    #[unsafe(naked)]
    #[cfg_attr(not(test), unsafe(no_mangle))]
    pub(crate) unsafe extern "C" fn dlvsym(
        handle: *mut c_void,
        name: *const c_char,
        version: *const c_char,
    ) -> *mut c_void {
        std::arch::naked_asm!(
            #[cfg(target_arch = "x86_64")]
            concat!(
                "push rdi\n",
                "push rsi\n",
                "push rdx\n",
                "call {choose}\n",
                "pop rdx\n",
                "pop rsi\n",
                "pop rdi\n",
                "jmp rax\n",
            ),
            #[cfg(target_arch = "aarch64")]
            concat!(
                "stp x29, x30, [sp, #-48]!\n",
                "stp x0, x1, [sp, #16]\n",
                "str x2, [sp, #32]\n",
                "bl {choose}\n",
                "mov x16, x0\n",
                "ldr x2, [sp, #32]\n",
                "ldp x0, x1, [sp, #16]\n",
                "ldp x29, x30, [sp], #48\n",
                "br x16\n",
            ),
            choose = sym choose_dlvsym,
        )
    }
}

/// The function that [`shims::dlsym`] jumps to.
unsafe extern "C" fn choose_dlsym(handle: *mut c_void, name: *const c_char) -> *const c_void {
    // SAFETY: the program's argument to `dlsym`: null or a C string.
    if unsafe { is_ours(handle, name) } { our_dlsym as *const c_void } else { c_library::DLSYM.address() }
}

unsafe extern "C" fn choose_dlvsym(handle: *mut c_void, name: *const c_char) -> *const c_void {
    // SAFETY: the program's argument to `dlvsym`: null or a C string.
    if unsafe { is_ours(handle, name) } { our_dlvsym as *const c_void } else { c_library::DLVSYM.address() }
}

/// Whether a name belongs to a function of the driver, or to a look-up function itself. Only exact names count: `cudnn…` and `cublas…` are
/// not the driver's.
unsafe fn is_ours(handle: *mut c_void, name: *const c_char) -> bool {
    if name.is_null() {
        return false;
    }
    // SAFETY: a C string; each byte is read only while the one before it is not its end.
    let looks_like = unsafe {
        *name as u8 == b'c' && *name.add(1) as u8 == b'u' && (*name.add(2) as u8).is_ascii_uppercase()
    };
    if !looks_like {
        // SAFETY: as above.
        let first = unsafe { *name } as u8;
        if first != b'd' && first != b'n' {
            return false;
        }
        // SAFETY: a C string.
        let name = unsafe { CStr::from_ptr(name) }.to_bytes();
        if handle == libc::RTLD_NEXT && nvml::is_ours(name) {
            // A library behind this one may stand before NVML's function, and would find itself. The next one may be NVML's own.
            door::pass_by(name);
            return false;
        }
        return matches!(name, b"dlsym" | b"dlvsym") || nvml::is_ours(name);
    }
    // SAFETY: a C string.
    let name = unsafe { CStr::from_ptr(name) };
    // Other functions with such names (`cuFile…`) may be in the caller's scope alone.
    let Ok(name) = name.to_str() else { return false };
    if !lookup::is_named(&TABLE, name) {
        return lookup::is_newer(&TABLE, name);
    }
    // The next function depends on the caller, which may stand behind this library and before the driver.
    let is_callers =
        handle == libc::RTLD_NEXT && !lookup::has_hook(&TABLE, name) && !lookup::is_absent(name.as_bytes());
    // Without sleep, only hooks are in use.
    if is_callers && lookup::is_hooked(&TABLE, name) {
        door::pass_by(name.as_bytes());
    }
    !is_callers
}

unsafe extern "C" fn our_dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the caller's own arguments.
    let found = unsafe { next_of_driver(handle, name).unwrap_or_else(|| c_library::dlsym(handle, name)) };
    // SAFETY: the caller's handle, and a C string: it was looked up.
    unsafe { swap(found, handle, name) }
}

/// The driver's own function, for a caller that asks for the next one with a hook's name. To the C library, this library would be the
/// caller. A library behind this one that has such a function of its own would find that.
///
/// # Safety
/// The name is a C string.
unsafe fn next_of_driver(handle: *mut c_void, name: *const c_char) -> Option<*mut c_void> {
    // SAFETY: promised by the caller.
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    let is_hooks = || std::str::from_utf8(name).is_ok_and(|name| lookup::has_hook(&TABLE, name));
    let own = (handle == libc::RTLD_NEXT && is_hooks()).then(|| lookup::own_if_loaded(name));
    own.filter(|own| !own.is_null())
}

unsafe extern "C" fn our_dlvsym(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    // SAFETY: the caller's own arguments.
    let found = unsafe { c_library::dlvsym(handle, name, version) };
    // SAFETY: the caller's handle, and a C string: it was looked up.
    unsafe { swap(found, handle, name) }
}

/// The address that the program gets for an address that was found under a name.
///
/// A second library that has a `dlsym` of its own, and comes before this one, looks up the next `dlsym`. It gets the one of
/// this library.
///
/// # Safety
/// `found` was looked up with this handle and name.
unsafe fn swap(found: *mut c_void, handle: *mut c_void, name: *const c_char) -> *mut c_void {
    if c_library::DLSYM.is_at(found) {
        shims::dlsym as *mut c_void
    } else if c_library::DLVSYM.is_at(found) {
        shims::dlvsym as *mut c_void
    } else {
        // SAFETY: promised by the caller.
        let text = unsafe { CStr::from_ptr(name) }.to_bytes();
        match (!found.is_null()).then(|| nvml::swap(found, text)).flatten() {
            Some(hook) => hook,
            // Only this library has the symbol: without it, the program would find nothing. The look-up that fails comes last: its
            // message is the program's.
            // SAFETY: a pseudo-handle, and the caller's name.
            None if lookup::is_hook_of(&TABLE, found, text)
                && lookup::is_absent(text)
                && unsafe { c_library::dlsym(libc::RTLD_NEXT, name) }.is_null() =>
            {
                ptr::null_mut()
            }
            // SAFETY: promised by the caller.
            None if lookup::is_refused(&TABLE, found, text) => unsafe { not_found(handle, text) },
            // SAFETY: promised by the caller.
            None => unsafe { lookup::swap(&TABLE, found, name) },
        }
    }
}

/// Finds nothing, as a look-up of a name that is not there, and leaves a message that names it. Programs read `dlerror` after each null.
///
/// # Safety
/// The handle is one that `dlsym` takes.
unsafe fn not_found(handle: *mut c_void, name: &[u8]) -> *mut c_void {
    let refused = [name, b" (newer than nvshare)"].concat();
    // No function has a name with spaces.
    // SAFETY: promised by the caller.
    CString::new(refused).map_or(ptr::null_mut(), |name| unsafe { c_library::dlsym(handle, name.as_ptr()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shim_forwards_what_is_not_ours() {
        // SAFETY: a well-known symbol.
        let found = unsafe { shims::dlsym(libc::RTLD_DEFAULT, c"malloc".as_ptr()) };
        assert_eq!(found, libc::malloc as *mut c_void);
        // SAFETY: as above.
        let found = unsafe { shims::dlvsym(libc::RTLD_DEFAULT, c"malloc".as_ptr(), c"GLIBC_2.2.5".as_ptr()) };
        if cfg!(target_arch = "x86_64") {
            assert_eq!(found, libc::malloc as *mut c_void);
        }
    }
}
