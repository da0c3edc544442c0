//! The process: its objects, and the state of each of its threads.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::config::Config;
use crate::exit;
use crate::handles;
use crate::objects::Stream;
use crate::stream::unique;
use crate::tables::Tables;
use crate::world::World;

pub(crate) const SUCCESS: i32 = 0;
pub(crate) const INVALID_VALUE: i32 = 1;
pub(crate) const OUT_OF_MEMORY: i32 = 2;
pub(crate) const NOT_INITIALIZED: i32 = 3;
pub(crate) const DEINITIALIZED: i32 = 4;
pub(crate) const INVALID_DEVICE: i32 = 101;
pub(crate) const INVALID_CONTEXT: i32 = 201;
pub(crate) const ECC_UNCORRECTABLE: i32 = 214;
pub(crate) const UNSUPPORTED_LIMIT: i32 = 215;
pub(crate) const PEER_UNSUPPORTED: i32 = 217;
pub(crate) const OPERATING_SYSTEM: i32 = 304;
pub(crate) const ILLEGAL_STATE: i32 = 401;
pub(crate) const JIT_DISABLED: i32 = 223;
pub(crate) const INVALID_HANDLE: i32 = 400;
pub(crate) const NOT_FOUND: i32 = 500;
pub(crate) const NOT_READY: i32 = 600;
pub(crate) const ILLEGAL_ADDRESS: i32 = 700;
pub(crate) const PEER_ALREADY_ENABLED: i32 = 704;
pub(crate) const PEER_NOT_ENABLED: i32 = 705;
pub(crate) const CONTEXT_IS_DESTROYED: i32 = 709;
pub(crate) const HOST_ALREADY_REGISTERED: i32 = 712;
pub(crate) const HOST_NOT_REGISTERED: i32 = 713;
pub(crate) const NOT_PERMITTED: i32 = 800;
pub(crate) const NOT_SUPPORTED: i32 = 801;
pub(crate) const CAPTURE_UNSUPPORTED: i32 = 900;
pub(crate) const CAPTURE_INVALIDATED: i32 = 901;
pub(crate) const CAPTURE_MERGE: i32 = 902;
pub(crate) const CAPTURE_UNMATCHED: i32 = 903;
pub(crate) const CAPTURE_UNJOINED: i32 = 904;
pub(crate) const CAPTURE_ISOLATION: i32 = 905;
pub(crate) const CAPTURE_IMPLICIT: i32 = 906;
pub(crate) const CAPTURED_EVENT: i32 = 907;
pub(crate) const CAPTURE_WRONG_THREAD: i32 = 908;
pub(crate) const GRAPH_UPDATE_FAILURE: i32 = 910;
pub(crate) const UNKNOWN: i32 = 999;

/// Why a call fails.
pub(crate) type Failure = i32;

/// The process.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) world: World,
    tables: Mutex<Tables>,
    next_address: AtomicU64,
    /// The error that a failed kernel left behind.
    sticky: AtomicI32,
    /// Held by a thread that waits for all work so that page-locked memory ends. Threads that create something wait for it (measured
    /// on an H200: `tests/gpu/probes/unregister_probe.py`).
    creation: Mutex<()>,
}

static PROCESS: OnceLock<Result<Process, Failure>> = OnceLock::new();
/// This is a child of the process that initialised the driver; the driver cannot be used here.
static FORKED: AtomicBool = AtomicBool::new(false);

/// A context on a thread's stack.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bound {
    pub(crate) handle: usize,
    /// The number of the context: several contexts may have had its handle.
    pub(crate) context: u64,
}

/// A thread's own default streams, by context. They end with the thread.
#[derive(Debug, Default)]
struct OwnStreams(HashMap<u64, Arc<Stream>>);

impl Drop for OwnStreams {
    fn drop(&mut self) {
        if let Ok(p) = get() {
            let mut tables = p.tables();
            self.0.values().for_each(|stream| tables.end_stream(stream));
        }
    }
}

thread_local! {
    // Without a destructor, since exit handlers still look at it: a thread's other values have ended by then.
    static STACK: RefCell<ManuallyDrop<Vec<Bound>>> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
    static MODE: Cell<i32> = const { Cell::new(0) };
    static OWN: RefCell<OwnStreams> = RefCell::default();
    static THREAD: u64 = unique();
}

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Initialises the process, once.
pub(crate) fn init() -> Result<(), Failure> {
    let process = PROCESS.get_or_init(|| {
        let config = Config::from_env();
        handles::configure(&config);
        let world = World::open(config).map_err(|error| {
            eprintln!("nvsim: {error}");
            100
        })?;
        // SAFETY: the function only stores a word.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        exit::watch();
        Ok(Process {
            world,
            tables: Mutex::new(Tables::default()),
            // Addresses differ between processes, as with the driver.
            next_address: AtomicU64::new(
                0x7000_0000_0000 + u64::from(std::process::id()) * (1 << 30) * 64 % (1 << 40),
            ),
            sticky: AtomicI32::new(0),
            creation: Mutex::new(()),
        })
    });
    process.as_ref().map_err(|&failure| failure)?;
    get().map(|_| ())
}

/// Whether this is a child of the process that initialised the driver.
pub(crate) fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// The process, initialised.
pub(crate) fn get() -> Result<&'static Process, Failure> {
    if is_forked() {
        return Err(NOT_INITIALIZED);
    }
    PROCESS.get().ok_or(NOT_INITIALIZED)?.as_ref().map_err(|&failure| failure)
}

/// Calls that ask nothing of a card, or name the card themselves.
const OF_NO_CARD: &[&str] = &[
    "cuInit",
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSetCurrent",
    "cuMemCreate",
    "cuThreadExchangeStreamCaptureMode",
];

/// An entry point is called in the thread's current context. An error: its card is lost.
pub(crate) fn look_at_card(call: &str) -> Result<(), Failure> {
    let Ok(p) = get() else { return Ok(()) };
    if p.world.config().lost.is_none()
        || OF_NO_CARD.contains(&call)
        || call.starts_with("cuDeviceGet")
        || call.starts_with("nvsim")
    {
        return Ok(());
    }
    // A process is taken off all cards by a thread of any context.
    let gpu = if call.starts_with("cuCheckpoint") { Ok(0) } else { p.current_gpu() };
    gpu.map_or(Ok(()), |gpu| p.lives(gpu, call))
}

/// The number of the calling thread, which is never used again.
pub(crate) fn this_thread() -> u64 {
    THREAD.with(|thread| *thread)
}

/// The calling thread's capture mode.
pub(crate) fn mode() -> i32 {
    MODE.with(Cell::get)
}

/// Exchanges the thread's capture mode.
pub(crate) fn exchange_mode(mode: i32) -> i32 {
    MODE.with(|current| current.replace(mode))
}

/// The context that is current in the calling thread.
pub(crate) fn bound() -> Option<Bound> {
    STACK.with(|stack| stack.borrow().last().copied())
}

/// Pushes a context onto the thread's stack.
pub(crate) fn push(bound: Bound) {
    STACK.with(|stack| stack.borrow_mut().push(bound));
}

/// Pops the topmost context of the thread's stack.
pub(crate) fn pop() -> Option<Bound> {
    STACK.with(|stack| stack.borrow_mut().pop())
}

/// The calling thread's own default stream in a context.
pub(crate) fn own_stream(context: u64, new: impl FnOnce() -> Arc<Stream>) -> Arc<Stream> {
    let mut new = Some(new);
    let mut make = || (new.take().expect("one stream"))();
    // In an exit handler the thread's streams have ended.
    OWN.try_with(|own| Arc::clone(own.borrow_mut().0.entry(context).or_insert_with(&mut make)))
        .unwrap_or_else(|_| make())
}

impl Process {
    /// No other thread creates anything, and none ends page-locked memory, while the result lives.
    pub(crate) fn creation(&self) -> MutexGuard<'_, ()> {
        self.creation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn sticky(&self) -> Result<(), Failure> {
        match self.sticky.load(Ordering::Relaxed) {
            0 => Ok(()),
            failure => Err(failure),
        }
    }

    /// An error: the card is lost, and the call answers so.
    pub(crate) fn lives(&self, gpu: usize, call: &str) -> Result<(), Failure> {
        self.world.config().lost(self.world.card(gpu), call).map_or(Ok(()), Err)
    }

    /// A kernel failed: every call from now on returns this error.
    pub(crate) fn stick(&self, failure: Failure) {
        self.sticky.store(failure, Ordering::Relaxed);
    }

    /// The card behind a device that the process sees.
    pub(crate) fn gpu_of(&self, device: i32) -> Result<usize, Failure> {
        let index = usize::try_from(device).map_err(|_| INVALID_DEVICE)?;
        self.world.config().visible.get(index).copied().ok_or(INVALID_DEVICE)
    }

    /// The device number that a card has in this process.
    pub(crate) fn ordinal_of(&self, gpu: usize) -> i32 {
        self.world
            .config()
            .visible
            .iter()
            .position(|&visible| visible == gpu)
            .map_or(-1, |index| index as i32)
    }

    /// The current context's card.
    pub(crate) fn current_gpu(&self) -> Result<usize, Failure> {
        Ok(self.tables().current()?.gpu)
    }

    /// Addresses that were never used before.
    pub(crate) fn new_addresses(&self, bytes: u64) -> u64 {
        self.next_address.fetch_add(bytes, Ordering::Relaxed)
    }
}
