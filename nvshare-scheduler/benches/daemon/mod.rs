//! Clients of a scheduler that measure what it costs them.

use std::path::Path;
use std::time::{Duration, Instant};

use futures_util::{SinkExt, StreamExt};
use nvshare_proto::codec::Frames;
use nvshare_proto::{ClientMessage, Epoch, GpuUuid, Register, Reply, Request, SchedulerMessage, Usage};
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};
use tokio_util::codec::Framed;

pub(crate) type Stream = Framed<UnixStream, Frames<Reply, Request>>;

pub(crate) fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// A program that uses 1 MiB of one GPU.
pub(crate) fn register(name: String, gpu: u8) -> Register {
    Register { usage: vec![usage(gpu, 1 << 20)], ..Register::newcomer(1, name) }
}

pub(crate) fn usage(gpu: u8, allocated: u64) -> Usage {
    Usage { gpu: GpuUuid([gpu; 16]), total: 16 << 30, limit: 0, allocated, absent: 0, immovable: 0 }
}

pub(crate) async fn join(socket: &Path, name: String, gpu: u8) -> Stream {
    let stream = UnixStream::connect(socket).await.expect("the scheduler");
    let mut stream = Framed::new(stream, Frames::default());
    stream.send(Request::Register(register(name, gpu))).await.expect("a scheduler that reads");
    stream.next().await.expect("an answer").expect("a frame");
    stream
}

pub(crate) async fn granted(client: &mut Stream) -> Epoch {
    loop {
        let reply = client.next().await.expect("an answer").expect("a frame");
        if let Reply::Client(SchedulerMessage::LockOk { epoch, .. }) = reply {
            return epoch;
        }
    }
}

pub(crate) async fn say(client: &mut Stream, message: ClientMessage) {
    client.send(Request::Client(message)).await.expect("a scheduler that reads");
}

/// From REQ_LOCK to LOCK_OK, again and again, of a client that goes idle in between.
pub(crate) async fn grants(client: &mut Stream, times: usize) -> Vec<Duration> {
    let mut took = Vec::new();
    for _ in 0..times {
        let begin = Instant::now();
        say(client, ClientMessage::ReqLock).await;
        let epoch = granted(client).await;
        took.push(begin.elapsed());
        say(client, ClientMessage::Running { epoch }).await;
        say(client, ClientMessage::Idle { epoch }).await;
        tokio::time::sleep(Duration::from_micros(500)).await;
    }
    took.sort_unstable();
    took
}

/// The names of the columns of [`row`].
pub(crate) fn columns(what: &str) {
    println!("{what:<44} {:>6} {:>9} {:>9} {:>9}", "times", "median", "p99", "p99.9");
}

/// How long something took, in milliseconds.
pub(crate) fn row(what: &str, took: &[Duration]) {
    let at = |part: usize| took[(took.len() * part / 1000).min(took.len() - 1)].as_secs_f64() * 1e3;
    println!("{what:<44} {:>6} {:>9.3} {:>9.3} {:>9.3}", took.len(), at(500), at(990), at(999));
}
