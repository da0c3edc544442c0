//! The machine's GPUs as the kernel module describes them, whether in use or not. Unlike NVML, this does not wake a
//! GPU that sleeps.

use std::fs;
use std::path::Path;

use nvshare_proto::GpuUuid;

/// Folder in which the kernel module has a folder for each GPU, named by the GPU's place on the bus.
pub const DESCRIPTIONS: &str = "/proc/driver/nvidia/gpus";

/// A GPU of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// The GPU's name.
    pub gpu: GpuUuid,
    /// The GPU's number, in the order of the bus, as `nvidia-smi` counts.
    pub index: u32,
    /// The GPU's model.
    pub name: String,
}

/// Lists the GPUs that a folder describes; none where there is no such folder.
#[must_use]
pub fn list(descriptions: &Path) -> Vec<Listed> {
    let folders = fs::read_dir(descriptions).into_iter().flatten().filter_map(Result::ok);
    let mut folders: Vec<_> = folders.map(|entry| entry.path()).collect();
    folders.sort();
    let described = folders.iter().filter_map(|folder| fs::read_to_string(folder.join("information")).ok());
    // A GPU that has no UUID yet still counts in the numbering.
    (0..).zip(described).filter_map(|(index, text)| describe(index, &text)).collect()
}

fn describe(index: u32, text: &str) -> Option<Listed> {
    let field = |name: &str| {
        text.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim().to_owned()))
    };
    Some(Listed { gpu: field("GPU UUID")?.parse().ok()?, index, name: field("Model")? })
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
        fs::remove_dir_all(&folder).unwrap();
        let gpu = "GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0".parse().unwrap();
        assert_eq!(gpus, [Listed { gpu, index: 1, name: "NVIDIA H100 80GB HBM3".to_owned() }]);
        assert_eq!(list(Path::new("/no/such/folder")), []);
    }
}
