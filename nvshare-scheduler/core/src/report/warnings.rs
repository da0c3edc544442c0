//! Warnings for the administrator's log whose cause can come back. Each is said once for a client and a GPU,
//! and not again for a minute (see [`Repeated`]).

use std::collections::BTreeMap;
use std::fmt::Display;

use nvshare_proto::{GpuUuid, Repeated};

use crate::Time;
use crate::report::Report;
use crate::state::State;
use crate::state::client::ClientId;

/// The topic of a warning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Topic {
    /// Memory that was asked for has not left.
    Stays,
    /// An allocation got no room.
    Refused,
    /// A client waits though nobody is in its way.
    Blocked,
    /// An EVICT was not answered.
    NoAnswer,
    /// A DROP_LOCK or a grant was not answered.
    Stuck,
    /// A client has said that it has memory which nobody sees.
    Unseen,
    /// Clients do not agree on the size of a GPU.
    Disputed,
    /// More of a GPU is to be given away than there is.
    TooMuch,
}

/// The causes that were said. Those of a client are forgotten with it.
#[derive(Debug, Default)]
pub(crate) struct Warnings {
    of_clients: BTreeMap<ClientId, BTreeMap<(Topic, Option<GpuUuid>), Repeated>>,
    of_gpus: BTreeMap<GpuUuid, BTreeMap<Topic, Repeated>>,
}

impl Report {
    /// Warns of something about a client, on one GPU or in all.
    pub(crate) fn warn_of_client(
        &mut self,
        topic: Topic,
        id: ClientId,
        uuid: Option<GpuUuid>,
        now: Time,
        text: &str,
    ) {
        let causes = self.warnings.of_clients.entry(id).or_default();
        let again = causes.entry((topic, uuid)).or_default().again(now);
        self.warn_again(again, text);
    }

    /// Warns of something about a GPU.
    pub(crate) fn warn_of_gpu(&mut self, topic: Topic, uuid: GpuUuid, now: Time, text: &str) {
        let causes = self.warnings.of_gpus.entry(uuid).or_default();
        let again = causes.entry(topic).or_default().again(now);
        self.warn_again(again, text);
    }

    /// Says a warning, if it may be said again, and how often it was left out.
    fn warn_again(&mut self, again: Option<impl Display>, text: &str) {
        if let Some(left_out) = again {
            self.warn(format!("{text}{left_out}"));
        }
    }

    pub(crate) fn forget_client(&mut self, id: ClientId) {
        self.warnings.of_clients.remove(&id);
    }

    /// Forgets all GPUs that are not known any more.
    pub(crate) fn forget_gpus(&mut self, state: &State) {
        self.warnings.of_gpus.retain(|&uuid, _| state.gpu(uuid).is_some());
    }
}
