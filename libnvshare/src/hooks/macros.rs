//! What becomes of a row of the [table](crate::entry_points).
//!
//! - A **gated** row becomes a hook that passes the gate and calls the driver.
//! - A **prompt** row is gated as well. The driver returns from it before the work is done, but waits for managed memory: so
//!   if the pointers named allow it ([`are_prompt`](crate::hooks::pointers::are_prompt)), it becomes the stream-ordered function
//!   on the same default stream.
//! - A **handled** row becomes a hook that hands its arguments and the real function to a handler.
//! - A **called** row is a function that the library itself calls; the program gets the driver's own.
//! - A **forwarded** row is a name that is known and left alone.
//!
//! Hooks are `extern "C-unwind"` without anything to drop in the frame of the driver call: what unwinds or jumps
//! through them (a C++ exception, `pthread_cancel`, `longjmp`) finds plain frames.

use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::driver;

/// The driver's own function behind a row; null until the driver is opened, and for ever where it lacks it.
#[derive(Debug)]
pub(crate) struct Real<F> {
    address: AtomicPtr<()>,
    signature: PhantomData<F>,
}

impl<F: Copy> Real<F> {
    pub(crate) const fn new() -> Self {
        const { assert!(size_of::<F>() == size_of::<*mut ()>()) }
        Self { address: AtomicPtr::new(ptr::null_mut()), signature: PhantomData }
    }

    /// The function, if this driver has it.
    #[inline(always)]
    pub(crate) fn get(&self) -> Option<F> {
        let mut address = self.address.load(Ordering::Relaxed);
        if address.is_null() {
            address = self.after_opening();
        }
        if address.is_null() {
            return None;
        }
        // SAFETY: `F` is a function pointer (its size is checked above, and only the table names it) and the
        // address is what the driver exports under the row's name, whose signature `F` is.
        Some(unsafe { std::mem::transmute_copy::<*mut (), F>(&address) })
    }

    #[cold]
    fn after_opening(&self) -> *mut () {
        driver::open();
        self.address.load(Ordering::Acquire)
    }

    /// Where the address is kept.
    pub(crate) const fn slot(&self) -> &AtomicPtr<()> {
        &self.address
    }
}

/// A row of the table that the driver is asked for.
#[derive(Debug)]
pub(crate) struct Entry {
    /// The exported name.
    pub(crate) name: &'static str,
    /// Our function, for rows that have one.
    pub(crate) hook: Option<Hook>,
    /// The driver's.
    pub(crate) real: &'static AtomicPtr<()>,
}

/// The address of a hook.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hook(pub(crate) *const ());

// SAFETY: the address of a function, which is code.
unsafe impl Send for Hook {}
// SAFETY: as above.
unsafe impl Sync for Hook {}

/// One hook of a gated row.
macro_rules! gated_hook {
    ($name:ident, $twin:expr, ($($arg:ident : $ty:ty),*), $stream:expr) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> CUresult {
            let Some(real) = super::real::$name.get() else { return CUresult::NOT_SUPPORTED };
            // SAFETY: the stream is read from the caller's arguments as the driver itself would read it.
            #[allow(unused_unsafe, reason = "only some rows look through a pointer")]
            let stream = unsafe { $stream };
            let mark = $crate::work::gate::Mark::new();
            let pass = $crate::work::gate::enter(StreamKey::new(stream, $twin), &mark);
            // SAFETY: the caller's arguments, handed on unchanged to the function that it meant to call.
            let result = unsafe { real($($arg),*) };
            $crate::work::gate::leave(pass, &mark, result);
            result
        }
    };
}

/// One hook of a prompt row.
macro_rules! prompt_hook {
    ($name:ident, $twin:expr, ($($arg:ident : $ty:ty),*), $ordered:ident, ($($pointer:ident),+)) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> CUresult {
            let Some(real) = super::real::$name.get() else { return CUresult::NOT_SUPPORTED };
            let stream = StreamKey::new(NULL, $twin);
            let mark = $crate::work::gate::Mark::new();
            let pass = $crate::work::gate::enter(stream, &mark);
            let result = match super::real::$ordered.get() {
                // SAFETY: the caller's arguments, and the stream that it meant.
                Some(ordered) if pointers::are_prompt(&[$($pointer),+]) => unsafe {
                    ordered($($arg,)* stream.handle())
                },
                // SAFETY: the caller's arguments, handed on unchanged to the function that it meant to call.
                _ => unsafe { real($($arg),*) },
            };
            $crate::work::gate::leave(pass, &mark, result);
            result
        }
    };
}

/// One hook of a handled row.
macro_rules! handled_hook {
    ($name:ident, ($($arg:ident : $ty:ty),*), $handler:path) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> CUresult {
            let Some(real) = super::real::$name.get() else { return CUresult::NOT_SUPPORTED };
            if $crate::work::gate::is_forked() {
                // The driver refuses; and locks of ours may be held for ever, by threads that are not in this process.
                // SAFETY: the caller's arguments, handed on unchanged to the function that it meant to call.
                return unsafe { real($($arg),*) };
            }
            // SAFETY: the caller's arguments and the function that it meant to call; handlers treat pointers
            // as the driver does.
            unsafe { $handler(real, $($arg),*) }
        }
    };
}

/// The place of a real function's address.
macro_rules! real_slot {
    ($name:ident, ($($arg:ident : $ty:ty),*)) => {
        pub(crate) static $name: Real<unsafe extern "C-unwind" fn($($ty),*) -> CUresult> = Real::new();
    };
}

macro_rules! entry_points {
    (
        gated { $( $gclass:ident $gname:ident $gargs:tt $(and $gtwin:ident)? on $stream:expr; )* }
        prompt { $( $pclass:ident $pname:ident $pargs:tt and $ptwin:ident as $ordered:ident of $pointers:tt; )* }
        handled { $( $hclass:ident $hname:ident $hargs:tt = $handler:path; )* }
        called { $( $cname:ident $cargs:tt $(and $ctwin:ident)?; )* }
        forwarded { $( $fname:ident )* }
    ) => {
        /// The driver's own functions.
        #[allow(non_upper_case_globals, reason = "the driver's own names")]
        pub(crate) mod real {
            #[allow(unused_imports, reason = "not every type occurs")]
            use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};
            #[allow(unused_imports, reason = "not every type occurs")]
            use $crate::driver::types::*;
            use $crate::hooks::macros::{Real, real_slot};

            $( real_slot!($gname, $gargs); $( real_slot!($gtwin, $gargs); )? )*
            $( real_slot!($pname, $pargs); real_slot!($ptwin, $pargs); )*
            $( real_slot!($hname, $hargs); )*
            $( real_slot!($cname, $cargs); $( real_slot!($ctwin, $cargs); )? )*
        }

        /// What the program gets instead.
        #[allow(non_snake_case, reason = "the driver's own names")]
        pub(crate) mod hooks {
            use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};
            use $crate::driver::types::*;
            use $crate::hooks::macros::{gated_hook, handled_hook, prompt_hook};
            use $crate::work::streams::StreamKey;
            use $crate::hooks::{arrays, callbacks, captures, contexts, graphs, init, memory, pointers, pools, stream_ordered, streams, vmm};
            use $crate::lookup::get_proc_address;
            use $crate::memory::plain;

            const NULL: CUstream = CUstream::NULL;

            $( gated_hook!($gname, false, $gargs, $stream); $( gated_hook!($gtwin, true, $gargs, $stream); )? )*
            $( prompt_hook!($pname, false, $pargs, $ordered, $pointers); prompt_hook!($ptwin, true, $pargs, $ordered, $pointers); )*
            $( handled_hook!($hname, $hargs, $handler); )*
        }

        /// Every function that is hooked or called.
        pub(crate) static ENTRIES: &[$crate::hooks::macros::Entry] = &[
            $(
                $crate::hooks::macros::entry!($gname, hooked),
                $( $crate::hooks::macros::entry!($gtwin, hooked), )?
            )*
            $( $crate::hooks::macros::entry!($pname, hooked), $crate::hooks::macros::entry!($ptwin, hooked), )*
            $( $crate::hooks::macros::entry!($hname, hooked), )*
            $(
                $crate::hooks::macros::entry!($cname, called),
                $( $crate::hooks::macros::entry!($ctwin, called), )?
            )*
        ];

        /// What is done about each function, for the page.
        #[cfg(test)]
        pub(crate) static DEEDS: &[(&str, &str)] = &[
            $( (stringify!($gname), stringify!($gclass)), $( (stringify!($gtwin), stringify!($gclass)), )? )*
            $( (stringify!($pname), stringify!($pclass)), (stringify!($ptwin), stringify!($pclass)), )*
            $( (stringify!($hname), stringify!($hclass)), )*
            $( (stringify!($cname), "forward"), $( (stringify!($ctwin), "forward"), )? )*
            $( (stringify!($fname), "forward"), )*
        ];

        /// Names that are left alone.
        pub(crate) static FORWARDED: &[&str] = &[$( stringify!($fname) ),*];
    };
}

macro_rules! entry {
    ($name:ident, hooked) => {
        $crate::hooks::macros::Entry {
            name: stringify!($name),
            hook: Some($crate::hooks::macros::Hook(hooks::$name as *const ())),
            real: real::$name.slot(),
        }
    };
    ($name:ident, called) => {
        $crate::hooks::macros::Entry { name: stringify!($name), hook: None, real: real::$name.slot() }
    };
}

pub(crate) use {entry, entry_points, gated_hook, handled_hook, prompt_hook, real_slot};
