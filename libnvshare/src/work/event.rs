//! The library's own events.

use std::sync::Arc;

use super::contexts::Context;
use super::life::Gone;
use crate::driver::types::{CUevent, CUresult, CUstream};
use crate::driver::{self, Relaxed};
use crate::process::lifecycle;

/// An event behind work in a context. The library queries and destroys it only while its context lives.
#[derive(Debug)]
pub(crate) struct Event {
    handle: CUevent,
    context: Arc<Context>,
}

impl Event {
    /// Records an event behind all work on a stream of the context. The context must be current, both must live through the
    /// call, and [`Relaxed`] must be in force. The stream should not be the legacy stream: an event on it is a barrier
    /// between all blocking streams of the context (measured).
    pub(crate) fn behind_stream(context: &Arc<Context>, stream: CUstream) -> Result<Self, CUresult> {
        let event = Self::new(context)?;
        driver::record_event(event.handle, stream)?;
        Ok(event)
    }

    /// Records an event behind all work in a context, which includes streams that have been destroyed and, for a primary
    /// context, its green contexts (measured). It is no barrier, but it breaks every open capture in the context. The context
    /// must be current and live through the call, with [`Relaxed`] in force. Drivers before 12.5 return
    /// [`CUresult::NOT_SUPPORTED`].
    pub(crate) fn behind_context(context: &Arc<Context>) -> Result<Self, CUresult> {
        let event = Self::new(context)?;
        driver::record_context_event(event.handle, context.handle())?;
        Ok(event)
    }

    fn new(context: &Arc<Context>) -> Result<Self, CUresult> {
        Ok(Self { handle: driver::create_event()?, context: Arc::clone(context) })
    }

    /// The context whose work it is behind.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Whether the work before it is complete. The work of a context that has ended is complete.
    pub(crate) fn is_complete(&self) -> bool {
        let Some(_running) = lifecycle::hold_off_exit() else { return false };
        match self.context.life().enter() {
            Ok(_alive) => {
                let _relaxed = Relaxed::begin();
                match driver::query_event(self.handle) {
                    Err(error) => error.ends_all_work(),
                    Ok(()) => true,
                }
            }
            Err(Gone::Ending) => false,
            Err(Gone::Over) => true,
        }
    }
}

/// The state of the work before an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The work is complete.
    Done,
    NotYet,
    /// The work failed, and its results cannot be used: the driver says so, or the context ends.
    Failed(Option<CUresult>),
}

impl Event {
    /// How the work before it has ended.
    pub(crate) fn outcome(&self) -> Outcome {
        let Some(_running) = lifecycle::hold_off_exit() else { return Outcome::Failed(None) };
        match self.context.life().enter() {
            Ok(_alive) => {
                let _relaxed = Relaxed::begin();
                match driver::query_event(self.handle) {
                    Ok(()) => Outcome::Done,
                    Err(error) if error == CUresult::NOT_READY || error.is_of_capture() => Outcome::NotYet,
                    Err(error) => Outcome::Failed(Some(error)),
                }
            }
            Err(Gone::Ending) => Outcome::NotYet,
            Err(Gone::Over) => Outcome::Failed(None),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // If the context or the process is ending, the event ends with it.
        if let Some(_running) = lifecycle::hold_off_exit()
            && let Ok(_alive) = self.context.life().enter()
        {
            let _relaxed = Relaxed::begin();
            driver::destroy_event(self.handle);
        }
    }
}
