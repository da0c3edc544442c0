//! Ends of different versions: a client of the version before, and a scheduler of the next version, which has one message more.

mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nvshare_core::Config;
use nvshare_proto::codec::{self, Error, Frames, Message, decode, encode, encode_in};
use nvshare_proto::units::MIB;
use nvshare_proto::{
    AdminReply, AdminRequest, ClientMessage, GpuUuid, OLDEST, Register, Reply, Request, SchedulerMessage,
    Usage, VERSION,
};
use nvshare_scheduler::host_memory::Budget;
use serde::Serialize;
use tokio_util::bytes::BytesMut;
use tokio_util::codec::{Decoder, Encoder};

use support::{Server, newcomer};

/// A scheduler's messages in the next version.
#[derive(Debug, Serialize)]
enum Next {
    Client(SchedulerMessage),
    #[allow(dead_code, reason = "its place counts")]
    Admin(AdminReply),
    #[allow(dead_code, reason = "its place counts")]
    Refused {
        reason: String,
    },
    New {
        text: String,
    },
}

impl Message for Next {
    fn since(&self) -> u16 {
        if matches!(self, Self::New { .. }) { VERSION } else { OLDEST }
    }
}

fn frame(version: u16, request: &Request) -> Vec<u8> {
    encode_in(version, request).unwrap()
}

fn ping(version: u16) -> Vec<u8> {
    frame(version, &Request::Client(ClientMessage::Ping))
}

/// The bytes that a scheduler of this version answers on one connection, after it has read frames.
fn answer(frames: &[Vec<u8>], replies: Vec<Next>) -> Result<Vec<u8>, Error> {
    let mut codec = Frames::<Request, Next>::default();
    let mut read = BytesMut::from(&frames.concat()[..]);
    for _ in frames {
        codec.decode(&mut read)?.expect("a frame");
    }
    let mut written = BytesMut::new();
    replies.into_iter().try_for_each(|reply| codec.encode(reply, &mut written))?;
    Ok(written.to_vec())
}

fn replies() -> Vec<Next> {
    let news = Next::New { text: "news".to_owned() };
    vec![Next::Client(SchedulerMessage::Pong), news, Next::Client(SchedulerMessage::SchedOff)]
}

#[test]
fn an_end_of_the_version_before_is_answered_in_its_version_and_without_what_it_does_not_know() {
    let expected = [SchedulerMessage::Pong, SchedulerMessage::SchedOff]
        .map(|message| encode_in(OLDEST, &Reply::Client(message)).unwrap());
    assert_eq!(answer(&[ping(OLDEST), ping(OLDEST)], replies()).unwrap(), expected.concat());
    let [pong, news, off] = <[Next; 3]>::try_from(replies()).unwrap().map(|next| encode(&next).unwrap());
    assert_eq!(answer(&[ping(VERSION)], replies()).unwrap(), [pong, news, off].concat());
    let news = Next::New { text: String::new() };
    assert!(matches!(encode_in(OLDEST, &news), Err(Error::TooNew { version: OLDEST })));
}

#[test]
fn a_connection_has_one_version() {
    for [first, second] in [[OLDEST, VERSION], [VERSION, OLDEST]] {
        let mixed = answer(&[ping(first), ping(second)], replies());
        assert!(matches!(mixed, Err(Error::Version { theirs }) if theirs == second));
    }
}

/// An end of one version, which reads frame by frame. Their bytes are those of the library of that version: proto/tests/wire.golden.
struct End {
    stream: UnixStream,
    version: u16,
    bytes: Vec<u8>,
}

impl End {
    fn connect(socket: &std::path::Path, version: u16) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        Self { stream, version, bytes: Vec::new() }
    }

    fn say(&mut self, request: &Request) {
        self.stream.write_all(&frame(self.version, request)).unwrap();
    }

    /// The version of the next frame, and its message.
    fn hear(&mut self) -> (u16, Reply) {
        loop {
            let version = codec::version(&self.bytes);
            if let Some((used, reply)) = decode(&self.bytes).unwrap() {
                self.bytes.drain(..used);
                return (version.unwrap(), reply);
            }
            let mut chunk = [0; 4096];
            let read = self.stream.read(&mut chunk).unwrap();
            assert!(read > 0, "the scheduler has hung up");
            self.bytes.extend_from_slice(&chunk[..read]);
        }
    }

    /// Waits for a message; each frame before it has this end's version as well.
    fn until(&mut self, is_it: impl Fn(&Reply) -> bool) {
        loop {
            let (version, reply) = self.hear();
            assert_eq!(version, self.version, "{reply:?}");
            assert!(!matches!(reply, Reply::Refused { .. }), "{reply:?}");
            if is_it(&reply) {
                return;
            }
        }
    }
}

#[tokio::test]
async fn a_client_of_the_version_before_is_served_in_its_version() {
    let budget = Some(Budget { all: 64 * MIB, each: 64 * MIB });
    let server = Server::start_with("before", Config::default(), budget);
    let [clients, admin] = [&server.clients, &server.admin].map(Clone::clone);
    let ends = move || {
        let usage =
            Usage { gpu: GpuUuid([9; 16]), total: 1 << 30, limit: 0, allocated: 0, absent: 0, immovable: 0 };
        for version in [VERSION - 1, VERSION] {
            let mut client = End::connect(&clients, version);
            client.say(&Request::Register(Register { usage: vec![usage], ..newcomer() }));
            let is = |message: fn(&SchedulerMessage) -> bool| move |reply: &Reply| matches!(reply, Reply::Client(said) if message(said));
            client.until(is(|said| matches!(said, SchedulerMessage::Registered { .. })));
            client.say(&Request::Client(ClientMessage::ReqLock));
            client.until(is(|said| matches!(said, SchedulerMessage::LockOk { .. })));
            // Its descriptors come with a frame that is written beside the others.
            client.say(&Request::Client(ClientMessage::HostWanted { bytes: 2 * MIB }));
            client.until(is(
                |said| matches!(said, SchedulerMessage::HostMemory { segments, .. } if segments.len() == 1),
            ));
            let mut administrator = End::connect(&admin, version);
            administrator.say(&Request::Admin(AdminRequest::Status));
            administrator.until(|reply| matches!(reply, Reply::Admin(AdminReply::End)));
        }
    };
    tokio::task::spawn_blocking(ends).await.unwrap();
    server.end().await;
}

#[tokio::test]
async fn an_end_that_is_too_new_is_told_the_schedulers_version() {
    let server = Server::start("newer");
    let clients = server.clients.clone();
    let newer = move || {
        let mut end = End::connect(&clients, VERSION + 1);
        end.say(&Request::Register(newcomer()));
        let (version, reply) = end.hear();
        assert_eq!(version, VERSION, "that is what it falls back to");
        let reason = format!("protocol version {}; this is version {VERSION}", VERSION + 1);
        assert_eq!(reply, Reply::Refused { reason });
    };
    tokio::task::spawn_blocking(newer).await.unwrap();
    server.end().await;
}
