//! Clients that leave a GPU. The memory of a client whose process lives on stays charged to the process.

use crate::Time;
use crate::state::client::{Client, ClientId, Job};
use crate::state::entry::{Entry, Standing};
use crate::state::gpu::{Departed, Gpu};
use crate::state::place::Place;
use crate::state::share::Activity;
use crate::state::sleep::Sleeper;

impl Gpu {
    /// Takes a client that is gone off the GPU at the time `now`. If its process lives on, `left` bytes stay
    /// charged to that; after `due`, the log says so.
    pub(crate) fn remove_client(&mut self, client: &Client, now: Time, left: u64, due: Time) {
        if client.phase().holds() {
            self.freed_at = Some(now);
        }
        self.released.remove(&client.id);
        self.shares.advance(now);
        let activity = self.ledger.entry(client.id).map(|entry| entry.activity);
        let most_kept = self.most_kept();
        self.shares.change(client.job, activity, None, most_kept);
        self.ledger.set(client.id, None);
        if left > 0 {
            self.ledger.set(client.id, Some(entry(client.id, left, Some(due))));
            let departed = Departed {
                identity: client.identity,
                pid: client.pid,
                name: client.name.clone(),
                bytes: left,
                since: now,
                reported: false,
                unseen: 0,
            };
            self.departed.insert(client.id, departed);
        }
    }

    /// The memory that a client's process had left before it came back, without this GPU, counts as left by this client, which has
    /// gone as well: a process is one row, however often it comes. Returns the earlier clients, with what each had left.
    pub(crate) fn hand_on_departed(&mut self, client: &Client) -> Vec<(ClientId, u64)> {
        let is_earlier =
            |id: ClientId, left: &Departed| id < client.id && left.identity.is_same_process(client.identity);
        let earlier = self.departed.extract_if(.., |id, departed| is_earlier(*id, departed));
        let earlier: Vec<(ClientId, Departed)> = earlier.collect();
        let mut handed_on = Vec::new();
        for (id, mut departed) in earlier {
            handed_on.push((id, departed.bytes));
            let due = self.ledger.entry(id).and_then(|entry| entry.due);
            self.ledger.set(id, None);
            let own = self.departed.get(&client.id).map_or(0, |own| own.bytes);
            departed.bytes = departed.bytes.saturating_add(own);
            self.ledger.set(client.id, Some(entry(client.id, departed.bytes, due)));
            self.departed.insert(client.id, departed);
        }
        handed_on
    }

    /// Frees the memory that some processes have left, and returns them.
    pub(crate) fn forget_departed(
        &mut self,
        which: impl Fn(ClientId, &Departed) -> bool,
    ) -> Vec<(ClientId, Departed)> {
        let gone = self.departed.extract_if(.., |id, departed| which(*id, departed));
        let gone: Vec<(ClientId, Departed)> = gone.collect();
        for (id, _) in &gone {
            self.ledger.set(*id, None);
        }
        gone
    }

    /// Notes that the log says that a process has left and lives on. Returns the process.
    pub(crate) fn report_departed(&mut self, id: ClientId) -> Option<&Departed> {
        let Some(departed) = self.departed.get_mut(&id) else {
            debug_assert!(false, "an entry without a client is that of a process that has left");
            self.ledger.set(id, None);
            return None;
        };
        departed.reported = true;
        self.ledger.set(id, Some(entry(id, departed.bytes, None)));
        Some(departed)
    }
}

/// Returns the entry of a process that has left.
fn entry(id: ClientId, bytes: u64, due: Option<Time>) -> Entry {
    Entry {
        standing: Standing::Departed,
        room: bytes,
        pinned: bytes,
        demand: 0,
        allocated: 0,
        overhead: 0,
        bytes_ordered_out: None,
        has_need: false,
        is_running: false,
        is_silent: false,
        is_claiming: false,
        activity: Activity::default(),
        payer: Job::Connection(id),
        job: Job::Connection(id),
        place: Place::nowhere(id),
        is_floating: false,
        total: None,
        due,
        sleeper: Sleeper::default(),
    }
}
