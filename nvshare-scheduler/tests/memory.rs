//! The memory that the scheduler keeps for one user's connections has a bound.

mod support;

use std::path::Path;
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use nvshare_proto::codec::{MAX_FRAME, encode};
use nvshare_proto::{
    AdminRequest, ComputeLimit, GangName, GpuUuid, Register, Reply, Request, VERSION, Wishes,
};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::time::sleep;

use support::{Server, Stream, connect, newcomer};

const CONNECTIONS: usize = 200;
/// Bytes that this process, with the scheduler in it and both ends of each connection, may take for each.
const EACH: u64 = 48 << 10;
/// The same, of which most is a frame that never comes whole.
const EACH_HALF: u64 = 24 << 10;

/// Bytes of this process's memory.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

async fn register(socket: &Path, asked: Wishes) -> Stream {
    let mut stream = connect(socket).await;
    stream.send(Request::Register(Register { asked, ..newcomer() })).await.unwrap();
    let answer = stream.next().await.unwrap().unwrap();
    assert!(matches!(answer, Reply::Client(_)), "{answer:?}");
    // This end keeps nothing of it either.
    stream.write_buffer_mut().clear();
    let _ = std::mem::take(stream.write_buffer_mut());
    stream
}

/// The bytes that the scheduler keeps for each registration, and the connections.
async fn kept(socket: &Path, asked: impl Fn(usize) -> Wishes, then: &[u8]) -> (u64, Vec<Stream>) {
    let mut connections = vec![register(socket, Wishes::default()).await];
    let before = resident();
    for n in 0..CONNECTIONS {
        let mut stream = register(socket, asked(n)).await;
        stream.get_mut().write_all(then).await.unwrap();
        connections.push(stream);
    }
    sleep(Duration::from_millis(200)).await;
    (resident().saturating_sub(before) / CONNECTIONS as u64, connections)
}

/// The bytes that the scheduler keeps for each connection that says this and never registers, and the connections.
async fn kept_unregistered(socket: &Path, said: &[u8]) -> (u64, Vec<UnixStream>) {
    let mut connections = Vec::new();
    let before = resident();
    for _ in 0..CONNECTIONS {
        let mut stream = UnixStream::connect(socket).await.unwrap();
        stream.write_all(said).await.unwrap();
        connections.push(stream);
    }
    // The scheduler has the time to read them all, and waits longer for the rest.
    sleep(Duration::from_secs(1)).await;
    (resident().saturating_sub(before) / CONNECTIONS as u64, connections)
}

/// The first bytes of a frame.
fn part_of_frame(length: usize, bytes: usize) -> Vec<u8> {
    let mut part = (length as u32).to_le_bytes().to_vec();
    part.extend(VERSION.to_le_bytes());
    part.resize(bytes, 0);
    part
}

#[tokio::test]
async fn long_names_many_limits_and_half_sent_frames_take_little_memory() {
    let server = Server::start("memory");
    // First, as what long names take for a moment may be used again.
    let half = part_of_frame(MAX_FRAME, 60_000);
    let (halves, _one) = kept(&server.clients, |_| Wishes::default(), &half).await;
    // Only administrators may say as much at once, and long words show best whether they are kept.
    let name = |n: usize| GangName { name: format!("{n:08}{}", "g".repeat(60_000)), size: 0 };
    let limit = |n: u16| {
        let [low, high] = n.to_le_bytes();
        let mut of = [1; 16];
        (of[0], of[1]) = (low, high);
        ComputeLimit { gpu: GpuUuid(of), percent: 50 }
    };
    let (names, _two) =
        kept(&server.admin, |n| Wishes { gang: Some(name(n)), ..Wishes::default() }, &[]).await;
    let limits = |_| Wishes { compute: (0..3500).map(limit).collect(), ..Wishes::default() };
    let (limits, _three) = kept(&server.admin, limits, &[]).await;
    println!(
        "bytes a connection: {names} for long names, {limits} for many limits, {halves} for half a frame"
    );
    assert!(names.max(limits) <= EACH && halves <= EACH_HALF, "{names}, {limits}, {halves}");
    let (too_long, _four) = kept_unregistered(&server.clients, &part_of_frame(MAX_FRAME, 65_000)).await;
    let (longest, _five) = kept_unregistered(&server.clients, &part_of_frame(16_380, 16_380)).await;
    // A user who asks often waits for the answer.
    let seats = vec![("00000000000000aa".parse().unwrap(), None); 1800];
    let list = encode(&Request::Admin(AdminRequest::OccupySeats(seats))).unwrap();
    let (lists, _six) = kept_unregistered(&server.clients, &list).await;
    println!(
        "unregistered: {too_long} for a frame that is too long, {longest} for the longest, {lists} for a list"
    );
    assert!(too_long.max(longest).max(lists) <= EACH, "{too_long}, {longest}, {lists}");
    server.end().await;
}
