//! The unwinder: the library uses the one that the process has loaded.
//!
//! The program may unwind through the library's frames: by cancelling a thread inside a driver call, or by an exception. Rust's
//! personality routine then releases what the frames hold, and asks the unwinder for its context. This has to be the unwinder
//! that is running: a second one, linked into this library, would misread the context. The library cannot depend on
//! `libgcc_s.so.1` either, as not every container has it. So the names below, which are hidden from the rest of the process,
//! jump to the functions of the loaded `libgcc_s.so.1`. The C library loads it before it cancels a thread.
//!
//! If it is not loaded, the functions return zero. The personality routine then finds nothing to do in the library's frames,
//! and unwinding continues. A panic would abort; the library has none.

/// Runs `undo` if the frame that holds it is unwound, and does nothing after [`OnUnwind::done`].
#[derive(Debug)]
pub(crate) struct OnUnwind<F: FnMut()>(F);

impl<F: FnMut()> OnUnwind<F> {
    pub(crate) fn new(undo: F) -> Self {
        Self(undo)
    }

    /// The call returned; there is nothing to undo.
    pub(crate) fn done(self) {
        std::mem::forget(self);
    }
}

impl<F: FnMut()> Drop for OnUnwind<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

// A test program has an unwinder of its own, and panics.
#[cfg(not(test))]
mod names {
    use std::ffi::{CStr, c_void};
    use std::ptr;
    use std::sync::atomic::{AtomicPtr, Ordering};

    use crate::process::elf;

    /// Functions of the Itanium C++ ABI's unwinder that Rust's runtime calls; none has more than three arguments.
    macro_rules! unwinder {
        ($($index:literal $name:literal)*) => {
            const NAMES: &[&str] = &[$( concat!($name, "\0") ),*];
            static FOUND: [AtomicPtr<c_void>; NAMES.len()] = [const { AtomicPtr::new(ptr::null_mut()) }; NAMES.len()];

            $( #[cfg(target_arch = "x86_64")]
            std::arch::global_asm!(
                concat!(".hidden ", $name),
                concat!(".globl ", $name),
                concat!(".type ", $name, ", @function"),
                concat!($name, ":"),
                "push rdi",
                "push rsi",
                "push rdx",
                concat!("mov edi, ", $index),
                "call {find}",
                "pop rdx",
                "pop rsi",
                "pop rdi",
                "jmp rax",
                concat!(".size ", $name, ", . - ", $name),
                find = sym find,
            );

            #[cfg(target_arch = "aarch64")]
            std::arch::global_asm!(
                concat!(".hidden ", $name),
                concat!(".globl ", $name),
                concat!(".type ", $name, ", @function"),
                concat!($name, ":"),
                "stp x29, x30, [sp, #-48]!",
                "stp x0, x1, [sp, #16]",
                "str x2, [sp, #32]",
                concat!("mov x0, #", $index),
                "bl {find}",
                "mov x16, x0",
                "ldr x2, [sp, #32]",
                "ldp x0, x1, [sp, #16]",
                "ldp x29, x30, [sp], #48",
                "br x16",
                concat!(".size ", $name, ", . - ", $name),
                find = sym find,
            ); )*
        };
    }

    unwinder! {
        0 "_Unwind_Backtrace"
        1 "_Unwind_DeleteException"
        2 "_Unwind_FindEnclosingFunction"
        3 "_Unwind_GetCFA"
        4 "_Unwind_GetDataRelBase"
        5 "_Unwind_GetIP"
        6 "_Unwind_GetIPInfo"
        7 "_Unwind_GetLanguageSpecificData"
        8 "_Unwind_GetRegionStart"
        9 "_Unwind_GetTextRelBase"
        10 "_Unwind_RaiseException"
        11 "_Unwind_Resume"
        12 "_Unwind_SetGR"
        13 "_Unwind_SetIP"
    }

    /// The address that one of the names jumps to.
    extern "C" fn find(index: usize) -> *const c_void {
        let (Some(name), Some(known)) = (NAMES.get(index), FOUND.get(index)) else {
            return absent as *const c_void;
        };
        let mut found = known.load(Ordering::Relaxed);
        if found.is_null() {
            let name = CStr::from_bytes_with_nul(name.as_bytes()).unwrap_or_default();
            found = elf::find_in_loaded(name, &["/libgcc_s.so.1"]).cast_mut();
            known.store(found, Ordering::Relaxed);
        }
        if found.is_null() { absent as *const c_void } else { found }
    }

    extern "C" fn absent() -> usize {
        0
    }
}
