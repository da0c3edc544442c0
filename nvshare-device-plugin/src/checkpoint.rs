//! The kubelet's own record of what it gave to which container.
//!
//! The kubelet keeps the answer to each Allocate there and uses it again whenever it starts that container, an init container too, which its list
//! of pods does not name. It forgets a pod's answers when the pod is not active any more (`UpdateAllocatedDevices` in
//! `pkg/kubelet/cm/devicemanager/manager.go`), and writes the file with the next change. So what the file names may be used again, and what it does
//! not name will not be. The form is that of `checkpoint.go` beside it; before 1.20, devices stood there without their NUMA nodes.

use std::collections::BTreeMap;

use nvshare_proto::{SeatName, Slot};
use serde::Deserialize;

use crate::resources::Numbers;

/// The file's name, in the folder of the sockets of plugins.
pub const FILE: &str = "kubelet_internal_checkpoint";

/// Seats, and the slots of each.
pub type Seats = BTreeMap<SeatName, Vec<Slot>>;

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Whole {
    data: Data,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    /// Null: there are none. The field has to be there: without it, this is another form.
    #[serde(deserialize_with = "Option::deserialize")]
    pod_device_entries: Option<Vec<Entry>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    resource_name: String,
    #[serde(rename = "DeviceIDs")]
    ids: Ids,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    OfNodes(BTreeMap<String, Vec<String>>),
    Plain(Vec<String>),
}

/// The seats whose answers the kubelet keeps: those of the main resource, which is called `main`, and of further ones.
///
/// # Errors
/// The text has another form: nothing follows from it.
pub fn seats(text: &str, main: &str) -> Result<Seats, String> {
    let whole: Whole = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let mut seats = Seats::new();
    let entries = whole.data.pod_device_entries.unwrap_or_default();
    for entry in entries {
        let Some(numbers) = Numbers::of_resource(&entry.resource_name, main) else { continue };
        let ids: Vec<String> = match entry.ids {
            Ids::OfNodes(nodes) => nodes.into_values().flatten().collect(),
            Ids::Plain(ids) => ids,
        };
        let slots = ids.iter().map(|id| numbers.slot(id));
        let mut slots = slots.collect::<Result<Vec<_>, _>>()?;
        slots.sort_unstable();
        if !slots.is_empty() {
            seats.insert(SeatName::of(&slots), slots);
        }
    }
    Ok(seats)
}

#[cfg(test)]
mod tests {
    use nvshare_proto::GpuUuid;

    use super::*;

    #[test]
    fn the_kubelets_record_names_the_seats_of_all_containers() {
        let slot = |gpu, number| Slot { gpu: GpuUuid([gpu; 16]), number };
        let [a, b] = [slot(1, 0), slot(2, 3)];
        let entry = |container: &str, resource: &str, ids: &str| {
            format!(
                r#"{{"PodUID":"u","ContainerName":"{container}","ResourceName":"{resource}","DeviceIDs":{ids},"AllocResp":"Cg=="}}"#
            )
        };
        let whole = |entries: &[String]| {
            format!(
                r#"{{"Data":{{"PodDeviceEntries":[{}],"RegisteredDevices":{{"nvshare.com/gpu":["{a}"]}}}},"Checksum":1,"BootID":"x"}}"#,
                entries.join(",")
            )
        };
        let ours = "nvshare.com/gpu";
        let text = whole(&[
            entry("init", ours, &format!(r#"{{"1":["{b}"],"-1":["{a}"]}}"#)),
            entry("app", ours, &format!(r#"{{"-1":["{a}"]}}"#)),
            entry("old", ours, &format!(r#"["{b}"]"#)),
            entry("other", "nvidia.com/gpu", r#"{"-1":["GPU-1"]}"#),
            entry("longer", "nvshare.com/gpus", r#"{"-1":["GPU-1"]}"#),
            entry("small", "nvshare.com/gpu.small", &format!(r#"{{"-1":["{a}"]}}"#)),
        ]);
        let small =
            vec![Numbers::of_resource("nvshare.com/gpu.small", ours).unwrap().slot(&a.to_string()).unwrap()];
        let expected = [vec![a, b], vec![a], vec![b], small].map(|slots| (SeatName::of(&slots), slots));
        assert_eq!(expected.iter().map(|(name, _)| name).collect::<std::collections::BTreeSet<_>>().len(), 4);
        assert_eq!(seats(&text, ours), Ok(expected.into()));
        let none = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}"#;
        assert_eq!(seats(none, ours), Ok(Seats::new()));
        // An entry that is not understood says nothing, and least of all that no container has a seat.
        let strange = whole(&[entry("app", ours, r#"{"-1":["GPU-1::0"]}"#)]);
        for text in
            ["", "{}", r#"{"Data":{}}"#, r#"{"Data":{"Entries":[]}}"#, &text[..text.len() / 2], &strange]
        {
            assert!(seats(text, ours).is_err(), "{text}");
        }
    }
}
