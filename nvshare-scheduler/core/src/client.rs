//! A registered process, and where it stands.

use std::collections::BTreeMap;
use std::time::Duration;

use nvshare_proto::{Asked, ClientState, Counters, Epoch, GpuUuid, MemoryMode, Register};

use crate::Time;
use crate::account::{Account, Rates};

/// A client's number: the shell's number of its connection.
pub type ClientId = u64;

/// Why a client is next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Why {
    /// It fits beside those who are there: nobody leaves for it.
    Joins,
    /// The turn passes to it: who does not fit beside it leaves.
    Claims,
    /// It goes on where it was: it had been idle, or a drain beside it was given up.
    Resumes,
}

/// Where a client stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Its gate is closed.
    Parked,
    /// It gets the lock as soon as there is room.
    Next(Why),
    /// LOCK_OK is sent; it restores, which should not take longer than until then. A turn `begins` when it runs.
    Granted { epoch: Epoch, since: Time, until: Time, begins: bool },
    /// Its gate is open.
    Running { epoch: Epoch },
    /// DROP_LOCK is sent; it drains, which should be over when it is due.
    Dropping { epoch: Epoch, since: Time, due: Time },
    /// It has drained, and keeps its place until the others of its gang have: if one of them cannot, it goes on.
    Drained,
    /// It closed its own gate, and keeps its place until somebody takes it.
    Idle { epoch: Epoch, since: Time },
    /// Scheduling is off: it runs and nothing is counted.
    Free,
}

impl Phase {
    /// Its work may be on the GPU, or may be let through without a further word from here.
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

    pub(crate) fn is_next(self) -> bool {
        matches!(self, Self::Next(_))
    }

    pub(crate) fn drops(self) -> bool {
        matches!(self, Self::Dropping { .. })
    }

    pub(crate) fn is_idle(self) -> bool {
        matches!(self, Self::Idle { .. })
    }

    /// It held the lock by the wall clock: from open gate to drained.
    pub(crate) fn runs(self) -> bool {
        matches!(self, Self::Running { .. } | Self::Dropping { .. })
    }

    /// Nobody else could use what it uses: restoring is charged to who restores.
    pub(crate) fn is_charged(self) -> bool {
        self.runs() || matches!(self, Self::Granted { .. } | Self::Drained)
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
    /// Memory has to move for it.
    pub(crate) moves: bool,
}

/// What the kernel says of a client's process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Identity {
    /// Its number, where it is in our view of processes.
    pub pid: Option<u32>,
    /// What tells it from every other process, in whatever view.
    pub process: Option<u64>,
    /// The tenant that it belongs to: a container, or one `nvshare-ctl run`.
    pub tenant: Option<u64>,
    /// The gang that it says it belongs to, within its tenant, or its user's processes.
    pub gang: Option<Gang>,
}

/// Processes that are granted together or not at all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Gang {
    /// Tells it from other gangs: made of whose it is and of its name, so that nobody joins another's.
    pub number: u64,
    /// How many processes it is to have; 0: as many as come.
    pub size: u32,
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

/// Whose time on a GPU is counted together: all processes of a tenant, else of a gang, else one process, else one
/// connection.
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
    /// As the kernel says, or as the process itself says where the kernel cannot tell.
    pub(crate) pid: u32,
    /// What the kernel says of its process.
    pub(crate) identity: Identity,
    pub(crate) job: Job,
    /// The gang of which it is a member.
    pub(crate) gang: Option<u64>,
    /// What it asks for of the GPUs' time.
    pub(crate) asked: Asked,
    /// An administrator has its job stand still.
    pub(crate) paused: bool,
    pub(crate) name: String,
    pub(crate) memory: MemoryMode,
    pub(crate) phase: Phase,
    /// Work waits at its gate.
    pub(crate) wants: bool,
    pub(crate) waiting_since: Time,
    pub(crate) accounts: BTreeMap<GpuUuid, Account>,
    pub(crate) held: Duration,
    pub(crate) waited: Duration,
    /// Until when these two are counted.
    counted_to: Time,
    pub(crate) told_waiting: bool,
    /// When it was last judged: no room can be made for it as things are.
    pub(crate) hopeless: bool,
    /// The hand-over that its grant ends, until it runs.
    pub(crate) hand_over: Option<HandOver>,
    /// Its drains that were given up in a row.
    pub(crate) deferrals: u32,
    /// So many that it counts as one that does not leave, until this time.
    pub(crate) stubborn_until: Option<Time>,
    /// It did not answer in time.
    pub(crate) stuck: bool,
    pub(crate) reported_hopeless: bool,
    /// It was asked for its counters and has not answered.
    pub(crate) asked_counters: bool,
    pub(crate) counters: Counters,
}

impl Client {
    pub(crate) fn new(id: ClientId, identity: Identity, register: Register, now: Time) -> Self {
        let account = |usage| Account::new(usage, Rates::default());
        Self {
            pid: identity.pid.unwrap_or(register.pid),
            identity,
            job: Job::of(identity, id),
            gang: None,
            asked: register.asked,
            paused: false,
            name: register.name,
            memory: register.memory,
            phase: Phase::Parked,
            wants: false,
            waiting_since: now,
            accounts: register.usage.into_iter().map(|u| (u.gpu, account(u))).collect(),
            held: Duration::ZERO,
            waited: Duration::ZERO,
            counted_to: now,
            told_waiting: false,
            hopeless: false,
            hand_over: None,
            deferrals: 0,
            stubborn_until: None,
            stuck: false,
            reported_hopeless: false,
            asked_counters: false,
            counters: Counters::default(),
        }
    }

    /// It waits for the lock and is not next yet.
    pub(crate) fn waits(&self) -> bool {
        self.wants && self.phase == Phase::Parked && !self.paused
    }

    /// Counts the time since the last time.
    pub(crate) fn count(&mut self, now: Time) {
        let passed = now.saturating_sub(self.counted_to);
        self.counted_to = self.counted_to.max(now);
        if self.phase.runs() {
            self.held += passed;
        } else if self.wants {
            self.waited += passed;
        }
    }

    /// Its gate is closed and its work complete: whatever became of its drains before.
    pub(crate) fn has_drained(&mut self) {
        self.stuck = false;
        self.deferrals = 0;
        self.stubborn_until = None;
    }

    /// What of an account cannot be had by asking.
    pub(crate) fn pinned(&self, account: &Account) -> u64 {
        if self.phase.holds() && self.stuck {
            account.budget
        } else if self.phase.holds() && !self.phase.is_idle() && self.stubborn_until.is_some() {
            // It answers, and gives back what it does not use.
            account.budget.min(account.wanted())
        } else {
            account.pinned(self.memory)
        }
    }
}
