//! The operations that are one or a few calls: contexts, streams, events, modules, kernels.

use std::ffi::CString;
use std::ptr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Fault, Me, Run};
use crate::plan::{ContextEnd, ContextKind, Door, Id, Op, Region, StreamKind};
use nvshare_test_cuda::{NOT_READY, OUT_OF_MEMORY, Words, cu};

/// The kernels, as PTX: on the simulated driver their names alone count.
pub(crate) const KERNELS: &str = include_str!("../../../workload/src/kernels.ptx");

/// Events without times: nobody asks for them.
const NO_TIMING: u32 = 2;

impl Run {
    pub(super) fn operate(&'static self, me: &mut Me, index: usize, op: &Op) -> Result<(), Fault> {
        let d = self.driver;
        match *op {
            Op::ContextMake { context, kind, device } => {
                self.make_context(context, kind, device)?;
                me.current = None;
            }
            Op::ContextEnd { context, how, device } => {
                match how {
                    ContextEnd::Release => cu!(d, "cuDevicePrimaryCtxRelease_v2", device => i32)?,
                    ContextEnd::Reset => cu!(d, "cuDevicePrimaryCtxReset_v2", device => i32)?,
                    ContextEnd::Destroy if self.greens.get(context) != 0 => {
                        cu!(d, "cuGreenCtxDestroy", self.greens.get(context) => u64)?;
                    }
                    ContextEnd::Destroy => cu!(d, "cuCtxDestroy_v2", self.contexts.get(context) => u64)?,
                }
                me.current = None;
            }
            Op::ContextSync => cu!(d, "cuCtxSynchronize")?,
            Op::AttachDetach => {
                let mut context = 0u64;
                cu!(d, "cuCtxAttach", &raw mut context => *mut u64, 0 => u32)?;
                cu!(d, "cuCtxDetach", context => u64)?;
            }
            Op::PushPop => {
                let context = self.plan.steps[index].context.expect("such a step has one");
                cu!(d, "cuCtxPushCurrent_v2", self.contexts.get(context) => u64)?;
                let mut popped = 0u64;
                cu!(d, "cuCtxPopCurrent_v2", &raw mut popped => *mut u64)?;
                me.current = None;
            }
            Op::StreamMake { stream, kind } => self.make_stream(stream, kind)?,
            Op::StreamEnd { stream } => cu!(d, "cuStreamDestroy_v2", self.stream(stream) => usize)?,
            Op::StreamSync { stream } => cu!(d, "cuStreamSynchronize", self.stream(stream) => usize)?,
            Op::StreamQuery { stream } => {
                unless_busy(cu!(d, "cuStreamQuery", self.stream(stream) => usize))?;
            }
            Op::EventMake { event, timing } => {
                let mut handle = 0u64;
                let flags = if timing { 0 } else { NO_TIMING };
                cu!(d, "cuEventCreate", &raw mut handle => *mut u64, flags => u32)?;
                self.events.set(event, handle);
            }
            Op::EventEnd { event } => cu!(d, "cuEventDestroy_v2", self.events.get(event) => u64)?,
            Op::Record { event, stream } => {
                cu!(d, "cuEventRecord", self.events.get(event) => u64, self.stream(stream) => usize)?;
            }
            Op::EventSync { event } => cu!(d, "cuEventSynchronize", self.events.get(event) => u64)?,
            Op::EventQuery { event } => unless_busy(cu!(d, "cuEventQuery", self.events.get(event) => u64))?,
            Op::Wait { stream, event } => {
                let stream = self.stream(stream);
                cu!(d, "cuStreamWaitEvent", stream => usize, self.events.get(event) => u64, 0 => u32)?;
            }
            Op::ModuleLoad { module, warm } => self.load(module, warm)?,
            Op::ModuleUnload { module } => cu!(d, "cuModuleUnload", self.modules.get(module) => u64)?,
            Op::Allocate { buffer, door, bytes, stream } => self.allocate(buffer, door, bytes, stream)?,
            Op::Free { buffer, door, bytes, stream } => self.free(buffer, door, bytes, stream)?,
            Op::HostAllocate { host, kind, bytes } => self.allocate_host(host, kind, bytes)?,
            Op::HostFree { host, kind } => self.free_host(host, kind)?,
            Op::HostWrite { host, value } => self.write_host(host, value),
            Op::HostCheck { host, value, first, bytes } => self.check_host(host, value, first, bytes)?,
            Op::Work { region, effect, stream, module } => {
                self.effect(module, region, effect, stream, false)?
            }
            Op::CopyIn { region, host, stream, way } => self.copy_in(region, host, stream, way)?,
            Op::CopyOut { region, host, first, bytes, stream, way } => {
                self.copy_out(region, host, first, bytes, stream, way)?;
            }
            Op::PeerCopy { to, from, contexts, stream, names: true } => {
                self.peer_copy(to, from, contexts, stream)?;
            }
            Op::PeerCopy { to, from, stream, names: false, .. } => {
                let (target, source) = (self.address(to), self.address(from));
                cu!(d, "cuMemcpyAsync", target => u64, source => u64, to.bytes as usize => usize,
                    self.stream(stream) => usize)?;
            }
            Op::PeerAccess { to, opens: true } => {
                cu!(d, "cuCtxEnablePeerAccess", self.contexts.get(to) => u64, 0 => u32)?;
            }
            Op::PeerAccess { to, opens: false } => {
                cu!(d, "cuCtxDisablePeerAccess", self.contexts.get(to) => u64)?;
            }
            Op::Prefetch { region, stream, device } => {
                let (address, stream) = (self.address(region), self.stream(stream));
                cu!(d, "cuMemPrefetchAsync", address => u64, region.bytes as usize => usize, device => i32,
                    stream => usize)?;
            }
            Op::HostTouch { region, value, new } => self.host_touch(region, value, new)?,
            Op::Share { region, device, value, new, keeps } => {
                self.share(region, device, value, new, keeps)?
            }
            Op::Record1(ref recording, module) => self.record_graph(recording, module)?,
            Op::Instantiate { graph, update } => self.instantiate(graph, update)?,
            Op::Build { graph, ref nodes } => {
                let context = self.plan.steps[index].context.expect("such a step has one");
                self.build_graph(graph, context, nodes)?;
            }
            Op::Replay { graph, stream, times } => {
                for _ in 0..times {
                    let stream = self.stream(stream);
                    cu!(d, "cuGraphLaunch", self.execs.get(graph) => u64, stream => usize)?;
                }
            }
            Op::GraphEnd { graph } => cu!(d, "cuGraphExecDestroy", self.execs.get(graph) => u64)?,
            Op::Callback { stream } => self.callback(stream)?,
            Op::Window { stream, region, value, module, hold_ms } => {
                self.window(index, stream, region, value, module, hold_ms)?;
            }
            Op::Help { stream, region, ref values, module, pause_ms } => {
                self.help(index, stream, region, values, module, pause_ms)?;
            }
            Op::Refused { door, stream } => self.refused(door, stream)?,
            Op::Info => {
                let (mut free, mut total) = (0usize, 0usize);
                cu!(d, "cuMemGetInfo_v2", &raw mut free => *mut usize, &raw mut total => *mut usize)?;
                if free > total {
                    return Err(Fault::Other(format!("{free} bytes are free, expected at most {total}")));
                }
            }
            Op::Pause { ms } => std::thread::sleep(Duration::from_millis(ms)),
            Op::HeldUp { other, last } => self.until_held_up(other, last),
            Op::Fork { exec } => fork(exec)?,
            Op::Leave { stream, region, module } => {
                self.kernel(module, false, region, 1, 4000, stream)?;
            }
        }
        Ok(())
    }

    pub(super) fn make_current(&self, context: Id) -> Result<(), Fault> {
        Ok(cu!(self.driver, "cuCtxSetCurrent", self.contexts.get(context) => u64)?)
    }

    fn make_context(&self, context: Id, kind: ContextKind, device: i32) -> Result<(), Fault> {
        let d = self.driver;
        let mut handle = 0u64;
        match kind {
            ContextKind::Primary => {
                cu!(d, "cuDevicePrimaryCtxRetain", &raw mut handle => *mut u64, device => i32)?;
            }
            ContextKind::Created => {
                cu!(d, "cuCtxCreate_v2", &raw mut handle => *mut u64, 0 => u32, device => i32)?;
            }
            ContextKind::Green => {
                let green = crate::caps::green_context(d, device)?;
                self.greens.set(context, green);
                cu!(d, "cuCtxFromGreenCtx", &raw mut handle => *mut u64, green => u64)?;
            }
        }
        self.contexts.set(context, handle);
        Ok(())
    }

    fn make_stream(&self, stream: Id, kind: StreamKind) -> Result<(), Fault> {
        let d = self.driver;
        let mut handle = 0u64;
        let green = self.greens.get(self.plan.streams[stream].context);
        match kind {
            _ if green != 0 => {
                cu!(d, "cuGreenCtxStreamCreate", &raw mut handle => *mut u64, green => u64, 1 => u32,
                    0 => i32)?;
            }
            StreamKind::Priority(blocking) => {
                let flags = u32::from(!blocking);
                cu!(d, "cuStreamCreateWithPriority", &raw mut handle => *mut u64, flags => u32, -1 => i32)?;
            }
            kind => {
                let flags = u32::from(kind == StreamKind::NonBlocking);
                cu!(d, "cuStreamCreate", &raw mut handle => *mut u64, flags => u32)?;
            }
        }
        self.streams.set(stream, handle);
        Ok(())
    }

    /// Loads the kernels; warm: launches each once on no data.
    fn load(&self, module: Id, warm: bool) -> Result<(), Fault> {
        let d = self.driver;
        let text = CString::new(KERNELS).expect("PTX is text");
        let mut handle = 0u64;
        cu!(d, "cuModuleLoadData", &raw mut handle => *mut u64, text.as_ptr() => *const std::ffi::c_char)?;
        self.modules.set(module, handle);
        for (name, place) in [(c"step", &self.steps_of), (c"fill", &self.fills_of)] {
            let mut function = 0u64;
            cu!(d, "cuModuleGetFunction", &raw mut function => *mut u64, handle => u64,
                name.as_ptr() => *const std::ffi::c_char)?;
            place.set(module, function);
            if warm {
                self.driver.launch(
                    function,
                    [32, 128],
                    Words { address: 0, words: 0, value: 0, micros: 0 },
                    0,
                )?;
            }
        }
        if warm { Ok(cu!(d, "cuStreamSynchronize", 0 => usize)?) } else { Ok(()) }
    }

    /// Launches a kernel over a region.
    pub(super) fn kernel(
        &self,
        module: Id,
        fill: bool,
        region: Region,
        value: u32,
        micros: u32,
        stream: Id,
    ) -> Result<(), Fault> {
        let function = if fill { self.fills_of.get(module) } else { self.steps_of.get(module) };
        let words = Words { address: self.address(region), words: region.bytes / 4, value, micros };
        Ok(self.driver.launch(function, [32, 128], words, self.stream(stream))?)
    }

    /// An allocation that must be refused: more than the limit, or more than any card has.
    fn refused(&self, door: Door, stream: Id) -> Result<(), Fault> {
        let d = self.driver;
        let bytes = self.limit.map_or(1 << 42, |limit| limit + (64 << 20)) as usize;
        let mut address = 0u64;
        let stream = self.stream(stream);
        let asked = match door {
            Door::Async => {
                cu!(d, "cuMemAllocAsync", &raw mut address => *mut u64, bytes => usize, stream => usize)
            }
            _ => cu!(d, "cuMemAlloc_v2", &raw mut address => *mut u64, bytes => usize),
        };
        match asked {
            Err(error) if error.0 == OUT_OF_MEMORY => Ok(()),
            other => Err(Fault::Other(format!("{bytes} bytes: {other:?}, expected out of memory"))),
        }
    }

    /// The address of a region.
    pub(super) fn address(&self, region: Region) -> u64 {
        self.buffers.get(region.buffer) + region.index * region.bytes
    }

    pub(super) fn saw(&self, words: u64) {
        self.words.fetch_add(words, Ordering::Relaxed);
    }
}

fn unless_busy(result: Result<(), nvshare_test_cuda::CudaError>) -> Result<(), Fault> {
    match result {
        Err(error) if error.0 == NOT_READY => Ok(()),
        other => Ok(other?),
    }
}

/// Forks a child that ends at once, or becomes another program.
fn fork(exec: bool) -> Result<(), Fault> {
    // SAFETY: the child calls only functions that are allowed there.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let arguments = [c"true".as_ptr(), ptr::null()];
        // SAFETY: C strings, and a list that ends with null.
        unsafe {
            if exec {
                libc::execv(c"/bin/true".as_ptr(), arguments.as_ptr());
            }
            libc::_exit(0);
        }
    }
    let mut status = 0;
    // SAFETY: a child of ours and a place for its status.
    while child > 0 && unsafe { libc::waitpid(child, &raw mut status, 0) } < 0 {
        if std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
            break;
        }
    }
    if child > 0 && status == 0 {
        Ok(())
    } else {
        Err(Fault::Other(format!("fork gave {child}, its status {status}, expected 0")))
    }
}
