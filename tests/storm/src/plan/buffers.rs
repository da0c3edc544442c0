//! Memory: allocated by every door, filled, copied, checked, freed.

use nvshare_proto::units::MIB;

use super::compose::{BufferState, Composer, HostState, Pending, RegionState, Thing};
use super::{Door, Effect, HostKind, Id, Op, Region, StreamKind, Value, Way, flag};
use crate::rng::Rng;

/// Largest copy with the host and between regions: the simulated driver copies byte by byte.
pub(super) const MAX_COPIED: u64 = 2 * MIB;
/// The least that an allocation is assumed to take, to be on the safe side.
const GRAIN: u64 = 2 * MIB;
const ROW: u64 = 4096;
/// Buffers of mapped memory at a time.
const MAX_MAPPED: usize = 3;
/// The feature of programs in which the lock may come while several allocations are made.
const BESIDE_WORK: &str = "allocations beside work";

/// Bytes that the plan counts for an allocation.
fn charged(bytes: u64) -> u64 {
    bytes.next_multiple_of(GRAIN)
}

impl Composer<'_> {
    /// Allocates a buffer, if there is room; small ones more often than large.
    pub(super) fn allocate(&mut self, rng: &mut Rng, thread: usize, context: Id) -> Option<Id> {
        let large = rng.percent(30);
        let (region_bytes, regions) = if large {
            let most = (self.recipe.memory / 3 / GRAIN).max(2);
            (GRAIN * rng.range(1, most.div_ceil(2)), rng.range(1, 2))
        } else {
            (ROW * rng.pick(&[1, 2, 16, 64, 256]).expect("not empty"), 1)
        };
        let bytes = region_bytes * regions;
        if self.allocated + charged(bytes) > self.recipe.memory {
            return None;
        }
        let green = self.contexts[&context].kind == super::ContextKind::Green;
        let mut doors = vec![Door::Plain, Door::Plain];
        if !self.recipe.without.contains("cuMemAllocManaged") {
            doors.push(Door::Managed);
        }
        if self.may("pitch") && regions == 1 && !green {
            doors.push(Door::Pitch);
        }
        // Mapped memory of the program stays on the card: there is little of it, so that movable memory has room
        // beside that of others.
        let mapped = self.buffers.values().filter(|buffer| buffer.door == Door::Mapped).count();
        if self.may("mapped") && bytes <= GRAIN && mapped < MAX_MAPPED && !green {
            doors.push(Door::Mapped);
        }
        if self.may("async") && !green {
            doors.extend([Door::Async, Door::FromPool]);
        }
        let door = rng.pick(&doors).expect("not empty");
        // Mapped memory comes in whole pieces of the card.
        let region_bytes = if door == Door::Mapped { charged(region_bytes) } else { region_bytes };
        self.count(match door {
            Door::Plain => "cuMemAlloc",
            Door::Pitch => "cuMemAllocPitch",
            Door::Managed => "cuMemAllocManaged",
            Door::Async => "cuMemAllocAsync",
            Door::FromPool => "cuMemAllocFromPoolAsync",
            Door::Mapped => "cuMemCreate and cuMemMap",
        });
        Some(self.allocate_by(rng, thread, context, door, region_bytes, regions))
    }

    fn allocate_by(
        &mut self,
        rng: &mut Rng,
        thread: usize,
        context: Id,
        door: Door,
        region_bytes: u64,
        regions: u64,
    ) -> Id {
        let ordered = matches!(door, Door::Async | Door::FromPool);
        let stream =
            if ordered { self.some_stream(rng, thread, context) } else { self.contexts[&context].legacy };
        let buffer = self.counts.buffers;
        self.counts.buffers += 1;
        let bytes = region_bytes * regions;
        self.allocated += charged(bytes);
        let mut writes = vec![Thing::Buffer(buffer)];
        let mut flags = vec![flag::UNSAFE, flag::DISTURB];
        if ordered {
            writes.push(Thing::Stream(stream));
            flags.extend_from_slice(self.legacy_flags(stream));
        }
        self.emit(thread, Some(context), Op::Allocate { buffer, door, bytes, stream }, &[], &writes, &flags);
        let pending = if ordered { Pending::Stream(stream) } else { Pending::Nothing };
        let fresh = |_| RegionState { value: Value::plain(0), pending, graphs: 0 };
        let regions: Vec<RegionState> = (0..regions).map(fresh).collect();
        let state = BufferState { context, door, bytes, region_bytes, regions };
        self.buffers.insert(buffer, state);
        // The contents are undefined: first, all of the buffer is written.
        for index in 0..self.buffers[&buffer].regions.len() as u64 {
            let region = Region { buffer, index, bytes: region_bytes };
            let stream = self.some_stream(rng, thread, context);
            let effect =
                if rng.percent(50) { Effect::Pattern(rng.word(), 0) } else { Effect::Set(rng.word(), 4) };
            self.work(rng, thread, region, effect, stream);
        }
        buffer
    }

    /// Memory that a program has from its beginning: half of its most, in two buffers.
    pub(super) fn ballast(&mut self, rng: &mut Rng, thread: usize, context: Id) {
        for _ in 0..2 {
            let regions = rng.range(1, 2);
            let bytes = self.recipe.memory / 4 / regions / GRAIN * GRAIN;
            let door = if self.may("async") && rng.percent(30) { Door::Async } else { Door::Plain };
            self.allocate_by(rng, thread, context, door, bytes.max(GRAIN), regions);
        }
    }

    /// Whether threads of the program allocate while another has work all the time: one seed in eight, that for which the
    /// simulated driver allocates slowly.
    fn allocates_beside_work(&self) -> bool {
        self.recipe.seed % 8 == 6 && self.threads > 1 && !self.recipe.without.contains(BESIDE_WORK)
    }

    /// One thread has work all the time, so the process gets the lock again soon after it has lost it. Other threads allocate
    /// while that one is held up, and use the memory at once: the lock may come while the driver allocates.
    pub(super) fn allocate_beside_work(&mut self, rng: &mut Rng, context: Id) {
        if !self.allocates_beside_work() {
            return;
        }
        self.count(BESIDE_WORK);
        let Some(region) = self.some_region(rng, context, u64::MAX) else { return };
        let threads = self.threads.min(5);
        // Each has a stream of its own, so that none waits for another.
        let streams: Vec<Id> = (0..threads)
            .map(|thread| self.make_stream_of(thread, context, StreamKind::NonBlocking))
            .collect();
        for _ in 0..24 {
            for _ in 0..2 {
                let effect = Effect::Add(rng.word(), 3000);
                self.work(rng, 0, region, effect, streams[0]);
            }
            self.sync_stream(0, streams[0]);
        }
        let last = self.steps.len() - 1;
        for thread in (0..3).flat_map(|_| 1..threads) {
            self.emit(thread, None, Op::HeldUp { other: 0, last }, &[], &[], &[]);
            if self.allocated + GRAIN <= self.recipe.memory {
                self.allocate_by(rng, thread, context, Door::Plain, ROW, 1);
            }
        }
    }

    /// Frees a buffer that no graph names.
    pub(super) fn free(&mut self, rng: &mut Rng, thread: usize, buffer: Id) {
        let state = &self.buffers[&buffer];
        let (context, door, bytes, count) = (state.context, state.door, state.bytes, state.regions.len());
        let ordered = matches!(door, Door::Async | Door::FromPool) && rng.percent(80);
        let stream = ordered.then(|| self.some_stream(rng, thread, context));
        let mut writes = vec![Thing::Buffer(buffer)];
        let mut flags = vec![flag::UNSAFE, flag::DISTURB];
        for index in 0..count as u64 {
            let region = Region { buffer, index, bytes: 0 };
            match stream {
                Some(stream) => self.take(rng, thread, region, stream),
                None => {
                    let pending = self.region(region).pending;
                    self.settle(rng, thread, pending, region.thing());
                    self.region(region).pending = Pending::Nothing;
                }
            }
            writes.push(region.thing());
        }
        if let Some(stream) = stream {
            self.count("freed in stream order");
            writes.push(Thing::Stream(stream));
            flags.extend_from_slice(self.legacy_flags(stream));
        }
        let thread = stream.map_or(thread, |stream| self.hand(stream, thread));
        self.buffers.remove(&buffer);
        self.allocated -= charged(bytes);
        self.emit(thread, Some(context), Op::Free { buffer, door, bytes, stream }, &[], &writes, &flags);
    }

    /// Submits a kernel, a fill or a copy on the card.
    pub(super) fn work(&mut self, rng: &mut Rng, thread: usize, region: Region, effect: Effect, stream: Id) {
        let mut writes = vec![Thing::Stream(stream), region.thing()];
        let mut reads = vec![Thing::Buffer(region.buffer)];
        self.take(rng, thread, region, stream);
        if let Effect::Copy(from) = effect {
            self.take(rng, thread, from, stream);
            // Taking the region may have waited for more than the region.
            self.region(region).pending = Pending::Stream(stream);
            writes.push(from.thing());
            reads.push(Thing::Buffer(from.buffer));
        }
        let thread = self.hand(stream, thread);
        let (context, flags) = (self.context_of(stream), self.legacy_flags(stream));
        let module = self.contexts[&context].module;
        reads.push(Thing::Module(module));
        let of = self.buffers[&region.buffer].context;
        if of != context {
            reads.extend([Thing::Context(of), Thing::Access(context, of)]);
        }
        self.apply(region, effect);
        self.emit(thread, Some(context), Op::Work { region, effect, stream, module }, &reads, &writes, flags);
    }

    /// The value of a region after an effect.
    pub(super) fn apply(&mut self, region: Region, effect: Effect) {
        let value = match effect {
            Effect::Add(by, _) => self.region(region).value.plus(by),
            Effect::Pattern(base, _) => Value::pattern(base),
            Effect::Set(word, bytes) => Value::plain(spread(word, bytes)),
            Effect::Copy(from) => self.region(from).value,
        };
        self.region(region).value = value;
    }

    pub(super) fn host(&mut self, rng: &mut Rng, thread: usize, context: Id) -> Id {
        let known: Vec<Id> =
            self.hosts.iter().filter(|(_, host)| host.context == context).map(|(host, _)| *host).collect();
        if known.len() > 2 && rng.percent(80) {
            return rng.pick(&known).expect("not empty");
        }
        let mut kinds = vec![HostKind::Pinned, HostKind::Pageable];
        if self.may("register") {
            kinds.push(HostKind::Registered);
        }
        let kind = rng.pick(&kinds).expect("not empty");
        self.count(match kind {
            HostKind::Pinned => "pinned host memory",
            HostKind::Pageable => "pageable host memory",
            HostKind::Registered => "registered host memory",
        });
        let host = self.counts.hosts;
        self.counts.hosts += 1;
        let bytes = if rng.percent(10) { MAX_COPIED } else { 256 * 1024 };
        let state = HostState { context, kind, bytes, value: None, pending: Pending::Nothing };
        self.hosts.insert(host, state);
        let op = Op::HostAllocate { host, kind, bytes };
        self.emit(thread, Some(context), op, &[], &[Thing::Host(host)], &[flag::UNSAFE, flag::DISTURB]);
        host
    }

    pub(super) fn settle_host(&mut self, rng: &mut Rng, thread: usize, host: Id) {
        let pending = self.hosts[&host].pending;
        self.settle(rng, thread, pending, Thing::Host(host));
        self.hosts.get_mut(&host).expect("a live host buffer").pending = Pending::Nothing;
    }

    pub(super) fn free_host(&mut self, rng: &mut Rng, thread: usize, host: Id) {
        self.settle_host(rng, thread, host);
        let state = self.hosts.remove(&host).expect("a live host buffer");
        let op = Op::HostFree { host, kind: state.kind };
        self.emit(thread, Some(state.context), op, &[], &[Thing::Host(host)], &[flag::UNSAFE, flag::DISTURB]);
    }

    /// The flags of a copy between host and device.
    fn copy_flags(&self, host: Id, stream: Id, way: Way) -> Vec<usize> {
        let mut flags = self.legacy_flags(stream).to_vec();
        if way != Way::Async || self.hosts[&host].kind == HostKind::Pageable {
            flags.push(flag::UNSAFE);
        }
        flags
    }

    /// Copies from the host to a whole region.
    pub(super) fn copy_in(&mut self, rng: &mut Rng, thread: usize, region: Region, stream: Id, way: Way) {
        let context = self.context_of(stream);
        let host = self.host(rng, thread, context);
        if region.bytes > self.hosts[&host].bytes {
            return;
        }
        self.settle_host(rng, thread, host);
        let value = if rng.percent(50) { Value::pattern(rng.word()) } else { Value::plain(rng.word()) };
        self.emit(thread, None, Op::HostWrite { host, value }, &[], &[Thing::Host(host)], &[]);
        self.take(rng, thread, region, stream);
        self.region(region).value = value;
        let state = self.hosts.get_mut(&host).expect("a live host buffer");
        state.value = Some(value);
        state.pending = if way == Way::Now { Pending::Nothing } else { Pending::Stream(stream) };
        let flags = self.copy_flags(host, stream, way);
        self.count_copy("to the device", way);
        let thread = self.hand(stream, thread);
        let writes = [Thing::Stream(stream), region.thing(), Thing::Host(host)];
        let op = Op::CopyIn { region, host, stream, way };
        self.emit(thread, Some(context), op, &[Thing::Buffer(region.buffer)], &writes, &flags);
    }

    /// Copies a region to the host, and checks the words.
    pub(super) fn copy_out(&mut self, rng: &mut Rng, thread: usize, region: Region, stream: Id, way: Way) {
        let context = self.context_of(stream);
        let host = self.host(rng, thread, context);
        self.settle_host(rng, thread, host);
        let bytes = region.bytes.min(self.hosts[&host].bytes).min(ROW * rng.range(1, 16));
        let first = if way == Way::Rows { 0 } else { ROW * rng.range(0, (region.bytes - bytes) / ROW) };
        self.take(rng, thread, region, stream);
        let value = self.region(region).value;
        self.hosts.get_mut(&host).expect("a live host buffer").pending =
            if way == Way::Now { Pending::Nothing } else { Pending::Stream(stream) };
        if way == Way::Now {
            self.region(region).pending = Pending::Nothing;
        }
        let flags = self.copy_flags(host, stream, way);
        self.count_copy("to the host", way);
        let by = self.hand(stream, thread);
        let writes = [Thing::Stream(stream), region.thing(), Thing::Host(host)];
        let op = Op::CopyOut { region, host, first, bytes, stream, way };
        self.emit(by, Some(context), op, &[Thing::Buffer(region.buffer)], &writes, &flags);
        self.settle_host(rng, thread, host);
        let op = Op::HostCheck { host, value, first, bytes };
        self.emit(thread, None, op, &[], &[Thing::Host(host)], &[]);
    }

    fn count_copy(&mut self, whereto: &str, way: Way) {
        let how = match way {
            Way::Now => "copy",
            Way::Async => "copy in stream order",
            Way::Rows => "copy of rows",
        };
        self.count(&format!("{how} {whereto}"));
    }

    /// The way of a copy, and the stream for it: the legacy one if the call has none.
    pub(super) fn some_way(&mut self, rng: &mut Rng, thread: usize, context: Id, rows: bool) -> (Id, Way) {
        let green = self.contexts[&context].kind == super::ContextKind::Green;
        if rows {
            return (self.some_stream(rng, thread, context), Way::Rows);
        }
        match rng.below(3) {
            0 if !green => (self.contexts[&context].legacy, Way::Now),
            _ => (self.some_stream(rng, thread, context), Way::Async),
        }
    }

    /// A region of a stream's context that copies can fill.
    pub(super) fn some_region(&self, rng: &mut Rng, context: Id, most: u64) -> Option<Region> {
        let fits = self.regions(|buffer, _| buffer.context == context && buffer.region_bytes <= most);
        rng.pick(&fits)
    }

    /// Whether a stream waits for the legacy stream, or is a legacy stream itself.
    pub(super) fn is_blocking(&self, stream: Id) -> bool {
        self.facts[stream].kind.is_blocking() || self.facts[stream].kind == StreamKind::Legacy
    }
}

/// The word that a fill with 1, 2 or 4 bytes makes.
pub(crate) fn spread(word: u32, bytes: u32) -> u32 {
    match bytes {
        1 => (word & 0xff) * 0x0101_0101,
        2 => (word & 0xffff) * 0x0001_0001,
        _ => word,
    }
}
