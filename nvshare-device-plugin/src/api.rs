//! The messages of the kubelet, as far as they are used: its device plugin API `v1beta1`, and its pod resources API `v1`.
//!
//! The numbers are those of Kubernetes' `api.proto` files. A field that is not here is skipped when it is read.

use std::collections::BTreeMap;

use prost::Message;

/// The version of the device plugin API.
pub const VERSION: &str = "v1beta1";
/// The health of a device that may be given out.
pub const HEALTHY: &str = "Healthy";
/// The health of a device that may not.
pub const UNHEALTHY: &str = "Unhealthy";

/// The kubelet's call by which a plugin makes itself known: [`RegisterRequest`] to [`Empty`].
pub const REGISTER: &str = "/v1beta1.Registration/Register";
/// [`Empty`] to [`DevicePluginOptions`].
pub const OPTIONS: &str = "/v1beta1.DevicePlugin/GetDevicePluginOptions";
/// [`Empty`] to a stream of [`ListAndWatchResponse`].
pub const LIST_AND_WATCH: &str = "/v1beta1.DevicePlugin/ListAndWatch";
/// [`PreferredAllocationRequest`] to [`PreferredAllocationResponse`].
pub const PREFERRED: &str = "/v1beta1.DevicePlugin/GetPreferredAllocation";
/// [`AllocateRequest`] to [`AllocateResponse`].
pub const ALLOCATE: &str = "/v1beta1.DevicePlugin/Allocate";
/// The kubelet's call that lists pods: [`Empty`] to [`ListPodResourcesResponse`].
pub const LIST_PODS: &str = "/v1.PodResourcesLister/List";

/// Nothing.
#[derive(Clone, PartialEq, Message)]
pub struct Empty {}

/// Which calls a plugin wants.
#[derive(Clone, PartialEq, Message)]
pub struct DevicePluginOptions {
    /// Whether it is called before a container starts.
    #[prost(bool, tag = "1")]
    pub pre_start_required: bool,
    /// Whether it is asked which devices it prefers.
    #[prost(bool, tag = "2")]
    pub get_preferred_allocation_available: bool,
}

/// A plugin makes itself known.
#[derive(Clone, PartialEq, Message)]
pub struct RegisterRequest {
    /// [`VERSION`].
    #[prost(string, tag = "1")]
    pub version: String,
    /// The name of the plugin's socket, beside the kubelet's.
    #[prost(string, tag = "2")]
    pub endpoint: String,
    /// The resource.
    #[prost(string, tag = "3")]
    pub resource_name: String,
    /// Which calls the plugin wants.
    #[prost(message, optional, tag = "4")]
    pub options: Option<DevicePluginOptions>,
}

/// All devices.
#[derive(Clone, PartialEq, Message)]
pub struct ListAndWatchResponse {
    /// The devices.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
}

/// A device: one slot of a GPU.
#[derive(Clone, PartialEq, Message)]
pub struct Device {
    /// Its name, of 63 characters at most.
    #[prost(string, tag = "1")]
    pub id: String,
    /// [`HEALTHY`] or [`UNHEALTHY`].
    #[prost(string, tag = "2")]
    pub health: String,
    /// Where it is.
    #[prost(message, optional, tag = "3")]
    pub topology: Option<TopologyInfo>,
}

/// Where a device is.
#[derive(Clone, PartialEq, Message)]
pub struct TopologyInfo {
    /// The NUMA nodes near it.
    #[prost(message, repeated, tag = "1")]
    pub nodes: Vec<NumaNode>,
}

/// A NUMA node.
#[derive(Clone, PartialEq, Message)]
pub struct NumaNode {
    /// Its number.
    #[prost(int64, tag = "1")]
    pub id: i64,
}

/// Asks for the devices of some containers.
#[derive(Clone, PartialEq, Message)]
pub struct AllocateRequest {
    /// One for each container.
    #[prost(message, repeated, tag = "1")]
    pub container_requests: Vec<ContainerAllocateRequest>,
}

/// The devices that a container is to get.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerAllocateRequest {
    /// Their names.
    #[prost(string, repeated, tag = "1")]
    pub devices_ids: Vec<String>,
}

/// The answers for the containers.
#[derive(Clone, PartialEq, Message)]
pub struct AllocateResponse {
    /// One for each container.
    #[prost(message, repeated, tag = "1")]
    pub container_responses: Vec<ContainerAllocateResponse>,
}

/// The answer for one container. Devices and annotations (3 and 4) are not used.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerAllocateResponse {
    /// Variables.
    #[prost(btree_map = "string, string", tag = "1")]
    pub envs: BTreeMap<String, String>,
    /// Files and folders of the host.
    #[prost(message, repeated, tag = "2")]
    pub mounts: Vec<Mount>,
    /// Devices of the Container Device Interface.
    #[prost(message, repeated, tag = "5")]
    pub cdi_devices: Vec<CdiDevice>,
}

/// A file or folder of the host in a container.
#[derive(Clone, PartialEq, Message)]
pub struct Mount {
    /// Its path in the container.
    #[prost(string, tag = "1")]
    pub container_path: String,
    /// Its path on the host.
    #[prost(string, tag = "2")]
    pub host_path: String,
    /// Whether the container may only read it.
    #[prost(bool, tag = "3")]
    pub read_only: bool,
}

/// A device of the Container Device Interface.
#[derive(Clone, PartialEq, Message)]
pub struct CdiDevice {
    /// Its kind, `=`, and its name.
    #[prost(string, tag = "1")]
    pub name: String,
}

/// Asks which devices some containers had best get.
#[derive(Clone, PartialEq, Message)]
pub struct PreferredAllocationRequest {
    /// One for each container.
    #[prost(message, repeated, tag = "1")]
    pub container_requests: Vec<ContainerPreferredAllocationRequest>,
}

/// Asks which devices a container had best get.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerPreferredAllocationRequest {
    /// The devices that nobody has.
    #[prost(string, repeated, tag = "1")]
    pub available_device_ids: Vec<String>,
    /// Those of them that it gets in any case.
    #[prost(string, repeated, tag = "2")]
    pub must_include_device_ids: Vec<String>,
    /// How many it gets.
    #[prost(int32, tag = "3")]
    pub allocation_size: i32,
}

/// Which devices containers had best get.
#[derive(Clone, PartialEq, Message)]
pub struct PreferredAllocationResponse {
    /// One for each container.
    #[prost(message, repeated, tag = "1")]
    pub container_responses: Vec<ContainerPreferredAllocationResponse>,
}

/// Which devices a container had best get.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerPreferredAllocationResponse {
    /// Their names.
    #[prost(string, repeated, tag = "1")]
    pub device_ids: Vec<String>,
}

/// The pods of the node.
#[derive(Clone, PartialEq, Message)]
pub struct ListPodResourcesResponse {
    /// The pods.
    #[prost(message, repeated, tag = "1")]
    pub pod_resources: Vec<PodResources>,
}

/// A pod.
#[derive(Clone, PartialEq, Message)]
pub struct PodResources {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its namespace.
    #[prost(string, tag = "2")]
    pub namespace: String,
    /// Its containers; plain init containers are not among them.
    #[prost(message, repeated, tag = "3")]
    pub containers: Vec<ContainerResources>,
}

/// A container.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerResources {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its devices; those of one resource may be in several of these.
    #[prost(message, repeated, tag = "2")]
    pub devices: Vec<ContainerDevices>,
    /// Its devices by claims.
    #[prost(message, repeated, tag = "5")]
    pub dynamic_resources: Vec<DynamicResource>,
}

/// The devices that a container has by one claim.
#[derive(Clone, PartialEq, Message)]
pub struct DynamicResource {
    /// The devices that the drivers gave.
    #[prost(message, repeated, tag = "4")]
    pub claim_resources: Vec<ClaimResource>,
}

/// The devices that one driver gave for a claim.
#[derive(Clone, PartialEq, Message)]
pub struct ClaimResource {
    /// Devices of the Container Device Interface.
    #[prost(message, repeated, tag = "1")]
    pub cdi_devices: Vec<CdiDevice>,
}

/// Devices of a container.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerDevices {
    /// The resource.
    #[prost(string, tag = "1")]
    pub resource_name: String,
    /// The devices' names.
    #[prost(string, repeated, tag = "2")]
    pub device_ids: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes that Kubernetes' own definitions give: tag and type of each field, its length, its contents.
    #[test]
    fn the_bytes_are_those_of_kubernetes() {
        let register = RegisterRequest {
            version: "v".to_owned(),
            endpoint: "e".to_owned(),
            resource_name: "r".to_owned(),
            options: Some(DevicePluginOptions {
                pre_start_required: false,
                get_preferred_allocation_available: true,
            }),
        };
        assert_eq!(register.encode_to_vec(), b"\x0a\x01v\x12\x01e\x1a\x01r\x22\x02\x10\x01");
        let topology = Some(TopologyInfo { nodes: vec![NumaNode { id: 1 }] });
        let device = Device { id: "i".to_owned(), health: "h".to_owned(), topology };
        let list = ListAndWatchResponse { devices: vec![device] };
        assert_eq!(list.encode_to_vec(), b"\x0a\x0c\x0a\x01i\x12\x01h\x1a\x04\x0a\x02\x08\x01");
        let allocated = ContainerAllocateResponse {
            envs: BTreeMap::from([("k".to_owned(), "v".to_owned())]),
            mounts: vec![Mount {
                container_path: "c".to_owned(),
                host_path: "h".to_owned(),
                read_only: true,
            }],
            cdi_devices: vec![CdiDevice { name: "d".to_owned() }],
        };
        let bytes = b"\x0a\x06\x0a\x01k\x12\x01v\x12\x08\x0a\x01c\x12\x01h\x18\x01\x2a\x03\x0a\x01d";
        assert_eq!(allocated.encode_to_vec(), bytes);
        // Fields that newer kubelets add are skipped.
        let newer = [bytes.as_slice(), b"\x3a\x01x"].concat();
        assert_eq!(ContainerAllocateResponse::decode(newer.as_slice()).unwrap(), allocated);
        let preferred = ContainerPreferredAllocationRequest {
            available_device_ids: vec!["a".to_owned()],
            must_include_device_ids: vec!["m".to_owned()],
            allocation_size: 2,
        };
        assert_eq!(preferred.encode_to_vec(), b"\x0a\x01a\x12\x01m\x18\x02");
        let devices =
            vec![ContainerDevices { resource_name: "r".to_owned(), device_ids: vec!["d".to_owned()] }];
        let containers = vec![ContainerResources {
            name: "c".to_owned(),
            devices,
            dynamic_resources: vec![DynamicResource {
                claim_resources: vec![ClaimResource {
                    cdi_devices: vec![CdiDevice { name: "x".to_owned() }],
                }],
            }],
        }];
        let pod = PodResources { name: "p".to_owned(), namespace: "n".to_owned(), containers };
        let pods = ListPodResourcesResponse { pod_resources: vec![pod] };
        let bytes = b"\x0a\x1c\x0a\x01p\x12\x01n\x1a\x14\x0a\x01c\x12\x06\x0a\x01r\x12\x01d\
            \x2a\x07\x22\x05\x0a\x03\x0a\x01x";
        assert_eq!(pods.encode_to_vec(), bytes);
    }
}
