//! What the machine is told, and what it asks for.

use nvshare_proto::{ClientMessage, GpuUuid, Room, SchedulerMessage};

/// Ties an answer of the mover to its order.
pub type Ticket = u64;

/// An order to the mover, which waits for work and moves memory. Orders are carried out one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Job {
    /// Wait until all submitted work is complete. The gate is closed.
    Drain(Ticket),
    /// Bring back what is absent, as far as there is room.
    Restore,
    /// Move this much to the host. The gate is closed.
    Evict(Room),
    /// See whether all submitted work is complete, without closing the gate.
    Probe,
}

/// Something happened.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// The scheduler said this.
    Message(SchedulerMessage),
    /// There is a connection, and REGISTER goes out on it.
    Registering,
    /// The connection to the scheduler is gone.
    Lost,
    /// There is no scheduler to be found.
    Nobody,
    /// Threads sleep at the gate.
    Asked,
    /// In answer to [`Action::Begin`]: the gate is open.
    Began,
    /// In answer to [`Action::Begin`]: memory is absent.
    StillAbsent,
    /// All submitted work is complete, in answer to the drain of this ticket.
    Drained(Ticket),
    /// What could be restored is.
    Restored {
        /// What is to be asked for where room is lacking.
        lacking: Vec<Room>,
    },
    /// All work is complete that was submitted until this many submissions were counted.
    Quiet {
        /// How many.
        submissions: u64,
    },
    /// Some work is not.
    Busy,
    /// In answer to [`Action::TryIdle`]: some work is not, the gate is closed, and memory is absent.
    BusyAndAbsent,
    /// In answer to [`Action::TryIdle`]: the gate is closed and nothing is under way.
    WentIdle,
    /// Time passed.
    Tick {
        /// Grows whenever a drain comes nearer to its end.
        progress: u64,
        /// Submissions counted so far.
        submissions: u64,
        /// An allocation waits for room: the program has work, though it submits none.
        lacking: bool,
    },
}

/// Something is to be done.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Say this to the scheduler.
    Send(ClientMessage),
    /// Say what is allocated and counted.
    Report,
    /// Close the gate; memory allocated from now on is absent.
    Close,
    /// Open the gate if nothing is absent: answered by [`Input::Began`] or [`Input::StillAbsent`].
    Begin {
        /// Even if something is: it comes by faults.
        anyway: bool,
    },
    /// Bound work in flight, or stop doing so.
    Bound(bool),
    /// Order this from the mover.
    Post(Job),
    /// Have it give up.
    Cancel,
    /// Close the gate if nothing was submitted since; answered by [`Input::WentIdle`], or not.
    TryIdle {
        /// Submissions counted when all work was complete.
        submissions: u64,
    },
    /// Room came.
    Give(Room),
    /// Room will not come.
    Refuse(GpuUuid),
    /// What the GPU's clients may fill.
    Capacity(Room),
    /// What this process may allocate, whatever its environment says; 0: no limit.
    AllocationLimit(Room),
    /// Give back this much unused room; what is missing, evict (if the flag says so).
    Return {
        /// How much.
        room: Room,
        /// The gate is closed: memory may be moved.
        evict: bool,
    },
    /// Give back all unused room.
    ReturnAll,
    /// Room is not counted from now on.
    Unlimit,
    /// Room is counted again, from what was last reported.
    Limit,
    /// Counters.
    CountHandOver,
    /// Counters.
    CountDeferral,
    /// Connect and register anew: what the scheduler knows of the gate is wrong.
    Reconnect,
    /// Tell the user, once, that there is no scheduler.
    WarnAlone,
    /// Tell the user that the program waits for the scheduler's answer.
    SayWaiting,
}
