//! Later events of a world, in the order of time.

use std::time::Duration;

use nvshare_client::Done;
use nvshare_core::Measured;
use nvshare_proto::{ClientMessage, Register, SchedulerMessage};

/// Something that happens later. Connections and processes are numbers.
#[derive(Debug)]
pub(crate) enum Later {
    Start(usize),
    Connect(usize),
    Die(usize),
    /// A process begins to share memory of a number.
    Shares(usize, u64),
    /// It shares no memory any more.
    Closes(usize),
    Exited(u64),
    Disconnected {
        connection: u64,
        process_remains: bool,
    },
    Registers(u64, Box<Register>),
    Says(u64, ClientMessage),
    Deliver(u64, SchedulerMessage),
    /// The mover of a process has done something.
    Done(usize, Done),
    /// A thread of a mover goes on, if this is what was planned for it last.
    Move(usize, usize, u64),
    Program(usize, u64),
    Tick(usize, u64),
    Measure(Measured),
    /// A process is stopped: its number, for how many milliseconds, and after how many the scheduler looks at it, if it can see it.
    Stop(usize, u64, Option<u64>),
    GoOn(usize),
    /// The scheduler looks whether a process is stopped.
    Look(usize),
    /// The scheduler is killed, and another starts; after how many milliseconds.
    Restart(u64),
    IsUp,
}

/// An event of the agenda: when, in which order, what.
pub(crate) struct Planned(pub(crate) Duration, pub(crate) u64, pub(crate) Later);

impl Planned {
    fn key(&self) -> (Duration, u64) {
        (self.0, self.1)
    }
}

impl PartialEq for Planned {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Planned {}

impl PartialOrd for Planned {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Planned {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}
