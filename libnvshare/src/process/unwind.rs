//! The unwinder: who unwinds has brought it.
//!
//! What unwinds through frames of ours is the host's doing: a thread that is cancelled while the driver works for it,
//! an exception. Rust's personality routine, which then releases what our frames hold, asks the unwinder for its
//! context, and that has to be the very unwinder that unwinds: a second one, linked into this library, would read a
//! context that is not its own. To need `libgcc_s.so.1` would not do either, for not every container has it. So these
//! names, hidden from the rest of the process, stand for the functions of the `libgcc_s.so.1` that is loaded; glibc loads
//! it before it cancels a thread.
//!
//! Where it is not loaded they answer zero: the personality routine then finds nothing to do in our frames and whatever
//! unwinds goes on; and a panic, of which this library has none, would abort.

/// Does something when what holds it is unwound, and nothing when it is done with.
#[derive(Debug)]
pub(crate) struct OnUnwind<F: FnMut()>(F);

impl<F: FnMut()> OnUnwind<F> {
    pub(crate) fn new(undo: F) -> Self {
        Self(undo)
    }

    /// The call came back.
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

    /// Where one of the names jumps to.
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
