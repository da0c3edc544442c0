//! The cards, as all processes see them: one file that each process maps.
//!
//! Memory has two stores that share nothing. A block (2 MiB of a program's memory) is on the host, or on the card, or was
//! never touched; a kernel reaches the card's store alone. Moving a block copies its bytes and overwrites the bytes that it
//! leaves, so that data read from the wrong store is wrong.

mod checkpoint;
mod kernels;
mod leaving;
mod owners;
mod sharing;

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::config::Config;
pub(crate) use checkpoint::{Cards, Kind, Uuid};
pub(crate) use leaving::Leaving;
pub(crate) use owners::is_alive;

/// Bytes of a program's memory in a block.
pub(crate) const BLOCK: u64 = 2 << 20;
/// The bytes that a block leaves behind where it was.
const POISON: u8 = 0xdb;
/// Blocks that all programs on a card may have together.
const MAX_BLOCKS: usize = 64 * 1024;
const MAX_GPUS: usize = 8;
/// Processes that may have blocks on a card at a time.
const MAX_OWNERS: usize = 1024;
/// Processes that may have a block beside its owner.
const MAX_SHARERS: usize = 6;
/// The number of kernels whose times are kept.
pub(crate) const TRACE: usize = 1 << 16;

/// Where a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Place {
    Free = 0,
    Untouched = 1,
    Host = 2,
    Device = 3,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Block {
    place: Place,
    owner: u32,
    /// The frame of a block on the card.
    frame: u32,
    /// The block never leaves the card.
    pinned: u32,
    /// The block is on the host, and the driver keeps a frame for it: see [`leaving`].
    keeps: u32,
    /// The bytes that the store keeps of it.
    real: u32,
    last_use: u64,
    /// The number under which other processes may get it; 0: they may not.
    shared: u64,
    /// Other processes that have it; 0: none.
    sharers: [u32; MAX_SHARERS],
}

impl Block {
    const FREE: Self = Self {
        place: Place::Free,
        owner: 0,
        frame: 0,
        pinned: 0,
        keeps: 0,
        real: 0,
        last_use: 0,
        shared: 0,
        sharers: [0; MAX_SHARERS],
    };
}

/// A sort of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sort {
    /// It may leave the card.
    Managed,
    /// It never leaves the card.
    Plain,
    /// Plain, and the store keeps all of its bytes, as several allocations of the program may share a block.
    Whole,
}

impl Sort {
    pub(crate) fn of(managed: bool) -> Self {
        if managed { Self::Managed } else { Self::Plain }
    }
}

/// A kernel that ran.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ran {
    pub(crate) process: u32,
    pub(crate) gpu: u32,
    pub(crate) begin_ns: u64,
    pub(crate) end_ns: u64,
}

/// Memory that moved, in bytes of the programs' memory.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct Moved {
    /// Brought in because a kernel or a copy touched it.
    pub(crate) faulted: AtomicU64,
    /// First touched by a kernel or a copy.
    pub(crate) touched: AtomicU64,
    /// Pushed out because the card was full.
    pub(crate) pushed_out: AtomicU64,
    /// Moved by prefetch to the card, and to the host.
    pub(crate) restored: AtomicU64,
    pub(crate) evicted: AtomicU64,
    /// The part of it that left while a kernel of the same process ran; and a block for each kernel that began meanwhile.
    pub(crate) evicted_in_use: AtomicU64,
    /// Calls that took frames back which the driver kept for managed memory.
    pub(crate) taken_back: AtomicU64,
}

#[repr(C)]
struct Gpu {
    lock: libc::pthread_mutex_t,
    /// The kernel that runs holds this lock.
    compute: libc::pthread_mutex_t,
    frames: u32,
    clock: u64,
    /// Until when each direction of the link is busy, in ns of the monotonic clock.
    link_busy_until: [AtomicU64; 2],
    moved: Moved,
    /// No block before this one is free.
    first_free: u32,
    /// No block from here on was ever taken.
    high: u32,
    /// Blocks that only descriptors keep.
    described: u32,
    /// Processes that may have blocks; zero: none.
    owners: [u32; MAX_OWNERS],
    free_frames: u32,
    /// The free frames that are kept for blocks on the host.
    kept_frames: u32,
    frame_stack: [u32; MAX_BLOCKS],
    blocks: [Block; MAX_BLOCKS],
}

#[repr(C)]
struct Header {
    ready: AtomicU32,
    gpus: u32,
    ran: AtomicU64,
    trace: [Ran; TRACE],
    gpu: [Gpu; MAX_GPUS],
}

/// The mapped world.
#[derive(Debug)]
pub(crate) struct World {
    config: Config,
    header: *mut Header,
    device_store: *mut u8,
    host_store: *mut u8,
    real_block: usize,
    frames: usize,
    /// The state of this process, by its number of the card.
    here: [Here; MAX_GPUS],
    /// The card behind each number that this process has for a card.
    cards: [AtomicUsize; MAX_GPUS],
}

/// The work of this process on a card.
#[derive(Debug, Default)]
struct Here {
    /// A kernel runs.
    running: AtomicBool,
    /// Calls that move memory to the host now.
    leaving: AtomicU32,
    /// Bytes that this process's kernels and copies were the first to touch.
    touched: AtomicU64,
}

// SAFETY: everything behind the pointers is shared between processes, and guarded by the locks within.
unsafe impl Send for World {}
// SAFETY: as above.
unsafe impl Sync for World {}

/// The direction in which a block moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    ToDevice,
    ToHost,
}

/// Why a block is wanted on the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    Touch,
    Prefetch,
}

/// A lock of a card, held.
struct Held<'a>(&'a World, usize, bool);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let gpu = self.0.gpu(self.1);
        // SAFETY: a lock that this thread holds.
        unsafe {
            libc::pthread_mutex_unlock(if self.2 { &raw mut (*gpu).compute } else { &raw mut (*gpu).lock });
        }
    }
}

pub(crate) fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a place for the answer.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

impl World {
    /// Maps the world, making it if this process is the first. Fails beyond [`MAX_GPUS`], and where it was made with other sizes.
    pub(crate) fn open(config: Config) -> io::Result<Self> {
        if config.gpus as usize > MAX_GPUS {
            return Err(io::Error::other("more GPUs than are simulated"));
        }
        if config.sparse {
            // A huge page for each block would take all of the simulator's memory.
            // SAFETY: it sets a flag of this process.
            unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
        }
        std::fs::create_dir_all(&config.dir)?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(config.dir.join("world"))?;
        // SAFETY: a descriptor.
        unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) };
        let real_block = (BLOCK / config.scale) as usize;
        let frames = ((config.memory / BLOCK) as usize).min(MAX_BLOCKS);
        let header_bytes = size_of::<Header>().next_multiple_of(4096);
        // The file takes no more of the disk than what is written.
        let device_bytes = frames * BLOCK as usize * MAX_GPUS;
        let host_bytes = MAX_BLOCKS * real_block * MAX_GPUS;
        let length = header_bytes + device_bytes + host_bytes;
        let fresh = file.metadata()?.len() == 0;
        if fresh {
            file.set_len(length as u64)?;
        } else if file.metadata()?.len() != length as u64 {
            return Err(io::Error::other("this world was made with other sizes"));
        }
        // SAFETY: a new mapping of a file of this length.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        if config.sparse {
            // The kernel would read ahead, and fill pages with zeros, between the first pages of blocks.
            // SAFETY: advice about the mapping that has just been made.
            unsafe { libc::madvise(base, length, libc::MADV_RANDOM) };
        }
        let base = base.cast::<u8>();
        let world = Self {
            header: base.cast(),
            // SAFETY: within the mapping.
            device_store: unsafe { base.add(header_bytes) },
            // SAFETY: within the mapping.
            host_store: unsafe { base.add(header_bytes + device_bytes) },
            real_block,
            frames,
            here: Default::default(),
            cards: std::array::from_fn(AtomicUsize::new),
            config,
        };
        if fresh {
            world.make();
        }
        // The mapping would keep the file, and so the lock, for as long as it lives.
        // SAFETY: a descriptor.
        unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_UN) };
        Ok(world)
    }

    fn make(&self) {
        // SAFETY: a fresh file is zeroes, which every field but the locks takes as its beginning; no other process
        // looks before the file's lock is released.
        unsafe {
            (*self.header).gpus = self.config.gpus;
            for g in 0..MAX_GPUS {
                let gpu = self.gpu(g);
                let mut attributes = std::mem::zeroed();
                libc::pthread_mutexattr_init(&raw mut attributes);
                libc::pthread_mutexattr_setpshared(&raw mut attributes, libc::PTHREAD_PROCESS_SHARED);
                libc::pthread_mutexattr_setrobust(&raw mut attributes, libc::PTHREAD_MUTEX_ROBUST);
                libc::pthread_mutex_init(&raw mut (*gpu).lock, &raw const attributes);
                libc::pthread_mutex_init(&raw mut (*gpu).compute, &raw const attributes);
                (*gpu).frames = self.frames as u32;
                (*gpu).free_frames = self.frames as u32;
                for i in 0..self.frames {
                    (*gpu).frame_stack[i] = (self.frames - 1 - i) as u32;
                }
            }
            (*self.header).ready.store(1, Ordering::Release);
        }
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    fn gpu(&self, gpu: usize) -> *mut Gpu {
        // SAFETY: the array is part of the mapping; callers name existing cards.
        unsafe { (&raw mut (*self.header).gpu).cast::<Gpu>().add(self.card(gpu)) }
    }

    fn hold(&self, gpu: usize, compute: bool) -> Held<'_> {
        let at = self.gpu(gpu);
        // SAFETY: locks that were made with the world. One whose owner died is ours, and the state it guards is
        // whole: each change is a few plain stores.
        unsafe {
            let mutex = if compute { &raw mut (*at).compute } else { &raw mut (*at).lock };
            if libc::pthread_mutex_lock(mutex) == libc::EOWNERDEAD {
                libc::pthread_mutex_consistent(mutex);
            }
        }
        Held(self, gpu, compute)
    }

    /// The card's store of a frame.
    fn frame_bytes(&self, gpu: usize, frame: u32) -> *mut u8 {
        // SAFETY: within the mapping.
        unsafe { self.device_store.add((self.card(gpu) * self.frames + frame as usize) * BLOCK as usize) }
    }

    fn host_bytes(&self, gpu: usize, block: u32) -> *mut u8 {
        // SAFETY: within the mapping.
        unsafe { self.host_store.add((self.card(gpu) * MAX_BLOCKS + block as usize) * self.real_block) }
    }

    fn block(&self, gpu: usize, block: u32) -> *mut Block {
        // SAFETY: callers name existing blocks.
        unsafe { (&raw mut (*self.gpu(gpu)).blocks).cast::<Block>().add(block as usize) }
    }

    /// Copies a block from one store to the other and overwrites what it leaves.
    fn copy(&self, gpu: usize, block: u32, frame: u32, way: Way) {
        let (host, device) = (self.host_bytes(gpu, block), self.frame_bytes(gpu, frame));
        let (from, to) = if way == Way::ToDevice { (host, device) } else { (device, host) };
        // SAFETY: two stores of a block's size that do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(from, to, self.real_block);
            std::ptr::write_bytes(from, POISON, self.real_block);
        }
    }

    /// Takes blocks for an allocation; `None`: there are none left.
    pub(crate) fn allocate(&self, gpu: usize, count: usize, sort: Sort) -> Option<Vec<u32>> {
        let pinned = sort != Sort::Managed;
        let real = if sort == Sort::Whole { BLOCK as usize } else { self.real_block } as u32;
        self.reap(gpu);
        let held = self.hold(gpu, false);
        let me = std::process::id();
        self.own(gpu, me)?;
        let at = self.gpu(gpu);
        let mut found = Vec::with_capacity(count);
        // SAFETY: the card's fields and existing blocks, under its lock.
        unsafe {
            let mut index = (*at).first_free;
            while found.len() < count && (index as usize) < MAX_BLOCKS {
                if index >= (*at).high || (*self.block(gpu, index)).place == Place::Free {
                    found.push(index);
                }
                index += 1;
            }
            if found.len() < count {
                return None;
            }
            (*at).high = (*at).high.max(index);
        }
        for &index in &found {
            let block =
                Block { place: Place::Untouched, owner: me, pinned: u32::from(pinned), real, ..Block::FREE };
            // SAFETY: an existing block, under the card's lock.
            unsafe { *self.block(gpu, index) = block };
        }
        if let Some(&last) = found.last() {
            // SAFETY: the card's field, under its lock.
            unsafe { (*at).first_free = last + 1 };
        }
        drop(held);
        if pinned {
            self.take_back(gpu, count);
            for &index in &found {
                if self.bring(gpu, index, Why::Prefetch).is_none() {
                    self.free(gpu, &found);
                    return None;
                }
            }
        }
        Some(found)
    }

    /// Gives this process's part in blocks back. A block that other processes have lives on.
    pub(crate) fn free(&self, gpu: usize, blocks: &[u32]) {
        let _held = self.hold(gpu, false);
        let me = std::process::id();
        for &index in blocks {
            self.leave(gpu, index, me);
        }
    }

    /// Under the card's lock.
    fn free_block(&self, gpu: usize, index: u32) {
        // SAFETY: an existing block, under the card's lock.
        unsafe {
            let block = self.block(gpu, index);
            match (*block).place {
                // The bytes that the block left on the host were overwritten when it left.
                Place::Device => self.release_frame(gpu, (*block).frame),
                Place::Host => std::ptr::write_bytes(self.host_bytes(gpu, index), POISON, self.real_block),
                Place::Untouched | Place::Free => {}
            }
            self.keep_no_more(gpu, index);
            (*self.gpu(gpu)).first_free = (*self.gpu(gpu)).first_free.min(index);
            *block = Block::FREE;
        }
    }

    /// Under the card's lock.
    fn release_frame(&self, gpu: usize, frame: u32) {
        let at = self.gpu(gpu);
        // SAFETY: the stack has room for every frame, under the card's lock.
        unsafe {
            (*at).frame_stack[(*at).free_frames as usize] = frame;
            (*at).free_frames += 1;
        }
    }

    /// Brings a block to the card. Returns the time that its bytes take on the way; `None`: the card is full of memory that
    /// cannot leave.
    pub(crate) fn bring(&self, gpu: usize, index: u32, why: Why) -> Option<Duration> {
        let held = self.hold(gpu, false);
        let at = self.gpu(gpu);
        let mut took = 0.0;
        // SAFETY: an existing block and the card's fields, under its lock.
        unsafe {
            (*at).clock += 1;
            let block = self.block(gpu, index);
            (*block).last_use = (*at).clock;
            if (*block).place == Place::Device {
                return Some(Duration::ZERO);
            }
            if (*at).free_frames == 0 {
                self.reap_held(gpu);
            }
            if (*at).free_frames == 0 {
                self.push_out(gpu)?;
                took += BLOCK as f64 / self.config.to_host;
            }
            (*at).free_frames -= 1;
            let frame = (*at).frame_stack[(*at).free_frames as usize];
            self.keep_no_more(gpu, index);
            self.keep_no_more_than_free(gpu);
            let counted = match ((*block).place, why) {
                (Place::Host, Why::Touch) => {
                    self.copy(gpu, index, frame, Way::ToDevice);
                    took += BLOCK as f64 / self.config.fault;
                    &(*at).moved.faulted
                }
                (Place::Host, Why::Prefetch) => {
                    self.copy(gpu, index, frame, Way::ToDevice);
                    took += BLOCK as f64 / self.config.to_device;
                    &(*at).moved.restored
                }
                (_, why) => {
                    std::ptr::write_bytes(self.frame_bytes(gpu, frame), 0, (*block).real as usize);
                    if why == Why::Touch {
                        took += BLOCK as f64 / self.config.first_touch;
                    }
                    &(*at).moved.touched
                }
            };
            if (*block).place == Place::Untouched && why == Why::Touch {
                self.here(gpu).touched.fetch_add(BLOCK, Ordering::Relaxed);
            }
            if !std::ptr::eq(counted, &raw const (*at).moved.touched) || why == Why::Touch {
                counted.fetch_add(BLOCK, Ordering::Relaxed);
            }
            (*block).place = Place::Device;
            (*block).frame = frame;
        }
        drop(held);
        Some(Duration::from_secs_f64(took))
    }

    /// Calls a function with a block's bytes on the card, where the block must be. The function may change them.
    pub(crate) fn with_device_bytes<T>(
        &self,
        gpu: usize,
        index: u32,
        look: impl FnOnce(&mut [u8]) -> T,
    ) -> Option<T> {
        let _held = self.hold(gpu, false);
        // SAFETY: an existing block, under the card's lock; while it is held nothing else refers to the frame.
        unsafe {
            let block = *self.block(gpu, index);
            if block.place != Place::Device {
                return None;
            }
            let bytes = self.frame_bytes(gpu, block.frame);
            Some(look(std::slice::from_raw_parts_mut(bytes, block.real as usize)))
        }
    }

    /// Calls a function with a block's bytes on the host, where a touch by the host brings it. The function may change
    /// them. `None`: the block cannot leave the card.
    pub(crate) fn with_host_bytes<T>(
        &self,
        gpu: usize,
        index: u32,
        look: impl FnOnce(&mut [u8]) -> T,
    ) -> Option<T> {
        let _held = self.hold(gpu, false);
        // SAFETY: an existing block, under the card's lock; while it is held nothing else refers to its bytes.
        unsafe {
            if (*self.block(gpu, index)).place != Place::Host && !self.move_to_host(gpu, index) {
                return None;
            }
            Some(look(std::slice::from_raw_parts_mut(self.host_bytes(gpu, index), self.real_block)))
        }
    }

    /// Occupies the link for a transfer and sleeps until it is over. Transfers of all processes queue.
    pub(crate) fn transfer(&self, gpu: usize, way: Way, took: Duration) {
        if took.is_zero() {
            return;
        }
        // SAFETY: the card's field, which is atomic.
        let busy = unsafe { &(*self.gpu(gpu)).link_busy_until[usize::from(way == Way::ToHost)] };
        let now = now_ns();
        let took = took.as_nanos() as u64;
        let before = busy
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |until| Some(until.max(now) + took))
            .unwrap_or_default();
        let until = before.max(now) + took;
        std::thread::sleep(Duration::from_nanos(until - now));
    }
}
