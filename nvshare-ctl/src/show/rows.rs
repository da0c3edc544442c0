//! The rows of the tables.

use std::time::Duration;

use nvshare_admin::Status;
use nvshare_proto::units::{Bytes, GIB, gib_per_second};
use nvshare_proto::{
    Amount, ClientState, ClientStatus, Enforcement, GpuStatus, Priority, ProcessInfo, QuantumRule,
    SeatStatus, short_command,
};

use super::table::{Column, Layout, NOTHING};
use super::users::Users;
use super::{allocated, gpu_name, seconds, short_uuid};

/// Columns of a GPU.
pub(crate) const GPUS: [Column; 13] = [
    Column::text("GPU"),
    Column::cut("NAME"),
    Column::number("CAPACITY"),
    Column::number("ALLOCATED"),
    Column::number("RESIDENT"),
    Column::text("HOLDERS"),
    Column::text("WAITERS"),
    Column::number("TQ s"),
    Column::number("OVERHEAD").wide(),
    Column::number("TURNS").wide(),
    Column::number("SWITCH ms").wide(),
    Column::number("COST ms").wide(),
    Column::text("UUID").wide(),
];

/// [`nvshare_proto::DEFAULT_WEIGHT`] as it stands in a row.
const DEFAULT_WEIGHT_TEXT: &str = "100";

/// Columns of a client: its process and its state.
const CLIENTS: [Column; 14] = [
    Column::text("CLIENT"),
    Column::text("USER"),
    Column::text("WHERE"),
    Column::text("STATE"),
    Column::number("ALLOCATED"),
    Column::number("LIMIT"),
    Column::number("RESIDENT").wide(),
    Column::number("HOST").wide(),
    Column::number("WEIGHT").wide_if_all_are(DEFAULT_WEIGHT_TEXT),
    Column::text("COMPUTE").wide_if_all_are(NOTHING),
    Column::number("PID"),
    Column::text("CONTAINER").wide(),
    Column::text("POD").wide(),
    Column::text("JOB").wide(),
];

/// Columns of a client's counters.
const COUNTERS: [Column; 11] = [
    Column::number("HELD s"),
    Column::number("WAITED s"),
    Column::number("HAND-OVERS").wide(),
    Column::number("EVICTED").wide(),
    Column::number("COPIED OUT").wide(),
    Column::number("OUT GiB/s").wide(),
    Column::number("RESTORED").wide(),
    Column::number("COPIED IN").wide(),
    Column::number("IN GiB/s").wide(),
    Column::number("GATED").wide(),
    Column::number("PASSED BY").wide(),
];

/// The last column of a client: it may be cut short.
const COMMAND: Column = Column::cut("COMMAND");

fn or_nothing(text: Option<String>) -> String {
    text.filter(|text| !text.is_empty()).unwrap_or_else(|| NOTHING.to_owned())
}

fn ids(ids: &[u64], others: u32) -> String {
    let own = ids.iter().map(u64::to_string);
    or_nothing(Some(own.chain((others > 0).then(|| format!("+{others}"))).collect::<Vec<_>>().join(",")))
}

/// A row for each GPU.
pub(crate) fn gpu_rows(gpus: &[GpuStatus]) -> Vec<Vec<String>> {
    let row = |gpu: &GpuStatus| {
        let others = gpu.others.unwrap_or_default();
        let size = |bytes: u64| or_nothing((gpu.capacity > 0).then(|| Bytes(bytes).to_string()));
        let [switches, median, ..] = gpu.switch_us;
        vec![
            gpu.index.map_or_else(|| gpu_name(gpu), |index| index.to_string()),
            or_nothing(gpu.name.clone()),
            size(gpu.capacity),
            size(gpu.allocated),
            size(gpu.resident),
            ids(&gpu.holders, others.holders),
            ids(&gpu.waiters, others.waiters),
            match gpu.rule {
                QuantumRule::Fixed { .. } => seconds(gpu.quantum_ms),
                QuantumRule::Auto { .. } => format!("auto {}", seconds(gpu.quantum_ms)),
            },
            size(gpu.overhead),
            gpu.turns.to_string(),
            or_nothing((switches > 0).then(|| format!("{:.2}", median as f64 / 1e3))),
            or_nothing((gpu.switch_cost_us > 0).then(|| format!("{:.1}", gpu.switch_cost_us as f64 / 1e3))),
            gpu.gpu.to_string(),
        ]
    };
    gpus.iter().map(row).collect()
}

/// NVML reports a small amount that belongs to no process even on an idle GPU; smaller values are not shown.
const MIN_KEPT: u64 = GIB;

/// A line for each GPU of which the driver keeps much that managed memory has given up.
pub(crate) fn kept(status: &Status) -> Vec<String> {
    let line = |kept: &Amount| {
        let gpu = status.gpus.iter().find(|gpu| gpu.gpu == kept.gpu);
        format!(
            "the driver keeps {} of {} that managed memory has given up, or a program without nvshare has as managed memory",
            Bytes(kept.bytes),
            gpu.map_or_else(|| short_uuid(kept.gpu), gpu_name)
        )
    };
    status.memory.kept.iter().filter(|kept| kept.bytes >= MIN_KEPT).map(line).collect()
}

/// A line for each GPU on which there are clients that are not shown.
pub(crate) fn others(gpus: &[GpuStatus]) -> Vec<String> {
    let line = |gpu: &GpuStatus| {
        let others = gpu.others.filter(|others| others.clients > 0)?;
        Some(format!(
            "others on {}: {} allocated; clients: {}, holding the lock: {}, waiting: {}",
            gpu_name(gpu),
            Bytes(others.allocated),
            others.clients,
            others.holders,
            others.waiters
        ))
    };
    gpus.iter().filter_map(line).collect()
}

/// The word for what a client does. Nothing is paused while scheduling is off.
pub(crate) fn client_state(client: &ClientStatus) -> &'static str {
    let is_free = client.state == ClientState::Free;
    if client.share.paused && !is_free { "paused" } else { state(client.state) }
}

/// A state's name, the same as in `--json`.
pub(crate) fn state(state: ClientState) -> &'static str {
    match state {
        ClientState::Parked => "parked",
        ClientState::Waiting => "waiting",
        ClientState::Blocked => "blocked",
        ClientState::Next => "next",
        ClientState::Restoring => "restoring",
        ClientState::Running => "running",
        ClientState::Draining => "draining",
        ClientState::Idle => "idle",
        ClientState::Free => "free",
        ClientState::Gone => "gone",
        ClientState::Left => "left",
        ClientState::Asleep => "asleep",
    }
}

/// The largest number of containers that one line names.
const MAX_NAMED: usize = 5;

/// A line about seats that containers have, if any do. One to which no client came may be of a container that runs without nvshare.
pub(crate) fn seats(status: &Status) -> Option<String> {
    let held = || status.seats.iter().filter(|seat| seat.occupant.is_some());
    let mut unused: Vec<String> = held()
        .filter(|seat| status.unused_seats.contains(&seat.name))
        .filter_map(|seat| Some(seat.occupant.as_ref()?.to_string()))
        .collect();
    unused.sort();
    let mut line = format!("seats that containers have: {}", held().count());
    if !unused.is_empty() {
        line += &format!("; no client came to: {}", unused[..unused.len().min(MAX_NAMED)].join(", "));
    }
    if unused.len() > MAX_NAMED {
        line += &format!(", and {} more", unused.len() - MAX_NAMED);
    }
    held().next().map(|_| line)
}

/// The container that has the seat of a client.
pub(crate) fn occupant(seats: &[SeatStatus], client: u64) -> Option<String> {
    let seat = seats.iter().find(|seat| seat.clients.contains(&client))?;
    Some(seat.occupant.as_ref()?.to_string())
}

/// The process's pod, container or job, the first that is known, in short.
fn place(process: &ProcessInfo) -> Option<String> {
    let short = |text: &String, length| text.chars().take(length).collect::<String>();
    let pod = process.pod.as_ref().map(|pod| format!("pod {}", short(pod, 8)));
    let container = process.container.as_ref().map(|container| short(container, 12));
    let job = process.job.as_ref().map(|job| format!("job {job}"));
    pod.or(container).or(job)
}

/// The smallest of a client's compute limits: mostly there is one.
fn compute(client: &ClientStatus) -> Option<String> {
    let percent = client.share.compute.iter().map(|limit| limit.percent).min()?;
    Some(match client.share.enforcement {
        Enforcement::Default => format!("{percent} %"),
        Enforcement::Force => format!("{percent} % force"),
        Enforcement::Disable => format!("{percent} % disabled"),
    })
}

/// A client's weight, and its priority if that is not the usual one. A client that is gone has no weight.
fn weight(client: &ClientStatus) -> Option<String> {
    let weight = client.share.weight;
    let words = match client.share.priority {
        Priority::Normal => weight.to_string(),
        priority => format!("{weight} {}", priority.name()),
    };
    (weight > 0).then_some(words)
}

/// The columns of clients and a row for each, with or without their counters.
pub(crate) fn client_table(
    clients: &[ClientStatus],
    seats: &[SeatStatus],
    layout: Layout,
    with_counters: bool,
) -> (Vec<Column>, Vec<Vec<String>>) {
    let counters: &[Column] = if with_counters { &COUNTERS } else { &[] };
    let columns = CLIENTS.iter().chain(counters).copied().chain([COMMAND]).collect();
    let mut users = Users::default();
    let row = |client: &ClientStatus| {
        let mut row = state_cells(client, seats, &mut users);
        if with_counters {
            row.extend(counter_cells(client));
        }
        row.push(command_cell(client, seats, layout));
        row
    };
    (columns, clients.iter().map(row).collect())
}

/// A client's cells for [`CLIENTS`].
fn state_cells(client: &ClientStatus, seats: &[SeatStatus], users: &mut Users) -> Vec<String> {
    let process = client.process.as_ref();
    // The smallest of the client's limits: mostly there is one.
    let limit = client.usage.iter().map(|usage| usage.limit).filter(|&limit| limit > 0).min();
    vec![
        client.client.to_string(),
        or_nothing(process.map(|process| users.name(process.user))),
        or_nothing(occupant(seats, client.client).or_else(|| process.and_then(place))),
        client_state(client).to_owned(),
        Bytes(allocated(client)).to_string(),
        or_nothing(limit.map(|limit| Bytes(limit).to_string())),
        Bytes(client.resident).to_string(),
        or_nothing((client.host_memory > 0).then(|| Bytes(client.host_memory).to_string())),
        or_nothing(weight(client)),
        or_nothing(compute(client)),
        client.pid.to_string(),
        or_nothing(process.and_then(|process| process.container.clone())),
        or_nothing(process.and_then(|process| process.pod.clone())),
        or_nothing(process.and_then(|process| process.job.clone())),
    ]
}

/// A client's cells for [`COUNTERS`].
fn counter_cells(client: &ClientStatus) -> [String; COUNTERS.len()] {
    let counters = &client.counters;
    let rate = |bytes, nanos| format!("{:.1}", gib_per_second(bytes, Duration::from_nanos(nanos)));
    [
        format!("{:.1}", client.held_ms as f64 / 1e3),
        format!("{:.1}", client.waited_ms as f64 / 1e3),
        counters.hand_overs.to_string(),
        Bytes(counters.evicted).to_string(),
        Bytes(counters.copied_out).to_string(),
        rate(counters.copied_out, counters.evict_ns),
        Bytes(counters.restored).to_string(),
        Bytes(counters.copied_in).to_string(),
        rate(counters.copied_in, counters.restore_ns),
        counters.gated.to_string(),
        counters.passed_by.to_string(),
    ]
}

/// A client's cell for [`COMMAND`]: the program's description, or its name where nothing else is known. A program calls itself
/// what it likes, and a pod's is where its row says, so it has no name here.
fn command_cell(client: &ClientStatus, seats: &[SeatStatus], layout: Layout) -> String {
    match &client.process {
        Some(process) if layout.wide => process.command.clone(),
        Some(process) => short_command(&process.command),
        None if occupant(seats, client.client).is_some() => NOTHING.to_owned(),
        None => client.name.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::tests::{client, status};
    use nvshare_proto::{Counters, GpuUuid, Occupant, Seat, Slot, TenantSettings, Usage};

    #[test]
    fn states_have_one_name_in_tables_and_objects() {
        for all in [
            ClientState::Parked,
            ClientState::Waiting,
            ClientState::Blocked,
            ClientState::Next,
            ClientState::Restoring,
            ClientState::Running,
            ClientState::Draining,
            ClientState::Idle,
            ClientState::Free,
            ClientState::Gone,
            ClientState::Left,
            ClientState::Asleep,
        ] {
            assert_eq!(serde_json::to_value(all).unwrap(), state(all));
        }
    }

    #[test]
    fn sizes_that_cannot_be_added_up_are_shown() {
        const MAX: u64 = u64::MAX;
        let gpu = GpuUuid([7; 16]);
        let usage = Usage { gpu, total: MAX, limit: MAX, allocated: MAX, absent: MAX, immovable: MAX };
        let counters = Counters {
            evicted: MAX,
            evict_ns: MAX,
            restored: MAX,
            copied_out: MAX,
            copied_in: MAX,
            restore_ns: MAX,
            ..Counters::default()
        };
        let shown = ClientStatus {
            usage: vec![usage; 2],
            resident: MAX,
            held_ms: MAX,
            waited_ms: MAX,
            counters,
            ..client(1, ClientState::Running, 0, 0)
        };
        let (_, rows) = client_table(&[shown], &[], Layout { wide: true, width: 80 }, true);
        assert_eq!(rows[0][4], Bytes(MAX).to_string());
        let gpu = GpuStatus { capacity: MAX, allocated: MAX, resident: MAX, ..GpuStatus::idle(gpu) };
        assert_eq!(gpu_rows(&[gpu])[0][3], Bytes(MAX).to_string());
    }

    #[test]
    fn each_row_of_a_client_has_a_cell_for_each_column_and_the_command_last() {
        let clients = [client(1, ClientState::Running, 0, 0)];
        for wide in [false, true] {
            for with_counters in [false, true] {
                let layout = Layout { wide, width: 80 };
                let (columns, rows) = client_table(&clients, &[], layout, with_counters);
                assert_eq!((columns.last().unwrap().head, rows[0].len()), ("COMMAND", columns.len()));
                assert_eq!(rows[0].last().unwrap(), &command_cell(&clients[0], &[], layout));
            }
        }
    }

    #[test]
    fn a_weight_is_shown_with_its_priority() {
        let layout = Layout { wide: false, width: 80 };
        let shown = |weight, priority| {
            let mut clients = [1, 2].map(|id| client(id, ClientState::Running, 0, 0));
            (clients[0].share.weight, clients[1].share.weight) = (100, weight);
            clients[1].share.priority = priority;
            let (columns, rows) = client_table(&clients, &[], layout, false);
            let has_column = super::super::render(&columns, &rows, layout).contains("WEIGHT");
            (rows[1][8].clone(), has_column)
        };
        for (weight, priority, cell, has_column) in [
            (100, Priority::Normal, "100", false),
            (0, Priority::Normal, NOTHING, false),
            (50, Priority::Normal, "50", true),
            (100, Priority::Low, "100 low", true),
            (50, Priority::High, "50 high", true),
        ] {
            assert_eq!(shown(weight, priority), (cell.to_owned(), has_column));
        }
    }

    #[test]
    fn clients_of_seats_are_where_their_containers_are() {
        let slots = vec![Slot { gpu: GpuUuid([7; 16]), number: 0 }];
        let seat = Seat { slots, given: TenantSettings::default() };
        let occupant = Occupant { namespace: "lab".into(), pod: "train-0".into(), container: "main".into() };
        let name = seat.name();
        let held = SeatStatus { name, seat, occupant: Some(occupant), clients: vec![2] };
        let clients = [1, 2].map(|id| client(id, ClientState::Running, 0, 0));
        let (_, rows) = client_table(&clients, &[held], Layout { wide: false, width: 80 }, false);
        assert_eq!([&rows[0][2], &rows[1][2]], [NOTHING, "lab/train-0/main"]);
        // Without the host's process numbers, a program's own word would stand in its place.
        assert_eq!([&rows[0][14], &rows[1][14]], [&*clients[0].name, NOTHING]);
    }

    #[test]
    fn containers_whose_clients_never_came_are_named() {
        let occupant =
            |pod| Occupant { namespace: "lab".into(), pod: format!("train-{pod}"), container: "main".into() };
        let seat = |number| {
            let slots = vec![Slot { gpu: GpuUuid([7; 16]), number }];
            let seat = Seat { slots, given: TenantSettings::default() };
            SeatStatus { name: seat.name(), seat, occupant: Some(occupant(number)), clients: vec![] }
        };
        let all: Vec<SeatStatus> = (0..7).map(seat).collect();
        let names: Vec<_> = all.iter().map(|seat| seat.name).collect();
        let line = |seats: &[SeatStatus], unused: &[_]| {
            let about = status(vec![]);
            super::seats(&Status { seats: seats.to_vec(), unused_seats: unused.to_vec(), ..about })
        };
        assert_eq!(line(&all[..2], &[]).unwrap(), "seats that containers have: 2");
        assert_eq!(
            line(&all[..2], &names[1..2]).unwrap(),
            "seats that containers have: 2; no client came to: lab/train-1/main"
        );
        let many = line(&all, &names).unwrap();
        assert!(many.ends_with("lab/train-4/main, and 2 more"), "{many}");
        // Nobody has it.
        assert_eq!(line(&[SeatStatus { occupant: None, ..seat(0) }], &names), None);
    }

    #[test]
    fn rates_are_of_what_was_copied() {
        const GIB: u64 = 1 << 30;
        let second = 1_000_000_000;
        let counters = Counters {
            evicted: 8 * GIB,
            evict_ns: 2 * second,
            copied_out: 3 * GIB,
            restored: 6 * GIB,
            restore_ns: second,
            copied_in: 5 * GIB,
            ..Counters::default()
        };
        let shown = ClientStatus { counters, ..client(1, ClientState::Running, 0, 0) };
        let (columns, rows) = client_table(&[shown], &[], Layout { wide: true, width: 80 }, true);
        let heads = columns.iter().map(|column| column.head);
        let first = CLIENTS.len() + 3;
        let moves: Vec<(&str, &str)> =
            heads.zip(rows[0].iter().map(String::as_str)).skip(first).take(6).collect();
        let [evicted, out, restored, back] = [8, 3, 6, 5].map(|gib| Bytes(gib * GIB).to_string());
        assert_eq!(
            moves,
            [
                ("EVICTED", evicted.as_str()),
                ("COPIED OUT", out.as_str()),
                ("OUT GiB/s", "1.5"),
                ("RESTORED", restored.as_str()),
                ("COPIED IN", back.as_str()),
                ("IN GiB/s", "5.0"),
            ]
        );
    }
}
