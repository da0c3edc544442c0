//! Stream captures, and the graphs that they make.

use super::compose::{Composer, GraphState, Pending, Thing};
use super::{Effect, Id, Op, Recording, Region, flag, used};
use crate::rng::Rng;

impl Composer<'_> {
    /// Captures work on a stream into a new graph.
    pub(super) fn capture(&mut self, rng: &mut Rng, thread: usize) -> bool {
        let context = self.some_context(rng);
        if self.contexts[&context].kind == super::ContextKind::Green {
            return false;
        }
        let Some(stream) = self.made_stream(rng, thread, context, None) else { return false };
        let second = if self.may("joins") && rng.percent(40) {
            self.made_stream(rng, thread, context, Some(stream))
        } else {
            None
        };
        let fits = self.regions(|buffer, _| buffer.context == context);
        if fits.is_empty() {
            return false;
        }
        let mut items = Vec::new();
        for _ in 0..rng.range(1, 5) {
            let region = rng.pick(&fits).expect("not empty");
            // The streams of one capture have no order between them here: each region belongs to one of them.
            let before = items.iter().find(|(of, _, _): &&(Region, Effect, bool)| *of == region);
            let on_second = match before {
                Some(&(_, _, on_second)) => on_second,
                None => second.is_some() && rng.percent(50),
            };
            let effect = if rng.percent(70) {
                Effect::Add(rng.word(), rng.range(0, 300) as u32)
            } else {
                Effect::Set(rng.word(), 4)
            };
            items.push((region, effect, on_second));
        }
        let small: Vec<Region> = fits
            .iter()
            .copied()
            .filter(|r| r.bytes <= 64 * 1024 && items.iter().all(|i| i.0 != *r))
            .collect();
        let node = match rng.pick(&small) {
            Some(region) if self.may("graph memory") && rng.percent(40) => {
                self.count("graph with a memory node");
                Some((region.bytes, rng.word(), region))
            }
            _ => None,
        };
        let graph = self.counts.graphs;
        self.counts.graphs += 1;
        let mode = rng.below(3) as i32;
        let pause_ms = if rng.percent(40) { rng.range(1, 12) } else { 0 };
        let recording = Recording { graph, stream, second, mode, items, node, pause_ms };
        self.record_graph(thread, context, recording.clone(), false);
        let effects = recording.effects();
        for region in used(&effects) {
            self.region(region).graphs += 1;
        }
        let recording = Some(recording);
        self.graphs.insert(graph, GraphState { context, effects, recording, launched: false });
        true
    }

    fn record_graph(&mut self, thread: usize, context: Id, recording: Recording, update: bool) {
        self.count(match recording.mode {
            0 => "capture in global mode",
            1 => "capture in thread-local mode",
            _ => "capture in relaxed mode",
        });
        let mut flags = vec![flag::CAPTURE];
        let streams = [Some(recording.stream), recording.second];
        if streams.into_iter().flatten().any(|stream| self.is_blocking(stream)) {
            self.count("capture of a blocking stream");
            flags.push(flag::BLOCKING);
        } else {
            self.count("capture of a non-blocking stream");
        }
        if recording.second.is_some() {
            self.count("capture joined from a second stream");
        }
        if recording.mode == 0 || !self.has("modes") {
            flags.push(flag::GLOBAL);
        }
        let graph = recording.graph;
        let mut writes = vec![Thing::Graph(graph)];
        writes.extend(streams.into_iter().flatten().map(Thing::Stream));
        let module = self.contexts[&context].module;
        let mut reads = vec![Thing::Module(module)];
        let memory: Vec<Thing> =
            used(&recording.effects()).into_iter().map(|region| Thing::Buffer(region.buffer)).collect();
        reads.extend(&memory);
        let op = Op::Record1(Box::new(recording), module);
        self.emit(thread, Some(context), op, &reads, &writes, &flags);
        // The driver looks at the addresses that the graph names (measured).
        let op = Op::Instantiate { graph, update };
        self.emit(thread, Some(context), op, &memory, &[Thing::Graph(graph)], &[flag::UNSAFE]);
    }

    /// Captures the same work again with other numbers, and updates the graph.
    pub(super) fn update(&mut self, rng: &mut Rng, thread: usize) -> bool {
        let recorded = |(&graph, state): (&Id, &GraphState)| Some((graph, state.recording.clone()?));
        let known: Vec<(Id, Recording)> = self
            .graphs
            .iter()
            .filter_map(recorded)
            .filter(|(_, recording)| recording.node.is_none())
            .collect();
        if known.is_empty() {
            return false;
        }
        let (graph, mut recording) = known[rng.below(known.len())].clone();
        let context = self.graphs[&graph].context;
        let Some(stream) = self.made_stream(rng, thread, context, None) else { return false };
        if recording.second.is_some() {
            let Some(second) = self.made_stream(rng, thread, context, Some(stream)) else { return false };
            recording.second = Some(second);
        }
        recording.stream = stream;
        recording.mode = rng.below(3) as i32;
        for (_, effect, _) in &mut recording.items {
            match effect {
                Effect::Add(value, _) | Effect::Set(value, _) => *value = rng.word(),
                Effect::Pattern(..) | Effect::Copy(_) => {}
            }
        }
        self.record_graph(thread, context, recording.clone(), true);
        let state = self.graphs.get_mut(&graph).expect("a live graph");
        state.effects = recording.effects();
        state.recording = Some(recording);
        true
    }

    pub(super) fn replay(&mut self, rng: &mut Rng, thread: usize) -> bool {
        let known: Vec<Id> = self.graphs.keys().copied().collect();
        let Some(graph) = rng.pick(&known) else { return false };
        let context = self.graphs[&graph].context;
        let stream = self.some_stream(rng, thread, context);
        let times = if rng.percent(50) { 1 } else { rng.range(2, 6) as u32 };
        let effects = self.graphs[&graph].effects.clone();
        let regions = used(&effects);
        let mut writes = vec![Thing::Graph(graph), Thing::Stream(stream)];
        for &region in &regions {
            self.take(rng, thread, region, stream);
            writes.push(region.thing());
        }
        for &region in &regions {
            // Taking a region may have waited for more than the region.
            self.region(region).pending = Pending::Stream(stream);
        }
        for _ in 0..times {
            for &(region, effect) in &effects {
                self.apply(region, effect);
            }
        }
        let reads: Vec<Thing> = regions.iter().map(|region| Thing::Buffer(region.buffer)).collect();
        let flags = self.legacy_flags(stream);
        let by = self.hand(stream, thread);
        self.emit(by, Some(context), Op::Replay { graph, stream, times }, &reads, &writes, flags);
        self.graphs.get_mut(&graph).expect("a live graph").launched = true;
        true
    }

    pub(super) fn end_graph(&mut self, thread: usize, graph: Id) {
        let state = self.graphs.remove(&graph).expect("a live graph");
        let regions = used(&state.effects);
        if regions.iter().any(|&region| self.region(region).pending != Pending::Nothing) && state.launched {
            self.count("graph destroyed with work in flight");
        }
        for region in regions {
            self.region(region).graphs -= 1;
        }
        let op = Op::GraphEnd { graph };
        self.emit(thread, Some(state.context), op, &[], &[Thing::Graph(graph)], &[flag::UNSAFE]);
    }
}
