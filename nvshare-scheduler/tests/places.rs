//! A process that comes and goes takes no more than one place, however often it does so.

use std::path::PathBuf;
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use nvshare_core::Config;
use nvshare_proto::codec::Frames;
use nvshare_proto::{Asked, Gate, MemoryMode, Register, Reply, Request};
use nvshare_scheduler::server::{self, Setup};
use nvshare_scheduler::settings::Store;
use nvshare_scheduler::sockets::Sockets;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio_util::codec::Framed;

const TIMES: usize = 300;

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// Registers, and is gone when it has been answered.
async fn come_and_go(socket: &PathBuf) {
    let stream = UnixStream::connect(socket).await.unwrap();
    let mut framed = Framed::new(stream, Frames::<Reply, Request>::default());
    let register = Register {
        pid: 1,
        name: "x".to_owned(),
        memory: MemoryMode::Managed,
        gate: Gate::Closed,
        returns: false,
        run: None,
        usage: Vec::new(),
        asked: Asked::default(),
    };
    framed.send(Request::Register(register)).await.unwrap();
    let answer = framed.next().await.unwrap().unwrap();
    assert!(matches!(answer, Reply::Client(_)), "{answer:?}");
}

#[tokio::test]
async fn a_process_that_comes_and_goes_takes_one_place() {
    let folder = std::env::temp_dir().join(format!("nvshare-places-{}", std::process::id()));
    let socket = folder.join("s");
    let sockets = Sockets::bind(&socket, &folder.join("admin/a")).unwrap();
    let (_configurations, changes) = mpsc::channel(1);
    let setup = Setup {
        config: Config::default(),
        changes,
        store: Store::default(),
        gpu_descriptions: folder.join("none"),
        metrics: None,
    };
    let (stop, stopped) = oneshot::channel::<()>();
    let server = tokio::spawn(server::run(sockets, setup, async {
        let _ = stopped.await;
    }));
    come_and_go(&socket).await;
    let before = descriptors();
    for _ in 0..TIMES {
        come_and_go(&socket).await;
    }
    // The last ends are being noticed.
    let mut left = descriptors();
    for _ in 0..1000 {
        if left < before + TIMES / 10 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
        left = descriptors();
    }
    assert!(left < before + TIMES / 10, "{before} descriptors before, {left} after");
    let _ = stop.send(());
    server.await.unwrap().unwrap();
    let _ = std::fs::remove_dir_all(folder);
}
