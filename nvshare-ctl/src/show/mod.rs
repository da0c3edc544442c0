//! The text of a status: rows, and the reasons why clients wait.

mod rows;
mod table;
mod users;

pub(crate) use rows::{GPUS, client_state, client_table, gpu_rows, kept, occupant, others, seats, state};
pub(crate) use table::{Layout, render};

use std::cmp::Reverse;

use clap::ValueEnum;
use nvshare_admin::Status;
use nvshare_proto::units::Bytes;
use nvshare_proto::{
    AsleepStatus, ClientState, ClientStatus, GpuStatus, GpuUuid, HostStatus, MemoryMode, QuantumRule,
    SchedulerStatus,
};

/// The order of clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sort {
    /// In the order in which they came
    Client,
    /// By user
    User,
    /// Running clients first, then waiting clients
    State,
    /// Most allocated memory first
    Memory,
    /// Longest with the lock first
    Held,
    /// Longest waiting first
    Waited,
}

impl Sort {
    /// Sorts the clients; those that are equal stay in the order in which they came.
    pub(crate) fn sort(self, clients: &mut [ClientStatus]) {
        match self {
            Self::Client => clients.sort_by_key(|client| client.client),
            Self::User => clients.sort_by_key(|client| client.process.as_ref().map(|process| process.user)),
            Self::State => clients.sort_by_key(|client| match client.state {
                ClientState::Running | ClientState::Free => 0,
                ClientState::Draining => 1,
                ClientState::Restoring => 2,
                ClientState::Next => 3,
                ClientState::Waiting => 4,
                ClientState::Blocked => 5,
                ClientState::Idle => 6,
                ClientState::Parked => 7,
                ClientState::Asleep => 8,
                ClientState::Left => 9,
                ClientState::Gone => 10,
            }),
            Self::Memory => clients.sort_by_key(|client| Reverse(allocated(client))),
            Self::Held => clients.sort_by_key(|client| Reverse(client.held_ms)),
            Self::Waited => clients.sort_by_key(|client| Reverse(client.waited_ms)),
        }
    }
}

/// Bytes that a client has allocated on all GPUs together.
pub(crate) fn allocated(client: &ClientStatus) -> u64 {
    client.usage.iter().map(|usage| usage.allocated).fold(0, u64::saturating_add)
}

/// Length of a UUID's beginning that tells one GPU from another: `GPU-51600000`.
const SHORT_UUID: usize = 12;

/// A GPU's number, or the beginning of its UUID: `set-tq --gpu` takes both.
pub(crate) fn gpu_name(gpu: &GpuStatus) -> String {
    gpu.index.map_or_else(|| short_uuid(gpu.gpu), |index| format!("GPU {index}"))
}

/// The beginning of a UUID, for a GPU without a number.
pub(crate) fn short_uuid(gpu: GpuUuid) -> String {
    gpu.to_string().chars().take(SHORT_UUID).collect()
}

/// Seconds as text: `30`, `0.25`.
pub(crate) fn seconds(millis: u64) -> String {
    format!("{}", millis as f64 / 1e3)
}

/// The quantum of the scheduler as text: `30 s`, or `auto` if that of each GPU follows from what was measured.
pub(crate) fn quantum(scheduler: &SchedulerStatus, gpus: &[GpuStatus]) -> String {
    let is_auto = |gpu: &GpuStatus| matches!(gpu.rule, QuantumRule::Auto { .. });
    if !gpus.is_empty() && gpus.iter().all(is_auto) {
        "auto".to_owned()
    } else {
        format!("{} s", seconds(scheduler.quantum_ms))
    }
}

/// A line about the memory of the host that the scheduler hands out.
pub(crate) fn host_memory(HostStatus { budget, each, used }: HostStatus) -> String {
    let part = if each < budget { format!(", {} for one tenant", Bytes(each)) } else { String::new() };
    format!("memory of the host: {} in use of {}{part}", Bytes(used), Bytes(budget))
}

/// A span of time as text.
pub(crate) fn span(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// A line for each client that waits for something, or does not answer, with the reason.
pub(crate) fn reasons(status: &Status) -> Vec<String> {
    let name = |uuid| {
        let gpu = status.gpus.iter().find(|gpu| gpu.gpu == uuid);
        gpu.map_or_else(|| uuid.to_string(), gpu_name)
    };
    let mut lines = Vec::new();
    for client in status.clients.iter().filter(|client| !client.gone) {
        let id = client.client;
        if client.stuck {
            let (name, keeps, advice) = (&client.name, Bytes(client.resident), way_out(status, client));
            lines.push(format!(
                "client {id} ({name}) does not answer, and keeps {keeps}; if its process is stopped, {advice}"
            ));
        }
        match client.state {
            ClientState::Waiting => lines.extend(turn(status, client)),
            ClientState::Blocked => {
                let gpu = client.blocked_on.map_or_else(|| "its GPU".to_owned(), name);
                lines.push(format!(
                    "client {id} waits until {} free memory of {gpu}: what they have there cannot be moved and leaves no room",
                    holders_up(status, client)
                ));
            }
            _ => {}
        }
    }
    lines
}

/// The way out if a client's process is stopped. Where the kernel gave no number, the client's own is another process's here.
fn way_out(status: &Status, client: &ClientStatus) -> String {
    let pid = client.pid;
    match (&client.process, occupant(&status.seats, client.client)) {
        (Some(_), _) => format!("`kill -CONT {pid}` lets it go on, and `kill -KILL {pid}` frees its memory"),
        (None, Some(container)) => format!("the end of its pod frees its memory ({container})"),
        (None, None) => "the end of its pod or container frees its memory".to_owned(),
    }
}

/// A line for each client whose process is off the GPUs, with what it needs to come back.
pub(crate) fn asleep(status: &Status) -> Vec<String> {
    let name = |uuid| {
        let gpu = status.gpus.iter().find(|gpu| gpu.gpu == uuid);
        gpu.map_or_else(|| short_uuid(uuid), gpu_name)
    };
    let line = |row: &AsleepStatus| {
        let known = row.needs.iter().filter(|need| need.bytes > 0);
        let needs: Vec<String> =
            known.map(|need| format!("{} of {}", Bytes(need.bytes), name(need.gpu))).collect();
        let needs = if needs.is_empty() { String::new() } else { format!(" ({})", needs.join(", ")) };
        let id = row.client;
        if row.wakes {
            format!("client {id} is asleep and comes back as soon as there is room{needs}")
        } else {
            format!("client {id} is asleep: any call of its program brings it back{needs}")
        }
    };
    status.asleep.iter().map(line).collect()
}

/// A line for each GPU that clients with managed memory share with clients whose memory the library maps.
pub(crate) fn mixed(status: &Status) -> Vec<String> {
    let has = |uuid: GpuUuid, memory: MemoryMode| {
        let of_kind = |client: &ClientStatus| {
            status.memory.clients.iter().any(|kind| kind.client == client.client && kind.memory == memory)
        };
        let mut there = status.clients.iter().filter(|client| !client.gone && of_kind(client));
        there.any(|client| client.usage.iter().any(|usage| usage.gpu == uuid))
    };
    let is_mixed = |gpu: &&GpuStatus| has(gpu.gpu, MemoryMode::Managed) && has(gpu.gpu, MemoryMode::Swap);
    let line = |gpu: &GpuStatus| {
        format!(
            "clients on {} have managed memory and NVSHARE_MEMORY=swap: where the card is full, swap for all of them is faster",
            gpu_name(gpu)
        )
    };
    status.gpus.iter().filter(is_mixed).map(line).collect()
}

/// Of a turn and the hand-over after it, the part that the hand-over may take before it is worth a line.
const MUCH: f64 = 0.2;

/// A line for each GPU that spends much of its time on hand-overs, though a longer quantum would help.
pub(crate) fn short_turns(gpus: &[GpuStatus]) -> Vec<String> {
    let line = |gpu: &GpuStatus| {
        let (turn, hand_over) = (gpu.quantum_ms as f64 / 1e3, gpu.switch_cost_us as f64 / 1e6);
        let has_waiters = !gpu.waiters.is_empty() || gpu.others.is_some_and(|others| others.waiters > 0);
        let is_fixed = matches!(gpu.rule, QuantumRule::Fixed { .. });
        (is_fixed && has_waiters && hand_over > MUCH * (turn + hand_over)).then(|| {
            format!(
                "hand-overs on {} take {hand_over:.1} s of each {:.1} s: `nvshare-ctl set-tq auto`, or a longer quantum",
                gpu_name(gpu),
                turn + hand_over
            )
        })
    };
    gpus.iter().filter_map(line).collect()
}

/// The clients that keep a blocked client waiting: those on its GPU that do not answer are named.
fn holders_up(status: &Status, blocked: &ClientStatus) -> String {
    let gpu = status.gpus.iter().find(|gpu| Some(gpu.gpu) == blocked.blocked_on);
    let holders = gpu.map_or(&[][..], |gpu| gpu.holders.as_slice());
    let is_in_the_way = |client: &&ClientStatus| client.stuck && holders.contains(&client.client);
    let stuck: Vec<String> =
        status.clients.iter().filter(is_in_the_way).map(|client| client.client.to_string()).collect();
    match stuck.as_slice() {
        [] => "others".to_owned(),
        stuck => format!("{} and others", named(stuck)),
    }
}

/// The GPU, the place in its queue, and the holders that a waiting client waits for.
fn turn(status: &Status, client: &ClientStatus) -> Option<String> {
    let id = client.client;
    let gpu = status.gpus.iter().find(|gpu| gpu.waiters.contains(&id))?;
    let others = gpu.others.unwrap_or_default();
    let holders: Vec<String> = gpu.holders.iter().map(u64::to_string).collect();
    let holders = match (holders.is_empty(), others.holders) {
        (true, 0) => "nobody holds it yet".to_owned(),
        (true, _) => "others hold it".to_owned(),
        (false, 0) if holders.len() == 1 => format!("{} holds it", named(&holders)),
        (false, 0) => format!("{} hold it", named(&holders)),
        (false, _) => format!("{} and others hold it", named(&holders)),
    };
    let place = gpu.waiters.iter().position(|&waiter| waiter == id)? + 1;
    // The number of other users' clients in between is not shown.
    let place = if others.waiters == 0 { format!(", number {place} in the queue") } else { String::new() };
    let length = if gpu.slices {
        "turns are slices of 0.1 s at most".to_owned()
    } else {
        format!("a turn lasts {} s", seconds(gpu.quantum_ms))
    };
    Some(format!("client {id} waits for its turn on {}{place}: {holders}; {length}", gpu_name(gpu)))
}

/// Clients by their numbers: `client 1`, `clients 1, 2`.
fn named(ids: &[String]) -> String {
    format!("{} {}", if ids.len() == 1 { "client" } else { "clients" }, ids.join(", "))
}

#[cfg(test)]
mod tests {
    use nvshare_proto::{
        Amount, ClientMemory, Occupant, ProcessInfo, Seat, SeatStatus, Slot, TenantSettings,
    };

    use super::*;

    #[test]
    fn the_quantum_is_auto_if_that_of_each_gpu_is() {
        let scheduler = SchedulerStatus {
            version: String::new(),
            pid: 1,
            uptime_s: 0,
            scheduling: true,
            quantum_ms: 250,
            restricted: false,
            host_memory: None,
        };
        let gpu = |rule| GpuStatus { rule, ..GpuStatus::idle(GpuUuid([7; 16])) };
        let fixed = gpu(QuantumRule::Fixed { millis: 5000 });
        let auto = gpu(QuantumRule::Auto { overhead_ppm: 50_000, max_wait_ms: 30_000 });
        assert_eq!(quantum(&scheduler, &[]), "0.25 s");
        assert_eq!(quantum(&scheduler, &[auto.clone(), fixed]), "0.25 s");
        assert_eq!(quantum(&scheduler, &[auto.clone(), auto]), "auto");
    }

    #[test]
    fn a_turn_that_a_client_waits_for_is_described() {
        let clients = vec![crate::top::tests::client(2, ClientState::Waiting, 0, 0)];
        let mut status = crate::top::tests::status(clients);
        for (holders, slices, said) in [
            (vec![], false, "nobody holds it yet; a turn lasts 30 s"),
            (vec![1], false, "client 1 holds it; a turn lasts 30 s"),
            (vec![3, 1], true, "clients 3, 1 hold it; turns are slices of 0.1 s at most"),
        ] {
            status.gpus[0] = GpuStatus { holders, slices, ..status.gpus[0].clone() };
            let line = format!("client 2 waits for its turn on GPU 0, number 1 in the queue: {said}");
            assert_eq!(reasons(&status), [line]);
        }
    }

    #[test]
    fn no_command_has_a_number_that_the_kernel_did_not_give() {
        let stuck = |process| ClientStatus {
            stuck: true,
            process,
            ..crate::top::tests::client(2, ClientState::Running, 0, 0)
        };
        let slots = vec![Slot { gpu: GpuUuid([7; 16]), number: 0 }];
        let seat = Seat { slots, given: TenantSettings::default() };
        let occupant = Occupant { namespace: "lab".into(), pod: "train-0".into(), container: "main".into() };
        let name = seat.name();
        let seat = SeatStatus { name, seat, occupant: Some(occupant), clients: vec![2] };
        for (process, seats, advice) in [
            (
                Some(ProcessInfo::default()),
                vec![],
                "`kill -CONT 72` lets it go on, and `kill -KILL 72` frees its memory",
            ),
            (None, vec![seat], "the end of its pod frees its memory (lab/train-0/main)"),
            (None, vec![], "the end of its pod or container frees its memory"),
        ] {
            let status = Status { seats, ..crate::top::tests::status(vec![stuck(process)]) };
            let line = format!(
                "client 2 (job2) does not answer, and keeps 12.00 GiB; if its process is stopped, {advice}"
            );
            assert_eq!(reasons(&status), [line]);
        }
    }

    #[test]
    fn what_sleepers_need_is_said() {
        let gpu = GpuUuid([7; 16]);
        let mut status = crate::top::tests::status(Vec::new());
        status.gpus = vec![GpuStatus { index: Some(0), ..GpuStatus::idle(gpu) }];
        let needs = vec![Amount { gpu, bytes: 1 << 30 }];
        status.asleep = vec![
            AsleepStatus { client: 1, needs: needs.clone(), wakes: false },
            AsleepStatus { client: 2, needs, wakes: true },
            AsleepStatus { client: 3, needs: vec![Amount { gpu, bytes: 0 }], wakes: false },
        ];
        assert_eq!(
            asleep(&status),
            [
                "client 1 is asleep: any call of its program brings it back (1.00 GiB of GPU 0)",
                "client 2 is asleep and comes back as soon as there is room (1.00 GiB of GPU 0)",
                "client 3 is asleep: any call of its program brings it back",
            ]
        );
    }

    #[test]
    fn turns_that_are_short_for_what_hand_overs_cost_are_said() {
        let gpu = GpuStatus {
            rule: QuantumRule::Fixed { millis: 4000 },
            quantum_ms: 4000,
            switch_cost_us: 3_600_000,
            waiters: vec![2],
            ..GpuStatus::idle(GpuUuid([7; 16]))
        };
        let said = short_turns(std::slice::from_ref(&gpu));
        assert!(said[0].contains("take 3.6 s of each 7.6 s: `nvshare-ctl set-tq auto`"), "{said:?}");
        let auto = QuantumRule::Auto { overhead_ppm: 50_000, max_wait_ms: 30_000 };
        for fine in [
            GpuStatus { rule: auto, ..gpu.clone() },
            GpuStatus { waiters: vec![], ..gpu.clone() },
            GpuStatus { switch_cost_us: 900_000, ..gpu },
        ] {
            assert!(short_turns(&[fine]).is_empty());
        }
    }

    #[test]
    fn clients_whose_memory_differs_in_kind_are_named_by_their_gpu() {
        let client = |id| crate::top::tests::client(id, ClientState::Running, 0, 0);
        let with = |one, other| {
            let mut status = crate::top::tests::status(vec![client(1), client(2)]);
            let kinds = [(1, one), (2, other)];
            status.memory.clients = kinds.map(|(client, memory)| ClientMemory { client, memory }).into();
            status
        };
        let of = |[one, other]: &[MemoryMode; 2]| mixed(&with(*one, *other));
        assert!(of(&[MemoryMode::Managed, MemoryMode::Managed]).is_empty());
        assert!(of(&[MemoryMode::Swap, MemoryMode::Off]).is_empty());
        let said = of(&[MemoryMode::Managed, MemoryMode::Swap]);
        assert!(said[0].starts_with("clients on GPU 0 have managed memory"), "{said:?}");
        let mut status = with(MemoryMode::Managed, MemoryMode::Swap);
        status.clients[1].gone = true;
        assert!(mixed(&status).is_empty());
    }

    #[test]
    fn a_tenants_part_is_named_if_it_is_not_all() {
        let host = HostStatus { budget: 8 << 30, each: 8 << 30, used: 1 << 30 };
        assert_eq!(host_memory(host), "memory of the host: 1.00 GiB in use of 8.00 GiB");
        let host = HostStatus { each: 2 << 30, ..host };
        assert_eq!(
            host_memory(host),
            "memory of the host: 1.00 GiB in use of 8.00 GiB, 2.00 GiB for one tenant"
        );
    }

    #[test]
    fn spans_for_people() {
        for (seconds, text) in
            [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 days")]
        {
            assert_eq!(span(seconds), text);
        }
    }
}
