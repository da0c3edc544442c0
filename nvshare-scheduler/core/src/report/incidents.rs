//! Events for programs that watch the scheduler. The core compares each client before and after a change. So
//! no change is left out, and a follower of the events knows where each client stands.

use std::mem::discriminant;
use std::time::Duration;

use nvshare_proto::{EventKind, GpuUuid};

use crate::Time;
use crate::report::Report;
use crate::state::account::Account;
use crate::state::client::{Client, ClientId, Phase};

/// An event for programs that watch.
#[derive(Debug, Clone, PartialEq)]
pub struct Incident {
    /// The kind of event.
    pub kind: EventKind,
    /// The client that it is about; `None` if it is about the scheduler.
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
    asleep: bool,
}

impl Glance {
    pub(crate) fn of(client: &Client) -> Self {
        Self {
            phase: client.phase(),
            wants: client.wants,
            stuck: client.is_unresponsive,
            asleep: client.sleep.is_off_card(),
        }
    }

    fn waits(self) -> bool {
        self.wants && self.phase == Phase::Parked && !self.asleep
    }
}

/// Returns the event for a change of a client's phase, and how long the phase before it took.
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

/// Returns the events for a change of an account: kind, bytes, and how long the step took.
fn account_changed(
    before: &Account,
    after: &Account,
    now: Time,
) -> impl Iterator<Item = (EventKind, u64, Option<Duration>)> {
    let ordered = match (before.evict_order, after.evict_order) {
        (None, Some(order)) => Some((EventKind::Evict, order.bytes, None)),
        (Some(order), None) => Some((EventKind::Evicted, order.came, Some(now.saturating_sub(order.given)))),
        _ => None,
    };
    let has_failed = after.reported_unevictable && !before.reported_unevictable;
    let stays = has_failed.then(|| (EventKind::Stays, after.unevictable_bytes(), None));
    let needed = match (before.needs, after.needs) {
        (0, 1..) => Some((EventKind::NeedRoom, after.needs, None)),
        (1.., 0) if after.room > before.room => Some((EventKind::Room, after.room - before.room, None)),
        _ => None,
    };
    ordered.into_iter().chain(stays).chain(needed)
}

impl Report {
    /// Drops the incidents of the last event that nobody took.
    pub(crate) fn forget_incidents(&mut self) {
        self.incidents.clear();
    }

    pub(crate) fn poll_incident(&mut self) -> Option<Incident> {
        self.incidents.pop_front()
    }

    /// Reports what changed about a client.
    pub(crate) fn emit_client_changes(&mut self, client: &Client, before: Glance, now: Time) {
        let after = Glance::of(client);
        if let Some((kind, took)) = phase_changed(before.phase, after.phase, now) {
            let bytes = match kind {
                EventKind::Granted => Some(client.restores()),
                EventKind::Running if took.is_some() => {
                    self.emit_restored(client, took, now);
                    Some(client.restores())
                }
                _ => None,
            };
            self.emit(kind, client, bytes, took);
        }
        if after.waits() && !before.waits() {
            self.emit(EventKind::Waiting, client, None, None);
        }
        if after.stuck && !before.stuck {
            self.emit(EventKind::Stuck, client, None, None);
        }
    }

    /// Reports the bytes that a client restored on each GPU.
    fn emit_restored(&mut self, client: &Client, took: Option<Duration>, now: Time) {
        for (&gpu, account) in client.accounts.iter().filter(|(_, account)| account.restores > 0) {
            let took = account.early.map_or(took, |early| Some(now.saturating_sub(early.since)));
            let (kind, client, gpus) = (EventKind::Restored, Some(client.id), vec![gpu]);
            self.incidents.push_back(Incident { kind, client, gpus, bytes: Some(account.restores), took });
        }
    }

    /// Reports what changed about a client's memory on a GPU.
    pub(crate) fn emit_account_changes(
        &mut self,
        id: ClientId,
        gpu: GpuUuid,
        [before, after]: [&Account; 2],
        now: Time,
    ) {
        for (kind, bytes, took) in account_changed(before, after, now) {
            let (client, gpus) = (Some(id), vec![gpu]);
            self.incidents.push_back(Incident { kind, client, gpus, bytes: Some(bytes), took });
        }
    }

    /// Reports an event of a client, on all its GPUs.
    pub(crate) fn emit(
        &mut self,
        kind: EventKind,
        client: &Client,
        bytes: Option<u64>,
        took: Option<Duration>,
    ) {
        let (client, gpus) = (Some(client.id), client.gpus());
        self.incidents.push_back(Incident { kind, client, gpus, bytes, took });
    }

    /// Reports an event about a client's memory on one GPU.
    pub(crate) fn emit_on(&mut self, kind: EventKind, id: ClientId, gpu: GpuUuid, bytes: u64) {
        let (client, gpus, bytes) = (Some(id), vec![gpu], Some(bytes));
        self.incidents.push_back(Incident { kind, client, gpus, bytes, took: None });
    }

    /// Reports what an administrator changed. A quantum is shown as the time that it took.
    pub(crate) fn emit_setting(&mut self, kind: EventKind, gpu: Option<GpuUuid>, quantum: Option<Duration>) {
        let gpus = gpu.into_iter().collect();
        self.incidents.push_back(Incident { kind, client: None, gpus, bytes: None, took: quantum });
    }
}
