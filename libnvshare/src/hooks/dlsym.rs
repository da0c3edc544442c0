//! `dlsym` and `dlvsym`: the door through which programs find the driver's functions by name.
//!
//! A name that is not ours goes to the real look-up by a tail jump, so that `RTLD_NEXT` and `RTLD_DEFAULT` mean
//! what they meant to the caller: an ordinary forwarding function would make every caller look as if it were
//! this library. The real `dlsym` itself cannot be found with `dlsym`; it is read from the C library's own symbol
//! table ([`find_in_loaded`]).

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::hooks::nvml;
use crate::lookup::get_proc_address;

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;

static REAL_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
static REAL_DLVSYM: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

#[cfg(target_arch = "x86_64")]
mod shims {
    use super::*;

    /// Jumps to the real `dlsym`, or for the driver's names to [`our_dlsym`].
    #[unsafe(naked)]
    #[cfg_attr(not(test), unsafe(no_mangle))]
    pub(crate) unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
        std::arch::naked_asm!(
            "push rdi",
            "push rsi",
            "sub rsp, 8",
            "mov rdi, rsi",
            "call {choose}",
            "add rsp, 8",
            "pop rsi",
            "pop rdi",
            "jmp rax",
            choose = sym choose_dlsym,
        )
    }

    /// Jumps to the real `dlvsym`, or for the driver's names to [`our_dlvsym`].
    #[unsafe(naked)]
    #[cfg_attr(not(test), unsafe(no_mangle))]
    pub(crate) unsafe extern "C" fn dlvsym(
        handle: *mut c_void,
        name: *const c_char,
        version: *const c_char,
    ) -> *mut c_void {
        std::arch::naked_asm!(
            "push rdi",
            "push rsi",
            "push rdx",
            "mov rdi, rsi",
            "call {choose}",
            "pop rdx",
            "pop rsi",
            "pop rdi",
            "jmp rax",
            choose = sym choose_dlvsym,
        )
    }
}

#[cfg(target_arch = "aarch64")]
mod shims {
    use super::*;

    /// Jumps to the real `dlsym`, or for the driver's names to [`our_dlsym`].
    #[unsafe(naked)]
    #[cfg_attr(not(test), unsafe(no_mangle))]
    pub(crate) unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
        std::arch::naked_asm!(
            "stp x29, x30, [sp, #-32]!",
            "stp x0, x1, [sp, #16]",
            "mov x0, x1",
            "bl {choose}",
            "mov x16, x0",
            "ldp x0, x1, [sp, #16]",
            "ldp x29, x30, [sp], #32",
            "br x16",
            choose = sym choose_dlsym,
        )
    }

    /// Jumps to the real `dlvsym`, or for the driver's names to [`our_dlvsym`].
    #[unsafe(naked)]
    #[cfg_attr(not(test), unsafe(no_mangle))]
    pub(crate) unsafe extern "C" fn dlvsym(
        handle: *mut c_void,
        name: *const c_char,
        version: *const c_char,
    ) -> *mut c_void {
        std::arch::naked_asm!(
            "stp x29, x30, [sp, #-48]!",
            "stp x0, x1, [sp, #16]",
            "str x2, [sp, #32]",
            "mov x0, x1",
            "bl {choose}",
            "mov x16, x0",
            "ldr x2, [sp, #32]",
            "ldp x0, x1, [sp, #16]",
            "ldp x29, x30, [sp], #48",
            "br x16",
            choose = sym choose_dlvsym,
        )
    }
}

/// Where the shim jumps to.
unsafe extern "C" fn choose_dlsym(name: *const c_char) -> *const c_void {
    // SAFETY: the program's argument to `dlsym`: null or a C string.
    if unsafe { is_ours(name) } {
        our_dlsym as *const c_void
    } else {
        real(&REAL_DLSYM, c"dlsym", missing_dlsym as *const c_void)
    }
}

unsafe extern "C" fn choose_dlvsym(name: *const c_char) -> *const c_void {
    // SAFETY: the program's argument to `dlvsym`: null or a C string.
    if unsafe { is_ours(name) } {
        our_dlvsym as *const c_void
    } else {
        real(&REAL_DLVSYM, c"dlvsym", missing_dlvsym as *const c_void)
    }
}

/// Whether a name is one of the driver's or NVML's that have a hook, or a look-up itself. Exact names only: `cudnn…` and
/// `cublas…` are not ours.
unsafe fn is_ours(name: *const c_char) -> bool {
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
        return matches!(name, b"dlsym" | b"dlvsym") || nvml::is_hooked(name);
    }
    // SAFETY: a C string.
    let name = unsafe { CStr::from_ptr(name) };
    name.to_str().is_ok_and(get_proc_address::is_hooked)
}

unsafe extern "C" fn our_dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the caller's own arguments.
    let found = unsafe { real_dlsym(handle, name) };
    // SAFETY: a C string: it was looked up.
    unsafe { swap(found, name) }
}

unsafe extern "C" fn our_dlvsym(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    let real = real(&REAL_DLVSYM, c"dlvsym", missing_dlvsym as *const c_void);
    // SAFETY: `dlvsym` of the C library, or our stand-in of the same signature.
    let real = unsafe { std::mem::transmute::<*const c_void, Dlvsym>(real) };
    // SAFETY: the caller's own arguments.
    let found = unsafe { real(handle, name, version) };
    // SAFETY: a C string: it was looked up.
    unsafe { swap(found, name) }
}

/// A second library that looks symbols up for the program, and stands before this one, asks for the C library's
/// `dlsym` to hand on to: it gets ours.
///
/// # Safety
/// The name is a C string.
unsafe fn swap(found: *mut c_void, name: *const c_char) -> *mut c_void {
    let is = |cache, name| found.cast_const() == real(cache, name, ptr::null()) && !found.is_null();
    if is(&REAL_DLSYM, c"dlsym") {
        shims::dlsym as *mut c_void
    } else if is(&REAL_DLVSYM, c"dlvsym") {
        shims::dlvsym as *mut c_void
    } else {
        // SAFETY: promised by the caller.
        let text = unsafe { CStr::from_ptr(name) }.to_bytes();
        match (!found.is_null()).then(|| nvml::swap(found, text)).flatten() {
            Some(hook) => hook,
            // Found in this library alone, and no driver is there: without it, the program would have found nothing.
            // SAFETY: a pseudo-handle, and the caller's name.
            None if get_proc_address::is_hook_of(found, text)
                && unsafe { real_dlsym(libc::RTLD_NEXT, name) }.is_null()
                && !is_loaded("/libcuda.so") =>
            {
                ptr::null_mut()
            }
            // SAFETY: promised by the caller.
            None => unsafe { get_proc_address::swap(found, name) },
        }
    }
}

/// The C library's own look-up, which never sees a hook unless `handle`'s scope holds this library.
///
/// # Safety
/// As for `dlsym`.
pub(crate) unsafe fn real_dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    let real = real(&REAL_DLSYM, c"dlsym", missing_dlsym as *const c_void);
    // SAFETY: `dlsym` of the C library, or our stand-in of the same signature.
    let real = unsafe { std::mem::transmute::<*const c_void, Dlsym>(real) };
    // SAFETY: promised by the caller.
    unsafe { real(handle, name) }
}

unsafe extern "C" fn missing_dlsym(_: *mut c_void, _: *const c_char) -> *mut c_void {
    ptr::null_mut()
}

unsafe extern "C" fn missing_dlvsym(_: *mut c_void, _: *const c_char, _: *const c_char) -> *mut c_void {
    ptr::null_mut()
}

fn real(cache: &AtomicPtr<c_void>, name: &'static CStr, missing: *const c_void) -> *const c_void {
    let known = cache.load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    // Since glibc 2.34 the look-up functions are in libc, before in libdl.
    let found = find_in_loaded(name, &["/libc.so.6", "/libdl.so.2"]);
    if found.is_null() {
        return missing;
    }
    cache.store(found.cast_mut(), Ordering::Relaxed);
    found
}

/// Whether a library is loaded, in whatever scope, whose path has this in it.
fn is_loaded(part: &str) -> bool {
    struct Search<'a>(&'a [u8], bool);

    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
        // SAFETY: `dl_iterate_phdr` passes a valid description and the pointer given to it below.
        let (info, search) = unsafe { (&*info, &mut *search.cast::<Search<'_>>()) };
        if !info.dlpi_name.is_null() {
            // SAFETY: the loader's name of the object, a C string.
            let path = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
            search.1 |= path.windows(search.0.len()).any(|here| here == search.0);
        }
        c_int::from(search.1)
    }

    let mut search = Search(part.as_bytes(), false);
    // SAFETY: the callback matches, and the pointer is valid for the length of the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.1
}

/// A function by name, read from the ELF tables of libraries whose paths end so and that are loaded. Calls nothing that
/// could look up a symbol, and loads nothing.
pub(crate) fn find_in_loaded(name: &CStr, libraries: &[&str]) -> *const c_void {
    struct Search<'a> {
        name: &'a CStr,
        libraries: &'a [&'a str],
        found: *const c_void,
    }

    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
        // SAFETY: `dl_iterate_phdr` passes a valid description and the pointer given to it below.
        let (info, search) = unsafe { (&*info, &mut *search.cast::<Search<'_>>()) };
        if info.dlpi_name.is_null() {
            return 0;
        }
        // SAFETY: the loader's name of the object, a C string.
        let path = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
        if !search.libraries.iter().any(|end| path.ends_with(end.as_bytes())) {
            return 0;
        }
        // SAFETY: an object that the loader has mapped, described by it.
        search.found = unsafe { find_in_object(info, search.name) };
        c_int::from(!search.found.is_null())
    }

    let mut search = Search { name, libraries, found: ptr::null() };
    // SAFETY: the callback matches, and the pointer is valid for the length of the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

const DT_NULL: i64 = 0;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;

#[repr(C)]
struct Dyn {
    tag: i64,
    value: usize,
}

/// Looks a defined symbol up in the GNU hash table of an object.
///
/// # Safety
/// `info` describes a mapped object whose dynamic section the loader has relocated, as glibc's does.
unsafe fn find_in_object(info: &libc::dl_phdr_info, name: &CStr) -> *const c_void {
    let base = info.dlpi_addr as usize;
    let (mut symbols, mut strings, mut hash) = (0usize, 0usize, 0usize);
    for i in 0..usize::from(info.dlpi_phnum) {
        // SAFETY: within the object's program headers.
        let header = unsafe { &*info.dlpi_phdr.add(i) };
        if header.p_type != libc::PT_DYNAMIC {
            continue;
        }
        let mut entry = (base + header.p_vaddr as usize) as *const Dyn;
        // SAFETY: the dynamic section is mapped and ends with DT_NULL.
        unsafe {
            while (*entry).tag != DT_NULL {
                match (*entry).tag {
                    DT_STRTAB => strings = (*entry).value,
                    DT_SYMTAB => symbols = (*entry).value,
                    DT_GNU_HASH => hash = (*entry).value,
                    _ => {}
                }
                entry = entry.add(1);
            }
        }
    }
    if symbols == 0 || strings == 0 || hash == 0 {
        return ptr::null();
    }
    let wanted = name.to_bytes().iter().fold(5381u32, |h, &c| h.wrapping_mul(33).wrapping_add(u32::from(c)));
    let header = hash as *const u32;
    // SAFETY: the layout of DT_GNU_HASH: four words, the bloom filter of 64-bit words, the buckets, the chains.
    unsafe {
        let (buckets, first, bloom) = (*header, *header.add(1), *header.add(2));
        if buckets == 0 {
            return ptr::null();
        }
        let bucket = header.add(4 + 2 * bloom as usize);
        let chain = bucket.add(buckets as usize);
        let mut index = *bucket.add((wanted % buckets) as usize);
        if index < first {
            return ptr::null();
        }
        loop {
            let link = *chain.add((index - first) as usize);
            let symbol = &*(symbols as *const libc::Elf64_Sym).add(index as usize);
            let text = CStr::from_ptr((strings + symbol.st_name as usize) as *const c_char);
            if link | 1 == wanted | 1 && symbol.st_shndx != 0 && text == name {
                return (base + symbol.st_value as usize) as *const c_void;
            }
            if link & 1 == 1 {
                return ptr::null();
            }
            index += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_c_librarys_own_look_up_is_found() {
        let libc = ["/libc.so.6", "/libdl.so.2"];
        let found = find_in_loaded(c"dlsym", &libc);
        assert!(!found.is_null());
        assert_eq!(found, libc::dlsym as *const c_void);
        assert!(find_in_loaded(c"no such symbol", &libc).is_null());
    }

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
