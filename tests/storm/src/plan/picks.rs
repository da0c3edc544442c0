//! The random choices that make a program: each emits a few steps, or none if the things that it needs do not exist.

use super::buffers::MAX_COPIED;
use super::compose::{BufferState, Composer, Pending, Thing};
use super::{ContextKind, Door, Effect, Id, Op, Region, Value, flag};
use crate::caps::{SHARING, SLEEP};
use crate::rng::Rng;

/// A kind of choice.
pub(super) struct Pick {
    pub(super) name: &'static str,
    pub(super) weight: usize,
    /// The capability that the driver must have, if any.
    pub(super) needs: &'static str,
    pub(super) compose: fn(&mut Composer<'_>, &mut Rng, usize) -> bool,
}

const fn pick(
    name: &'static str,
    weight: usize,
    needs: &'static str,
    compose: fn(&mut Composer<'_>, &mut Rng, usize) -> bool,
) -> Pick {
    Pick { name, weight, needs, compose }
}

/// The capability of devices that reach each other's memory.
const PEER_ACCESS: &str = "peer access";

/// Buffers that a program may share. Shared memory stays on the card: there is little of it.
const MAX_SHARED: usize = 2;

/// All choices. Their order and weights are a part of a seed's meaning.
pub(super) static PICKS: &[Pick] = &[
    pick("kernel", 22, "", kernel),
    pick("fill", 6, "", fill),
    pick("copy on the device", 5, "", copy_on_device),
    pick("copied in", 7, "", |c, rng, thread| copy(c, rng, thread, true, false)),
    pick("copied out", 7, "", |c, rng, thread| copy(c, rng, thread, false, false)),
    pick("rows copied in", 2, "rows", |c, rng, thread| copy(c, rng, thread, true, true)),
    pick("rows copied out", 2, "rows", |c, rng, thread| copy(c, rng, thread, false, true)),
    pick("peer copy", 3, "peer", peer_copy),
    pick("allocation", 8, "", allocation),
    pick("free", 5, "", free),
    pick("host memory freed", 1, "", free_host),
    pick("stream made", 4, "", stream_made),
    pick("stream destroyed", 6, "", stream_destroyed),
    pick("stream synchronised", 4, "", stream_synchronised),
    pick("stream queried", 2, "", stream_queried),
    pick("event kept", 3, "", event_kept),
    pick("host function", 3, "", callback),
    pick("host function waits for another thread", 6, "", |c, rng, thread| c.window(rng, thread)),
    pick("capture", 5, "", |c, rng, thread| c.capture(rng, thread)),
    pick("graph built", 4, "nodes", |c, rng, thread| c.build(rng, thread)),
    pick("graph launched", 8, "", |c, rng, thread| c.replay(rng, thread)),
    pick("graph updated", 2, "graph update", |c, rng, thread| c.update(rng, thread)),
    pick("graph destroyed", 1, "", graph_destroyed),
    pick("context made", 2, "", context_made),
    pick("context ended", 2, "", context_ended),
    pick("context synchronised by choice", 1, "", context_synchronised),
    pick("context attached and detached", 1, "attach", attach),
    pick("context pushed and popped", 1, "", push_pop),
    pick("module loaded late", 2, "", module_late),
    pick("prefetch", 2, "", prefetch),
    pick("managed memory touched by the host", 2, "managed by the host", host_touch),
    pick(SHARING, 2, SHARING, share),
    pick("allocation refused", 2, "", refused),
    pick("memory asked for", 1, "", info),
    pick("pause", 9, "", pause),
    pick("rest", 3, SLEEP, rest),
    pick("burst", 3, "", burst),
    pick("fork", 1, "", |c, rng, thread| fork(c, rng, thread, false)),
    pick("fork and exec", 1, "", |c, rng, thread| fork(c, rng, thread, true)),
];

/// A region of some context; allocates a buffer if there is none.
fn some(c: &mut Composer<'_>, rng: &mut Rng, thread: usize, most: u64) -> Option<(Id, Region)> {
    let context = c.some_context(rng);
    let region = c.some_region(rng, context, most);
    let region = match region {
        Some(region) => region,
        None => {
            let buffer = c.allocate(rng, thread, context)?;
            let bytes = c.buffers[&buffer].region_bytes;
            (bytes <= most).then_some(Region { buffer, index: 0, bytes })?
        }
    };
    Some((context, region))
}

fn kernel(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let Some((context, region)) = some(c, rng, thread, u64::MAX) else { return false };
    let stream = c.some_stream(rng, thread, context);
    for _ in 0..rng.range(1, 4) {
        let micros = if rng.percent(10) { rng.range(500, 3000) } else { rng.range(0, 200) };
        let effect = if rng.percent(85) {
            Effect::Add(rng.word(), micros as u32)
        } else {
            Effect::Pattern(rng.word(), micros as u32)
        };
        c.work(rng, thread, region, effect, stream);
    }
    true
}

/// Work on a thread's own stream in a later context, then on its stream in another one: a drain that confuses the two
/// gives the card away while the first one works, and the program's memory comes back by faults.
fn burst(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let known: Vec<Id> = c.contexts.keys().copied().collect();
    let later: Vec<Id> = known[1..].to_vec();
    let context = rng.pick(&later).unwrap_or(known[0]);
    if c.contexts[&context].kind == ContextKind::Green {
        return false;
    }
    let mut regions = c.regions(|buffer, _| buffer.context == context);
    regions.sort_by_key(|region| std::cmp::Reverse(region.bytes));
    regions.truncate(3);
    let Some(first) = regions.first().copied() else { return false };
    let stream = c.per_thread(thread, context);
    for number in 0..rng.range(6, 12) as usize {
        let region = regions[number % regions.len()];
        let effect = Effect::Add(rng.word(), 2000);
        c.work(rng, thread, region, effect, stream);
    }
    let others = c.regions(|buffer, _| buffer.context == known[0]);
    let other = others.into_iter().filter(|region| *region != first).min_by_key(|region| region.bytes);
    if let Some(region) = other
        && context != known[0]
    {
        c.count("per-thread streams of two contexts in turn");
        let stream = c.per_thread(thread, known[0]);
        let effect = Effect::Add(rng.word(), 0);
        c.work(rng, thread, region, effect, stream);
    }
    true
}

fn fill(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let Some((context, region)) = some(c, rng, thread, u64::MAX) else { return false };
    let stream = c.some_stream(rng, thread, context);
    let bytes = if c.has("small fills") { rng.pick(&[1, 2, 4]).expect("not empty") } else { 4 };
    c.count(match bytes {
        1 => "fill of bytes",
        2 => "fill of half words",
        _ => "fill of words",
    });
    let effect = Effect::Set(rng.word(), bytes);
    c.work(rng, thread, region, effect, stream);
    true
}

fn copy_on_device(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let Some((context, to)) = some(c, rng, thread, MAX_COPIED) else { return false };
    let sources = c.regions(|buffer, _| buffer.context == context && buffer.region_bytes >= to.bytes);
    let sources: Vec<Region> = sources.into_iter().filter(|from| *from != to).collect();
    let Some(from) = rng.pick(&sources) else { return false };
    let stream = c.some_stream(rng, thread, context);
    c.work(rng, thread, to, Effect::Copy(from), stream);
    true
}

fn copy(c: &mut Composer<'_>, rng: &mut Rng, thread: usize, inwards: bool, rows: bool) -> bool {
    let most = if inwards { 256 * 1024 } else { u64::MAX };
    let Some((context, region)) = some(c, rng, thread, most) else { return false };
    let (stream, way) = c.some_way(rng, thread, context, rows);
    if inwards {
        c.copy_in(rng, thread, region, stream, way);
    } else {
        c.copy_out(rng, thread, region, stream, way);
    }
    true
}

fn peer_copy(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let Some((context, to)) = some(c, rng, thread, MAX_COPIED) else { return false };
    let sources = c.regions(|buffer, _| buffer.context != context && buffer.region_bytes >= to.bytes);
    let Some(from) = rng.pick(&sources) else { return false };
    let of = c.buffers[&from.buffer].context;
    let stream = c.some_stream(rng, thread, context);
    c.take(rng, thread, to, stream);
    c.take(rng, thread, from, stream);
    c.region(to).pending = Pending::Stream(stream);
    c.apply(to, Effect::Copy(from));
    // The source belongs to another context: the copy is complete before the next step there.
    let is_between = c.contexts[&context].device != c.contexts[&of].device;
    if is_between {
        c.count("copy between devices");
    }
    // The driver knows the owners of such memory alone.
    let is_known = |region: Region| matches!(c.buffers[&region.buffer].door, Door::Plain | Door::Pitch);
    let names = !is_known(to) || !is_known(from) || rng.percent(50);
    if is_between && !names {
        c.count("copy between devices by address");
    }
    let reads = [Thing::Buffer(to.buffer), Thing::Buffer(from.buffer), Thing::Context(of)];
    let writes = [Thing::Stream(stream), to.thing(), from.thing()];
    let flags = [flag::UNSAFE, flag::DISTURB, flag::LEGACY];
    let by = c.hand(stream, thread);
    let op = Op::PeerCopy { to, from, contexts: (context, of), stream, names };
    c.emit(by, Some(context), op, &reads, &writes, &flags);
    if rng.percent(60) {
        peer_kernels(c, rng, thread, context, from);
    }
    true
}

/// Kernels of one device work on the memory of another.
fn peer_kernels(c: &mut Composer<'_>, rng: &mut Rng, thread: usize, context: Id, region: Region) {
    let BufferState { context: of, door, .. } = c.buffers[&region.buffer];
    let [here, there] = [context, of].map(|context| &c.contexts[&context]);
    let is_green = [here, there].iter().any(|context| context.kind == ContextKind::Green);
    // Access of contexts reaches this memory alone.
    let is_reached = matches!(door, Door::Plain | Door::Pitch);
    if here.device == there.device || is_green || !is_reached || !c.may(PEER_ACCESS) {
        return;
    }
    c.open_peer(thread, context, of);
    let stream = c.some_stream(rng, thread, context);
    for _ in 0..rng.range(1, 3) {
        c.count("kernel on a peer's memory");
        let effect = Effect::Add(rng.word(), rng.range(0, 1500) as u32);
        c.work(rng, thread, region, effect, stream);
    }
    if rng.percent(30) {
        c.close_peer(thread, context, of);
    }
}

fn allocation(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let context = c.some_context(rng);
    c.allocate(rng, thread, context).is_some()
}

fn free(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let free: Vec<Id> = c
        .buffers
        .iter()
        .filter(|(_, buffer)| buffer.regions.iter().all(|region| region.graphs == 0))
        .map(|(buffer, _)| *buffer)
        .collect();
    let Some(buffer) = rng.pick(&free) else { return false };
    c.free(rng, thread, buffer);
    true
}

fn free_host(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let known: Vec<Id> = c.hosts.keys().copied().collect();
    let Some(host) = rng.pick(&known) else { return false };
    c.free_host(rng, thread, host);
    true
}

fn stream_made(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let context = c.some_context(rng);
    if c.streams.len() >= 16 {
        return false;
    }
    c.make_stream(rng, thread, context);
    true
}

fn stream_destroyed(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let known: Vec<Id> = c.streams.keys().copied().collect();
    let Some(stream) = rng.pick(&known) else { return false };
    // Often right behind the stream's last work.
    if rng.percent(60) {
        let context = c.context_of(stream);
        if let Some(region) = c.some_region(rng, context, u64::MAX) {
            let effect = Effect::Add(rng.word(), rng.range(0, 1500) as u32);
            c.work(rng, thread, region, effect, stream);
        }
    }
    c.end_stream(rng, thread, stream);
    true
}

fn some_known_stream(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> Id {
    let context = c.some_context(rng);
    c.some_stream(rng, thread, context)
}

fn stream_synchronised(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let stream = some_known_stream(c, rng, thread);
    c.sync_stream(thread, stream);
    true
}

fn stream_queried(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let stream = some_known_stream(c, rng, thread);
    let mut flags = vec![flag::UNSAFE];
    flags.extend_from_slice(c.legacy_flags(stream));
    let (by, context) = (c.hand(stream, thread), c.context_of(stream));
    c.emit(by, Some(context), Op::StreamQuery { stream }, &[], &[Thing::Stream(stream)], &flags);
    true
}

fn event_kept(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let stream = some_known_stream(c, rng, thread);
    let event = c.make_event(rng, thread, c.context_of(stream));
    for _ in 0..rng.range(1, 3) {
        c.record(thread, event, stream);
        c.query(thread, event);
    }
    if rng.percent(40) {
        let later = some_known_stream(c, rng, thread);
        c.wait(thread, later, event);
    }
    if rng.percent(60) {
        c.end_event(thread, event);
    }
    true
}

fn callback(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let stream = some_known_stream(c, rng, thread);
    c.counts.callbacks += 1;
    let flags = c.legacy_flags(stream);
    let (by, context) = (c.hand(stream, thread), c.context_of(stream));
    c.emit(by, Some(context), Op::Callback { stream }, &[], &[Thing::Stream(stream)], flags);
    true
}

fn graph_destroyed(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let known: Vec<Id> = c.graphs.keys().copied().collect();
    let Some(graph) = rng.pick(&known) else { return false };
    c.end_graph(thread, graph);
    true
}

fn context_made(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    if c.contexts.len() >= 3 {
        return false;
    }
    let device = if c.has("two devices") && rng.percent(50) { 1 } else { 0 };
    let primary = c.contexts.values().any(|of| of.kind == ContextKind::Primary && of.device == device);
    let kind = match rng.below(4) {
        0 if c.may("green") => ContextKind::Green,
        0..=1 if !primary => ContextKind::Primary,
        _ => ContextKind::Created,
    };
    let context = c.make_context(thread, kind, device);
    // The context is used at once, by another thread too.
    for thread in [thread, rng.below(c.threads)] {
        if c.allocate(rng, thread, context).is_some() {
            let Some(region) = c.some_region(rng, context, u64::MAX) else { continue };
            let stream = if kind == ContextKind::Green || rng.percent(50) {
                c.some_stream(rng, thread, context)
            } else {
                c.per_thread(thread, context)
            };
            let effect = Effect::Add(rng.word(), rng.range(0, 2000) as u32);
            c.work(rng, thread, region, effect, stream);
        }
    }
    true
}

fn context_ended(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let known: Vec<Id> = c.contexts.keys().copied().collect();
    if known.len() < 2 && !rng.percent(20) {
        return false;
    }
    let Some(context) = rng.pick(&known) else { return false };
    // A green context stands on the primary one of its device.
    let (kind, device) = (c.contexts[&context].kind, c.contexts[&context].device);
    let stands = |of: &super::compose::ContextState| of.kind == ContextKind::Green && of.device == device;
    if kind == ContextKind::Primary && c.contexts.values().any(stands) {
        return false;
    }
    c.end_context(rng, thread, context);
    if c.contexts.is_empty() {
        // The last context is gone: the program begins again.
        c.make_context(thread, ContextKind::Primary, 0);
    }
    true
}

fn context_synchronised(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let context = c.some_context(rng);
    if c.contexts[&context].kind == ContextKind::Green {
        return false;
    }
    c.sync_context(thread, context);
    true
}

fn attach(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let context = c.some_context(rng);
    if c.contexts[&context].kind != ContextKind::Created {
        return false;
    }
    let flags = [flag::UNSAFE, flag::DISTURB, flag::LEGACY];
    c.emit(thread, Some(context), Op::AttachDetach, &[], &[], &flags);
    true
}

fn push_pop(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let context = c.some_context(rng);
    c.emit(thread, Some(context), Op::PushPop, &[], &[], &[]);
    true
}

fn module_late(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let Some((context, region)) = some(c, rng, thread, u64::MAX) else { return false };
    let stream = c.some_stream(rng, thread, context);
    let module = c.load(thread, context, false);
    c.take(rng, thread, region, stream);
    let effect = Effect::Add(rng.word(), 0);
    c.apply(region, effect);
    let by = c.hand(stream, thread);
    let reads = [Thing::Buffer(region.buffer), Thing::Module(module)];
    let writes = [Thing::Stream(stream), region.thing()];
    // The first launch may wait for running work.
    let mut flags = vec![flag::UNSAFE, flag::DISTURB];
    flags.extend_from_slice(c.legacy_flags(stream));
    c.emit(by, Some(context), Op::Work { region, effect, stream, module }, &reads, &writes, &flags);
    if rng.percent(70) {
        c.count("module unloaded");
        let pending = c.region(region).pending;
        c.settle(rng, thread, pending, region.thing());
        c.region(region).pending = Pending::Nothing;
        c.unload(thread, context, module);
    }
    true
}

fn managed(c: &Composer<'_>, rng: &mut Rng, most: u64) -> Option<Region> {
    let fits = c.regions(|buffer, _| buffer.door == Door::Managed && buffer.region_bytes <= most);
    rng.pick(&fits)
}

fn prefetch(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let Some(region) = managed(c, rng, u64::MAX) else { return false };
    let context = c.buffers[&region.buffer].context;
    let stream = c.some_stream(rng, thread, context);
    // Simulated prefetches keep the order of their own stream, and not of the legacy one.
    let pending = c.region(region).pending;
    c.settle(rng, thread, pending, region.thing());
    c.region(region).pending = Pending::Stream(stream);
    let device = c.contexts[&context].device;
    let mut flags = vec![flag::UNSAFE, flag::DISTURB];
    flags.extend_from_slice(c.legacy_flags(stream));
    let by = c.hand(stream, thread);
    let writes = [Thing::Stream(stream), region.thing()];
    let op = Op::Prefetch { region, stream, device };
    c.emit(by, Some(context), op, &[Thing::Buffer(region.buffer)], &writes, &flags);
    true
}

fn host_touch(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let Some(region) = managed(c, rng, MAX_COPIED) else { return false };
    let pending = c.region(region).pending;
    c.settle(rng, thread, pending, region.thing());
    let state = c.region(region);
    let (value, new) = (state.value, Value::plain(rng.word()));
    state.pending = Pending::Nothing;
    state.value = new;
    let op = Op::HostTouch { region, value, new };
    c.emit(thread, None, op, &[Thing::Buffer(region.buffer)], &[region.thing()], &[]);
    true
}

/// The memory of `cuMemAlloc` that is shared is small, and that of the program's first buffers of this kind.
fn share(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let is_small = |buffer: &BufferState| buffer.door == Door::Plain && buffer.bytes <= MAX_COPIED;
    let small = c.buffers.iter().filter(|(_, buffer)| is_small(buffer)).map(|(id, _)| *id).take(MAX_SHARED);
    let small: Vec<Id> = small.collect();
    let Some(buffer) = rng.pick(&small) else { return false };
    let BufferState { context, region_bytes, ref regions, .. } = c.buffers[&buffer];
    let (device, count) = (c.contexts[&context].device, regions.len() as u64);
    let mut writes = Vec::new();
    // The first handle waits for the work on all of the buffer.
    for index in 0..count {
        let region = Region { buffer, index, bytes: region_bytes };
        let pending = c.region(region).pending;
        c.settle(rng, thread, pending, region.thing());
        c.region(region).pending = Pending::Nothing;
        writes.push(region.thing());
    }
    let region = Region { buffer, index: rng.range(0, count - 1), bytes: region_bytes };
    let new = if rng.percent(50) { Value::pattern(rng.word()) } else { Value::plain(rng.word()) };
    let value = std::mem::replace(&mut c.region(region).value, new);
    let keeps = rng.percent(30);
    if keeps {
        c.count("shared memory kept open");
    }
    let op = Op::Share { region, device, value, new, keeps };
    let flags = [flag::UNSAFE, flag::DISTURB, flag::CONTEXT];
    c.emit(thread, Some(context), op, &[Thing::Buffer(buffer)], &writes, &flags);
    true
}

fn refused(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let context = c.some_context(rng);
    let stream = c.contexts[&context].legacy;
    let green = c.contexts[&context].kind == ContextKind::Green;
    let door = if !green && c.may("async") && rng.percent(50) { Door::Async } else { Door::Plain };
    let flags = [flag::UNSAFE, flag::DISTURB, flag::LEGACY];
    c.emit(thread, Some(context), Op::Refused { door, stream }, &[], &[Thing::Stream(stream)], &flags);
    true
}

fn info(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let context = c.some_context(rng);
    c.emit(thread, Some(context), Op::Info, &[], &[], &[flag::UNSAFE]);
    true
}

fn pause(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    let ms = if rng.percent(40) { rng.range(6, 30) } else { rng.range(0, 8) };
    c.emit(thread, None, Op::Pause { ms }, &[], &[], &[]);
    true
}

/// Long enough to be idle, and to go off the card if it is ordered to: where no other thread works meanwhile.
fn rest(c: &mut Composer<'_>, rng: &mut Rng, thread: usize) -> bool {
    c.emit(thread, None, Op::Pause { ms: rng.range(80, 250) }, &[], &[], &[]);
    true
}

fn fork(c: &mut Composer<'_>, _: &mut Rng, thread: usize, exec: bool) -> bool {
    c.emit(thread, None, Op::Fork { exec }, &[], &[], &[]);
    true
}
