//! A scheduler whose core stops by a defect leaves its clients to the next one.

mod support;

use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use nvshare_core::Config;
use nvshare_proto::{ClientMessage, GpuUuid, Register, Request, Usage};

use support::{Server, connect, newcomer};

#[tokio::test]
async fn a_scheduler_whose_core_stops_has_the_next_wait_for_its_clients() {
    // No clock reaches the end of this time.
    let config = Config { grace: Duration::MAX, ..Config::default() };
    let server = Server::start_with("defect", config, None);
    let mut client = connect(&server.clients).await;
    let gpu = GpuUuid([1; 16]);
    let usage = Usage { gpu, total: 1 << 30, limit: 0, allocated: 0, absent: 0, immovable: 0 };
    let register = Register { usage: vec![usage], ..newcomer() };
    client.send(Request::Register(register)).await.unwrap();
    client.send(Request::Client(ClientMessage::ReqLock)).await.unwrap();
    while client.next().await.is_some() {}
    assert!(server.replaced_after_defect().await);
}
