//! The GPUs of this machine, from NVML, or else from what the kernel module says of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{EventSet, Nvml};
use nvshare_proto::{GpuUuid, ThrottledLine};
use tracing::info;

use crate::devices::NodeGpu;

/// Folder in which the kernel module has a folder for each GPU, named by the GPU's place on the bus.
pub const DESCRIPTIONS: &str = "/proc/driver/nvidia/gpus";

/// The usual pause between two looks.
pub const LOOK_EVERY: Duration = Duration::from_secs(5);

static NO_ERRORS: ThrottledLine = ThrottledLine::new(|text| info!("{text}"));

/// Where the kernel describes the GPUs.
#[derive(Debug, Clone)]
pub struct GpuSources {
    /// See [`DESCRIPTIONS`]. NVML knows this machine, so it is asked only if no other folder is named.
    pub descriptions: PathBuf,
    /// `/sys`
    pub sysfs: PathBuf,
    /// The pause between two looks.
    pub pause: Duration,
}

/// The versions of what NVIDIA's driver brings, where they are known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Versions {
    /// Of the driver.
    pub driver: Option<String>,
    /// Of CUDA, as far as the driver goes.
    pub cuda: Option<String>,
}

/// The GPUs as they are seen.
#[derive(Debug)]
pub enum GpuNews {
    /// All that are there.
    All(Vec<NodeGpu>),
    /// The driver reports an error.
    Xid {
        /// Of this GPU.
        gpu: GpuUuid,
        /// NVIDIA's number of the error.
        code: u64,
    },
}

impl GpuSources {
    /// Lists the GPUs; none where there is no driver.
    #[must_use]
    pub fn list(&self) -> Vec<NodeGpu> {
        let by_nvml = self.nvml().and_then(|nvml| self.ask(&nvml).ok());
        by_nvml.filter(|gpus| !gpus.is_empty()).unwrap_or_else(|| self.described())
    }

    /// How many GPUs the kernel module has, also those whose UUIDs it does not know yet.
    #[must_use]
    pub fn count(&self) -> usize {
        fs::read_dir(&self.descriptions).into_iter().flatten().filter_map(Result::ok).count()
    }

    /// The versions of what the driver brings.
    #[must_use]
    pub fn versions(&self) -> Versions {
        let text = fs::read_to_string(self.descriptions.with_file_name("version")).unwrap_or_default();
        let is_version = |word: &&str| {
            word.contains('.') && word.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')
        };
        let described = || text.split_whitespace().find(is_version).map(str::to_owned);
        let nvml = self.nvml();
        let cuda = nvml.as_ref().and_then(|nvml| nvml.sys_cuda_driver_version().ok());
        Versions {
            driver: nvml.as_ref().and_then(|nvml| nvml.sys_driver_version().ok()).or_else(described),
            // 1000 for each major version, 10 for each minor one.
            cuda: cuda.map(|number| format!("{}.{}", number / 1000, number % 1000 / 10)),
        }
    }

    /// Tells what is seen of the GPUs every few seconds, and of errors at once where NVML tells of them, for ever. Where NVML has answered and does
    /// so no more, no GPU is seen.
    pub fn follow(&self, tell: impl Fn(GpuNews)) {
        let mut had_nvml = false;
        loop {
            if let Some(nvml) = self.nvml() {
                had_nvml = true;
                let Err(error) = self.follow_nvml(&nvml, &tell);
                info!("NVML: {error}");
            }
            tell(GpuNews::All(if had_nvml { Vec::new() } else { self.described() }));
            sleep(self.pause);
        }
    }

    fn follow_nvml(
        &self,
        nvml: &Nvml,
        tell: &impl Fn(GpuNews),
    ) -> Result<std::convert::Infallible, NvmlError> {
        let listen = || {
            let why = |error: &NvmlError| {
                NO_ERRORS.say(format_args!("NVML does not tell of Xid errors: {error}"));
            };
            errors(nvml).inspect_err(why).ok()
        };
        let mut errors = listen();
        loop {
            tell(GpuNews::All(self.ask(nvml)?));
            let Some(listens) = &errors else {
                sleep(self.pause);
                continue;
            };
            match listens.wait(self.pause.as_millis().try_into().unwrap_or(u32::MAX)) {
                Ok(event) => {
                    // A GPU that cannot say its name any more is gone at the next look, which is now.
                    let gpu = event.device.uuid().ok().and_then(|uuid| uuid.parse().ok());
                    if let (Some(gpu), Some(error)) = (gpu, event.event_data) {
                        tell(GpuNews::Xid { gpu, code: number(&error) });
                    }
                }
                Err(NvmlError::Timeout) => {}
                Err(error) => {
                    // A GPU is lost, say. Those that can still be asked are seen at the next look.
                    NO_ERRORS.say(format_args!("NVML tells of no Xid error for a moment: {error}"));
                    sleep(self.pause);
                    errors = listen();
                }
            }
        }
    }

    fn nvml(&self) -> Option<Nvml> {
        (self.descriptions == Path::new(DESCRIPTIONS)).then(|| Nvml::init().ok()).flatten()
    }

    fn ask(&self, nvml: &Nvml) -> Result<Vec<NodeGpu>, NvmlError> {
        let mut gpus = Vec::new();
        for index in 0..nvml.device_count()? {
            // One that is lost takes no other with it.
            let Ok(device) = nvml.device_by_index(index) else { continue };
            let Some(gpu) = device.uuid().ok().and_then(|uuid| uuid.parse().ok()) else { continue };
            // NVML writes the bus's domain with four digits more than the kernel.
            let bus = device.pci_info().map(|pci| pci.bus_id.to_lowercase());
            let bus = bus.map(|bus| bus.strip_prefix("0000").map(str::to_owned).unwrap_or(bus));
            gpus.push(NodeGpu {
                uuid: gpu,
                index,
                model: device.name().ok(),
                minor: device.minor_number().ok(),
                numa: bus.ok().and_then(|bus| numa(&self.sysfs, &bus)),
                memory: device.memory_info().ok().map(|memory| memory.total),
                mig: device.mig_mode().is_ok_and(|mode| mode.current != 0),
            });
        }
        Ok(gpus)
    }

    fn described(&self) -> Vec<NodeGpu> {
        let folders = fs::read_dir(&self.descriptions).into_iter().flatten().filter_map(Result::ok);
        let mut folders: Vec<_> = folders.map(|entry| entry.path()).collect();
        folders.sort();
        let describe = |(index, folder): (usize, &PathBuf)| {
            let text = fs::read_to_string(folder.join("information")).ok()?;
            let field = |name: &str| {
                text.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim()))
            };
            let bus = folder.file_name()?.to_str()?;
            let minor = field("Device Minor").and_then(|minor| minor.parse().ok());
            Some(NodeGpu {
                uuid: field("GPU UUID")?.parse().ok()?,
                index: index.try_into().ok()?,
                model: field("Model").map(str::to_owned),
                minor,
                numa: numa(&self.sysfs, bus),
                memory: None,
                mig: minor.is_some_and(|minor| self.is_divided(minor)),
            })
        };
        folders.iter().enumerate().filter_map(describe).collect()
    }

    /// Whether a GPU has parts that MIG made: the kernel module has a folder for each, `gpuN/mig/giM`.
    fn is_divided(&self, minor: u32) -> bool {
        let parts = self.descriptions.with_file_name("capabilities").join(format!("gpu{minor}/mig"));
        let is_part = |entry: fs::DirEntry| entry.file_name().to_string_lossy().starts_with("gi");
        fs::read_dir(parts).into_iter().flatten().filter_map(Result::ok).any(is_part)
    }
}

/// The errors of all GPUs that tell of them.
fn errors(nvml: &Nvml) -> Result<EventSet<'_>, NvmlError> {
    let mut set = nvml.create_event_set()?;
    for index in 0..nvml.device_count()? {
        let Ok(device) = nvml.device_by_index(index) else { continue };
        if device.supported_event_types().is_ok_and(|types| types.contains(EventTypes::CRITICAL_XID_ERROR)) {
            set = device.register_events(EventTypes::CRITICAL_XID_ERROR, set).map_err(|error| error.error)?;
        }
    }
    Ok(set)
}

/// NVIDIA's number of an error.
const fn number(error: &XidError) -> u64 {
    match *error {
        XidError::Value(number) => number,
        // So it is written on the wire.
        XidError::Unknown => 999,
    }
}

/// The NUMA node of a device; a machine without several says -1.
fn numa(sysfs: &Path, bus: &str) -> Option<u32> {
    let file = sysfs.join("bus/pci/devices").join(bus).join("numa_node");
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_module_describes_gpus() {
        let root = std::env::temp_dir().join(format!("nvshare-gpus-{}", std::process::id()));
        let gpus = root.join("gpus");
        let places = GpuSources { descriptions: gpus.clone(), sysfs: root.join("sys"), pause: LOOK_EVERY };
        for (bus, text, node) in [
            (
                "0000:41:00.0",
                "Model: \t A\nGPU UUID:\t GPU-02020202-0202-0202-0202-020202020202\nDevice Minor: \t 0\n",
                "1",
            ),
            ("0000:01:00.0", "GPU UUID: GPU-01010101-0101-0101-0101-010101010101\n", "-1"),
            ("0000:81:00.0", "GPU UUID: GPU-????????-????-????-????-????????????\n", "0"),
        ] {
            let device = root.join("sys/bus/pci/devices").join(bus);
            for (file, text) in [(gpus.join(bus).join("information"), text), (device.join("numa_node"), node)]
            {
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(file, text).unwrap();
            }
        }
        let one = NodeGpu {
            uuid: GpuUuid([1; 16]),
            index: 0,
            model: None,
            minor: None,
            numa: None,
            memory: None,
            mig: false,
        };
        let model = Some("A".to_owned());
        let two =
            NodeGpu { uuid: GpuUuid([2; 16]), index: 1, model, minor: Some(0), numa: Some(1), ..one.clone() };
        assert_eq!((places.list(), places.count()), (vec![one.clone(), two.clone()], 3));
        // Where MIG has made no part, there is a folder for making them.
        for (part, mig) in [("config", false), ("gi7", true)] {
            fs::create_dir_all(root.join("capabilities/gpu0/mig").join(part)).unwrap();
            assert_eq!(places.list(), [one.clone(), NodeGpu { mig, ..two.clone() }]);
        }
        for (text, driver) in [
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\nGCC 12.2.0\n",
                Some("535.104.05"),
            ),
            ("NVRM version: none\n", None),
        ] {
            fs::write(root.join("version"), text).unwrap();
            let versions = Versions { driver: driver.map(str::to_owned), cuda: None };
            assert_eq!(places.versions(), versions);
        }
        let nowhere = GpuSources { descriptions: root.join("none"), ..places };
        assert_eq!((nowhere.list(), nowhere.count()), (vec![], 0));
        fs::remove_dir_all(root).unwrap();
    }
}
