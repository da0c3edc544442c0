//! A look at all work that was submitted, until it is complete.
//!
//! Each context that lives is looked at by one event ([`Event::behind_context`]), which needs no stream's handle and is no
//! barrier: whatever becomes of the drain, it leaves nothing in the driver that holds the program up. That event breaks captures,
//! and drivers before 12.4 lack it: beside a capture and on those, the context is looked at by an event on each of its
//! streams and a query of its legacy stream. What cannot be looked at without harm counts as incomplete until it can.

use std::sync::Arc;

use super::captures;
use super::contexts::{self, Context};
use super::event::Event;
use super::known::{Known, known_of};
use super::life::Gone;
use super::stream_key::Kind;
use super::streams::{self, Incarnation};
use crate::driver;
use crate::driver::types::{CU_STREAM_LEGACY, CUresult, CUstream};
use crate::process::log;

/// Something that is to be complete.
#[derive(Debug)]
enum Target {
    /// All work of a context, which nobody could look at yet.
    Context(Arc<Context>),
    /// The work of one stream, likewise.
    Stream(Arc<Context>, Incarnation),
    /// The work on a context's legacy stream, on its blocking streams and on threads' own.
    Legacy(Arc<Context>),
    /// The work before an event.
    Event(Arc<Event>),
}

/// What became of a look at a target.
enum Looked {
    Complete,
    /// These instead of it.
    Became(Vec<Target>),
    /// This context instead of it, at the next poll: its streams come and go, and within one poll that might not end.
    Anew(Arc<Context>),
    NotYet,
}

/// Work that was submitted before a moment.
#[derive(Debug)]
pub(crate) struct Drain {
    targets: Vec<Target>,
}

impl Drain {
    /// All work that was submitted so far, if nobody is inside the gate and it is closed; if it is not, work may be missed that
    /// is being submitted now.
    pub(crate) fn begin() -> Self {
        Self { targets: contexts::all().into_iter().map(Target::Context).collect() }
    }

    /// Drops what is complete; how much is left.
    pub(crate) fn poll(&mut self) -> usize {
        let mut left = Vec::with_capacity(self.targets.len());
        let mut open = std::mem::take(&mut self.targets);
        while let Some(target) = open.pop() {
            match look(&target) {
                Looked::Complete => {}
                Looked::Became(others) => open.extend(others),
                Looked::Anew(context) => {
                    let is_it =
                        |other: &Target| matches!(other, Target::Context(of) if Arc::ptr_eq(of, &context));
                    if !left.iter().any(is_it) {
                        left.push(Target::Context(context));
                    }
                }
                Looked::NotYet => left.push(target),
            }
        }
        self.targets = left;
        self.targets.len()
    }
}

/// An answer of the driver that says nothing: try again. Errors that end all work of a context leave nothing to wait for.
fn failed(what: &Target, error: CUresult) -> Looked {
    if error.ends_all_work() {
        return Looked::Complete;
    }
    if error != CUresult::NOT_READY && !error.is_of_capture() {
        log::debug(format_args!("no look at {what:?}: {error:?}"));
    }
    Looked::NotYet
}

fn look(target: &Target) -> Looked {
    match target {
        Target::Event(event) if event.is_complete() => Looked::Complete,
        Target::Event(_) => Looked::NotYet,
        Target::Context(context) => look_at_context(target, context),
        Target::Stream(context, stream) => look_at_stream(target, context, *stream),
        Target::Legacy(context) => look_at_legacy(target, context),
    }
}

fn look_at_context(target: &Target, context: &Arc<Context>) -> Looked {
    if !driver::can_record_context() || captures::open() > 0 {
        return split(target, context);
    }
    let Some(_quiet) = captures::hold_off() else { return Looked::NotYet };
    match context.with(|| Event::behind_context(context)) {
        Err(Gone::Over) => Looked::Complete,
        Err(Gone::Ending) => Looked::NotYet,
        Ok(Ok(event)) => Looked::Became(vec![Target::Event(Arc::new(event))]),
        Ok(Err(CUresult::NOT_SUPPORTED)) => {
            driver::cannot_record_context();
            Looked::NotYet
        }
        Ok(Err(error)) => failed(target, error),
    }
}

/// Looks at a context by its streams.
fn split(target: &Target, context: &Arc<Context>) -> Looked {
    if !context.life().is_alive() {
        let over = context.life().enter().err() == Some(Gone::Over);
        return if over { Looked::Complete } else { Looked::NotYet };
    }
    let Some(streams) = streams::of_context(context) else {
        // A stream may have ended unseen, and its handle may not be used.
        return if captures::open() > 0 { Looked::NotYet } else { wait_for_context(target, context) };
    };
    let (before, legacy) = match known_of(context, &streams) {
        Known::WithLegacy(before) => (before, true),
        Known::WithoutLegacy(before) => (before, false),
        Known::Nothing => return Looked::NotYet,
    };
    let mut targets: Vec<Target> =
        before.into_iter().chain(streams::orphans_of(context)).map(Target::Event).collect();
    // The query sees blocking streams too.
    let asked = streams.into_iter().filter(|(_, kind)| !legacy || *kind != Kind::Blocking);
    targets.extend(asked.map(|(stream, _)| Target::Stream(Arc::clone(context), stream)));
    targets.extend(legacy.then(|| Target::Legacy(Arc::clone(context))));
    Looked::Became(targets)
}

/// Waits for a context where nothing else tells of its work.
fn wait_for_context(target: &Target, context: &Arc<Context>) -> Looked {
    let Some(_quiet) = captures::hold_off() else { return Looked::NotYet };
    match context.with(driver::synchronize_context) {
        Ok(Ok(())) | Err(Gone::Over) => Looked::Complete,
        Err(Gone::Ending) => Looked::NotYet,
        Ok(Err(error)) => failed(target, error),
    }
}

fn look_at_stream(target: &Target, context: &Arc<Context>, stream: Incarnation) -> Looked {
    let Some(_quiet) = captures::hold_off_beside() else { return Looked::NotYet };
    let looked = stream.with(|handle| {
        if captures::open() > 0 && driver::is_capturing(handle) {
            // Nothing runs on it now. What ran before is known where a capture began; where one was joined, it is only
            // known when that is over.
            return Ok(captures::before(stream.key()));
        }
        Event::behind_stream(context, handle).map(|event| Some(vec![Arc::new(event)]))
    });
    match looked {
        // It is being destroyed, or was: another look at its context finds what it has left.
        None => Looked::Anew(Arc::clone(context)),
        Some(Ok(None)) => Looked::NotYet,
        Some(Ok(Some(events))) => Looked::Became(events.into_iter().map(Target::Event).collect()),
        Some(Err(error)) => failed(target, error),
    }
}

fn look_at_legacy(target: &Target, context: &Arc<Context>) -> Looked {
    let Some(_quiet) = captures::hold_off_beside() else { return Looked::NotYet };
    if captures::open() > 0 {
        // A capture may have begun or spread since.
        let streams = streams::of_context(context);
        let may = streams.is_some_and(|all| matches!(known_of(context, &all), Known::WithLegacy(_)));
        if !may {
            return Looked::NotYet;
        }
    }
    match context.with(|| driver::query_stream(CUstream(CU_STREAM_LEGACY as *mut _))) {
        Ok(Ok(())) | Err(Gone::Over) => Looked::Complete,
        Err(Gone::Ending) => Looked::NotYet,
        Ok(Err(error)) => failed(target, error),
    }
}
