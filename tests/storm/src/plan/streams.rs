//! Streams and events: made, ordered, waited for, destroyed with work in flight.

use super::compose::{Composer, Pending, Thing};
use super::{Effect, Id, Op, Region, StreamFact, StreamKind, flag};
use crate::rng::Rng;

/// The feature of programs with more streams than a card has queues.
const CROWD: &str = "more streams than queues";
/// The number of these streams: a card has 32 queues at most.
const CROWDED: usize = 40;

impl Composer<'_> {
    pub(super) fn make_stream(&mut self, rng: &mut Rng, thread: usize, context: Id) -> Id {
        let green = self.contexts[&context].kind == super::ContextKind::Green;
        let kind = match rng.below(8) {
            _ if green => StreamKind::NonBlocking,
            0..=2 => StreamKind::Blocking,
            3..=5 => StreamKind::NonBlocking,
            6 => StreamKind::Priority(true),
            _ => StreamKind::Priority(false),
        };
        self.make_stream_of(thread, context, kind)
    }

    pub(super) fn make_stream_of(&mut self, thread: usize, context: Id, kind: StreamKind) -> Id {
        let stream = self.facts.len();
        self.facts.push(StreamFact { context, kind });
        self.counts.streams = self.facts.len();
        self.count(match kind {
            StreamKind::Blocking => "blocking stream",
            StreamKind::NonBlocking => "non-blocking stream",
            _ => "stream with a priority",
        });
        self.streams.insert(stream, thread);
        let op = Op::StreamMake { stream, kind };
        self.emit(thread, Some(context), op, &[], &[Thing::Stream(stream)], &[flag::UNSAFE, flag::DISTURB]);
        stream
    }

    /// Whether the program has more streams than a card has queues. A stream may wait for another then, because they share
    /// a queue, so no host function waits for another thread.
    pub(super) fn is_crowded(&self) -> bool {
        self.recipe.seed % 16 == 7 && !self.recipe.without.contains(CROWD)
    }

    /// Makes more streams than a card has queues, each with work in flight.
    pub(super) fn crowd(&mut self, rng: &mut Rng, context: Id) {
        self.count(CROWD);
        for _ in 0..3 {
            self.allocate(rng, 0, context);
        }
        let regions = self.regions(|buffer, _| buffer.context == context);
        for number in 0..CROWDED {
            let thread = number % self.threads;
            let stream = self.make_stream(rng, thread, context);
            if let Some(&region) = regions.get(number % regions.len().max(1)) {
                let effect = Effect::Add(rng.word(), rng.range(0, 300) as u32);
                self.work(rng, thread, region, effect, stream);
            }
        }
    }

    pub(super) fn make_event(&mut self, rng: &mut Rng, thread: usize, context: Id) -> Id {
        let event = self.counts.events;
        self.counts.events += 1;
        self.events.insert(event, context);
        let op = Op::EventMake { event, timing: rng.percent(30) };
        self.emit(thread, Some(context), op, &[], &[Thing::Event(event)], &[]);
        event
    }

    pub(super) fn record(&mut self, thread: usize, event: Id, stream: Id) {
        let (thread, context) = (self.hand(stream, thread), self.context_of(stream));
        let flags = self.legacy_flags(stream);
        if !flags.is_empty() {
            self.count("event on the legacy stream");
        }
        let op = Op::Record { event, stream };
        self.emit(thread, Some(context), op, &[], &[Thing::Event(event), Thing::Stream(stream)], flags);
    }

    pub(super) fn end_event(&mut self, thread: usize, event: Id) {
        let context = self.events.remove(&event).expect("a live event");
        let op = Op::EventEnd { event };
        self.emit(thread, Some(context), op, &[], &[Thing::Event(event)], &[]);
    }

    /// A thing stops being pending on an event; the event may end after the last thing.
    fn unguard(&mut self, rng: &mut Rng, thread: usize, event: Id) {
        let left = self.guards.get_mut(&event).expect("a guarding event");
        *left -= 1;
        if *left == 0 {
            self.guards.remove(&event);
            if rng.percent(80) {
                self.end_event(thread, event);
            }
        }
    }

    /// Things that are pending on these streams are not any more: a step is about to wait for them. Other steps use
    /// these things only after that step.
    fn settled(&mut self, which: impl Fn(Id) -> bool) -> Vec<Thing> {
        let over = |pending: &mut Pending| {
            let is = matches!(*pending, Pending::Stream(stream) if which(stream));
            if is {
                *pending = Pending::Nothing;
            }
            is
        };
        let mut things = Vec::new();
        for (&buffer, state) in &mut self.buffers {
            for (index, region) in state.regions.iter_mut().enumerate() {
                if over(&mut region.pending) {
                    things.push(Thing::Region(buffer, index as u64));
                }
            }
        }
        for (&host, state) in &mut self.hosts {
            if over(&mut state.pending) {
                things.push(Thing::Host(host));
            }
        }
        things
    }

    pub(super) fn sync_stream(&mut self, thread: usize, stream: Id) {
        let (thread, context) = (self.hand(stream, thread), self.context_of(stream));
        let legacy = self.facts[stream].kind == StreamKind::Legacy;
        let flags: &[usize] =
            if legacy { &[flag::UNSAFE, flag::LEGACY, flag::DISTURB] } else { &[flag::UNSAFE] };
        let mut writes = self.settled(|of| of == stream);
        writes.push(Thing::Stream(stream));
        self.emit(thread, Some(context), Op::StreamSync { stream }, &[], &writes, flags);
    }

    pub(super) fn sync_context(&mut self, thread: usize, context: Id) {
        // This does not wait for work that other threads submit at the same time, so they must not submit any.
        let mine: Vec<Id> = (0..self.facts.len()).filter(|&s| self.facts[s].context == context).collect();
        let mut writes = self.settled(|stream| mine.contains(&stream));
        writes.extend(mine.iter().map(|&stream| Thing::Stream(stream)));
        let flags = [flag::UNSAFE, flag::LEGACY, flag::DISTURB, flag::CONTEXT];
        self.count("context synchronised");
        self.emit(thread, Some(context), Op::ContextSync, &[], &writes, &flags);
    }

    /// Whether the driver orders the second stream's later work behind the first's by itself.
    pub(super) fn implied(&self, first: Id, second: Id) -> bool {
        let (a, b) = (self.facts[first], self.facts[second]);
        let through = |x: StreamKind, y: StreamKind| x == StreamKind::Legacy && y.is_blocking();
        first == second || (a.context == b.context && (through(a.kind, b.kind) || through(b.kind, a.kind)))
    }

    /// Orders later work on a stream behind the pending work.
    pub(super) fn order(&mut self, rng: &mut Rng, thread: usize, pending: Pending, onto: Id, thing: Thing) {
        let context = self.context_of(onto);
        match pending {
            Pending::Nothing => {}
            Pending::Stream(stream) if self.implied(stream, onto) => {
                if stream != onto {
                    self.count("order by the legacy stream");
                }
            }
            Pending::Stream(stream) if rng.percent(50) => {
                let event = self.make_event(rng, thread, self.context_of(stream));
                self.record(thread, event, stream);
                self.wait(thread, onto, event);
                if rng.percent(70) {
                    self.count("event destroyed while it is waited for");
                    self.end_event(thread, event);
                }
            }
            Pending::Stream(_) => self.settle(rng, thread, pending, thing),
            Pending::Event(event) if self.events.get(&event) == Some(&context) || rng.percent(50) => {
                self.wait(thread, onto, event);
                self.unguard(rng, thread, event);
            }
            Pending::Event(_) => self.settle(rng, thread, pending, thing),
        }
    }

    pub(super) fn wait(&mut self, thread: usize, stream: Id, event: Id) {
        let (thread, context) = (self.hand(stream, thread), self.context_of(stream));
        if self.events.get(&event) != Some(&context) {
            self.count("wait for an event of another context");
        }
        self.count("stream waits for an event");
        let flags = self.legacy_flags(stream);
        let op = Op::Wait { stream, event };
        self.emit(thread, Some(context), op, &[Thing::Event(event)], &[Thing::Stream(stream)], flags);
    }

    /// Waits, on the host, for the work that a thing is pending on.
    pub(super) fn settle(&mut self, rng: &mut Rng, thread: usize, pending: Pending, thing: Thing) {
        match pending {
            Pending::Nothing => {}
            Pending::Stream(stream) => match rng.below(10) {
                0..=4 => self.sync_stream(thread, stream),
                5..=8 => {
                    let event = self.make_event(rng, thread, self.context_of(stream));
                    self.record(thread, event, stream);
                    if rng.percent(30) {
                        self.query(thread, event);
                    }
                    let things = self.settled(|of| of == stream);
                    self.sync_event(thread, event, &things);
                    self.end_event(thread, event);
                }
                _ => self.sync_context(thread, self.context_of(stream)),
            },
            Pending::Event(event) => {
                self.sync_event(thread, event, &[thing]);
                self.unguard(rng, thread, event);
            }
        }
    }

    pub(super) fn sync_event(&mut self, thread: usize, event: Id, over: &[Thing]) {
        let context = self.events[&event];
        self.count("event waited for");
        let op = Op::EventSync { event };
        self.emit(thread, Some(context), op, &[Thing::Event(event)], over, &[flag::UNSAFE]);
    }

    pub(super) fn query(&mut self, thread: usize, event: Id) {
        let context = self.events[&event];
        self.count("event queried");
        let op = Op::EventQuery { event };
        self.emit(thread, Some(context), op, &[Thing::Event(event)], &[], &[flag::UNSAFE]);
    }

    /// The region is about to be used on a stream; from now on it is pending there.
    pub(super) fn take(&mut self, rng: &mut Rng, thread: usize, region: Region, stream: Id) {
        let pending = self.region(region).pending;
        self.order(rng, thread, pending, stream, region.thing());
        self.region(region).pending = Pending::Stream(stream);
    }

    /// Destroys a stream; things that are pending on it get an event, or were waited for.
    pub(super) fn end_stream(&mut self, rng: &mut Rng, thread: usize, stream: Id) {
        let on = Pending::Stream(stream);
        let regions = self.regions(|_, region| region.pending == on);
        let hosts: Vec<Id> =
            self.hosts.iter().filter(|(_, host)| host.pending == on).map(|(host, _)| *host).collect();
        let waiting = regions.len() + hosts.len();
        if waiting > 0 && rng.percent(75) {
            self.count("stream destroyed with work in flight");
            let event = self.make_event(rng, thread, self.context_of(stream));
            self.record(thread, event, stream);
            self.guards.insert(event, waiting);
            for region in regions {
                self.region(region).pending = Pending::Event(event);
            }
            for host in hosts {
                self.hosts.get_mut(&host).expect("a live host buffer").pending = Pending::Event(event);
            }
        } else {
            self.sync_stream(thread, stream);
        }
        let context = self.context_of(stream);
        self.streams.remove(&stream);
        let op = Op::StreamEnd { stream };
        self.emit(thread, Some(context), op, &[], &[Thing::Stream(stream)], &[]);
    }
}
