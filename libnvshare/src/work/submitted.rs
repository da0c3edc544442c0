//! Finds out when the work is complete that has been submitted by now, while the program submits more.
//!
//! Unlike a [drain](super::drain), which meets a closed gate, this waits for nothing that later work could delay. It waits for
//! one event behind each context ([`Event::behind_context`]), which is no barrier and needs no handle of a stream. Beside a
//! capture, and on drivers before 12.5, there is no such event.

use super::captures;
use super::contexts;
use super::event::Event;
use super::life::Gone;
use crate::driver;
use crate::driver::types::CUresult;

/// Work that was submitted before a moment.
#[derive(Debug)]
pub(crate) struct Submitted {
    events: Vec<Event>,
}

impl Submitted {
    /// All work that is submitted by now. `None`: there is no telling now.
    pub(crate) fn by_now() -> Option<Self> {
        let mut events = Vec::new();
        for context in contexts::all() {
            if !driver::can_record_context() || captures::may_be_in(&context) {
                return None;
            }
            let _quiet = captures::hold_off(&context)?;
            match context.with(|| Event::behind_context(&context)) {
                Ok(Ok(event)) => events.push(event),
                Ok(Err(error)) if error.ends_all_work() => {}
                Err(Gone::Over) => {}
                Ok(Err(error)) => {
                    if error == CUresult::NOT_SUPPORTED {
                        driver::cannot_record_context();
                    }
                    return None;
                }
                Err(Gone::Ending) => return None,
            }
        }
        Some(Self { events })
    }

    /// Forgets the part that is complete. Returns whether nothing is left.
    pub(crate) fn forget_complete(&mut self) -> bool {
        self.events.retain(|event| !event.is_complete());
        self.events.is_empty()
    }
}
