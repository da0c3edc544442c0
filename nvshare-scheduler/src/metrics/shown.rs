//! Metrics of the present state, from a snapshot.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use nvshare_proto::{ClientStatus, GpuStatus, SeatName, SeatStatus};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::TypedMetric;
use prometheus_client::metrics::gauge::ConstGauge;

use super::table::{METRICS, Metric, Source, TenantNow};
use super::{Counters, OfGpu, OfTenant, Snapshot};
use crate::lock::lock;

/// The snapshot that is shown next, under the labels that the counters have.
#[derive(Debug, Clone)]
pub(super) struct Shown {
    next: Arc<Mutex<Option<Snapshot>>>,
    counters: Arc<Counters>,
}

/// The clients, each with the labels of its tenant, without a GPU yet.
fn labelled<'a>(
    clients: &'a [ClientStatus],
    seats: &[SeatStatus],
) -> impl Iterator<Item = (&'a ClientStatus, OfTenant)> {
    let seated = seats.iter().flat_map(|seat| seat.clients.iter().map(|&client| (client, seat.name)));
    let seated: BTreeMap<u64, SeatName> = seated.collect();
    clients.iter().filter(|client| !client.gone).map(move |client| {
        let of = seated.get(&client.client).map_or_else(
            || OfTenant::of(client.process.as_ref(), &client.name),
            |&seat| OfTenant::of_seat(seat),
        );
        (client, of)
    })
}

fn tenants<'a>(
    clients: impl Iterator<Item = (&'a ClientStatus, OfTenant)>,
    counters: &Counters,
) -> BTreeMap<OfTenant, TenantNow> {
    let mut tenants: BTreeMap<OfTenant, TenantNow> = BTreeMap::new();
    for (client, of) in clients {
        for usage in &client.usage {
            let tenant = counters.tenants().figures_in(&mut tenants, &of, Some(usage.gpu));
            tenant.clients += 1;
            tenant.stuck += u64::from(client.stuck);
            tenant.allocated = tenant.allocated.saturating_add(usage.allocated);
            tenant.resident = tenant.resident.saturating_add(usage.allocated.saturating_sub(usage.absent));
            // The tenant's processes share one limit.
            tenant.limit = tenant.limit.max(Some(usage.limit).filter(|&limit| limit > 0));
        }
    }
    tenants
}

/// A sum over each tenant's clients, on whatever GPU.
fn sums<'a>(
    clients: impl Iterator<Item = (&'a ClientStatus, OfTenant)>,
    counters: &Counters,
    figure: fn(&ClientStatus) -> u64,
) -> BTreeMap<OfTenant, u64> {
    let mut sums: BTreeMap<OfTenant, u64> = BTreeMap::new();
    for (client, of) in clients {
        *counters.tenants().figures_in(&mut sums, &of, None) += figure(client);
    }
    sums
}

impl Shown {
    pub(super) fn new(counters: Arc<Counters>) -> Self {
        Self { next: Arc::default(), counters }
    }

    pub(super) fn set(&self, snapshot: Snapshot) {
        *lock(&self.next) = Some(snapshot);
    }
}

/// Writes one metric with a figure for each set of labels.
fn family<S: EncodeLabelSet, V: EncodeMetric + TypedMetric>(
    encoder: &mut DescriptorEncoder<'_>,
    metric: &Metric,
    figures: impl IntoIterator<Item = (S, V)>,
) -> fmt::Result {
    let mut family = encoder.encode_descriptor(metric.name, metric.help, None, metric.source.kind())?;
    figures.into_iter().try_for_each(|(labels, figure)| figure.encode(family.encode_family(&labels)?))
}

impl Collector for Shown {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let now = lock(&self.next);
        let Some(now) = now.as_ref() else { return Ok(()) };
        let encoder = &mut encoder;
        let clients = || labelled(&now.clients, &now.seats);
        let tenants = tenants(clients(), &self.counters);
        for metric in METRICS {
            match metric.source {
                Source::OfScheduler(figure) => {
                    if let Some(figure) = figure(&now.scheduler) {
                        let none: [(&str, &str); 0] = [];
                        family(encoder, metric, [(none, ConstGauge::new(figure))])?;
                    }
                }
                Source::Rows(labels, rows) => {
                    let labelled = |values: Vec<String>| {
                        let labels = labels.iter().copied().zip(values);
                        Vec::from_iter(labels.filter(|(_, value)| !value.is_empty()))
                    };
                    let rows = rows(now).into_iter();
                    let figures = rows.map(|(values, figure)| (labelled(values), ConstGauge::new(figure)));
                    family(encoder, metric, figures)?;
                }
                Source::OfGpu(figure) => {
                    let of = |gpu: &GpuStatus| (OfGpu::new(gpu.gpu), ConstGauge::new(figure(gpu)));
                    family(encoder, metric, now.gpus.iter().map(of))?;
                }
                Source::OfTenant(figure) => {
                    let of = |(of, tenant): (&OfTenant, &TenantNow)| {
                        Some((of.clone(), ConstGauge::new(figure(tenant)?)))
                    };
                    family(encoder, metric, tenants.iter().filter_map(of))?;
                }
                Source::SumOfTenant(is_there, figure) => {
                    if is_there(&now.scheduler) {
                        let sums = sums(clients(), &self.counters, figure).into_iter();
                        family(encoder, metric, sums.map(|(of, sum)| (of, ConstGauge::new(sum))))?;
                    }
                }
                // These are counted, and the registry has them.
                Source::Event(_) | Source::Time(_) | Source::Said(_) | Source::Took(..) | Source::Loop(_) => {
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use nvshare_proto::{GpuUuid, Usage};
    use prometheus_client::registry::Registry;

    use super::*;

    fn client(number: u32) -> ClientStatus {
        let mut gpu = GpuUuid([0; 16]);
        gpu.0[..4].copy_from_slice(&(number % 200).to_le_bytes());
        let usage = Usage { gpu, total: 9, limit: 0, allocated: 1, absent: 0, immovable: 0 };
        let name = format!("name-{number}");
        ClientStatus { host_memory: 1, name, usage: vec![usage], ..ClientStatus::parked(number.into()) }
    }

    /// No event has named them: they do nothing.
    #[test]
    fn clients_without_end_have_no_figures_without_end() {
        let counters = Counters::new(&mut Registry::default());
        let clients: Vec<ClientStatus> = (0..5000).map(client).collect();
        let (on_gpus, on_all) = (
            tenants(labelled(&clients, &[]), &counters),
            sums(labelled(&clients, &[]), &counters, |client| client.host_memory),
        );
        assert!(on_gpus.len() < 1300 && on_all.len() < 1300, "{} {}", on_gpus.len(), on_all.len());
        assert_eq!(on_gpus.values().map(|tenant| tenant.allocated).sum::<u64>(), 5000);
        assert_eq!(on_all.values().sum::<u64>(), 5000);
    }
}
