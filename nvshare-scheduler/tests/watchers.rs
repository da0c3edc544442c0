//! A watcher that does not read holds nobody up, and learns what it has missed.

use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use nvshare_core::Config;
use nvshare_proto::codec::Frames;
use nvshare_proto::{AdminReply, AdminRequest, QuantumRule, Reply, Request, WatchFrom};
use nvshare_scheduler::server::{self, Setup};
use nvshare_scheduler::settings::Store;
use nvshare_scheduler::sockets::Sockets;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_util::codec::Framed;

type Stream = Framed<UnixStream, Frames<Reply, Request>>;

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
    let folder = std::env::temp_dir().join(format!("nvshare-watchers-{}", std::process::id()));
    let (clients, admin) = (folder.join("s"), folder.join("admin/a"));
    let sockets = Sockets::bind(&clients, &admin).unwrap();
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
    let connect =
        async |path| -> Stream { Framed::new(UnixStream::connect(path).await.unwrap(), Frames::default()) };
    let mut slow = connect(&admin).await;
    let watching = ask(&mut slow, AdminRequest::Watch { from: WatchFrom::Now, follow: true }).await;
    let AdminReply::Watching { first, .. } = watching else { panic!("{watching:?}") };
    let mut other = connect(&admin).await;
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
    let mut client = connect(&clients).await;
    client.send(Request::Admin(AdminRequest::Watch { from: WatchFrom::Kept, follow: false })).await.unwrap();
    let refused = client.next().await.unwrap().unwrap();
    let Reply::Refused { reason } = refused else { panic!("{refused:?}") };
    assert_eq!(reason, "events are told on the administrators' socket only");
    let _ = stop.send(());
    server.await.unwrap().unwrap();
    let _ = std::fs::remove_dir_all(folder);
}
