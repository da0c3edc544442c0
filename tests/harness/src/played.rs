//! A scheduler that a test plays: it has one client, and says what the test tells it.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use nvshare_proto::{
    ClientMessage, GpuUuid, HostSegment, InitialState, Reply, Request, SchedulerMessage, Usage, VERSION,
    codec,
};

use crate::{Program, Running, World, patience};

/// The scheduler's end of the connection to its one client.
#[derive(Debug)]
pub struct PlayedScheduler {
    stream: Arc<Mutex<UnixStream>>,
    /// The protocol's version that both ends speak.
    version: u16,
    /// The client's messages. A thread listens, so that a ping is answered at once, whatever the test is doing.
    heard: Receiver<Request>,
    /// Messages that came before one for which [`Self::look_for`] looked.
    left: VecDeque<ClientMessage>,
    /// Memory of the host for a client that asks, in one frame.
    segments: Vec<(HostSegment, OwnedFd)>,
    /// It hands memory of the host out, and may have none left.
    offers: bool,
}

/// The client's connection ends with its scheduler.
impl Drop for PlayedScheduler {
    fn drop(&mut self) {
        let _ = lock(&self.stream).shutdown(Shutdown::Both);
    }
}

fn lock(stream: &Mutex<UnixStream>) -> MutexGuard<'_, UnixStream> {
    stream.lock().unwrap_or_else(PoisonError::into_inner)
}

fn frame(version: u16, message: SchedulerMessage) -> Vec<u8> {
    codec::encode_in(version, &Reply::Client(message)).expect("a frame")
}

/// Answers pings, and passes on all else, until the connection ends. The client speaks this version alone.
fn listen(version: u16, mut stream: UnixStream, answers: &Mutex<UnixStream>, heard: &Sender<Request>) {
    let (mut bytes, mut chunk) = (Vec::new(), [0; 4096]);
    loop {
        while let Some((used, request)) = codec::decode::<Request>(&bytes).expect("a frame") {
            let known = codec::encode_in(version, &request).expect("a message that this version has");
            assert_eq!(known, bytes[..used], "it is said in this version");
            bytes.drain(..used);
            if let Request::Client(ClientMessage::Ping) = request {
                let _ = lock(answers).write_all(&frame(version, SchedulerMessage::Pong));
            } else if heard.send(request).is_err() {
                return;
            }
        }
        match stream.read(&mut chunk) {
            Ok(read @ 1..) => bytes.extend_from_slice(&chunk[..read]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => return,
        }
    }
}

/// Answers the first frame of a connection as a scheduler of this version does, for which it is too new.
fn refuse(version: u16, listener: &UnixListener) {
    let (mut stream, _) = listener.accept().expect("a client");
    let mut bytes = [0; 4096];
    let read = stream.read(&mut bytes).expect("a frame");
    assert_eq!(codec::version(&bytes[..read]), Some(VERSION), "it begins with the newest");
    let reason = format!("protocol version {VERSION}; this is version {version}");
    let refusal = codec::encode_in(version, &Reply::Refused { reason }).expect("a frame");
    stream.write_all(&refusal).expect("sent");
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
        Self::accept_in(VERSION, listener)
    }

    /// [`Self::accept`] by a scheduler of this version of the protocol. An older one refuses the first frame, which is of the newest.
    ///
    /// # Panics
    /// When the client says anything else.
    #[must_use]
    pub fn accept_in(version: u16, listener: &UnixListener) -> (Self, Vec<Usage>) {
        if version < VERSION {
            refuse(version, listener);
        }
        let (stream, _) = listener.accept().expect("a client");
        let read = stream.try_clone().expect("a descriptor");
        let stream = Arc::new(Mutex::new(stream));
        let (told, heard) = mpsc::channel();
        let answers = Arc::clone(&stream);
        std::thread::spawn(move || listen(version, read, &answers, &told));
        let mut played =
            Self { stream, version, heard, left: VecDeque::new(), segments: Vec::new(), offers: false };
        let Request::Register(register) = played.hear() else { panic!("the client does not register") };
        played.say(&[SchedulerMessage::Registered { client: 1, hold: InitialState::Parked }]);
        (played, register.usage)
    }

    /// Plays the scheduler of a guest that gives its GPU nothing to do until the world is told to [wake](World::wake) it. Returns the
    /// guest too, and its GPU.
    ///
    /// # Panics
    /// When the guest does not name a GPU.
    #[must_use]
    pub fn of_waiting_guest(world: &World) -> (Self, Running, GpuUuid) {
        let listener = Self::listen(world);
        let wake = world.dir().join("wake");
        let guest = Program::guest(world, "waits_with_memory", &[]).until_told();
        let guest = guest.env("WAKE", &wake.to_string_lossy()).start();
        let (mut played, usage) = Self::accept(&listener);
        let known = usage.first().map(|usage| usage.gpu);
        let named =
            |m: &ClientMessage| if let ClientMessage::Usage(usage) = m { Some(usage.gpu) } else { None };
        let gpu = known.unwrap_or_else(|| played.until(named));
        (played, guest, gpu)
    }

    fn hear(&mut self) -> Request {
        self.heard.recv_timeout(patience()).expect("the client says something")
    }

    /// The client gets these segments of the host's memory, all in one frame, when it asks the next time.
    pub fn hand_out(&mut self, segments: Vec<(HostSegment, OwnedFd)>) {
        self.segments = segments;
    }

    /// From now on, the client hears that others have all memory of the host when it asks for some.
    pub fn hand_out_nothing(&mut self) {
        self.offers = true;
    }

    /// Waits for a message, and passes over others. A client that asks for memory of the host hears that there is none, but for what is to be
    /// [handed out](Self::hand_out).
    ///
    /// # Panics
    /// When the client hangs up, or does not say it for as long as tests have patience.
    pub fn until<T>(&mut self, which: impl FnMut(&ClientMessage) -> Option<T>) -> T {
        self.until_or_gone(which).expect("the client hangs up")
    }

    /// Waits until the client says that it runs. A program whose work is over at once may end before its client says so.
    ///
    /// # Panics
    /// When the client does not say it for as long as tests have patience.
    pub fn until_running(&mut self) {
        self.until_or_gone(|m| matches!(m, ClientMessage::Running { .. }).then_some(()));
    }

    /// Waits for a message as [`Self::until`] does. Returns `None` when the client hangs up before.
    ///
    /// # Panics
    /// When the client does not say it for as long as tests have patience.
    pub fn until_or_gone<T>(&mut self, mut which: impl FnMut(&ClientMessage) -> Option<T>) -> Option<T> {
        let begin = Instant::now();
        loop {
            let message = match self.left.pop_front() {
                // A client that says other things for ever has no more time than one that says nothing.
                None => match self.heard.recv_timeout(patience().saturating_sub(begin.elapsed())) {
                    Ok(request) => self.take(request),
                    Err(RecvTimeoutError::Disconnected) => return None,
                    Err(RecvTimeoutError::Timeout) => panic!("the client does not say it"),
                },
                left => left,
            };
            if let Some(found) = message.as_ref().and_then(&mut which) {
                return Some(found);
            }
        }
    }

    /// Whether the client has said a message by now. If so, this passes over all messages until then; if not, over none.
    pub fn look_for(&mut self, which: impl Fn(&ClientMessage) -> bool) -> bool {
        while let Ok(request) = self.heard.try_recv() {
            let message = self.take(request);
            self.left.extend(message);
        }
        let place = self.left.iter().position(which);
        if let Some(place) = place {
            self.left.drain(..=place);
        }
        place.is_some()
    }

    /// A client that asks for memory of the host has its answer at once.
    fn take(&mut self, request: Request) -> Option<ClientMessage> {
        let Request::Client(message) = request else { return None };
        if let ClientMessage::HostWanted { .. } = message {
            self.answer_for_host_memory();
        }
        Some(message)
    }

    fn answer_for_host_memory(&mut self) {
        let (segments, files): (Vec<HostSegment>, Vec<OwnedFd>) =
            std::mem::take(&mut self.segments).into_iter().unzip();
        let offered = self.offers || !segments.is_empty();
        let mut frame = frame(self.version, SchedulerMessage::HostMemory { offered, segments });
        let numbers: Vec<i32> = files.iter().map(AsRawFd::as_raw_fd).collect();
        let mut part = libc::iovec { iov_base: frame.as_mut_ptr().cast(), iov_len: frame.len() };
        let mut control = [0u64; 16];
        let stream = lock(&self.stream);
        // SAFETY: a message of one part, and of one control message that fits its buffer; both live through the call.
        let sent = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
            if !numbers.is_empty() {
                let bytes = size_of_val(numbers.as_slice()) as u32;
                message.msg_control = control.as_mut_ptr().cast();
                message.msg_controllen = libc::CMSG_SPACE(bytes) as _;
                assert!(libc::CMSG_SPACE(bytes) as usize <= size_of_val(&control), "too many segments");
                let header = libc::CMSG_FIRSTHDR(&raw const message);
                (*header).cmsg_level = libc::SOL_SOCKET;
                (*header).cmsg_type = libc::SCM_RIGHTS;
                (*header).cmsg_len = libc::CMSG_LEN(bytes) as _;
                let place = libc::CMSG_DATA(header).cast::<i32>();
                std::ptr::copy_nonoverlapping(numbers.as_ptr(), place, numbers.len());
            }
            libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
        };
        assert_eq!(usize::try_from(sent).ok(), Some(frame.len()), "{}", std::io::Error::last_os_error());
    }

    /// Sends all messages at once.
    ///
    /// # Panics
    /// When the client hangs up.
    pub fn say(&mut self, messages: &[SchedulerMessage]) {
        let all: Vec<u8> = messages.iter().flat_map(|message| frame(self.version, message.clone())).collect();
        lock(&self.stream).write_all(&all).expect("sent");
    }
}
