use std::sync::Arc;

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

/// The task, its events, and what it is told by looks of its own.
fn task(name: &str) -> (CoreTask, Arc<Journal>, mpsc::Receiver<Command>) {
    // Nothing is made there.
    let folder = std::env::temp_dir().join(format!("nvshare-core-task-{name}-{}", std::process::id()));
    let setup = Setup {
        config: Config { gpu_memory: Some(16 * GIB), ..Config::default() },
        changes: mpsc::channel(1).1,
        store: Store::default(),
        seats: Opened::open(folder.join("seats"), None).0,
        descriptions: folder.join("none"),
        metrics: None,
        host_memory: None,
    };
    let (commands, received) = mpsc::channel(10);
    let journal = Journal::new(0);
    let recorder = Recorder::new(Arc::clone(&journal), None);
    let task = CoreTask::new(setup, NvmlThread::start(|_, _| ()), recorder, None, commands);
    (task, journal, received)
}

/// The core looks whose time has come when it hears of the bounds of the newcomer's job.
#[tokio::test]
async fn what_happens_while_a_client_registers_is_told_to_those_who_watch() {
    let (mut task, journal, _commands) = task("watch");
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
}

/// Each answer of NVML is held against all numbers.
#[tokio::test]
async fn a_process_that_comes_back_over_and_over_keeps_one_number() {
    let (mut task, _journal, _commands) = task("numbers");
    let comes = |task: &mut CoreTask, client| {
        let (newcomer, messages) = newcomer(client, Gate::Closed, None);
        let identity = Identity { pid: Some(7), process: Some(7), ..Identity::default() };
        let now = task.now();
        task.register(Newcomer { identity, ..newcomer }, now);
        messages
    };
    for client in 1..=1000 {
        let _messages = comes(&mut task, client);
        task.obey(Command::Disconnected { client, process_remains: true });
    }
    assert!(task.pids.len() <= 2, "{} numbers", task.pids.len());
    let seen = NvmlReading { total: 16 * GIB, used: BTreeMap::from([(7, GIB)]), unowned: 0 };
    let measured = task.attribute(GpuUuid([1; 16]), Time::ZERO, seen);
    assert_eq!(measured.used, BTreeMap::from([(1000, GIB)]), "it lives on, and its memory is no stranger's");
    assert_eq!(measured.available, 16 * GIB);
    let _both = [1001, 1002].map(|client| comes(&mut task, client));
    assert_eq!(task.pids.keys().copied().collect::<Vec<_>>(), [1001, 1002], "both are connected");
}
