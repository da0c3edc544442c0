//! The core: events come in, and outputs go out.

use std::collections::BTreeSet;
use std::convert::Infallible;

use nvshare_proto::{AsleepStatus, ClientStatus, GpuStatus, GpuUuid, SchedulerStatus, TenantSettings};

use crate::Time;
use crate::inputs::Event;
use crate::report::Output;
use crate::report::incidents::Incident;
use crate::state::State;
use crate::state::client::{ClientId, Job};
use crate::state::config::Config;
#[cfg(feature = "test-api")]
use crate::state::cost::HandOverCosts;
use crate::state::rule::Rule;
use crate::steps::books::Books;

/// The scheduler's decisions. See the crate's documentation.
#[derive(Debug)]
pub struct Core {
    books: Books,
}

impl Core {
    /// Returns a scheduler without clients.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self { books: Books::new(config) }
    }

    /// Takes in one event. `now` never goes back.
    pub fn handle(&mut self, event: Event, now: Time) {
        let books = &mut self.books;
        books.begin_event(now);
        books.forget_last_event();
        match event {
            Event::Registered { client, identity, register } => {
                books.on_registered(client, identity, register);
            }
            Event::Message { client, message } => books.on_message(client, message),
            Event::Disconnected { client, process_remains } => {
                books.on_disconnected(client, process_remains);
            }
            Event::Exited { client, identity } => books.on_exited(client, identity),
            Event::Stopped { client, stopped } => books.on_stopped(client, stopped),
            Event::Measured(measured) => books.on_measured(&measured),
            Event::Unmeasured { gpu } => books.on_unmeasured(gpu),
            Event::Deadline => {}
        }
        books.reconcile();
    }

    /// Takes the next output; call it until there is none.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.books.report_mut().poll_output()
    }

    /// Takes the next incident. The next call of [`Core::handle`] forgets those that were not taken.
    pub fn poll_incident(&mut self) -> Option<Incident> {
        self.books.report_mut().poll_incident()
    }

    /// Returns when [`Event::Deadline`] is due if no other event comes before.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        self.books.agenda().next_deadline(self.state().is_scheduling())
    }
}

/// The requests of administrators. Each is an event of its own.
impl Core {
    fn state(&self) -> &State {
        self.books.state()
    }

    /// Runs the request, then reconciles; on error does not reconcile.
    fn request<T, E>(&mut self, now: Time, request: impl FnOnce(&mut Books) -> Result<T, E>) -> Result<T, E> {
        self.books.begin_event(now);
        let done = request(&mut self.books)?;
        self.books.reconcile();
        Ok(done)
    }

    /// Runs a request that cannot fail, then reconciles.
    fn apply<T>(&mut self, now: Time, request: impl FnOnce(&mut Books) -> T) -> T {
        let Ok(done) = self.request(now, |books| -> Result<T, Infallible> { Ok(request(books)) });
        done
    }

    /// Whether scheduling is on.
    #[must_use]
    pub fn is_scheduling(&self) -> bool {
        self.state().is_scheduling()
    }

    /// Switches scheduling on: every client that runs becomes a holder, and clients that do not fit are asked
    /// to leave.
    pub fn switch_on(&mut self, now: Time) -> String {
        self.apply(now, Books::switch_on)
    }

    /// Switches scheduling off: every client runs.
    ///
    /// # Errors
    /// When not everything fits, unless `force` is set: page faults would then move memory.
    pub fn switch_off(&mut self, force: bool, now: Time) -> Result<String, String> {
        self.request(now, |books| books.switch_off(force))
    }

    /// Sets how the quantum is chosen on one GPU, or on all GPUs, known and unknown. Returns a line that says
    /// what was done.
    pub fn set_quantum(&mut self, gpu: Option<GpuUuid>, rule: Rule, now: Time) -> String {
        self.apply(now, |books| books.set_quantum(gpu, rule))
    }

    /// Goes back to the configuration of the start: how the quantum is chosen, and scheduling is on.
    pub fn reset(&mut self, config: Config, now: Time) {
        self.apply(now, |books| books.reset(config));
    }

    /// Applies another configuration. The number that names this run of the scheduler stays, and the settings
    /// of its start.
    pub fn configure(&mut self, config: Config, now: Time) {
        self.apply(now, |books| books.configure(config));
    }

    /// Gives an administrator's terms to a client's job. Returns words for the clients that they apply to.
    ///
    /// # Errors
    /// When there is no such client, or it does not use the GPU.
    pub fn give(
        &mut self,
        client: ClientId,
        gpu: Option<GpuUuid>,
        given: TenantSettings,
        now: Time,
    ) -> Result<String, String> {
        self.request(now, |books| books.give(client, gpu, given))
    }

    /// Gives an administrator's terms to a tenant that is about to come.
    pub fn set_tenant_terms(&mut self, tenant: u64, given: TenantSettings, now: Time) {
        self.apply(now, |books| books.set_tenant_terms(tenant, given));
    }

    /// Replaces the bounds of a tenant: those of its seat, or those that it has as one of Slurm's jobs. Its
    /// processes can ask for less.
    pub fn set_tenant_bounds(&mut self, tenant: u64, bounds: TenantSettings, now: Time) {
        self.apply(now, |books| books.set_tenant_bounds(tenant, bounds));
    }

    /// Forgets what administrators gave to a tenant: its seat is no longer that of the same container. Its
    /// bounds stay.
    pub fn forget_tenant_terms(&mut self, tenant: u64, now: Time) {
        self.apply(now, |books| books.forget_tenant_terms(tenant));
    }

    /// Whether a tenant has clients.
    #[must_use]
    pub fn has_clients(&self, tenant: u64) -> bool {
        self.state().jobs().count_clients(Job::Tenant(tenant)) > 0
    }

    /// Tells a client its limits again. `before` is the limit in bytes that its seat had set, and that the
    /// client may have read; 0 for none. It is not the client's own wish.
    pub fn replace_limits(&mut self, client: ClientId, before: u64, now: Time) {
        self.apply(now, |books| books.tell_limits(client, |_| before));
    }

    /// Has a client's process go off the card as soon as it can. Returns a line that says what is done.
    ///
    /// # Errors
    /// When there is no such client, or it cannot go.
    pub fn sleep(&mut self, client: ClientId, now: Time) -> Result<String, String> {
        self.request(now, |books| books.order_sleep(client))
    }

    /// Has a client's process come back to the card, or takes back that it was to go. Returns a line that says
    /// what is done.
    ///
    /// # Errors
    /// When there is no such client.
    pub fn wake(&mut self, client: ClientId, now: Time) -> Result<String, String> {
        self.request(now, |books| books.order_wake(client))
    }

    /// Asks every client for its counters, unless it still has to answer.
    pub fn ask_counters(&mut self) -> Vec<ClientId> {
        self.books.ask_counters()
    }
}

/// The state, as others see it.
impl Core {
    /// Returns the status of the scheduler itself, in whose process `pid` the core runs.
    #[must_use]
    pub fn status(&self, now: Time, pid: u32) -> SchedulerStatus {
        self.state().status(now, pid)
    }

    /// Returns a row for each GPU.
    #[must_use]
    pub fn gpu_status(&self) -> Vec<GpuStatus> {
        self.state().gpu_status()
    }

    /// Returns a row for each client, for each departed process that still has memory, and for the last few
    /// clients that are gone. Times are counted up to `now`.
    #[must_use]
    pub fn client_status_at(&self, now: Time) -> Vec<ClientStatus> {
        self.books.client_status_at(now)
    }

    /// Returns a row for each client whose process is off the card.
    #[must_use]
    pub fn asleep_status(&self) -> Vec<AsleepStatus> {
        self.state().asleep_status()
    }

    /// Returns the clients that have a row in [`Self::client_status_at`].
    #[must_use]
    pub fn listed(&self) -> BTreeSet<ClientId> {
        self.books.listed()
    }

    /// Returns the GPUs that clients use, or to which they may come from their sleep.
    #[must_use]
    pub fn gpus_in_use(&self) -> BTreeSet<GpuUuid> {
        self.state().gpus_in_use()
    }

    /// Whether a client that could be measured has not been measured often enough for its contexts to count.
    #[must_use]
    pub fn is_measuring(&self) -> bool {
        self.state().is_measuring()
    }

    /// Whether a client is to leave a GPU with all of its process, or has left it, or may come to it: its free memory is to be measured.
    #[must_use]
    pub fn has_sleepers(&self, gpu: GpuUuid) -> bool {
        self.state().has_sleepers(gpu)
    }

    /// Returns the clients whose processes are stopped, or may be stopped to the harm of others. The caller
    /// looks at them now and then.
    #[must_use]
    pub fn suspects(&self) -> Vec<ClientId> {
        self.state().suspects()
    }

    /// Whether a client's process is known to be stopped.
    #[must_use]
    pub fn is_stopped(&self, client: ClientId) -> bool {
        self.state().client(client).is_some_and(|client| client.stopped)
    }
}

/// For tests: the daemon needs none of it.
#[cfg(feature = "test-api")]
impl Core {
    /// Returns [`Core::client_status_at`] the last event.
    #[must_use]
    pub fn client_status(&self) -> Vec<ClientStatus> {
        self.client_status_at(self.state().now())
    }

    /// Returns the cost of hand-overs on a GPU, or of one client on it, as far as it is known.
    #[must_use]
    pub fn switch_cost(&self, gpu: GpuUuid, of: Option<ClientId>) -> Option<HandOverCosts> {
        self.state().switch_cost(gpu, of)
    }

    /// Returns the work of the last event: clients and GPUs looked at, and entries of ledgers written. A test
    /// cannot rely on a clock.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.books.agenda().work() + self.state().looks()
    }

    /// Returns the virtual time of a client's job, or of its gang, in nanoseconds: its place in the order of
    /// turns on a GPU. Tests derive from it how long a wait may be.
    #[must_use]
    pub fn virtual_time(&self, gpu: GpuUuid, client: ClientId) -> Option<i64> {
        let state = self.state();
        let there = state.gpu(gpu).zip(state.client(client));
        there.map(|(gpu, client)| state.place_now(gpu, client).time)
    }

    /// Returns the virtual time of a client's job on a GPU, in nanoseconds, and the weight by which its time
    /// is shared at present. The usual weight is 6400. Tests count the time that jobs get, and compare.
    #[must_use]
    pub fn share_of_time(&self, gpu: GpuUuid, client: ClientId) -> Option<(i64, u64)> {
        let shares = &self.state().gpu(gpu)?.shares;
        let job = self.state().client(client)?.job;
        Some((shares.time(job), shares.weight(job)))
    }

    /// Recomputes the ledgers from the clients and compares.
    ///
    /// # Errors
    /// The difference, or the client that waits though no event is to come.
    pub fn audit(&self) -> Result<(), String> {
        self.state().audit(self.books.agenda().gpus().first().copied())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nvshare_proto::units::GIB;

    use super::*;
    use crate::policy::quantum::AutoTarget;
    use crate::state::config::GpuConfig;
    use crate::state::gpu::{CapacityFigures, CapacitySource};

    const ONE: GpuUuid = GpuUuid([1; 16]);
    const OTHER: GpuUuid = GpuUuid([2; 16]);

    fn fixed(seconds: u64) -> Rule {
        Rule::Fixed(Duration::from_secs(seconds))
    }

    fn config() -> Config {
        let own = GpuConfig { quantum: Some(Duration::from_secs(5)), ..GpuConfig::default() };
        Config { gpus: [(ONE, own)].into(), ..Config::default() }
    }

    #[test]
    fn a_gpu_has_its_own_quantum_until_one_is_set_for_all() {
        let mut core = Core::new(config());
        assert_eq!(core.books.state().config().rule(ONE), fixed(5));
        assert_eq!(core.books.state().config().rule(OTHER), fixed(30));
        core.set_quantum(Some(OTHER), fixed(7), Time::ZERO);
        assert_eq!(core.books.state().config().rule(OTHER), fixed(7));
        core.set_quantum(None, fixed(9), Time::ZERO);
        assert_eq!([ONE, OTHER].map(|gpu| core.books.state().config().rule(gpu)), [fixed(9); 2]);
        let auto = Rule::Auto(AutoTarget { overhead_ppm: 50_000, max_wait: Duration::from_secs(60) });
        core.set_quantum(Some(ONE), auto, Time::ZERO);
        assert_eq!([ONE, OTHER].map(|gpu| core.books.state().config().rule(gpu)), [auto, fixed(9)]);
        core.set_quantum(None, auto, Time::ZERO);
        core.set_quantum(Some(ONE), fixed(3), Time::ZERO);
        assert_eq!([ONE, OTHER].map(|gpu| core.books.state().config().rule(gpu)), [fixed(3), auto]);
    }

    #[test]
    fn another_configuration_is_followed_at_once() {
        let mut core = Core::new(config());
        core.books.set_size(
            ONE,
            CapacityFigures { available: 16 * GIB, ..CapacityFigures::default() },
            CapacitySource::Certain,
        );
        core.configure(Config { gpu_memory: Some(4 * GIB), boot: 99, ..Config::default() }, Time::ZERO);
        let gpu = &core.gpu_status()[0];
        assert_eq!((gpu.capacity, gpu.quantum_ms), (4 * GIB, 30_000));
        assert_eq!(
            core.books.state().config().boot,
            Config::default().boot,
            "grants name the same run of the scheduler"
        );
    }
}
