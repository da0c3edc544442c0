//! The library's knowledge of the work in a context while captures are open.

use std::sync::Arc;

use super::captures::{self, Blocking};
use super::contexts::Context;
use super::event::Event;
use super::stream_key::Kind;
use super::streams::{self, Incarnation};
use crate::driver;

/// The library's knowledge of the work in a context while captures are open there or elsewhere.
#[derive(Debug)]
pub(crate) enum Known {
    /// These events cover the work from before the captures. Each stream has to be looked at, and the legacy stream can be
    /// queried.
    WithLegacy(Vec<Arc<Event>>),
    /// A query of the legacy stream would break a capture. No work was submitted to it since.
    WithoutLegacy(Vec<Arc<Event>>),
    /// The state of the work is unknown until the captures end.
    Nothing,
}

/// Finds out what can be known of the work in a context. `of_context` are the streams of the context that live.
pub(crate) fn known_of(context: &Arc<Context>, of_context: &[(Incarnation, Kind)]) -> Known {
    captures::forget_dead_threads();
    let Some((before, blocking)) = captures::of_context(context) else { return Known::Nothing };
    match blocking {
        // Since then the program cannot submit to the legacy stream either.
        Blocking::FromTheStart if !streams::are_per_thread_used() => return Known::WithoutLegacy(before),
        Blocking::FromTheStart | Blocking::Later => return Known::Nothing,
        Blocking::None => {}
    }
    if captures::open() == 0 {
        return Known::WithLegacy(before);
    }
    // A per-thread stream may have joined a capture, and only its own thread can ask.
    if streams::are_per_thread_used() {
        return Known::Nothing;
    }
    let joined = |&(stream, kind): &(Incarnation, Kind)| {
        kind == Kind::Blocking
            && stream.with(|handle| Ok(driver::is_capturing(handle))).is_some_and(|is| is != Ok(false))
    };
    if of_context.iter().any(joined) { Known::Nothing } else { Known::WithLegacy(before) }
}
