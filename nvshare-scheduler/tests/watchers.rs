//! A watcher that does not read holds nobody up. Its news of missed events are tested beside the code.

mod support;

use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use nvshare_proto::{AdminReply, AdminRequest, QuantumRule, Reply, Request, WatchFrom};
use tokio::time::timeout;

use support::{Server, Stream, connect};

/// More events than fit in one batch.
const EVENTS: u64 = 500;

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
    for seq in first..first + EVENTS {
        let AdminReply::Event(event) = receive(&mut slow).await else { panic!("no event {seq}") };
        assert_eq!(event.seq, seq);
    }
    // On the clients' socket there are no events.
    let mut client = connect(&server.clients).await;
    client.send(Request::Admin(AdminRequest::Watch { from: WatchFrom::Kept, follow: false })).await.unwrap();
    let refused = client.next().await.unwrap().unwrap();
    let Reply::Refused { reason } = refused else { panic!("{refused:?}") };
    assert_eq!(reason, "events are told on the administrators' socket only");
    server.end().await;
}
