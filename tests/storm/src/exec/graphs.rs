//! Captures, and the graphs that they make.

use std::time::Duration;

use super::{Fault, Run};
use crate::plan::{Id, Recording};
use nvshare_test_cuda::cu;

/// `CUgraphExecUpdateResultInfo`
#[repr(C)]
#[derive(Debug, Default)]
struct UpdateResult {
    result: i32,
    node: usize,
    from: usize,
}

impl Run {
    pub(super) fn record_graph(&self, recording: &Recording, module: Id) -> Result<(), Fault> {
        let d = self.driver;
        let first = self.stream(recording.stream);
        let mut events = [0u64; 2];
        if recording.second.is_some() {
            for event in &mut events {
                cu!(d, "cuEventCreate", &raw mut *event => *mut u64, 2 => u32)?;
            }
        }
        cu!(d, "cuStreamBeginCapture", first => usize, recording.mode => i32)?;
        if let Some(second) = recording.second {
            let second = self.stream(second);
            cu!(d, "cuEventRecord", events[0] => u64, first => usize)?;
            cu!(d, "cuStreamWaitEvent", second => usize, events[0] => u64, 0 => u32)?;
        }
        for &(region, effect, on_second) in &recording.items {
            let stream = if on_second { recording.second.expect("joined") } else { recording.stream };
            self.effect(module, region, effect, stream, true)?;
        }
        if let Some((bytes, word, region)) = recording.node {
            let mut inside = 0u64;
            cu!(d, "cuMemAllocAsync", &raw mut inside => *mut u64, bytes as usize => usize, first => usize)?;
            cu!(d, "cuMemsetD32Async", inside => u64, word => u32, bytes as usize / 4 => usize,
                first => usize)?;
            let to = self.address(region);
            cu!(d, "cuMemcpyDtoDAsync_v2", to => u64, inside => u64, bytes as usize => usize,
                first => usize)?;
            cu!(d, "cuMemFreeAsync", inside => u64, first => usize)?;
        }
        std::thread::sleep(Duration::from_millis(recording.pause_ms));
        if let Some(second) = recording.second {
            let second = self.stream(second);
            cu!(d, "cuEventRecord", events[1] => u64, second => usize)?;
            cu!(d, "cuStreamWaitEvent", first => usize, events[1] => u64, 0 => u32)?;
        }
        let mut graph = 0u64;
        cu!(d, "cuStreamEndCapture", first => usize, &raw mut graph => *mut u64)?;
        self.graphs.set(recording.graph, graph);
        for event in events.into_iter().filter(|&event| event != 0) {
            cu!(d, "cuEventDestroy_v2", event => u64)?;
        }
        Ok(())
    }

    /// Makes what was recorded executable, or updates what is.
    pub(super) fn instantiate(&self, id: Id, update: bool) -> Result<(), Fault> {
        let d = self.driver;
        let graph = self.graphs.get(id);
        if update {
            let mut result = UpdateResult::default();
            let exec = self.execs.get(id);
            cu!(d, "cuGraphExecUpdate_v2", exec => u64, graph => u64, &raw mut result => *mut UpdateResult)?;
        } else {
            let mut exec = 0u64;
            cu!(d, "cuGraphInstantiateWithFlags", &raw mut exec => *mut u64, graph => u64, 0 => u64)?;
            self.execs.set(id, exec);
        }
        Ok(cu!(d, "cuGraphDestroy", graph => u64)?)
    }
}
