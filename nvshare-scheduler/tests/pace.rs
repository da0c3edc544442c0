//! A client that says what costs others much is read more slowly.

mod support;

use std::time::{Duration, Instant};

use futures_util::{SinkExt, StreamExt};
use nvshare_proto::{ClientMessage, Reply, Request, SchedulerMessage};

use support::{Server, connect, newcomer};

/// How long it takes until the scheduler has read this many messages of a new client.
async fn time_to_read(server: &Server, messages: u64, message: impl Fn(u64) -> ClientMessage) -> Duration {
    let mut stream = connect(&server.clients).await;
    stream.send(Request::Register(newcomer())).await.unwrap();
    let begin = Instant::now();
    for n in 0..messages {
        stream.send(Request::Client(message(n))).await.unwrap();
    }
    stream.send(Request::Client(ClientMessage::Ping)).await.unwrap();
    loop {
        match stream.next().await.unwrap().unwrap() {
            Reply::Client(SchedulerMessage::Pong) => return begin.elapsed(),
            Reply::Client(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_client_that_says_over_and_over_what_it_shares_is_slowed_down() {
    let server = Server::start("pace");
    let shares = |n| ClientMessage::Shares { with: vec![n % 2] };
    let took = time_to_read(&server, 48, shares).await;
    assert!(took > Duration::from_millis(900), "{took:?}");
    server.end().await;
}
