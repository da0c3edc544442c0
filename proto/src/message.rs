//! Every message that crosses a socket.
//!
//! Memory moves between the scheduler's ledger and a client's by [`Room`] in both directions: room that the
//! scheduler gives may be filled by the client, room that the client gives back is free for others. What is in
//! flight belongs to nobody, so the sum never exceeds the GPU's capacity.

use serde::{Deserialize, Serialize};

use crate::{Asked, Given, GpuUuid, ShareStatus, WatchEvent, WatchFrom};

/// Names one grant of the lock. An answer that carries another epoch than the current one is stale and ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Epoch {
    /// Chosen anew at each start of a scheduler.
    pub boot: u64,
    /// Counts that scheduler's grants.
    pub counter: u64,
}

/// What a client, or `nvshare-ctl`, sends to the scheduler.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// A process with a GPU introduces itself; once per connection.
    Register(Register),
    /// A process that only looks: the answer is the page of its tenant's quota, if it has one.
    Look {
        /// The `nvshare-ctl run` that started it or its ancestor.
        run: Option<u64>,
    },
    /// From a registered process.
    Client(ClientMessage),
    /// From an administrator; what changes anything is accepted on the administrators' socket alone.
    Admin(AdminRequest),
}

/// What the scheduler sends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    /// To a registered process.
    Client(SchedulerMessage),
    /// To an administrator.
    Admin(AdminReply),
    /// What was asked is refused; on a client's connection, the last frame of it.
    Refused {
        /// One line, lower case, no full stop.
        reason: String,
    },
}

/// How the library hands out device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum MemoryMode {
    /// `cuMemAlloc` gives managed memory, which can be evicted and restored in bulk.
    Managed,
    /// `cuMemAlloc` is the driver's own: quota and gate only, nothing can be evicted.
    Off,
    /// `cuMemAlloc` gives memory that the library maps: it is copied out and unmapped, mapped and copied in.
    Swap,
}

/// Whether a process's work is let through when it registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Gate {
    /// Work waits for the lock.
    Closed,
    /// The process runs already: it joined late, or its scheduler was restarted.
    Open,
}

/// A process introduces itself, with the state that it has.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Register {
    /// As the process sees itself; a name to show, not an identity.
    pub pid: u32,
    /// The program's name, to show.
    pub name: String,
    /// How it hands out memory.
    pub memory: MemoryMode,
    /// Whether its work runs already.
    pub gate: Gate,
    /// It was registered before, with this scheduler or an earlier one.
    pub returns: bool,
    /// The `nvshare-ctl run` that started it or its ancestor.
    pub run: Option<u64>,
    /// The GPUs that it uses so far.
    pub usage: Vec<Usage>,
    /// What it asks for of their time.
    pub asked: Asked,
}

/// What a process has on one GPU. The first one that names a GPU says that the process uses it from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// The GPU.
    pub gpu: GpuUuid,
    /// Bytes of memory that the driver says this GPU has.
    pub total: u64,
    /// The process's own limit in bytes; 0: none.
    pub limit: u64,
    /// Bytes allocated, wherever they are.
    pub allocated: u64,
    /// Bytes of these that are not on the card: evicted, or allocated while parked and never touched.
    pub absent: u64,
    /// Bytes of these that are the driver's own memory, with what it keeps for pools and graphs: they are not moved.
    pub immovable: u64,
}

/// Bytes of a GPU's memory that change hands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    /// The GPU.
    pub gpu: GpuUuid,
    /// How many bytes.
    pub bytes: u64,
}

/// What a registered process says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ClientMessage {
    /// What it has allocated changed.
    Usage(Usage),
    /// Work waits at its closed gate.
    ReqLock,
    /// Its gate is open under this grant: everything is restored and the quantum starts.
    Running {
        /// The grant.
        epoch: Epoch,
    },
    /// The gate is closed and all submitted work is complete, in answer to DROP_LOCK.
    LockReleased {
        /// The grant that ends.
        epoch: Epoch,
    },
    /// The drain made no progress; the gate is open again.
    DropDeferred {
        /// The grant that goes on.
        epoch: Epoch,
    },
    /// Nothing was submitted for a while and all work is complete. The gate is closed: the lock may be taken
    /// without asking, and the process says REQ_LOCK when it has work again.
    Idle {
        /// The grant that may end.
        epoch: Epoch,
    },
    /// An allocation waits until the client may have this much on the card in all: what it was given and has not given back,
    /// and what it lacks. So room that crosses it on the way answers it. 0: no allocation waits any more.
    NeedRoom(Room),
    /// This much is free for others: evicted, or freed by the program.
    Room(Room),
    /// An EVICT is done as far as it can be.
    Evicted {
        /// The GPU.
        gpu: GpuUuid,
        /// Bytes of the order that could not leave, because the host has no memory for them.
        short: u64,
    },
    /// The library's own counters, since the process started.
    Counters(Counters),
    /// Work waits, and nothing was heard for a while: is anybody there?
    Ping,
}

/// What the scheduler says to a registered process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum SchedulerMessage {
    /// The answer to [`Register`].
    Registered {
        /// The client's number at this scheduler.
        client: u64,
        /// What becomes of its gate.
        hold: Hold,
    },
    /// How much of a GPU's memory its clients may fill together, in bytes; sent when the client first uses the
    /// GPU and when it changes.
    Capacity(Room),
    /// The lock is granted; all the room that the client needs comes with it.
    LockOk {
        /// The grant.
        epoch: Epoch,
        /// How long the client may keep the lock once it runs, if somebody waits; milliseconds.
        quantum_ms: u64,
        /// Room given with the grant.
        room: Vec<Room>,
    },
    /// Close the gate, drain, answer LOCK_RELEASED or DROP_DEFERRED.
    DropLock {
        /// The grant that is to end.
        epoch: Epoch,
        /// Milliseconds without progress after which the drain is given up.
        patience_ms: u32,
    },
    /// Give back this much: unused room first, then memory moved to the host.
    Evict(Room),
    /// Room for an allocation that waits.
    Room(Room),
    /// There is no room to be made for the allocation that waits.
    NoRoom {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// Whether somebody waits for what this client holds: while so, work in flight is bounded and idleness is
    /// reported.
    Waiters {
        /// Somebody waits.
        waiting: bool,
    },
    /// Scheduling is off: run.
    SchedOff,
    /// Scheduling is on again; the client goes on under this grant until told otherwise.
    SchedOn {
        /// The grant.
        epoch: Epoch,
    },
    /// The process shares its limits with others: the descriptor of their page comes along with this frame.
    Quota {
        /// Its row in the page.
        row: u32,
    },
    /// What the process may allocate on a GPU is another amount from now on, whatever its environment says; 0: no limit.
    Limit(Room),
    /// Send the counters.
    AskCounters,
    /// The answer to PING.
    Pong,
}

/// What becomes of a client's gate when it has registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Hold {
    /// Closed until LOCK_OK.
    Parked,
    /// It goes on under this grant.
    Running(Epoch),
    /// Scheduling is off: open.
    Free,
}

/// Counted by the library in its process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Launches, copies and fills that went through the gate.
    pub gated: u64,
    /// Those that ran without it: from driver callbacks, from inside another call, or through an entry point
    /// that the library does not know.
    pub passed_by: u64,
    /// Bytes of managed memory allocated now.
    pub managed: u64,
    /// Times that the lock was given back, by DROP_LOCK or IDLE.
    pub hand_overs: u64,
    /// Drains given up.
    pub deferrals: u64,
    /// Bytes moved to the host.
    pub evicted: u64,
    /// Time that took, in nanoseconds.
    pub evict_ns: u64,
    /// Bytes moved back to the card.
    pub restored: u64,
    /// Time that took, in nanoseconds.
    pub restore_ns: u64,
    /// Time from DROP_LOCK to drained, in nanoseconds.
    pub drain_ns: u64,
}

/// How long turns are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QuantumRule {
    /// Always so long.
    Fixed {
        /// In milliseconds.
        millis: u64,
    },
    /// As long as it takes for what hand-overs cost to be a small part of the time.
    Auto {
        /// That part, in millionths.
        overhead_ppm: u32,
        /// Longest time that work should wait for a turn, in milliseconds; it counts more than the overhead.
        max_wait_ms: u64,
    },
}

impl std::fmt::Display for QuantumRule {
    /// As [`parse_rule`](crate::units::parse_rule) reads it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Fixed { millis } => write!(f, "{}", *millis as f64 / 1e3),
            Self::Auto { overhead_ppm, max_wait_ms } => {
                write!(f, "auto {}% {}", f64::from(*overhead_ppm) / 1e4, *max_wait_ms as f64 / 1e3)
            }
        }
    }
}

/// What an administrator asks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum AdminRequest {
    /// Everything there is to show.
    Status,
    /// Sets the quantum of one GPU, or of all and of those to come.
    SetQuantum {
        /// The GPU; none: all.
        gpu: Option<GpuUuid>,
        /// The quantum.
        quantum: QuantumRule,
    },
    /// Gives a client's tenant something of its GPUs.
    Give {
        /// Whose tenant.
        client: u64,
        /// On this GPU, what is of one; none: on each.
        gpu: Option<GpuUuid>,
        /// What.
        given: Given,
    },
    /// Gives something to what an `nvshare-ctl run` is about to start.
    GiveRun {
        /// Whose run.
        user: u32,
        /// Which.
        run: u64,
        /// What, on each GPU.
        given: Given,
    },
    /// Scheduling on.
    On,
    /// Scheduling off: everybody runs. Refused while not everything fits, unless forced.
    Off {
        /// Even if not everything fits.
        force: bool,
    },
    /// Forgets what administrators set at run time: the configuration's quanta are in force, and scheduling is on.
    Reset,
    /// Tell what happens. The answer is [`AdminReply::Watching`], then events.
    Watch {
        /// Where to begin.
        from: WatchFrom,
        /// Go on as things happen; else it ends behind the last event that is kept.
        follow: bool,
    },
}

/// The answer to an administrator: rows and [`AdminReply::End`], or one [`AdminReply::Done`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum AdminReply {
    /// About the scheduler itself.
    Scheduler(SchedulerStatus),
    /// About a GPU.
    Gpu(GpuStatus),
    /// About a client.
    Client(Box<ClientStatus>),
    /// No more rows.
    End,
    /// It is done.
    Done {
        /// One line that says what.
        text: String,
    },
    /// Events follow.
    Watching {
        /// This run of the scheduler.
        boot: u64,
        /// The number of the first event to come.
        first: u64,
    },
    /// Something happened.
    Event(Box<WatchEvent>),
    /// Events that are not kept any more, because they were read too slowly or asked for too late.
    Missed {
        /// How many.
        count: u64,
    },
    /// Nothing happened for a while, and the scheduler lives.
    Alive,
}

/// A scheduler, as `status` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedulerStatus {
    /// Its version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_s: u64,
    /// Whether it schedules.
    pub scheduling: bool,
    /// The quantum of GPUs to come, in milliseconds.
    pub quantum_ms: u64,
    /// Only the asker's own clients are shown, because it asked on the clients' socket.
    pub restricted: bool,
}

/// A GPU, as `status` shows it. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuStatus {
    /// The GPU.
    pub gpu: GpuUuid,
    /// Its number on this machine, where that is known.
    pub index: Option<u32>,
    /// Its model, where that is known.
    pub name: Option<String>,
    /// What clients may fill together; 0 as long as nobody has used it.
    pub capacity: u64,
    /// What they have allocated.
    pub allocated: u64,
    /// What is charged as resident, unused room included.
    pub resident: u64,
    /// What clients' contexts and modules take beside that, as measured; 0 where nobody measures it.
    pub overhead: u64,
    /// Its quantum, in milliseconds.
    pub quantum_ms: u64,
    /// Clients that hold the lock.
    pub holders: Vec<u64>,
    /// Clients that wait, in the order of their turn.
    pub waiters: Vec<u64>,
    /// Turns taken.
    pub turns: u64,
    /// From drained to the next program's open gate where nothing had to move: count, median, 99th percentile
    /// and longest, in microseconds.
    pub switch_us: [u64; 4],
    /// Clients that are not shown to the asker; none where all are shown.
    pub others: Option<Others>,
    /// How its quantum is chosen; with `auto`, `quantum_ms` is the quantum that follows from what was measured.
    pub rule: QuantumRule,
    /// What a hand-over costs in which memory moves: the time that the GPU stands still for it, in microseconds, as measured of
    /// late; 0: there was none.
    pub switch_cost_us: u64,
    /// Turns are taken by shares, though all fits: weights, compute limits or priorities ask for it.
    pub slices: bool,
}

impl GpuStatus {
    /// A GPU that nobody has used.
    #[must_use]
    pub fn idle(gpu: GpuUuid) -> Self {
        Self {
            gpu,
            index: None,
            name: None,
            capacity: 0,
            allocated: 0,
            resident: 0,
            overhead: 0,
            quantum_ms: 0,
            holders: Vec::new(),
            waiters: Vec::new(),
            turns: 0,
            switch_us: [0; 4],
            others: None,
            rule: QuantumRule::Fixed { millis: 0 },
            switch_cost_us: 0,
            slices: false,
        }
    }
}

/// What the clients have that are not shown to the asker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Others {
    /// How many use the GPU.
    pub clients: u32,
    /// Bytes that they have allocated.
    pub allocated: u64,
    /// How many hold the lock.
    pub holders: u32,
    /// How many wait for it.
    pub waiters: u32,
}

/// What the kernel tells of a client's process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessInfo {
    /// The user's number.
    pub user: u32,
    /// The program and its arguments, shortened.
    pub command: String,
    /// The container's identifier, from the control group.
    pub container: Option<String>,
    /// The pod's UID, from the control group.
    pub pod: Option<String>,
    /// Slurm's job, from the control group.
    pub job: Option<String>,
}

/// Where a client stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClientState {
    /// It does not hold the lock and does not want it.
    Parked,
    /// Work waits at its gate for its turn.
    Waiting,
    /// Work waits, and what others have on a GPU cannot be moved and leaves no room for it.
    Blocked,
    /// It is next: others leave and room is made for it.
    Next,
    /// The lock is granted; it brings its memory back.
    Restoring,
    /// Its gate is open.
    Running,
    /// It was asked to give the lock back and completes what it has submitted.
    Draining,
    /// It has the lock and nothing to do; the lock may be taken without asking.
    Idle,
    /// Scheduling is off: it runs.
    Free,
    /// Its connection has ended.
    Gone,
    /// Its connection has ended and its process lives on, with what it has on the card.
    Left,
}

/// A client, as `status` shows it. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClientStatus {
    /// Its number.
    pub client: u64,
    /// Its process as the kernel names it, or as it names itself where the kernel cannot tell.
    pub pid: u32,
    /// Its program.
    pub name: String,
    /// What the kernel tells of its process; none where the kernel cannot tell.
    pub process: Option<ProcessInfo>,
    /// Where it stands.
    pub state: ClientState,
    /// The GPU on which there is no room for it, if it is blocked.
    pub blocked_on: Option<GpuUuid>,
    /// It was asked for something and does not answer.
    pub stuck: bool,
    /// Whether it is gone; the last few are kept.
    pub gone: bool,
    /// What it has on each GPU.
    pub usage: Vec<Usage>,
    /// What is charged to it on all GPUs together.
    pub resident: u64,
    /// What its contexts and modules take on all GPUs beside that, as measured; 0 where nobody measures it.
    pub overhead: u64,
    /// Time that it held the lock, from open gate to drained, in milliseconds.
    pub held_ms: u64,
    /// Time that it waited for the lock, in milliseconds.
    pub waited_ms: u64,
    /// Its own counters.
    pub counters: Counters,
    /// What it has of the GPUs' time.
    pub share: ShareStatus,
}
