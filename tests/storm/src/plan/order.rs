//! The order of a plan: each thing is used after it is made and before it ends, whatever the threads do in between.

use std::collections::{BTreeSet, HashMap};

use super::compose::Thing;
use super::{ContextKind, Id, Op, Plan, Recipe, Region, compose};

/// The use that a step makes of a thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Touch {
    Make,
    Use,
    End,
}

/// The things that an operation names, and what it does with each.
fn named(op: &Op) -> Vec<(Thing, Touch)> {
    use Touch::{End, Make, Use};
    let at = |region: &Region| (Thing::Buffer(region.buffer), Use);
    let on = |stream: Id| (Thing::Stream(stream), Use);
    match op {
        Op::ContextMake { context, .. } => vec![(Thing::Context(*context), Make)],
        Op::ContextEnd { context, .. } => vec![(Thing::Context(*context), End)],
        Op::StreamMake { stream, .. } => vec![(Thing::Stream(*stream), Make)],
        Op::StreamEnd { stream } => vec![(Thing::Stream(*stream), End)],
        Op::StreamSync { stream } | Op::StreamQuery { stream } | Op::Callback { stream } => {
            vec![on(*stream)]
        }
        Op::Refused { stream, .. } => vec![on(*stream)],
        Op::EventMake { event, .. } => vec![(Thing::Event(*event), Make)],
        Op::EventEnd { event } => vec![(Thing::Event(*event), End)],
        Op::EventSync { event } | Op::EventQuery { event } => vec![(Thing::Event(*event), Use)],
        Op::Record { event, stream } | Op::Wait { stream, event } => {
            vec![(Thing::Event(*event), Use), on(*stream)]
        }
        Op::ModuleLoad { module, .. } => vec![(Thing::Module(*module), Make)],
        Op::ModuleUnload { module } => vec![(Thing::Module(*module), End)],
        Op::Allocate { buffer, stream, .. } => vec![(Thing::Buffer(*buffer), Make), on(*stream)],
        Op::Free { buffer, stream, .. } => {
            stream.iter().map(|&stream| on(stream)).chain([(Thing::Buffer(*buffer), End)]).collect()
        }
        Op::HostAllocate { host, .. } => vec![(Thing::Host(*host), Make)],
        Op::HostFree { host, .. } => vec![(Thing::Host(*host), End)],
        Op::HostWrite { host, .. } | Op::HostCheck { host, .. } => vec![(Thing::Host(*host), Use)],
        Op::Work { region, effect, stream, module } => {
            let from = match effect {
                super::Effect::Copy(from) => vec![at(from)],
                _ => Vec::new(),
            };
            [vec![at(region), on(*stream), (Thing::Module(*module), Use)], from].concat()
        }
        Op::CopyIn { region, host, stream, .. } | Op::CopyOut { region, host, stream, .. } => {
            vec![at(region), (Thing::Host(*host), Use), on(*stream)]
        }
        Op::PeerCopy { to, from, contexts, stream, .. } => {
            let both = [contexts.0, contexts.1].map(|context| (Thing::Context(context), Use));
            [vec![at(to), at(from), on(*stream)], both.to_vec()].concat()
        }
        Op::PeerAccess { to, .. } => vec![(Thing::Context(*to), Use)],
        Op::Prefetch { region, stream, .. } => vec![at(region), on(*stream)],
        Op::HostTouch { region, .. } | Op::Share { region, .. } => vec![at(region)],
        Op::Record1(recording, module) => {
            let regions = super::used(&recording.effects());
            let streams = [Some(recording.stream), recording.second].into_iter().flatten().map(on);
            regions.iter().map(at).chain(streams).chain([(Thing::Module(*module), Use)]).collect()
        }
        Op::Instantiate { graph, .. } => vec![(Thing::Graph(*graph), Use)],
        Op::Build { graph, nodes } => {
            let effects: Vec<_> = nodes.iter().map(|node| (node.region, node.effect)).collect();
            super::used(&effects).iter().map(at).chain([(Thing::Graph(*graph), Make)]).collect()
        }
        Op::Replay { graph, stream, .. } => vec![(Thing::Graph(*graph), Use), on(*stream)],
        Op::GraphEnd { graph } => vec![(Thing::Graph(*graph), End)],
        Op::Window { stream, region, module, .. }
        | Op::Help { stream, region, module, .. }
        | Op::Leave { stream, region, module } => {
            vec![on(*stream), at(region), (Thing::Module(*module), Use)]
        }
        Op::ContextSync
        | Op::AttachDetach
        | Op::PushPop
        | Op::Info
        | Op::Pause { .. }
        | Op::HeldUp { .. }
        | Op::Fork { .. } => Vec::new(),
    }
}

/// A plan, and the steps that are over when each of its steps begins.
struct MoverOrder<'a> {
    plan: &'a Plan,
    /// For each step and thread: of the steps up to this number, those of the thread are known to be over.
    known: Vec<Vec<usize>>,
    /// For each thing, the steps that touch it or what belongs to it.
    touched: HashMap<Thing, Vec<(usize, Touch)>>,
}

impl<'a> MoverOrder<'a> {
    fn new(plan: &'a Plan) -> Self {
        let mut now = vec![vec![0; plan.threads]; plan.threads];
        let mut known = Vec::new();
        let mut after: Vec<Vec<usize>> = Vec::new();
        let mut touched: HashMap<Thing, Vec<(usize, Touch)>> = HashMap::new();
        let mut home = HashMap::new();
        // The memory that a graph names from its recording on: it is named again when the graph is instantiated.
        let mut named_by: HashMap<Id, Vec<(Thing, Touch)>> = HashMap::new();
        for (index, step) in plan.steps.iter().enumerate() {
            let mine = &mut now[step.thread];
            for &earlier in &step.after {
                assert!(earlier < index, "seed {}: step {index} waits for {earlier}", plan.seed);
                mine.iter_mut().zip(&after[earlier]).for_each(|(mine, its)| *mine = (*mine).max(*its));
            }
            known.push(mine.clone());
            mine[step.thread] = index + 1;
            after.push(mine.clone());
            let mut contexts: BTreeSet<Id> = step.context.into_iter().collect();
            let mut things = named(&step.op);
            match &step.op {
                Op::Record1(recording, _) => {
                    let is_memory = |(thing, _): &&(Thing, Touch)| matches!(thing, Thing::Buffer(_));
                    named_by.insert(recording.graph, things.iter().filter(is_memory).copied().collect());
                }
                Op::Instantiate { graph, .. } => things.extend(named_by.get(graph).into_iter().flatten()),
                _ => {}
            }
            for (thing, touch) in things {
                if let (Touch::Make, Some(context)) = (touch, step.context) {
                    home.insert(thing, context);
                }
                match thing {
                    Thing::Stream(stream) => contexts.insert(plan.streams[stream].context),
                    thing => home.get(&thing).is_some_and(|&context| contexts.insert(context)),
                };
                touched.entry(thing).or_default().push((index, touch));
            }
            for context in contexts {
                touched.entry(Thing::Context(context)).or_default().push((index, Touch::Use));
            }
        }
        Self { plan, known, touched }
    }

    /// Whether the first step is over when the second one begins, whatever the threads do.
    fn is_before(&self, first: usize, second: usize) -> bool {
        first == second || self.known[second][self.plan.steps[first].thread] > first
    }

    fn check(&self, first: usize, second: usize, why: &str) {
        let Self { plan, .. } = self;
        assert!(
            self.is_before(first, second),
            "seed {}, {why}: step {first} {:?} is not over when step {second} {:?} begins",
            plan.seed,
            plan.steps[first].op,
            plan.steps[second].op,
        );
    }

    /// Each use of a thing is behind its making, and before its end.
    fn things_live_while_they_are_used(&self) {
        for (thing, touches) in &self.touched {
            for &(at, _) in touches.iter().filter(|(_, touch)| *touch != Touch::Use) {
                let is_end = touches.contains(&(at, Touch::End));
                for &(other, _) in touches {
                    let (first, second) = if is_end { (other, at) } else { (at, other) };
                    self.check(first, second, &format!("{thing:?}"));
                }
            }
        }
    }

    /// A primary context that ends takes green contexts of its device with it: all uses of these are on one side of the end.
    /// Returns the number of pairs of a use and an end.
    fn green_contexts_end_before_primary_ones(&self) -> usize {
        let made = |op: &Op| match *op {
            Op::ContextMake { context, kind, device } => Some((context, kind, device)),
            _ => None,
        };
        let contexts: Vec<_> = self.plan.steps.iter().filter_map(|step| made(&step.op)).collect();
        let mut pairs = 0;
        for &(primary, _, device) in contexts.iter().filter(|(_, kind, _)| *kind == ContextKind::Primary) {
            let touches = &self.touched[&Thing::Context(primary)];
            let Some(&(end, _)) = touches.iter().find(|(_, touch)| *touch == Touch::End) else { continue };
            for &(green, ..) in contexts.iter().filter(|c| c.1 == ContextKind::Green && c.2 == device) {
                for &(at, _) in &self.touched[&Thing::Context(green)] {
                    self.check(at.min(end), at.max(end), "a green context");
                    pairs += 1;
                }
            }
        }
        pairs
    }
}

#[test]
fn handles_of_a_step_live_whatever_the_threads_do() {
    let caps: BTreeSet<String> = crate::caps::ALL.iter().map(|&name| name.to_owned()).collect();
    let mut pairs = 0;
    // The last one met the end of a primary context that did not wait for a green one.
    for seed in (1..=1000).chain([602_588]) {
        let recipe = Recipe {
            seed,
            steps: 100,
            threads: 0,
            memory: 256 << 20,
            caps: caps.clone(),
            skip: BTreeSet::new(),
            without: BTreeSet::new(),
        };
        let plan = compose(&recipe);
        let order = MoverOrder::new(&plan);
        order.things_live_while_they_are_used();
        pairs += order.green_contexts_end_before_primary_ones();
    }
    assert!(pairs > 100, "there were only {pairs} uses of green contexts beside ends of primary ones");
}
