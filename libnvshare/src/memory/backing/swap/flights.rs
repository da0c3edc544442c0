//! Chunks under way, in the order of their copies.
//!
//! An event tells when copies are over. Small chunks share one: to make, to ask and to end an event costs a fifth of moving a
//! chunk of 2 MiB.

use std::collections::VecDeque;
use std::sync::Arc;

use nvshare_proto::units::MIB;

use super::chunks::{BATCH, event_behind, quiesce, wait};
use super::content::Leaving;
use crate::driver::types::{CUmemHandle, CUresult};
use crate::memory::allocations::Allocation;
use crate::work::contexts::Context;
use crate::work::event::{Event, Outcome};

/// Bytes of copies under way at a time.
const IN_FLIGHT: u64 = 96 * MIB;

/// The sign that a chunk's copies are over.
#[derive(Debug)]
pub(super) enum Completion {
    /// There is nothing to wait for.
    Nothing,
    Event(Event),
    /// An event behind a later chunk of this context tells it, or one that is still to be recorded.
    Later(Arc<Context>),
    /// They are over, and failed.
    Failed(Option<CUresult>),
}

/// A chunk that is on its way.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) allocation: Arc<Allocation>,
    pub(super) index: usize,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    /// Bytes of it that are copied.
    pub(super) copied: u64,
    pub(super) completion: Completion,
    /// The chunk's contents on their way out; none on the way back.
    pub(super) leaving: Option<Leaving>,
    /// The memory to which the chunk comes back; none on the way out.
    pub(super) physical: Option<CUmemHandle>,
}

impl Flight {
    fn awaits_event_of(&self, of: &Arc<Context>) -> bool {
        matches!(&self.completion, Completion::Later(context) if Arc::ptr_eq(context, of))
    }
}

/// See the [module's documentation](self).
#[derive(Debug, Default)]
pub(super) struct Queue {
    flights: VecDeque<Flight>,
    copied: u64,
    /// Bytes of chunks behind which no event is recorded yet.
    without_event: u64,
}

impl Queue {
    pub(super) fn push(&mut self, flight: Flight) {
        self.copied += flight.copied;
        if let Completion::Later(context) = &flight.completion {
            self.without_event += flight.bytes;
            let context = Arc::clone(context);
            self.flights.push_back(flight);
            if self.without_event >= BATCH {
                self.record(&context);
            }
        } else {
            self.flights.push_back(flight);
        }
    }

    /// Records an event behind all chunks of a context that have none.
    fn record(&mut self, context: &Arc<Context>) {
        self.without_event = 0;
        let Some(last) = self.flights.iter().rposition(|flight| flight.awaits_event_of(context)) else {
            return;
        };
        match event_behind(context) {
            Ok(event) => {
                if let Some(last) = self.flights.get_mut(last) {
                    last.completion = Completion::Event(event);
                }
            }
            Err(error) => self.mark_over(context, last, Err(error)),
        }
    }

    /// Records the events that are missing: the mover is about to wait for something else.
    pub(super) fn record_all(&mut self) {
        while let Some(context) = self.context_without_event() {
            self.record(&context);
        }
        self.without_event = 0;
    }

    /// The context of a chunk behind which no event is recorded.
    fn context_without_event(&self) -> Option<Arc<Context>> {
        let mut told: Vec<&Arc<Context>> = Vec::new();
        for flight in self.flights.iter().rev() {
            match &flight.completion {
                Completion::Event(event) => told.push(event.context()),
                Completion::Later(context) if !told.iter().any(|told| Arc::ptr_eq(told, context)) => {
                    return Some(Arc::clone(context));
                }
                Completion::Later(_) | Completion::Nothing | Completion::Failed(_) => {}
            }
        }
        None
    }

    /// Notes that the copies of a context are over, up to this chunk.
    fn mark_over(&mut self, context: &Arc<Context>, last: usize, result: Result<(), Option<CUresult>>) {
        for (at, flight) in self.flights.iter_mut().enumerate().take(last + 1) {
            if at == last || flight.awaits_event_of(context) {
                flight.completion = result.map_or_else(Completion::Failed, |()| Completion::Nothing);
            }
        }
    }

    /// The event that tells of the first chunk, and the chunk that it is behind.
    fn event_of_first(&self) -> Option<(usize, &Event)> {
        let context = match &self.flights.front()?.completion {
            Completion::Event(event) => event.context(),
            Completion::Later(context) => context,
            Completion::Nothing | Completion::Failed(_) => return None,
        };
        self.flights.iter().enumerate().find_map(|(at, flight)| match &flight.completion {
            Completion::Event(event) if Arc::ptr_eq(event.context(), context) => Some((at, event)),
            _ => None,
        })
    }

    /// Waits for the first chunk, which is no longer under way then.
    pub(super) fn wait_and_pop(&mut self) -> Option<Flight> {
        if let Completion::Later(context) = &self.flights.front()?.completion
            && self.event_of_first().is_none()
        {
            let context = Arc::clone(context);
            self.record(&context);
        }
        if let Some((at, event)) = self.event_of_first() {
            let (context, result) = (Arc::clone(event.context()), wait(Some(event)));
            self.mark_over(&context, at, result);
        }
        let flight = self.flights.pop_front()?;
        self.copied -= flight.copied;
        Some(flight)
    }

    /// Whether the link has enough to do.
    pub(super) fn is_full(&self) -> bool {
        self.copied >= IN_FLIGHT
    }

    pub(super) fn is_empty(&self) -> bool {
        self.flights.is_empty()
    }

    /// Looks at the event that tells of the first chunk. Returns whether that chunk has arrived, or never will.
    pub(super) fn first_is_over(&mut self) -> bool {
        match self.flights.front().map(|first| &first.completion) {
            None => return false,
            Some(Completion::Nothing | Completion::Failed(_)) => return true,
            Some(Completion::Event(_) | Completion::Later(_)) => {}
        }
        // There is one look for each recorded event, unless the link is busy.
        if self.without_event > 0 && !self.is_full() {
            return false;
        }
        let Some((at, event)) = self.event_of_first() else { return false };
        let (context, outcome) = (Arc::clone(event.context()), event.outcome());
        match outcome {
            Outcome::NotYet => return false,
            Outcome::Done => self.mark_over(&context, at, Ok(())),
            Outcome::Failed(error) => {
                // An event that cannot be queried says nothing about the work.
                quiesce(&context);
                self.mark_over(&context, at, Err(error));
            }
        }
        true
    }
}
