//! The C library's own `dlsym` and `dlvsym`.
//!
//! `dlsym` itself cannot find them, since the process's `dlsym` is the library's. So they are read from the C library's own
//! symbol table.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::elf;

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;

/// One of the C library's look-up functions.
#[derive(Debug)]
pub(crate) struct LookUp {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
    /// Stands for the function where the C library has none.
    missing: *const c_void,
}

// SAFETY: the address of a function, which is code.
unsafe impl Sync for LookUp {}

/// `dlsym`.
pub(crate) static DLSYM: LookUp = LookUp::new(c"dlsym", missing_dlsym as *const c_void);
/// `dlvsym`.
pub(crate) static DLVSYM: LookUp = LookUp::new(c"dlvsym", missing_dlvsym as *const c_void);

impl LookUp {
    const fn new(name: &'static CStr, missing: *const c_void) -> Self {
        Self { name, address: AtomicPtr::new(ptr::null_mut()), missing }
    }

    /// The address of the function, or of its stand-in.
    pub(crate) fn address(&self) -> *const c_void {
        let found = self.find();
        if found.is_null() { self.missing } else { found }
    }

    /// Whether `address` is the address of the C library's function.
    pub(crate) fn is_at(&self, address: *const c_void) -> bool {
        !address.is_null() && address == self.find()
    }

    fn find(&self) -> *const c_void {
        let known = self.address.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        // The look-up functions are in libc since glibc 2.34, and were in libdl before.
        let found = elf::find_in_loaded(self.name, &["/libc.so.6", "/libdl.so.2"]);
        self.address.store(found.cast_mut(), Ordering::Relaxed);
        found
    }
}

unsafe extern "C" fn missing_dlsym(_: *mut c_void, _: *const c_char) -> *mut c_void {
    ptr::null_mut()
}

unsafe extern "C" fn missing_dlvsym(_: *mut c_void, _: *const c_char, _: *const c_char) -> *mut c_void {
    ptr::null_mut()
}

/// The C library's own `dlsym`. It finds no hook, unless this library is in the scope of `handle`.
///
/// # Safety
/// As for `dlsym`.
pub(crate) unsafe fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: `dlsym` of the C library, or our stand-in of the same signature.
    let real = unsafe { std::mem::transmute::<*const c_void, Dlsym>(DLSYM.address()) };
    // SAFETY: promised by the caller.
    unsafe { real(handle, name) }
}

/// The same for the library itself: if there is no such symbol, the program's next `dlerror` does not tell of it.
///
/// # Safety
/// As for `dlsym`.
pub(crate) unsafe fn dlsym_quietly(handle: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: promised by the caller.
    let found = unsafe { dlsym(handle, name.as_ptr()) };
    if found.is_null() {
        // SAFETY: it has no arguments.
        unsafe { libc::dlerror() };
    }
    found
}

/// The C library's own `dlvsym`.
///
/// # Safety
/// As for `dlvsym`.
pub(crate) unsafe fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void {
    // SAFETY: `dlvsym` of the C library, or our stand-in of the same signature.
    let real = unsafe { std::mem::transmute::<*const c_void, Dlvsym>(DLVSYM.address()) };
    // SAFETY: promised by the caller.
    unsafe { real(handle, name, version) }
}
