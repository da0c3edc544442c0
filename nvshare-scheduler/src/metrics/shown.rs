//! Metrics of the present state, from a snapshot.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use nvshare_proto::{ClientState, ClientStatus, GpuStatus};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::{MetricType, TypedMetric};

use super::{Counters, OfGpu, OfTenant, Snapshot};
use crate::lock::lock;

/// The snapshot that is shown next, under the labels that the counters have.
#[derive(Debug, Clone)]
pub(super) struct Shown {
    next: Arc<Mutex<Option<Snapshot>>>,
    counters: Arc<Counters>,
}

/// A gauge of a GPU: its name, its help text, and its value.
type GpuGauge = (&'static str, &'static str, fn(&GpuStatus) -> f64);

const GPU_GAUGES: [GpuGauge; 9] = [
    ("gpu_capacity_bytes", "Bytes that clients may fill together", |gpu| gpu.capacity as f64),
    ("gpu_allocated_bytes", "Bytes that clients have allocated", |gpu| gpu.allocated as f64),
    ("gpu_resident_bytes", "Bytes charged as being on the GPU, unused room included", |gpu| {
        gpu.resident as f64
    }),
    ("gpu_overhead_bytes", "Bytes of clients' contexts and modules, beside the resident ones", |gpu| {
        gpu.overhead as f64
    }),
    ("gpu_quantum_seconds", "How long a turn lasts while somebody waits", |gpu| gpu.quantum_ms as f64 / 1e3),
    ("gpu_holders", "Clients that hold the GPU's lock", |gpu| gpu.holders.len() as f64),
    ("gpu_waiters", "Clients that wait for the GPU's lock", |gpu| gpu.waiters.len() as f64),
    ("gpu_turns_by_measure", "1: clients that fit take turns, as they get more done so", |gpu| {
        f64::from(u8::from(gpu.by_measure))
    }),
    (
        "gpu_side_by_side_ratio",
        "What clients get done side by side, of what they get done by turns; 0: not measured",
        |gpu| f64::from(gpu.side_by_side) / 1e3,
    ),
];

/// A tenant on a GPU at the moment.
#[derive(Debug, Default)]
struct Tenant {
    clients: u64,
    holding: u64,
    waiting: u64,
    stuck: u64,
    allocated: u64,
    resident: u64,
    limit: u64,
}

/// A gauge of a tenant: its name, its help text, and its value.
type TenantGauge = (&'static str, &'static str, fn(&Tenant) -> u64);

const TENANT_GAUGES: [TenantGauge; 7] = [
    ("tenant_clients", "Clients of the tenant that use the GPU", |tenant| tenant.clients),
    ("tenant_holding", "Clients of the tenant that hold the GPU's lock", |tenant| tenant.holding),
    ("tenant_waiting", "Clients of the tenant that wait for the GPU's lock", |tenant| tenant.waiting),
    ("tenant_stuck", "Clients of the tenant that do not answer", |tenant| tenant.stuck),
    ("tenant_allocated_bytes", "Bytes that the tenant has allocated", |tenant| tenant.allocated),
    ("tenant_resident_bytes", "Bytes of the tenant that are charged as being on the GPU", |tenant| {
        tenant.resident
    }),
    ("tenant_limit_bytes", "The tenant's memory limit; 0: none", |tenant| tenant.limit),
];

fn tenants(clients: &[ClientStatus], counters: &Counters) -> BTreeMap<OfTenant, Tenant> {
    let mut tenants: BTreeMap<OfTenant, Tenant> = BTreeMap::new();
    for client in clients.iter().filter(|client| !client.gone) {
        let of = OfTenant::of(client.process.as_ref(), &client.name);
        let holds = matches!(
            client.state,
            ClientState::Running
                | ClientState::Draining
                | ClientState::Restoring
                | ClientState::Idle
                | ClientState::Free
        );
        let waits = matches!(client.state, ClientState::Waiting | ClientState::Blocked | ClientState::Next);
        for usage in &client.usage {
            let tenant = counters.tenants().figures_in(&mut tenants, &of, Some(usage.gpu));
            tenant.clients += 1;
            tenant.holding += u64::from(holds);
            tenant.waiting += u64::from(waits);
            tenant.stuck += u64::from(client.stuck);
            tenant.allocated = tenant.allocated.saturating_add(usage.allocated);
            tenant.resident = tenant.resident.saturating_add(usage.allocated.saturating_sub(usage.absent));
            // The tenant's processes share one limit.
            tenant.limit = tenant.limit.max(usage.limit);
        }
    }
    tenants
}

/// What each tenant has of the host's memory, on whatever GPU.
fn host_memory(clients: &[ClientStatus], counters: &Counters) -> BTreeMap<OfTenant, u64> {
    let mut has: BTreeMap<OfTenant, u64> = BTreeMap::new();
    for client in clients.iter().filter(|client| !client.gone) {
        let of = OfTenant::of(client.process.as_ref(), &client.name);
        *counters.tenants().figures_in(&mut has, &of, None) += client.host_memory;
    }
    has
}

/// Each state of a client, with its name.
const STATES: [(ClientState, &str); 10] = [
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
];

impl Shown {
    pub(super) fn new(counters: Arc<Counters>) -> Self {
        Self { next: Arc::default(), counters }
    }

    pub(super) fn set(&self, snapshot: Snapshot) {
        *lock(&self.next) = Some(snapshot);
    }
}

/// Writes one metric with a value for each set of labels.
fn family<S: EncodeLabelSet, V: EncodeMetric + TypedMetric>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    kind: MetricType,
    values: impl IntoIterator<Item = (S, V)>,
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(name, help, None, kind)?;
    values.into_iter().try_for_each(|(labels, value)| value.encode(metric.encode_family(&labels)?))
}

impl Collector for Shown {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let snapshot = lock(&self.next);
        let Some(snapshot) = snapshot.as_ref() else { return Ok(()) };
        let encoder = &mut encoder;
        let about = &snapshot.scheduler;
        let gauge = MetricType::Gauge;
        let version = [("version", about.version.as_str())];
        family(encoder, "build_info", "The scheduler's version", gauge, [(version, ConstGauge::new(1))])?;
        let none: [(&str, &str); 0] = [];
        let uptime = ConstGauge::new(about.uptime_s);
        family(encoder, "uptime_seconds", "Time since the scheduler started", gauge, [(none, uptime)])?;
        let on = ConstGauge::new(u64::from(about.scheduling));
        family(
            encoder,
            "scheduling_enabled",
            "1: scheduling is on; 0: it is off, and every client runs",
            gauge,
            [(none, on)],
        )?;
        if let Some(host) = about.host_memory {
            for (name, help, bytes) in [
                ("host_memory_budget_bytes", "Bytes of the host that clients may have together", host.budget),
                ("host_memory_used_bytes", "Bytes of the host that clients have", host.used),
            ] {
                family(encoder, name, help, gauge, [(none, ConstGauge::new(bytes))])?;
            }
            let has = host_memory(&snapshot.clients, &self.counters);
            let help = "Bytes of the host that the tenant has from the scheduler";
            let has = has.into_iter().map(|(of, bytes)| (of, ConstGauge::new(bytes)));
            family(encoder, "tenant_host_memory_bytes", help, gauge, has)?;
        }
        let count = |state| snapshot.clients.iter().filter(|client| client.state == state).count() as u64;
        let states = STATES.map(|(state, name)| ([("state", name)], ConstGauge::new(count(state))));
        family(encoder, "clients", "Clients, by state", gauge, states)?;
        let info = snapshot.gpus.iter().map(|gpu| {
            let index = gpu.index.map(|index| index.to_string()).unwrap_or_default();
            let name = gpu.name.clone().unwrap_or_default();
            let labels = [("gpu_uuid", gpu.gpu.to_string()), ("index", index), ("name", name)];
            (labels, ConstGauge::new(1))
        });
        family(encoder, "gpu_info", "The GPU's number and model", gauge, info)?;
        for (name, help, value) in GPU_GAUGES {
            let values = snapshot.gpus.iter().map(|gpu| (OfGpu::new(gpu.gpu), ConstGauge::new(value(gpu))));
            family(encoder, name, help, gauge, values)?;
        }
        let turns = snapshot.gpus.iter().map(|gpu| (OfGpu::new(gpu.gpu), ConstCounter::new(gpu.turns)));
        family(encoder, "gpu_turns", "Turns taken", MetricType::Counter, turns)?;
        let tenants = tenants(&snapshot.clients, &self.counters);
        for (name, help, value) in TENANT_GAUGES {
            let values = tenants.iter().map(|(of, tenant)| (of.clone(), ConstGauge::new(value(tenant))));
            family(encoder, name, help, gauge, values)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use nvshare_proto::{GpuUuid, ShareStatus, Usage};
    use prometheus_client::registry::Registry;

    use super::*;

    fn client(number: u32) -> ClientStatus {
        let mut gpu = GpuUuid([0; 16]);
        gpu.0[..4].copy_from_slice(&(number % 200).to_le_bytes());
        let usage = Usage { gpu, total: 9, limit: 0, allocated: 1, absent: 0, immovable: 0 };
        ClientStatus {
            share: ShareStatus::default(),
            host_memory: 1,
            client: number.into(),
            pid: 1,
            name: format!("name-{number}"),
            process: None,
            state: ClientState::Parked,
            blocked_on: None,
            stuck: false,
            gone: false,
            usage: vec![usage],
            resident: 0,
            overhead: 0,
            held_ms: 0,
            waited_ms: 0,
            counters: nvshare_proto::Counters::default(),
        }
    }

    /// No event has named them: they do nothing.
    #[test]
    fn clients_without_end_have_no_figures_without_end() {
        let counters = Counters::new(&mut Registry::default());
        let clients: Vec<ClientStatus> = (0..5000).map(client).collect();
        let (on_gpus, on_all) = (tenants(&clients, &counters), host_memory(&clients, &counters));
        assert!(on_gpus.len() < 1300 && on_all.len() < 1300, "{} {}", on_gpus.len(), on_all.len());
        assert_eq!(on_gpus.values().map(|tenant| tenant.allocated).sum::<u64>(), 5000);
        assert_eq!(on_all.values().sum::<u64>(), 5000);
    }
}
