//! Which slots make which seat, and what the container of a seat gets.

use std::path::{Path, PathBuf};

use nvshare_proto::cdi::{KIND, LIBRARY_IN_CONTAINER};
use nvshare_proto::env::MEMORY;
use nvshare_proto::paths::{SEATS, SYSTEM_SOCKET};
use nvshare_proto::{GpuUuid, SeatName, Slot};

use crate::api::{CdiDevice, ContainerAllocateResponse, Mount};
use crate::cdi;
use crate::options::{Options, Preload, Strategy};
use crate::resources::Resource;

/// The library's name in its folder.
pub const LIBRARY: &str = "libnvshare.so";
/// The name, in the library's folder, of the file that containers get as `/etc/ld.so.preload`.
pub const PRELOAD: &str = "ld.so.preload";
/// The file that names libraries for all programs.
const PRELOADED: &str = "/etc/ld.so.preload";

/// The variable by which NVIDIA's runtime knows the GPUs of a container.
const VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";
/// The folder by whose files NVIDIA's runtime knows them, if the variable names it.
const VISIBLE_MOUNTS: &str = "/var/run/nvidia-container-devices";

/// Why a container does not get what it asks for. The first two in the words of NVIDIA's device plugin.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Several slots, and no container may have them.
    #[error("request for '{resource}: {count}' too large: maximum request size for shared resources is 1")]
    TooLarge {
        /// The resource.
        resource: String,
        /// How many were asked for.
        count: usize,
    },
    /// A device that is not there.
    #[error("invalid allocation request for '{resource}': unknown device: {id}")]
    Unknown {
        /// The resource.
        resource: String,
        /// The device.
        id: String,
    },
    /// Several slots of one GPU.
    #[error("request for '{resource}': several slots of {gpu}; a container gets one slot of a GPU")]
    SameGpu {
        /// The resource.
        resource: String,
        /// The GPU.
        gpu: GpuUuid,
    },
    /// No slot at all.
    #[error("invalid allocation request for '{resource}': no device is named")]
    Nothing {
        /// The resource.
        resource: String,
    },
}

/// The slots of a resource that a container asks for, in order.
///
/// # Errors
/// See [`Refusal`].
pub fn slots(
    ids: &[String],
    resource: &Resource,
    multi_gpu: bool,
    is_offered: impl Fn(GpuUuid) -> bool,
) -> Result<Vec<Slot>, Refusal> {
    let name = || resource.name.clone();
    if ids.len() > 1 && !multi_gpu {
        return Err(Refusal::TooLarge { resource: name(), count: ids.len() });
    }
    let known = |id: &String| {
        let known = resource.slot(id).filter(|slot| is_offered(slot.gpu));
        known.ok_or_else(|| Refusal::Unknown { resource: name(), id: id.clone() })
    };
    let mut slots = ids.iter().map(known).collect::<Result<Vec<Slot>, _>>()?;
    slots.sort_unstable();
    let pairs = slots.iter().zip(slots.iter().skip(1));
    if let Some((slot, _)) = pairs.into_iter().find(|(one, next)| one.gpu == next.gpu) {
        return Err(Refusal::SameGpu { resource: name(), gpu: slot.gpu });
    }
    if slots.is_empty() { Err(Refusal::Nothing { resource: name() }) } else { Ok(slots) }
}

/// The variables of a seat's container.
#[must_use]
pub fn variables(options: &Options) -> Vec<(&'static str, String)> {
    let preload =
        (options.preload == Preload::Env).then(|| ("LD_PRELOAD", preloaded().display().to_string()));
    preload.into_iter().chain(options.memory.map(|memory| (MEMORY, memory.value().to_owned()))).collect()
}

/// The library, as a container sees it.
fn preloaded() -> PathBuf {
    Path::new(LIBRARY_IN_CONTAINER).join(LIBRARY)
}

/// The contents of [`PRELOAD`].
#[must_use]
pub fn preload_file() -> String {
    format!("{}\n", preloaded().display())
}

/// Mounts of a seat's container: paths on the host, and in the container. They are folders, since files in them are replaced.
#[must_use]
pub fn mounts(seat: SeatName, options: &Options) -> Vec<(PathBuf, PathBuf)> {
    let sockets = Path::new(SYSTEM_SOCKET).parent().unwrap_or(Path::new("/"));
    let folder = Path::new(SEATS).join(seat.to_string());
    let mut mounts = vec![
        (options.library_dir.clone(), LIBRARY_IN_CONTAINER.into()),
        (folder.clone(), sockets.to_owned()),
        // Of two seats in a container one is there alone. By this the library finds both, and says so.
        (folder.clone(), folder),
    ];
    if options.preload == Preload::File {
        // Its contents never change.
        mounts.push((options.library_dir.join(PRELOAD), PRELOADED.into()));
    }
    mounts
}

/// The kubelet keeps this answer, and uses it again whenever it starts the container: it follows from the slots alone.
///
/// `nvidia`: names of NVIDIA's CDI devices for the slots' GPUs, kind and name, where the strategy needs them.
#[must_use]
pub fn response(slots: &[Slot], nvidia: &[String], options: &Options) -> ContainerAllocateResponse {
    let seat = SeatName::of(slots);
    let gpus: Vec<String> = slots.iter().map(|slot| slot.gpu.to_string()).collect();
    let mut response = ContainerAllocateResponse::default();
    if options.device_list_strategy == Strategy::CdiCri {
        let names =
            std::iter::once(format!("{KIND}={}", cdi::device_name(seat))).chain(nvidia.iter().cloned());
        response.cdi_devices = names.map(|name| CdiDevice { name }).collect();
        return response;
    }
    let mount = |host: &Path, container: &Path| Mount {
        container_path: container.display().to_string(),
        host_path: host.display().to_string(),
        read_only: true,
    };
    response.envs = variables(options).into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    response.mounts = mounts(seat, options).iter().map(|(host, container)| mount(host, container)).collect();
    let visible = match options.device_list_strategy {
        Strategy::VolumeMounts => {
            let folder = Path::new(VISIBLE_MOUNTS);
            let files = gpus.iter().map(|gpu| mount(Path::new("/dev/null"), &folder.join(gpu)));
            response.mounts.extend(files.map(|file| Mount { read_only: false, ..file }));
            VISIBLE_MOUNTS.to_owned()
        }
        _ => gpus.join(","),
    };
    response.envs.insert(VISIBLE.to_owned(), visible);
    response
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    const A: GpuUuid = GpuUuid([1; 16]);
    const B: GpuUuid = GpuUuid([2; 16]);

    fn options(text: &str) -> Options {
        Options::parse_from(std::iter::once("plugin").chain(text.split_whitespace()))
    }

    #[test]
    fn what_is_asked_for_makes_a_seat_or_is_refused() {
        let id = |gpu: GpuUuid, number: u32| format!("{gpu}::{number}");
        let resource = || "nvshare.com/gpu".to_owned();
        let slot = |gpu, number| Slot { gpu, number };
        let unknown = |id: String| Err(Refusal::Unknown { resource: resource(), id });
        let stranger = GpuUuid([3; 16]);
        for (asked, multi, expected) in [
            (vec![id(A, 3)], false, Ok(vec![slot(A, 3)])),
            (vec![id(B, 9), id(A, 0)], true, Ok(vec![slot(A, 0), slot(B, 9)])),
            (vec![id(B, 9), id(A, 0)], false, Err(Refusal::TooLarge { resource: resource(), count: 2 })),
            (vec![id(A, 1), id(A, 0)], true, Err(Refusal::SameGpu { resource: resource(), gpu: A })),
            (vec![id(A, 1), id(A, 1)], true, Err(Refusal::SameGpu { resource: resource(), gpu: A })),
            (vec![id(A, 10)], false, unknown(id(A, 10))),
            (vec![id(stranger, 0)], false, unknown(id(stranger, 0))),
            (vec!["GPU-1::0".to_owned()], false, unknown("GPU-1::0".to_owned())),
            (vec![], true, Err(Refusal::Nothing { resource: resource() })),
        ] {
            let resources = Resource::all(&options("")).unwrap();
            let got = slots(&asked, &resources[0], multi, |gpu| gpu != stranger);
            assert_eq!(got, expected, "{asked:?}");
        }
        let refused = Refusal::TooLarge { resource: resource(), count: 2 }.to_string();
        let words =
            "request for 'nvshare.com/gpu: 2' too large: maximum request size for shared resources is 1";
        assert_eq!(refused, words);
    }

    fn mounted(response: &ContainerAllocateResponse) -> Vec<(&str, &str, bool)> {
        let mounts = response.mounts.iter();
        mounts
            .map(|mount| (mount.host_path.as_str(), mount.container_path.as_str(), mount.read_only))
            .collect()
    }

    #[test]
    fn names_of_devices_are_all_that_the_engine_needs() {
        let slots = [Slot { gpu: A, number: 0 }];
        let got = response(&slots, &["nvidia.com/gpu=0".to_owned()], &options(""));
        let names: Vec<_> = got.cdi_devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, [&*format!("nvshare.com/gpu=seat-{}", SeatName::of(&slots)), "nvidia.com/gpu=0"]);
        assert_eq!((got.envs.len(), got.mounts.len()), (0, 0));
    }

    #[test]
    fn variables_and_mounts_where_the_engine_knows_no_devices() {
        let slots = [Slot { gpu: A, number: 0 }, Slot { gpu: B, number: 4 }];
        let seat = format!("{SEATS}/{}", SeatName::of(&slots));
        let folders = [
            ("/var/lib/nvshare/lib", "/usr/lib/nvshare", true),
            (seat.as_str(), "/var/run/nvshare", true),
            (seat.as_str(), seat.as_str(), true),
        ];
        let got = response(&slots, &[], &options("--device-list-strategy envvar --memory swap"));
        assert_eq!(mounted(&got), folders);
        let variables: Vec<_> =
            got.envs.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let both = format!("{A},{B}");
        assert_eq!(
            variables,
            [
                ("LD_PRELOAD", "/usr/lib/nvshare/libnvshare.so"),
                ("NVIDIA_VISIBLE_DEVICES", &both),
                ("NVSHARE_MEMORY", "swap")
            ]
        );
        assert_eq!(got.cdi_devices, []);

        let got = response(&slots, &[], &options("--device-list-strategy volume-mounts"));
        let files = [A, B].map(|gpu| format!("/var/run/nvidia-container-devices/{gpu}"));
        let expected =
            [&folders[..], &[("/dev/null", &files[0], false), ("/dev/null", &files[1], false)]].concat();
        assert_eq!(mounted(&got), expected);
        assert_eq!(got.envs["NVIDIA_VISIBLE_DEVICES"], "/var/run/nvidia-container-devices");
    }

    #[test]
    fn a_file_preloads_instead_of_a_variable() {
        let slots = [Slot { gpu: A, number: 0 }];
        let got = response(&slots, &[], &options("--device-list-strategy envvar --preload file"));
        assert!(!got.envs.contains_key("LD_PRELOAD"));
        let file = ("/var/lib/nvshare/lib/ld.so.preload", "/etc/ld.so.preload", true);
        assert_eq!(mounted(&got).last(), Some(&file));
        assert_eq!(preload_file(), "/usr/lib/nvshare/libnvshare.so\n");
    }
}
