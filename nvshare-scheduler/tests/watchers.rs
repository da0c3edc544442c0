//! A watcher that does not read holds nobody up, and learns what it has missed.

mod support;

use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use nvshare_proto::{AdminReply, AdminRequest, QuantumRule, Reply, Request, WatchFrom};
use tokio::time::timeout;

use support::{Server, Stream, connect};

/// More than the journal, the sockets and the buffers hold.
const EVENTS: u64 = 20_000;

async fn ask(stream: &mut Stream, request: AdminRequest) -> AdminReply {
    stream.send(Request::Admin(request)).await.unwrap();
    receive(stream).await
}

async fn receive(stream: &mut Stream) -> AdminReply {
    match timeout(Duration::from_secs(60), stream.next()).await {
        Ok(Some(Ok(Reply::Admin(reply)))) => reply,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_reader_that_does_not_read_holds_nobody_up() {
    let server = Server::start("watchers");
    let mut slow = connect(&server.admin).await;
    let watching = ask(&mut slow, AdminRequest::Watch { from: WatchFrom::Now, follow: true }).await;
    let AdminReply::Watching { first, .. } = watching else { panic!("{watching:?}") };
    let mut other = connect(&server.admin).await;
    for _ in 0..EVENTS {
        let done = ask(
            &mut other,
            AdminRequest::SetQuantum { gpu: None, quantum: QuantumRule::Fixed { millis: 1000 } },
        )
        .await;
        assert!(matches!(done, AdminReply::Done { .. }), "{done:?}");
    }
    let (mut seen, mut missed) = (0, 0);
    while seen + missed < EVENTS {
        match receive(&mut slow).await {
            AdminReply::Event(event) => {
                assert_eq!(event.seq, first + seen + missed);
                seen += 1;
            }
            AdminReply::Missed { count } => missed += count,
            other => panic!("{other:?}"),
        }
    }
    assert!(seen > 0 && missed > 0 && seen + missed == EVENTS, "{seen} seen, {missed} missed");
    // On the clients' socket there are no events.
    let mut client = connect(&server.clients).await;
    client.send(Request::Admin(AdminRequest::Watch { from: WatchFrom::Kept, follow: false })).await.unwrap();
    let refused = client.next().await.unwrap().unwrap();
    let Reply::Refused { reason } = refused else { panic!("{refused:?}") };
    assert_eq!(reason, "events are told on the administrators' socket only");
    server.end().await;
}
