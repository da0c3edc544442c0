//! Which devices that are no GPUs could reach memory without a call of the driver that the library sees.
//!
//! JAX creates all of its memory with `gpuDirectRDMACapable` where the driver has that, whether a network card is there or not.
//! A network card, GDRCopy and GPUDirect Storage find such memory by its address alone, through files in `/dev`. The network
//! card's driver also needs a module of the kernel that looks addresses up for it (`nvidia_peermem`). Other ways begin with a
//! call that pins the memory: a dma-buf (`cuMemGetHandleForAddressRange`), or `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`, which the
//! kernel's interface for other modules asks for.

use std::path::Path;
use std::sync::OnceLock;

use crate::process::log;

/// Whether memory that was made for it may be reached by a device without the library's noticing.
pub(super) fn is_open() -> bool {
    static OPEN: OnceLock<bool> = OnceLock::new();
    *OPEN.get_or_init(|| {
        let way = way_in(Path::new("/dev"), Path::new("/sys/module"));
        if let Some(name) = &way {
            log::info(format_args!(
                "memory that is created for RDMA stays on the card, since there is /dev/{name}"
            ));
        }
        way.is_some()
    })
}

/// The names in a folder; none: the folder cannot be read.
fn names_in(folder: &Path) -> Option<Vec<String>> {
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    Some(entries.filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

/// The first file of a folder of devices by which memory can be reached, with the kernel's `modules`.
fn way_in(devices: &Path, modules: &Path) -> Option<String> {
    let has = |folder: &Path, name: fn(&str) -> bool| names_in(folder).map(|all| all.iter().any(|n| name(n)));
    let looks_up = || has(modules, |name| matches!(name, "nvidia_peermem" | "nv_peer_mem")).unwrap_or(true);
    let is_way = |name: &String| match name.as_str() {
        "infiniband" => {
            has(&devices.join(name), |name| name.starts_with("uverbs")) == Some(true) && looks_up()
        }
        name => name == "gdrdrv" || name.starts_with("nvidia-fs"),
    };
    names_in(devices)?.into_iter().find(is_way)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_devices_that_reach_memory_are_found() {
        let root = std::env::temp_dir().join(format!("nvshare-devices-{}", std::process::id()));
        let (devices, modules, none) = (root.join("dev"), root.join("module"), root.join("none"));
        std::fs::create_dir_all(devices.join("infiniband")).unwrap();
        std::fs::create_dir_all(modules.join("mlx5_ib")).unwrap();
        for name in ["nvidia0", "nvidiactl", "null", "infiniband/rdma_cm"] {
            std::fs::write(devices.join(name), "").unwrap();
        }
        assert_eq!(way_in(&devices, &modules), None);
        for name in ["gdrdrv", "nvidia-fs3"] {
            std::fs::write(devices.join(name), "").unwrap();
            assert_eq!(way_in(&devices, &modules).as_deref(), Some(name));
            std::fs::remove_file(devices.join(name)).unwrap();
        }
        let network = Some("infiniband".to_owned());
        std::fs::create_dir(modules.join("nvidia_peermem")).unwrap();
        assert_eq!(way_in(&devices, &modules), None, "there is no network card");
        std::fs::write(devices.join("infiniband/uverbs0"), "").unwrap();
        assert_eq!(way_in(&devices, &modules), network);
        assert_eq!(way_in(&devices, &none), network, "the modules are unknown");
        std::fs::remove_dir(modules.join("nvidia_peermem")).unwrap();
        assert_eq!(way_in(&devices, &modules), None, "nothing looks addresses up for it");
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(way_in(&devices, &modules), None);
    }
}
