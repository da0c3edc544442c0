//! The rows that a viewer may see: an administrator sees all, other users see their own. The kernel, or the seat's listener, says
//! whose a process is. Each GPU's row counts the clients of others, and their memory.

use std::collections::{BTreeMap, BTreeSet};

use nvshare_proto::{ClientState, ClientStatus, GpuStatus, GpuUuid, MemoryMode, Others, SeatName};

use crate::gpus::ListedGpu;
use crate::identity::{Described, Viewer};

/// Whether a process is the viewer's own: of the same container, or outside containers of the same user.
fn is_own(viewer: &Described, process: &Described) -> bool {
    match (&viewer.container, &process.container) {
        (None, None) => viewer.info.user == process.info.user,
        (mine, other) => mine == other,
    }
}

/// Keeps the viewer's own clients in the rows; each GPU's row counts the others. Those of a container that has lost its seat are nobody's.
pub(crate) fn restrict(
    viewer: &Viewer,
    processes: &BTreeMap<u64, Described>,
    seated: &BTreeMap<u64, Option<SeatName>>,
    gpus: &mut [GpuStatus],
    clients: &mut Vec<ClientStatus>,
) {
    let is_shown = |client: &ClientStatus| match (viewer, seated.get(&client.client)) {
        (Viewer::Seat(mine), Some(Some(other))) => mine == other,
        (Viewer::Process(Some(viewer)), None) => {
            processes.get(&client.client).is_some_and(|process| is_own(viewer, process))
        }
        _ => false,
    };
    let (shown, hidden): (Vec<_>, Vec<_>) = clients.drain(..).partition(is_shown);
    *clients = shown;
    let shown: BTreeSet<u64> = clients.iter().map(|client| client.client).collect();
    for gpu in gpus {
        let uses = |client: &&ClientStatus| {
            client.state != ClientState::Gone && allocated(client, gpu.gpu).is_some()
        };
        let others: Vec<_> = hidden.iter().filter(uses).collect();
        let count = |ids: &[u64]| ids.iter().filter(|id| !shown.contains(id)).count() as u32;
        gpu.others = Some(Others {
            clients: others.len() as u32,
            allocated: others
                .iter()
                .filter_map(|client| allocated(client, gpu.gpu))
                .fold(0, u64::saturating_add),
            holders: count(&gpu.holders),
            waiters: count(&gpu.waiters),
        });
        gpu.holders.retain(|id| shown.contains(id));
        gpu.waiters.retain(|id| shown.contains(id));
    }
}

fn allocated(client: &ClientStatus, gpu: GpuUuid) -> Option<u64> {
    client.usage.iter().find(|usage| usage.gpu == gpu).map(|usage| usage.allocated)
}

/// Adds numbers and models, and the GPUs that no client has used yet; the rows are in the order of the numbers.
pub(crate) fn list_all(rows: &mut Vec<GpuStatus>, listed: &[ListedGpu], idle: impl Fn(GpuUuid) -> GpuStatus) {
    let mut known: BTreeMap<GpuUuid, GpuStatus> = rows.drain(..).map(|row| (row.gpu, row)).collect();
    for gpu in listed {
        let row = known.remove(&gpu.gpu).unwrap_or_else(|| idle(gpu.gpu));
        rows.push(GpuStatus { index: Some(gpu.index), name: Some(gpu.name.clone()), ..row });
    }
    rows.extend(known.into_values());
}

/// Bytes of clients' managed memory that are on a GPU.
pub(crate) fn managed_on(gpu: GpuUuid, clients: &[ClientStatus], modes: &BTreeMap<u64, MemoryMode>) -> u64 {
    let is_managed = |client: &&ClientStatus| modes.get(&client.client) == Some(&MemoryMode::Managed);
    clients
        .iter()
        .filter(|client| !client.gone)
        .filter(is_managed)
        .flat_map(|client| &client.usage)
        .filter(|usage| usage.gpu == gpu)
        .map(|usage| usage.allocated.saturating_sub(usage.absent).saturating_sub(usage.immovable))
        .fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvshare_proto::{ProcessInfo, Usage};

    const GPU: GpuUuid = GpuUuid([1; 16]);

    #[test]
    fn managed_memory_on_the_card_is_what_is_not_absent() {
        let with = |id, absent| {
            let mut row = client(id);
            row.usage[0].absent = absent;
            row
        };
        let modes = BTreeMap::from([(3, MemoryMode::Managed), (4, MemoryMode::Swap)]);
        let clients = [with(3, 20), with(4, 0), with(5, 0)];
        assert_eq!(managed_on(GPU, &clients, &modes), 10, "10 of its 30; the others' are not managed");
        assert_eq!(managed_on(GpuUuid([2; 16]), &clients, &modes), 0);
    }

    fn process(user: u32, container: Option<&str>) -> Described {
        // All containers here show the same digits.
        let shown = container.map(|_| "0123".to_owned());
        let info = ProcessInfo { user, container: shown, ..ProcessInfo::default() };
        Described { info, container: container.map(str::to_owned) }
    }

    fn client(client: u64) -> ClientStatus {
        let allocated = 10 * client;
        let usage = Usage { gpu: GPU, total: 100, limit: 0, allocated, absent: 0, immovable: 0 };
        ClientStatus { state: ClientState::Waiting, usage: vec![usage], ..ClientStatus::parked(client) }
    }

    fn row(gpu: GpuUuid) -> GpuStatus {
        GpuStatus { capacity: 100, holders: vec![1], waiters: vec![2, 3], ..GpuStatus::idle(gpu) }
    }

    #[test]
    fn everybody_sees_what_is_their_own() {
        let processes = BTreeMap::from([
            (1, process(1000, None)),
            (2, process(1000, Some("/docker/0123"))),
            (3, process(1001, None)),
            (4, process(1000, None)),
            (5, process(1000, None)),
        ]);
        let [seat, other] = ["00000000000000aa", "00000000000000ab"].map(|name| name.parse().unwrap());
        let seated = BTreeMap::from([(4, Some(seat)), (5, None)]);
        let at_socket = |process| Viewer::Process(Some(process));
        for (viewer, expected) in [
            // One of this user is at a seat, and is shown there. Another one was, and its container has gone.
            (at_socket(process(1000, None)), &[1][..]),
            (at_socket(process(1001, None)), &[3]),
            // Root in a container is not root outside.
            (at_socket(process(0, Some("/docker/0123"))), &[2]),
            // A control group of the user's own with another container's digits.
            (at_socket(process(1001, Some("/user.slice/docker-0123.scope"))), &[]),
            (at_socket(process(0, None)), &[]),
            (Viewer::Process(None), &[]),
            (Viewer::Seat(seat), &[4]),
            (Viewer::Seat(other), &[]),
        ] {
            let (mut gpus, mut clients) = ([row(GPU)], (1..6).map(client).collect());
            restrict(&viewer, &processes, &seated, &mut gpus, &mut clients);
            assert_eq!(clients.iter().map(|c| c.client).collect::<Vec<_>>(), expected, "{viewer:?}");
            let shown: u64 = expected.iter().sum();
            let others = gpus[0].others.expect("they are counted");
            assert_eq!((others.clients, others.allocated), (5 - expected.len() as u32, 150 - 10 * shown));
            assert_eq!(others.holders as usize + gpus[0].holders.len(), 1);
            assert_eq!(others.waiters as usize + gpus[0].waiters.len(), 2);
        }
    }

    #[test]
    fn gpus_are_listed_when_idle_too() {
        let other = GpuUuid([2; 16]);
        let unlisted = GpuUuid([3; 16]);
        let listed = [
            ListedGpu { gpu: other, index: 0, name: "A".to_owned(), bus: String::new() },
            ListedGpu { gpu: GPU, index: 1, name: "B".to_owned(), bus: String::new() },
        ];
        let mut rows = vec![row(GPU), row(unlisted)];
        list_all(&mut rows, &listed, |gpu| GpuStatus { holders: Vec::new(), ..row(gpu) });
        let seen: Vec<_> = rows.iter().map(|row| (row.gpu, row.index, row.holders.len())).collect();
        assert_eq!(seen, [(other, Some(0), 0), (GPU, Some(1), 1), (unlisted, None, 1)]);
    }
}
