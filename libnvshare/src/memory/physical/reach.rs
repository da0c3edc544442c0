//! Which devices that are no GPUs could reach memory without a call of the driver that the library sees.
//!
//! JAX creates all of its memory with `gpuDirectRDMACapable` where the driver has that, whether a network card is there or
//! not. A network card, GDRCopy and GPUDirect Storage find such memory by its address alone, through files in `/dev`.
//! Other ways begin with a call that pins the memory: a dma-buf (`cuMemGetHandleForAddressRange`), or
//! `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`, which the kernel's interface for other modules asks for.

use std::path::Path;
use std::sync::OnceLock;

use crate::process::log;

/// Whether memory that was made for it may be reached by a device without the library's noticing.
pub(super) fn is_open() -> bool {
    static OPEN: OnceLock<bool> = OnceLock::new();
    *OPEN.get_or_init(|| {
        let way = way_in(Path::new("/dev"));
        if let Some(name) = &way {
            log::info(format_args!(
                "memory that is created for RDMA stays on the card, since there is /dev/{name}"
            ));
        }
        way.is_some()
    })
}

/// The first file of a folder of devices by which memory can be reached.
fn way_in(devices: &Path) -> Option<String> {
    let names = std::fs::read_dir(devices).into_iter().flatten().flatten();
    let mut names = names.filter_map(|entry| entry.file_name().into_string().ok());
    names.find(|name| matches!(name.as_str(), "infiniband" | "gdrdrv") || name.starts_with("nvidia-fs"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_devices_that_reach_memory_are_found() {
        let folder = std::env::temp_dir().join(format!("nvshare-devices-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for name in ["nvidia0", "nvidiactl", "null"] {
            std::fs::write(folder.join(name), "").unwrap();
        }
        assert_eq!(way_in(&folder), None);
        for name in ["infiniband", "gdrdrv", "nvidia-fs3"] {
            std::fs::write(folder.join(name), "").unwrap();
            assert_eq!(way_in(&folder).as_deref(), Some(name));
            std::fs::remove_file(folder.join(name)).unwrap();
        }
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(way_in(&folder), None);
    }
}
