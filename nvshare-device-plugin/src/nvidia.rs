//! NVIDIA's CDI devices: by them a container gets the GPUs of its seat.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::devices::NodeGpu;

/// The kinds that NVIDIA's tools give their devices, the one that stays when a plugin goes first.
pub const KINDS: [&str; 2] = ["nvidia.com/gpu", "k8s.device-plugin.nvidia.com/gpu"];

/// A specification of CDI devices, as far as it is read. It is in YAML, of which JSON is a part.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Specification {
    kind: String,
    #[serde(default)]
    devices: Vec<Device>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    name: String,
    #[serde(default)]
    container_edits: Edits,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Edits {
    #[serde(default)]
    device_nodes: Vec<Node>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Node {
    path: String,
}

/// Reads a specification.
///
/// # Errors
/// The text is no specification.
pub fn parse(text: &str) -> Result<Specification, String> {
    serde_yaml_ng::from_str(text).map_err(|error| error.to_string())
}

/// NVIDIA's devices for the GPUs of this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// Whether there is a specification of such a kind.
    pub any: bool,
    /// Kind and name of each GPU's device.
    pub names: BTreeMap<nvshare_proto::GpuUuid, String>,
}

/// Looks for the GPUs' devices: of one kind, or of the first of the usual ones that has the GPU.
#[must_use]
pub fn find(specifications: &[Specification], kind: Option<&str>, gpus: &[NodeGpu]) -> Found {
    let usual = if kind.is_some() { &[] } else { &KINDS[..] };
    let kinds = || kind.into_iter().chain(usual.iter().copied());
    let of_kind = |kind: &str| -> Vec<&Device> {
        let found = specifications.iter().filter(|specification| specification.kind == kind);
        found.flat_map(|specification| &specification.devices).collect()
    };
    let name =
        |gpu: &NodeGpu| kinds().find_map(|kind| Some(format!("{kind}={}", named(gpu, &of_kind(kind))?)));
    let names = gpus.iter().filter_map(|gpu| Some((gpu.uuid, name(gpu)?))).collect();
    Found { any: kinds().any(|kind| !of_kind(kind).is_empty()), names }
}

/// The name of a GPU's device. The device is chosen by the GPU's UUID, else as the one with this GPU's file and no other's. It is not chosen by
/// its number, because numbers change when a GPU is added.
fn named<'a>(gpu: &NodeGpu, devices: &[&'a Device]) -> Option<&'a str> {
    let uuid = gpu.uuid.to_string();
    let by_uuid = devices.iter().find(|device| device.name == uuid);
    let by_file = || {
        let minor = gpu.minor?;
        devices.iter().find(|device| {
            let mut files =
                device.container_edits.device_nodes.iter().filter_map(|node| minor_of(&node.path));
            files.next() == Some(minor) && files.next().is_none()
        })
    };
    by_uuid.or_else(by_file).map(|device| device.name.as_str())
}

/// The number of `/dev/nvidiaN`.
fn minor_of(path: &str) -> Option<u32> {
    path.strip_prefix("/dev/nvidia")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::tests::node_gpu;

    /// As `nvidia-ctk cdi generate` writes it.
    const BY_INDEX: &str = r#"---
cdiVersion: 0.5.0
containerEdits:
  deviceNodes:
  - path: /dev/nvidiactl
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia1
    - path: /dev/dri/card1
  name: "0"
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia2
  name: "1"
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia1
    - path: /dev/nvidia2
  name: all
kind: nvidia.com/gpu
"#;

    fn by_uuid(kind: &str, gpus: &[NodeGpu]) -> Specification {
        let devices: Vec<String> =
            gpus.iter().map(|gpu| format!(r#"{{"name":"{}","containerEdits":{{}}}}"#, gpu.uuid)).collect();
        parse(&format!(r#"{{"cdiVersion":"0.5.0","kind":"{kind}","devices":[{}]}}"#, devices.join(",")))
            .unwrap()
    }

    #[test]
    fn a_gpu_has_the_name_that_nvidia_gives_it() {
        let gpus = [node_gpu(1), node_gpu(2)];
        let [a, b] = [gpus[0].uuid, gpus[1].uuid];
        let index = parse(BY_INDEX).unwrap();
        let plugin = by_uuid(KINDS[1], &gpus);
        let usual = by_uuid(KINDS[0], &gpus[..1]);
        let names = |found: Found| found.names.into_iter().collect::<Vec<_>>();

        let found = find(std::slice::from_ref(&index), None, &gpus);
        assert!(found.any);
        assert_eq!(names(found), [(a, "nvidia.com/gpu=0".to_owned()), (b, "nvidia.com/gpu=1".to_owned())]);

        // By its UUID, even where a number comes before; of the kind that stays, where that has the GPU.
        let found = find(&[plugin.clone(), index, usual.clone()], None, &gpus);
        assert_eq!(names(found), [(a, format!("nvidia.com/gpu={a}")), (b, "nvidia.com/gpu=1".to_owned())]);
        let found = find(&[plugin.clone(), usual.clone()], None, &gpus);
        let expected = [(a, format!("nvidia.com/gpu={a}")), (b, format!("{}={b}", KINDS[1]))];
        assert_eq!(names(found), expected);

        // Of the kind that is named, and no other.
        let found = find(&[plugin, usual.clone()], Some(KINDS[0]), &gpus);
        assert_eq!(names(found), [(a, format!("nvidia.com/gpu={a}"))]);
        assert_eq!(find(&[usual], Some("example.com/gpu"), &gpus), Found::default());
        assert_eq!(find(&[], None, &gpus), Found::default());
    }

    #[test]
    fn a_number_without_the_gpus_file_is_no_name() {
        let bare = parse("kind: nvidia.com/gpu\ndevices:\n- name: \"1\"\n").unwrap();
        let found = find(&[bare], None, &[node_gpu(1)]);
        assert!(found.any && found.names.is_empty());
        let unknown = NodeGpu { minor: None, ..node_gpu(1) };
        assert!(find(&[parse(BY_INDEX).unwrap()], None, &[unknown]).names.is_empty());
        assert!(parse("kind: [").is_err());
    }
}
