//! Graphs that a program builds itself, node by node.

use super::buffers::MAX_COPIED;
use super::compose::{Composer, GraphState, Thing};
use super::{ContextKind, Door, Effect, Form, Given, Node, Op, Region, flag, used};
use crate::rng::Rng;

impl Composer<'_> {
    /// Builds a graph of fills and copies, each behind the one before.
    pub(super) fn build(&mut self, rng: &mut Rng, thread: usize) -> bool {
        let context = self.some_context(rng);
        if self.contexts[&context].kind == ContextKind::Green {
            return false;
        }
        let fits = self.regions(|buffer, _| buffer.context == context && buffer.region_bytes <= MAX_COPIED);
        let mut nodes = Vec::new();
        for _ in 0..rng.range(1, 5) {
            let Some(region) = rng.pick(&fits) else { return false };
            nodes.push(self.node(rng, region, &fits));
        }
        let effects: Vec<_> = nodes.iter().map(|node| (node.region, node.effect)).collect();
        let graph = self.counts.graphs;
        self.counts.graphs += 1;
        let regions = used(&effects);
        let memory: Vec<Thing> = regions.iter().map(|region| Thing::Buffer(region.buffer)).collect();
        let op = Op::Build { graph, nodes };
        self.emit(thread, Some(context), op, &memory, &[Thing::Graph(graph)], &[flag::UNSAFE]);
        for region in regions {
            self.region(region).graphs += 1;
        }
        self.graphs.insert(graph, GraphState { context, effects, recording: None, launched: false });
        true
    }

    fn node(&mut self, rng: &mut Rng, region: Region, fits: &[Region]) -> Node {
        // The driver refuses another source of a copy in an executable graph if one of both belongs to a context and the other does not
        // (measured). Under nvshare other kinds of memory do.
        let kind = |region: &Region| match self.buffers[&region.buffer].door {
            Door::Pitch => Door::Plain,
            Door::FromPool => Door::Async,
            door => door,
        };
        let is_source =
            |from: &Region| *from != region && from.bytes >= region.bytes && kind(from) == kind(&region);
        let sources: Vec<Region> = fits.iter().copied().filter(is_source).collect();
        let effect = match rng.pick(&sources) {
            Some(from) if rng.percent(40) => Effect::Copy(from),
            _ => Effect::Set(rng.word(), [1, 2, 4][rng.below(3)]),
        };
        let form = [Form::Older, Form::Any, Form::WithData][rng.below(3)];
        self.count(match form {
            Form::Older => "node of one kind",
            Form::Any => "node of any kind",
            Form::WithData => "node of any kind with data of its edges",
        });
        let given = [Given::Added, Given::InGraph, Given::InExec][rng.below(3)];
        match given {
            Given::Added => {}
            Given::InGraph => self.count("node changed in its graph"),
            Given::InExec => self.count("node changed in an executable graph"),
        }
        // Memory of `cuMemCreate` belongs to no context, and what pools hand out was not measured.
        let belongs = matches!(self.buffers[&region.buffer].door, Door::Plain | Door::Pitch | Door::Managed);
        let is_named = !belongs || rng.percent(50);
        if !is_named {
            self.count("node that names no context");
        }
        Node { region, effect, form, given, is_named }
    }
}
