//! Composes a program: keeps the state of each thing at each step, and what has to be over before the thing is used.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::picks::PICKS;
use super::{
    ContextKind, Counts, Door, HostKind, Id, Op, Plan, Recipe, Region, Step, StreamFact, StreamKind,
};
use super::{Value, flag};
use crate::rng::Rng;

/// Live streams of a program: as many as a card has queues, so that none waits for another by chance.
const MAX_STREAMS: usize = 20;

/// Work that was submitted for a thing and may not be complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pending {
    Nothing,
    /// The work is among this stream's last submissions.
    Stream(Id),
    /// The work is complete when this event is.
    Event(Id),
}

/// Things that steps use, and so may have to wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Thing {
    Context(Id),
    Stream(Id),
    Event(Id),
    Module(Id),
    Buffer(Id),
    Region(Id, u64),
    Host(Id),
    Graph(Id),
    /// The access of a context to another device's.
    Access(Id, Id),
}

impl Region {
    pub(super) fn thing(self) -> Thing {
        Thing::Region(self.buffer, self.index)
    }
}

#[derive(Debug)]
pub(super) struct ContextState {
    pub(super) kind: ContextKind,
    pub(super) device: i32,
    pub(super) module: Id,
    pub(super) legacy: Id,
}

#[derive(Debug)]
pub(super) struct RegionState {
    pub(super) value: Value,
    pub(super) pending: Pending,
    /// Number of graphs that name the region.
    pub(super) graphs: usize,
}

#[derive(Debug)]
pub(super) struct BufferState {
    pub(super) context: Id,
    pub(super) door: Door,
    pub(super) bytes: u64,
    pub(super) region_bytes: u64,
    pub(super) regions: Vec<RegionState>,
}

#[derive(Debug)]
pub(super) struct HostState {
    pub(super) context: Id,
    pub(super) kind: HostKind,
    pub(super) bytes: u64,
    pub(super) value: Option<Value>,
    pub(super) pending: Pending,
}

#[derive(Debug)]
pub(super) struct GraphState {
    pub(super) context: Id,
    /// Its effects, in order.
    pub(super) effects: Vec<(Region, super::Effect)>,
    /// None: it was built.
    pub(super) recording: Option<super::Recording>,
    /// The graph was launched, and nobody has waited for it.
    pub(super) launched: bool,
}

pub(super) struct Composer<'a> {
    pub(super) recipe: &'a Recipe,
    pub(super) threads: usize,
    pub(super) steps: Vec<Step>,
    pub(super) counts: Counts,
    pub(super) facts: Vec<StreamFact>,
    pub(super) features: BTreeMap<String, u64>,
    used: HashMap<Thing, (Option<usize>, Vec<usize>)>,
    pub(super) contexts: BTreeMap<Id, ContextState>,
    /// Which contexts have access to which of another device.
    pub(super) peers: BTreeSet<(Id, Id)>,
    pub(super) streams: BTreeMap<Id, usize>,
    pub(super) buffers: BTreeMap<Id, BufferState>,
    pub(super) hosts: BTreeMap<Id, HostState>,
    pub(super) graphs: BTreeMap<Id, GraphState>,
    /// Events that things are pending on, and the number of these things.
    pub(super) guards: BTreeMap<Id, usize>,
    /// Contexts of live events.
    pub(super) events: BTreeMap<Id, Id>,
    pub(super) allocated: u64,
    pick: usize,
}

/// Composes the program of a recipe.
pub(crate) fn compose(recipe: &Recipe) -> Plan {
    let mut rng = Rng::part(recipe.seed, u64::MAX);
    let threads = match rng.below(10) {
        0 => 1,
        1..=6 => rng.range(2, 6),
        _ => rng.range(7, 16),
    } as usize;
    let threads = if recipe.threads > 0 { recipe.threads.min(16) } else { threads };
    let mut composer = Composer {
        recipe,
        threads,
        steps: Vec::new(),
        counts: Counts::default(),
        facts: Vec::new(),
        features: BTreeMap::new(),
        used: HashMap::new(),
        contexts: BTreeMap::new(),
        peers: BTreeSet::new(),
        streams: BTreeMap::new(),
        buffers: BTreeMap::new(),
        hosts: BTreeMap::new(),
        graphs: BTreeMap::new(),
        guards: BTreeMap::new(),
        events: BTreeMap::new(),
        allocated: 0,
        pick: 0,
    };
    composer.begin(&mut rng);
    let total: usize = PICKS.iter().map(|pick| pick.weight).sum();
    for pick in 0..recipe.steps {
        composer.pick = pick + 1;
        let mut rng = Rng::part(recipe.seed, pick as u64);
        let thread = rng.next() as usize % threads;
        let mut at = rng.below(total);
        let chosen = PICKS
            .iter()
            .find(|pick| match at.checked_sub(pick.weight) {
                Some(left) => {
                    at = left;
                    false
                }
                None => true,
            })
            .expect("the weights add up");
        let left_out = recipe.skip.contains(&pick) || recipe.without.contains(chosen.name);
        let lacks = !chosen.needs.is_empty() && !composer.has(chosen.needs);
        if !left_out && !lacks && (chosen.compose)(&mut composer, &mut rng, thread) {
            composer.count(chosen.name);
        }
    }
    composer.pick = recipe.steps + 1;
    let unchanged = composer.end(&mut rng);
    let leaver = rng.below(threads);
    if leaver > 0 {
        composer.count("exit from another thread");
    }
    // A part of its own: other programs mean what they meant.
    let farewell = composer.farewell(&mut Rng::part(recipe.seed, u64::MAX - 1), &unchanged);
    Plan {
        seed: recipe.seed,
        threads,
        steps: composer.steps,
        counts: composer.counts,
        streams: composer.facts,
        features: composer.features,
        leaver,
        farewell,
    }
}

impl Composer<'_> {
    pub(super) fn has(&self, cap: &str) -> bool {
        self.recipe.caps.contains(cap)
    }

    /// Whether the driver has this capability, and it is not left out.
    pub(super) fn may(&self, cap: &str) -> bool {
        self.has(cap) && !self.recipe.without.contains(cap)
    }

    pub(super) fn count(&mut self, feature: &str) {
        *self.features.entry(feature.to_owned()).or_default() += 1;
    }

    /// Adds a step. Other steps may use at the same time the things that it only reads.
    pub(super) fn emit(
        &mut self,
        thread: usize,
        context: Option<Id>,
        op: Op,
        reads: &[Thing],
        writes: &[Thing],
        excludes: &[usize],
    ) -> usize {
        let index = self.steps.len();
        let mut latest: BTreeMap<usize, usize> = BTreeMap::new();
        let mut follow = |step: usize, of: usize| {
            if of != thread {
                let entry = latest.entry(of).or_insert(step);
                *entry = step.max(*entry);
            }
        };
        let current = context.map(Thing::Context);
        for thing in reads.iter().copied().chain(current) {
            let (write, readers) = self.used.entry(thing).or_default();
            if let Some(step) = *write {
                follow(step, self.steps[step].thread);
            }
            readers.push(index);
        }
        for thing in writes {
            let (write, readers) = self.used.entry(*thing).or_default();
            for step in write.iter().chain(readers.iter()).copied().filter(|&step| step != index) {
                follow(step, self.steps[step].thread);
            }
            *write = Some(index);
            readers.clear();
        }
        let after = latest.into_values().collect::<BTreeSet<_>>().into_iter().collect();
        let excludes = excludes.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
        self.steps.push(Step { thread, context, op, after, excludes, pick: self.pick });
        index
    }

    /// The flags of work that is submitted to a stream.
    pub(super) fn legacy_flags(&self, stream: Id) -> &'static [usize] {
        if self.facts[stream].kind == StreamKind::Legacy {
            &[flag::LEGACY, flag::DISTURB, flag::UNSAFE]
        } else {
            &[]
        }
    }

    /// The context of a stream.
    pub(super) fn context_of(&self, stream: Id) -> Id {
        self.facts[stream].context
    }

    /// The thread that may submit to a stream: the owner of a per-thread stream, else the thread that wants to.
    pub(super) fn hand(&self, stream: Id, thread: usize) -> usize {
        match self.facts[stream].kind {
            StreamKind::PerThread(of) => of,
            _ => thread,
        }
    }

    /// A live context, often the first.
    pub(super) fn some_context(&self, rng: &mut Rng) -> Id {
        let live: Vec<Id> = self.contexts.keys().copied().collect();
        if rng.percent(50) { live[0] } else { live[rng.below(live.len())] }
    }

    /// A stream of a context, made if there is none; preferably the thread's own.
    pub(super) fn some_stream(&mut self, rng: &mut Rng, thread: usize, context: Id) -> Id {
        let state = &self.contexts[&context];
        let (legacy, green) = (state.legacy, state.kind == ContextKind::Green);
        let chance = rng.below(100);
        if chance < 8 && !green {
            self.count("legacy stream");
            return legacy;
        }
        if chance < 20 && !green {
            return self.per_thread(thread, context);
        }
        let of = |home: Option<usize>| -> Vec<Id> {
            let all = self.streams.iter();
            all.filter(|(stream, of)| {
                self.facts[**stream].context == context && home.is_none_or(|home| home == **of)
            })
            .map(|(stream, _)| *stream)
            .collect()
        };
        let mine = of(Some(thread));
        if !mine.is_empty() && !rng.percent(25) {
            return mine[rng.below(mine.len())];
        }
        let all = of(None);
        let full = self.streams.len() >= MAX_STREAMS;
        if !all.is_empty() && (full || rng.percent(60)) {
            return all[rng.below(all.len())];
        }
        if full { legacy } else { self.make_stream(rng, thread, context) }
    }

    /// A stream that was made, so that it can capture and is not a default stream.
    pub(super) fn made_stream(
        &mut self,
        rng: &mut Rng,
        thread: usize,
        context: Id,
        other: Option<Id>,
    ) -> Option<Id> {
        let known: Vec<Id> = self.streams.keys().copied().collect();
        let fits: Vec<Id> = known
            .into_iter()
            .filter(|&stream| self.facts[stream].context == context && other != Some(stream))
            .collect();
        if !fits.is_empty() && rng.percent(60) {
            return rng.pick(&fits);
        }
        if self.streams.len() >= MAX_STREAMS {
            return rng.pick(&fits);
        }
        Some(self.make_stream(rng, thread, context))
    }

    /// The thread's own default stream in a context.
    pub(super) fn per_thread(&mut self, thread: usize, context: Id) -> Id {
        self.count("per-thread stream");
        if context != *self.contexts.keys().next().expect("there is a context") {
            self.count("per-thread stream in a second context");
        }
        let kind = StreamKind::PerThread(thread);
        let known = self.facts.iter().position(|fact| fact.context == context && fact.kind == kind);
        known.unwrap_or_else(|| {
            self.facts.push(StreamFact { context, kind });
            self.counts.streams = self.facts.len();
            self.facts.len() - 1
        })
    }

    /// The regions that fit, as (buffer, region).
    pub(super) fn regions(&self, fits: impl Fn(&BufferState, &RegionState) -> bool) -> Vec<Region> {
        let all = self.buffers.iter();
        all.flat_map(|(&buffer, state)| {
            let fits = &fits;
            state
                .regions
                .iter()
                .enumerate()
                .filter(move |(_, region)| fits(state, region))
                .map(move |(index, _)| Region { buffer, index: index as u64, bytes: state.region_bytes })
        })
        .collect()
    }

    pub(super) fn region(&mut self, region: Region) -> &mut RegionState {
        let buffer = self.buffers.get_mut(&region.buffer).expect("a live buffer");
        &mut buffer.regions[region.index as usize]
    }
}
