//! The ResourceSlice of a node: what it says of each GPU, and what has to be done so that the API server has it.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceAttribute, DeviceCapacity, ResourcePool,
    ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use nvshare_proto::GpuUuid;
use nvshare_proto::units::MIN_MEMORY_LIMIT;

use super::{DRIVER, quantities};
use crate::devices::NodeGpu;
use crate::node_gpus::Versions;
use crate::options::Options;

/// The capacity of a GPU's memory, in bytes.
pub const MEMORY: &str = "memory";
/// The capacity of a GPU's time, in per cent.
pub const COMPUTE: &str = "compute";
/// The capacity of places for seats.
pub const SLOTS: &str = "slots";

/// Longest text of an attribute.
const MAX_ATTRIBUTE: usize = 64;

/// The name of a GPU's device: a DNS label.
#[must_use]
pub fn device_name(gpu: GpuUuid) -> String {
    gpu.to_string().to_lowercase()
}

/// The largest part of a GPU's memory that one seat may have, in bytes. None: not known, so that no claim can ask for memory.
#[must_use]
pub fn most_memory(gpu: &NodeGpu, options: &Options) -> Option<u64> {
    gpu.memory.or(options.slot_memory)
}

/// A GPU as a device that many claims may have.
///
/// A claim that asks for nothing gets a slot with the limits of the options, or else the whole GPU. All slots may have them at once, so what
/// there is in all may be more than the GPU.
#[must_use]
pub fn device(gpu: &NodeGpu, versions: &Versions, options: &Options) -> Device {
    let slots = u64::from(options.slots);
    let memory = most_memory(gpu, options).map(|most| {
        // The API server refuses a slice whose default lies outside the range.
        let usual = options.slot_memory.map_or(most, |slot| slot.min(most));
        let least = MIN_MEMORY_LIMIT.min(usual);
        let all = most.max(usual.saturating_mul(slots));
        (MEMORY, capacity([all, usual, least, most].map(quantities::bytes), None))
    });
    let usual = options.slot_compute.map_or(100, u64::from);
    let all = (usual * slots).max(100);
    let compute = (COMPUTE, capacity([all, usual, 1, 100].map(quantities::number), Some(1)));
    // The API server refuses a step beyond what there is in all.
    let places = (SLOTS, capacity([slots, 1, 1, slots].map(quantities::number), (slots > 1).then_some(1)));
    let capacity = memory.into_iter().chain([compute, places]);
    Device {
        name: device_name(gpu.uuid),
        allow_multiple_allocations: Some(true),
        attributes: Some(attributes(gpu, versions)),
        capacity: Some(capacity.map(|(name, capacity)| (name.to_owned(), capacity)).collect()),
        ..Device::default()
    }
}

/// A capacity: what there is in all, what a request gets that does not name it, and the least and the most that one may name.
fn capacity([value, default, min, max]: [Quantity; 4], step: Option<u64>) -> DeviceCapacity {
    let range = CapacityRequestPolicyRange { min, max: Some(max), step: step.map(quantities::number) };
    let policy = CapacityRequestPolicy {
        default: Some(default),
        valid_range: Some(range),
        ..CapacityRequestPolicy::default()
    };
    DeviceCapacity { value, request_policy: Some(policy) }
}

fn attributes(gpu: &NodeGpu, versions: &Versions) -> BTreeMap<String, DeviceAttribute> {
    let text = |text: String| DeviceAttribute { string: Some(text), ..DeviceAttribute::default() };
    let number = |number: u32| DeviceAttribute { int: Some(number.into()), ..DeviceAttribute::default() };
    let version = |text: &String| {
        Some(DeviceAttribute { version: Some(semantic(text)?), ..DeviceAttribute::default() })
    };
    let model = gpu.model.clone().filter(|model| !model.is_empty() && model.len() <= MAX_ATTRIBUTE);
    let known = [
        ("uuid", Some(text(gpu.uuid.to_string()))),
        ("index", Some(number(gpu.index))),
        ("numaNode", gpu.numa.map(number)),
        ("productName", model.map(text)),
        ("driverVersion", versions.driver.as_ref().and_then(version)),
        ("cudaDriverVersion", versions.cuda.as_ref().and_then(version)),
    ];
    known.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

/// A version as <https://semver.org> has it: three numbers without leading zeros. NVIDIA writes `535.104.05`, and CUDA has two numbers.
fn semantic(text: &str) -> Option<String> {
    let numbers: Vec<u32> = text.split('.').map(str::parse).collect::<Result<_, _>>().ok()?;
    let [major, minor, patch] = match numbers[..] {
        [major, minor] => [major, minor, 0],
        [major, minor, patch] => [major, minor, patch],
        _ => return None,
    };
    Some(format!("{major}.{minor}.{patch}"))
}

/// Something to do at the API server.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Make this slice. Its owner is still missing.
    Create(ResourceSlice),
    /// Replace one by this, if nobody else has changed it meanwhile.
    Replace(ResourceSlice),
    /// Remove the one of this name and version.
    Delete(ObjectMeta),
}

/// The steps by which the API server gets a slice with these devices, and no other of this driver and node. One without devices is not
/// kept.
///
/// `found`: the slices that there are. Those of others are left alone. `stored`: what the API server made of the same devices when they were
/// written; it may have dropped fields.
#[must_use]
pub fn plan(node: &str, wanted: &[Device], found: &[ResourceSlice], stored: Option<&[Device]>) -> Vec<Step> {
    let is_ours =
        |slice: &&ResourceSlice| slice.spec.driver == DRIVER && slice.spec.node_name.as_deref() == Some(node);
    // A pool of another name cannot be changed into this one.
    let is_pool = |slice: &ResourceSlice| slice.spec.pool.name == node;
    let mut ours: Vec<&ResourceSlice> = found.iter().filter(is_ours).collect();
    ours.sort_by_key(|slice| (!is_pool(slice), slice.metadata.name.clone()));
    let newest = ours.iter().map(|slice| slice.spec.pool.generation).max().unwrap_or_default();
    let kept = ours.first().filter(|slice| is_pool(slice) && !wanted.is_empty());
    let others = ours.iter().skip(usize::from(kept.is_some()));
    let mut steps: Vec<Step> = others.map(|slice| Step::Delete(slice.metadata.clone())).collect();
    let spec = |generation| ResourceSliceSpec {
        driver: DRIVER.to_owned(),
        node_name: Some(node.to_owned()),
        pool: ResourcePool { name: node.to_owned(), generation, resource_slice_count: 1 },
        devices: Some(wanted.to_vec()),
        ..ResourceSliceSpec::default()
    };
    match kept {
        Some(slice) => {
            let devices = slice.spec.devices.as_deref().unwrap_or_default();
            let is_current = plain(devices) == plain(wanted) || Some(devices) == stored;
            let is_newest = slice.spec.pool.generation == newest && slice.spec.pool.resource_slice_count == 1;
            if !is_current || !is_newest {
                let metadata = slice.metadata.clone();
                steps.push(Step::Replace(ResourceSlice { metadata, spec: spec(newest + 1) }));
            }
        }
        None if wanted.is_empty() => {}
        None => {
            let metadata =
                ObjectMeta { generate_name: Some(format!("{node}-{DRIVER}-")), ..ObjectMeta::default() };
            steps.push(Step::Create(ResourceSlice { metadata, spec: spec(newest + 1) }));
        }
    }
    steps
}

/// Devices whose quantities are written in one way: the API server writes those that it gets in its own.
fn plain(devices: &[Device]) -> Vec<Device> {
    let mut devices = devices.to_vec();
    for capacity in
        devices.iter_mut().filter_map(|device| device.capacity.as_mut()).flat_map(BTreeMap::values_mut)
    {
        let policy = capacity.request_policy.as_mut();
        let (default, range) = policy.map(|policy| (&mut policy.default, &mut policy.valid_range)).unzip();
        let range = range.and_then(Option::as_mut);
        let (min, more) = range.map(|range| (&mut range.min, [&mut range.max, &mut range.step])).unzip();
        let optional = default.into_iter().chain(more.into_iter().flatten()).flatten();
        for quantity in [&mut capacity.value].into_iter().chain(min).chain(optional) {
            *quantity = quantities::plain(quantity);
        }
    }
    devices
}

/// The node as the owner of a slice, which goes with it.
#[must_use]
pub fn owner(node: &ObjectMeta) -> Option<OwnerReference> {
    Some(OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.name.clone()?,
        uid: node.uid.clone()?,
        controller: Some(true),
        ..OwnerReference::default()
    })
}

/// Whether the API server has kept that a device may be given to several claims, and what each of them consumes.
#[must_use]
pub fn is_shared(stored: &[Device]) -> bool {
    stored.iter().all(|device| {
        let mut capacities = device.capacity.iter().flat_map(BTreeMap::values);
        device.allow_multiple_allocations == Some(true) && capacities.all(|one| one.request_policy.is_some())
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;
    use crate::devices::tests::node_gpu;

    fn options(text: &str) -> Options {
        Options::parse_from(std::iter::once("plugin").chain(text.split_whitespace()))
    }

    fn versions() -> Versions {
        Versions { driver: Some("535.104.05".to_owned()), cuda: Some("12.4".to_owned()) }
    }

    #[test]
    fn a_gpu_is_a_device_that_many_may_have() {
        let known = NodeGpu { model: Some("NVIDIA L4".to_owned()), numa: Some(1), index: 3, ..node_gpu(1) };
        let got = device(&known, &versions(), &options("--slots 4 --slot-memory 4GiB --slot-compute 50"));
        let range = |min: &str, max: &str| json!({"min": min, "max": max});
        let stepped = |min: &str, max: &str| json!({"min": min, "max": max, "step": "1"});
        let capacity = |value: &str, default: &str, range| json!({"value": value, "requestPolicy": {"default": default, "validRange": range}});
        let expected = json!({
            "name": "gpu-01010101-0101-0101-0101-010101010101",
            "allowMultipleAllocations": true,
            "attributes": {
                "uuid": {"string": "GPU-01010101-0101-0101-0101-010101010101"},
                "index": {"int": 3},
                "numaNode": {"int": 1},
                "productName": {"string": "NVIDIA L4"},
                "driverVersion": {"version": "535.104.5"},
                "cudaDriverVersion": {"version": "12.4.0"},
            },
            "capacity": {
                "memory": capacity("16Gi", "4Gi", range("64Mi", "8Gi")),
                "compute": capacity("200", "50", stepped("1", "100")),
                "slots": capacity("4", "1", stepped("1", "4")),
            },
        });
        assert_eq!(serde_json::to_value(got).unwrap(), expected);
    }

    #[test]
    fn what_there_is_in_all_is_as_the_options_have_it() {
        let unknown = NodeGpu { memory: None, ..node_gpu(1) };
        // Value, default and most of the memory; value and default of the compute.
        for (gpu, text, memory, compute) in [
            (node_gpu(1), "", Some(["80Gi", "8Gi", "8Gi"]), ["1000", "100"]),
            (node_gpu(1), "--slots 1", Some(["8Gi", "8Gi", "8Gi"]), ["100", "100"]),
            (node_gpu(1), "--slots 2 --slot-memory 1GiB", Some(["8Gi", "1Gi", "8Gi"]), ["200", "100"]),
            // A GPU of half the size, in a node whose slots are made for others.
            (node_gpu(1), "--slots 2 --slot-memory 16GiB", Some(["16Gi", "8Gi", "8Gi"]), ["200", "100"]),
            (node_gpu(1), "--slots 2 --slot-compute 10", Some(["16Gi", "8Gi", "8Gi"]), ["100", "10"]),
            (unknown.clone(), "", None, ["1000", "100"]),
            (unknown, "--slot-memory 2GiB", Some(["20Gi", "2Gi", "2Gi"]), ["1000", "100"]),
        ] {
            let got = device(&gpu, &Versions::default(), &options(text)).capacity.unwrap();
            let of = |name: &str| {
                let DeviceCapacity { value, request_policy } = got.get(name)?.clone();
                let policy = request_policy.unwrap();
                Some([value.0, policy.default.unwrap().0, policy.valid_range.unwrap().max.unwrap().0])
            };
            assert_eq!(of(MEMORY), memory.map(|texts| texts.map(str::to_owned)), "{text}");
            assert_eq!(of(COMPUTE).unwrap(), [compute[0], compute[1], "100"], "{text}");
        }
    }

    #[test]
    fn versions_are_semantic_or_left_out() {
        for (text, expected) in [
            ("550.54.15", Some("550.54.15")),
            ("535.104.05", Some("535.104.5")),
            ("12.4", Some("12.4.0")),
            ("12", None),
            ("1.2.3.4", None),
            ("N/A", None),
        ] {
            assert_eq!(semantic(text).as_deref(), expected, "{text}");
        }
        let nameless = NodeGpu { model: Some("x".repeat(65)), ..node_gpu(1) };
        let got = device(&nameless, &Versions::default(), &options("")).attributes.unwrap();
        assert_eq!(got.into_keys().collect::<Vec<_>>(), ["index", "uuid"]);
    }

    fn slice(name: &str, driver: &str, node: &str, generation: i64, devices: &[Device]) -> ResourceSlice {
        ResourceSlice {
            metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
            spec: ResourceSliceSpec {
                driver: driver.to_owned(),
                node_name: Some(node.to_owned()),
                pool: ResourcePool { name: node.to_owned(), generation, resource_slice_count: 1 },
                devices: Some(devices.to_vec()),
                ..ResourceSliceSpec::default()
            },
        }
    }

    /// Steps in short: what is done to which slice, and its generation.
    fn short(steps: &[Step]) -> Vec<String> {
        let name = |metadata: &ObjectMeta| metadata.name.clone().unwrap_or_default();
        let one = |step: &Step| match step {
            Step::Create(slice) => format!("create {}", slice.spec.pool.generation),
            Step::Replace(slice) => {
                format!("replace {} {}", name(&slice.metadata), slice.spec.pool.generation)
            }
            Step::Delete(metadata) => format!("delete {}", name(metadata)),
        };
        steps.iter().map(one).collect()
    }

    #[test]
    fn one_slice_of_a_node_is_kept_and_those_of_others_are_left_alone() {
        let one = |number| device(&node_gpu(number), &versions(), &options(""));
        let (a, both) = (vec![one(1)], vec![one(1), one(2)]);
        let plain = vec![Device { allow_multiple_allocations: None, ..one(1) }];
        let ours = |name, generation, devices| slice(name, DRIVER, "n", generation, devices);
        let foreign = [
            slice("f", "gpu.example.com", "n", 9, &both),
            slice("g", DRIVER, "other", 9, &both),
            ResourceSlice {
                spec: ResourceSliceSpec {
                    node_name: None,
                    all_nodes: Some(true),
                    ..ours("h", 9, &both).spec
                },
                ..ours("h", 9, &both)
            },
        ];
        // The API server writes quantities in its own way: 1000 in all of the compute is 1k.
        let text = serde_json::to_string(&a).unwrap();
        let rewritten = text.replace("\"1000\"", "\"1k\"").replace("\"8Gi\"", "\"8589934592\"");
        assert!(rewritten.contains("1k") && rewritten.contains("8589934592"));
        let rewritten: Vec<Device> = serde_json::from_str(&rewritten).unwrap();
        let other: Vec<Device> = serde_json::from_str(&text.replace("\"1000\"", "\"1001\"")).unwrap();
        let mut elsewhere = ours("p", 4, &a);
        elsewhere.spec.pool.name = "older".to_owned();
        let mut two = ours("x", 2, &a);
        two.spec.pool.resource_slice_count = 2;
        for (wanted, found, stored, expected) in [
            (&a, vec![], None, &["create 1"][..]),
            (&a, vec![ours("x", 3, &a)], None, &[]),
            (&a, vec![ours("x", 3, &rewritten)], None, &[]),
            (&a, vec![ours("x", 3, &other)], None, &["replace x 4"]),
            (&both, vec![ours("x", 3, &a)], None, &["replace x 4"]),
            // Fields are dropped: once more after a start, and then it is known.
            (&a, vec![ours("x", 3, &plain)], None, &["replace x 4"]),
            (&a, vec![ours("x", 4, &plain)], Some(&plain), &[]),
            (&a, vec![ours("y", 5, &a), ours("x", 3, &a)], None, &["delete y", "replace x 6"]),
            (&a, vec![two], None, &["replace x 3"]),
            (&a, vec![elsewhere], None, &["delete p", "create 5"]),
            (&vec![], vec![ours("x", 3, &a)], None, &["delete x"]),
            (&vec![], vec![], None, &[]),
        ] {
            let found = [&foreign[..], &found].concat();
            let steps = plan("n", wanted, &found, stored.map(Vec::as_slice));
            assert_eq!(short(&steps), expected);
        }
    }

    #[test]
    fn a_replaced_slice_keeps_its_version_so_that_no_other_word_is_lost() {
        let mut old = slice("x", DRIVER, "n", 1, &[]);
        old.metadata.resource_version = Some("7".to_owned());
        let wanted = [device(&node_gpu(1), &versions(), &options(""))];
        let [Step::Replace(new)] = &plan("n", &wanted, &[old], None)[..] else { panic!("it is replaced") };
        assert_eq!(new.metadata.resource_version.as_deref(), Some("7"));
        assert_eq!(new.spec.devices.as_deref(), Some(&wanted[..]));
    }

    #[test]
    fn fields_that_were_dropped_are_seen() {
        let whole = device(&node_gpu(1), &versions(), &options(""));
        let mut bare = whole.clone();
        bare.capacity.as_mut().unwrap().values_mut().for_each(|capacity| capacity.request_policy = None);
        let single = Device { allow_multiple_allocations: None, ..whole.clone() };
        for (devices, expected) in [
            (vec![], true),
            (vec![whole.clone()], true),
            (vec![whole.clone(), bare], false),
            (vec![whole, single], false),
        ] {
            assert_eq!(is_shared(&devices), expected);
        }
    }
}
