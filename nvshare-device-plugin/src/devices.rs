//! Which devices there are: slots of GPUs.

use nvshare_proto::units::Bytes;
use nvshare_proto::{GpuUuid, MAX_SEATS};

use crate::api::{Device, HEALTHY, NumaNode, TopologyInfo, UNHEALTHY};
use crate::resources::Resource;

/// A GPU of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeGpu {
    /// Its name.
    pub uuid: GpuUuid,
    /// Its place among the GPUs of the machine, from 0.
    pub index: u32,
    /// Its model, where that is known.
    pub model: Option<String>,
    /// The number in the name of its file, `/dev/nvidiaN`, where that is known.
    pub minor: Option<u32>,
    /// The NUMA node near it, where there are several.
    pub numa: Option<u32>,
    /// Its memory in bytes, where that is known.
    pub memory: Option<u64>,
    /// Whether it is divided by MIG.
    pub mig: bool,
}

impl NodeGpu {
    /// One of which nothing is known but its name. Where NVIDIA's CDI devices have numbers, it is given out once the plugin starts again.
    const fn lost(uuid: GpuUuid, index: u32) -> Self {
        Self { uuid, index, model: None, minor: None, numa: None, memory: None, mig: false }
    }
}

/// The GPUs that are to be given out; none: all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuChoice {
    /// Their names.
    pub gpus: Vec<GpuUuid>,
    /// The option that names them, for messages.
    pub by: String,
}

impl GpuChoice {
    /// Those that the text of a file names, one a line or with commas between.
    ///
    /// # Errors
    /// There is none, or a word is no name of a GPU. The error begins with `by`.
    pub fn read(text: &str, by: String) -> Result<Self, String> {
        let words = text.split([',', '\n']).map(str::trim).filter(|word| !word.is_empty());
        let gpus = words.map(str::parse).collect::<Result<Vec<_>, _>>();
        let gpus = gpus.map_err(|error| format!("{by}: {error}"))?;
        if gpus.is_empty() { Err(format!("{by}: it names no GPU")) } else { Ok(Self { gpus, by }) }
    }
}

/// The GPUs that are given out: those that are named, or all. One that is named and not there, beside others that are, may be lost: its slots
/// are unhealthy until it comes.
///
/// # Errors
/// None that is named is there, or one has less memory than a slot of a resource is to have.
pub fn choose(gpus: Vec<NodeGpu>, named: &GpuChoice, resources: &[Resource]) -> Result<Vec<NodeGpu>, String> {
    let GpuChoice { gpus: named, by } = named;
    let lost: Vec<GpuUuid> =
        named.iter().copied().filter(|gpu| gpus.iter().all(|there| there.uuid != *gpu)).collect();
    if let Some(missing) = lost.first().filter(|_| lost.len() == named.len()) {
        let there: Vec<String> = gpus.iter().map(|gpu| gpu.uuid.to_string()).collect();
        return Err(format!("{by}: {missing} is not there; this machine has {}", there.join(", ")));
    }
    let is_chosen = |gpu: &NodeGpu| named.is_empty() || named.contains(&gpu.uuid);
    let lost = lost.into_iter().zip(gpus.len() as u32..).map(|(gpu, index)| NodeGpu::lost(gpu, index));
    let chosen: Vec<NodeGpu> = gpus.into_iter().filter(is_chosen).chain(lost).collect();
    for (resource, gpu) in resources.iter().flat_map(|resource| chosen.iter().map(move |gpu| (resource, gpu)))
    {
        if let (Some(limit), Some(memory)) = (resource.memory(), gpu.memory)
            && limit > memory
        {
            let (option, limit, memory) = (resource.option(), Bytes(limit), Bytes(memory));
            return Err(format!("{option}: {} has {memory}, less than {limit}", gpu.uuid));
        }
    }
    Ok(chosen)
}

/// Returns an error if a scheduler has fewer seats than these GPUs have slots.
///
/// # Errors
/// It has fewer.
pub fn refuse_too_many(gpus: &[NodeGpu], resources: &[Resource]) -> Result<(), String> {
    let of_gpu: u32 = resources.iter().map(|resource| resource.slots).sum();
    let (gpus, slots) = (gpus.len(), gpus.len() * of_gpu as usize);
    if slots > MAX_SEATS {
        return Err(format!(
            "--slots, --also: {gpus} GPUs would have {slots} slots together, and a scheduler has {MAX_SEATS} seats: offer fewer of a GPU"
        ));
    }
    Ok(())
}

/// The list that the kubelet gets of a resource.
pub fn list(gpus: &[NodeGpu], resource: &Resource, is_healthy: impl Fn(&NodeGpu) -> bool) -> Vec<Device> {
    let of_gpu = |gpu: &NodeGpu| {
        let health = if is_healthy(gpu) { HEALTHY } else { UNHEALTHY };
        let node = gpu.numa.map(|node| NumaNode { id: node.into() });
        let topology = node.map(|node| TopologyInfo { nodes: vec![node] });
        resource.ids(gpu.uuid).map(move |id| Device {
            id,
            health: health.to_owned(),
            topology: topology.clone(),
        })
    };
    gpus.iter().flat_map(of_gpu).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::Parser;

    use super::*;
    use crate::options::Options;

    fn resources(options: &str) -> Vec<Resource> {
        let words = std::iter::once("plugin").chain(options.split_whitespace());
        Resource::all(&Options::parse_from(words)).unwrap()
    }

    pub(crate) fn node_gpu(number: u8) -> NodeGpu {
        NodeGpu {
            uuid: GpuUuid([number; 16]),
            index: 0,
            model: None,
            minor: Some(number.into()),
            numa: None,
            memory: Some(8 << 30),
            mig: false,
        }
    }

    #[test]
    fn each_gpu_has_slots_with_its_health_and_place() {
        let gpus = [node_gpu(1), NodeGpu { numa: Some(1), ..node_gpu(2) }];
        let listed = list(&gpus, &resources("--slots 2")[0], |gpu| gpu.uuid == gpus[0].uuid);
        let short: Vec<_> = listed
            .iter()
            .map(|device| {
                let node = device.topology.as_ref().map(|topology| topology.nodes[0].id);
                (device.id.as_str(), device.health.as_str(), node)
            })
            .collect();
        let (a, b) = (gpus[0].uuid, gpus[1].uuid);
        assert_eq!(
            short,
            [
                (&*format!("{a}::0"), "Healthy", None),
                (&*format!("{a}::1"), "Healthy", None),
                (&*format!("{b}::0"), "Unhealthy", Some(1)),
                (&*format!("{b}::1"), "Unhealthy", Some(1)),
            ]
        );
        assert!(
            list(&gpus, &resources("--slots 1000")[0], |_| true).iter().all(|device| device.id.len() <= 63)
        );
    }

    #[test]
    fn there_are_no_more_slots_than_seats() {
        let of = |options| refuse_too_many(&[node_gpu(1), node_gpu(2)], &resources(options));
        assert_eq!(of("--slots 1000 --also two=slots=1000 --also small=slots=48"), Ok(()));
        let refused = of("--slots 1000 --also two=slots=1000 --also small=slots=49").unwrap_err();
        assert!(refused.contains("2 GPUs would have 4098 slots together"), "{refused}");
    }

    fn by(gpus: &[GpuUuid]) -> GpuChoice {
        GpuChoice { gpus: gpus.to_vec(), by: "--gpus".to_owned() }
    }

    #[test]
    fn a_file_names_gpus_by_line_or_comma() {
        let [a, b] = [1, 2].map(|number| node_gpu(number).uuid);
        let read = |text: &str| GpuChoice::read(text, "FILE".to_owned());
        for text in [format!("{a}\n{b}\n"), format!("{a},{b}"), format!(" {a} ,\r\n\n{b},\n")] {
            assert_eq!(read(&text).map(|named| named.gpus), Ok(vec![a, b]), "{text:?}");
        }
        assert_eq!(read(" \n"), Err("FILE: it names no GPU".to_owned()));
        let wrong = read(&format!("{a}\n0")).unwrap_err();
        assert!(wrong.starts_with("FILE: \"0\" is not a GPU UUID"), "{wrong}");
    }

    #[test]
    fn gpus_are_those_that_are_named() {
        let (a, b) = (node_gpu(1), node_gpu(2));
        let all = || vec![a.clone(), b.clone()];
        assert_eq!(choose(all(), &by(&[]), &resources("")).unwrap(), all());
        assert_eq!(choose(all(), &by(&[b.uuid]), &resources("")).unwrap(), std::slice::from_ref(&b));
        let lost = GpuUuid([3; 16]);
        assert_eq!(
            choose(all(), &by(&[lost, b.uuid]), &resources("")).unwrap(),
            [b.clone(), NodeGpu::lost(lost, 2)]
        );
        let missing = choose(all(), &by(&[lost]), &resources("")).unwrap_err();
        assert!(
            missing.starts_with("--gpus: GPU-03030303-0303-0303-0303-030303030303 is not there"),
            "{missing}"
        );
    }

    #[test]
    fn no_slot_has_more_memory_than_its_gpu() {
        let all = || vec![node_gpu(1), NodeGpu { memory: Some(4 << 30), ..node_gpu(2) }];
        assert!(choose(all(), &by(&[]), &resources("--slot-memory 4g")).is_ok());
        let small = node_gpu(2).uuid;
        for (options, option) in [
            ("--slot-memory 5g --also low=memory=1g", "--slot-memory"),
            ("--slot-memory 4g --also high=memory=5g,priority=high", "--also high"),
        ] {
            let refused = choose(all(), &by(&[]), &resources(options)).unwrap_err();
            assert_eq!(refused, format!("{option}: {small} has 4.00 GiB, less than 5.00 GiB"));
            assert!(
                choose(all(), &by(&[node_gpu(1).uuid]), &resources(options)).is_ok(),
                "it is not given out"
            );
            let unknown = vec![NodeGpu { memory: None, ..node_gpu(1) }];
            assert!(choose(unknown, &by(&[]), &resources(options)).is_ok());
        }
    }
}
