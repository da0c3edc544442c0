//! The core's foresight: the thread that makes memory of the host is told on which GPUs memory will have to leave, as soon as the core
//! knows it.

use std::time::Duration;

use nvshare_core::{Contended, Core};
use tokio::time::Instant;

use super::HostMemory;

/// The shortest time between two questions to the core: an answer takes a look at all clients of a GPU, and clients may say something
/// many times a second.
const EVERY: Duration = Duration::from_millis(50);

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Foresight {
    /// None: there is no such memory, and nothing is looked at.
    host: Option<HostMemory>,
    said: Vec<Contended>,
    looked: Option<Instant>,
    /// When to look next: something has happened since.
    due: Option<Instant>,
}

impl Foresight {
    pub(crate) fn new(host: Option<HostMemory>) -> Self {
        Self { host, said: Vec::new(), looked: None, due: None }
    }

    /// The memory of the host.
    pub(crate) fn host(&self) -> Option<&HostMemory> {
        self.host.as_ref()
    }

    /// When to look; none: nothing has happened.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Something has happened that the core knows.
    pub(crate) fn something_happened(&mut self) {
        if self.host.is_some() && self.due.is_none() {
            let now = Instant::now();
            self.due = Some(self.looked.map_or(now, |looked| now.max(looked + EVERY)));
        }
    }

    /// Looks at the core, and tells what is new.
    pub(crate) fn look(&mut self, core: &Core) {
        (self.looked, self.due) = (Some(Instant::now()), None);
        let contended = core.contended();
        if let Some(host) = self.host.as_ref().filter(|_| contended != self.said) {
            host.foresee(contended.clone());
            self.said = contended;
        }
    }
}
