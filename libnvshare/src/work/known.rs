//! What is known of the work in a context while captures are open.

use std::sync::Arc;

use super::captures::{self, Blocking};
use super::contexts::Context;
use super::event::Event;
use super::stream_key::Kind;
use super::streams::{self, Incarnation};
use crate::driver;

/// What is known of the work in a context while captures are open there or elsewhere.
#[derive(Debug)]
pub(crate) enum Known {
    /// Work from before the captures is behind these events; that on the streams is to be asked of each stream, and that on the
    /// legacy stream by a query.
    WithLegacy(Vec<Arc<Event>>),
    /// A query of the legacy stream would break a capture. Nothing was submitted there since.
    WithoutLegacy(Vec<Arc<Event>>),
    /// Nobody can know, before the captures end.
    Nothing,
}

/// See [`Known`]. `of_context` are the streams of the context that live.
pub(crate) fn known_of(context: &Arc<Context>, of_context: &[(Incarnation, Kind)]) -> Known {
    captures::forget_dead_threads();
    let (before, blocking) = captures::of_context(context);
    match blocking {
        // The program itself cannot submit to the legacy stream since then.
        Blocking::FromTheStart if !streams::are_per_thread_used() => return Known::WithoutLegacy(before),
        Blocking::FromTheStart | Blocking::Later => return Known::Nothing,
        Blocking::None => {}
    }
    if captures::open() == 0 {
        return Known::WithLegacy(before);
    }
    // A thread's own stream, which nobody else can ask, may have joined.
    if streams::are_per_thread_used() {
        return Known::Nothing;
    }
    let joined = |&(stream, kind): &(Incarnation, Kind)| {
        kind == Kind::Blocking
            && stream.with(|handle| Ok(driver::is_capturing(handle))).is_some_and(|is| is != Ok(false))
    };
    if of_context.iter().any(joined) { Known::Nothing } else { Known::WithLegacy(before) }
}
