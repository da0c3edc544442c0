//! What NVML knows of GPUs. Without it, clients say how much memory a GPU has.
//!
//! NVML is asked on a thread of its own: a call may take seconds, or never return when a GPU has fallen off its
//! bus, and nobody waits for it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::mpsc;

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvshare_proto::GpuUuid;
use tracing::{debug, info};

/// A GPU as NVML sees it, in bytes.
#[derive(Debug)]
pub struct Seen {
    /// Its memory.
    pub total: u64,
    /// What processes have of it: contexts, modules and what is the driver's own memory. Managed memory NVML does not see.
    pub used: BTreeMap<u32, u64>,
}

/// NVML, on its thread.
#[derive(Debug)]
pub struct Watch {
    questions: mpsc::Sender<GpuUuid>,
    /// Not answered yet.
    asked: BTreeSet<GpuUuid>,
}

impl Watch {
    /// Starts the thread, which opens NVML when it is first asked, and answers by `answer`: with nothing where NVML does
    /// not know. Opening it wakes a sleeping GPU, which takes a second, during which programs that come wait as well: who
    /// knows the memory (`--gpu-memory`) is spared that.
    pub fn start(answer: impl Fn(GpuUuid, Option<Seen>) + Send + 'static) -> Self {
        let (questions, received) = mpsc::channel::<GpuUuid>();
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
            let mut silent = BTreeSet::new();
            for gpu in received {
                let seen = look(&nvml, gpu);
                if let (Err(error), true) = (&seen, silent.len() < MOST_SILENT && silent.insert(gpu)) {
                    info!("NVML says nothing of {gpu} ({error}): it is as large as was known before");
                }
                answer(gpu, seen.ok());
            }
        };
        if let Err(error) = std::thread::Builder::new().name("nvml".to_owned()).spawn(work) {
            info!("no thread for NVML ({error}): GPUs are as large as their clients say");
        }
        Self { questions, asked: BTreeSet::new() }
    }

    /// Asks, unless the last question about this GPU is still open.
    pub fn ask(&mut self, gpu: GpuUuid) {
        if self.asked.insert(gpu) && self.questions.send(gpu).is_err() {
            debug!("NVML is not there to be asked about {gpu}");
        }
    }

    /// The answer about a GPU has come.
    pub fn answered(&mut self, gpu: GpuUuid) {
        self.asked.remove(&gpu);
    }
}

/// GPUs of which it is said once that NVML does not know them.
const MOST_SILENT: usize = 64;

/// Looks at a GPU.
fn look(nvml: &Nvml, gpu: GpuUuid) -> Result<Seen, NvmlError> {
    let device = nvml.device_by_uuid(gpu.to_string())?;
    let total = device.memory_info()?.total;
    let mut used = BTreeMap::new();
    let graphics = match device.running_graphics_processes() {
        Err(NvmlError::NotSupported | NvmlError::NoPermission) => Vec::new(),
        known => known?,
    };
    for process in device.running_compute_processes()?.into_iter().chain(graphics) {
        // Each is there once, however it uses the GPU. A number that is not in our view of processes may be a client's
        // by another name.
        if let UsedGpuMemory::Used(bytes) = process.used_gpu_memory
            && Path::new("/proc").join(process.pid.to_string()).exists()
        {
            used.insert(process.pid, bytes);
        }
    }
    Ok(Seen { total, used })
}
