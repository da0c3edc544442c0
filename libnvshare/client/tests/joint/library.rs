//! The surroundings of a session: a gate, a mover's queue, accounts, a connection.

use std::cell::Cell;
use std::collections::VecDeque;
use std::time::Duration;

use nvshare_client::account::{Account, DeviceFacts, TenantQuota};
use nvshare_client::launch_window::InFlight;
use nvshare_client::{Host, Kind, MoverOrder, Residency};
use nvshare_proto::{ClientMessage, Counters, GpuUuid, PhaseTime};

/// No process of these worlds shares its limit.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Nobody {}

impl TenantQuota for Nobody {
    fn used(&self) -> u64 {
        match *self {}
    }

    fn charge(&self, _: u64, _: u64) -> Result<(), u64> {
        match *self {}
    }

    fn discharge(&self, _: u64) {
        match *self {}
    }
}

/// A device of a process.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) gpu: GpuUuid,
    account: Cell<Account<Nobody>>,
}

impl Device {
    pub(crate) fn account(&self) -> Account<Nobody> {
        self.account.get()
    }

    pub(crate) fn update<R>(&self, change: impl FnOnce(&mut Account<Nobody>) -> R) -> R {
        let mut account = self.account.get();
        let result = change(&mut account);
        self.account.set(account);
        result
    }
}

#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) number: usize,
    /// Its device, by its place in the list.
    pub(crate) device: usize,
    pub(crate) size: u64,
    pub(crate) kind: Kind,
    pub(crate) residency: Residency,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GateState {
    Closed,
    Open,
    Bounded,
}

impl GateState {
    fn open(in_flight: InFlight) -> Self {
        match in_flight {
            InFlight::Unbounded => Self::Open,
            InFlight::Bounded => Self::Bounded,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Library {
    pub(crate) now: Duration,
    pub(crate) devices: Vec<Device>,
    /// Largest first, as evictions and restores go.
    pub(crate) allocations: Vec<Allocation>,
    pub(crate) gate: GateState,
    /// The program's thread sleeps at the gate.
    pub(crate) is_asleep: bool,
    /// It is inside the gate: an allocation is being made.
    pub(crate) is_inside: bool,
    /// It submits work since then.
    pub(crate) submits_since: Option<Duration>,
    submitted: u64,
    /// Work in flight is complete then; `None`: not before the gate opens.
    pub(crate) complete_at: Option<Duration>,
    pub(crate) is_connected: bool,
    pub(crate) reconnects: bool,
    pub(crate) said: Vec<ClientMessage>,
    /// The numbers of memory that it shares.
    pub(crate) shares: Vec<u64>,
    /// Orders for the mover, each with the generation in which it was given.
    pub(crate) orders: VecDeque<(MoverOrder, u64)>,
    /// Orders of an earlier generation are given up, evictions excepted.
    pub(crate) generation: u64,
    pub(crate) evictions: usize,
    pub(crate) progress: u64,
    pub(crate) deferrals: u64,
    pub(crate) warnings: u64,
}

impl Library {
    pub(crate) fn new(terms: impl Iterator<Item = DeviceFacts>) -> Self {
        let device = |terms: DeviceFacts| Device { gpu: terms.gpu, account: Cell::new(Account::new(terms)) };
        Self {
            now: Duration::ZERO,
            devices: terms.map(device).collect(),
            allocations: Vec::new(),
            gate: GateState::Closed,
            is_asleep: false,
            is_inside: false,
            submits_since: None,
            submitted: 0,
            complete_at: Some(Duration::ZERO),
            is_connected: false,
            reconnects: false,
            shares: Vec::new(),
            said: Vec::new(),
            orders: VecDeque::new(),
            generation: 0,
            evictions: 0,
            progress: 0,
            deferrals: 0,
            warnings: 0,
        }
    }

    /// The program begins to submit work: something every millisecond.
    pub(crate) fn begin_submitting(&mut self) {
        self.submitted += 1;
        self.submits_since = Some(self.now);
        self.complete_at = None;
    }

    /// It stops. Returns for how long it has submitted.
    pub(crate) fn stop_submitting(&mut self) -> Duration {
        self.submitted = self.submissions();
        self.submits_since.take().map_or(Duration::ZERO, |since| self.now - since)
    }

    /// Whether all work that was submitted is complete.
    pub(crate) fn is_complete(&self) -> bool {
        !self.is_inside && !self.has_work()
    }

    /// Whether work that was submitted may not be complete.
    pub(crate) fn has_work(&self) -> bool {
        self.submits_since.is_some() || self.complete_at.is_none_or(|at| at > self.now)
    }

    /// Whether kernels of this process may be running.
    pub(crate) fn runs(&self) -> bool {
        self.gate != GateState::Closed || !self.is_complete()
    }

    /// The allocation of this number.
    pub(crate) fn allocation(&mut self, number: usize) -> &mut Allocation {
        self.allocations.iter_mut().find(|allocation| allocation.number == number).unwrap()
    }

    /// Enters an allocation into the list.
    pub(crate) fn allocate(&mut self, device: usize, size: u64, kind: Kind, charged: u64) {
        let residency = Residency::new(size, charged);
        let allocation = Allocation { number: self.allocations.len(), device, size, kind, residency };
        let at = self.allocations.partition_point(|other| other.size >= allocation.size);
        self.allocations.insert(at, allocation);
    }

    fn device(&self, gpu: GpuUuid) -> Option<&Device> {
        self.devices.iter().find(|device| device.gpu == gpu)
    }
}

impl Host for Library {
    type TenantQuota = Nobody;

    fn used(&self) -> Vec<GpuUuid> {
        self.all()
    }

    fn all(&self) -> Vec<GpuUuid> {
        self.devices.iter().map(|device| device.gpu).collect()
    }

    fn account(&self, gpu: GpuUuid) -> Option<Account<Nobody>> {
        self.device(gpu).map(Device::account)
    }

    fn update<R>(&self, gpu: GpuUuid, change: impl FnOnce(&mut Account<Nobody>) -> R) -> Option<R> {
        self.device(gpu).map(|device| device.update(change))
    }

    fn say(&mut self, message: ClientMessage) {
        if self.is_connected {
            if let ClientMessage::LockReleased { .. } | ClientMessage::Idle { .. } = message {
                assert!(!self.runs(), "the lock is given back with work in flight");
            }
            self.said.push(message);
        }
    }

    fn is_connected(&self) -> bool {
        self.is_connected
    }

    fn reconnect(&mut self) {
        // Earlier messages are on their way.
        self.is_connected = false;
        self.reconnects = true;
    }

    fn counters(&self) -> Counters {
        Counters::default()
    }

    fn take_phases(&mut self, _of: Option<GpuUuid>) -> Vec<PhaseTime> {
        Vec::new()
    }

    fn close_gate(&mut self) {
        self.gate = GateState::Closed;
    }

    fn open_gate(&mut self, in_flight: InFlight) {
        assert_eq!(self.evictions, 0, "the gate opens while memory is leaving");
        self.gate = GateState::open(in_flight);
    }

    fn bound(&mut self, in_flight: InFlight) {
        if self.gate != GateState::Closed {
            self.gate = GateState::open(in_flight);
        }
    }

    fn is_nobody_inside(&self) -> bool {
        !self.is_inside
    }

    fn has_lost_handle(&self) -> bool {
        false
    }

    fn elsewhere(&self) -> Vec<GpuUuid> {
        Vec::new()
    }

    fn change_places(&mut self, gpus: [GpuUuid; 2]) {
        unreachable!("nobody sleeps here, to be sent from or to {gpus:?}")
    }

    fn shares(&self) -> Vec<u64> {
        self.shares.clone()
    }

    fn is_anybody_at_door(&self) -> bool {
        false
    }

    fn is_anybody_asleep(&self) -> bool {
        self.is_asleep
    }

    fn submissions(&self) -> u64 {
        let since = |since: Duration| (self.now - since).as_millis() as u64;
        self.submitted + self.submits_since.map_or(0, since)
    }

    fn order(&mut self, order: MoverOrder) {
        if matches!(order, MoverOrder::Evict(_)) {
            self.evictions += 1;
        }
        self.orders.push_back((order, self.generation));
    }

    fn cancel(&mut self) {
        self.generation += 1;
    }

    fn is_evicting(&self) -> bool {
        self.evictions > 0
    }

    fn progress(&self) -> u64 {
        self.progress
    }

    fn count_hand_over(&mut self) {}

    fn count_deferral(&mut self) {
        self.deferrals += 1;
    }

    fn say_waiting(&mut self, _: Duration) {}

    fn warn_alone(&mut self) {
        self.warnings += 1;
    }
}
