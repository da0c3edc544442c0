//! Memory of the cards: allocations, and how kernels, copies and the host reach them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::config::{Held, is_each};
use crate::handles;
use crate::process::{
    self, Failure, HOST_ALREADY_REGISTERED, HOST_NOT_REGISTERED, ILLEGAL_ADDRESS, INVALID_VALUE,
    NOT_SUPPORTED, OUT_OF_MEMORY, Process,
};
use crate::stream::{Point, unique};
use crate::tables::Tables;
use crate::vmm::Lack;
use crate::world::{BLOCK, Sort, Way, Why};

/// The numbers of an allocation's blocks, in their order. A process that comes back to another card has others there.
#[derive(Debug)]
pub(crate) struct Blocks(Box<[AtomicU32]>);

impl From<Vec<u32>> for Blocks {
    fn from(blocks: Vec<u32>) -> Self {
        Self(blocks.into_iter().map(AtomicU32::new).collect())
    }
}

impl Blocks {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn get(&self, index: usize) -> Option<u32> {
        self.0.get(index).map(|block| block.load(Ordering::Relaxed))
    }

    pub(crate) fn all(&self) -> Vec<u32> {
        self.0.iter().map(|block| block.load(Ordering::Relaxed)).collect()
    }

    /// Only while no call of the process is under way.
    pub(crate) fn replace(&self, blocks: &[u32]) {
        self.0.iter().zip(blocks).for_each(|(place, block)| place.store(*block, Ordering::Relaxed));
    }
}

/// An allocation.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) base: u64,
    pub(crate) gpu: usize,
    pub(crate) blocks: Blocks,
    pub(crate) managed: bool,
    /// The context that frees the allocation when it ends.
    pub(crate) context: Option<u64>,
    pub(crate) attributes: Attributes,
}

/// Attributes of an allocation that a program asks for, or sets, by a pointer into it.
#[derive(Debug)]
pub(crate) struct Attributes {
    /// A number that no other allocation has.
    pub(crate) id: u64,
    /// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`
    pub(crate) synchronous: AtomicU32,
}

impl Default for Attributes {
    fn default() -> Self {
        Self { id: unique(), synchronous: AtomicU32::new(0) }
    }
}

impl Allocation {
    pub(crate) fn bytes(&self) -> u64 {
        self.blocks.len() as u64 * BLOCK
    }
}

/// The memory at an address: in one allocation, or over several that are mapped side by side.
#[derive(Debug)]
pub(crate) struct Found {
    /// The allocation of the first byte.
    pub(crate) allocation: Arc<Allocation>,
    pub(crate) offset: u64,
    /// The allocations that follow, and where in the range each begins.
    more: Vec<(Arc<Allocation>, u64)>,
}

/// A part of a range that is in one block: the block, where the part begins in it, and where in the range.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    gpu: usize,
    block: u32,
    pub(crate) in_block: u64,
    pub(crate) in_range: u64,
    pub(crate) bytes: u64,
}

/// The parts of a range of an allocation; `before`: bytes of a longer range that come first.
fn pieces(allocation: &Allocation, begin: u64, bytes: u64, before: u64) -> impl Iterator<Item = Piece> {
    let end = begin + bytes;
    (begin / BLOCK..end.div_ceil(BLOCK)).filter_map(move |index| {
        let (from, to) = (begin.max(index * BLOCK), end.min((index + 1) * BLOCK));
        let (gpu, block) = (allocation.gpu, allocation.blocks.get(index as usize)?);
        Some(Piece { gpu, block, in_block: from % BLOCK, in_range: before + from - begin, bytes: to - from })
    })
}

impl Piece {
    /// A part of a block as a range of its own.
    pub(crate) fn of(gpu: usize, block: u32, in_block: u64, bytes: u64) -> Self {
        Self { gpu, block, in_block, in_range: 0, bytes }
    }

    /// The same part as a range of its own.
    pub(crate) fn alone(self) -> Self {
        Self { in_range: 0, ..self }
    }
}

impl Found {
    /// The card, the block, and where in the block a byte of a range of this length is.
    pub(crate) fn place(&self, offset: u64, bytes: u64) -> Option<(usize, u32, u64)> {
        let is_in = |piece: &Piece| (piece.in_range..piece.in_range + piece.bytes).contains(&offset);
        let piece = self.pieces(bytes).find(is_in)?;
        Some((piece.gpu, piece.block, piece.in_block + offset - piece.in_range))
    }

    fn pieces(&self, bytes: u64) -> impl Iterator<Item = Piece> {
        let first = bytes.min(self.allocation.bytes() - self.offset);
        let rest = self.more.iter().flat_map(move |(allocation, begin)| {
            pieces(allocation, 0, allocation.bytes().min(bytes.saturating_sub(*begin)), *begin)
        });
        pieces(&self.allocation, self.offset, first, 0).chain(rest)
    }
}

impl Tables {
    /// The memory at an address, if the whole range lies within it.
    pub(crate) fn find(&self, address: u64, bytes: u64) -> Result<Found, Failure> {
        let end = address.checked_add(bytes).ok_or(INVALID_VALUE)?;
        if let Some((&base, allocation)) = self.memory.range(..=address).next_back()
            && address < base + allocation.bytes()
        {
            let found =
                Found { allocation: Arc::clone(allocation), offset: address - base, more: Vec::new() };
            return if end <= base + allocation.bytes() { Ok(found) } else { Err(INVALID_VALUE) };
        }
        let mapped = |address: u64| match self.vmm.look(address) {
            Some(Ok((handle, at))) => {
                Ok((self.memory.get(&handle).cloned().ok_or(INVALID_VALUE)?, address - at))
            }
            _ => Err(INVALID_VALUE),
        };
        let (allocation, offset) = mapped(address)?;
        let mut at = address - offset + allocation.bytes();
        let mut found = Found { allocation, offset, more: Vec::new() };
        while at < end {
            let (next, _) = mapped(at)?;
            let begin = at - address;
            at += next.bytes();
            found.more.push((next, begin));
        }
        Ok(found)
    }

    /// Why a reserved range cannot be reached: the address, and what is missing there.
    fn lack(&self, address: u64, bytes: u64) -> Option<(u64, Lack)> {
        let first = (address, self.vmm.look(address)?);
        let later = (address / BLOCK + 1..(address + bytes).div_ceil(BLOCK)).map(|block| block * BLOCK);
        let looks = std::iter::once(first).chain(later.filter_map(|at| Some((at, self.vmm.look(at)?))));
        looks.into_iter().find_map(|(at, look)| Some((at, look.err()?)))
    }

    /// The first address of a range that work of a card cannot reach. Mapped memory says itself which cards may; other plain memory has
    /// to be of a context to which the work's has peer access.
    pub(crate) fn out_of_reach(&self, card: usize, context: u64, address: u64, bytes: u64) -> Option<u64> {
        self.vmm.closed_to(card, address, bytes).or_else(|| {
            let (_, allocation) = self.memory.range(..=address).next_back()?;
            let is_there = address < allocation.base + allocation.bytes();
            let is_peer = |of: u64| self.peers.contains(&(context, of));
            let is_reached =
                allocation.managed || allocation.gpu == card || allocation.context.is_none_or(is_peer);
            (is_there && !is_reached).then_some(address)
        })
    }

    /// Whether a range is page-locked memory of the host.
    pub(crate) fn is_host(&self, address: usize, bytes: usize) -> bool {
        let before = self.host.range(..=address).next_back();
        before.is_some_and(|(&base, &(length, ..))| address + bytes <= base + length)
    }

    /// Whether a range begins in page-locked memory and goes on in memory that was page-locked by itself. The driver refuses to copy it
    /// asynchronously (measured on an H200).
    pub(crate) fn spans_page_locks(&self, address: usize, bytes: usize) -> bool {
        let before = self.host.range(..=address).next_back();
        before
            .map(|(&base, &(length, ..))| base + length)
            .is_some_and(|end| address < end && end < address + bytes && self.host.contains_key(&end))
    }

    pub(crate) fn register_host(&mut self, base: usize, bytes: usize, is_ours: bool) -> Result<(), Failure> {
        let context = self.current()?.family;
        if base == 0 || bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let locked: usize = self.host.values().map(|&(length, ..)| length).sum();
        let process = process::get()?;
        let config = process.world.config();
        if config.most_locked < (locked + bytes) as u64 {
            return Err(OUT_OF_MEMORY);
        }
        // To ask the kernel whether memory is shared takes time.
        if !config.locks_shared && is_shared(base) {
            return Err(NOT_SUPPORTED);
        }
        if !is_ours && config.most_private < u64::MAX && !is_shared(base) {
            let is_private =
                |(base, (.., is_ours)): &(&usize, &(usize, u64, bool))| !is_ours && !is_shared(**base);
            let private: usize = self.host.iter().filter(is_private).map(|(_, &(length, ..))| length).sum();
            if config.most_private < (private + bytes) as u64 {
                return Err(OUT_OF_MEMORY);
            }
        }
        let overlaps = |(&other, &(length, ..)): (&usize, &(usize, u64, bool))| other + length > base;
        if self.host.range(..base + bytes).next_back().is_some_and(overlaps) {
            return Err(HOST_ALREADY_REGISTERED);
        }
        self.host.insert(base, (bytes, context, is_ours));
        Ok(())
    }

    pub(crate) fn unregister_host(&mut self, base: usize, is_ours: bool) -> Result<(), Failure> {
        match self.host.get(&base) {
            Some(&(_, _, ours)) if ours == is_ours => {
                self.host.remove(&base);
                Ok(())
            }
            _ if is_ours => Err(INVALID_VALUE),
            _ => Err(HOST_NOT_REGISTERED),
        }
    }
}

/// Whether an address of this process is in memory that others can map.
fn is_shared(address: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().any(|line| {
        let mut words = line.split_whitespace();
        let range = words.next().and_then(|range| range.split_once('-'));
        let [from, until] = range.map_or([None, None], |(from, until)| {
            [from, until].map(|text| usize::from_str_radix(text, 16).ok())
        });
        let is_it = from.is_some_and(|from| from <= address) && until.is_some_and(|until| address < until);
        is_it && words.next().is_some_and(|rights| rights.ends_with('s'))
    })
}

impl Process {
    /// Makes an allocation on the current card. What is made in a green context belongs to the primary one and outlives the green one, as
    /// does the page-lock of host memory (measured on an H200).
    pub(crate) fn allocate(&self, size: u64, managed: bool) -> Result<u64, Failure> {
        self.sticky()?;
        let mut tables = self.tables();
        tables.unsafe_call()?;
        let context = tables.current()?;
        let (gpu, context) = (context.gpu, context.family);
        drop(tables);
        self.allocate_on(gpu, size, Sort::of(managed), Some(context))
    }

    /// Makes an allocation on a card; `context` frees it when it ends.
    pub(crate) fn allocate_on(
        &self,
        gpu: usize,
        size: u64,
        sort: Sort,
        context: Option<u64>,
    ) -> Result<u64, Failure> {
        let managed = sort == Sort::Managed;
        if size == 0 {
            return Err(INVALID_VALUE);
        }
        let (each, takes) = self.world.config().slow_allocations;
        static ASKED: AtomicU64 = AtomicU64::new(0);
        if is_each(each, &ASKED) {
            std::thread::sleep(takes);
        }
        self.world.config().wait_while_held(Held::Allocations);
        let count = size.div_ceil(BLOCK) as usize;
        let allocate = || self.world.allocate(gpu, count, sort);
        let blocks = allocate().or_else(|| self.take_all_kept(gpu).then(allocate)?).ok_or(OUT_OF_MEMORY)?;
        let mut tables = self.tables();
        let again = tables.addresses.get_mut(&count).and_then(Vec::pop);
        let base = again.unwrap_or_else(|| self.reserve(count as u64 * BLOCK));
        tables.memory.insert(
            base,
            Arc::new(Allocation {
                base,
                gpu,
                blocks: blocks.into(),
                managed,
                context,
                attributes: Attributes::default(),
            }),
        );
        Ok(base)
    }

    /// Addresses for memory of a graph.
    pub(crate) fn reserve(&self, size: u64) -> u64 {
        self.new_addresses(size.next_multiple_of(BLOCK))
    }

    /// Gives back the blocks of an allocation that nothing leads to any more.
    pub(crate) fn give_back(&self, allocation: &Allocation) {
        self.world.free(allocation.gpu, &allocation.blocks.all());
        if handles::reuses() {
            self.tables().addresses.entry(allocation.blocks.len()).or_default().push(allocation.base);
        }
    }

    pub(crate) fn free(&self, base: u64) -> Result<(), Failure> {
        let mut tables = self.tables();
        let gpu = tables.memory.get(&base).ok_or(INVALID_VALUE)?.gpu;
        if tables.pool.is_freed(base) {
            return Err(INVALID_VALUE);
        }
        tables.unsafe_call()?;
        // Freeing waits for the work that may use it, as the driver's does.
        let points = tables.ends(|stream| stream.gpu == gpu);
        drop(tables);
        points.iter().for_each(Point::wait);
        let mut tables = self.tables();
        let allocation = tables.memory.remove(&base).ok_or(INVALID_VALUE)?;
        tables.pool.forget(base);
        drop(tables);
        self.give_back(&allocation);
        Ok(())
    }

    /// The memory at an address, if the whole range lies within it.
    pub(crate) fn find(&self, address: u64, bytes: u64) -> Result<Found, Failure> {
        self.tables().find(address, bytes)
    }

    /// Whether a range of a card's memory is managed. A graph may have the range only when it runs.
    pub(crate) fn is_managed(&self, address: u64, bytes: u64) -> Result<bool, Failure> {
        let tables = self.tables();
        match tables.find(address, bytes) {
            Ok(found) => Ok(found.allocation.managed),
            Err(_) if tables.pool.is_of_graph(address, bytes) => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    /// Calls `look` for each part of a range on the card, and brings the part there by faults if need be. `look` gets all
    /// bytes of the block in the store.
    pub(crate) fn touch(&self, address: u64, bytes: u64, mut look: impl FnMut(&mut [u8], Piece)) {
        let Ok(found) = self.find(address, bytes) else {
            self.stop_if_unmapped(address, bytes);
            return self.stick(ILLEGAL_ADDRESS);
        };
        let (world, gpu) = (&self.world, found.allocation.gpu);
        let mut owed = Duration::ZERO;
        for piece in found.pieces(bytes) {
            let gpu = piece.gpu;
            loop {
                let Some(took) = world.bring(gpu, piece.block, Why::Touch) else {
                    return self.stick(OUT_OF_MEMORY);
                };
                owed += took;
                if world.with_device_bytes(gpu, piece.block, |bytes| look(bytes, piece)).is_some() {
                    break;
                }
            }
            if owed > Duration::from_millis(4) {
                world.transfer(gpu, Way::ToDevice, std::mem::take(&mut owed));
            }
        }
        world.transfer(gpu, Way::ToDevice, owed);
    }

    /// Work reaches a range without memory: if the range is reserved, the process stops.
    fn stop_if_unmapped(&self, address: u64, bytes: u64) {
        let lack = self.tables().lack(address, bytes);
        if let Some((at, lack)) = lack {
            let why = if lack == Lack::Mapping { "is not mapped" } else { "may not be accessed" };
            handles::stop_with(&format!("nvsim: work reaches {at:#x}, which {why}\n"));
        }
    }

    /// A kernel reaches memory of another card without access to it: the process stops.
    pub(crate) fn stop_if_out_of_reach(&self, card: usize, context: u64, address: u64, bytes: u64) {
        let closed = self.tables().out_of_reach(card, context, address, bytes);
        if let Some(at) = closed {
            handles::stop_with(&format!(
                "nvsim: a kernel of card {card} reaches {at:#x}, to which the card has no access\n"
            ));
        }
    }

    /// The host touches managed memory: the touched blocks come to the host.
    pub(crate) fn host_touch(
        &self,
        address: u64,
        bytes: u64,
        mut look: impl FnMut(&mut [u8], Piece),
    ) -> Result<(), Failure> {
        let found = self.find(address, bytes)?;
        for piece in found.pieces(bytes) {
            let looked = |bytes: &mut [u8]| look(bytes, piece);
            self.world.with_host_bytes(piece.gpu, piece.block, looked).ok_or(ILLEGAL_ADDRESS)?;
        }
        Ok(())
    }

    /// Reads a word of plain memory on the card, without a touch that counts.
    pub(crate) fn peek(&self, address: u64, bytes: &mut [u8]) -> Result<(), Failure> {
        let found = self.find(address, bytes.len() as u64)?;
        let length = bytes.len() as u64;
        for piece in found.pieces(length) {
            self.world
                .with_device_bytes(piece.gpu, piece.block, |store| read(store, piece, bytes))
                .ok_or(ILLEGAL_ADDRESS)?;
        }
        Ok(())
    }

    /// Moves a range in bulk. Blocks while it moves, as the driver does.
    pub(crate) fn prefetch(&self, address: u64, bytes: u64, way: Way) -> Result<(), Failure> {
        let found = self.find(address, bytes)?;
        if !found.allocation.managed {
            return Err(INVALID_VALUE);
        }
        let gpu = found.allocation.gpu;
        let mut owed = Duration::ZERO;
        let _leaving = (way == Way::ToHost).then(|| self.world.begin_leaving(gpu));
        for piece in found.pieces(bytes.max(1)) {
            owed += match way {
                Way::ToDevice => self.world.bring(gpu, piece.block, Why::Prefetch).ok_or(OUT_OF_MEMORY)?,
                Way::ToHost => self.world.evict(gpu, piece.block),
            };
            if owed > Duration::from_millis(4) {
                self.world.transfer(gpu, way, std::mem::take(&mut owed));
            }
        }
        self.world.transfer(gpu, way, owed);
        Ok(())
    }
}

/// Where a byte of a block is in the store: several of a program's bytes share one of the store's.
fn at(in_block: u64, store: &[u8]) -> usize {
    in_block as usize % store.len()
}

/// Copies a part of a range out of the store of its block.
pub(crate) fn read(store: &[u8], piece: Piece, to: &mut [u8]) {
    let Some(to) = to.get_mut(piece.in_range as usize..(piece.in_range + piece.bytes) as usize) else {
        return;
    };
    for (i, chunk) in to.chunks_mut(store.len()).enumerate() {
        let begin = at(piece.in_block + (i * store.len()) as u64, store);
        let first = chunk.len().min(store.len() - begin);
        let (head, tail) = chunk.split_at_mut(first);
        head.copy_from_slice(&store[begin..begin + first]);
        tail.copy_from_slice(&store[..tail.len()]);
    }
}

/// Copies a part of a range into the store of its block.
pub(crate) fn write(store: &mut [u8], piece: Piece, from: &[u8]) {
    let Some(from) = from.get(piece.in_range as usize..(piece.in_range + piece.bytes) as usize) else {
        return;
    };
    let real = store.len();
    for (i, chunk) in from.chunks(real).enumerate() {
        let begin = at(piece.in_block + (i * real) as u64, store);
        let first = chunk.len().min(real - begin);
        let (head, tail) = chunk.split_at(first);
        store[begin..begin + first].copy_from_slice(head);
        store[..tail.len()].copy_from_slice(tail);
    }
}

/// Fills a part of a range with a pattern of one, two or four bytes, at whose multiples the range begins.
pub(crate) fn fill(store: &mut [u8], piece: Piece, pattern: &[u8]) {
    let real = store.len();
    let begin = at(piece.in_block, store);
    // If the part names bytes of the store more than once, the first of them counts.
    let bytes = if piece.bytes as usize >= real { real - begin } else { piece.bytes as usize };
    for i in 0..bytes / pattern.len() {
        let place = (begin + i * pattern.len()) % real;
        store[place..place + pattern.len()].copy_from_slice(pattern);
    }
}
