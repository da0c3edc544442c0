//! The hooks that rows of the list of [entry points](crate::entry_points) become.
//!
//! Hooks are `extern "C-unwind"` without anything to drop in the frame of the driver call: code that unwinds or jumps
//! through them (a C++ exception, `pthread_cancel`, `longjmp`) finds plain frames.

/// One hook of a gated row.
macro_rules! gated_hook {
    ($name:ident, $per_thread:expr, ($($arg:ident : $ty:ty),*), $stream:expr) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> CUresult {
            let Some(real) = $crate::driver::functions::$name.get() else { return CUresult::NOT_SUPPORTED };
            // SAFETY: the stream is read from the caller's arguments as the driver itself would read it.
            #[allow(unused_unsafe, reason = "only some rows look through a pointer")]
            let stream = unsafe { $stream };
            let mark = $crate::work::gate::FrameMark::new();
            let stream = StreamKey::new(stream, $per_thread);
            let pass = match $crate::work::gate::enter(stream, &mark, $crate::session::start) {
                Ok(pass) => pass,
                Err(error) => return error,
            };
            // SAFETY: the caller's arguments, handed on unchanged to the function that it meant to call.
            let result = unsafe { real($($arg),*) };
            $crate::work::gate::leave(pass, &mark, result);
            result
        }
    };
}

/// One hook of a row that names addresses to the driver, and submits nothing.
macro_rules! naming_hook {
    ($name:ident, ($($arg:ident : $ty:ty),*)) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> CUresult {
            let Some(real) = $crate::driver::functions::$name.get() else { return CUresult::NOT_SUPPORTED };
            let mark = $crate::work::gate::FrameMark::new();
            let pass = match $crate::work::gate::enter_to_name(&mark, $crate::session::start) {
                Ok(pass) => pass,
                Err(error) => return error,
            };
            // SAFETY: the caller's arguments, handed on unchanged to the function that it meant to call.
            let result = unsafe { real($($arg),*) };
            $crate::work::gate::leave(pass, &mark, CUresult::NOT_READY);
            result
        }
    };
}

/// One hook of a prompt row.
macro_rules! prompt_hook {
    ($name:ident, $per_thread:expr, ($($arg:ident : $ty:ty),*), $ordered:ident, ($($pointer:ident),+)) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> CUresult {
            let Some(real) = $crate::driver::functions::$name.get() else { return CUresult::NOT_SUPPORTED };
            let stream = StreamKey::new(NULL, $per_thread);
            let mark = $crate::work::gate::FrameMark::new();
            let pass = match $crate::work::gate::enter(stream, &mark, $crate::session::start) {
                Ok(pass) => pass,
                Err(error) => return error,
            };
            let result = match $crate::driver::functions::$ordered.get() {
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
    ($name:ident, ($($arg:ident : $ty:ty),*), $handler:path $(, $table:expr)?) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> CUresult {
            let Some(real) = $crate::driver::functions::$name.get() else { return CUresult::NOT_SUPPORTED };
            if $crate::process::lifecycle::is_forked() {
                // The driver refuses the call, and a lock of the library may be held for ever by a thread that does
                // not exist in this process.
                // SAFETY: the caller's arguments, handed on unchanged to the function that it meant to call.
                return unsafe { real($($arg),*) };
            }
            // SAFETY: the caller's arguments and the function that it meant to call; handlers treat pointers
            // as the driver does.
            unsafe { $handler(real, $($arg),* $(, $table)?) }
        }
    };
}

pub(super) use {gated_hook, handled_hook, naming_hook, prompt_hook};
