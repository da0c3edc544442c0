//! Processes that live on after their connection: what they left stays charged to them until they end, run another program, or
//! are seen to have nothing.

use nvshare_proto::units::Bytes;
use nvshare_proto::{EventKind, GpuUuid};

use crate::Time;
use crate::state::client::{Client, ClientId, Job};
use crate::state::gpu::{Departed, Gpu};
use crate::state::ledger::{Entry, Standing};
use crate::state::share::Activity;
use crate::steps::books::Books;

/// The memory of a client that has left while its process lives on stays charged on a GPU; after `due`, the log says so.
pub(crate) fn leave_behind(gpu: &mut Gpu, client: &Client, bytes: u64, due: Time) {
    gpu.ledger.set(client.id, Some(departed_entry(client.id, bytes, Some(due))));
    let departed = Departed {
        identity: client.identity,
        pid: client.pid,
        name: client.name.clone(),
        bytes,
        reported: false,
        unseen: 0,
    };
    gpu.departed.insert(client.id, departed);
}

impl Books {
    /// Frees what some processes have left on a GPU, and returns them.
    pub(crate) fn forget_departed(
        &mut self,
        uuid: GpuUuid,
        which: impl Fn(ClientId, &Departed) -> bool,
    ) -> Vec<Departed> {
        let Some(gpu) = self.state.gpus.get_mut(&uuid) else { return Vec::new() };
        let gone = gpu.departed.extract_if(.., |id, departed| which(*id, departed));
        let gone: Vec<(ClientId, Departed)> = gone.collect();
        for (id, _) in &gone {
            gpu.ledger.set(*id, None);
        }
        if !gone.is_empty() {
            self.agenda.look_again(gpu);
        }
        for (id, departed) in &gone {
            self.report.tell_on(EventKind::Ended, *id, uuid, departed.bytes);
        }
        gone.into_iter().map(|(_, departed)| departed).collect()
    }

    /// Reports a process that has left, and lives on for longer than its end should take.
    pub(crate) fn report_departed(&mut self, id: ClientId, uuid: GpuUuid) {
        let Some(gpu) = self.state.gpus.get_mut(&uuid) else { return };
        let Some(departed) = gpu.departed.get_mut(&id) else {
            gpu.ledger.set(id, None);
            return;
        };
        departed.reported = true;
        let text = format!(
            "process {} ({}) has left and lives on: {} of {uuid} stay charged to it until it ends or runs another program",
            departed.pid,
            departed.name,
            Bytes(departed.bytes)
        );
        gpu.ledger.set(id, Some(departed_entry(id, departed.bytes, None)));
        self.agenda.look_again(gpu);
        self.report.warn(text);
    }
}

fn departed_entry(id: ClientId, bytes: u64, due: Option<Time>) -> Entry {
    Entry {
        standing: Standing::Departed,
        room: bytes,
        pinned: bytes,
        demand: 0,
        allocated: 0,
        overhead: 0,
        ordered: None,
        needs: false,
        runs: false,
        stuck: false,
        claims: false,
        activity: Activity::default(),
        payer: Job::Connection(id),
        job: Job::Connection(id),
        place: (0, Time::ZERO, id),
        floats: false,
        total: None,
        due,
    }
}
