//! Which seats a claim asks for: what Kubernetes allocated to it, read as seats with limits.
//!
//! A claim is a seat: the containers that share it are one tenant. Kubernetes makes a claim of its own for a pod that asks for an extended
//! resource, with a request for each container. There each request is a seat, as a container's slots are with the device plugin.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, DeviceRequestAllocationResult, ResourceClaim,
};
use nvshare_proto::units::{Bytes, MIN_MEMORY_LIMIT};
use nvshare_proto::{GpuUuid, Priority, Seat, SeatName, Slot, TenantSettings, stable_hash};

use super::parameters::{self, Settings};
use super::slices::{COMPUTE, MEMORY, device_name, most_memory};
use super::{DRIVER, quantities};
use crate::devices::NodeGpu;
use crate::options::Options;
use crate::records::{Claim, Record, Seats};

/// The annotation that Kubernetes writes on a claim which it made for an extended resource.
const EXTENDED: &str = "resource.kubernetes.io/extended-resource-claim";

/// Why a claim does not get what was allocated to it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Nothing is allocated.
    #[error("nothing is allocated to it")]
    Unallocated,
    /// A device of another pool.
    #[error(
        "device {device} of pool {pool} is allocated to it, and this node's pool is {node}; was the node renamed?"
    )]
    Pool {
        /// The device.
        device: String,
        /// Its pool.
        pool: String,
        /// This node.
        node: String,
    },
    /// A device that is not there.
    #[error("device {device} is allocated to it, which this node does not give out")]
    Device {
        /// The device.
        device: String,
    },
    /// Several shares of one GPU.
    #[error(
        "several shares of {gpu} are allocated to it, and a seat has one of a GPU; \
         the constraint distinctAttribute: {DRIVER}/uuid keeps them apart"
    )]
    SameGpu {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// Access for administrators.
    #[error("request {request} is for administrators' access, which nvshare does not have")]
    Admin {
        /// The request.
        request: String,
    },
    /// A limit that cannot be followed.
    #[error("{capacity}: {value} of {device} is allocated to it; {accepted}")]
    Capacity {
        /// The capacity.
        capacity: &'static str,
        /// The amount that is allocated.
        value: String,
        /// The device.
        device: String,
        /// The amounts that can be followed.
        accepted: String,
    },
    /// Parameters that are not known, or may not be had.
    #[error("{0}")]
    Parameters(String),
    /// One seat with several limits.
    #[error(
        "its requests {one} and {other} have different limits or parameters, and it is one seat; make a claim of each"
    )]
    Differs {
        /// A request.
        one: String,
        /// Another one.
        other: String,
    },
}

/// The node that a claim is read for.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// Its name, and its pool's.
    pub node: &'a str,
    /// The GPUs that are given out.
    pub gpus: &'a [NodeGpu],
    /// The command line.
    pub options: &'a Options,
}

/// The seats that a claim asks for.
///
/// `pods`: the priorities that its pods bring, if they are asked for; see [`parameters::for_request`]. `known`: the seats that were given out.
/// One that the claim has already is found again.
///
/// # Errors
/// See [`Refusal`].
pub fn seats(
    claim: &ResourceClaim,
    pods: &[Option<Priority>],
    place: Place<'_>,
    known: &Seats,
) -> Result<Vec<Record>, Refusal> {
    let metadata = &claim.metadata;
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let devices = allocation.ok_or(Refusal::Unallocated)?.devices.clone().unwrap_or_default();
    let (results, config) = (devices.results.unwrap_or_default(), devices.config.unwrap_or_default());
    let annotations = metadata.annotations.iter().flatten();
    let is_extended = annotations.into_iter().any(|(name, value)| name == EXTENDED && value == "true");
    let mut seats: BTreeMap<&str, Vec<&DeviceRequestAllocationResult>> = BTreeMap::new();
    for result in results.iter().filter(|result| result.driver == DRIVER) {
        seats.entry(if is_extended { &result.request } else { "" }).or_default().push(result);
    }
    let of = |field: &Option<String>| field.clone().unwrap_or_default();
    let claim = |requests, gang| Claim {
        namespace: of(&metadata.namespace),
        name: of(&metadata.name),
        uid: of(&metadata.uid),
        requests,
        gang,
    };
    let uid = of(&metadata.uid);
    let is_its = |record: &&Record| record.claim.as_ref().is_some_and(|claim| claim.uid == uid);
    let has: Vec<&Record> = known.values().filter(is_its).collect();
    let seat = |(part, results): (&str, Vec<&DeviceRequestAllocationResult>)| {
        let (gpus, requests, Settings { given, gang }) = read(&results, &config, pods, place, &has)?;
        let claim = claim(requests, gang);
        let slots = slots(&gpus, part, &claim, known);
        Ok(Record { seat: Seat { slots, given }, claim: Some(claim) })
    };
    seats.into_iter().map(seat).collect()
}

/// Whether a claim has a device of this node.
#[must_use]
pub fn is_here(claim: &ResourceClaim, node: &str) -> bool {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    let mut results = devices.and_then(|devices| devices.results.as_ref()).into_iter().flatten();
    results.any(|result| result.driver == DRIVER && result.pool == node)
}

/// The GPUs of a seat, the request that each is for, and the seat's limits with its other settings. `has`: the seats that its claim has already.
fn read(
    results: &[&DeviceRequestAllocationResult],
    config: &[DeviceAllocationConfiguration],
    pods: &[Option<Priority>],
    place: Place<'_>,
    has: &[&Record],
) -> Result<(Vec<GpuUuid>, Vec<String>, Settings), Refusal> {
    let mut read: BTreeMap<GpuUuid, &str> = BTreeMap::new();
    let mut all: Option<(Settings, &str)> = None;
    for result in results {
        let (device, request) = (&result.device, result.request.as_str());
        if result.pool != place.node {
            let (pool, node) = (result.pool.clone(), place.node.to_owned());
            return Err(Refusal::Pool { device: device.clone(), pool, node });
        }
        let gpu = place.gpus.iter().find(|gpu| device_name(gpu.uuid) == *device);
        let gpu = gpu.ok_or_else(|| Refusal::Device { device: device.clone() })?;
        if result.admin_access == Some(true) {
            return Err(Refusal::Admin { request: request.to_owned() });
        }
        let given = limits(result, gpu, place.options, has)?;
        let said = parameters::for_request(config, request, pods).map_err(Refusal::Parameters)?;
        let given = TenantSettings { memory: given.memory, compute: given.compute, ..said.given };
        let settings = Settings { given, ..said };
        match all {
            Some((before, one)) if before != settings => {
                return Err(Refusal::Differs { one: one.to_owned(), other: request.to_owned() });
            }
            _ => all = Some((settings, request)),
        }
        if read.insert(gpu.uuid, request).is_some() {
            return Err(Refusal::SameGpu { gpu: gpu.uuid });
        }
    }
    let (gpus, requests) = read.into_iter().map(|(gpu, request)| (gpu, request.to_owned())).unzip();
    Ok((gpus, requests, all.map(|(settings, _)| settings).unwrap_or_default()))
}

/// The limits that follow from the capacities that a share has of a GPU. Where the API server knows no such capacities, a share has what the
/// options give to a slot.
///
/// What a seat of the claim has of the GPU already is not refused, though less is published now: its containers run, and the kubelet asks again
/// when it starts.
fn limits(
    result: &DeviceRequestAllocationResult,
    gpu: &NodeGpu,
    options: &Options,
    has: &[&Record],
) -> Result<TenantSettings, Refusal> {
    let consumed = |name: &str| {
        let consumed = result.consumed_capacity.as_ref()?;
        consumed.get(name).or_else(|| consumed.get(&format!("{DRIVER}/{name}")))
    };
    let is_on = |record: &&&Record| record.seat.slots.iter().any(|slot| slot.gpu == gpu.uuid);
    let has_already = |capacity, value| {
        capacity == MEMORY && has.iter().filter(is_on).any(|record| record.seat.given.memory == Some(value))
    };
    let limit = |capacity, least: u64, most: u64, show: fn(u64) -> String| {
        let Some(quantity) = consumed(capacity) else { return Ok(None) };
        let value = quantities::whole(quantity);
        let value = value.filter(|&value| (least..=most).contains(&value) || has_already(capacity, value));
        value.map(Some).ok_or_else(|| Refusal::Capacity {
            capacity,
            value: quantity.0.clone(),
            device: result.device.clone(),
            accepted: format!("accepted: {} to {}", show(least), show(most)),
        })
    };
    let usual = options.given();
    let most = most_memory(gpu, options).unwrap_or(u64::MAX);
    let least = MIN_MEMORY_LIMIT.min(most);
    let memory = limit(MEMORY, least, most, |bytes| Bytes(bytes).to_string())?;
    let compute = limit(COMPUTE, 1, 100, |percent| format!("{percent} %"))?;
    let compute = compute.map_or(usual.compute, |percent| percent.try_into().ok());
    // A claim that names no share has all of the time. If that were a limit of 100, programs that fit would take turns.
    let compute = compute.filter(|&percent| percent < 100);
    Ok(TenantSettings { memory: memory.or(usual.memory), compute, ..usual })
}

/// The slots of a seat: those that the claim has already, or else ones that no other seat has.
///
/// Their number follows from the claim. So a seat that is not recorded any more, and that containers still have, becomes no other claim's.
fn slots(gpus: &[GpuUuid], part: &str, claim: &Claim, known: &Seats) -> Vec<Slot> {
    let at = |number| -> Vec<Slot> { gpus.iter().map(|&gpu| Slot { gpu, number }).collect() };
    let is_same = |record: &&Record| {
        record.claim.as_ref().is_some_and(|other| other.uid == claim.uid && other.requests == claim.requests)
            && record.seat.slots.iter().map(|slot| slot.gpu).eq(gpus.iter().copied())
    };
    if let Some(record) = known.values().find(is_same) {
        return record.seat.slots.clone();
    }
    let mut number = first_number(&claim.uid, part);
    while known.get(&SeatName::of(&at(number))).is_some_and(|record| record.claim.is_some()) {
        number = number.wrapping_add(1);
    }
    at(number)
}

/// The number that slots of a part of a claim have, unless others have it.
fn first_number(uid: &str, part: &str) -> u32 {
    let hash = stable_hash(&format!("{uid}/{part}"));
    (hash ^ hash >> 32) as u32
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use nvshare_proto::{Enforcement, Priority};
    use serde_json::{Value, json};

    use super::*;
    use crate::devices::tests::node_gpu;

    fn options(text: &str) -> Options {
        Options::parse_from(std::iter::once("plugin").chain(text.split_whitespace()))
    }

    /// A share of a GPU for a request.
    fn share(request: &str, gpu: u8, consumed: Value) -> Value {
        let device = device_name(node_gpu(gpu).uuid);
        let mut share = json!({"request": request, "driver": DRIVER, "pool": "n", "device": device});
        if !consumed.is_null() {
            share["consumedCapacity"] = consumed;
        }
        share
    }

    fn claim(uid: &str, results: &[Value], config: &[Value]) -> ResourceClaim {
        serde_json::from_value(json!({
            "metadata": {"namespace": "s", "name": "c", "uid": uid},
            "spec": {},
            "status": {"allocation": {"devices": {"results": results, "config": config}}},
        }))
        .unwrap()
    }

    fn read(claim: &ResourceClaim, text: &str, known: &Seats) -> Result<Vec<Record>, Refusal> {
        let (gpus, options) = ([node_gpu(1), node_gpu(2)], options(text));
        seats(claim, &[], Place { node: "n", gpus: &gpus, options: &options }, known)
    }

    fn parameters(fields: &Value) -> Value {
        let mut parameters = json!({"apiVersion": "nvshare.com/v1alpha1", "kind": "SeatParameters"});
        parameters.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        json!({"source": "FromClaim", "opaque": {"driver": DRIVER, "parameters": parameters}})
    }

    #[test]
    fn a_claims_capacities_are_its_seats_limits() {
        let memory = |bytes: u64, compute| TenantSettings {
            memory: Some(bytes),
            compute: Some(compute),
            ..TenantSettings::default()
        };
        let gib = 1 << 30;
        let all_of_the_time = TenantSettings { memory: Some(8 * gib), ..TenantSettings::default() };
        for (consumed, text, expected) in [
            (json!({"memory": "3Gi", "compute": "25", "slots": "1"}), "", memory(3 * gib, 25)),
            (
                json!({"gpu.nvshare.com/memory": "3Gi", "gpu.nvshare.com/compute": "25"}),
                "",
                memory(3 * gib, 25),
            ),
            (json!({"memory": "8Gi", "compute": "99"}), "", memory(8 * gib, 99)),
            (json!({"memory": "8Gi", "compute": "100"}), "", all_of_the_time),
            (json!({"memory": "8Gi", "compute": "100"}), "--slot-compute 10", all_of_the_time),
            (
                json!({"memory": "5Gi", "compute": "60"}),
                "--slot-memory 1GiB --slot-compute 10",
                memory(5 * gib, 60),
            ),
            // The API server knows no capacities that are consumed.
            (Value::Null, "--slot-memory 1GiB --slot-compute 10", memory(gib, 10)),
            (Value::Null, "--slot-memory 8GiB --slot-compute 100", all_of_the_time),
            (Value::Null, "", TenantSettings::default()),
        ] {
            let got =
                read(&claim("u", &[share("r", 1, consumed.clone())], &[]), text, &Seats::new()).unwrap();
            assert_eq!(
                got.iter().map(|record| record.seat.given).collect::<Vec<_>>(),
                [expected],
                "{consumed}"
            );
        }
        let said = parameters(&json!({"weight": 50, "policy": "force", "priority": "low"}));
        let got = read(&claim("u", &[share("r", 1, json!({"memory": "1Gi"}))], &[said]), "", &Seats::new());
        let expected = TenantSettings {
            memory: Some(gib),
            weight: Some(50),
            enforcement: Some(Enforcement::Force),
            priority: Some(Priority::Low),
            ..TenantSettings::default()
        };
        assert_eq!(got.unwrap()[0].seat.given, expected);
    }

    #[test]
    fn a_claim_is_a_seat_and_so_is_a_request_for_an_extended_resource() {
        let results = [share("b", 2, Value::Null), share("a", 1, Value::Null)];
        let whole = claim("u", &results, &[]);
        let got = read(&whole, "", &Seats::new()).unwrap();
        let [Record { seat, claim: Some(of) }] = &got[..] else { panic!("{got:?}") };
        let number = first_number("u", "");
        let slots = [1, 2].map(|gpu| Slot { gpu: node_gpu(gpu).uuid, number });
        assert_eq!((&seat.slots[..], &of.requests[..]), (&slots[..], &["a", "b"].map(str::to_owned)[..]));
        assert_eq!((of.namespace.as_str(), of.name.as_str(), of.uid.as_str()), ("s", "c", "u"));

        // Two containers of a pod may share a GPU: each has a seat of its own.
        let results =
            [share("container-0-request-0", 1, Value::Null), share("container-1-request-0", 1, Value::Null)];
        let mut extended = claim("u", &results, &[]);
        extended.metadata.annotations = Some([(EXTENDED.to_owned(), "true".to_owned())].into());
        let got = read(&extended, "", &Seats::new()).unwrap();
        let names: Vec<SeatName> = got.iter().map(|record| record.seat.name()).collect();
        assert!(names.len() == 2 && names[0] != names[1], "{got:?}");
        // Of another driver.
        let mut other = share("r", 1, Value::Null);
        other["driver"] = json!("gpu.example.com");
        assert_eq!(read(&claim("u", &[other], &[]), "", &Seats::new()), Ok(vec![]));
    }

    #[test]
    fn a_seat_is_the_claims_own_and_is_found_again() {
        let one = claim("u", &[share("r", 1, Value::Null)], &[]);
        let first = read(&one, "", &Seats::new()).unwrap().remove(0);
        // Another claim's seat is in its place.
        let other = Claim { uid: "v".to_owned(), ..first.claim.clone().unwrap() };
        let taken = Record { claim: Some(other), ..first.clone() };
        let mut known = Seats::from([(first.seat.name(), taken)]);
        let second = read(&one, "", &known).unwrap().remove(0);
        assert_eq!(second.seat.slots[0].number, first.seat.slots[0].number + 1);
        // It stays there when that place is free.
        known.insert(second.seat.name(), second.clone());
        known.remove(&first.seat.name());
        assert_eq!(read(&one, "", &known).unwrap(), std::slice::from_ref(&second));
        // A seat that is to go is in nobody's way.
        let gone = Record { claim: None, ..first.clone() };
        let known = Seats::from([(first.seat.name(), gone)]);
        assert_eq!(read(&one, "", &known).unwrap(), [first]);
    }

    #[test]
    fn a_claim_keeps_what_it_has_though_less_is_published_now() {
        let of = |uid, memory: &str| claim(uid, &[share("r", 1, json!({"memory": memory}))], &[]);
        let read = |claim: &ResourceClaim, bytes, known: &Seats| {
            let gpu = NodeGpu { memory: Some(bytes), ..node_gpu(1) };
            let options = options("");
            seats(claim, &[], Place { node: "n", gpus: &[gpu], options: &options }, known)
        };
        let before = read(&of("u", "6Gi"), 8 << 30, &Seats::new()).unwrap();
        let known: Seats = before.iter().map(|record| (record.seat.name(), record.clone())).collect();
        assert_eq!(read(&of("u", "6Gi"), 4 << 30, &known), Ok(before));
        // Another claim has none of it, nor has this one more.
        for other in [of("v", "6Gi"), of("u", "5Gi"), of("u", "7Gi")] {
            let refused = read(&other, 4 << 30, &known).unwrap_err().to_string();
            assert!(refused.contains("accepted: 64.0 MiB to 4.00 GiB"), "{refused}");
        }
    }

    #[test]
    fn what_cannot_be_had_is_refused() {
        let bare = |request, gpu| share(request, gpu, Value::Null);
        let with = |field: &str, value: Value| {
            let mut share = bare("r", 1);
            share[field] = value;
            vec![share]
        };
        let capacity = |consumed| vec![share("r", 1, consumed)];
        let memory = |bytes: &str| capacity(json!({"memory": bytes}));
        for (results, config, told) in [
            (
                vec![bare("a", 1), bare("b", 1)],
                vec![],
                "several shares of GPU-01010101-0101-0101-0101-010101010101",
            ),
            (vec![bare("a", 1), bare("a", 1)], vec![], "distinctAttribute: gpu.nvshare.com/uuid"),
            (
                with("pool", json!("older")),
                vec![],
                "of pool older is allocated to it, and this node's pool is n",
            ),
            (
                vec![bare("a", 3)],
                vec![],
                "device gpu-03030303-0303-0303-0303-030303030303 is allocated to it, which",
            ),
            (with("adminAccess", json!(true)), vec![], "request r is for administrators' access"),
            (memory("0"), vec![], "memory: 0 of gpu-0101"),
            (memory("63Mi"), vec![], "accepted: 64.0 MiB to 8.00 GiB"),
            (memory("9Gi"), vec![], "memory: 9Gi of"),
            (memory("much"), vec![], "memory: much of"),
            (capacity(json!({"compute": "0"})), vec![], "compute: 0 of"),
            (capacity(json!({"compute": "101"})), vec![], "accepted: 1 % to 100 %"),
            (vec![bare("r", 1)], vec![parameters(&json!({"colour": 1}))], "unknown field `colour`"),
            (
                vec![share("a", 1, json!({"memory": "1Gi"})), share("b", 2, json!({"memory": "2Gi"}))],
                vec![],
                "its requests a and b have different limits",
            ),
            (
                vec![bare("a", 1), bare("b", 2)],
                vec![{
                    let mut of_one = parameters(&json!({"gang": true}));
                    of_one["requests"] = json!(["a"]);
                    of_one
                }],
                "its requests a and b have different limits or parameters",
            ),
        ] {
            let refused = read(&claim("u", &results, &config), "", &Seats::new()).unwrap_err().to_string();
            assert!(refused.contains(told), "{refused}");
        }
        let mut unallocated = claim("u", &[], &[]);
        unallocated.status = None;
        assert_eq!(read(&unallocated, "", &Seats::new()), Err(Refusal::Unallocated));
    }
}
