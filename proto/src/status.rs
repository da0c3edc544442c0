//! The state of the scheduler, of GPUs and of clients, as administrators see it.

use serde::{Deserialize, Serialize};

use crate::message::{Amount, Counters, MemoryMode, QuantumRule, Usage};
use crate::{GpuUuid, HostStatus, ShareStatus};

/// A scheduler, as `status` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedulerStatus {
    /// The scheduler's version.
    pub version: String,
    /// The scheduler's process.
    pub pid: u32,
    /// Seconds since the scheduler started.
    pub uptime_s: u64,
    /// Whether scheduling is on.
    pub scheduling: bool,
    /// The quantum of GPUs that appear later, in milliseconds.
    pub quantum_ms: u64,
    /// Only the asker's own clients are shown, because it asked on the clients' socket.
    pub restricted: bool,
    /// The memory of the host that the scheduler hands out, if it does.
    pub host_memory: Option<HostStatus>,
}

/// A GPU, as `status` shows it. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuStatus {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The GPU's number on this machine, where that is known.
    pub index: Option<u32>,
    /// The GPU's model, where that is known.
    pub name: Option<String>,
    /// Bytes that clients may fill together; 0 while no client has used the GPU.
    pub capacity: u64,
    /// Bytes that clients have allocated.
    pub allocated: u64,
    /// Bytes that are charged as resident, unused room included.
    pub resident: u64,
    /// Bytes that clients' contexts and modules take beside these, as measured; 0: not measured.
    pub overhead: u64,
    /// The GPU's quantum, in milliseconds.
    pub quantum_ms: u64,
    /// Clients that hold the lock.
    pub holders: Vec<u64>,
    /// Clients that wait for the lock, in the order of their turns.
    pub waiters: Vec<u64>,
    /// Turns so far.
    pub turns: u64,
    /// Time from drained to the next client's open gate in hand-overs without moves of memory: count, median, 99th
    /// percentile and longest, in microseconds.
    pub switch_us: [u64; 4],
    /// Clients that are not shown to the asker; none: all are shown.
    pub others: Option<Others>,
    /// How the quantum is chosen; with `auto`, `quantum_ms` is the quantum that follows from measurements.
    pub rule: QuantumRule,
    /// Time that the GPU stands still in a hand-over that moves memory, in microseconds, as measured in recent
    /// hand-overs; 0: there was none.
    pub switch_cost_us: u64,
    /// Clients take turns though their memory fits the GPU: weights, compute limits or priorities ask for it.
    pub slices: bool,
    /// Always false: whether a measurement asked for turns.
    pub by_measure: bool,
    /// Always 0: a result of that measurement.
    pub side_by_side: u32,
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
            by_measure: false,
            side_by_side: 0,
        }
    }
}

/// The kinds of memory on the GPUs, as `status` shows them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryStatus {
    /// GPUs where memory is in use that neither a process nor a client's managed memory accounts for, as NVML sees it: mostly what
    /// managed memory has given up and the driver keeps.
    pub kept: Vec<Amount>,
    /// How the library of each client hands out device memory.
    pub clients: Vec<ClientMemory>,
}

/// How the library of a client hands out device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientMemory {
    /// The client's number.
    pub client: u64,
    /// The kind of its memory.
    pub memory: MemoryMode,
}

/// A client whose process is off the card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AsleepStatus {
    /// The client's number.
    pub client: u64,
    /// The memory that its contexts and modules took on each GPU: it needs as much to come back. Its memory that moves stays on the host.
    pub needs: Vec<Amount>,
    /// Whether the process is to come back, and waits for room or is on its way.
    pub wakes: bool,
}

/// Sums of the clients that are not shown to the asker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Others {
    /// Hidden clients that use the GPU.
    pub clients: u32,
    /// Bytes that hidden clients have allocated.
    pub allocated: u64,
    /// Hidden clients that hold the lock.
    pub holders: u32,
    /// Hidden clients that wait for the lock.
    pub waiters: u32,
}

/// A command without the program's folder: `python3 /home/a/train.py` of `/usr/bin/python3 /home/a/train.py`.
#[must_use]
pub fn short_command(line: &str) -> String {
    let (program, arguments) = line.split_once(' ').unwrap_or((line, ""));
    match program.rsplit_once('/') {
        Some((_, name)) if !name.is_empty() => format!("{name} {arguments}").trim_end().to_owned(),
        _ => line.to_owned(),
    }
}

/// Facts of the kernel about a client's process.
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

/// The state of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClientState {
    /// The client does not hold the lock and does not request it.
    Parked,
    /// Work waits at the client's gate for its turn.
    Waiting,
    /// Work waits, and immovable memory of others on a GPU leaves no room for the client.
    Blocked,
    /// The client is next: others leave and room is made for it.
    Next,
    /// The lock is granted; the client's memory comes back to the card.
    Restoring,
    /// The client's gate is open.
    Running,
    /// The client was asked to give the lock back and completes the work that it has submitted.
    Draining,
    /// The client has the lock and nothing to do; the scheduler may take the lock without asking.
    Idle,
    /// Scheduling is off: the client runs.
    Free,
    /// The client's connection has ended.
    Gone,
    /// The client's connection has ended and its process lives on, with its memory on the card.
    Left,
    /// The client's process is off the card, with all that it had there.
    Asleep,
}

/// A client, as `status` shows it. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClientStatus {
    /// The client's number.
    pub client: u64,
    /// The process's number from the kernel, or from the process itself where the kernel cannot tell.
    pub pid: u32,
    /// The program's name.
    pub name: String,
    /// The kernel's facts about the process; none where the kernel cannot tell.
    pub process: Option<ProcessInfo>,
    /// The client's state.
    pub state: ClientState,
    /// The GPU that has no room for the client, if the client is blocked.
    pub blocked_on: Option<GpuUuid>,
    /// The client was asked for something and does not answer, or its process is stopped.
    pub stuck: bool,
    /// Whether the client is gone; the last few that are gone are kept.
    pub gone: bool,
    /// The client's memory on each GPU.
    pub usage: Vec<Usage>,
    /// Bytes that are charged to the client on all GPUs together.
    pub resident: u64,
    /// Bytes that the client's contexts and modules take on all GPUs beside these, as measured; 0: not measured.
    pub overhead: u64,
    /// Time that the client held the lock, from open gate to drained, in milliseconds.
    pub held_ms: u64,
    /// Time that the client waited for the lock, in milliseconds.
    pub waited_ms: u64,
    /// The client's own counters.
    pub counters: Counters,
    /// The client's share of the GPUs' time.
    pub share: ShareStatus,
    /// Bytes of the host's memory that the client has from the scheduler.
    pub host_memory: u64,
}

impl ClientStatus {
    /// A client of which nothing is known but its number: its gate is closed, and it has nothing.
    #[must_use]
    pub fn parked(client: u64) -> Self {
        Self {
            client,
            pid: 0,
            name: String::new(),
            process: None,
            state: ClientState::Parked,
            blocked_on: None,
            stuck: false,
            gone: false,
            usage: Vec::new(),
            resident: 0,
            overhead: 0,
            held_ms: 0,
            waited_ms: 0,
            counters: Counters::default(),
            share: ShareStatus::default(),
            host_memory: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_in_short() {
        for (line, short) in [
            ("/usr/bin/python3 /home/a/train.py", "python3 /home/a/train.py"),
            ("python3", "python3"),
            ("/usr/bin/true", "true"),
            ("/", "/"),
        ] {
            assert_eq!(short_command(line), short);
        }
    }
}
