//! The table of all metrics. A metric is one row: its name, its help text, and where its figures come from; type and labels follow from
//! that. The counters (`counted.rs`), the gauges (`shown.rs`) and the tables of `docs/metrics.md` are made from it, in its order.

use std::time::Duration;

use nvshare_proto::{
    ClientState, ClientStatus, Counters, EventKind, GpuStatus, Occupant, SchedulerStatus, SeatStatus,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};

use super::Snapshot;
use Source::{Event, Loop, OfGpu, OfScheduler, OfTenant, Rows, Said, SumOfTenant, Time, Took};

/// A metric.
#[derive(Debug)]
pub(super) struct Metric {
    /// The name, without the `nvshare_` before it and the `_total` behind the name of a counter.
    pub(super) name: &'static str,
    /// The help text that readers get.
    pub(super) help: &'static str,
    /// The part that the page says behind the help text.
    #[cfg_attr(not(test), expect(dead_code, reason = "the page is written by a test"))]
    pub(super) more: &'static str,
    pub(super) source: Source,
}

/// Where a metric's figures come from.
#[derive(Debug)]
pub(super) enum Source {
    /// Counted for a tenant on a GPU, at each event; none: the event does not count.
    Event(Amount),
    /// Time of a tenant on a GPU, in seconds: the part of what has passed that counts.
    Time(Part),
    /// Counted for a tenant, from what its clients' libraries say of themselves.
    Said(Own),
    /// How long something on a GPU took, in seconds, and the buckets; none: the event tells of no such time.
    Took(Buckets, Length),
    /// How long the core's task takes for one event, in seconds.
    Loop(Buckets),
    /// A figure of the scheduler; none: there is no such thing.
    OfScheduler(fn(&SchedulerStatus) -> Option<u64>),
    /// Rows with labels of their own: the labels' names, and for each row their values and the figure.
    Rows(&'static [&'static str], fn(&Snapshot) -> Vec<Row>),
    /// A figure of a GPU.
    OfGpu(fn(&GpuStatus) -> f64),
    /// A figure of a tenant on a GPU; none: there is no such thing.
    OfTenant(fn(&TenantNow) -> Option<u64>),
    /// The sum over a tenant's clients, on whatever GPU; and whether there is such a thing.
    SumOfTenant(fn(&SchedulerStatus) -> bool, fn(&ClientStatus) -> u64),
}

/// The amount that an event adds to a counter.
pub(super) type Amount = fn(&Moment) -> Option<u64>;
/// The part of the time that has passed, in seconds.
pub(super) type Part = fn(&Passed) -> f64;
/// One of a library's own counters.
pub(super) type Own = fn(&Counters) -> u64;
/// The length of something that an event ends, in seconds.
pub(super) type Length = fn(&Moment) -> Option<f64>;

/// The values of the labels, and the figure.
pub(super) type Row = (Vec<String>, u64);

/// The part of an event that is about one GPU of a client; times in seconds.
#[derive(Debug)]
pub(super) struct Moment {
    pub(super) kind: EventKind,
    pub(super) bytes: u64,
    /// The time that the event tells.
    pub(super) took: Option<f64>,
    /// For how long the client had waited, at the event that opens its gate.
    pub(super) waited: Option<f64>,
    /// For how long the GPU had been free while the client waited, at the event that opens its gate.
    pub(super) free: Option<f64>,
}

/// The times that have passed for a client since it was counted last, in seconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Passed {
    pub(super) held: f64,
    pub(super) waited: f64,
}

/// A tenant on a GPU at the moment.
#[derive(Debug, Default)]
pub(super) struct TenantNow {
    pub(super) clients: u64,
    pub(super) stuck: u64,
    pub(super) allocated: u64,
    pub(super) resident: u64,
    /// None: there is no limit.
    pub(super) limit: Option<u64>,
}

/// The buckets of a histogram: the end of the first, how much each is wider than the one before, and how many there are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Buckets(Duration, f64, u16);

impl Buckets {
    pub(super) fn histogram(self) -> Histogram {
        let Self(first, factor, count) = self;
        Histogram::new(exponential_buckets(first.as_secs_f64(), factor, count))
    }
}

/// From a millisecond to half a minute.
const MOVES: Buckets = Buckets(Duration::from_millis(1), 2.0, 16);
/// From a millisecond to hours.
const TURNS: Buckets = Buckets(Duration::from_millis(1), 4.0, 13);
/// From a microsecond to seconds.
const EVENTS: Buckets = Buckets(Duration::from_micros(1), 4.0, 12);

/// The labels of a GPU.
#[cfg(test)]
const GPU: &[&str] = &["gpu_uuid"];
/// The labels of a tenant on a GPU. A tenant as a whole has no GPU.
#[cfg(test)]
const TENANT: &[&str] = &["gpu_uuid", "user", "pod_uid", "container_id", "job", "seat", "program"];

impl Source {
    /// The type that readers are told.
    pub(super) fn kind(&self) -> MetricType {
        match self {
            Self::Event(_) | Self::Time(_) | Self::Said(_) => MetricType::Counter,
            Self::Took(..) | Self::Loop(_) => MetricType::Histogram,
            Self::OfScheduler(_)
            | Self::Rows(..)
            | Self::OfGpu(_)
            | Self::OfTenant(_)
            | Self::SumOfTenant(..) => MetricType::Gauge,
        }
    }

    /// The labels of its figures.
    #[cfg(test)]
    pub(super) fn labels(&self) -> &'static [&'static str] {
        match self {
            Self::Loop(_) | Self::OfScheduler(_) => &[],
            Self::Rows(labels, _) => labels,
            Self::Took(..) | Self::OfGpu(_) => GPU,
            Self::Event(_) | Self::Time(_) | Self::OfTenant(_) => TENANT,
            Self::Said(_) | Self::SumOfTenant(..) => &TENANT[1..],
        }
    }
}

/// Shortens the rows: name, help, what the page says more, and source.
const fn metric(name: &'static str, help: &'static str, more: &'static str, source: Source) -> Metric {
    Metric { name, help, more, source }
}

/// See the module's documentation.
pub(super) const METRICS: &[Metric] = &[
    metric(
        "tenant_held_seconds",
        "Time for which the tenant held the GPU",
        "; clients that hold it together all count",
        Time(|passed| passed.held),
    ),
    metric(
        "tenant_waited_seconds",
        "Time for which the tenant waited for the GPU",
        "",
        Time(|passed| passed.waited),
    ),
    metric(
        "tenant_grants",
        "Times that the tenant got the GPU",
        "",
        Event(|moment| (moment.kind == EventKind::Granted).then_some(1)),
    ),
    metric(
        "tenant_evicted_bytes",
        "Memory of the tenant that left the GPU",
        ", copied or not, and unused room",
        Event(|moment| (moment.kind == EventKind::Evicted).then_some(moment.bytes)),
    ),
    metric(
        "tenant_restored_bytes",
        "Memory of the tenant that came back to the GPU",
        ", copied or not",
        Event(|moment| (moment.kind == EventKind::Restored).then_some(moment.bytes)),
    ),
    metric(
        "tenant_copied_out_bytes",
        "Memory of the tenant that was copied when it left, on all GPUs",
        ": not zeros, nor what the host has a copy of; a part of the evicted memory",
        Said(|counters| counters.copied_out),
    ),
    metric(
        "tenant_copied_in_bytes",
        "Memory of the tenant that was copied when it came back, on all GPUs",
        ": not zeros; a part of the restored memory",
        Said(|counters| counters.copied_in),
    ),
    metric(
        "tenant_refused_allocations",
        "Allocations of the tenant for which no room could be made",
        "",
        Event(|moment| (moment.kind == EventKind::Refused).then_some(1)),
    ),
    metric(
        "tenant_deferrals",
        "Times that the tenant was asked for the GPU and kept it, as its kernels were not done",
        "",
        Event(|moment| (moment.kind == EventKind::Deferred).then_some(1)),
    ),
    metric(
        "gpu_wait_seconds",
        "Wait from asking for the GPU until running",
        "",
        Took(TURNS, |moment| moment.waited),
    ),
    metric(
        "gpu_drain_seconds",
        "Wait from asking a client for the GPU until its kernels are done",
        "",
        Took(MOVES, |moment| moment.took.filter(|_| moment.kind == EventKind::Released)),
    ),
    metric(
        "gpu_hand_over_seconds",
        "Time between two clients in which the GPU computes nothing",
        ": from the end of the one's kernels until the other one runs",
        Took(MOVES, |moment| moment.free),
    ),
    metric(
        "gpu_evict_seconds",
        "Time in which memory leaves the GPU",
        "",
        Took(MOVES, |moment| moment.took.filter(|_| moment.kind == EventKind::Evicted && moment.bytes > 0)),
    ),
    metric(
        "gpu_restore_seconds",
        "Time in which memory comes back to the GPU",
        ": from the grant, or from the first room before it in an exchange, until the client runs",
        Took(MOVES, |moment| moment.took.filter(|_| moment.kind == EventKind::Restored)),
    ),
    metric(
        "gpu_wake_seconds",
        "Time in which a process comes back to the GPU that was off it",
        " (`nvshare-ctl sleep`), as it measures it itself",
        Took(MOVES, |moment| moment.took.filter(|_| moment.kind == EventKind::Awake)),
    ),
    metric("scheduler_loop_seconds", "Time that the scheduler takes for one event", "", Loop(EVENTS)),
    metric(
        "build_info",
        "Version of the scheduler",
        "; the figure is 1",
        Rows(&["version"], |snapshot| vec![(vec![snapshot.scheduler.version.clone()], 1)]),
    ),
    metric(
        "scheduling_enabled",
        "Whether scheduling is on: 1; or off, so that every client runs: 0",
        "",
        OfScheduler(|scheduler| Some(u64::from(scheduler.scheduling))),
    ),
    metric(
        "host_memory_budget_bytes",
        "Host memory that all clients may have from the scheduler",
        " (`--host-memory`); absent without it, as the next one",
        OfScheduler(|scheduler| Some(scheduler.host_memory?.budget)),
    ),
    metric(
        "host_memory_used_bytes",
        "Host memory that all clients have from the scheduler",
        ", and that is not free yet",
        OfScheduler(|scheduler| Some(scheduler.host_memory?.used)),
    ),
    metric(
        "tenant_host_memory_bytes",
        "Host memory that the tenant has from the scheduler",
        ", for all GPUs together; absent without `--host-memory`",
        SumOfTenant(|scheduler| scheduler.host_memory.is_some(), |client| client.host_memory),
    ),
    metric(
        "clients",
        "Clients in this state",
        " ([status.md](status.md))",
        Rows(&["state"], clients_by_state),
    ),
    metric(
        "seat_info",
        "Pod and container that have the seat",
        "; the figure is 1",
        Rows(&["seat", "namespace", "pod", "container"], seats_and_pods),
    ),
    metric(
        "seats_without_clients",
        "Seats that a container has, and to which no client came since",
        ": perhaps it runs without nvshare; the figure is 1, and there is none for other seats",
        Rows(&["seat", "namespace", "pod", "container"], unused_seats),
    ),
    metric(
        "gpu_info",
        "Number and model of the GPU",
        "; the figure is 1",
        Rows(&["gpu_uuid", "index", "name"], numbers_and_models),
    ),
    metric(
        "gpu_capacity_bytes",
        "Memory of the GPU that all clients may fill together",
        "",
        OfGpu(|gpu| gpu.capacity as f64),
    ),
    metric(
        "gpu_allocated_bytes",
        "Memory that all clients have allocated on the GPU",
        ", wherever it is",
        OfGpu(|gpu| gpu.allocated as f64),
    ),
    metric(
        "gpu_resident_bytes",
        "Memory of all clients that is on the GPU",
        ", unused room included",
        OfGpu(|gpu| gpu.resident as f64),
    ),
    metric(
        "gpu_overhead_bytes",
        "Memory of all clients' contexts and modules on the GPU",
        ", beside the resident memory",
        OfGpu(|gpu| gpu.overhead as f64),
    ),
    metric(
        "gpu_quantum_seconds",
        "Time that a turn lasts while another client waits",
        "",
        OfGpu(|gpu| gpu.quantum_ms as f64 / 1e3),
    ),
    metric("gpu_waiters", "Clients that wait for the GPU", "", OfGpu(|gpu| gpu.waiters.len() as f64)),
    metric(
        "tenant_clients",
        "Clients of the tenant that use the GPU",
        "",
        OfTenant(|tenant| Some(tenant.clients)),
    ),
    metric(
        "tenant_stuck",
        "Clients of the tenant that do not answer",
        "",
        OfTenant(|tenant| Some(tenant.stuck)),
    ),
    metric(
        "tenant_allocated_bytes",
        "Memory that the tenant has allocated on the GPU",
        ", wherever it is",
        OfTenant(|tenant| Some(tenant.allocated)),
    ),
    metric(
        "tenant_resident_bytes",
        "Memory of the tenant that is on the GPU",
        ", unused room not included",
        OfTenant(|tenant| Some(tenant.resident)),
    ),
    metric(
        "tenant_limit_bytes",
        "Memory that the tenant may allocate on the GPU",
        "; absent without a limit",
        OfTenant(|tenant| tenant.limit),
    ),
];

/// Each state of a client, with its name.
const STATES: [(ClientState, &str); 11] = [
    (ClientState::Parked, "parked"),
    (ClientState::Waiting, "waiting"),
    (ClientState::Blocked, "blocked"),
    (ClientState::Next, "next"),
    (ClientState::Restoring, "restoring"),
    (ClientState::Running, "running"),
    (ClientState::Draining, "draining"),
    (ClientState::Idle, "idle"),
    (ClientState::Free, "free"),
    (ClientState::Left, "left"),
    (ClientState::Asleep, "asleep"),
];

fn clients_by_state(snapshot: &Snapshot) -> Vec<Row> {
    let count = |state| snapshot.clients.iter().filter(|client| client.state == state).count() as u64;
    STATES.iter().map(|&(state, name)| (vec![name.to_owned()], count(state))).collect()
}

fn seats_and_pods(snapshot: &Snapshot) -> Vec<Row> {
    seat_rows(snapshot, |_| true)
}

fn unused_seats(snapshot: &Snapshot) -> Vec<Row> {
    seat_rows(snapshot, |seat| snapshot.unused.contains(&seat.name))
}

/// A row for each of these seats that a container has.
fn seat_rows(snapshot: &Snapshot, is_shown: impl Fn(&SeatStatus) -> bool) -> Vec<Row> {
    let row = |seat: &SeatStatus| {
        let Occupant { namespace, pod, container } = seat.occupant.clone()?;
        Some((vec![seat.name.to_string(), namespace, pod, container], 1))
    };
    snapshot.seats.iter().filter(|seat| is_shown(seat)).filter_map(row).collect()
}

fn numbers_and_models(snapshot: &Snapshot) -> Vec<Row> {
    let row = |gpu: &GpuStatus| {
        let index = gpu.index.map(|index| index.to_string()).unwrap_or_default();
        let name = gpu.name.clone().unwrap_or_default();
        (vec![gpu.gpu.to_string(), index, name], 1)
    };
    snapshot.gpus.iter().map(row).collect()
}
