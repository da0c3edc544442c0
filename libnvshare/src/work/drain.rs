//! A drain: finds out when all submitted work is complete.
//!
//! The drain records one event behind each context that lives ([`Event::behind_context`]). This event needs no handle of a
//! stream and is no barrier. So a drain that is given up leaves nothing behind that could delay the program. But the event
//! breaks captures, and drivers before 12.5 do not have it. Beside a capture, and on those drivers, the drain records an
//! event on each stream of the context. It queries the legacy stream instead, where an event would be a barrier. Work that
//! cannot be looked at without harm counts as incomplete.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, TryLockError};

use super::captures;
use super::contexts::{self, Context};
use super::event::Event;
use super::known::{Known, known_of};
use super::life::Gone;
use super::stream_key::Kind;
use super::streams::{self, Incarnation};
use crate::driver;
use crate::driver::types::{CU_STREAM_LEGACY, CUdevice, CUresult, CUstream};
use crate::process::{log, threads};

/// Work that has to be complete.
#[derive(Debug)]
enum Target {
    /// All work of a context that has not been looked at yet.
    Context(Arc<Context>),
    /// The work of one stream that has not been looked at yet.
    Stream(Arc<Context>, Incarnation),
    /// The work on a context's legacy stream, its blocking streams and its per-thread streams.
    Legacy(Arc<Context>),
    /// The work before an event.
    Event(Arc<Event>),
    /// The work of a context that a thread waits for, and the state of that wait.
    Whole(Arc<Context>, Arc<AtomicU32>),
}

impl Target {
    fn context(&self) -> &Context {
        match self {
            Self::Context(context)
            | Self::Stream(context, _)
            | Self::Legacy(context)
            | Self::Whole(context, _) => context,
            Self::Event(event) => event.context(),
        }
    }
}

/// The result of a look at a target.
enum Looked {
    Complete,
    /// Look at these targets instead.
    Became(Vec<Target>),
    /// Look at this context instead, at the next poll. Its streams come and go, so doing it in the same poll might never end.
    Anew(Arc<Context>),
    NotYet,
    /// The driver answers nothing to this thread, which runs a function of the host in a graph.
    Forbidden,
}

/// Work that was submitted before a moment.
#[derive(Debug)]
pub(crate) struct Drain {
    targets: Vec<Target>,
    /// The thread that looked last may not look.
    is_forbidden: bool,
}

impl Drain {
    /// Begins a drain of all work that was submitted so far. The gate has to be closed with no thread inside; otherwise the
    /// drain may miss work that is being submitted now.
    pub(crate) fn begin() -> Self {
        Self::of_contexts(contexts::all().into_iter())
    }

    /// All work on one device that was submitted so far.
    pub(crate) fn of(device: CUdevice) -> Self {
        Self::of_contexts(contexts::of_device(device))
    }

    /// All work in some contexts that was submitted so far.
    pub(crate) fn of_contexts(contexts: impl Iterator<Item = Arc<Context>>) -> Self {
        Self::to(contexts.map(Target::Context).collect())
    }

    /// Begins to synchronize with contexts in which no capture is open, for what the driver does at no query. Threads of their own
    /// wait, so it can be given up like any drain.
    pub(crate) fn synchronize(contexts: impl Iterator<Item = Arc<Context>>) -> Self {
        let begin = |context: Arc<Context>| match wait_for_context(&context) {
            Looked::Became(waits) => waits,
            _ => Vec::new(),
        };
        Self::to(contexts.filter(|context| !captures::may_be_in(context)).flat_map(begin).collect())
    }

    fn to(targets: Vec<Target>) -> Self {
        Self { targets, is_forbidden: false }
    }

    /// Whether the last thread that looked may not look: it runs a function of the host, and may be what the work waits for.
    pub(crate) fn is_forbidden(&self) -> bool {
        self.is_forbidden
    }

    /// Looks at the targets, and drops the complete ones. Returns how many are left.
    pub(crate) fn poll(&mut self) -> usize {
        self.poll_in(|_| true)
    }

    /// The same for the targets in contexts that may be `asked`. The others count as left.
    pub(crate) fn poll_in(&mut self, asked: impl Fn(&Context) -> bool) -> usize {
        if driver::has_ended() {
            self.targets.clear();
        }
        self.is_forbidden = false;
        let mut left = Vec::with_capacity(self.targets.len());
        let mut open = std::mem::take(&mut self.targets);
        while let Some(target) = open.pop() {
            if !asked(target.context()) {
                left.push(target);
                continue;
            }
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
                Looked::Forbidden => {
                    self.is_forbidden = true;
                    left.push(target);
                }
            }
        }
        self.targets = left;
        self.targets.len()
    }
}

/// A drain at which any thread may look, one at a time.
#[derive(Debug)]
pub(crate) struct SharedDrain(Mutex<Drain>);

impl SharedDrain {
    pub(crate) fn new(drain: Drain) -> Self {
        Self(Mutex::new(drain))
    }

    /// Looks at the targets in contexts that may be `asked`. Returns whether all work is complete. While another thread looks, it is not.
    pub(crate) fn poll_in(&self, asked: impl Fn(&Context) -> bool) -> bool {
        let mut drain = match self.0.try_lock() {
            Ok(drain) => drain,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        drain.poll_in(asked) == 0
    }
}

/// The result for an error of the driver: try again, unless the error ends all work of the context.
fn failed(what: &Target, error: CUresult) -> Looked {
    if error.ends_all_work() {
        return Looked::Complete;
    }
    if error != CUresult::NOT_READY && !error.is_of_capture() {
        log::debug(format_args!("no look at {what:?}: {error:?}"));
    }
    if error == CUresult::NOT_PERMITTED { Looked::Forbidden } else { Looked::NotYet }
}

fn look(target: &Target) -> Looked {
    match target {
        Target::Event(event) if event.is_complete() => Looked::Complete,
        Target::Event(_) => Looked::NotYet,
        Target::Whole(context, waiting) => match waiting.load(Ordering::SeqCst) {
            COMPLETE => Looked::Complete,
            IN_VAIN => Looked::Anew(Arc::clone(context)),
            _ => Looked::NotYet,
        },
        Target::Context(context) => look_at_context(target, context),
        Target::Stream(context, stream) => look_at_stream(target, context, *stream),
        Target::Legacy(context) => look_at_legacy(target, context),
    }
}

fn look_at_context(target: &Target, context: &Arc<Context>) -> Looked {
    if !driver::can_record_context() || captures::may_be_in(context) {
        return split(context);
    }
    let Some(_quiet) = captures::hold_off(context) else { return Looked::NotYet };
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

/// Looks at each stream of a context.
fn split(context: &Arc<Context>) -> Looked {
    if !context.life().is_alive() {
        let over = context.life().enter().err() == Some(Gone::Over);
        return if over { Looked::Complete } else { Looked::NotYet };
    }
    let Some(streams) = streams::of_context(context) else {
        // A stream may have ended by a function without a hook, so its handle must not be used.
        return if captures::may_be_in(context) { Looked::NotYet } else { wait_for_context(context) };
    };
    let (before, legacy) = match known_of(context, &streams) {
        Known::WithLegacy(before) => (before, true),
        Known::WithoutLegacy(before) => (before, false),
        Known::Nothing => return Looked::NotYet,
    };
    let mut targets: Vec<Target> =
        before.into_iter().chain(streams::orphans_of(context)).map(Target::Event).collect();
    // A query of the legacy stream covers the blocking streams.
    let asked = streams.into_iter().filter(|(_, kind)| !legacy || *kind != Kind::Blocking);
    targets.extend(asked.map(|(stream, _)| Target::Stream(Arc::clone(context), stream)));
    targets.extend(legacy.then(|| Target::Legacy(Arc::clone(context))));
    Looked::Became(targets)
}

/// Waits for a context, where no event can show that its work is complete, or where the driver has to be [synchronized
/// with](Drain::synchronize). A thread of its own waits, since the driver's call cannot be given up.
fn wait_for_context(context: &Arc<Context>) -> Looked {
    // One that an earlier drain has begun knows nothing of later submissions.
    let Some(only) = context.begin_wait() else { return Looked::NotYet };
    let waiting = Arc::new(AtomicU32::new(WAITS));
    let (context, by) = (Arc::clone(context), Arc::clone(&waiting));
    let target = Target::Whole(Arc::clone(&context), waiting);
    let begun = threads::spawn_worker("nvshare-wait", move || {
        let frees = context.pool_frees();
        let waited = captures::hold_off(&context).map(|_quiet| context.with(driver::synchronize_context));
        let complete = match waited {
            Some(Ok(Err(error))) => error.ends_all_work(),
            Some(Ok(Ok(()))) => {
                context.saw_frees(frees);
                true
            }
            Some(Err(Gone::Over)) => true,
            Some(Err(Gone::Ending)) | None => false,
        };
        drop(only);
        by.store(if complete { COMPLETE } else { IN_VAIN }, Ordering::SeqCst);
    });
    if begun { Looked::Became(vec![target]) } else { Looked::NotYet }
}

/// States of the wait for a whole context.
const WAITS: u32 = 0;
const COMPLETE: u32 = 1;
const IN_VAIN: u32 = 2;

fn look_at_stream(target: &Target, context: &Arc<Context>, stream: Incarnation) -> Looked {
    let Some(_quiet) = captures::hold_off_beside() else { return Looked::NotYet };
    let looked = stream.with(|handle| {
        if captures::open() > 0 && driver::is_capturing(handle) {
            // Nothing runs on it now. If a capture began on it, an event covers its earlier work. If it joined a capture, its
            // earlier work is unknown until the capture ends.
            return Ok(captures::before(stream.key()));
        }
        Event::behind_stream(context, handle).map(|event| Some(vec![Arc::new(event)]))
    });
    match looked {
        // The stream has ended, or is ending. Another look at its context finds its work.
        None => Looked::Anew(Arc::clone(context)),
        Some(Ok(None)) => Looked::NotYet,
        Some(Ok(Some(events))) => Looked::Became(events.into_iter().map(Target::Event).collect()),
        Some(Err(error)) => failed(target, error),
    }
}

fn look_at_legacy(target: &Target, context: &Arc<Context>) -> Looked {
    let Some(_quiet) = captures::hold_off_beside() else { return Looked::NotYet };
    if captures::open() > 0 {
        // A capture may have begun or spread in the meantime.
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
