use nvshare_core::Identity;
use nvshare_proto::{EventKind, Gate, Register, Usage, WatchFrom};

use super::*;
use crate::events::Journal;
use crate::seats::Opened;

const GIB: u64 = 1 << 30;

/// A client with memory that fits beside no other's.
fn newcomer(client: ClientId, gate: Gate, job: Option<u32>) -> (Newcomer, mpsc::Receiver<SchedulerMessage>) {
    let usage = Usage {
        gpu: GpuUuid([1; 16]),
        total: 16 * GIB,
        limit: 0,
        allocated: 12 * GIB,
        absent: if gate == Gate::Open { 0 } else { 12 * GIB },
        immovable: 0,
    };
    let register = Register { gate, usage: vec![usage], ..Register::newcomer(client as u32, "x") };
    let (outgoing, messages) = mpsc::channel(100);
    let identity = Identity { process: Some(client), ..Identity::default() };
    let newcomer = Newcomer { client, identity, process: None, seat: None, job, register, outgoing };
    (newcomer, messages)
}

/// The core looks whose time has come when it hears of the bounds of the newcomer's job.
#[tokio::test]
async fn what_happens_while_a_client_registers_is_told_to_those_who_watch() {
    let folder = std::env::temp_dir().join(format!("nvshare-core-task-{}", std::process::id()));
    let setup = Setup {
        config: Config { gpu_memory: Some(16 * GIB), ..Config::default() },
        changes: mpsc::channel(1).1,
        store: Store::default(),
        seats: Opened::open(folder.join("seats"), None).0,
        descriptions: folder.join("none"),
        metrics: None,
        host_memory: None,
    };
    let (commands, _commands) = mpsc::channel(10);
    let journal = Journal::new(0);
    let recorder = Recorder::new(journal.clone(), None);
    let mut task = CoreTask::new(setup, NvmlThread::start(|_, _| ()), recorder, None, commands);
    let mut clients = Vec::new();
    for (client, gate) in [(1, Gate::Open), (2, Gate::Closed)] {
        let (newcomer, messages) = newcomer(client, gate, None);
        task.register(newcomer, Time::ZERO);
        clients.push(messages);
    }
    task.happens(Event::Message { client: 2, message: ClientMessage::ReqLock }, Time::ZERO);
    task.deliver();
    let is_asked = || {
        let read = journal.read(journal.first(WatchFrom::Kept), 100);
        read.entries.iter().any(|entry| entry.event.event == EventKind::Drop)
    };
    assert!(!is_asked(), "its turn has begun");
    let (third, _messages) = newcomer(3, Gate::Closed, Some(7));
    task.register(third, Time::from_secs(60));
    task.deliver();
    assert!(is_asked(), "its turn is over");
    let _ = std::fs::remove_dir_all(folder);
}
