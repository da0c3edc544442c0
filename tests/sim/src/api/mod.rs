//! The driver's entry points, as far as programs of the test suites call them.
//!
//! Each takes raw arguments as the driver does; null out-pointers are refused with INVALID_VALUE. There is a file for each
//! topic, with a table of its entry points: the exported functions and the names that `cuGetProcAddress` knows come from
//! it.

#![allow(non_snake_case, reason = "the driver's own names")]
#![allow(clippy::missing_safety_doc, reason = "each is the driver's function of that name")]

mod checkpoint;
mod contexts;
mod copies;
mod devices;
mod events;
mod fills;
mod graphs;
mod green;
mod memory;
mod modules;
mod nodes;
mod pools;
mod streams;
mod vmm;

use std::ffi::c_int;
use std::sync::Arc;

use crate::Address;
use crate::capture::Kind;
use crate::handles;
use crate::objects::Stream;
use crate::process::{self, Failure, INVALID_VALUE, Process, SUCCESS};
use crate::stream::{Point, Work};

/// Entry points, each with its name. Functions of the host that streams run may not call them.
macro_rules! api {
    ($( $(#[$doc:meta])* fn $name:ident ($($arg:ident : $ty:ty),*) $body:block )*) => {
        $(
            $(#[$doc])*
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($arg: $ty),*) -> std::ffi::c_int {
                let _call = match $crate::handles::enter(stringify!($name)) {
                    Ok(call) => call,
                    Err(failure) => return failure,
                };
                $body
            }
        )*

        pub(super) static NAMES: &[(&str, $crate::Address)] =
            &[$( (stringify!($name), $crate::Address($name as *const std::ffi::c_void)) ),*];
    };
}

/// Entry points with a twin each: the twin, whose name comes first, takes the null stream as the calling thread's own.
macro_rules! twins {
    ($per_thread:ident: $( fn $name:ident / $twin:ident ($($arg:ident : $ty:ty),*) $body:block )*) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($arg: $ty),*) -> std::ffi::c_int {
                let _call = match $crate::handles::enter(stringify!($name)) {
                    Ok(call) => call,
                    Err(failure) => return failure,
                };
                let $per_thread = false;
                $body
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn $twin($($arg: $ty),*) -> std::ffi::c_int {
                let _call = match $crate::handles::enter(stringify!($twin)) {
                    Ok(call) => call,
                    Err(failure) => return failure,
                };
                let $per_thread = true;
                $body
            }
        )*

        pub(super) static TWINS: &[(&str, $crate::Address)] = &[$(
            (stringify!($name), $crate::Address($name as *const std::ffi::c_void)),
            (stringify!($twin), $crate::Address($twin as *const std::ffi::c_void)),
        )*];
    };
}

use {api, twins};

/// Every entry point by its exported name.
pub(crate) fn names() -> impl Iterator<Item = &'static (&'static str, Address)> {
    let tables: [&[(&str, Address)]; 21] = [
        checkpoint::NAMES,
        contexts::NAMES,
        copies::NAMES,
        copies::TWINS,
        devices::NAMES,
        devices::ANYWHERE,
        events::NAMES,
        events::TWINS,
        fills::TWINS,
        graphs::NAMES,
        graphs::TWINS,
        green::NAMES,
        memory::NAMES,
        modules::NAMES,
        modules::TWINS,
        nodes::NAMES,
        pools::NAMES,
        pools::TWINS,
        streams::NAMES,
        streams::TWINS,
        vmm::NAMES,
    ];
    tables.into_iter().flatten()
}

fn status(result: Result<(), Failure>) -> c_int {
    result.err().unwrap_or(SUCCESS)
}

/// Writes an answer where the caller wants it.
unsafe fn give<T>(place: *mut T, answer: Result<T, Failure>) -> c_int {
    if place.is_null() {
        return INVALID_VALUE;
    }
    match answer {
        Ok(value) => {
            // SAFETY: not null, and the driver's contract says that it is writable.
            unsafe { place.write(value) };
            SUCCESS
        }
        Err(failure) => failure,
    }
}

/// Writes an answer that is made only if there is a place for it: a new object must be handed out.
unsafe fn give_new<T>(place: *mut T, make: impl FnOnce() -> Result<T, Failure>) -> c_int {
    if place.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's place.
    unsafe { give(place, make()) }
}

fn with_stream<T>(
    handle: usize,
    per_thread: bool,
    body: impl FnOnce(&'static Process, Arc<Stream>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let p = process::get()?;
    let stream = p.tables().stream(handle, per_thread)?;
    stream.door.pass();
    body(p, stream)
}

/// The same for a call that gives a stream work: it waits while the stream has too much work.
fn with_place<T>(
    handle: usize,
    per_thread: bool,
    body: impl FnOnce(&'static Process, Arc<Stream>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let p = process::get()?;
    let mut tables = p.tables();
    let stream = tables.stream(handle, per_thread)?;
    let captures = tables.is_capturing(&stream);
    drop(tables);
    if captures {
        stream.door.pass();
    } else {
        stream.door.pass_with_place(&stream.queue);
    }
    body(p, stream)
}

/// The handle of a call that looks at a stream before anything else: another thread may destroy that stream at this moment.
fn looked_at(handle: usize) -> usize {
    if handle > 2 {
        handles::before_looking();
    }
    handle
}

fn submit(handle: usize, per_thread: bool, kind: Kind, work: Result<Work, Failure>) -> Result<(), Failure> {
    let work = work?;
    with_place(handle, per_thread, |p, stream| {
        p.sticky()?;
        p.tables().submit(&stream, kind, work, Vec::new()).map(|_| ())
    })
}

/// Work on a default stream that the driver does not put into a capture. The call returns when the work is done, or at
/// once.
fn submit_now(
    per_thread: bool,
    kind: Kind,
    waits: bool,
    after: Vec<Point>,
    work: Result<Work, Failure>,
) -> Result<(), Failure> {
    let work = work?;
    with_place(0, per_thread, |p, stream| {
        p.sticky()?;
        let mut tables = p.tables();
        tables.look_at_stream(&stream)?;
        tables.unsafe_call()?;
        let point = tables.submit(&stream, kind, work, after)?;
        drop(tables);
        if waits {
            point.iter().for_each(Point::wait);
        }
        p.sticky()
    })
}
