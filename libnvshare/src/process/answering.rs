//! Questions of other processes of the same user, and a thread that answers them.
//!
//! A process listens at an abstract address of its network namespace, whose name is random: only those find it that were given
//! the name. The kernel says whose process is at the other end, and each end wants its own user there. A question is a few
//! bytes, and an answer may have descriptors with it. The thread starts with the first call of [`listen`]. It calls nothing
//! but the functions that were given to it. It waits for no asker: each has [`PATIENCE`], and a bounded number is heard at a time.
//! An answer that takes longer is given by another thread, and [`LATER`] comes before it.
//! Other users' processes can connect as well, as often as they like. The thread [pauses](Pause) between looks at them.

use std::ffi::c_int;
use std::io;
use std::mem::offset_of;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nvshare_proto::ThrottledLine;

use super::descriptor::{Descriptor, Held};
use super::lock::lock;
use super::other::OtherProcess;
use super::passing;
use super::threads::Uncancelled;
use super::{lifecycle, log, threads};

/// The random part of an address.
pub(crate) type Name = [u8; 16];
/// Bytes of a question.
pub(crate) const QUESTION: usize = 64;
/// The largest size of an answer, in bytes.
const ANSWER: usize = 1024;
/// Askers that are heard at a time. Others wait in the kernel's queue.
const MAX_ASKERS: usize = 32;
/// An asker that has not asked after this time is not heard any more.
const PATIENCE: Duration = Duration::from_secs(2);
/// The bounds of the pause after processes of other users have connected. They may fill the queue meanwhile, so it is short: askers
/// find places when it is over.
const MIN_PAUSE: Duration = Duration::from_millis(1);
const MAX_PAUSE: Duration = Duration::from_millis(10);
/// How long the asking end waits: the other process may be stopped, or have many askers.
const ASKER_PATIENCE: Duration = Duration::from_secs(5);
/// How often an asker that waits for a later answer looks whether the other process lives.
const LOOK: Duration = Duration::from_secs(1);
/// How long a process waits that only tells something.
const TELLER_PATIENCE: Duration = Duration::from_millis(20);

/// Said before an answer that takes longer. The asker waits for that until the connection ends.
pub(crate) const LATER: [u8; 1] = [1];
/// How often a process that said so is asked again when its connection has ended without an answer.
const TRIES: u32 = 8;

/// The tasks of the thread that answers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tasks {
    /// Answers a question.
    pub(crate) answer: fn(question: &[u8; QUESTION], asker: Asker),
    /// Descriptors that are watched beside the askers: when one can be read, there is something to look at.
    pub(crate) watched: fn() -> Vec<c_int>,
    /// Looks at all that is watched.
    pub(crate) look: fn(),
}

/// A connection of an asker. It ends with this, also where a forked child has the socket, too.
#[derive(Debug)]
struct Connection(Held);

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(number) = self.0.get() {
            // SAFETY: a descriptor of ours.
            unsafe { libc::shutdown(number, libc::SHUT_RDWR) };
        }
    }
}

/// A process that has asked. When this is dropped without an answer, it gets the end of the connection.
#[derive(Debug)]
pub(crate) struct Asker(Connection);

impl Asker {
    /// The number of the process; 0: it is in a namespace that this one does not see.
    pub(crate) fn process(&self) -> Option<libc::pid_t> {
        Some(credentials(self.0.0.get()?)?.pid)
    }

    /// Answers, with descriptors.
    ///
    /// # Errors
    /// The system's: the asker does not wait any more, or the program has closed the socket.
    pub(crate) fn send(&self, answer: &[u8], descriptors: &[c_int]) -> io::Result<()> {
        passing::send(self.0.0.get().ok_or(io::ErrorKind::NotConnected)?, answer, descriptors)
    }
}

static LISTENER: Descriptor = Descriptor::none();
/// The address of this process, as two words; zero: there is none.
static ADDRESS: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

/// Random bytes of the system; `None`: it has none yet.
pub(crate) fn random() -> Option<[u8; 16]> {
    let mut bytes = [0u8; 16];
    // SAFETY: writable bytes of the given length.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), libc::GRND_NONBLOCK) };
    (got == bytes.len() as isize).then_some(bytes)
}

/// The name at which this process listens, if it does.
pub(crate) fn own_name() -> Option<Name> {
    let words = [ADDRESS[0].load(Ordering::SeqCst), ADDRESS[1].load(Ordering::SeqCst)];
    LISTENER.get().filter(|_| words != [0; 2])?;
    Some((u128::from(words[0]) << 64 | u128::from(words[1])).to_ne_bytes())
}

/// The name at which this process listens. Begins to listen, if it does not, or if the program has closed the socket.
///
/// # Errors
/// The system's: no descriptor, no thread, or no random numbers.
pub(crate) fn listen(tasks: Tasks) -> io::Result<Name> {
    static STARTING: Mutex<()> = Mutex::new(());
    let _whole = Uncancelled::begin();
    let _one = lock(&STARTING);
    if let Some(name) = own_name() {
        return Ok(name);
    }
    let name = random().ok_or(io::ErrorKind::WouldBlock)?;
    let socket = socket(libc::SOCK_NONBLOCK)?;
    let number = socket.get().ok_or(io::ErrorKind::NotConnected)?;
    let (address, length) = address_of(&name);
    // SAFETY: an address of the given length.
    unsafe {
        ok(libc::bind(number, (&raw const address).cast(), length))?;
        ok(libc::listen(number, 128))?;
    }
    let name_word = u128::from_ne_bytes(name);
    ADDRESS[0].store((name_word >> 64) as u64, Ordering::SeqCst);
    ADDRESS[1].store(name_word as u64, Ordering::SeqCst);
    // From here on it is closed through the static, which a forked child can reach.
    LISTENER.set(socket.into_number().ok_or(io::ErrorKind::NotConnected)?);
    if threads::spawn("nvshare-share", move || answer_all(number, name, tasks)) {
        return Ok(name);
    }
    close_after_fork();
    Err(io::ErrorKind::OutOfMemory.into())
}

/// Stops to listen, in a forked child: the address is its parent's.
pub(crate) fn close_after_fork() {
    if let Some(number) = LISTENER.take() {
        // SAFETY: a descriptor of ours, which nothing uses any more.
        unsafe { libc::close(number) };
    }
}

fn ok(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn socket(flags: c_int) -> io::Result<Held> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | flags;
    // SAFETY: no pointers; the descriptor is new and ours.
    unsafe { Ok(Held::new(OwnedFd::from_raw_fd(ok(libc::socket(libc::AF_UNIX, kind, 0))?))) }
}

/// An abstract address begins with a zero.
fn address_of(name: &Name) -> (libc::sockaddr_un, libc::socklen_t) {
    let text = format!("\0nvshare-{:032x}", u128::from_ne_bytes(*name));
    // SAFETY: plain memory, for which zeros are valid.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (place, byte) in address.sun_path.iter_mut().zip(text.bytes()) {
        *place = byte as libc::c_char;
    }
    (address, (offset_of!(libc::sockaddr_un, sun_path) + text.len()) as libc::socklen_t)
}

/// Whether the other end of a connection is of the user of this process.
fn is_own_users(socket: c_int) -> bool {
    // SAFETY: it only asks.
    is_of(socket, unsafe { libc::geteuid() })
}

/// Whether the other end of a connection is of a user.
fn is_of(socket: c_int, user: libc::uid_t) -> bool {
    credentials(socket).is_some_and(|peer| peer.uid == user)
}

/// The process that connected, as the kernel says.
fn credentials(socket: c_int) -> Option<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: libc::uid_t::MAX, gid: 0 };
    let mut length = size_of_val(&peer) as libc::socklen_t;
    // SAFETY: a place of the given length.
    let known = unsafe {
        libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &raw mut length)
    };
    (known == 0).then_some(peer)
}

/// A process that has connected and has not asked yet.
struct Guest {
    connection: Connection,
    until: Instant,
}

/// A time in which nobody new is looked at. It doubles with each look at which a process of another user was there.
#[derive(Debug, Clone, Copy)]
struct Pause {
    length: Duration,
    until: Instant,
}

impl Pause {
    fn none(now: Instant) -> Self {
        Self { length: Duration::ZERO, until: now }
    }

    /// The pause after a look.
    fn after(self, another_user_came: bool, now: Instant) -> Self {
        if !another_user_came {
            return Self::none(now);
        }
        let length = (self.length * 2).clamp(MIN_PAUSE, MAX_PAUSE);
        Self { length, until: now + length }
    }

    fn is_over(self, now: Instant) -> bool {
        now >= self.until
    }
}

/// The life of the thread. It ends when the program has closed the socket: the number may be that of a later one then.
fn answer_all(listener: c_int, name: Name, tasks: Tasks) {
    let mut guests: Vec<Guest> = Vec::new();
    let mut pause = Pause::none(Instant::now());
    while own_name() == Some(name) {
        let begin = Instant::now();
        let room = guests.len() < MAX_ASKERS && pause.is_over(begin);
        let entry = |number| libc::pollfd { fd: number, events: libc::POLLIN, revents: 0 };
        let mut watched = vec![entry(if room { listener } else { -1 })];
        guests.retain(|guest| guest.connection.0.get().is_some());
        watched.extend(guests.iter().map(|guest| entry(guest.connection.0.get().unwrap_or(-1))));
        watched.extend((tasks.watched)().into_iter().map(entry));
        let ends =
            guests.iter().map(|guest| guest.until).chain((!pause.is_over(begin)).then_some(pause.until));
        let left = ends.map(|end| end.saturating_duration_since(begin)).min();
        // Nothing wakes it when the socket is closed.
        let millis = left.map_or(PATIENCE, |left| left.min(PATIENCE)).as_millis() as c_int + 1;
        // SAFETY: that many valid entries; a negative descriptor is passed over.
        let polled = unsafe { libc::poll(watched.as_mut_ptr(), watched.len() as libc::nfds_t, millis) };
        if polled < 0 && io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            // The program has forbidden itself descriptors, and with them this call.
            threads::sleep(Duration::from_millis(100));
        }
        let (now, mut ready) = (Instant::now(), watched.iter().skip(1).map(|at| at.revents != 0));
        let (heard, silent) = guests.into_iter().partition(|_| ready.next() == Some(true));
        guests = silent;
        guests.retain(|guest| guest.until > now);
        if ready.any(|ready| ready) {
            (tasks.look)();
        }
        heard.into_iter().for_each(|guest: Guest| hear(guest.connection, tasks));
        if watched.first().is_some_and(|at| at.revents != 0) && own_name() == Some(name) {
            // No more than there are places, so that those who have asked are heard.
            let mut another_user_came = false;
            for _ in guests.len()..MAX_ASKERS {
                match accept(listener) {
                    Came::Guest(guest) => guests.push(guest),
                    Came::OtherUser => another_user_came = true,
                    Came::Nobody => break,
                }
            }
            pause = pause.after(another_user_came, Instant::now());
        }
    }
}

/// The result of a look at those who want to connect.
enum Came {
    Guest(Guest),
    /// One who gets nothing.
    OtherUser,
    Nobody,
}

fn accept(listener: c_int) -> Came {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no address is asked for; the descriptor is new and ours.
    let socket = unsafe {
        ok(libc::accept4(listener, std::ptr::null_mut(), std::ptr::null_mut(), flags))
            .map(|number| Held::new(OwnedFd::from_raw_fd(number)))
    };
    let socket = match socket {
        Ok(socket) => socket,
        Err(error) => {
            // The process may have no descriptors left, and the asker still waits.
            if error.kind() != io::ErrorKind::WouldBlock {
                threads::sleep(Duration::from_millis(10));
            }
            return Came::Nobody;
        }
    };
    if !socket.get().is_some_and(is_own_users) {
        static OTHERS: ThrottledLine = ThrottledLine::new(log::warn);
        OTHERS
            .say(format_args!("another user's process has asked for this program's memory, and is refused"));
        return Came::OtherUser;
    }
    Came::Guest(Guest { connection: Connection(socket), until: Instant::now() + PATIENCE })
}

/// Answers one question. One of another length is none.
fn hear(connection: Connection, tasks: Tasks) {
    let Some(number) = connection.0.get() else { return };
    let mut bytes = [0u8; QUESTION + 1];
    // Descriptors that come with it are closed.
    if let Ok((QUESTION, _)) = passing::receive(number, &mut bytes)
        && let Some(question) = bytes.first_chunk()
    {
        (tasks.answer)(question, Asker(connection));
    }
}

/// Asks the process that listens at a name. Returns the answer, which is empty where it has none, and the descriptors that came with it.
///
/// # Errors
/// A text: nobody listens there, it is of another user, or there is no answer.
pub(crate) fn ask(name: &Name, question: &[u8; QUESTION]) -> Result<(Vec<u8>, Vec<OwnedFd>), String> {
    let _whole = Uncancelled::begin();
    for _ in 1..TRIES {
        match ask_within(ASKER_PATIENCE, name, question)? {
            // It is gone, has changed its mind, or could not do then what it has to do first.
            (answer, _) if answer == LATER => {}
            answered => return Ok(answered),
        }
    }
    Err("it has put off the answer too often".to_owned())
}

/// Tells the process that listens at a name something, and waits for no answer. Returns whether it need not be told again: it has the
/// word, or nobody listens there any more.
pub(crate) fn tell(name: &Name, word: &[u8; QUESTION]) -> bool {
    let _whole = Uncancelled::begin();
    let told = connect_and_say(Instant::now() + TELLER_PATIENCE, name, word);
    told.is_ok() || !is_there(name)
}

/// Whether a process listens at a name, or cannot be known not to.
fn is_there(name: &Name) -> bool {
    let Ok(socket) = socket(libc::SOCK_NONBLOCK) else { return true };
    let Some(number) = socket.get() else { return true };
    let (address, length) = address_of(name);
    // SAFETY: an address of the given length.
    let connected = unsafe { ok(libc::connect(number, (&raw const address).cast(), length)) };
    !connected.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// A signal that the program handles ends a call of the system early. So the time of all calls together is bounded, not of each. Behind
/// [`LATER`], time is not bounded; if nothing comes, that is the answer.
fn ask_within(
    patience: Duration,
    name: &Name,
    question: &[u8; QUESTION],
) -> Result<(Vec<u8>, Vec<OwnedFd>), String> {
    let deadline = Instant::now() + patience;
    let socket = connect_and_say(deadline, name, question)?;
    let number = socket.get().ok_or("no socket")?;
    let mut bytes = vec![0; ANSWER];
    let wait = |left: Duration| {
        let mut answered = libc::pollfd { fd: number, events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid entry.
        unsafe { libc::poll(&raw mut answered, 1, left.as_millis() as c_int + 1) };
    };
    let received = until(deadline, || passing::receive(number, &mut bytes), wait);
    let (read, came) = received.map_err(describe("no answer"))?;
    if bytes.get(..read) != Some(&LATER[..]) {
        bytes.truncate(read);
        return Ok((bytes, came.unwrap_or_default()));
    }
    // A forked child of it may have the connection, which does not end with it then.
    let peer = credentials(number).and_then(|peer| OtherProcess::find(peer.pid));
    loop {
        let slice = Instant::now() + LOOK;
        match until(slice, || passing::receive(number, &mut bytes), wait) {
            Ok((read @ 1.., came)) => {
                bytes.truncate(read);
                return Ok((bytes, came.unwrap_or_default()));
            }
            Err(error)
                if error.kind() == io::ErrorKind::WouldBlock
                    && !lifecycle::is_exiting()
                    && !peer.as_ref().is_none_or(OtherProcess::has_ended) => {}
            Ok((0, _)) | Err(_) => return Ok((LATER.to_vec(), Vec::new())),
        }
    }
}

fn describe(what: &'static str) -> impl Fn(io::Error) -> String {
    move |error| format!("{what}: {error}")
}

/// Connects to the process that listens at a name, and sends it a message.
fn connect_and_say(deadline: Instant, name: &Name, message: &[u8; QUESTION]) -> Result<Held, String> {
    let socket = socket(libc::SOCK_NONBLOCK).map_err(describe("no socket"))?;
    let number = socket.get().ok_or("no socket")?;
    let (address, length) = address_of(name);
    // SAFETY: an address of the given length.
    let connect = || unsafe { ok(libc::connect(number, (&raw const address).cast(), length)) };
    // Others are in the queue before this one.
    let connected = until(deadline, connect, |_| threads::sleep(Duration::from_millis(1)));
    connected
        .map_err(describe("the process that shares it is not there, or in another network namespace"))?;
    if !is_own_users(number) {
        return Err("the process that shares it is another user's".to_owned());
    }
    passing::send(number, message, &[]).map_err(describe("the question"))?;
    Ok(socket)
}

/// Makes a call of the system until it does not have to wait, or until the deadline. `wait` is told the time that is left.
fn until<T>(
    deadline: Instant,
    mut call: impl FnMut() -> io::Result<T>,
    wait: impl Fn(Duration),
) -> io::Result<T> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match call() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !left.is_zero() => wait(left),
            Err(error) if error.kind() == io::ErrorKind::Interrupted && !left.is_zero() => {}
            done => return done,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
