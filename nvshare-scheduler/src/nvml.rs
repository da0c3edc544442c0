//! What NVML knows of GPUs. Without it, clients say how much memory a GPU has.
//!
//! NVML is asked on a thread of its own: a call may take seconds, or never return when a GPU has fallen off its
//! bus, and nobody waits for it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::mpsc;

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvshare_proto::GpuUuid;
use tracing::{debug, info};

use crate::core::{ClientId, Measured};

/// Clients by their processes.
type Processes = BTreeMap<u32, ClientId>;
/// A question: what have these, and what have all others, on this GPU?
type Question = (GpuUuid, Processes);

/// NVML, on its thread.
#[derive(Debug)]
pub struct Watch {
    questions: mpsc::Sender<Question>,
    /// Not answered yet.
    asked: BTreeSet<GpuUuid>,
}

impl Watch {
    /// Starts the thread, which opens NVML when it is first asked, and answers by `answer`. If NVML is absent or too
    /// old, one line says so and everything else works. Opening it wakes a sleeping GPU, which takes a second, during
    /// which programs that come wait as well: who knows the memory (`--gpu-memory`) is spared that.
    pub fn start(answer: impl Fn(Measured) + Send + 'static) -> Self {
        let (questions, received) = mpsc::channel::<Question>();
        let work = move || {
            let mut received = received.into_iter().peekable();
            if received.peek().is_none() {
                return;
            }
            let nvml = match Nvml::init() {
                Ok(nvml) => nvml,
                Err(error) => {
                    info!("no NVML ({error}): GPUs are as large as their clients say");
                    return;
                }
            };
            debug!("NVML {:?}, driver {:?}", nvml.sys_nvml_version(), nvml.sys_driver_version());
            for (gpu, clients) in received {
                match measure(&nvml, gpu, &clients) {
                    Some(measured) => answer(measured),
                    None => debug!("NVML does not know {gpu}: it is as large as its clients say"),
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("nvml".to_owned()).spawn(work) {
            info!("no thread for NVML ({error}): GPUs are as large as their clients say");
        }
        Self { questions, asked: BTreeSet::new() }
    }

    /// Asks, unless the last question about this GPU is still open.
    pub fn ask(&mut self, gpu: GpuUuid, clients: Processes) {
        if self.asked.insert(gpu) && self.questions.send((gpu, clients)).is_err() {
            debug!("NVML is not there to be asked about {gpu}");
        }
    }

    /// The answer about a GPU has come.
    pub fn answered(&mut self, gpu: GpuUuid) {
        self.asked.remove(&gpu);
    }
}

/// Looks at a GPU. Of clients' processes NVML sees contexts, modules and what is the driver's own memory; managed memory
/// it does not see.
fn measure(nvml: &Nvml, gpu: GpuUuid, clients: &Processes) -> Option<Measured> {
    let device = nvml.device_by_uuid(gpu.to_string()).ok()?;
    let total = device.memory_info().ok()?.total;
    let compute = device.running_compute_processes().unwrap_or_default();
    let graphics = device.running_graphics_processes().unwrap_or_default();
    let (mut used, mut strangers) = (BTreeMap::new(), BTreeMap::new());
    for process in compute.into_iter().chain(graphics) {
        let UsedGpuMemory::Used(bytes) = process.used_gpu_memory else { continue };
        // Each is there once, however it uses the GPU.
        if let Some(&client) = clients.get(&process.pid) {
            used.insert(client, bytes);
        } else if Path::new("/proc").join(process.pid.to_string()).exists() {
            // A number that is not in our view of processes may be a client's by another name.
            strangers.insert(process.pid, bytes);
        }
    }
    let strangers = strangers.into_values().fold(0, u64::saturating_add);
    Some(Measured { gpu, available: total.saturating_sub(strangers), used })
}
