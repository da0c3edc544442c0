//! Ends the things that a program leaves, if another program follows in the same process.

use std::collections::BTreeMap;

use super::{Fault, Run};
use crate::plan::{Door, HostKind, Id, Op, Plan};
use nvshare_test_cuda::{CudaError, Driver, cu};

const DEVICE: i32 = 0;

/// The primary context, kept while programs that use no other come and go.
#[derive(Debug)]
pub(crate) struct KeptContext(&'static Driver);

impl KeptContext {
    pub(crate) fn new(driver: &'static Driver) -> Result<Self, CudaError> {
        let mut context = 0u64;
        cu!(driver, "cuDevicePrimaryCtxRetain", &raw mut context => *mut u64, DEVICE => i32)?;
        Ok(Self(driver))
    }

    /// Releases the context, which ends unless another retains it.
    pub(crate) fn end(self) -> Result<(), CudaError> {
        cu!(self.0, "cuDevicePrimaryCtxRelease_v2", DEVICE => i32)
    }
}

/// Things that live when a program is over.
#[derive(Debug, Default)]
struct Left {
    streams: BTreeMap<Id, ()>,
    events: BTreeMap<Id, ()>,
    modules: BTreeMap<Id, ()>,
    graphs: BTreeMap<Id, ()>,
    buffers: BTreeMap<Id, (Door, u64)>,
    hosts: BTreeMap<Id, HostKind>,
}

impl Left {
    /// The things that live at the end of a program with one context.
    fn of(plan: &Plan) -> Self {
        let mut left = Self::default();
        for step in &plan.steps {
            match &step.op {
                Op::StreamMake { stream, .. } => _ = left.streams.insert(*stream, ()),
                Op::StreamEnd { stream } => _ = left.streams.remove(stream),
                Op::EventMake { event, .. } => _ = left.events.insert(*event, ()),
                Op::EventEnd { event } => _ = left.events.remove(event),
                Op::ModuleLoad { module, .. } => _ = left.modules.insert(*module, ()),
                Op::ModuleUnload { module } => _ = left.modules.remove(module),
                Op::Instantiate { graph, .. } | Op::Build { graph, .. } => _ = left.graphs.insert(*graph, ()),
                Op::GraphEnd { graph } => _ = left.graphs.remove(graph),
                Op::Allocate { buffer, door, bytes, .. } => _ = left.buffers.insert(*buffer, (*door, *bytes)),
                Op::Free { buffer, .. } => _ = left.buffers.remove(buffer),
                Op::HostAllocate { host, kind, .. } => _ = left.hosts.insert(*host, *kind),
                Op::HostFree { host, .. } => _ = left.hosts.remove(host),
                _ => {}
            }
        }
        left
    }
}

impl Run {
    /// Ends the things that are left, and releases the context. For a program with one context.
    pub(super) fn sweep(&self) -> Result<(), Fault> {
        let d = self.driver;
        let left = Left::of(&self.plan);
        self.end_partner()?;
        self.make_current(0)?;
        cu!(d, "cuCtxSynchronize")?;
        for &graph in left.graphs.keys() {
            cu!(d, "cuGraphExecDestroy", self.execs.get(graph) => u64)?;
        }
        for &event in left.events.keys() {
            cu!(d, "cuEventDestroy_v2", self.events.get(event) => u64)?;
        }
        for &stream in left.streams.keys() {
            cu!(d, "cuStreamDestroy_v2", self.streams.get(stream) => u64)?;
        }
        for (&buffer, &(door, bytes)) in &left.buffers {
            self.free(buffer, door, bytes, None)?;
        }
        for (&host, &kind) in &left.hosts {
            self.free_host(host, kind)?;
        }
        for &module in left.modules.keys() {
            cu!(d, "cuModuleUnload", self.modules.get(module) => u64)?;
        }
        cu!(d, "cuCtxSetCurrent", 0 => u64)?;
        Ok(cu!(d, "cuDevicePrimaryCtxRelease_v2", DEVICE => i32)?)
    }
}
