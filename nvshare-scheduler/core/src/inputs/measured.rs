//! NVML has measured a GPU.

use std::collections::BTreeMap;

use nvshare_proto::GpuUuid;
use nvshare_proto::units::Bytes;

use crate::inputs::Measured;
use crate::report::warnings::Topic;
use crate::state::account::MAX_OVERHEAD;
use crate::state::client::{Client, ClientId, Phase};
use crate::state::gpu::{CapacityFigures, CapacitySource};
use crate::steps::books::Books;

/// A process counts as having nothing on a GPU after this many looks of NVML in a row that do not show it.
const LOOKS_WITHOUT_A_SIGN: u32 = 2;

impl Books {
    pub(crate) fn on_measured(&mut self, measured: &Measured) {
        let uuid = measured.gpu;
        let users: Vec<ClientId> = match self.state().gpu(uuid) {
            Some(gpu) => gpu.ledger.entries().map(|(id, _)| id).collect(),
            None => Vec::new(),
        };
        let mut size = CapacityFigures { available: measured.available, ..CapacityFigures::default() };
        for (id, &used) in &measured.used {
            // The client has a context on the GPU and has not allocated anything there.
            let idle = |client: &Client| !client.accounts.contains_key(&uuid);
            size.overhead +=
                if self.state().client(*id).is_some_and(idle) { used.min(MAX_OVERHEAD) } else { 0 };
        }
        // Of processes that have come back since NVML was asked.
        let mut not_seen: u64 = 0;
        for &id in &users {
            not_seen = not_seen.saturating_add(self.measure_client(id, measured, &mut size));
        }
        self.look_for_departed(uuid, &measured.used);
        let used = measured.used.values().fold(not_seen, |sum: u64, &used| sum.saturating_add(used));
        size.free = Some(measured.available.saturating_sub(used));
        let known = self.state().gpu(uuid);
        size.set_aside = known.map_or(0, |gpu| gpu.ledger.sleepers().to_set_aside());
        let is_first = known.is_none_or(|gpu| gpu.source != CapacitySource::Certain);
        let is_waited_for = known.is_some_and(|gpu| gpu.ledger.sleepers().first().is_some());
        self.set_size(uuid, size, CapacitySource::Certain);
        self.change_gpu(uuid, |gpu| gpu.looked_at = gpu.looked_at.max(Some(measured.asked_at)));
        if is_first {
            // From now on, it is known how much sleepers need.
            users.into_iter().for_each(|id| self.rewrite_entry_on(id, uuid));
        }
        if is_waited_for {
            self.queue([uuid]);
        }
    }

    /// Notes that nothing measures a GPU: nobody waits for that.
    pub(crate) fn on_unmeasured(&mut self, uuid: GpuUuid) {
        let now = self.state().now();
        if self.change_gpu(uuid, |gpu| gpu.looked_at = Some(now)).is_some() {
            self.queue([uuid]);
        }
    }

    /// Corrects a client's account by what was measured of a GPU, and adds the client's part to the GPU's
    /// size. Returns the bytes that its process has and NVML did not see, as it came back after NVML was asked.
    fn measure_client(&mut self, id: ClientId, measured: &Measured, size: &mut CapacityFigures) -> u64 {
        let uuid = measured.gpu;
        // A process that has left has an entry as well, and no account.
        let Some(client) = self.state().client(id) else { return 0 };
        let (name, memory) = (client.name.clone(), client.memory);
        let listed = measured.used.get(&id).copied();
        // A client that is not listed where others are has nothing there.
        let seen = match listed {
            None if client.identity.pid.is_some() && !measured.used.is_empty() => Some(0),
            listed => listed,
        };
        let (is_off_card, keeps_still) = (client.sleep.is_off_card(), client.sleep.keeps_still());
        let asked_at = measured.asked_at;
        let was_away = client.awake_since.is_some_and(|since| since >= asked_at);
        let is_moving = client.phase().is_next()
            || matches!(client.phase(), Phase::Granted { .. } | Phase::Dropping { .. })
            || client.sleep.is_later_than(asked_at);
        let corrected = self.correct_account(id, uuid, |account| {
            // A process on its way from or to the card has a part of what it needs.
            if !keeps_still && !was_away {
                let holds_still = !is_moving && account.evict_order.is_none();
                account.record_measurement(listed, memory, holds_still, asked_at);
            }
            let seen_now = seen.filter(|_| !was_away);
            let unseen = seen_now.map_or(0, |seen| account.uncharge_unseen(seen, memory, asked_at));
            size.overhead += if is_off_card { 0 } else { account.overhead() };
            // The client may have used all the room that it was given by now.
            size.largest = size.largest.max(account.wanted()).max(account.room);
            let has = account.needs_to_return().saturating_add(account.room);
            (unseen, if was_away { has.saturating_sub(listed.unwrap_or(0)) } else { 0 })
        });
        let (unseen, not_seen) = corrected.unwrap_or_default();
        if unseen > 0 {
            let text = format!(
                "client {id} ({name}) reports {} on {uuid} which NVML does not see: they are no longer charged to it",
                Bytes(unseen)
            );
            self.warn_of_client(Topic::Unseen, id, Some(uuid), &text);
        }
        not_seen
    }

    /// Frees the memory of departed processes that live on and have nothing on the GPU any more: they run
    /// another program now.
    fn look_for_departed(&mut self, uuid: GpuUuid, used: &BTreeMap<ClientId, u64>) {
        self.change_gpu(uuid, |gpu| {
            for (id, departed) in &mut gpu.departed {
                // NVML cannot see a process that has no number here.
                let unseen = departed.identity.pid.is_some() && !used.contains_key(id);
                departed.unseen = if unseen { departed.unseen + 1 } else { 0 };
            }
        });
        for gone in self.forget_departed(uuid, |_, departed| departed.unseen >= LOOKS_WITHOUT_A_SIGN) {
            self.report_mut().info(format!(
                "process {} ({}) lives on and has nothing of {uuid} any more: {} are free",
                gone.pid,
                gone.name,
                Bytes(gone.bytes)
            ));
        }
    }
}
