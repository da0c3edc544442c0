//! What clients cost that are idle, and what one user's connections cost the others: how long a grant takes while ten of them send
//! as fast as the scheduler reads, what is left when a user opens thousands, and what a client costs in memory. Prints tables:
//! `cargo bench -p nvshare-scheduler --bench flood`.

mod daemon;

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use daemon::{Stream, columns, granted, grants, join, register, row, runtime, say, usage};
use futures_util::{SinkExt, StreamExt};
use nvshare_core::{Config, Core, Event, Identity};
use nvshare_proto::codec::{Frames, encode};
use nvshare_proto::{
    AdminReply, AdminRequest, Amount, ClientMessage, Counters, Epoch, GpuUuid, Register, Reply, Request,
    SchedulerMessage, Usage, WatchFrom,
};

/// Connections that send without end.
const FLOODERS: usize = 10;
/// Frames that one of them writes at once.
const BATCH: usize = 64;
/// The GPU of the client whose grants are timed.
const OWN_GPU: u8 = 200;

/// Counts what is allocated.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call is the system's allocator's, with the caller's own arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// A scheduler in a process of its own.
struct Daemon {
    child: Child,
    folder: PathBuf,
    socket: PathBuf,
}

impl Daemon {
    fn start() -> Self {
        static STARTED: AtomicUsize = AtomicUsize::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("nvshare-flood-{}-{number}", std::process::id()));
        // The scheduler would make it for the administrators alone, around their own folder.
        std::fs::create_dir_all(&folder).expect("a folder");
        let (socket, admin) = (folder.join("s"), folder.join("admin/a"));
        let child = Command::new(env!("CARGO_BIN_EXE_nvshare-scheduler"))
            .args(["--gpu-memory", "16GiB", "--log", "error", "--config", "/dev/null"])
            .args(["--socket".as_ref(), socket.as_os_str(), "--admin-socket".as_ref(), admin.as_os_str()])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the scheduler starts");
        let daemon = Self { child, folder, socket };
        let begin = Instant::now();
        while UnixStream::connect(&daemon.socket).is_err() {
            assert!(begin.elapsed() < Duration::from_secs(60), "the scheduler does not answer");
            thread::sleep(Duration::from_millis(10));
        }
        daemon
    }

    /// Bytes that it has resident.
    fn resident(&self) -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<usize>().ok());
        kib.expect("its resident set") * 1024
    }
}

impl Daemon {
    /// Time of processors that its threads have had, those that have ended too.
    fn computed(&self) -> Duration {
        let (mut clock, mut time) = (0, libc::timespec { tv_sec: 0, tv_nsec: 0 });
        // SAFETY: places for a clock and for a time.
        let answers = unsafe {
            [
                libc::clock_getcpuclockid(self.child.id() as i32, &raw mut clock),
                libc::clock_gettime(clock, &raw mut time),
            ]
        };
        assert_eq!(answers, [0, 0], "its clock");
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// The requests with which a connection floods.
struct Flood {
    what: &'static str,
    /// It registers first.
    registers: bool,
    /// It ends after one batch, and comes again.
    ends: bool,
    bytes: Vec<u8>,
    /// How many frames that is.
    frames: u64,
}

fn frames(requests: impl IntoIterator<Item = Request>) -> (Vec<u8>, u64) {
    let all: Vec<Vec<u8>> = requests.into_iter().map(|request| encode(&request).expect("a frame")).collect();
    (all.concat(), all.len() as u64)
}

fn hello() -> Register {
    register("floods".to_owned(), 0)
}

/// Every message that a client can send, with figures that make the scheduler do something.
fn messages(n: u64) -> [ClientMessage; 11] {
    let gpu = GpuUuid([0; 16]);
    let epoch = Epoch { boot: n, counter: n };
    [
        ClientMessage::Usage(usage(0, (n % 64) << 20)),
        ClientMessage::ReqLock,
        ClientMessage::Running { epoch },
        ClientMessage::LockReleased { epoch },
        ClientMessage::DropDeferred { epoch },
        ClientMessage::Idle { epoch },
        ClientMessage::NeedRoom(Amount { gpu, bytes: 1 << (n % 64) }),
        ClientMessage::Room(Amount { gpu, bytes: 1 << (n % 64) }),
        ClientMessage::Evicted { gpu, short: n % 2 },
        ClientMessage::Counters(Counters { gated: n, ..Counters::default() }),
        ClientMessage::Ping,
    ]
}

fn floods() -> Vec<Flood> {
    let names = [
        "USAGE that changes",
        "REQ_LOCK",
        "RUNNING of no grant",
        "LOCK_RELEASED of no grant",
        "DROP_DEFERRED of no grant",
        "IDLE of no grant",
        "NEED_ROOM of all sizes",
        "ROOM of all sizes",
        "EVICTED of no order",
        "COUNTERS",
        "PING, and nothing read",
    ];
    let batch = 0..BATCH as u64;
    let mut floods: Vec<Flood> = (0..names.len())
        .map(|kind| {
            let (bytes, frames) = frames(batch.clone().map(|n| Request::Client(messages(n)[kind].clone())));
            Flood { what: names[kind], registers: true, ends: false, bytes, frames }
        })
        .collect();
    let mut more = |what, registers, ends, (bytes, frames)| {
        floods.push(Flood { what, registers, ends, bytes, frames });
    };
    more("all of these", true, false, frames(batch.clone().flat_map(messages).map(Request::Client)));
    let ask = |request: AdminRequest| move |_| Request::Admin(request.clone());
    more("questions for the status", false, false, frames(batch.clone().map(ask(AdminRequest::Status))));
    let watch = AdminRequest::Watch { from: WatchFrom::Now, follow: true };
    more("what administrators may ask", false, false, frames(batch.clone().map(ask(watch))));
    more("questions for a limit's page", false, true, frames([Request::Look { run: None }]));
    more("registrations, one after the other", false, true, frames([Request::Register(hello())]));
    more("connections that end at once", false, true, (Vec::new(), 0));
    more("a frame that is none", false, true, (vec![8, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255], 1));
    more("a frame that is too long", false, true, (vec![255; 64], 1));
    more("half of a frame", false, true, (vec![64, 0, 0, 0, 1], 1));
    floods
}

/// Writes as fast as the scheduler reads, and reads what it answers, until it is told to stop.
fn flood(socket: &Path, flood: &Flood, stop: &AtomicBool, sent: &AtomicU64) {
    let goes_on = || !stop.load(Ordering::Relaxed);
    let reads = !flood.what.ends_with("nothing read");
    let mut answer = vec![0; 1 << 16];
    while goes_on() {
        let Ok(mut stream) = UnixStream::connect(socket) else {
            thread::sleep(Duration::from_millis(1));
            continue;
        };
        if flood.registers {
            let (bytes, _) = frames([Request::Register(hello())]);
            // Its answer: who says more before it is refused.
            if stream.write_all(&bytes).is_err() || !matches!(stream.read(&mut answer), Ok(1..)) {
                continue;
            }
        }
        stream.set_nonblocking(true).expect("a socket");
        let mut at = 0;
        while goes_on() {
            match stream.write(&flood.bytes[at..]) {
                Ok(count) => {
                    at = (at + count) % flood.bytes.len().max(1);
                    if at == 0 {
                        sent.fetch_add(flood.frames.max(1), Ordering::Relaxed);
                        if flood.ends {
                            break;
                        }
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    thread::sleep(Duration::from_micros(200));
                }
                Err(_) => break,
            }
            if reads && matches!(stream.read(&mut answer), Ok(0)) {
                break;
            }
        }
        if flood.ends && flood.frames > 0 {
            // Until it is refused, or answered.
            let _ = stream.set_nonblocking(false);
            let _ = stream.set_read_timeout(Some(Duration::from_millis(20)));
            let _ = stream.read(&mut answer);
        }
    }
}

/// Clients on eight GPUs, each of which asks for the lock. They do what they are told until this is dropped.
struct Crowd {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Crowd {
    fn join(socket: &Path, clients: usize) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let (joined, all) = mpsc::channel();
        let (socket, is_over) = (socket.to_owned(), Arc::clone(&over));
        let thread = thread::spawn(move || {
            runtime().block_on(async {
                for i in 0..clients {
                    let mut client = join(&socket, format!("client {i}"), (i % 8) as u8).await;
                    say(&mut client, ClientMessage::ReqLock).await;
                    tokio::spawn(obey(client));
                }
                joined.send(()).expect("somebody waits");
                while !is_over.load(Ordering::Relaxed) {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            });
        });
        all.recv().expect("all have joined");
        Self { over, thread: Some(thread) }
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(ended.is_none_or(|ended| ended.is_ok()) || thread::panicking(), "a client failed");
    }
}

async fn obey(mut client: Stream) {
    while let Some(Ok(reply)) = client.next().await {
        match reply {
            Reply::Client(SchedulerMessage::LockOk { epoch, .. }) => {
                say(&mut client, ClientMessage::Running { epoch }).await;
            }
            Reply::Client(SchedulerMessage::AskCounters) => {
                say(&mut client, ClientMessage::Counters(Counters::default())).await;
            }
            _ => {}
        }
    }
}

/// How long grants take while connections flood.
fn grants_under_flood(quick: bool) {
    let (clients, times) = if quick { (20, 20) } else { (200, 2000) };
    let daemon = Daemon::start();
    let runtime = runtime();
    let _crowd = Crowd::join(&daemon.socket, clients);
    let mut client = runtime.block_on(join(&daemon.socket, "grants".to_owned(), OWN_GPU));
    columns(&format!("a grant beside {clients} clients, 8 GPUs; ms"));
    row("nobody floods", &runtime.block_on(grants(&mut client, times)));
    for kind in floods() {
        let (over, sent, begin) = (AtomicBool::new(false), AtomicU64::new(0), Instant::now());
        let took = thread::scope(|scope| {
            for _ in 0..FLOODERS {
                scope.spawn(|| flood(&daemon.socket, &kind, &over, &sent));
            }
            let took = runtime.block_on(grants(&mut client, times));
            over.store(true, Ordering::Relaxed);
            took
        });
        let each_second = sent.load(Ordering::Relaxed) as f64 / begin.elapsed().as_secs_f64();
        row(&format!("{}: {each_second:.0} a second", kind.what), &took);
    }
}

/// Measures how others are served while one user has as many connections as they can open.
fn one_user_opens_many(quick: bool) {
    let many = if quick { 50 } else { 2000 };
    let daemon = Daemon::start();
    let runtime = runtime();
    let mut held: Vec<UnixStream> = Vec::new();
    for _ in 0..many {
        held.push(UnixStream::connect(&daemon.socket).expect("a place"));
    }
    let begin = Instant::now();
    let status = ask_administrator(&daemon.folder.join("admin/a"));
    println!(
        "{many} connections of one user: an administrator is answered in {:.1} ms ({status} frames)",
        begin.elapsed().as_secs_f64() * 1e3
    );
    let begin = Instant::now();
    match grant_of_another_user(&daemon) {
        Ok(()) => {
            println!("    another user joins and is granted in {:.1} ms", begin.elapsed().as_secs_f64() * 1e3)
        }
        Err(why) => println!("    another user: not measured, {why}"),
    }
    let mut client = runtime.block_on(join(&daemon.socket, "grants".to_owned(), OWN_GPU));
    columns("    ms");
    row("a grant beside them", &runtime.block_on(grants(&mut client, if quick { 20 } else { 2000 })));
    println!("    {:.1} MiB resident in the scheduler", daemon.resident() as f64 / f64::from(1 << 20));
    drop(held);
}

/// Asks for the status as administrators do; how many frames the answer has.
fn ask_administrator(socket: &Path) -> usize {
    runtime().block_on(async {
        let stream = tokio::net::UnixStream::connect(socket).await.expect("the administrators' socket");
        let mut stream = Stream::new(stream, Frames::default());
        stream.send(Request::Admin(AdminRequest::Status)).await.expect("a scheduler that reads");
        let mut count = 0;
        loop {
            count += 1;
            let reply = stream.next().await.expect("an answer").expect("a frame");
            if reply == Reply::Admin(AdminReply::End) {
                return count;
            }
        }
    })
}

/// A thread becomes another user and asks for the lock.
fn grant_of_another_user(daemon: &Daemon) -> Result<(), String> {
    const NOBODY: libc::c_long = 65_534;
    let socket = daemon.socket.clone();
    let other = thread::spawn(move || {
        // SAFETY: takes three numbers; as a plain system call it is about this thread alone.
        if unsafe { libc::syscall(libc::SYS_setresuid, -1, NOBODY, -1) } != 0 {
            return Err("it takes root".to_owned());
        }
        runtime().block_on(async {
            let mut client = join(&socket, "another".to_owned(), OWN_GPU).await;
            say(&mut client, ClientMessage::ReqLock).await;
            granted(&mut client).await;
        });
        Ok(())
    });
    other.join().map_err(|_| "its connection was refused".to_owned())?
}

/// Measures the memory of a client, in the core and in the whole scheduler.
fn memory(quick: bool) {
    let clients = if quick { 20 } else { 1000 };
    let before = ALLOCATED.load(Ordering::Relaxed);
    let mut core = Core::new(Config { gpu_memory: Some(16 << 30), ..Config::default() });
    for client in 0..clients as u64 {
        let register = register(format!("client {client}"), (client % 8) as u8);
        let identity = Identity { process: Some(client), ..Identity::default() };
        core.handle(Event::Registered { client, identity, register }, Duration::from_millis(client));
        let message = ClientMessage::ReqLock;
        core.handle(Event::Message { client, message }, Duration::from_millis(client));
        while core.poll_output().is_some() {}
    }
    let bytes = ALLOCATED.load(Ordering::Relaxed) - before;
    println!("{clients} clients: {} bytes of core each", bytes / clients);
    drop(core);
    let daemon = Daemon::start();
    let before = daemon.resident();
    let begin = Instant::now();
    let crowd = Crowd::join(&daemon.socket, clients);
    println!(
        "    {:.1} KiB resident each in the scheduler, {:.1} MiB before; {:.1} s until all had joined",
        (daemon.resident() - before) as f64 / clients as f64 / 1024.0,
        before as f64 / f64::from(1 << 20),
        begin.elapsed().as_secs_f64()
    );
    drop(crowd);
}

/// The cost of clients that have the lock and are idle: time of processors, and a grant beside them.
fn at_rest(quick: bool) {
    let (clients, seconds, times) = if quick { (20, 1, 20) } else { (200, 20, 5000) };
    let daemon = Daemon::start();
    let _crowd = Crowd::join(&daemon.socket, clients);
    // The work of their arrival is done by then.
    thread::sleep(Duration::from_secs(1));
    let before = daemon.computed();
    thread::sleep(Duration::from_secs(seconds));
    let part = (daemon.computed() - before).as_secs_f64() / seconds as f64 * 100.0;
    println!("{clients} idle clients: {part:.3} % of a processor");
    let runtime = runtime();
    let mut client = runtime.block_on(join(&daemon.socket, "grants".to_owned(), OWN_GPU));
    columns("    ms");
    row("a grant beside them", &runtime.block_on(grants(&mut client, times)));
}

/// Clients hand a GPU on that has room for one of them at a time: whether the scheduler grows.
fn hand_overs(quick: bool) {
    let many: usize = if quick { 1_000 } else { 1_000_000 };
    let daemon = Daemon::start();
    let done = Arc::new(AtomicUsize::new(0));
    runtime().block_on(async {
        let mut players = tokio::task::JoinSet::new();
        for number in 0..HANDING_ON {
            players.spawn(hands_on(daemon.socket.clone(), number, Arc::clone(&done)));
        }
        while done.load(Ordering::Relaxed) < many / 100 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let (begin, first) = (Instant::now(), done.load(Ordering::Relaxed));
        let before = daemon.resident();
        while done.load(Ordering::Relaxed) < many {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let all = done.load(Ordering::Relaxed);
        println!(
            "{HANDING_ON} clients, {all} hand-overs: {:.2} MiB resident, {:.2} after the first hundredth; {:.0} a second",
            daemon.resident() as f64 / f64::from(1 << 20),
            before as f64 / f64::from(1 << 20),
            (all - first) as f64 / begin.elapsed().as_secs_f64()
        );
    });
}

/// Clients of [`hand_overs`].
const HANDING_ON: usize = 32;

/// Asks for the lock, gives it back as soon as it has it, and gives its memory back when it is told to.
async fn hands_on(socket: PathBuf, number: usize, done: Arc<AtomicUsize>) {
    const BYTES: u64 = 12 << 30;
    let has = |absent| ClientMessage::Usage(Usage { absent, ..usage(OWN_GPU, BYTES) });
    let mut client = join(&socket, format!("hands on {number}"), OWN_GPU).await;
    say(&mut client, has(BYTES)).await;
    say(&mut client, ClientMessage::ReqLock).await;
    while let Some(Ok(reply)) = client.next().await {
        let answers = match reply {
            Reply::Client(SchedulerMessage::LockOk { epoch, .. }) => {
                done.fetch_add(1, Ordering::Relaxed);
                let runs = [has(0), ClientMessage::Running { epoch }];
                runs.into_iter()
                    .chain([ClientMessage::LockReleased { epoch }, ClientMessage::ReqLock])
                    .collect()
            }
            Reply::Client(SchedulerMessage::Evict(room)) => {
                vec![
                    has(BYTES),
                    ClientMessage::Room(room),
                    ClientMessage::Evicted { gpu: room.gpu, short: 0 },
                ]
            }
            _ => Vec::new(),
        };
        for message in answers {
            if client.send(Request::Client(message)).await.is_err() {
                return;
            }
        }
    }
}

fn main() {
    let quick = std::env::args().any(|argument| argument == "--test");
    memory(quick);
    at_rest(quick);
    one_user_opens_many(quick);
    grants_under_flood(quick);
    hand_overs(quick);
}
