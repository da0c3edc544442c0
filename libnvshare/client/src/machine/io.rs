//! Inputs of the machine, and the actions that it asks for.

use std::time::Duration;

use nvshare_proto::{Amount, ClientMessage, GpuUuid, SchedulerMessage};

use crate::launch_window::InFlight;

/// Connects an answer of the mover with its order.
pub type Ticket = u64;

/// An order to the mover, which waits for work and moves memory. Orders are carried out one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MoverOrder {
    /// Wait until all submitted work is complete. The gate is closed.
    Drain(Ticket),
    /// Bring absent memory back, as far as there is room.
    Restore,
    /// Bring absent memory back while room comes piece by piece: where room is lacking, wait for it until the order is given
    /// up. The gate is closed.
    RestoreEarly,
    /// Move this much memory to the host. The gate is closed.
    Evict(Amount),
    /// Find out whether all submitted work is complete, without closing the gate.
    Probe,
    /// Take the process off the card. The gate is closed.
    Sleep,
    /// Bring it back.
    Wake,
}

/// An event that the machine is told.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// The scheduler sent this message.
    Message(SchedulerMessage),
    /// There is a connection, and REGISTER is sent on it. Or a scheduler is there that takes no connection.
    Registering,
    /// The connection to the scheduler is gone.
    Lost,
    /// No scheduler can be found.
    Nobody,
    /// Threads sleep at the gate.
    ThreadsWaiting,
    /// In answer to [`Action::Begin`]: the gate is open.
    Began,
    /// In answer to [`Action::Begin`]: memory is absent.
    StillAbsent,
    /// All submitted work is complete, in answer to the drain of this ticket.
    Drained(Ticket),
    /// Memory is restored as far as there was room.
    Restored {
        /// The rooms to ask for, where room is lacking.
        lacking: Vec<Amount>,
    },
    /// The same, and a GPU has become too small for the rest: the process cannot run.
    Outgrown,
    /// All work is complete that was submitted until the count of submissions had this value.
    Quiet {
        /// The count.
        submissions: u64,
    },
    /// Some work is not complete.
    Busy,
    /// In answer to [`Action::TryIdle`]: some work is not complete, the gate is closed, and memory is absent.
    BusyAndAbsent,
    /// In answer to [`Action::TryIdle`]: the gate is closed and nothing is under way.
    WentIdle,
    /// Calls of the program wait for the process to come back to the card.
    CallsWaiting,
    /// The process is off the card, in answer to [`MoverOrder::Sleep`].
    Asleep,
    /// It is not, in answer to the same.
    CannotSleep {
        /// The reason: one line.
        reason: String,
        /// Whether it stays as long as the process lives.
        for_good: bool,
    },
    /// The process is back on the card, in answer to [`MoverOrder::Wake`].
    Awake {
        /// How long the way back took.
        took: Duration,
    },
    /// It is still off the card, in answer to the same. The driver has refused the other GPU, and it can come back to its own.
    MovedBack,
    /// Time passed.
    Tick {
        /// A number that grows whenever a drain comes nearer to its end.
        progress: u64,
        /// The count of submissions so far.
        submissions: u64,
        /// An allocation waits for room: the program has work, though it submits none.
        lacking: bool,
    },
}

/// An action for the caller to carry out.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Send this message to the scheduler.
    Send(ClientMessage),
    /// Tell the scheduler the usage of all devices and the counters.
    Report,
    /// Close the gate; memory allocated from now on is absent.
    Close,
    /// Open the gate if nothing is absent: answered by [`Input::Began`] or [`Input::StillAbsent`].
    Begin {
        /// Even if memory is absent: page faults bring it.
        anyway: bool,
    },
    /// Bound work in flight, or stop doing so.
    Bound(InFlight),
    /// Give this order to the mover.
    Post(MoverOrder),
    /// Have the mover give up its orders.
    Cancel,
    /// Close the gate if nothing was submitted since: answered by [`Input::WentIdle`], [`Input::Busy`] or
    /// [`Input::BusyAndAbsent`].
    TryIdle {
        /// The count of submissions when all work was complete.
        submissions: u64,
    },
    /// The scheduler gave room.
    Give(Amount),
    /// The scheduler has no room to give.
    Refuse(GpuUuid),
    /// The GPU's capacity.
    Capacity(Amount),
    /// The memory limit of this process, whatever its environment says; 0: no limit.
    AllocationLimit(Amount),
    /// Give this much unused room back; if there is too little and the flag says so, evict the rest.
    Return {
        /// The amount.
        room: Amount,
        /// The gate is closed, so memory may be moved.
        evict: bool,
    },
    /// Give back all unused room.
    ReturnAll,
    /// Do not count room from now on.
    StopMetering,
    /// The scheduler that was lost may come back soon, or is not waited for any more. An allocation for which the card has no
    /// memory waits until one of the two is known.
    Expect(bool),
    /// Count room again, from the sums that were last reported.
    StartMetering,
    /// Tell the usage, and count room again from it.
    StartMeteringAnew,
    /// Count a hand-over.
    CountHandOver,
    /// Count a deferred drain.
    CountDeferral,
    /// Connect and register again: the scheduler's idea of the gate, or of the process's GPUs, is wrong.
    Reconnect,
    /// Let these two GPUs change places: the process, which is off its card, comes back to the other one.
    ChangePlaces {
        /// The GPUs.
        gpus: [GpuUuid; 2],
    },
    /// Tell the user, once, that there is no scheduler.
    WarnAlone,
    /// Tell the user that the program waits for the scheduler's answer, and for how long at most.
    SayWaiting(Duration),
}
