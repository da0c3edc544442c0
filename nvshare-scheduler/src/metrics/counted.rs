//! The metrics that count: they follow the events, and what clients say of themselves.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use nvshare_core::{ClientId, Incident, Time};
use nvshare_proto::{ClientState, EventKind, GpuUuid};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{self, Registry};

use super::table::{Amount, Buckets, Length, METRICS, Metric, Moment, Own, Part, Passed, Source};
use super::tenants::{SHOWN_AFTER_END, Tenants, others_on};
use super::{OfGpu, OfTenant};
use crate::lock::lock;

type Seconds = Counter<f64, AtomicU64>;

/// The counters of each tenant.
type OfTenants<M> = Family<OfTenant, M>;

/// The histograms of each GPU, which have the same buckets.
type Durations = Family<OfGpu, Histogram, Buckets>;

/// Gives the registry a metric of the table as well.
fn registered<M: registry::Metric + Clone>(registry: &mut Registry, row: &Metric, metric: M) -> M {
    registry.register(row.name, row.help, metric.clone());
    metric
}

impl MetricConstructor<Histogram> for Buckets {
    fn new_metric(&self) -> Histogram {
        self.histogram()
    }
}

/// The metrics of the table that count, each with the function that says how much; the registry has them as well. The core's task
/// counts, and the thread that answers readers forgets.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    tenants: Mutex<Tenants>,
    events: Vec<(Amount, OfTenants<Counter>)>,
    times: Vec<(Part, OfTenants<Seconds>)>,
    said: Vec<(Own, OfTenants<Counter>)>,
    durations: Vec<(Length, Durations)>,
    /// Times of the core's task for one command.
    loops: Vec<Histogram>,
}

impl Counters {
    pub(crate) fn new(registry: &mut Registry) -> Self {
        let mut counters = Self::default();
        for metric in METRICS {
            match metric.source {
                Source::Event(amount) => {
                    counters.events.push((amount, registered(registry, metric, Family::default())))
                }
                Source::Time(part) => {
                    counters.times.push((part, registered(registry, metric, Family::default())))
                }
                Source::Said(amount) => {
                    counters.said.push((amount, registered(registry, metric, Family::default())))
                }
                Source::Took(buckets, seconds) => {
                    let family = registered(registry, metric, Family::new_with_constructor(buckets));
                    counters.durations.push((seconds, family));
                }
                Source::Loop(buckets) => {
                    counters.loops.push(registered(registry, metric, buckets.histogram()))
                }
                // These are shown, from a snapshot.
                Source::OfScheduler(_)
                | Source::Rows(..)
                | Source::OfGpu(_)
                | Source::OfTenant(_)
                | Source::SumOfTenant(..) => {}
            }
        }
        counters
    }

    /// The tenants that have series of their own. Each holds this for a moment: the core's task waits for it.
    pub(super) fn tenants(&self) -> MutexGuard<'_, Tenants> {
        lock(&self.tenants)
    }

    /// A client of the tenant is on a GPU.
    fn join(&self, tenant: &OfTenant, gpu: GpuUuid) -> Times {
        let mut tenants = self.tenants();
        let gpu = tenants.gpus.join(gpu);
        let tenant = tenants.join(tenant, &gpu);
        let seconds = self.times.iter().map(|(_, family)| family.get_or_create_owned(&tenant)).collect();
        Times { gpu, tenant, seconds }
    }

    /// A client that was counted like this on a GPU has gone.
    fn leave(&self, gpu: GpuUuid, times: &Times, now: Time) {
        let mut tenants = self.tenants();
        tenants.leave(&times.tenant, now);
        tenants.gpus.leave(gpu, &times.gpu, now);
    }

    /// Counts an event of a client on one GPU.
    fn count(&self, moment: &Moment, on: &Times) {
        for (amount, family) in &self.events {
            if let Some(amount) = amount(moment) {
                family.get_or_create(&on.tenant).inc_by(amount);
            }
        }
        for (seconds, family) in &self.durations {
            if let Some(seconds) = seconds(moment) {
                family.get_or_create(&on.gpu).observe(seconds);
            }
        }
    }

    /// Forgets tenants that have gone long ago, and GPUs that the machine does not have and on which all have.
    pub(crate) fn forget_old(&self, now: Time) {
        while self.forget_one(now) {}
        while self.forget_gpu(now) {}
    }

    /// Forgets a GPU, if there is one to forget.
    fn forget_gpu(&self, now: Time) -> bool {
        let mut tenants = self.tenants();
        let Some(gpu) = tenants.gpus.forget_one(now) else { return false };
        for (_, family) in &self.durations {
            family.remove(&gpu);
        }
        self.remove(&others_on(&gpu));
        true
    }

    /// Removes the series of a tenant on a GPU.
    fn remove(&self, tenant: &OfTenant) {
        for (_, family) in &self.times {
            family.remove(tenant);
        }
        for (_, family) in &self.events {
            family.remove(tenant);
        }
    }

    /// Forgets one, if there is one. Its series go before it can come back.
    fn forget_one(&self, now: Time) -> bool {
        let mut tenants = self.tenants();
        let Some((tenant, is_last)) = tenants.forget_one(now) else { return false };
        self.remove(&tenant);
        if is_last {
            let whole = tenant.on_all();
            for (_, family) in &self.said {
                family.remove(&whole);
            }
        }
        true
    }
}

/// Follows the events, and counts them.
#[derive(Debug)]
pub(crate) struct Counted {
    counters: Arc<Counters>,
    clients: BTreeMap<ClientId, Client>,
    /// When each GPU was last free.
    freed: BTreeMap<OfGpu, Time>,
}

/// A client whose times are counted.
#[derive(Debug)]
struct Client {
    tenant: OfTenant,
    gpus: BTreeMap<GpuUuid, Times>,
    /// The time since when the client holds the lock, and the time up to which that was counted.
    holds: Option<(Time, Time)>,
    /// The same for the time that it waits.
    waits: Option<(Time, Time)>,
    /// The largest figures that its library has said of itself, in the order of the table.
    said: Option<Vec<u64>>,
}

/// A client's times on a GPU.
#[derive(Debug)]
struct Times {
    gpu: OfGpu,
    tenant: OfTenant,
    /// In the order of the table.
    seconds: Vec<Seconds>,
}

impl Client {
    /// The client holds the lock, or waits, from now on, as an event says that tells of its state.
    fn follow(&mut self, kind: EventKind, now: Time) {
        match kind {
            EventKind::Running => {
                self.holds = Some((now, now));
                self.waits = None;
            }
            // The client goes on holding until it has drained.
            EventKind::Deferred | EventKind::Drop => {}
            // One that was next and steps back has waited since it asked.
            EventKind::Waiting => {
                self.waits.get_or_insert((now, now));
            }
            // The client goes on waiting until it runs.
            EventKind::Next | EventKind::Granted | EventKind::Blocked | EventKind::Withdrawn => {
                self.holds = None;
            }
            _ => (self.holds, self.waits) = (None, None),
        }
    }
}

impl Counted {
    pub(crate) fn new(counters: Arc<Counters>) -> Self {
        Self { counters, clients: BTreeMap::new(), freed: BTreeMap::new() }
    }

    /// The machine has this GPU: those who use it already are shown with its labels from now on.
    pub(crate) fn know(&mut self, gpu: GpuUuid, now: Time) {
        if !self.counters.tenants().gpus.know(gpu) {
            return;
        }
        for client in self.clients.values_mut() {
            if let Some(times) = client.gpus.get_mut(&gpu).filter(|times| times.gpu != OfGpu::new(gpu)) {
                self.counters.leave(gpu, times, now);
                *times = self.counters.join(&client.tenant, gpu);
            }
        }
    }

    /// A client is about to register.
    pub(crate) fn expect(&mut self, client: ClientId, tenant: OfTenant) {
        let gpus = BTreeMap::new();
        self.clients.insert(client, Client { tenant, gpus, holds: None, waits: None, said: None });
    }

    /// The core's task took this long for one event.
    pub(crate) fn passed(&self, took: Duration) {
        self.counters.loops.iter().for_each(|histogram| histogram.observe(took.as_secs_f64()));
    }

    /// A client has said its counters. The counts that it has when it says them first were made before it came, under an earlier
    /// connection.
    pub(crate) fn said(&mut self, id: ClientId, counters: &nvshare_proto::Counters) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let now = self.counters.said.iter().map(|(amount, _)| amount(counters));
        let said = client.said.get_or_insert_with(|| now.clone().collect());
        // Without a GPU there is nothing to copy, and nobody whose series this would be.
        let Some(times) = client.gpus.values().next() else { return };
        let whole = times.tenant.on_all();
        for ((last, now), (_, family)) in said.iter_mut().zip(now).zip(&self.counters.said) {
            // A counter of a metric never falls, whatever a client says.
            let grown = now.saturating_sub(*last);
            *last += grown;
            family.get_or_create(&whole).inc_by(grown);
        }
    }

    /// Counts an event, at this time since the start.
    pub(crate) fn record(&mut self, incident: &Incident, now: Time) {
        let Some(id) = incident.client else { return };
        self.count(id, now);
        let Some(client) = self.clients.get_mut(&id) else { return };
        for &gpu in &incident.gpus {
            client.gpus.entry(gpu).or_insert_with(|| self.counters.join(&client.tenant, gpu));
        }
        let kind = incident.kind;
        let [held_since, waited_since] =
            [client.holds, client.waits].map(|span| span.map(|(since, _)| since));
        if kind.state().is_some() {
            client.follow(kind, now);
        }
        let seconds = |since: Time| now.saturating_sub(since).as_secs_f64();
        let on: Vec<&Times> = incident.gpus.iter().filter_map(|gpu| client.gpus.get(gpu)).collect();
        for times in &on {
            let freed = if kind == EventKind::Running { self.freed.remove(&times.gpu) } else { None };
            let moment = Moment {
                kind,
                bytes: incident.bytes.unwrap_or(0),
                took: incident.took.map(|took| took.as_secs_f64()),
                waited: waited_since.filter(|_| kind == EventKind::Running).map(seconds),
                free: freed.filter(|&freed| waited_since.is_some_and(|since| since <= freed)).map(seconds),
            };
            self.counters.count(&moment, times);
        }
        let frees = matches!(kind, EventKind::Released | EventKind::Idle | EventKind::Gone | EventKind::Left);
        if frees && held_since.is_some() {
            self.freed.extend(on.iter().map(|times| (times.gpu.clone(), now)));
        }
        if kind.state() == Some(ClientState::Gone)
            && let Some(client) = self.clients.remove(&id)
        {
            client.gpus.iter().for_each(|(&gpu, times)| self.counters.leave(gpu, times, now));
        }
    }

    /// Counts the times of a client up to now.
    fn count(&mut self, id: ClientId, now: Time) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let passed = |span: &mut Option<(Time, Time)>| match span {
            Some((_, counted)) => now.saturating_sub(std::mem::replace(counted, now)).as_secs_f64(),
            None => 0.0,
        };
        let passed = Passed { held: passed(&mut client.holds), waited: passed(&mut client.waits) };
        for times in client.gpus.values() {
            for ((part, _), seconds) in self.counters.times.iter().zip(&times.seconds) {
                seconds.inc_by(part(&passed));
            }
        }
    }

    /// Counts the times of all clients up to now.
    pub(crate) fn count_all(&mut self, now: Time) {
        let ids: Vec<ClientId> = self.clients.keys().copied().collect();
        ids.into_iter().for_each(|id| self.count(id, now));
        self.freed.retain(|_, freed| *freed + SHOWN_AFTER_END >= now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::encoding::text::encode;

    const GPU: GpuUuid = GpuUuid([7; 16]);

    struct World {
        registry: Registry,
        counted: Counted,
        now: Time,
    }

    impl World {
        fn new() -> Self {
            let mut registry = Registry::with_prefix("nvshare");
            let counted = Counted::new(Counters::new(&mut registry).into());
            Self { registry, counted, now: Time::ZERO }
        }

        fn after(&mut self, seconds: u64, client: ClientId, kind: EventKind, bytes: u64, took: Option<f64>) {
            self.now += Duration::from_secs(seconds);
            let took = took.map(Duration::from_secs_f64);
            let incident = Incident { kind, client: Some(client), gpus: vec![GPU], bytes: Some(bytes), took };
            self.counted.record(&incident, self.now);
        }

        /// A client says the bytes that it has copied out and in.
        fn copied(&mut self, client: ClientId, [copied_out, copied_in]: [u64; 2]) {
            let counters = nvshare_proto::Counters { copied_out, copied_in, ..Default::default() };
            self.counted.said(client, &counters);
        }

        /// A client of a program of this user comes, gets a grant and copies 10 bytes.
        fn passes(&mut self, client: ClientId, gpu: GpuUuid, user: u32, program: &str) {
            let tenant = OfTenant { user: user.to_string(), ..OfTenant::of(None, program) };
            self.counted.expect(client, tenant);
            for kind in [EventKind::Registered, EventKind::Granted, EventKind::Running, EventKind::Released] {
                let incident =
                    Incident { kind, client: Some(client), gpus: vec![gpu], bytes: None, took: None };
                self.counted.record(&incident, self.now);
            }
            self.copied(client, [0, 0]);
            self.copied(client, [10, 0]);
        }

        fn text(&self) -> String {
            let mut text = String::new();
            encode(&mut text, &self.registry).unwrap();
            text
        }

        /// The value of a series of one program, or of the GPU.
        fn value(&self, name: &str, program: &str) -> Option<f64> {
            let text = self.text();
            let program = format!("program=\"{program}\"");
            let line = text.lines().find(|line| {
                line.starts_with(&format!("nvshare_{name}{{"))
                    && (line.contains(&program) || !line.contains("program"))
            });
            line.and_then(|line| line.rsplit(' ').next()?.parse().ok())
        }
    }

    #[test]
    fn a_hand_over_is_counted_for_its_tenants() {
        let mut world = World::new();
        for (client, program) in [(1, "a"), (2, "b")] {
            world.counted.expect(client, OfTenant::of(None, program));
            world.after(0, client, EventKind::Registered, 0, None);
        }
        world.after(0, 1, EventKind::Waiting, 0, None);
        world.after(1, 1, EventKind::Granted, 0, None);
        world.after(0, 1, EventKind::Running, 0, Some(0.0));
        world.after(2, 2, EventKind::Waiting, 0, None);
        world.after(10, 1, EventKind::Drop, 0, None);
        world.after(3, 1, EventKind::Released, 0, Some(3.0));
        world.after(4, 1, EventKind::Evicted, 500, Some(4.0));
        world.after(0, 2, EventKind::Granted, 0, None);
        world.after(5, 2, EventKind::Restored, 700, Some(5.0));
        world.after(0, 2, EventKind::Running, 700, Some(5.0));
        // A holder's time is counted while it holds the lock.
        world.now += Duration::from_secs(6);
        world.counted.count_all(world.now);
        for (name, program, expected) in [
            ("tenant_held_seconds_total", "a", 15.0),
            ("tenant_waited_seconds_total", "a", 1.0),
            ("tenant_held_seconds_total", "b", 6.0),
            ("tenant_waited_seconds_total", "b", 22.0),
            ("tenant_evicted_bytes_total", "a", 500.0),
            ("tenant_restored_bytes_total", "b", 700.0),
            ("tenant_grants_total", "b", 1.0),
            ("gpu_drain_seconds_sum", "", 3.0),
            ("gpu_hand_over_seconds_sum", "", 9.0),
            ("gpu_evict_seconds_sum", "", 4.0),
            ("gpu_restore_seconds_sum", "", 5.0),
            ("gpu_wait_seconds_sum", "", 23.0),
            ("gpu_wait_seconds_count", "", 2.0),
        ] {
            assert_eq!(world.value(name, program), Some(expected), "{name} {program}");
        }
    }

    /// As when a drain is given up that it waits for.
    #[test]
    fn a_client_that_steps_back_from_next_has_waited_since_it_asked() {
        use EventKind::{Next, Registered, Released, Running, Waiting, Withdrawn};
        let mut world = World::new();
        world.counted.expect(1, OfTenant::of(None, "a"));
        let comes = [(0, Registered), (0, Waiting), (5, Next)];
        let steps_back = [(1, Withdrawn), (0, Waiting), (4, Next), (0, Running)];
        // The wait after a turn is another one.
        let again = [(1, Released), (2, Waiting), (3, Running)];
        for (after, kind) in comes.into_iter().chain(steps_back).chain(again) {
            world.after(after, 1, kind, 0, None);
        }
        let waits = ["gpu_wait_seconds_sum", "gpu_wait_seconds_count", "tenant_waited_seconds_total"];
        assert_eq!(waits.map(|name| world.value(name, "a")), [13.0, 2.0, 13.0].map(Some));
    }

    #[test]
    fn copies_are_counted_once_and_never_fall() {
        let mut world = World::new();
        // The second one has copied under an earlier connection.
        for (client, first) in [(1, [0, 0]), (2, [1000, 1000])] {
            world.counted.expect(client, OfTenant::of(None, "a"));
            world.after(0, client, EventKind::Registered, 0, None);
            world.copied(client, first);
        }
        world.copied(1, [70, 20]);
        world.copied(1, [70, 30]);
        world.copied(2, [1005, 1000]);
        let seen = |world: &World| {
            ["out", "in"].map(|way| world.value(&format!("tenant_copied_{way}_bytes_total"), "a"))
        };
        assert_eq!(seen(&world), [Some(75.0), Some(30.0)]);
        for said in [[0, u64::MAX], [0, 0], [71, 1]] {
            world.copied(1, said);
        }
        let [out, back] = seen(&world);
        assert_eq!(out, Some(76.0));
        assert!(back >= Some(30.0), "{back:?}");
    }

    #[test]
    fn tenants_that_have_gone_are_forgotten_after_their_figures_were_shown() {
        let mut world = World::new();
        for client in [1, 2] {
            world.counted.expect(client, OfTenant::of(None, "a"));
            world.after(0, client, EventKind::Registered, 0, None);
            world.after(0, client, EventKind::Granted, 0, None);
        }
        world.copied(1, [0, 0]);
        world.copied(1, [5, 0]);
        world.after(1, 1, EventKind::Gone, 0, None);
        world.counted.counters.forget_old(Duration::from_secs(10_000));
        assert_eq!(world.value("tenant_grants_total", "a"), Some(2.0), "one is still there");
        assert_eq!(world.value("tenant_copied_out_bytes_total", "a"), Some(5.0));
        world.after(1, 2, EventKind::Gone, 0, None);
        world.counted.counters.forget_old(SHOWN_AFTER_END);
        assert_eq!(world.value("tenant_grants_total", "a"), Some(2.0));
        world.counted.counters.forget_old(SHOWN_AFTER_END + Duration::from_secs(3));
        assert_eq!(world.value("tenant_grants_total", "a"), None);
        assert_eq!(world.value("tenant_held_seconds_total", "a"), None);
        assert_eq!(world.value("tenant_copied_out_bytes_total", "a"), None);
        assert!(world.counted.clients.is_empty());
    }

    /// One user starts programs under ever new names, and another one comes later.
    #[test]
    fn names_without_end_make_no_series_without_end() {
        let mut world = World::new();
        let empty = world.text().lines().count();
        for client in 0..2000 {
            world.passes(client, GPU, 1, &format!("name-{client}"));
            world.after(0, client, EventKind::Gone, 0, None);
        }
        let lines = world.text().lines().count() - empty;
        assert!(lines < 2000, "{lines} lines");
        let grants = |world: &World, program: &str| world.value("tenant_grants_total", program);
        assert_eq!((grants(&world, "name-0"), grants(&world, "name-1999")), (Some(1.0), None));
        world.passes(9999, GPU, 2, "late");
        assert_eq!(grants(&world, "late"), Some(1.0), "it is another user's");
        // Nothing is lost: what has no series of its own is counted together.
        let counted = |name: &str| -> f64 {
            let text = world.text();
            let lines = text.lines().filter(|line| line.starts_with(&format!("nvshare_{name}_total{{")));
            lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
        };
        assert_eq!(counted("tenant_grants"), 2001.0);
        assert_eq!(counted("tenant_copied_out_bytes"), 20_010.0);
        // Places become free again, and what was counted together stays.
        world.counted.counters.forget_old(SHOWN_AFTER_END + Duration::from_secs(1));
        assert_eq!((grants(&world, "name-0"), grants(&world, "late")), (None, Some(1.0)));
        assert!(grants(&world, "other") > Some(1800.0));
        world.passes(10_000, GPU, 1, "again");
        assert_eq!(grants(&world, "again"), Some(1.0));
    }

    #[test]
    fn users_and_gpus_without_end_make_no_series_without_end() {
        let mut world = World::new();
        for client in 0..3000u32 {
            let mut gpu = GPU;
            gpu.0[..4].copy_from_slice(&client.to_le_bytes());
            world.passes(client.into(), gpu, client, "a");
            world.copied(client.into(), [20, 0]);
        }
        let text = world.text();
        let series = |name: &str| text.lines().filter(|line| line.starts_with(name)).count();
        assert!(series("nvshare_gpu_wait_seconds_count") <= 65, "GPUs");
        assert!(series("nvshare_tenant_grants_total") <= 1100, "tenants");
        assert!(series("nvshare_tenant_copied_out_bytes_total") <= 1100, "tenants as a whole");
        assert!(text.contains("gpu_uuid=\"other\""));
    }

    /// A client names as many as there are places for, and others use one that the machine has.
    #[test]
    fn gpus_that_the_machine_has_have_labels_of_their_own_and_others_as_long_as_they_are_used() {
        let mut world = World::new();
        let invented = |n: u8| GpuUuid([n; 16]);
        let shows = |world: &World, gpu: GpuUuid| world.text().contains(&format!("gpu_uuid=\"{gpu}\""));
        for n in 100..164 {
            world.passes(n.into(), invented(n), 1, "a");
        }
        world.passes(1, GPU, 2, "b");
        assert!(!shows(&world, GPU));
        world.counted.know(GPU, world.now);
        world.passes(2, GPU, 2, "b");
        assert!(shows(&world, GPU));
        // It was there before, and counts there as well from now on.
        world.counted.count_all(world.now);
        for client in [1, 2] {
            world.after(1, client, EventKind::Granted, 0, None);
        }
        let text = world.text();
        let grants = text.lines().filter(|line| line.starts_with("nvshare_tenant_grants_total{"));
        let on_gpu = Vec::from_iter(grants.filter(|line| line.contains(&GPU.to_string())));
        assert!(on_gpu.len() == 1 && on_gpu[0].ends_with(" 3"), "{on_gpu:?}");
        for n in 100..164 {
            let gpus = vec![invented(n)];
            let gone =
                Incident { kind: EventKind::Gone, client: Some(n.into()), gpus, bytes: None, took: None };
            world.counted.record(&gone, world.now);
        }
        world.counted.counters.forget_old(world.now + SHOWN_AFTER_END);
        assert!(shows(&world, invented(100)));
        world.counted.counters.forget_old(world.now + SHOWN_AFTER_END + Duration::from_secs(1));
        assert!(shows(&world, GPU) && !shows(&world, invented(100)));
        world.passes(3, invented(200), 1, "c");
        assert!(shows(&world, invented(200)), "there is a place");
    }

    /// It says counters, and never uses a GPU.
    #[test]
    fn a_client_without_a_gpu_makes_no_series() {
        let mut world = World::new();
        let empty = world.text();
        world.counted.expect(1, OfTenant::of(None, "a"));
        world.copied(1, [0, 0]);
        world.copied(1, [5, 5]);
        assert_eq!(world.text(), empty);
        // The bytes that it has copied since count when it has one.
        world.after(0, 1, EventKind::Registered, 0, None);
        world.copied(1, [6, 5]);
        assert_eq!(world.value("tenant_copied_out_bytes_total", "a"), Some(6.0));
    }
}
