//! A process that comes and goes takes no more than one place, however often it does so, and waits where it takes no time from others.

mod support;

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use futures_util::{SinkExt, StreamExt};
use nvshare_proto::{Reply, Request};

use support::{Server, connect, newcomer};

const TIMES: usize = 300;

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// Registers, and is gone when it has been answered.
async fn come_and_go(socket: &Path) {
    let mut stream = connect(socket).await;
    stream.send(Request::Register(newcomer())).await.unwrap();
    let answer = stream.next().await.unwrap().unwrap();
    assert!(matches!(answer, Reply::Client(_)), "{answer:?}");
}

#[tokio::test]
async fn a_process_that_comes_and_goes_takes_one_place() {
    let server = Server::start("places");
    come_and_go(&server.clients).await;
    let before = descriptors();
    for _ in 0..TIMES {
        come_and_go(&server.clients).await;
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
    server.end().await;
}

/// The scheduler takes 4,000 at once, and as many a second. The socket's queue holds 128.
#[tokio::test]
async fn connections_without_end_wait_in_the_kernel() {
    const MANY: usize = 4000 + 128 + 2000;
    let server = Server::start("without_end");
    let socket = server.clients.clone();
    let begin = Instant::now();
    let connects = tokio::task::spawn_blocking(move || {
        for _ in 0..MANY {
            drop(UnixStream::connect(&socket).unwrap());
        }
    });
    connects.await.unwrap();
    assert!(begin.elapsed() > Duration::from_millis(400), "{:?}", begin.elapsed());
    server.end().await;
}
