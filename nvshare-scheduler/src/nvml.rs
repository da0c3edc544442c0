//! What NVML knows of GPUs. Without it, clients say how much memory a GPU has.

use std::collections::BTreeSet;
use std::path::Path;

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvshare_proto::GpuUuid;
use tracing::{debug, info};

/// The management library, if there is one.
#[derive(Debug)]
pub struct Nvml(Option<nvml_wrapper::Nvml>);

impl Nvml {
    /// Opens it. If it is absent or too old, one line says so and everything else works.
    #[must_use]
    pub fn open() -> Self {
        match nvml_wrapper::Nvml::init() {
            Ok(nvml) => {
                debug!("NVML {:?}, driver {:?}", nvml.sys_nvml_version(), nvml.sys_driver_version());
                Self(Some(nvml))
            }
            Err(error) => {
                info!("no NVML ({error}): GPUs are as large as their clients say");
                Self(None)
            }
        }
    }

    /// Without NVML.
    #[must_use]
    pub fn absent() -> Self {
        Self(None)
    }

    /// Whether a GPU exists; without NVML, any may.
    #[must_use]
    pub fn knows(&self, gpu: GpuUuid) -> bool {
        self.0.as_ref().is_none_or(|nvml| nvml.device_by_uuid(gpu.to_string()).is_ok())
    }

    /// Bytes of a GPU's memory, less what processes have there that are no clients. A client's own figure would be
    /// of no use: NVML does not see managed memory.
    #[must_use]
    pub fn available(&self, gpu: GpuUuid, clients: &BTreeSet<u32>) -> Option<u64> {
        let device = self.0.as_ref()?.device_by_uuid(gpu.to_string()).ok()?;
        let total = device.memory_info().ok()?.total;
        let compute = device.running_compute_processes().unwrap_or_default();
        let graphics = device.running_graphics_processes().unwrap_or_default();
        let mut counted = BTreeSet::new();
        let strangers: u64 = compute
            .into_iter()
            .chain(graphics)
            // A number that is not in our view of processes may be a client's by another name.
            .filter(|process| !clients.contains(&process.pid) && Path::new("/proc").join(process.pid.to_string()).exists())
            .filter(|process| counted.insert(process.pid))
            .map(|process| match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => bytes,
                UsedGpuMemory::Unavailable => 0,
            })
            .sum();
        Some(total.saturating_sub(strangers))
    }
}
