//! What one process has: contexts, streams, memory, captures.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crate::config::Config;
use crate::pool::{Node, Pool};
use crate::stream::{Point, Queue, Work};
use crate::world::{BLOCK, Way, Why, World};

pub(crate) const SUCCESS: i32 = 0;
pub(crate) const INVALID_VALUE: i32 = 1;
pub(crate) const NOT_SUPPORTED: i32 = 801;
pub(crate) const OUT_OF_MEMORY: i32 = 2;
pub(crate) const NOT_INITIALIZED: i32 = 3;
pub(crate) const INVALID_DEVICE: i32 = 101;
pub(crate) const INVALID_CONTEXT: i32 = 201;
pub(crate) const INVALID_HANDLE: i32 = 400;
pub(crate) const NOT_FOUND: i32 = 500;
pub(crate) const NOT_READY: i32 = 600;
pub(crate) const ILLEGAL_ADDRESS: i32 = 700;
pub(crate) const CAPTURE_UNSUPPORTED: i32 = 900;
pub(crate) const CAPTURE_INVALIDATED: i32 = 901;
pub(crate) const CAPTURE_UNMATCHED: i32 = 903;
pub(crate) const CAPTURE_IMPLICIT: i32 = 906;

/// Why a call fails.
pub(crate) type Failure = i32;

/// An allocation.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) base: u64,
    pub(crate) gpu: usize,
    pub(crate) blocks: Vec<u32>,
    pub(crate) managed: bool,
}

/// A stream or a default stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) queue: Arc<Queue>,
    pub(crate) context: usize,
    /// It does not wait for the legacy stream.
    pub(crate) non_blocking: bool,
    capture: Mutex<Option<Capture>>,
}

#[derive(Default)]
struct Capture {
    works: Vec<Work>,
    nodes: Vec<Node>,
    broken: bool,
}

impl std::fmt::Debug for Capture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Capture").field("works", &self.works.len()).field("broken", &self.broken).finish()
    }
}

/// A captured graph.
pub(crate) struct Graph {
    pub(crate) works: Vec<Work>,
    /// What it allocates.
    pub(crate) nodes: Vec<Node>,
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graph").field("works", &self.works.len()).field("nodes", &self.nodes).finish()
    }
}

/// A context.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) gpu: usize,
    pub(crate) retained: u32,
    pub(crate) legacy: Arc<Stream>,
}

#[derive(Debug, Default)]
pub(crate) struct Tables {
    pub(crate) contexts: HashMap<usize, Context>,
    pub(crate) primary: HashMap<usize, usize>,
    pub(crate) streams: HashMap<usize, Arc<Stream>>,
    pub(crate) events: HashMap<usize, Option<Point>>,
    pub(crate) modules: HashMap<usize, Vec<String>>,
    pub(crate) functions: HashMap<usize, String>,
    pub(crate) graphs: HashMap<usize, Arc<Graph>>,
    pub(crate) memory: BTreeMap<u64, Arc<Allocation>>,
    /// Physical memory that is mapped: where, how much, which.
    pub(crate) mappings: Vec<(u64, u64, u64)>,
    /// Physical memory without a handle: it lives while it is mapped.
    pub(crate) released: std::collections::HashSet<u64>,
    pub(crate) pool: Pool,
}

/// The process.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) world: World,
    tables: Mutex<Tables>,
    next_handle: AtomicU64,
    next_address: AtomicU64,
    /// An error that a kernel left behind.
    sticky: AtomicI32,
}

static PROCESS: OnceLock<Result<Process, Failure>> = OnceLock::new();

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    static RELAXED: Cell<i32> = const { Cell::new(0) };
    static PER_THREAD: std::cell::RefCell<HashMap<usize, Arc<Stream>>> = std::cell::RefCell::default();
}

/// Initialises the process, once.
pub(crate) fn init() -> Result<(), Failure> {
    let process = PROCESS.get_or_init(|| {
        let world = World::open(Config::from_env()).map_err(|error| {
            eprintln!("nvsim: {error}");
            100
        })?;
        Ok(Process {
            world,
            tables: Mutex::default(),
            next_handle: AtomicU64::new(0x1000),
            // Addresses differ between processes, as they would.
            next_address: AtomicU64::new(
                0x7000_0000_0000 + u64::from(std::process::id()) * (1 << 30) * 64 % (1 << 40),
            ),
            sticky: AtomicI32::new(0),
        })
    });
    process.as_ref().map(|_| ()).map_err(|&failure| failure)
}

/// The process, initialised.
pub(crate) fn get() -> Result<&'static Process, Failure> {
    PROCESS.get().ok_or(NOT_INITIALIZED)?.as_ref().map_err(|&failure| failure)
}

pub(crate) fn current_context() -> usize {
    CURRENT.with(Cell::get)
}

pub(crate) fn set_current_context(context: usize) {
    CURRENT.with(|current| current.set(context));
}

/// Exchanges the thread's capture mode.
pub(crate) fn exchange_mode(mode: i32) -> i32 {
    RELAXED.with(|current| current.replace(mode))
}

impl Process {
    pub(crate) fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn handle(&self) -> usize {
        self.next_handle.fetch_add(16, Ordering::Relaxed) as usize
    }

    pub(crate) fn sticky(&self) -> Result<(), Failure> {
        match self.sticky.load(Ordering::Relaxed) {
            0 => Ok(()),
            failure => Err(failure),
        }
    }

    /// The card behind a device that the process sees.
    pub(crate) fn gpu_of(&self, device: i32) -> Result<usize, Failure> {
        let index = usize::try_from(device).map_err(|_| INVALID_DEVICE)?;
        self.world.config().visible.get(index).copied().ok_or(INVALID_DEVICE)
    }

    /// The device that a card is to the process.
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
        self.tables().contexts.get(&current_context()).map(|context| context.gpu).ok_or(INVALID_CONTEXT)
    }

    /// The card of a stream's context.
    pub(crate) fn gpu_of_stream(&self, stream: &Stream) -> Result<usize, Failure> {
        self.tables().contexts.get(&stream.context).map(|context| context.gpu).ok_or(INVALID_CONTEXT)
    }

    pub(crate) fn new_stream(&self, context: usize, non_blocking: bool) -> Arc<Stream> {
        Arc::new(Stream { queue: Arc::default(), context, non_blocking, capture: Mutex::new(None) })
    }

    /// The stream of a handle; `per_thread` says what the null handle means.
    pub(crate) fn stream(&self, handle: usize, per_thread: bool) -> Result<Arc<Stream>, Failure> {
        let context = current_context();
        match handle {
            0 | 1 if handle == 1 || !per_thread => {
                self.tables().contexts.get(&context).map(|c| Arc::clone(&c.legacy)).ok_or(INVALID_CONTEXT)
            }
            0 | 2 => PER_THREAD.with(|streams| {
                let mut streams = streams.borrow_mut();
                let stream = streams.entry(context).or_insert_with(|| {
                    let stream = self.new_stream(context, false);
                    let handle = self.handle();
                    self.tables().streams.insert(handle, Arc::clone(&stream));
                    stream
                });
                Ok(Arc::clone(stream))
            }),
            _ => self.tables().streams.get(&handle).cloned().ok_or(INVALID_HANDLE),
        }
    }

    /// Submits work to a stream, or records it where the stream is capturing.
    pub(crate) fn submit(&self, stream: &Arc<Stream>, work: Work) -> Result<Option<Point>, Failure> {
        self.sticky()?;
        if let Some(capture) = &mut *stream.capture() {
            capture.works.push(work);
            return Ok(None);
        }
        let tables = self.tables();
        let context = tables.contexts.get(&stream.context).ok_or(INVALID_CONTEXT)?;
        let legacy = Arc::clone(&context.legacy);
        let is_legacy = Arc::ptr_eq(&legacy, stream);
        let blocking: Vec<Arc<Stream>> = tables
            .streams
            .values()
            .filter(|other| other.context == stream.context && !other.non_blocking)
            .cloned()
            .collect();
        drop(tables);
        let after = if is_legacy {
            if blocking.iter().any(|other| other.is_capturing()) {
                blocking.iter().for_each(|other| other.break_capture());
                return Err(CAPTURE_IMPLICIT);
            }
            blocking.iter().map(|other| other.queue.end()).collect()
        } else if stream.non_blocking {
            Vec::new()
        } else {
            vec![legacy.queue.end()]
        };
        Ok(Some(stream.queue.submit(Some(work), after)))
    }

    /// What a call does to open captures that must not be made beside one: in the default mode it breaks them.
    pub(crate) fn unsafe_call(&self) -> Result<(), Failure> {
        if RELAXED.with(Cell::get) == 2 {
            return Ok(());
        }
        self.break_captures(|_| true)
    }

    /// Breaks the captures of a context, or of those streams; an error if there was one.
    pub(crate) fn break_captures(&self, which: impl Fn(&Stream) -> bool) -> Result<(), Failure> {
        let streams: Vec<Arc<Stream>> =
            self.tables().streams.values().filter(|s| which(s)).cloned().collect();
        let broken = streams
            .iter()
            .filter(|stream| stream.is_capturing())
            .map(|stream| stream.break_capture())
            .count();
        if broken > 0 { Err(CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// Makes an allocation on the current card.
    pub(crate) fn allocate(&self, size: u64, managed: bool) -> Result<u64, Failure> {
        self.unsafe_call()?;
        self.allocate_on(self.current_gpu()?, size, managed)
    }

    pub(crate) fn allocate_on(&self, gpu: usize, size: u64, managed: bool) -> Result<u64, Failure> {
        if size == 0 {
            return Err(INVALID_VALUE);
        }
        let count = size.div_ceil(BLOCK);
        let blocks = self.world.allocate(gpu, count as usize, !managed).ok_or(OUT_OF_MEMORY)?;
        let base = self.next_address.fetch_add(count * BLOCK, Ordering::Relaxed);
        let allocation = Allocation { base, gpu, blocks, managed };
        self.tables().memory.insert(base, Arc::new(allocation));
        Ok(base)
    }

    /// Addresses for a mapping.
    pub(crate) fn reserve(&self, size: u64) -> u64 {
        self.next_address.fetch_add(size.next_multiple_of(BLOCK), Ordering::Relaxed)
    }

    /// Frees physical memory that has neither a handle nor a mapping.
    pub(crate) fn free_physical(&self, handle: u64) -> Result<(), Failure> {
        let mut tables = self.tables();
        let mapped = tables.mappings.iter().any(|&(_, _, of)| of == handle);
        if mapped || !tables.released.remove(&handle) {
            return Ok(());
        }
        drop(tables);
        self.free(handle)
    }

    pub(crate) fn free(&self, base: u64) -> Result<(), Failure> {
        if !self.tables().memory.contains_key(&base) {
            return Err(INVALID_VALUE);
        }
        // Freeing waits for the work that may use it, as the driver's does.
        self.synchronize(|_| true);
        let allocation = self.tables().memory.remove(&base).ok_or(INVALID_VALUE)?;
        self.world.free(allocation.gpu, &allocation.blocks);
        Ok(())
    }

    /// The allocation that an address lies in, if the range does too.
    pub(crate) fn find(&self, address: u64, bytes: u64) -> Result<Arc<Allocation>, Failure> {
        let tables = self.tables();
        let (_, allocation) = tables.memory.range(..=address).next_back().ok_or(INVALID_VALUE)?;
        let end = allocation.base + allocation.blocks.len() as u64 * BLOCK;
        if address.checked_add(bytes).is_none_or(|after| after > end) {
            return Err(INVALID_VALUE);
        }
        Ok(Arc::clone(allocation))
    }

    /// Waits for streams.
    pub(crate) fn synchronize(&self, which: impl Fn(&Stream) -> bool) {
        let tables = self.tables();
        let legacy = tables.contexts.values().map(|context| &context.legacy);
        let points: Vec<Point> =
            tables.streams.values().chain(legacy).filter(|s| which(s)).map(|s| s.queue.end()).collect();
        drop(tables);
        points.iter().for_each(Point::wait);
    }

    /// Looks at each block of a range on the card, bringing it there by faults if need be. `look` gets the bytes
    /// of the store and where in the range the block begins.
    pub(crate) fn touch(&self, address: u64, bytes: u64, mut look: impl FnMut(&mut [u8], u64)) {
        let Ok(allocation) = self.find(address, bytes) else {
            self.sticky.store(ILLEGAL_ADDRESS, Ordering::Relaxed);
            return;
        };
        let world = &self.world;
        let first = (address - allocation.base) / BLOCK;
        let last = (address - allocation.base + bytes.max(1) - 1) / BLOCK;
        let mut owed = Duration::ZERO;
        for index in first..=last {
            let block = allocation.blocks[index as usize];
            loop {
                let Some(took) = world.bring(allocation.gpu, block, Why::Touch) else {
                    self.sticky.store(OUT_OF_MEMORY, Ordering::Relaxed);
                    return;
                };
                owed += took;
                let start = allocation.base + index * BLOCK;
                if world.with_device_bytes(allocation.gpu, block, |bytes| look(bytes, start)).is_some() {
                    break;
                }
            }
            if owed > Duration::from_millis(4) {
                world.transfer(allocation.gpu, Way::ToDevice, std::mem::take(&mut owed));
            }
        }
        world.transfer(allocation.gpu, Way::ToDevice, owed);
    }

    /// Moves a range in bulk. Blocks for its length, as the driver does.
    pub(crate) fn prefetch(&self, address: u64, bytes: u64, way: Way) -> Result<(), Failure> {
        self.unsafe_call()?;
        let allocation = self.find(address, bytes)?;
        if !allocation.managed {
            return Err(INVALID_VALUE);
        }
        let first = (address - allocation.base) / BLOCK;
        let last = (address - allocation.base + bytes.max(1) - 1) / BLOCK;
        let mut owed = Duration::ZERO;
        for index in first..=last {
            let block = allocation.blocks[index as usize];
            owed += match way {
                Way::ToDevice => {
                    self.world.bring(allocation.gpu, block, Why::Prefetch).ok_or(OUT_OF_MEMORY)?
                }
                Way::ToHost => self.world.evict(allocation.gpu, block),
            };
            if owed > Duration::from_millis(4) {
                self.world.transfer(allocation.gpu, way, std::mem::take(&mut owed));
            }
        }
        self.world.transfer(allocation.gpu, way, owed);
        Ok(())
    }
}

impl Stream {
    fn capture(&self) -> MutexGuard<'_, Option<Capture>> {
        self.capture.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_capturing(&self) -> bool {
        self.capture().is_some()
    }

    pub(crate) fn break_capture(&self) {
        if let Some(capture) = &mut *self.capture() {
            capture.broken = true;
        }
    }

    pub(crate) fn begin_capture(&self) -> Result<(), Failure> {
        let mut capture = self.capture();
        if capture.is_some() {
            return Err(INVALID_VALUE);
        }
        *capture = Some(Capture::default());
        Ok(())
    }

    /// Records an allocation. False: the stream does not capture.
    pub(crate) fn record_node(&self, node: Node) -> bool {
        let mut capture = self.capture();
        capture.as_mut().map(|capture| capture.nodes.push(node)).is_some()
    }

    pub(crate) fn end_capture(&self) -> Result<Graph, Failure> {
        let capture = self.capture().take().ok_or(CAPTURE_UNMATCHED)?;
        if capture.broken {
            Err(CAPTURE_INVALIDATED)
        } else {
            Ok(Graph { works: capture.works, nodes: capture.nodes })
        }
    }
}
