//! The events alone say where each client stands.

use std::collections::BTreeMap;

use nvshare_core::{ClientId, Core};
use nvshare_proto::ClientState;

/// The state that follows from the events so far.
#[derive(Debug, Default)]
pub(crate) struct Follower {
    states: BTreeMap<ClientId, ClientState>,
}

impl Follower {
    /// Takes in what has incident.
    pub(crate) fn follow(&mut self, core: &mut Core) {
        while let Some(incident) = core.poll_incident() {
            if let (Some(client), Some(state)) = (incident.client, incident.kind.state()) {
                self.states.insert(client, state);
            }
        }
    }

    /// Whether `status` says the same, but for a client whose events it was not shown.
    pub(crate) fn agrees(&self, core: &Core, unseen: Option<ClientId>) {
        // Whether who waits can be served at all may change without an event about it.
        let plain = |state| if state == ClientState::Blocked { ClientState::Waiting } else { state };
        for row in core.client_status().iter().filter(|row| !row.gone && row.state != ClientState::Left) {
            if Some(row.client) == unseen {
                continue;
            }
            let told = self.states.get(&row.client).copied().map(plain);
            assert_eq!(told, Some(plain(row.state)), "client {}: told, and shown", row.client);
        }
    }
}
