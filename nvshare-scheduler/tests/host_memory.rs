//! Memory of the host that clients get: who gave a segment back can neither read nor change what others get, and what clients
//! have is counted, whatever they say and do.

#![allow(unsafe_code, reason = "clients map segments")]

mod support;

use std::ffi::c_void;
use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nvshare_core::Config;
use nvshare_proto::codec::{decode, encode};
use nvshare_proto::units::MIB;
use nvshare_proto::{
    ClientMessage, GpuUuid, HostSegment, MAX_SEGMENTS, Register, Reply, Request, SchedulerMessage, Usage,
};
use nvshare_scheduler::host_memory::Budget;
use rustix::fs::{SealFlags, fcntl_add_seals, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use support::{Server, newcomer};

const ALL: u64 = 64 * MIB;
/// How long something may take that has to happen.
const PATIENCE: Duration = Duration::from_secs(30);

struct Client {
    stream: UnixStream,
    buffer: Vec<u8>,
    /// The bytes that others lack, as it was told.
    short: Vec<u64>,
}

/// The usage of a client with `allocated` bytes of a GPU's memory, of which `immovable` are not moved.
fn usage(allocated: u64, immovable: u64) -> Usage {
    Usage { gpu: GpuUuid([9; 16]), total: 16 << 30, limit: 0, allocated, absent: allocated, immovable }
}

impl Client {
    /// One that may need all of the budget.
    fn new(socket: &Path) -> Self {
        Self::with(socket, vec![usage(ALL, 0)])
    }

    fn with(socket: &Path, usage: Vec<Usage>) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut client = Self { stream, buffer: Vec::new(), short: Vec::new() };
        client.send(&Request::Register(Register { usage, ..newcomer() }));
        client
    }

    fn send(&mut self, request: &Request) {
        self.stream.write_all(&encode(request).unwrap()).unwrap();
    }

    fn say(&mut self, message: ClientMessage) {
        self.send(&Request::Client(message));
    }

    /// Asks for memory of the host, and returns the answer.
    fn ask(&mut self, bytes: u64) -> Vec<(HostSegment, OwnedFd)> {
        self.say(ClientMessage::HostWanted { bytes });
        let (segments, passed) = self.until(|message| match message {
            SchedulerMessage::HostMemory { offered, segments } => {
                assert!(offered);
                Some(segments)
            }
            _ => None,
        });
        assert_eq!(segments.len(), passed.len(), "{segments:?} {passed:?}");
        segments.into_iter().zip(passed).collect()
    }

    /// Reads until a message that it waits for. Returns what that is, and the last descriptors that came.
    fn until<T>(&mut self, find: impl Fn(SchedulerMessage) -> Option<T>) -> (T, Vec<OwnedFd>) {
        let mut passed = Vec::new();
        loop {
            while let Some((used, reply)) = decode::<Reply>(&self.buffer).unwrap() {
                self.buffer.drain(..used);
                let Reply::Client(message) = reply else { continue };
                if let SchedulerMessage::HostShort { bytes } = message {
                    self.short.push(bytes);
                }
                if let Some(found) = find(message) {
                    return (found, passed);
                }
            }
            let mut bytes = [0; 512];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_SEGMENTS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let read = recvmsg(&self.stream, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
            assert!(read.bytes > 0, "the scheduler has hung up");
            for message in control.drain() {
                // The quota's page comes in a frame of its own, before any answer.
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    passed = rights.collect();
                }
            }
            self.buffer.extend_from_slice(&bytes[..read.bytes]);
        }
    }

    /// Waits until it is told that others lack memory of the host.
    fn until_short(&mut self) -> u64 {
        self.until(|m| if let SchedulerMessage::HostShort { bytes } = m { Some(bytes) } else { None }).0
    }

    /// Asks until it has this number of bytes: memory that others gave back comes piece by piece.
    fn ask_until(&mut self, bytes: u64) -> Vec<(HostSegment, OwnedFd)> {
        let deadline = Instant::now() + PATIENCE;
        let mut has = Vec::new();
        loop {
            has.append(&mut self.ask(bytes - sum(&has)));
            if sum(&has) == bytes {
                return has;
            }
            assert!(Instant::now() < deadline, "no more than {} bytes came back", sum(&has));
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

fn sum(lot: &[(HostSegment, OwnedFd)]) -> u64 {
    lot.iter().map(|(segment, _)| segment.bytes).sum()
}

/// A segment that is mapped.
struct Mapping(*mut c_void, usize);

impl Mapping {
    fn new((segment, file): &(HostSegment, OwnedFd)) -> Self {
        let (length, rights) = (segment.bytes as usize, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping, wherever the kernel puts it.
        Self(
            unsafe { mmap(std::ptr::null_mut(), length, rights, MapFlags::SHARED, file, 0).unwrap() },
            length,
        )
    }

    fn fill(&mut self, byte: u8) {
        // SAFETY: the mapping's own bytes.
        unsafe { self.0.cast::<u8>().write_bytes(byte, self.1) };
    }

    fn has_only(&self, byte: u8) -> bool {
        // SAFETY: the mapping's own bytes, which nobody writes meanwhile.
        unsafe { std::slice::from_raw_parts(self.0.cast::<u8>(), self.1) }.iter().all(|found| *found == byte)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is not used any more.
        unsafe { munmap(self.0, self.1).unwrap() };
    }
}

/// Runs a test's clients beside a scheduler with 64 MiB for them.
async fn beside(test: &str, config: Config, clients: impl FnOnce(PathBuf) + Send + 'static) {
    let server = Server::start_with(test, config, Some(Budget { all: ALL, each: ALL }));
    let socket = server.clients.clone();
    tokio::task::spawn_blocking(move || clients(socket)).await.unwrap();
    server.end().await;
}

#[tokio::test]
async fn who_gave_a_segment_back_neither_reads_nor_changes_what_others_get() {
    beside("isolation", Config::default(), |socket| {
        let (mut hostile, mut other) = (Client::new(&socket), Client::new(&socket));
        let had = hostile.ask(ALL);
        assert_eq!(sum(&had), ALL);
        let mut kept: Vec<Mapping> = had.iter().map(Mapping::new).collect();
        kept.iter_mut().for_each(|mapping| mapping.fill(7));
        for (segment, _) in &had {
            hostile.say(ClientMessage::HostBack { segment: segment.number });
        }
        // The scheduler has heard all of it when it answers this; what is mapped is not free.
        assert_eq!(sum(&hostile.ask(ALL)), 0, "it says that it gave back what it uses");
        assert_eq!(sum(&other.ask(ALL)), 0);
        kept.iter_mut().for_each(|mapping| mapping.fill(8));
        drop(kept);
        let has = other.ask_until(ALL);
        for (old, file) in &had {
            assert!(has.iter().all(|(new, _)| new.number != old.number));
            assert_eq!((fstat(file).unwrap().st_size, fstat(file).unwrap().st_blocks), (0, 0));
            assert!(rustix::io::pwrite(file, &[9], 0).is_err(), "it can be filled again");
        }
        for segment in &has {
            let mut mapping = Mapping::new(segment);
            assert!(mapping.has_only(0));
            mapping.fill(1);
            assert_eq!(rustix::io::pread(&had[0].1, &mut [0; 16], 0).unwrap(), 0);
            assert!(mapping.has_only(1));
        }
    })
    .await;
}

#[tokio::test]
async fn a_client_cannot_make_its_segments_grow() {
    beside("growing", Config::default(), |socket| {
        // The client stays connected: the scheduler takes segments of a client that is gone back.
        let mut client = Client::new(&socket);
        let has = client.ask(ALL);
        assert_eq!(sum(&has), ALL);
        for (segment, file) in &has {
            assert!(rustix::fs::ftruncate(file, segment.bytes + 4096).is_err());
            assert!(rustix::io::pwrite(file, &[1], segment.bytes).is_err());
            assert_eq!(fstat(file).unwrap().st_size as u64, segment.bytes);
        }
    })
    .await;
}

#[tokio::test]
async fn what_a_client_seals_comes_back() {
    beside("seals", Config::default(), |socket| {
        let mut other = Client::new(&socket);
        for seals in [SealFlags::SHRINK, SealFlags::SEAL, SealFlags::SHRINK | SealFlags::SEAL] {
            let mut hostile = Client::new(&socket);
            let had = hostile.ask_until(ALL);
            had.iter().for_each(|(_, file)| fcntl_add_seals(file, seals).unwrap());
            assert_eq!(sum(&other.ask(ALL)), 0);
            drop(hostile);
            let has = other.ask_until(ALL);
            assert!(had.iter().all(|(_, file)| fstat(file).unwrap().st_blocks == 0), "{seals:?}");
            for (segment, file) in has {
                drop(file);
                other.say(ClientMessage::HostBack { segment: segment.number });
            }
        }
    })
    .await;
}

#[tokio::test]
async fn what_clients_have_from_an_earlier_scheduler_is_not_handed_out_again() {
    const SETTLE: Duration = Duration::from_secs(1);
    let config = Config { boot: 1 << 32, restarted: true, settle: SETTLE, ..Config::default() };
    let begin = Instant::now();
    beside("claims", config, move |socket| {
        let (mut first, mut second) = (Client::new(&socket), Client::new(&socket));
        let segments = [1, 2].map(|number| HostSegment { number, bytes: 16 * MIB });
        // Said twice, it counts once.
        first.say(ClientMessage::HostHeld { segments: segments.to_vec() });
        first.say(ClientMessage::HostHeld { segments: segments.to_vec() });
        let more = first.ask(2 * MIB);
        assert!(begin.elapsed() >= SETTLE, "others may not have said yet what they have");
        assert_eq!(sum(&more), 2 * MIB);
        assert!(more[0].0.number >= 1 << 32, "its number is one of an earlier scheduler");
        let has = second.ask(ALL);
        assert_eq!(sum(&has), ALL - 34 * MIB);
        first.say(ClientMessage::HostBack { segment: 1 });
        assert_eq!(sum(&first.ask(ALL)), 16 * MIB);
        drop((first, more));
        // The segments that it claimed are free when it is gone.
        second.ask_until(2 * MIB);
    })
    .await;
}

#[tokio::test]
async fn who_has_memory_is_told_that_others_lack_it() {
    beside("short", Config::default(), |socket| {
        let (mut first, mut second) = (Client::new(&socket), Client::new(&socket));
        let (mut none, has) = (Client::new(&socket), first.ask(ALL));
        assert!(has.len() > 1, "what is used in one of few would keep most of the budget from others");
        assert_eq!(sum(&second.ask(24 * MIB)), 0, "who asks does not wait for others");
        assert_eq!(first.until_short(), 24 * MIB);
        for (segment, file) in has {
            drop(file);
            first.say(ClientMessage::HostBack { segment: segment.number });
        }
        let _has = second.ask_until(ALL);
        // Neither who asks is told, nor who has nothing.
        assert_eq!(sum(&none.ask(ALL)), 0);
        assert!(second.until_short() >= 24 * MIB);
        assert!(none.short.is_empty() && second.short.len() == 1, "{:?} {:?}", none.short, second.short);
    })
    .await;
}

/// The largest segment is smaller, and a segment has 2 MiB at least.
#[tokio::test]
async fn what_no_scheduler_has_handed_out_is_not_taken_for_a_clients() {
    beside("invented", Config::default(), |socket| {
        let (mut liar, mut honest) = (Client::new(&socket), Client::new(&socket));
        let segments = [u64::MAX, 1, 0, 1 << 30].into_iter().zip(1..);
        let segments = segments.map(|(bytes, number)| HostSegment { number, bytes }).collect();
        liar.say(ClientMessage::HostHeld { segments });
        // The scheduler has heard it when it answers.
        liar.ask(0);
        assert_eq!(sum(&honest.ask(ALL)), ALL);
    })
    .await;
}

/// Segments that it claims count as those that it gets.
#[tokio::test]
async fn a_client_has_no_more_of_the_hosts_memory_than_can_leave_a_gpu_for_it() {
    const LARGE: u64 = 1 << 30;
    let server = Server::start_with("bounded", Config::default(), Some(Budget { all: LARGE, each: LARGE }));
    let socket = server.clients.clone();
    let clients = move || {
        // A program has a granule for none of its memory, and says what it has allocated in steps of 64 MiB.
        for (has, claims, expected) in [
            // First those that claim: later a scheduler does not hear that any more.
            (vec![usage(8 * MIB, 0)], vec![64 * MIB, 64 * MIB], 16 * MIB),
            (vec![], vec![16 * MIB], 2 * MIB),
            (vec![], vec![], 2 * MIB),
            (vec![usage(LARGE, LARGE)], vec![], 64 * MIB),
            (vec![usage(LARGE, LARGE - 8 * MIB)], vec![], 80 * MIB),
        ] {
            let mut client = Client::with(&socket, has.clone());
            let segments = claims.iter().zip(1..).map(|(&bytes, number)| HostSegment { number, bytes });
            client.say(ClientMessage::HostHeld { segments: segments.collect() });
            let mut got = Vec::new();
            loop {
                let lot = client.ask(LARGE);
                if lot.is_empty() {
                    break;
                }
                got.extend(lot);
            }
            assert_eq!(sum(&got), expected, "{has:?} {claims:?}");
            // It has more from now on.
            client.say(ClientMessage::Usage(usage(256 * MIB, 0)));
            assert!(sum(&client.ask(LARGE)) > 0);
        }
    };
    tokio::task::spawn_blocking(clients).await.unwrap();
    server.end().await;
}
