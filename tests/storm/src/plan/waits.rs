//! Host functions that wait for other threads, and the end of a program.

use super::compose::{Composer, Pending, Thing};
use super::{Effect, Farewell, Id, Op, Region, StreamKind, flag};
use crate::rng::Rng;

impl Composer<'_> {
    /// A host function on one stream waits until another thread's work on another stream is done.
    pub(super) fn window(&mut self, rng: &mut Rng, thread: usize) -> bool {
        if self.threads < 2 || self.is_crowded() {
            return false;
        }
        let context = self.some_context(rng);
        if self.contexts[&context].kind == super::ContextKind::Green {
            return false;
        }
        let other = (thread + 1 + rng.below(self.threads - 1)) % self.threads;
        let fits = self.regions(|buffer, _| buffer.context == context);
        if fits.len() < 2 {
            return false;
        }
        let a = rng.pick(&fits).expect("not empty");
        let b = rng.pick(&fits).expect("not empty");
        if a == b {
            return false;
        }
        // Mostly two blocking streams: that is where an event on the legacy stream would stand between them.
        let Some(first) = self.waiting_stream(rng, thread, context) else { return false };
        let second = match rng.below(10) {
            0..=1 => self.per_thread(other, context),
            2 => match self.made_stream(rng, other, context, Some(first)) {
                Some(stream) => stream,
                None => return false,
            },
            _ => {
                let fits: Vec<Id> = self
                    .streams
                    .keys()
                    .copied()
                    .filter(|&s| {
                        s != first && self.facts[s].context == context && self.facts[s].kind.is_blocking()
                    })
                    .collect();
                match rng.pick(&fits) {
                    Some(stream) => stream,
                    None => self.make_stream_of(other, context, StreamKind::Blocking),
                }
            }
        };
        self.take(rng, thread, a, first);
        self.take(rng, other, b, second);
        // Earlier work in the second stream is complete, and so is all work that it depends on.
        self.sync_stream(other, second);
        self.region(a).pending = Pending::Nothing;
        self.region(b).pending = Pending::Nothing;
        // Work of the legacy stream may stand behind another host function, for which the driver may have no other thread; and
        // the second stream behind that. Only a blocking first stream waits for it by itself.
        let legacy = self.contexts[&context].legacy;
        let mut reads = Vec::new();
        if !self.is_blocking(first) {
            self.sync_stream(thread, legacy);
            reads.push(Thing::Stream(legacy));
        }
        let module = self.contexts[&context].module;
        let value = rng.word();
        let values: Vec<u32> = (0..rng.range(1, 4)).map(|_| rng.word()).collect();
        let pause_ms = if rng.percent(70) { rng.range(6, 30) } else { rng.range(0, 5) };
        let hold_ms = if rng.percent(50) { rng.range(0, 12) } else { 0 };
        self.apply(a, Effect::Add(value, 0));
        for &value in &values {
            self.apply(b, Effect::Add(value, 0));
        }
        if self.is_blocking(first) && self.is_blocking(second) {
            self.count("host function of a blocking stream waits for another blocking one");
        }
        let writes = [Thing::Stream(first), a.thing()];
        reads.extend([Thing::Buffer(a.buffer), Thing::Module(module)]);
        let op = Op::Window { stream: first, region: a, value, module, hold_ms };
        self.emit(thread, Some(context), op, &reads, &writes, &[flag::WINDOW, flag::UNSAFE]);
        let writes = [Thing::Stream(second), b.thing()];
        let reads = [Thing::Buffer(b.buffer), Thing::Module(module)];
        let op = Op::Help { stream: second, region: b, values, module, pause_ms };
        self.emit(other, Some(context), op, &reads, &writes, &[]);
        true
    }

    fn waiting_stream(&mut self, rng: &mut Rng, thread: usize, context: Id) -> Option<Id> {
        if rng.percent(20) {
            return self.made_stream(rng, thread, context, None);
        }
        let fits: Vec<Id> = self
            .streams
            .keys()
            .copied()
            .filter(|&s| self.facts[s].context == context && self.facts[s].kind == StreamKind::Blocking)
            .collect();
        match rng.pick(&fits) {
            Some(stream) => Some(stream),
            None => Some(self.make_stream_of(thread, context, StreamKind::Blocking)),
        }
    }

    /// Checks all live things; then destroys some of them, and leaves work in flight. Returns the regions that this work leaves alone.
    pub(super) fn end(&mut self, rng: &mut Rng) -> Vec<Region> {
        let mut unchanged: Vec<Region> = self.regions(|_, _| true);
        for region in unchanged.clone() {
            let thread = rng.below(self.threads);
            let context = self.buffers[&region.buffer].context;
            let (stream, way) = self.some_way(rng, thread, context, false);
            self.copy_out(rng, thread, region, stream, way);
        }
        let contexts: Vec<Id> = self.contexts.keys().copied().collect();
        for context in contexts {
            let thread = rng.below(self.threads);
            if self.contexts[&context].kind != super::ContextKind::Green {
                self.sync_context(thread, context);
            }
        }
        if rng.percent(50) {
            let regions = self.regions(|_, _| true);
            for _ in 0..3 {
                let Some(region) = rng.pick(&regions) else { break };
                let thread = rng.below(self.threads);
                let context = self.buffers[&region.buffer].context;
                let stream = self.some_stream(rng, thread, context);
                if self.facts[stream].kind == StreamKind::Legacy {
                    continue;
                }
                self.take(rng, thread, region, stream);
                unchanged.retain(|other| *other != region);
                let module = self.contexts[&context].module;
                let by = self.hand(stream, thread);
                self.count("exit with work in flight");
                let writes = [Thing::Stream(stream), region.thing()];
                let reads = [Thing::Buffer(region.buffer), Thing::Module(module)];
                let op = Op::Leave { stream, region, module };
                self.emit(by, Some(context), op, &reads, &writes, &[]);
            }
        }
        unchanged
    }

    /// The work of an exit handler, which some programs have.
    pub(super) fn farewell(&mut self, rng: &mut Rng, unchanged: &[Region]) -> Option<Farewell> {
        const LINGERS: &str = "exit handler that lingers";
        const READS: &str = "exit handler that reads memory";
        if self.recipe.without.contains(LINGERS) || !rng.percent(30) {
            return None;
        }
        self.count(LINGERS);
        // Longer than most turns, so that the memory is away where others want the card.
        let linger_ms = rng.range(50, 400);
        let region = rng.pick(unchanged).filter(|_| !self.recipe.without.contains(READS));
        let reads = region.map(|region| {
            self.count(READS);
            (self.buffers[&region.buffer].context, region, self.region(region).value)
        });
        Some(Farewell { linger_ms, reads })
    }
}
