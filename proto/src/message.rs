//! Every message that crosses a socket.
//!
//! Memory moves between the scheduler's ledger and a client's by messages of [room](ClientMessage::Room) in both directions: the client may fill
//! room that the scheduler gives, and room that the client gives back is free for other clients. Room in flight
//! belongs to nobody, so the sum never exceeds the GPU's capacity.

use serde::{Deserialize, Serialize};

use crate::codec::Message;
use crate::units::MIB;
use crate::{
    AsleepStatus, ClientStatus, GpuStatus, GpuUuid, HostSegment, MemoryStatus, Occupant, PhaseTime,
    SchedulerStatus, Seat, SeatName, SeatStatus, TenantSettings, WatchEvent, WatchFrom, Wishes,
};

/// Version of the wire protocol; [`codec`](crate::codec) says how ends of different versions meet.
pub const VERSION: u16 = 16;

/// The oldest version that is spoken: the one before, so that what runs stays scheduled while the machine is upgraded.
pub const OLDEST: u16 = VERSION - 1;

/// The most GPUs in [`ClientMessage::Elsewhere`].
pub const MAX_ELSEWHERE: usize = 64;

/// The reason for refusing a process when all places are taken that its user, container or seat may have. A process of a seat gets no
/// memory then: the limit of its seat is shared with those that have the places.
pub const NO_PLACE: &str = "too many connections";

/// The first version in which clients come back to another card than the one that they have left.
pub const ELSEWHERE: u16 = 16;

impl Message for Request {
    fn since(&self) -> u16 {
        match self {
            Self::Client(ClientMessage::Elsewhere { .. }) => ELSEWHERE,
            _ => OLDEST,
        }
    }
}

impl Message for Reply {
    fn since(&self) -> u16 {
        match self {
            Self::Client(SchedulerMessage::Move { .. }) => ELSEWHERE,
            _ => OLDEST,
        }
    }
}

/// Memory that leaves a card is reported in pieces of about this many bytes, and room to restore into is given in pieces of at
/// least this many. The memory that comes is one piece behind the memory that leaves: 1.3 ms at 50 GiB/s, where messages and
/// decisions about a piece take some tens of microseconds.
pub const ROOM_PIECE: u64 = 64 * MIB;

/// Names one grant of the lock. An answer that carries another epoch than the current one is stale and ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Epoch {
    /// Chosen anew at each start of a scheduler.
    pub boot: u64,
    /// Counts the grants of that scheduler.
    pub counter: u64,
}

/// A message that a client, or `nvshare-ctl`, sends to the scheduler.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// A process with a GPU introduces itself; once per connection.
    Register(Register),
    /// A process looks without registering. The answer is the page of its tenant's quota, if the tenant has one.
    Look {
        /// The `nvshare-ctl run` that started the process or its ancestor.
        run: Option<u64>,
    },
    /// A message of a registered process.
    Client(ClientMessage),
    /// A request of an administrator; requests that change anything are accepted on the administrators' socket alone.
    Admin(AdminRequest),
}

/// A message that the scheduler sends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    /// A message to a registered process.
    Client(SchedulerMessage),
    /// An answer to an administrator.
    Admin(AdminReply),
    /// The request is refused; on a client's connection, this is the last frame.
    Refused {
        /// The reason: one line, lower case, no full stop.
        reason: String,
    },
}

/// How the library hands out device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryMode {
    /// `cuMemAlloc` gives managed memory, which can be evicted and restored in bulk.
    Managed,
    /// `cuMemAlloc` is the driver's own: only quota and gate, no memory can be evicted.
    Off,
    /// `cuMemAlloc` gives memory that the library maps: evicting copies it to the host and unmaps it, restoring maps
    /// it and copies it back.
    Swap,
}

/// The gate of a process that registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Gate {
    /// The gate is closed: work waits for the lock.
    Closed,
    /// The gate is open and the process runs: it joined late, or its scheduler was restarted.
    Open,
}

/// A process introduces itself, with the state that it has.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Register {
    /// The process's number as the process sees it; a name to show, not an identity.
    pub pid: u32,
    /// The program's name, to show.
    pub name: String,
    /// How the library hands out device memory.
    pub memory: MemoryMode,
    /// Whether the gate is open already.
    pub gate: Gate,
    /// The process was registered before, with this scheduler or an earlier one.
    pub returns: bool,
    /// The `nvshare-ctl run` that started the process or its ancestor.
    pub run: Option<u64>,
    /// The GPUs that the process uses so far.
    pub usage: Vec<Usage>,
    /// The share of their time that the process asks for.
    pub asked: Wishes,
}

impl Register {
    /// A process that has no GPU yet, was never registered, and asks for nothing.
    #[must_use]
    pub fn newcomer(pid: u32, name: impl Into<String>) -> Self {
        Self {
            pid,
            name: name.into(),
            memory: MemoryMode::Managed,
            gate: Gate::Closed,
            returns: false,
            run: None,
            usage: Vec::new(),
            asked: Wishes::default(),
        }
    }
}

/// The memory of a process on one GPU. The process uses the GPU from the first message that names it.
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
    /// Bytes of these that are not moved: plain memory, and the reserve of the driver for pools of plain memory and for graphs.
    pub immovable: u64,
}

/// An amount of memory on one GPU: room that one side gives or asks for, a capacity, a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Amount {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The amount, in bytes.
    pub bytes: u64,
}

/// A message of a registered process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ClientMessage {
    /// The process has allocated or freed memory.
    Usage(Usage),
    /// Work waits at the client's closed gate.
    ReqLock,
    /// The client's gate is open under this grant: all memory is restored and the quantum starts.
    Running {
        /// The grant.
        epoch: Epoch,
    },
    /// The gate is closed and all submitted work is complete, in answer to DROP_LOCK. Before RUNNING, also unasked: the GPU has become too
    /// small for memory that has to be there at once.
    LockReleased {
        /// The grant that ends.
        epoch: Epoch,
    },
    /// The drain made no progress; the gate is open again.
    DropDeferred {
        /// The grant that goes on.
        epoch: Epoch,
    },
    /// Nothing was submitted for a while and all work is complete. The gate is closed: the scheduler may take the
    /// lock without asking, and the client sends REQ_LOCK when it has work again.
    Idle {
        /// The grant that may end.
        epoch: Epoch,
    },
    /// An allocation waits until the client may have this much on the card in all: the room that it was given and has not
    /// given back, and the room that it lacks. So room that crosses this message counts. 0: no allocation waits any more.
    NeedRoom(Amount),
    /// This much room is free for others: memory was evicted, or freed by the program.
    Room(Amount),
    /// The client has done what it can of an EVICT.
    Evicted {
        /// The GPU.
        gpu: GpuUuid,
        /// Bytes of the EVICT that could not leave the card, because the host has no memory for them.
        short: u64,
    },
    /// The library's own counters, since the process started.
    Counters(Counters),
    /// Work waits, and the scheduler has said nothing for a while: asks whether the scheduler lives.
    Ping,
    /// The client has read that it goes on under this grant: by SCHED_ON, or by the answer to its registration. Its messages before
    /// this one are of the time in which nothing was counted. Older clients do not say so; older schedulers do not hear it. It has
    /// the bytes of the answer to ASK_PROGRESS, which clients gave only when asked.
    Adopted {
        /// The grant.
        epoch: Epoch,
    },
    /// Memory has to leave the card: asks for memory of the host. The answer is [`SchedulerMessage::HostMemory`], and comes
    /// before the next question.
    HostWanted {
        /// How much, in bytes.
        bytes: u64,
    },
    /// Segments that the process has from an earlier connection, sent after it has registered.
    HostHeld {
        /// The segments, at most [`MAX_SEGMENTS_HELD`](crate::MAX_SEGMENTS_HELD).
        segments: Vec<HostSegment>,
    },
    /// The process does not use a segment any more.
    HostBack {
        /// The segment's number.
        segment: u64,
    },
    /// The times of phases of a hand-over, said right before the message that ends them: LOCK_RELEASED, EVICTED or RUNNING.
    Phases(Vec<PhaseTime>),
    /// The process is off the card: all of its memory there is free, also that of its contexts and modules. Said in answer to SLEEP, and
    /// by a process that sleeps as the first message behind [`Register`], before or after it has heard REGISTERED.
    Asleep,
    /// The process does not go off the card, in answer to SLEEP. It has its contexts, as before.
    CannotSleep {
        /// The reason: one line, lower case, no full stop.
        reason: String,
        /// Whether the reason stays as long as the process lives.
        for_good: bool,
    },
    /// The process is off the card, and a call of its program waits: asks for WAKE.
    WakeWanted,
    /// The process is back on the card: its contexts are as before, its gate is closed, and its memory that moves is still on the host.
    Awake {
        /// How long the way back took, in microseconds.
        took_us: u64,
    },
    /// The driver has refused to share managed memory of the program with another process or device, for the first time.
    CannotShare,
    /// The memory that the process shares with others now (CUDA IPC): others have memory of it, or it has opened memory of others.
    /// Clients of one owner that say the same number are one gang. Said anew, with all of it, whenever it changes.
    Shares {
        /// The numbers of the processes that the memory is of, which they have drawn by lot; at most
        /// [`MAX_GANG_MEMBERS`](crate::MAX_GANG_MEMBERS).
        with: Vec<u64>,
    },
    /// Other GPUs to which a process that is off the card can come back, instead of the one that it used. Said behind each ASLEEP, if there
    /// are any.
    Elsewhere {
        /// The GPUs, at most [`MAX_ELSEWHERE`].
        gpus: Vec<GpuUuid>,
    },
}

/// A message of the scheduler to a registered process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum SchedulerMessage {
    /// The answer to [`Register`].
    Registered {
        /// The client's number at this scheduler.
        client: u64,
        /// The state in which the client's gate begins.
        hold: InitialState,
    },
    /// Bytes of a GPU's memory that its clients may fill together; sent when the client first uses the
    /// GPU and when it changes.
    Capacity(Amount),
    /// The lock is granted; all the room that the client needs comes with it.
    LockOk {
        /// The grant.
        epoch: Epoch,
        /// How long the client may keep the lock once it runs, if another client waits; milliseconds.
        quantum_ms: u64,
        /// Room given with the grant.
        room: Vec<Amount>,
    },
    /// Close the gate, drain, answer LOCK_RELEASED or DROP_DEFERRED.
    DropLock {
        /// The grant that is to end.
        epoch: Epoch,
        /// Milliseconds without progress after which the drain is given up.
        patience_ms: u32,
    },
    /// Give back this much room: unused room first, then memory that is moved to the host.
    Evict(Amount),
    /// Room for an allocation that waits.
    Room(Amount),
    /// No room can be made for the allocation that waits.
    NoRoom {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// Whether a client waits for the lock or the memory of this one, or is expected to, or this one has to leave as soon as it can. Then it bounds its
    /// work in flight and reports when it is idle.
    Waiters {
        /// Whether that is so.
        waiting: bool,
    },
    /// Scheduling is off: open the gate.
    SchedOff,
    /// Scheduling is on again; the client goes on under this grant until it is told otherwise.
    SchedOn {
        /// The grant.
        epoch: Epoch,
    },
    /// The process shares its limits with others: the descriptor of their quota page comes with this frame.
    Quota {
        /// The process's row in the page.
        row: u32,
    },
    /// The memory limit of the process on a GPU is this from now on, whatever its environment says; 0: no limit.
    Limit(Amount),
    /// Send the counters.
    AskCounters,
    /// The answer to PING.
    Pong,
    /// Room in which a client that is next brings its memory back while others still leave. Its gate stays closed until
    /// LOCK_OK.
    Restore(Amount),
    /// Not said any more: the question how much work is complete.
    AskProgress {
        /// Connects the answer with the question.
        ticket: u64,
    },
    /// The answer to [`ClientMessage::HostWanted`]: segments of the host's memory, at most [`MAX_SEGMENTS`](crate::MAX_SEGMENTS). Their descriptors come
    /// with this frame, in the same order.
    HostMemory {
        /// Whether the scheduler hands out memory of the host at all.
        offered: bool,
        /// The segments; none: there is no more for this process.
        segments: Vec<HostSegment>,
    },
    /// Others lack memory of the host: give back, by [`ClientMessage::HostBack`], segments that hold nothing but copies of memory that is
    /// on the card, and segments that hold nothing. There is no answer if there are none.
    HostShort {
        /// How much others lack, in bytes.
        bytes: u64,
    },
    /// Go off the card; the answer is ASLEEP or CANNOT_SLEEP. The client has no room and no lock when this is sent; what it says before
    /// it has read this crosses it, and so it may answer CANNOT_SLEEP because it is at work again.
    Sleep,
    /// There is room on the card for a process that is off it: come back, and say AWAKE. It may come unasked.
    Wake,
    /// A process that is off its card is to come back to another one, which has room. It registers anew, as one that uses that GPU, and is
    /// still asleep. One that cannot registers anew as before, and names no other GPU.
    Move {
        /// The GPU that it used.
        from: GpuUuid,
        /// One of those that it named.
        to: GpuUuid,
    },
}

/// The state of a client's gate after it has registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum InitialState {
    /// Closed until LOCK_OK.
    Parked,
    /// Open: the client goes on under this grant.
    Running(Epoch),
    /// Open: scheduling is off.
    Free,
}

/// Counters that the library keeps in its process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Launches, copies and fills that went through the gate.
    pub gated: u64,
    /// Submissions that went around the gate: from callbacks of the driver, from inside another call, or through an
    /// entry point that the library does not know.
    pub passed_by: u64,
    /// Bytes of managed memory allocated now.
    pub managed: u64,
    /// Times that the lock was given back, by DROP_LOCK or IDLE.
    pub hand_overs: u64,
    /// Drains given up.
    pub deferrals: u64,
    /// Bytes that left the card, copied or not.
    pub evicted: u64,
    /// Time of these evictions, in nanoseconds.
    pub evict_ns: u64,
    /// Bytes with contents that came back to the card, copied or not.
    pub restored: u64,
    /// Time of these restores, in nanoseconds.
    pub restore_ns: u64,
    /// Time from DROP_LOCK until all work was complete, in nanoseconds.
    pub drain_ns: u64,
    /// The part of the evicted bytes that was copied: zeros are not, nor what the host has a copy of already.
    pub copied_out: u64,
    /// The part of the restored bytes that was copied: zeros are not.
    pub copied_in: u64,
}

/// How long turns are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QuantumRule {
    /// Turns always have this length.
    Fixed {
        /// In milliseconds.
        millis: u64,
    },
    /// Turns are as long as is needed to keep the cost of hand-overs a small part of the time.
    Auto {
        /// The largest part of the time that hand-overs may cost, in millionths.
        overhead_ppm: u32,
        /// Longest time that work should wait for a turn, in milliseconds; this comes before the overhead.
        max_wait_ms: u64,
    },
}

impl std::fmt::Display for QuantumRule {
    /// The form that [`parse_rule`](crate::units::parse_rule) reads.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Fixed { millis } => write!(f, "{}", *millis as f64 / 1e3),
            Self::Auto { overhead_ppm, max_wait_ms } => {
                write!(f, "auto {}% {}", f64::from(*overhead_ppm) / 1e4, *max_wait_ms as f64 / 1e3)
            }
        }
    }
}

/// A request of an administrator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum AdminRequest {
    /// Asks for all rows: the scheduler, the GPUs, the clients.
    Status,
    /// Sets the quantum of one GPU, or of all GPUs, also of those that appear later.
    SetQuantum {
        /// The GPU; none: all.
        gpu: Option<GpuUuid>,
        /// The quantum.
        quantum: QuantumRule,
    },
    /// Changes the share or a limit of a client's tenant.
    SetTerms {
        /// A client of the tenant.
        client: u64,
        /// The GPU for settings that belong to one; none: each GPU.
        gpu: Option<GpuUuid>,
        /// The settings.
        given: TenantSettings,
    },
    /// Changes the share or a limit of a run before `nvshare-ctl run` starts its program.
    SetRunTerms {
        /// The user who starts the run.
        user: u32,
        /// The number of the run.
        run: u64,
        /// The settings, on each GPU.
        given: TenantSettings,
    },
    /// Switches scheduling on.
    On,
    /// Switches scheduling off: every client runs. Refused, unless forced, while the clients' memory does not fit the GPUs.
    Off {
        /// Switch off even if the memory does not fit.
        force: bool,
    },
    /// Forgets the settings that administrators made at run time: the configuration's quanta are in force, and
    /// scheduling is on.
    Reset,
    /// Asks for events. The answer is [`AdminReply::Watching`], then events.
    Watch {
        /// The first event to send.
        from: WatchFrom,
        /// Whether to go on with new events; else the answer ends behind the last event that is kept.
        follow: bool,
    },
    /// Makes a seat, or changes the limits of the one that there is: its folder and socket are there before the answer, and again at
    /// each start of the scheduler. Nothing that is connected is cut off.
    Seat(Seat),
    /// Says which container has a seat; none: nobody, as far as the kubelet says. Seats that are not named here stay as they are.
    OccupySeats(Vec<(SeatName, Option<Occupant>)>),
    /// Removes a seat that no process uses: its folder goes.
    RemoveSeat(SeatName),
    /// Changes what one of Slurm's jobs may have, before its first process or later; a limit of 0 takes one back. The job's processes can
    /// ask for less. It survives a restart of the scheduler.
    SetJobBounds {
        /// The job's number.
        job: u32,
        /// The settings, on each GPU.
        given: TenantSettings,
    },
    /// Has a client's process go off the card as soon as it has no work. Any call of the program brings it back.
    Sleep {
        /// The client.
        client: u64,
    },
    /// Brings a client's process back to the card, or takes back that it was to leave.
    Wake {
        /// The client.
        client: u64,
    },
}

/// An answer to an administrator: rows and [`AdminReply::End`], or one [`AdminReply::Done`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum AdminReply {
    /// A row about the scheduler itself.
    Scheduler(SchedulerStatus),
    /// A row about a GPU.
    Gpu(GpuStatus),
    /// A row about a client.
    Client(Box<ClientStatus>),
    /// No more rows.
    End,
    /// The request is carried out.
    Done {
        /// One line that says what was done.
        text: String,
    },
    /// Events follow.
    Watching {
        /// This run of the scheduler.
        boot: u64,
        /// The number of the first event to come.
        first: u64,
    },
    /// An event.
    Event(Box<WatchEvent>),
    /// Events are lost: the reader was too slow or asked too late, and the scheduler does not keep them any more.
    Missed {
        /// Number of lost events.
        count: u64,
    },
    /// Nothing happened for a while, and the scheduler lives.
    Alive,
    /// A row about a seat.
    Seat(Box<SeatStatus>),
    /// A row about the kinds of memory.
    Memory(Box<MemoryStatus>),
    /// Seats that a container has, and to which no client came since.
    UnusedSeats(Vec<SeatName>),
    /// The phases of the event that comes next; not sent if it has none.
    Phases(Vec<PhaseTime>),
    /// A row about a client whose process is off the card.
    Asleep(Box<AsleepStatus>),
}
