//! A scheduler that a test plays: it has one client, and says what the test tells it.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use nvshare_proto::{ClientMessage, Hold, Reply, Request, SchedulerMessage, Usage, codec};

use crate::{World, patience};

/// The scheduler's end of the connection to its one client.
#[derive(Debug)]
pub struct PlayedScheduler {
    stream: UnixStream,
    bytes: Vec<u8>,
}

impl PlayedScheduler {
    /// Listens in a world, before its client starts.
    ///
    /// # Panics
    /// When the socket cannot be made.
    #[must_use]
    pub fn listen(world: &World) -> UnixListener {
        UnixListener::bind(world.socket()).expect("a socket")
    }

    /// Waits for the client and registers it as one that does not hold the lock. Returns the usage that the client reported.
    ///
    /// # Panics
    /// When the client says anything else.
    #[must_use]
    pub fn accept(listener: &UnixListener) -> (Self, Vec<Usage>) {
        let (stream, _) = listener.accept().expect("a client");
        stream.set_read_timeout(Some(patience())).expect("a deadline");
        let mut played = Self { stream, bytes: Vec::new() };
        let Request::Register(register) = played.hear() else { panic!("the client does not register") };
        played.say(&[SchedulerMessage::Registered { client: 1, hold: Hold::Parked }]);
        (played, register.usage)
    }

    fn hear(&mut self) -> Request {
        let mut chunk = [0; 4096];
        loop {
            if let Some((used, request)) = codec::decode(&self.bytes).expect("a frame") {
                self.bytes.drain(..used);
                return request;
            }
            let read = self.stream.read(&mut chunk).expect("the client says something");
            assert!(read > 0, "the client has hung up");
            self.bytes.extend_from_slice(&chunk[..read]);
        }
    }

    /// Waits for a message, and passes over others. Who asks for memory of the host hears that there is none.
    ///
    /// # Panics
    /// When the client hangs up, or says nothing for as long as tests have patience.
    pub fn until<T>(&mut self, mut which: impl FnMut(&ClientMessage) -> Option<T>) -> T {
        loop {
            let Request::Client(message) = self.hear() else { continue };
            if let ClientMessage::HostWanted { .. } = message {
                self.say(&[SchedulerMessage::HostMemory { offered: false, segments: Vec::new() }]);
            }
            if let Some(found) = which(&message) {
                return found;
            }
        }
    }

    /// Sends all messages at once.
    ///
    /// # Panics
    /// When the client hangs up.
    pub fn say(&mut self, messages: &[SchedulerMessage]) {
        let frame = |m: &SchedulerMessage| codec::encode(&Reply::Client(m.clone())).expect("a frame");
        let all: Vec<u8> = messages.iter().flat_map(frame).collect();
        self.stream.write_all(&all).expect("sent");
    }
}
