//! Clients go, and processes end.

use nvshare_proto::EventKind;

use crate::state::client::{Client, ClientId, GangId, Identity};
use crate::state::gpu::Gpu;
use crate::steps::books::Books;

impl Books {
    pub(crate) fn on_disconnected(&mut self, id: ClientId, process_remains: bool) {
        let now = self.state().now();
        // The connection of a process that never registered may end as well.
        let Some(mut client) = self.remove_client(id) else { return };
        client.count(now);
        // The process may have come back before we heard that it was gone: it has reported by then what it
        // has.
        let is_back = process_remains
            && self.state().clients().any(|other| other.identity.is_same_process(client.identity));
        let left = self.take_off_gpus(&client, process_remains && !is_back);
        self.report_mut().info(format!("client {id} is gone ({}, pid {})", client.name, client.pid));
        let (kind, bytes) = if left > 0 { (EventKind::Left, Some(left)) } else { (EventKind::Gone, None) };
        self.report_mut().emit(kind, &client, bytes, None);
        client.accounts.values_mut().for_each(|account| account.room = 0);
        self.remember(&client);
        self.leave_job(&client);
        for uuid in client.gpus() {
            self.agree_on_size(uuid);
        }
        if let Some(gang) = client.gang {
            self.leave_gang(id, gang);
        }
    }

    /// Takes a client that is gone out of the ledgers of its GPUs. If its process remains, its room stays
    /// charged to it, with all that the process had left before. Returns these bytes.
    fn take_off_gpus(&mut self, client: &Client, process_remains: bool) -> u64 {
        let (now, grace) = (self.state().now(), self.state().config().grace);
        let mut kept_bytes: u64 = 0;
        for (uuid, account) in &client.accounts {
            let stays = if process_remains { account.room } else { 0 };
            let remove = |gpu: &mut Gpu| gpu.remove_client(client, now, stays, now + grace);
            self.change_gpu(*uuid, remove);
            self.queue_with_watchers(*uuid);
            // Memory of a process that has not ended yet is not free.
            if !process_remains {
                self.look_for_those_that_wake(*uuid);
            }
            kept_bytes = kept_bytes.saturating_add(stays);
        }
        if process_remains {
            for uuid in self.state().gpu_uuids() {
                let earlier = self.change_gpu(uuid, |gpu| gpu.hand_on_departed(client)).unwrap_or_default();
                for (id, bytes) in earlier {
                    // Nothing is left under its number, and those that count clients may forget it.
                    self.report_mut().emit_on(EventKind::Ended, id, uuid, bytes);
                    kept_bytes = kept_bytes.saturating_add(bytes);
                }
            }
        }
        kept_bytes
    }

    /// Takes a client that is gone out of its gang, and lets the other members go on.
    fn leave_gang(&mut self, id: ClientId, gang: GangId) {
        // None: it was the last member.
        let Some(other) = self.remove_member(id, gang) else { return };
        self.gather_gang(other);
        // Those that are left may share memory with nobody any more.
        self.take_apart(other);
        if self.state().gang_of(other) != Some(gang) {
            return;
        }
        self.release_drained(other);
        let unit = self.state().unit(other);
        self.apply_pauses(unit.to_vec());
        for &other in unit.iter() {
            // Their drains may have failed because of the client that is gone.
            self.change_client(other, Client::forget_deferrals);
            self.rewrite_entries(other);
            self.tell_later([other]);
        }
        // Members may not have had their turn because of the client that is gone.
        self.queue(self.state().gpus_of(&unit));
    }

    /// Frees the memory that a process had left, when it has ended or runs another program. It may have left
    /// memory each time that it disconnected, on different GPUs.
    pub(crate) fn on_exited(&mut self, id: ClientId, identity: Identity) {
        for uuid in self.state().gpu_uuids() {
            self.forget_departed(uuid, |other, departed| {
                // A higher number is that of the process's next program, whose memory is still there.
                other == id || other < id && departed.identity.is_same_process(identity)
            });
        }
    }
}
