//! The GPUs of this machine, from NVML, or else from what the kernel module says of them.

use std::fs;
use std::path::Path;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use crate::devices::Card;

/// Folder in which the kernel module has a folder for each GPU, named by the GPU's place on the bus.
pub const DESCRIPTIONS: &str = "/proc/driver/nvidia/gpus";

/// Lists the GPUs; none where there is no driver. `descriptions` and `sysfs`: where the kernel describes them.
#[must_use]
pub fn list(descriptions: &Path, sysfs: &Path) -> Vec<Card> {
    // NVML knows this machine, whatever folder is named.
    let by_nvml = (descriptions == Path::new(DESCRIPTIONS)).then(|| ask_nvml(sysfs).ok()).flatten();
    by_nvml.filter(|cards| !cards.is_empty()).unwrap_or_else(|| described(descriptions, sysfs))
}

/// How many GPUs the kernel module has, also those whose UUIDs it does not know yet.
#[must_use]
pub fn count(descriptions: &Path) -> usize {
    fs::read_dir(descriptions).into_iter().flatten().filter_map(Result::ok).count()
}

fn ask_nvml(sysfs: &Path) -> Result<Vec<Card>, NvmlError> {
    let nvml = Nvml::init()?;
    let mut cards = Vec::new();
    for index in 0..nvml.device_count()? {
        let device = nvml.device_by_index(index)?;
        let Ok(gpu) = device.uuid()?.parse() else { continue };
        // NVML writes the bus's domain with four digits more than the kernel.
        let bus = device.pci_info().map(|pci| pci.bus_id.to_lowercase());
        let bus = bus.map(|bus| bus.strip_prefix("0000").map(str::to_owned).unwrap_or(bus));
        cards.push(Card {
            gpu,
            minor: device.minor_number().ok(),
            numa: bus.ok().and_then(|bus| numa(sysfs, &bus)),
            memory: device.memory_info().ok().map(|memory| memory.total),
        });
    }
    Ok(cards)
}

fn described(descriptions: &Path, sysfs: &Path) -> Vec<Card> {
    let folders = fs::read_dir(descriptions).into_iter().flatten().filter_map(Result::ok);
    let mut folders: Vec<_> = folders.map(|entry| entry.path()).collect();
    folders.sort();
    let describe = |folder: &Path| {
        let text = fs::read_to_string(folder.join("information")).ok()?;
        let field = |name: &str| {
            text.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim()))
        };
        let bus = folder.file_name()?.to_str()?;
        Some(Card {
            gpu: field("GPU UUID")?.parse().ok()?,
            minor: field("Device Minor").and_then(|minor| minor.parse().ok()),
            numa: numa(sysfs, bus),
            memory: None,
        })
    };
    folders.iter().filter_map(|folder| describe(folder)).collect()
}

/// The NUMA node of a device; a machine without several says -1.
fn numa(sysfs: &Path, bus: &str) -> Option<u32> {
    let file = sysfs.join("bus/pci/devices").join(bus).join("numa_node");
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvshare_proto::GpuUuid;

    #[test]
    fn the_kernel_module_describes_gpus() {
        let root = std::env::temp_dir().join(format!("nvshare-cards-{}", std::process::id()));
        let gpus = root.join("gpus");
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
        let one = Card { gpu: GpuUuid([1; 16]), minor: None, numa: None, memory: None };
        let two = Card { gpu: GpuUuid([2; 16]), minor: Some(0), numa: Some(1), memory: None };
        assert_eq!(list(&gpus, &root.join("sys")), [one, two]);
        assert_eq!(count(&gpus), 3);
        assert_eq!(list(&root.join("none"), &root), []);
        assert_eq!(count(&root.join("none")), 0);
        fs::remove_dir_all(root).unwrap();
    }
}
