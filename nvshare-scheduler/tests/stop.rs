//! A scheduler that is told to stop does so, whatever a thread of it waits for.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use futures_util::{SinkExt, StreamExt};
use nvshare_proto::codec::Frames;
use nvshare_proto::pace::RECONNECT_EVERY;
use nvshare_proto::{
    AdminReply, AdminRequest, ClientMessage, GpuUuid, Register, Reply, Request, SchedulerMessage, Usage,
};
use rustix::process::{Pid, Signal, kill_process};
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};
use tokio_util::codec::Framed;

/// How long something may take that has to happen.
const PATIENCE: Duration = Duration::from_secs(30);

/// A scheduler, and a pipe to which nobody writes where the kernel module would describe a GPU: it keeps waiting what reads it.
struct World {
    folder: PathBuf,
    scheduler: Child,
    begin: Instant,
}

type Connection = Framed<UnixStream, Frames<Reply, Request>>;

/// Starts a scheduler with all its files in a folder.
fn start(folder: &Path) -> Child {
    Command::new(env!("CARGO_BIN_EXE_nvshare-scheduler"))
        .args(["--gpu-memory", "1GiB"])
        .arg("--socket")
        .arg(folder.join("s"))
        .arg("--admin-socket")
        .arg(folder.join("admin/a"))
        .arg("--config")
        .arg(folder.join("config.toml"))
        .arg("--gpu-descriptions")
        .arg(folder.join("gpus"))
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

impl World {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("nvshare-{name}-{}", std::process::id()));
        fs::create_dir_all(folder.join("gpus")).unwrap();
        fs::write(folder.join("config.toml"), "").unwrap();
        Self { scheduler: start(&folder), folder, begin: Instant::now() }
    }

    async fn connect(&self, socket: &str) -> Connection {
        loop {
            match UnixStream::connect(self.folder.join(socket)).await {
                Ok(stream) => return Framed::new(stream, Frames::default()),
                Err(error) => assert!(self.begin.elapsed() < PATIENCE, "{error}"),
            }
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Makes the pipe. The scheduler has listed the GPUs for the first time before it answers.
    async fn keep_reader_waiting(&self, connection: &mut Connection) -> PathBuf {
        ask(connection).await;
        let pipe = self.folder.join("gpus/0000:17:00.0/information");
        fs::create_dir(pipe.parent().unwrap()).unwrap();
        make_pipe(&pipe);
        pipe
    }

    /// The pipe can be opened when the scheduler reads it, and that waits for as long as the result is there.
    fn reader_of(&self, pipe: &Path) -> Option<File> {
        let opened = OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(pipe);
        assert!(opened.is_ok() || self.begin.elapsed() < PATIENCE, "{opened:?}");
        opened.ok()
    }

    /// How long the scheduler takes to stop when it is told to; none: it does not, or fails.
    async fn stop(&mut self) -> Option<Duration> {
        kill_process(Pid::from_child(&self.scheduler), Signal::TERM).unwrap();
        let begin = Instant::now();
        let ended = loop {
            match self.scheduler.try_wait().unwrap() {
                Some(ended) => break Some(ended),
                None if begin.elapsed() > PATIENCE => break None,
                None => sleep(Duration::from_millis(10)).await,
            }
        };
        let took = begin.elapsed();
        ended.is_some_and(|status| status.success()).then_some(took)
    }
}

/// The time until a process that nobody knows is granted the lock at its first scheduler.
async fn join(connection: &mut Connection) -> Duration {
    let begin = Instant::now();
    let usage =
        Usage { gpu: GpuUuid([9; 16]), total: 1 << 30, limit: 0, allocated: 0, absent: 0, immovable: 0 };
    let register = Register { usage: vec![usage], ..Register::newcomer(1, "x") };
    connection.send(Request::Register(register)).await.unwrap();
    connection.send(Request::Client(ClientMessage::ReqLock)).await.unwrap();
    loop {
        let reply = connection.next().await.unwrap().unwrap();
        if matches!(reply, Reply::Client(SchedulerMessage::LockOk { .. })) {
            return begin.elapsed();
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // A test that fails leaves nothing behind.
        let _ = self.scheduler.kill();
        let _ = self.scheduler.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn make_pipe(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

async fn ask(connection: &mut Connection) {
    connection.send(Request::Admin(AdminRequest::Status)).await.unwrap();
    connection.next().await.unwrap().unwrap();
}

/// Whole seconds since the scheduler began to count time, as it says: its process may have taken long to start.
async fn uptime(connection: &mut Connection) -> u64 {
    connection.send(Request::Admin(AdminRequest::Status)).await.unwrap();
    loop {
        let reply = connection.next().await.unwrap().unwrap();
        if let Reply::Admin(AdminReply::Scheduler(status)) = reply {
            return status.uptime_s;
        }
    }
}

#[tokio::test]
async fn a_scheduler_stops_though_the_kernel_module_does_not_answer() {
    let mut world = World::new("stop");
    let mut connection = world.connect("s").await;
    let pipe = world.keep_reader_waiting(&mut connection).await;
    let unanswered = loop {
        ask(&mut connection).await;
        if let Some(read) = world.reader_of(&pipe) {
            break read;
        }
        sleep(Duration::from_millis(10)).await;
    };
    assert!(world.stop().await.is_some());
    drop(unanswered);
}

/// The module may have hung before this scheduler started, as where one that hung with it was replaced.
#[tokio::test]
async fn a_scheduler_serves_though_the_kernel_module_does_not_answer_at_its_start() {
    let mut world = World::new("start");
    let pipe = world.keep_reader_waiting(&mut world.connect("admin/a").await).await;
    assert!(world.stop().await.is_some());
    world.scheduler = start(&world.folder);
    world.begin = Instant::now();
    let mut newcomer = world.connect("s").await;
    assert!(timeout(PATIENCE, join(&mut newcomer)).await.is_ok());
    assert!(world.reader_of(&pipe).is_some(), "it reads the list meanwhile");
    assert!(world.stop().await.is_some());
}

/// Its own thread waits, as it does while it handles an event that takes long: here for a configuration that nobody writes.
#[tokio::test]
async fn a_scheduler_stops_though_its_thread_is_busy() {
    let mut world = World::new("busy");
    ask(&mut world.connect("s").await).await;
    let config = world.folder.join("config.toml");
    fs::remove_file(&config).unwrap();
    make_pipe(&config);
    kill_process(Pid::from_child(&world.scheduler), Signal::HUP).unwrap();
    let unanswered = loop {
        match world.reader_of(&config) {
            Some(read) => break read,
            None => sleep(Duration::from_millis(10)).await,
        }
    };
    let took = world.stop().await;
    drop(unanswered);
    assert!(took.is_some(), "{took:?}");
}

/// Its clients may all run. A newcomer must not be given their memory before they are back.
#[tokio::test]
async fn a_scheduler_that_stops_under_clients_has_the_next_wait_for_them() {
    let mut world = World::new("left");
    let mut client = world.connect("s").await;
    join(&mut client).await;
    assert!(world.stop().await.is_some());
    drop(client);
    world.scheduler = start(&world.folder);
    world.begin = Instant::now();
    let mut administrator = world.connect("admin/a").await;
    let mut newcomer = world.connect("s").await;
    join(&mut newcomer).await;
    let waited = uptime(&mut administrator).await;
    assert!(waited >= RECONNECT_EVERY.as_secs(), "{waited} s");
    assert!(world.stop().await.is_some());
}

#[tokio::test]
async fn a_scheduler_that_stops_without_clients_has_the_next_wait_for_nobody() {
    let mut world = World::new("none");
    ask(&mut world.connect("admin/a").await).await;
    assert!(world.stop().await.is_some());
    assert!(!world.folder.join("s").exists());
    world.scheduler = start(&world.folder);
    world.begin = Instant::now();
    let mut newcomer = world.connect("s").await;
    let waited = join(&mut newcomer).await;
    assert!(waited < RECONNECT_EVERY, "{waited:?}");
}
