//! Contexts: the primary ones, others beside them, and their ends with all that belongs to them.

use super::compose::{Composer, ContextState, Pending, Thing};
use super::{ContextEnd, ContextKind, Id, Op, StreamFact, StreamKind, flag};
use crate::rng::Rng;

impl Composer<'_> {
    /// The first context, and the things that each program has from its beginning.
    pub(super) fn begin(&mut self, rng: &mut Rng) {
        let context = self.make_context(0, ContextKind::Primary, 0);
        self.ballast(rng, 0, context);
        if self.is_crowded() {
            self.crowd(rng, context);
        }
        self.allocate_beside_work(rng, context);
    }

    pub(super) fn make_context(&mut self, thread: usize, kind: ContextKind, device: i32) -> Id {
        let context = self.counts.contexts;
        self.counts.contexts += 1;
        self.count(match kind {
            ContextKind::Primary => "primary context",
            ContextKind::Created => "created context",
            ContextKind::Green => "green context",
        });
        if device > 0 {
            self.count("context on a second device");
        }
        let flags = [flag::UNSAFE, flag::DISTURB, flag::LEGACY];
        let op = Op::ContextMake { context, kind, device };
        // An earlier primary context of the device is over.
        let mut writes = vec![Thing::Context(context)];
        writes.extend((0..context).map(Thing::Context));
        self.emit(thread, None, op, &[], &writes, &flags);
        let legacy = self.facts.len();
        self.facts.push(StreamFact { context, kind: StreamKind::Legacy });
        self.counts.streams = self.facts.len();
        let state = ContextState { kind, device, module: 0, legacy };
        self.contexts.insert(context, state);
        let module = self.load(thread, context, true);
        self.contexts.get_mut(&context).expect("just made").module = module;
        context
    }

    /// Loads the kernels; warm: they run once before any step waits for them.
    pub(super) fn load(&mut self, thread: usize, context: Id, warm: bool) -> Id {
        let module = self.counts.modules;
        self.counts.modules += 1;
        let op = Op::ModuleLoad { module, warm };
        let flags = [flag::UNSAFE, flag::DISTURB, flag::LEGACY];
        self.emit(thread, Some(context), op, &[], &[Thing::Module(module)], &flags);
        module
    }

    pub(super) fn unload(&mut self, thread: usize, context: Id, module: Id) {
        let flags = [flag::UNSAFE, flag::DISTURB, flag::LEGACY];
        let op = Op::ModuleUnload { module };
        self.emit(thread, Some(context), op, &[], &[Thing::Module(module)], &flags);
    }

    /// Ends a context: frees its things, some more and some less explicitly, and destroys it.
    pub(super) fn end_context(&mut self, rng: &mut Rng, thread: usize, context: Id) {
        let of = |all: Vec<(Id, Id)>| -> Vec<Id> {
            all.into_iter().filter(|(_, of)| *of == context).map(|(id, _)| id).collect()
        };
        for graph in of(self.graphs.iter().map(|(&id, graph)| (id, graph.context)).collect()) {
            self.end_graph(thread, graph);
        }
        for host in of(self.hosts.iter().map(|(&id, host)| (id, host.context)).collect()) {
            self.free_host(rng, thread, host);
        }
        for buffer in of(self.buffers.iter().map(|(&id, buffer)| (id, buffer.context)).collect()) {
            self.free(rng, thread, buffer);
        }
        // Copies to other contexts by streams of this one belong to those contexts.
        let mine = |facts: &[StreamFact], pending: Pending| matches!(pending, Pending::Stream(stream) if facts[stream].context == context);
        for region in self.regions(|_, region| mine(&self.facts, region.pending)) {
            let pending = self.region(region).pending;
            self.settle(rng, thread, pending, region.thing());
            self.region(region).pending = Pending::Nothing;
        }
        for stream in of(self.streams.keys().map(|&id| (id, self.facts[id].context)).collect()) {
            if rng.percent(50) {
                self.end_stream(rng, thread, stream);
            } else {
                // The stream ends with the context.
                self.count("stream left to the end of its context");
                self.streams.remove(&stream);
            }
        }
        // The context's things are not used afterwards, whichever thread used them.
        let mut writes = vec![Thing::Context(context)];
        for event in of(self.events.iter().map(|(&id, &of)| (id, of)).collect()) {
            if self.guards.contains_key(&event) {
                // Things that are pending on the event belong to other contexts, and are settled now.
                self.settle_guard(thread, event);
            }
            self.events.remove(&event);
            writes.push(Thing::Event(event));
        }
        let state = self.contexts.remove(&context).expect("a live context");
        self.peers.retain(|&(from, to)| from != context && to != context);
        if rng.percent(50) {
            self.unload(thread, context, state.module);
        }
        let how = match state.kind {
            ContextKind::Primary if rng.percent(50) => ContextEnd::Reset,
            ContextKind::Primary => ContextEnd::Release,
            _ => ContextEnd::Destroy,
        };
        self.count(match how {
            ContextEnd::Reset => "primary context reset",
            ContextEnd::Release => "primary context released",
            ContextEnd::Destroy => "context destroyed",
        });
        writes.extend((0..self.facts.len()).filter(|&s| self.facts[s].context == context).map(Thing::Stream));
        if state.kind == ContextKind::Primary {
            // Green contexts of the device stand on it: what other threads do with those is over by then.
            writes.extend(self.green_contexts(state.device).map(Thing::Context));
        }
        let flags = [flag::UNSAFE, flag::DISTURB, flag::LEGACY, flag::CONTEXT];
        let op = Op::ContextEnd { context, how, device: state.device };
        self.emit(thread, None, op, &[], &writes, &flags);
    }

    /// A context has access to another device's from now on.
    pub(super) fn open_peer(&mut self, thread: usize, from: Id, to: Id) {
        if self.peers.insert((from, to)) {
            self.count("peer access begins");
            self.give_access(thread, from, to, true);
        }
    }

    /// A context gives its access up, when all kernels that may use it are complete.
    pub(super) fn close_peer(&mut self, thread: usize, from: Id, to: Id) {
        self.sync_context(thread, from);
        self.peers.remove(&(from, to));
        self.count("peer access ends");
        self.give_access(thread, from, to, false);
    }

    fn give_access(&mut self, thread: usize, from: Id, to: Id, opens: bool) {
        let flags = [flag::UNSAFE, flag::DISTURB, flag::LEGACY];
        let op = Op::PeerAccess { to, opens };
        self.emit(thread, Some(from), op, &[Thing::Context(to)], &[Thing::Access(from, to)], &flags);
    }

    /// All green contexts of a device so far, those that have ended too.
    fn green_contexts(&self, of: i32) -> impl Iterator<Item = Id> {
        self.steps.iter().filter_map(move |step| match step.op {
            Op::ContextMake { context, kind: ContextKind::Green, device } if device == of => Some(context),
            _ => None,
        })
    }

    /// Waits for an event that things are pending on; from now on they are not.
    fn settle_guard(&mut self, thread: usize, event: Id) {
        let pending = Pending::Event(event);
        let regions = self.regions(|_, region| region.pending == pending);
        let mut over: Vec<Thing> = regions.iter().map(|region| region.thing()).collect();
        for region in regions {
            self.region(region).pending = Pending::Nothing;
        }
        for (&host, state) in &mut self.hosts {
            if state.pending == pending {
                state.pending = Pending::Nothing;
                over.push(Thing::Host(host));
            }
        }
        self.sync_event(thread, event, &over);
        self.guards.remove(&event);
    }
}
