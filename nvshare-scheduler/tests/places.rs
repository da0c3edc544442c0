//! A process that comes and goes takes no more than one place, however often it does so.

mod support;

use std::path::Path;
use std::time::Duration;

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
