//! The machine's GPUs as the kernel module describes them, whether in use or not. Unlike NVML, this does not wake a
//! GPU that sleeps.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nvshare_core::MAX_GPUS_PER_CLIENT;
use nvshare_proto::GpuUuid;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;

use crate::lock::lock;

/// A list younger than this is not made anew.
const FRESH: Duration = Duration::from_secs(1);
/// How long the first list is waited for: until then, a machine seems to have no GPUs.
const PATIENCE_AT_START: Duration = Duration::from_secs(1);

/// Folder in which the kernel module has a folder for each GPU, named by the GPU's place on the bus.
pub(crate) const DESCRIPTIONS: &str = "/proc/driver/nvidia/gpus";

/// A GPU of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListedGpu {
    /// The GPU's name.
    pub(crate) gpu: GpuUuid,
    /// The GPU's number, in the order of the bus, as `nvidia-smi` counts.
    pub(crate) index: u32,
    /// The GPU's model.
    pub(crate) name: String,
    /// The GPU's place on the bus, as the kernel writes it: domain, bus, device and function.
    pub(crate) bus: String,
}

/// Lists the GPUs that a folder describes; none where there is no such folder.
#[must_use]
pub(crate) fn list(descriptions: &Path) -> Vec<ListedGpu> {
    let folders = fs::read_dir(descriptions).into_iter().flatten().filter_map(Result::ok);
    let mut folders: Vec<_> = folders.map(|entry| entry.path()).collect();
    folders.sort();
    let described = folders.iter().filter_map(|folder| {
        let bus = folder.file_name()?.to_string_lossy().into_owned();
        Some((bus, fs::read_to_string(folder.join("information")).ok()?))
    });
    // A GPU that has no UUID yet still counts in the numbering.
    (0..).zip(described).filter_map(|(index, (bus, text))| describe(index, bus, &text)).collect()
}

/// A GPU can be cut into seven parts (MIG) with names of their own, which the kernel module does not list, and be cut anew.
const NAMES_OF_A_GPU: usize = 16;

/// How many GPUs processes can name on a machine with such a folder of descriptions, which are not read. Where it is empty, as many as any
/// machine has.
pub(crate) fn most_named(descriptions: &Path) -> usize {
    let there = fs::read_dir(descriptions).into_iter().flatten().count();
    if there == 0 { MAX_GPUS_PER_CLIENT } else { (there * NAMES_OF_A_GPU).min(MAX_GPUS_PER_CLIENT) }
}

/// The machine's GPUs as they were last listed. The kernel module may take its time to describe them, and nobody's grant waits for that: a
/// thread for it reads.
#[derive(Debug)]
pub(crate) struct Listing {
    descriptions: PathBuf,
    listed: Arc<Mutex<Vec<ListedGpu>>>,
    /// The last look, and when it began.
    look: Option<(JoinHandle<()>, Instant)>,
}

impl Listing {
    /// A list of none, until they are listed.
    pub(crate) fn new(descriptions: PathBuf) -> Self {
        Self { descriptions, listed: Arc::default(), look: None }
    }

    /// Lists them for the first time. If that takes long, the list comes later.
    pub(crate) async fn look_first(&mut self) {
        self.look();
        if let Some((look, _)) = &mut self.look {
            let _ = timeout(PATIENCE_AT_START, look).await;
        }
    }

    /// As they were last listed.
    pub(crate) fn last(&self) -> Vec<ListedGpu> {
        lock(&self.listed).clone()
    }

    /// Begins to list them anew, unless that is under way or the list is fresh.
    pub(crate) fn look(&mut self) {
        let now = Instant::now();
        if self.look.as_ref().is_some_and(|(look, began)| !look.is_finished() || now < *began + FRESH) {
            return;
        }
        let (descriptions, listed) = (self.descriptions.clone(), Arc::clone(&self.listed));
        let look = spawn_blocking(move || {
            let new = list(&descriptions);
            *lock(&listed) = new;
        });
        self.look = Some((look, now));
    }

    /// Whether the machine had a GPU when it was listed last.
    pub(crate) fn has(&self, gpu: GpuUuid) -> bool {
        self.last().iter().any(|listed| listed.gpu == gpu)
    }
}

fn describe(index: u32, bus: String, text: &str) -> Option<ListedGpu> {
    let field = |name: &str| {
        text.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim().to_owned()))
    };
    Some(ListedGpu { gpu: field("GPU UUID")?.parse().ok()?, index, name: field("Model")?, bus })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_in_the_order_of_the_bus() {
        let folder = std::env::temp_dir().join(format!("nvshare-gpus-{}", std::process::id()));
        for (place, model, uuid) in [
            ("0000:65:00.0", "NVIDIA H100 80GB HBM3", "GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"),
            ("0000:17:00.0", "Tesla T4", "GPU-????????-????-????-????-????????????"),
        ] {
            fs::create_dir_all(folder.join(place)).unwrap();
            let text =
                format!("Model: \t\t {model}\nIRQ:   \t\t 37\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n");
            fs::write(folder.join(place).join("information"), text).unwrap();
        }
        let gpus = list(&folder);
        let mut listing = Listing::new(folder.clone());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(listing.look_first());
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(listing.last(), gpus);
        let gpu = "GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0".parse().unwrap();
        let (name, bus) = ("NVIDIA H100 80GB HBM3".to_owned(), "0000:65:00.0".to_owned());
        assert_eq!(gpus, [ListedGpu { gpu, index: 1, name, bus }]);
        assert_eq!(list(Path::new("/no/such/folder")), []);
    }

    #[test]
    fn as_many_gpus_are_named_as_the_machine_can_have() {
        let folder = std::env::temp_dir().join(format!("nvshare-named-{}", std::process::id()));
        assert_eq!(most_named(&folder), 64);
        for (there, most) in [(1, 16), (2, 32), (4, 64), (16, 64)] {
            (0..there).for_each(|n| fs::create_dir_all(folder.join(n.to_string())).unwrap());
            assert_eq!(most_named(&folder), most, "of {there}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    /// The kernel module keeps who reads waiting, here a pipe that nobody writes to: a look does not.
    #[test]
    fn nobody_waits_for_a_list_that_takes_long() {
        let folder = std::env::temp_dir().join(format!("nvshare-slow-gpus-{}", std::process::id()));
        let mut listing = Listing::new(folder.clone());
        let slow = folder.join("0000:17:00.0");
        fs::create_dir_all(&slow).unwrap();
        let made = std::process::Command::new("mkfifo").arg(slow.join("information")).status().unwrap();
        assert!(made.success());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            listing.look();
            assert_eq!(listing.last(), []);
            // Now the module answers.
            let text = "Model: Tesla T4\nGPU UUID: GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0\n";
            fs::write(slow.join("information"), text).unwrap();
            listing.look.take().unwrap().0.await.unwrap();
            assert_eq!(listing.last().len(), 1);
        });
        fs::remove_dir_all(&folder).unwrap();
    }
}
