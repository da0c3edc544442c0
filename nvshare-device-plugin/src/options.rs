//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use nvshare_proto::{GpuUuid, TenantSettings, cdi, paths, units};

use crate::dra::classes::Mapped;
use crate::node_gpus;
use crate::resources::{self, Also};

/// Gives slots of GPUs to containers: the device plugin of Kubernetes for nvshare.com/gpu.
#[derive(Debug, Clone, Parser)]
#[command(name = "nvshare-device-plugin", version, max_term_width = 100)]
pub struct Options {
    /// The kubelet's API by which containers get them: slots that are counted, or claims of Dynamic Resource Allocation
    #[arg(long, value_name = "API", default_value = "device-plugin")]
    pub api: Api,

    /// The name of this node, for --api dra
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    pub node_name: Option<String>,

    /// Slots of each GPU, 1 to 1000: the most containers that may share it
    #[arg(long, value_name = "N", default_value = "10", value_parser = resources::slots, allow_negative_numbers = true)]
    pub slots: u32,

    /// Let one container have slots of several GPUs, one of each
    #[arg(long)]
    pub multi_gpu: bool,

    /// How a container gets its GPUs, as in NVIDIA's device plugin: by names of CDI devices, by NVIDIA_VISIBLE_DEVICES, or by mounts
    #[arg(long, value_name = "STRATEGY", default_value = "cdi-cri")]
    pub device_list_strategy: Strategy,

    /// The GPUs that are given out, by their UUIDs [default: all]
    #[arg(long, value_name = "UUID,…", value_delimiter = ',')]
    pub gpus: Vec<GpuUuid>,

    /// A file with their UUIDs, one a line or with commas between; without the file all GPUs are given out. In a mounted ConfigMap whose keys are
    /// names of nodes, $(NODE_NAME) is the file of this node
    #[arg(long, value_name = "FILE", conflicts_with = "gpus", value_parser = expanded)]
    pub gpus_of: Option<PathBuf>,

    /// Memory limit of a slot (4g, 512MiB); all slots together may have more than the GPU [default: none]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_limit, allow_hyphen_values = true)]
    pub slot_memory: Option<u64>,

    /// Compute limit of a slot, in per cent of the GPU's time [default: none]
    #[arg(long, value_name = "PERCENT", value_parser = units::parse_percent, allow_hyphen_values = true)]
    pub slot_compute: Option<u8>,

    /// Sets NVSHARE_MEMORY in containers [default: it is not set]
    #[arg(long, value_name = "MODE")]
    pub memory: Option<Memory>,

    /// How programs get the library: by the variable LD_PRELOAD, or by a file /etc/ld.so.preload
    #[arg(long, value_name = "HOW", default_value = "env")]
    pub preload: Preload,

    /// The resource's name
    #[arg(long, value_name = "NAME", default_value = cdi::KIND, value_parser = resource)]
    pub resource: String,

    /// A further resource, `nvshare.com/gpu.NAME`, with slots of its own on each GPU: slots, memory, compute, weight, priority. The main one's values
    /// hold for all that it does not say. May be said several times
    #[arg(long, value_name = "NAME=KEY=VALUE,…", allow_hyphen_values = true)]
    pub also: Vec<Also>,

    /// The priority (low, normal, high) of pods of a PriorityClass, for --api dra: the lowest of a claim's pods, or what the claim or its DeviceClass
    /// says if that is lower. It needs the right to get pods. May be said several times
    #[arg(long, value_name = "NAME=PRIORITY", allow_hyphen_values = true)]
    pub priority_of_class: Vec<Mapped>,

    /// The kind of NVIDIA's CDI devices [default: nvidia.com/gpu or k8s.device-plugin.nvidia.com/gpu, whichever has the GPU]
    #[arg(long, value_name = "KIND", value_parser = resource)]
    pub nvidia_cdi_kind: Option<String>,

    /// The kubelet's folder
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    pub kubelet: PathBuf,

    /// Folder for the specification of nvshare's CDI devices; NVIDIA's are looked for here and in /etc/cdi
    #[arg(long, value_name = "DIR", default_value = "/var/run/cdi")]
    pub cdi_dir: PathBuf,

    /// The library to install into --library-dir [default: the one that is there]
    #[arg(long, value_name = "FILE")]
    pub library: Option<PathBuf>,

    /// Folder of the library on the host, which containers get
    #[arg(long, value_name = "DIR", default_value = "/var/lib/nvshare/lib")]
    pub library_dir: PathBuf,

    /// The scheduler's administrators' socket [variable: NVSHARE_ADMIN_SOCKET] [default: /var/run/nvshare-admin/admin.sock]
    #[arg(long, value_name = "PATH")]
    pub admin_socket: Option<PathBuf>,

    /// Folder for a list of the seats that were given out
    #[arg(long, value_name = "DIR", default_value = "/var/lib/nvshare")]
    pub state: PathBuf,

    /// Write a feature file into this folder, of which Node Feature Discovery makes labels of the node [default: none]
    #[arg(long, value_name = "DIR")]
    pub features_dir: Option<PathBuf>,

    /// Remove all that nvshare has left on this machine, and end. No pod may have a slot, and no scheduler may run
    #[arg(long)]
    pub clean_up: bool,

    /// Folder of the folders of sockets, for --clean-up
    #[arg(long, value_name = "DIR", default_value = "/var/run", hide = true)]
    pub run_dir: PathBuf,

    /// Seconds without a container after which a seat of several slots goes
    #[arg(long, value_name = "SECONDS", default_value = "600", hide = true)]
    pub keep_unused: u64,

    /// Seconds in which a scheduler that is replaced, or that starts with the machine, counts as there without an answer. Before version 1.27 a kubelet
    /// whose pods come and go takes up to 40 s to replace the scheduler's, as it makes five calls a second (`kubeAPIQPS`). Kubernetes learns of
    /// slots that are not healthy up to 10 s later, and a kubelet fails pods that come meanwhile for ever
    #[arg(long, value_name = "SECONDS", default_value = "60", hide = true)]
    pub grace: u64,

    /// How many times more often the plugin looks at what may change, for tests
    #[arg(long, value_name = "TIMES", default_value = "1", hide = true, value_parser = clap::value_parser!(u32).range(1..))]
    pub hurry: u32,

    /// Folder of specifications of CDI devices that an administrator makes
    #[arg(long, value_name = "DIR", default_value = "/etc/cdi", hide = true)]
    pub etc_cdi: PathBuf,

    /// Folder in which the kernel module describes the GPUs
    #[arg(long, value_name = "DIR", default_value = node_gpus::DESCRIPTIONS, hide = true)]
    pub gpu_descriptions: PathBuf,

    /// Folder in which the kernel describes devices
    #[arg(long, value_name = "DIR", default_value = "/sys", hide = true)]
    pub sysfs: PathBuf,
}

/// The kubelet's API by which containers get shares of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Api {
    /// The device plugin API.
    DevicePlugin,
    /// Dynamic Resource Allocation.
    Dra,
}

/// How a container gets its GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Strategy {
    /// By names of CDI devices.
    CdiCri,
    /// By the variable that NVIDIA's runtime reads.
    Envvar,
    /// By mounts that NVIDIA's runtime reads.
    VolumeMounts,
}

/// How programs keep device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Memory {
    /// As managed memory.
    Managed,
    /// As memory that the library maps.
    Swap,
}

impl Memory {
    /// The value of the variable.
    #[must_use]
    pub const fn value(self) -> &'static str {
        match self {
            Self::Managed => "managed",
            Self::Swap => "swap",
        }
    }
}

/// How programs get the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Preload {
    /// By LD_PRELOAD. A program's own value may win where the container's is not set by a CDI device.
    Env,
    /// By /etc/ld.so.preload, which programs with more rights than their user read as well.
    File,
}

impl Options {
    /// The administrators' socket.
    #[must_use]
    pub fn admin_socket(&self) -> PathBuf {
        self.admin_socket.clone().unwrap_or_else(|| paths::admin_socket(true))
    }

    /// The pause between two looks.
    #[must_use]
    pub fn pause(&self, usual: Duration) -> Duration {
        usual / self.hurry
    }

    /// The limits of a slot that says none itself.
    #[must_use]
    pub fn given(&self) -> TenantSettings {
        TenantSettings { memory: self.slot_memory, compute: self.slot_compute, ..TenantSettings::default() }
    }
}

/// Kubernetes leaves a variable of a container's arguments as it is where the container has none of that name.
fn expanded(text: &str) -> Result<PathBuf, String> {
    if text.contains("$(") { Err("its variable is not set".to_owned()) } else { Ok(text.into()) }
}

fn resource(text: &str) -> Result<String, String> {
    match text.split_once('/') {
        Some((vendor, name)) if !vendor.is_empty() && !name.is_empty() && !name.contains('/') => {
            Ok(text.to_owned())
        }
        _ => {
            Err(format!("{text:?} is no such name; accepted: a domain, a slash and a name, as {}", cdi::KIND))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Options, String> {
        let words = std::iter::once("nvshare-device-plugin").chain(text.split_whitespace());
        Options::try_parse_from(words).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_not_said_is_as_kubernetes_has_it() {
        let options = parse("").unwrap();
        assert_eq!((options.slots, options.multi_gpu, options.gpus.len()), (10, false, 0));
        assert_eq!((options.device_list_strategy, options.preload), (Strategy::CdiCri, Preload::Env));
        assert_eq!((options.resource.as_str(), options.memory), ("nvshare.com/gpu", None));
        assert_eq!(options.given(), TenantSettings::default());
        assert_eq!((options.grace, options.pause(Duration::from_secs(2))), (60, Duration::from_secs(2)));
    }

    #[test]
    fn a_slot_has_limits() {
        let options = parse("--slot-memory 4GiB --slot-compute 25 --memory swap").unwrap();
        let given = TenantSettings { memory: Some(4 << 30), compute: Some(25), ..TenantSettings::default() };
        assert_eq!(options.given(), given);
        assert_eq!(options.memory.map(Memory::value), Some("swap"));
    }

    #[test]
    fn bad_values_are_told_what_is_accepted() {
        for (text, told) in [
            ("--slots 0", "\"0\" is no number of slots; accepted: 1 to 1000"),
            ("--also small", "invalid value 'small' for '--also <NAME=KEY=VALUE,…>': it says nothing"),
            ("--also small=slots=0", "\"0\" is no number of slots; accepted: 1 to 1000"),
            ("--also small=memory=1", "the least is 64.0 MiB"),
            ("--also small=memory=8g,memory=4g", "memory is said twice"),
            ("--also small=compute=0", "\"0\" is not a compute limit"),
            ("--also small=weight=0", "\"0\" is not a weight"),
            ("--also small=priority=urgent", "\"urgent\" is not a priority"),
            (
                "--also small=size=8g",
                "\"size\" is no key; accepted: slots, memory, compute, weight, priority",
            ),
            ("--also small=", "\"\" is no key"),
            ("--also -small=slots=1", "\"-small\" is no name of a resource; accepted: 1 to 30 small letters"),
            ("--also a.b=slots=1", "\"a.b\" is no name of a resource"),
            ("--also =slots=1", "\"\" is no name of a resource"),
            ("--priority-of-class batch", "it names no PriorityClass or no priority; accepted: NAME=low"),
            ("--priority-of-class =low", "it names no PriorityClass"),
            ("--priority-of-class batch=urgent", "\"urgent\" is not a priority"),
            ("--slots -3", "\"-3\" is no number of slots"),
            ("--slots 1001", "accepted: 1 to 1000"),
            ("--device-list-strategy cdi", "[possible values: cdi-cri, envvar, volume-mounts]"),
            ("--gpus GPU-1", "\"GPU-1\" is not a GPU UUID"),
            ("--gpus-of /gpus/$(NODE_NAME)", "its variable is not set"),
            (
                "--gpus-of /gpus/node --gpus GPU-51600000-0000-4000-8000-000000000000",
                "'--gpus-of <FILE>' cannot be used with '--gpus <UUID,…>'",
            ),
            ("--slot-memory 0", "invalid value '0' for '--slot-memory"),
            ("--slot-compute 101", "invalid value '101' for '--slot-compute"),
            ("--memory off", "[possible values: managed, swap]"),
            ("--resource gpu", "accepted: a domain, a slash and a name, as nvshare.com/gpu"),
            ("--nvidia-cdi-kind a/b/c", "\"a/b/c\" is no such name"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(told), "{text}: {error}");
        }
    }
}
