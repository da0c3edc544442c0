//! The hook that a row of the list of [entry points](crate::entry_points) becomes.
//!
//! Hooks are `extern "C-unwind"`, and have nothing to drop in the frame of the driver call. Code that unwinds or jumps through
//! them (a C++ exception, `pthread_cancel`, `longjmp`) finds plain frames.

/// The hook of one function: it finds the real function, passes the gate, and treats the call.
macro_rules! hook_function {
    ($gate:tt $name:ident $per_thread:literal ($($arg:ident : $ty:ty),*) $kind:ident $deed:tt) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> CUresult {
            let Some(real) = $crate::driver::functions::$name.get() else { return CUresult::NOT_SUPPORTED };
            at_gate!($gate $per_thread, treated!($kind $deed $per_thread real ($($arg),*)))
        }
    };
}

/// A call at its place at the gate.
macro_rules! at_gate {
    ([none] $per_thread:literal, $call:expr) => {{
        let entered = $crate::work::gate::door::enter();
        let result = $call;
        $crate::work::gate::door::leave(entered);
        result
    }};
    ([handler] $per_thread:literal, $call:expr) => {
        at_gate!([none] $per_thread, $call)
    };
    ([on $($stream:tt)+] $per_thread:literal, $call:expr) => {{
        // SAFETY: the stream is read from the caller's arguments as the driver itself would read it.
        #[allow(unused_unsafe, reason = "only some rows look through a pointer")]
        let stream = unsafe { $($stream)+ };
        let mark = $crate::work::gate::FrameMark::new();
        let stream = StreamKey::new(stream, $per_thread);
        let pass = match $crate::work::gate::enter(stream, &mark, $crate::session::start) {
            Ok(pass) => pass,
            Err(error) => return error,
        };
        let result = $call;
        $crate::work::gate::leave(pass, &mark, result);
        result
    }};
    ([addresses] $per_thread:literal, $call:expr) => {{
        let mark = $crate::work::gate::FrameMark::new();
        let pass = match $crate::work::gate::enter_for_addresses(&mark, $crate::session::start) {
            Ok(pass) => pass,
            Err(error) => return error,
        };
        let result = $call;
        $crate::work::gate::leave(pass, &mark, CUresult::NOT_READY);
        result
    }};
}

/// The treatment of a call.
macro_rules! treated {
    (unchanged () $per_thread:literal $real:ident ($($arg:ident),*)) => {
        // SAFETY: the caller's arguments, handed on unchanged to the function that it meant to call.
        unsafe { $real($($arg),*) }
    };
    (prompt ($ordered:ident, $($pointer:ident),+) $per_thread:literal $real:ident ($($arg:ident),*)) => {
        match $crate::driver::functions::$ordered.get() {
            // SAFETY: the caller's arguments, and the stream that it meant.
            Some(ordered) if pointers::are_prompt(&[$($pointer),+]) => unsafe {
                ordered($($arg,)* StreamKey::new(NULL, $per_thread).handle())
            },
            // SAFETY: the caller's arguments, handed on unchanged to the function that it meant to call.
            _ => unsafe { $real($($arg),*) },
        }
    };
    (across ($stream:ident) $per_thread:literal $real:ident $arguments:tt) => {
        once_more!($stream $per_thread, CUresult::INVALID_VALUE, treated!(unchanged () $per_thread $real $arguments))
    };
    (across (NULL, $to:ident, $from:ident, $bytes:ident, prompt $ordered:ident) $per_thread:literal $real:ident $arguments:tt) => {
        once_more!(
            NULL $per_thread,
            $crate::hooks::copies::at_once($to, $from, $bytes, $per_thread),
            treated!(prompt ($ordered, $to, $from) $per_thread $real $arguments)
        )
    };
    (across ($stream:ident, $to:ident, $from:ident, $bytes:ident) $per_thread:literal $real:ident $arguments:tt) => {
        once_more!(
            $stream $per_thread,
            $crate::hooks::copies::in_order($to, $from, $bytes, StreamKey::new($stream, $per_thread).handle()),
            treated!(unchanged () $per_thread $real $arguments)
        )
    };
    (across_in ($context:expr) $per_thread:literal $real:ident $arguments:tt) => {
        match treated!(unchanged () $per_thread $real $arguments) {
            CUresult::INVALID_VALUE if $crate::hooks::copies::gain_access_in($context) => {
                treated!(unchanged () $per_thread $real $arguments)
            }
            result => result,
        }
    };
    (handled ($handler:path) $per_thread:literal $real:ident ($($arg:ident),*)) => {
        unless_forked!($real ($($arg),*), $handler($real, $($arg),*))
    };
    (of_stream ($($handler:ident)::+) $per_thread:literal $real:ident ($($arg:ident),*)) => {
        unless_forked!($real ($($arg),*), $($handler)::+::<$per_thread>($real, $($arg),*))
    };
    (looked_up ($handler:path) $per_thread:literal $real:ident ($($arg:ident),*)) => {
        unless_forked!($real ($($arg),*), $handler($real, $($arg),* , &TABLE))
    };
}

/// A copy in a stream. If the driver refuses it, it is made in the other way that is given. If there is none, it is made once more
/// when the stream's card has gained access to what it names.
macro_rules! once_more {
    ($stream:ident $per_thread:literal, $other_way:expr, $call:expr) => {
        match $call {
            CUresult::INVALID_VALUE => match $other_way {
                CUresult::INVALID_VALUE
                    if $crate::hooks::copies::gain_access(StreamKey::new($stream, $per_thread).handle()) =>
                {
                    $call
                }
                result => result,
            },
            result => result,
        }
    };
}

/// A call of a handler. In a forked child the hook calls the real function instead. The driver refuses the call there, and a
/// lock of the library may be held for ever by a thread that does not exist.
macro_rules! unless_forked {
    ($real:ident ($($arg:ident),*), $handled:expr) => {
        if $crate::process::lifecycle::is_forked() {
            // SAFETY: the caller's arguments, handed on unchanged to the function that it meant to call.
            unsafe { $real($($arg),*) }
        } else {
            // SAFETY: the caller's arguments and the function that it meant to call; handlers treat pointers
            // as the driver does.
            unsafe { $handled }
        }
    };
}

pub(super) use {at_gate, hook_function, once_more, treated, unless_forked};
