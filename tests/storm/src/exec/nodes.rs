//! Graphs that are built node by node.

use std::ptr;

use super::{Fault, Run};
use crate::plan::{Effect, Form, Given, Id, Node};
use nvshare_test_cuda::{CudaError, cu};

/// `CUgraphNodeParams`: the kind, then what the older functions take.
type Params = [u64; 32];
/// `CUDA_MEMCPY3D`
type Copy3D = [u64; 25];
/// `CUDA_MEMSET_NODE_PARAMS`
type Fill = [u64; 5];

/// `CU_GRAPH_NODE_TYPE_MEMCPY` and `CU_GRAPH_NODE_TYPE_MEMSET`
const COPY: u64 = 1;
const FILL: u64 = 2;
/// `CU_MEMORYTYPE_DEVICE`
const DEVICE_MEMORY: u64 = 2;

/// The parameters of a node.
enum Does {
    Copy(Copy3D),
    Fill(Fill),
}

impl Does {
    fn any(&self, context: u64) -> Params {
        let mut params = [0; 32];
        match self {
            Self::Copy(copy) => {
                params[0] = COPY;
                params[3] = context;
                params[4..29].copy_from_slice(copy);
            }
            Self::Fill(fill) => {
                params[0] = FILL;
                params[2..7].copy_from_slice(fill);
                params[7] = context;
            }
        }
        params
    }
}

impl Run {
    /// The work of a node in the end.
    fn does(&self, node: &Node) -> Does {
        let (address, bytes) = (self.address(node.region), node.region.bytes);
        match node.effect {
            Effect::Set(word, size) => fill(address, word, size, bytes),
            Effect::Copy(from) => copy(address, self.address(from), bytes),
            Effect::Add(..) | Effect::Pattern(..) => unreachable!("kernels are captured"),
        }
    }

    /// The work of a node until it is changed: nothing that the program wants.
    fn did(&self, node: &Node) -> Does {
        let (address, bytes) = (self.address(node.region), node.region.bytes);
        match node.effect {
            Effect::Set(word, size) => fill(address, !word, size, bytes),
            _ => copy(address, address, bytes),
        }
    }

    /// Builds a graph, and makes it executable.
    pub(super) fn build_graph(&self, id: Id, context: Id, nodes: &[Node]) -> Result<(), Fault> {
        let d = self.driver;
        let (mut graph, mut exec, mut last) = (0u64, 0u64, 0u64);
        let mut handles = Vec::new();
        cu!(d, "cuGraphCreate", &raw mut graph => *mut u64, 0 => u32)?;
        for node in nodes {
            let named = if node.is_named { self.contexts.get(context) } else { 0 };
            let first = if node.given == Given::Added { self.does(node) } else { self.did(node) };
            last = self.add(graph, (last != 0).then_some(last), node.form, &first, named)?;
            if node.given == Given::InGraph {
                self.change(last, None, node.form, &self.does(node), named)?;
            }
            handles.push((last, named));
        }
        cu!(d, "cuGraphInstantiateWithFlags", &raw mut exec => *mut u64, graph => u64, 0 => u64)?;
        self.execs.set(id, exec);
        for (node, (handle, named)) in nodes.iter().zip(handles) {
            if node.given == Given::InExec {
                self.change(handle, Some(exec), node.form, &self.does(node), named)?;
            }
        }
        Ok(cu!(d, "cuGraphDestroy", graph => u64)?)
    }

    /// Adds a node behind another one.
    fn add(
        &self,
        graph: u64,
        behind: Option<u64>,
        form: Form,
        does: &Does,
        named: u64,
    ) -> Result<u64, CudaError> {
        let d = self.driver;
        let mut node = 0u64;
        let place = &raw mut node;
        let count = behind.iter().count();
        let behind = behind.as_ref().map_or(ptr::null(), ptr::from_ref);
        let mut params = does.any(named);
        let params = params.as_mut_ptr();
        match (form, does) {
            (Form::Older, Does::Copy(copy)) => {
                cu!(d, "cuGraphAddMemcpyNode", place => *mut u64, graph => u64, behind => *const u64, count => usize,
                    copy.as_ptr() => *const u64, named => u64)
            }
            (Form::Older, Does::Fill(fill)) => {
                cu!(d, "cuGraphAddMemsetNode", place => *mut u64, graph => u64, behind => *const u64, count => usize,
                    fill.as_ptr() => *const u64, named => u64)
            }
            (Form::Any, _) => cu!(d, "cuGraphAddNode", place => *mut u64, graph => u64, behind => *const u64,
                count => usize, params => *mut u64),
            (Form::WithData, _) => {
                cu!(d, "cuGraphAddNode_v2", place => *mut u64, graph => u64, behind => *const u64,
                ptr::null() => *const u64, count => usize, params => *mut u64)
            }
        }?;
        Ok(node)
    }

    /// Gives a node other parameters, in an executable graph if one is given.
    fn change(
        &self,
        node: u64,
        exec: Option<u64>,
        form: Form,
        does: &Does,
        named: u64,
    ) -> Result<(), CudaError> {
        let d = self.driver;
        let mut params = does.any(named);
        let params = params.as_mut_ptr();
        match (form, does, exec) {
            (Form::Older, Does::Copy(copy), None) => {
                cu!(d, "cuGraphMemcpyNodeSetParams", node => u64, copy.as_ptr() => *const u64)
            }
            (Form::Older, Does::Fill(fill), None) => {
                cu!(d, "cuGraphMemsetNodeSetParams", node => u64, fill.as_ptr() => *const u64)
            }
            (Form::Older, Does::Copy(copy), Some(exec)) => {
                cu!(d, "cuGraphExecMemcpyNodeSetParams", exec => u64, node => u64, copy.as_ptr() => *const u64,
                    named => u64)
            }
            (Form::Older, Does::Fill(fill), Some(exec)) => {
                cu!(d, "cuGraphExecMemsetNodeSetParams", exec => u64, node => u64, fill.as_ptr() => *const u64,
                    named => u64)
            }
            (_, _, None) => cu!(d, "cuGraphNodeSetParams", node => u64, params => *mut u64),
            (_, _, Some(exec)) => {
                cu!(d, "cuGraphExecNodeSetParams", exec => u64, node => u64, params => *mut u64)
            }
        }
    }
}

/// A fill with the low `size` bytes of a word.
fn fill(address: u64, word: u32, size: u32, bytes: u64) -> Does {
    let word = if size < 4 { word & ((1 << (8 * size)) - 1) } else { word };
    Does::Fill([address, 0, u64::from(word) | u64::from(size) << 32, bytes / u64::from(size), 1])
}

fn copy(to: u64, from: u64, bytes: u64) -> Does {
    let mut copy = [0; 25];
    // Each side: the place in x, y, z, the level, the kind, the host's and the device's address, and more.
    for (side, address) in [(0, from), (11, to)] {
        copy[side + 4] = DEVICE_MEMORY;
        copy[side + 6] = address;
    }
    copy[22..].copy_from_slice(&[bytes, 1, 1]);
    Does::Copy(copy)
}
