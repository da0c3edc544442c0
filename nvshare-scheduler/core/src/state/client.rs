//! A registered process, and where it stands.

use std::collections::BTreeMap;
use std::time::Duration;

use nvshare_proto::{ClientState, Counters, Epoch, GpuUuid, MemoryMode, Register, Wishes};

use crate::Time;
use crate::policy::rhythm::Rhythm;
use crate::state::account::{Account, Rates};
use crate::state::rest::Rest;
use crate::state::sleep::Sleep;
use crate::state::virtual_time::OncePerEvent;

/// GPUs that one client may use.
pub const MAX_GPUS_PER_CLIENT: usize = 64;

/// A client's number: the shell's number of its connection.
pub type ClientId = u64;

/// Why a client is next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum NextReason {
    /// The client fits beside the others: nobody leaves for it.
    Joins,
    /// The turn passes to the client: those that do not fit beside it leave.
    Claims,
    /// The client goes on where it was: it had been idle, or a drain beside it was given up.
    Resumes,
}

/// Where a client stands: by what the scheduler told it last, and what it answered. All that others ask
/// follows from that, and is kept nowhere else:
///
/// | phase | `holds` | `uses_a_turn` | `is_charged_to_its_job` | `is_running_or_draining` | in a ledger, as `Standing` |
/// |---|---|---|---|---|---|
/// | Parked | | | | | parked, or waits |
/// | Next | | | | | next |
/// | Granted | yes | yes | | | holds |
/// | Running | yes | yes | yes | yes | holds |
/// | Dropping | yes | yes | yes | yes | leaves |
/// | Drained | yes | yes | yes | | leaves |
/// | Idle | yes | | | | holds |
/// | Free | | | | | free |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The client's gate is closed.
    Parked,
    /// The client gets the lock as soon as there is room.
    Next(NextReason),
    /// LOCK_OK is sent; the client restores, which should be over by `until`. If `begins`, a turn begins when
    /// the client runs.
    Granted { epoch: Epoch, since: Time, until: Time, begins: bool },
    /// The client's gate is open.
    Running { epoch: Epoch },
    /// DROP_LOCK is sent; the client drains, which should be over when it is `due`.
    Dropping { epoch: Epoch, since: Time, due: Time },
    /// The client has drained, and keeps its place until the others of its gang have: if one of them cannot,
    /// it goes on.
    Drained,
    /// The client closed its own gate, and keeps its place until somebody takes it.
    Idle { epoch: Epoch, since: Time },
    /// Scheduling is off: the client runs and nothing is counted.
    Free,
}

impl Phase {
    /// Whether the client's work may be on the GPU, or its gate may open without a further message from the
    /// scheduler.
    pub(crate) fn holds(self) -> bool {
        matches!(
            self,
            Self::Granted { .. }
                | Self::Running { .. }
                | Self::Dropping { .. }
                | Self::Drained
                | Self::Idle { .. }
        )
    }

    pub(crate) fn is_granted(self) -> bool {
        matches!(self, Self::Granted { .. })
    }

    pub(crate) fn is_next(self) -> bool {
        matches!(self, Self::Next(_))
    }

    pub(crate) fn is_dropping(self) -> bool {
        matches!(self, Self::Dropping { .. })
    }

    pub(crate) fn is_idle(self) -> bool {
        matches!(self, Self::Idle { .. })
    }

    /// Whether the client's time counts as held: from the open gate to the end of the drain.
    pub(crate) fn is_running_or_draining(self) -> bool {
        matches!(self, Self::Running { .. } | Self::Dropping { .. })
    }

    /// Whether the client restores or computes: nobody else could use the GPU.
    pub(crate) fn uses_a_turn(self) -> bool {
        self.is_charged_to_its_job() || matches!(self, Self::Granted { .. })
    }

    /// Whether the time is charged to the client's job. `share.rs` says how much a restore counts for.
    pub(crate) fn is_charged_to_its_job(self) -> bool {
        self.is_running_or_draining() || self == Self::Drained
    }

    pub(crate) fn shown(self, wants: bool) -> ClientState {
        match self {
            Self::Parked if wants => ClientState::Waiting,
            Self::Parked => ClientState::Parked,
            Self::Next(_) => ClientState::Next,
            Self::Granted { .. } => ClientState::Restoring,
            Self::Running { .. } => ClientState::Running,
            Self::Dropping { .. } | Self::Drained => ClientState::Draining,
            Self::Idle { .. } => ClientState::Idle,
            Self::Free => ClientState::Free,
        }
    }
}

/// A hand-over to a client that waited for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HandOver {
    /// When the lock was given back.
    pub(crate) freed: Time,
    /// The grant has to move memory.
    pub(crate) moves: bool,
}

/// A client's process, as the kernel describes it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Identity {
    /// The process's number, if our PID namespace has one for it.
    pub pid: Option<u32>,
    /// Tells the process from every other one, in any namespace.
    pub process: Option<u64>,
    /// The tenant of the process: a container, or one `nvshare-ctl run`.
    pub tenant: Option<u64>,
    /// The gang that the process says it belongs to, within its tenant, or among its user's processes.
    pub gang: Option<Gang>,
}

/// Processes that are granted together or not at all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Gang {
    /// Tells the gang from others. It is made from the gang's owner and its name, so that nobody joins
    /// another's gang.
    pub number: u64,
    /// How many processes the gang is to have; 0: as many as come.
    pub size: u32,
}

/// A gang's number: see [`Gang::number`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GangId(pub(crate) u64);

impl Gang {
    pub(crate) fn id(self) -> GangId {
        GangId(self.number)
    }
}

impl Identity {
    /// Whether both are known to be the same process.
    pub(crate) fn is_same_process(self, other: Self) -> bool {
        match (self.process, other.process) {
            (None, None) => self.pid.is_some() && self.pid == other.pid,
            (one, other) => one.is_some() && one == other,
        }
    }
}

/// The clients whose time on a GPU is counted together: all processes of a tenant, else of a gang, else one
/// process, else one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Job {
    Tenant(u64),
    Gang(u64),
    Process(u64),
    Connection(ClientId),
}

impl Job {
    pub(crate) fn of(identity: Identity, client: ClientId) -> Self {
        let process = identity.process.map(Self::Process);
        let gang = identity.gang.map(|gang| Self::Gang(gang.number));
        identity.tenant.map(Self::Tenant).or(gang).or(process).unwrap_or(Self::Connection(client))
    }
}

/// A registered process.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) id: ClientId,
    /// The process's number: from the kernel, or from the process itself where the kernel cannot tell.
    pub(crate) pid: u32,
    /// The process, as the kernel describes it.
    pub(crate) identity: Identity,
    pub(crate) job: Job,
    /// The gang that the client is a member of.
    pub(crate) gang: Option<GangId>,
    /// The numbers of memory that the client shares.
    pub(crate) shares: Vec<u64>,
    /// Its gang of those who share memory did not fit: the client goes on by itself.
    pub(crate) goes_alone: bool,
    /// How far the client is ahead of the clocks of its GPUs, if it uses several and has no gang.
    pub(crate) lead: OncePerEvent,
    /// The client's wishes for the GPUs' time.
    pub(crate) asked: Wishes,
    /// An administrator has paused the client's job, or that of another member of its gang.
    pub(crate) paused: bool,
    pub(crate) name: String,
    pub(crate) memory: MemoryMode,
    phase: Phase,
    /// The client wants the lock: for work at its gate, for an allocation while it is parked, or with its
    /// gang.
    pub(crate) wants: bool,
    pub(crate) waiting_since: Time,
    /// In boxes: a map has room for eleven, and most clients use one GPU.
    pub(crate) accounts: BTreeMap<GpuUuid, Box<Account>>,
    held: Duration,
    waited: Duration,
    /// The client's work between its sleeps.
    pub(crate) rhythm: Rhythm,
    /// `held`, `waited` and `rhythm` are counted up to this time.
    counted_to: Time,
    pub(crate) told_waiting: bool,
    /// At the last check, no room could be made for the client, or its gang waited for members.
    pub(crate) must_wait: bool,
    /// The hand-over that the client's grant completes, until it runs.
    pub(crate) hand_over: Option<HandOver>,
    /// The grant under which the client goes on that ran without being counted, until it says that it knows.
    pub(crate) adopted: Option<Epoch>,
    /// The client's drains that were given up in a row.
    pub(crate) deferrals: u32,
    /// When its drain may be tried again, after one was given up: its own, or that of a client that was asked along with it.
    pub(crate) drains_again_at: Time,
    /// Until this time, the client counts as one that does not leave: it gave up too many drains in a row.
    pub(crate) stubborn_until: Option<Time>,
    /// The client did not answer in time.
    pub(crate) is_unresponsive: bool,
    /// The client's process is stopped, as by Ctrl-Z.
    pub(crate) stopped: bool,
    /// Until this time, allocations of others wait for the stopped process to go on.
    pub(crate) may_go_on_until: Option<Time>,
    /// Whether the client's process is off the card.
    pub(crate) sleep: Sleep,
    /// Since when it is off the card of which this scheduler did not send it, or `None`. The memory that it left may be others'.
    pub(crate) came_asleep_at: Option<Time>,
    /// When its process came back to the card last.
    pub(crate) awake_since: Option<Time>,
    /// Other GPUs to which it can come back. It says so each time that it has gone.
    pub(crate) elsewhere: Vec<GpuUuid>,
    /// When it is looked again whether one of them has room for it.
    pub(crate) looks_elsewhere_at: Option<Time>,
    /// Why the process cannot leave the card as long as it lives.
    pub(crate) never_sleeps: Option<String>,
    pub(crate) rest: Rest,
    pub(crate) notes: Notes,
}

/// Things said to a client, about it, and by it about itself. No decision depends on them.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    /// The log says that no room can be made for the client.
    pub(crate) reported_no_room: bool,
    /// The client was asked for its counters and has not answered.
    pub(crate) asked_counters: bool,
    /// The log says that the client cannot share memory.
    pub(crate) reported_sharing: bool,
    pub(crate) counters: Counters,
}

impl Client {
    pub(crate) fn new(id: ClientId, identity: Identity, register: Register, now: Time) -> Self {
        let account = |usage| {
            let mut account = Account::new(usage, Rates::default());
            account.room = account.resident();
            Box::new(account)
        };
        // More than any machine has would cost each event of the job more.
        let mut asked = register.asked;
        asked.compute.truncate(MAX_GPUS_PER_CLIENT);
        asked.compute.shrink_to_fit();
        Self {
            id,
            pid: identity.pid.unwrap_or(register.pid),
            identity,
            job: Job::of(identity, id),
            gang: None,
            shares: Vec::new(),
            goes_alone: false,
            lead: OncePerEvent::default(),
            asked,
            paused: false,
            name: register.name,
            memory: register.memory,
            phase: Phase::Parked,
            wants: false,
            waiting_since: now,
            accounts: register
                .usage
                .into_iter()
                .take(MAX_GPUS_PER_CLIENT)
                .map(|u| (u.gpu, account(u)))
                .collect(),
            held: Duration::ZERO,
            waited: Duration::ZERO,
            rhythm: Rhythm::default(),
            counted_to: now,
            told_waiting: false,
            must_wait: false,
            hand_over: None,
            adopted: None,
            deferrals: 0,
            drains_again_at: Time::ZERO,
            stubborn_until: None,
            is_unresponsive: false,
            stopped: false,
            may_go_on_until: None,
            sleep: Sleep::No,
            came_asleep_at: None,
            awake_since: None,
            elsewhere: Vec::new(),
            looks_elsewhere_at: None,
            never_sleeps: None,
            rest: Rest::since(now),
            notes: Notes::default(),
        }
    }

    /// Whether the client, which is off its card, is about to come back to this GPU.
    pub(crate) fn is_expected_on(&self, gpu: GpuUuid) -> bool {
        match self.sleep {
            Sleep::Sent { to, .. } => to == gpu,
            Sleep::Wanted { .. } | Sleep::Waking { .. } => self.accounts.contains_key(&gpu),
            _ => false,
        }
    }

    pub(crate) fn gpus(&self) -> Vec<GpuUuid> {
        self.accounts.keys().copied().collect()
    }

    /// Returns the bytes that the client has allocated, on all of its GPUs.
    pub(crate) fn allocated(&self) -> u64 {
        self.accounts.values().fold(0, |sum, account| sum.saturating_add(account.usage.allocated))
    }

    /// Returns the bytes that the client may have resident, on all of its GPUs.
    pub(crate) fn room(&self) -> u64 {
        self.accounts.values().fold(0, |sum, account| sum.saturating_add(account.room))
    }

    /// Returns where the client stands.
    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    /// Requests the lock for the client. It has waited since the first of its requests, and of its gang's.
    pub(crate) fn request_lock(&mut self, since: Time) {
        if !std::mem::replace(&mut self.wants, true) || since < self.waiting_since {
            self.waiting_since = since;
        }
    }

    /// Parks the client: its gate is closed, and it has no claim to the lock.
    pub(crate) fn park(&mut self) {
        self.phase = Phase::Parked;
    }

    /// Whether an allocation of the client waits for room, or is about to take what came for it.
    pub(crate) fn has_need(&self) -> bool {
        self.needs_room() || self.accounts.values().any(|account| account.promised.is_some())
    }

    /// Whether an allocation of the client waits for room.
    pub(crate) fn needs_room(&self) -> bool {
        self.accounts.values().any(|account| account.needs > 0)
    }

    /// Makes the client next: it gets the lock as soon as there is room.
    pub(crate) fn make_next(&mut self, why: NextReason) {
        self.phase = Phase::Next(why);
    }

    /// Grants the lock to the client, which should run by `until`. If it `begins`, a turn begins when it
    /// runs.
    pub(crate) fn grant(&mut self, epoch: Epoch, since: Time, until: Time, begins: bool) {
        self.phase = Phase::Granted { epoch, since, until, begins };
    }

    /// Lets the client's turn count as begun though it does not run, so that it can be over.
    pub(crate) fn count_turn_as_begun(&mut self) {
        if let Phase::Granted { begins, .. } = &mut self.phase {
            *begins = false;
        }
    }

    /// Lets the answer that is due be overdue at once: the client's process is stopped, and will not give it.
    pub(crate) fn expect_no_answer(&mut self, now: Time) {
        if let Phase::Granted { until: due, .. } | Phase::Dropping { due, .. } = &mut self.phase {
            *due = now;
        }
    }

    /// Lets the client run: its gate is open.
    pub(crate) fn run(&mut self, epoch: Epoch) {
        self.phase = Phase::Running { epoch };
        self.set_whole(false);
    }

    /// Notes whether the client runs with all of its memory resident or not at all, as far as that is known.
    pub(crate) fn set_whole(&mut self, comes_whole: bool) {
        self.accounts.values_mut().for_each(|account| account.comes_whole = comes_whole);
    }

    /// Notes that the client is asked to drain, which should be over when it is `due`.
    pub(crate) fn drop_lock(&mut self, epoch: Epoch, since: Time, due: Time) {
        self.phase = Phase::Dropping { epoch, since, due };
    }

    /// Keeps the place of a client that has drained before others of its gang, until they have.
    pub(crate) fn wait_drained(&mut self) {
        self.phase = Phase::Drained;
    }

    /// Lets the client be idle, which has closed its own gate. It keeps its place until another client takes it.
    pub(crate) fn idle(&mut self, epoch: Epoch, since: Time) {
        self.phase = Phase::Idle { epoch, since };
    }

    /// Sets the client free when scheduling is off: it runs, and nothing of it is counted.
    pub(crate) fn set_free(&mut self) {
        self.phase = Phase::Free;
        self.is_unresponsive = false;
        self.forget_deferrals();
    }

    /// Does what a change of phase brings with it. A client that is parked again gives up its early room. A
    /// sleep begins or ends: `slept` says whether the client was asleep before. A grant records the bytes to
    /// restore.
    pub(in crate::state) fn follow_phase(&mut self, before: Phase, slept: bool, now: Time) {
        if before != Phase::Parked && self.phase == Phase::Parked {
            self.accounts.values_mut().for_each(|account| account.early = None);
        }
        match (slept, self.is_asleep()) {
            (false, true) => self.rhythm.fall_asleep(now),
            (true, false) => self.rhythm.wake(now),
            _ => {}
        }
        if self.phase.is_granted() && !before.is_granted() {
            self.record_restores();
        }
    }

    /// Whether the client's turn comes on several GPUs at once: its own, or those of its gang.
    pub(crate) fn uses_several(&self) -> bool {
        self.accounts.len() > 1 || self.gang.is_some()
    }

    /// Whether the client neither runs nor asks for the lock.
    pub(crate) fn is_asleep(&self) -> bool {
        self.phase.is_idle() || self.phase == Phase::Parked && !self.wants
    }

    /// Notes what the client is told: whether others wait for what it holds. Returns whether that is news.
    pub(crate) fn note_told_waiting(&mut self, waiting: bool, now: Time) -> bool {
        self.count(now);
        if !waiting {
            self.rhythm.discard_current_work();
        }
        std::mem::replace(&mut self.told_waiting, waiting) != waiting
    }

    /// Whether the client's work between its sleeps is short, so that it may go ahead of others.
    pub(crate) fn is_interactive(&self) -> bool {
        self.gang.is_none() && self.rhythm.is_interactive()
    }

    /// Whether the client was asked to leave, and may be expected to.
    pub(crate) fn is_draining(&self) -> bool {
        self.phase.is_dropping() && !self.is_unresponsive
    }

    /// Whether the client waits for the lock and is not next yet.
    pub(crate) fn waits(&self) -> bool {
        self.wants && self.phase == Phase::Parked && !self.paused && !self.sleep.is_off_card()
    }

    /// Whether nothing that the client is asked for is to be expected. A stopped process that runs counts as
    /// usual until it is asked to leave.
    pub(crate) fn is_silent(&self) -> bool {
        self.is_unresponsive || self.stopped && !self.phase.is_running_or_draining()
    }

    /// Returns how long an answer of the client is waited for: not at all, if its process is stopped.
    pub(crate) fn grace(&self, grace: Duration) -> Duration {
        if self.stopped { Duration::ZERO } else { grace }
    }

    /// Returns how long the client has held the lock, and how long it has waited for the lock, up to now.
    pub(crate) fn times(&self, now: Time) -> (Duration, Duration) {
        let passed = now.saturating_sub(self.counted_to);
        if self.phase.is_running_or_draining() {
            (self.held + passed, self.waited)
        } else if self.wants {
            (self.held, self.waited + passed)
        } else {
            (self.held, self.waited)
        }
    }

    /// Counts the time since the last call as held or waited. Called before the client's phase changes.
    pub(crate) fn count(&mut self, now: Time) {
        if self.phase.is_running_or_draining() && self.told_waiting {
            self.rhythm.add_work(now.saturating_sub(self.counted_to));
        }
        (self.held, self.waited) = self.times(now);
        self.counted_to = self.counted_to.max(now);
    }

    /// Forgets the room that allocations wait for. A client tells its needs anew when it has given the lock back.
    pub(crate) fn forget_needs(&mut self) {
        for account in self.accounts.values_mut() {
            account.needs = 0;
            account.promised = None;
        }
    }

    /// Forgets earlier drains that failed, when the client's gate is closed and its work is complete.
    pub(crate) fn note_drained(&mut self) {
        self.is_unresponsive = false;
        self.forget_deferrals();
    }

    /// Forgets earlier drains that failed, when what they failed for may be over.
    pub(crate) fn forget_deferrals(&mut self) {
        self.deferrals = 0;
        self.drains_again_at = Time::ZERO;
        self.stubborn_until = None;
    }

    /// Records the bytes that the client will restore under its grant: the client reports new usage while it
    /// restores.
    fn record_restores(&mut self) {
        for account in self.accounts.values_mut() {
            let before = account.early.map_or(0, |early| early.absent);
            account.restores = account.usage.absent.max(before).min(account.room);
        }
    }

    /// Returns the bytes that the client restores under its grant.
    pub(crate) fn restores(&self) -> u64 {
        self.accounts.values().fold(0, |sum, account| sum.saturating_add(account.restores))
    }

    /// Whether the client is one gang with those that it shares memory with: not if it has named its gang, or goes on by itself as
    /// such a gang did not fit.
    pub(crate) fn joins_sharers(&self) -> bool {
        self.identity.gang.is_none() && !self.goes_alone
    }

    /// Whether the client gives no room back: it does not answer, or is on its way to sleep or back.
    fn gives_nothing_back(&self) -> bool {
        let is_silent = self.stopped && !self.phase.is_running_or_draining()
            || self.phase.holds() && self.is_unresponsive;
        is_silent || self.sleep.keeps_still()
    }

    /// Returns the bytes of an account that are as good as used, since they do not come back.
    pub(crate) fn kept(&self, account: &Account) -> u64 {
        if self.gives_nothing_back() { account.room } else { account.unevictable_bytes() }
    }

    /// Returns the bytes of an account that the client cannot give back when asked.
    pub(crate) fn pinned(&self, account: &Account) -> u64 {
        if self.gives_nothing_back() {
            account.room
        } else if self.phase.holds() && !self.phase.is_idle() && self.stubborn_until.is_some() {
            // The client answers, and gives back the room that it does not use.
            account.room.min(account.wanted())
        } else {
            account.pinned(self.memory)
        }
    }
}
