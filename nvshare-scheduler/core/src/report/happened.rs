//! Events for those who watch the scheduler. The core compares each client before and after a change, so that no change is
//! left out, and a follower of the events knows where each client stands.

use std::mem::discriminant;
use std::time::Duration;

use nvshare_proto::{EventKind, GpuUuid};

use crate::state::account::Account;
use crate::state::client::{Client, ClientId, Phase};
use crate::{Core, Time};

/// Something that happened.
#[derive(Debug, Clone, PartialEq)]
pub struct Happened {
    /// The kind of event.
    pub kind: EventKind,
    /// The client that the event is about; none: the scheduler.
    pub client: Option<ClientId>,
    /// The GPUs that the event is about.
    pub gpus: Vec<GpuUuid>,
    /// The bytes that the event is about; see [`EventKind`].
    pub bytes: Option<u64>,
    /// How long the step took; see [`EventKind`].
    pub took: Option<Duration>,
}

/// The part of a client's state that events report.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Glance {
    phase: Phase,
    wants: bool,
    stuck: bool,
}

impl Glance {
    pub(crate) fn of(client: &Client) -> Self {
        Self { phase: client.phase, wants: client.wants, stuck: client.stuck }
    }

    fn waits(self) -> bool {
        self.wants && self.phase == Phase::Parked
    }
}

/// The event for a change of a client's phase, and how long the phase before it took.
fn phase_changed(before: Phase, after: Phase, now: Time) -> Option<(EventKind, Option<Duration>)> {
    if discriminant(&before) == discriminant(&after) {
        return None;
    }
    let since = |since| Some(now.saturating_sub(since));
    Some(match (before, after) {
        (Phase::Dropping { since: asked, .. }, Phase::Running { .. }) => (EventKind::Deferred, since(asked)),
        (Phase::Granted { since: granted, .. }, Phase::Running { .. }) => {
            (EventKind::Running, since(granted))
        }
        (_, Phase::Running { .. }) => (EventKind::Running, None),
        (Phase::Dropping { since: asked, .. }, Phase::Parked) => (EventKind::Released, since(asked)),
        (Phase::Next(_), Phase::Parked) => (EventKind::Withdrawn, None),
        (_, Phase::Parked) => (EventKind::Released, None),
        (_, Phase::Next(_)) => (EventKind::Next, None),
        (_, Phase::Granted { .. }) => (EventKind::Granted, None),
        // No event until the other members of the gang have drained as well.
        (Phase::Dropping { .. }, Phase::Drained) => return None,
        (_, Phase::Dropping { .. } | Phase::Drained) => (EventKind::Drop, None),
        (_, Phase::Idle { .. }) => (EventKind::Idle, None),
        (_, Phase::Free) => (EventKind::Free, None),
    })
}

/// The events for a change of an account: kind, bytes, and how long the step took.
fn account_changed(
    before: &Account,
    after: &Account,
    now: Time,
) -> impl Iterator<Item = (EventKind, u64, Option<Duration>)> {
    let ordered = match (before.order, after.order) {
        (None, Some(order)) => Some((EventKind::Evict, order.bytes, None)),
        (Some(order), None) => Some((EventKind::Evicted, order.came, Some(now.saturating_sub(order.given)))),
        _ => None,
    };
    let stays = after.reported_short && !before.reported_short;
    let stays = stays.then(|| (EventKind::Stays, after.staying(), None));
    let needed = match (before.needs, after.needs) {
        (0, 1..) => Some((EventKind::NeedRoom, after.needs, None)),
        (1.., 0) if after.room > before.room => Some((EventKind::Room, after.room - before.room, None)),
        _ => None,
    };
    ordered.into_iter().chain(stays).chain(needed)
}

impl Core {
    /// The next event since the last call of [`Core::handle`], which forgets all events that were not taken.
    pub fn poll_happened(&mut self) -> Option<Happened> {
        self.happened.pop_front()
    }

    /// Reports what changed about a client.
    pub(crate) fn tell_changes(&mut self, id: ClientId, before: Glance) {
        let Some(client) = self.clients.get(&id) else { return };
        let (after, now) = (Glance::of(client), self.now);
        if let Some((kind, took)) = phase_changed(before.phase, after.phase, now) {
            let bytes = match kind {
                EventKind::Granted => Some(self.note_what_is_to_come_back(id)),
                EventKind::Running if took.is_some() => Some(self.tell_restored(id, took)),
                _ => None,
            };
            self.tell(kind, id, bytes, took);
        }
        if after.waits() && !before.waits() {
            self.tell(EventKind::Waiting, id, None, None);
        }
        if after.stuck && !before.stuck {
            self.tell(EventKind::Stuck, id, None, None);
        }
    }

    /// Records the bytes that a client will restore under its grant, and returns their sum. They are recorded now, since
    /// the client reports new usage while it restores.
    fn note_what_is_to_come_back(&mut self, id: ClientId) -> u64 {
        let Some(client) = self.clients.get_mut(&id) else { return 0 };
        client.accounts.values_mut().fold(0, |sum: u64, account| {
            let before = account.ahead.map_or(0, |ahead| ahead.absent);
            account.restores = account.usage.absent.max(before).min(account.room);
            sum.saturating_add(account.restores)
        })
    }

    /// Reports the bytes that a client restored on each GPU, and returns their sum.
    fn tell_restored(&mut self, id: ClientId, took: Option<Duration>) -> u64 {
        let now = self.now;
        let Some(client) = self.clients.get(&id) else { return 0 };
        let mut all: u64 = 0;
        for (&gpu, account) in client.accounts.iter().filter(|(_, account)| account.restores > 0) {
            all = all.saturating_add(account.restores);
            let took = account.ahead.map_or(took, |ahead| Some(now.saturating_sub(ahead.since)));
            let (kind, client, gpus) = (EventKind::Restored, Some(id), vec![gpu]);
            self.happened.push_back(Happened { kind, client, gpus, bytes: Some(account.restores), took });
        }
        all
    }

    /// Reports what changed about a client's memory on a GPU.
    pub(crate) fn tell_account_changes(&mut self, id: ClientId, gpu: GpuUuid, before: &Account) {
        let Some(after) = self.account(id, gpu) else { return };
        for (kind, bytes, took) in account_changed(before, after, self.now).collect::<Vec<_>>() {
            let (client, gpus) = (Some(id), vec![gpu]);
            self.happened.push_back(Happened { kind, client, gpus, bytes: Some(bytes), took });
        }
    }

    /// Reports an event of a client, on all its GPUs.
    pub(crate) fn tell(&mut self, kind: EventKind, id: ClientId, bytes: Option<u64>, took: Option<Duration>) {
        let gpus = self.gpus_used_by(id);
        self.happened.push_back(Happened { kind, client: Some(id), gpus, bytes, took });
    }

    /// Reports an event about a client's memory on one GPU.
    pub(crate) fn tell_on(&mut self, kind: EventKind, id: ClientId, gpu: GpuUuid, bytes: u64) {
        let (client, gpus, bytes) = (Some(id), vec![gpu], Some(bytes));
        self.happened.push_back(Happened { kind, client, gpus, bytes, took: None });
    }

    /// Reports what an administrator changed.
    pub(crate) fn tell_setting(&mut self, kind: EventKind, gpu: Option<GpuUuid>, took: Option<Duration>) {
        let gpus = gpu.into_iter().collect();
        self.happened.push_back(Happened { kind, client: None, gpus, bytes: None, took });
    }
}
