//! A kubelet: it removes what is there, dials back while it is asked to register, and follows the list.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use nvshare_device_plugin::api::{
    ALLOCATE, AllocateRequest, AllocateResponse, CdiDevice, ClaimResource, ContainerAllocateRequest,
    ContainerDevices, ContainerPreferredAllocationRequest, ContainerResources, Device, DevicePluginOptions,
    DynamicResource, Empty, LIST_AND_WATCH, LIST_PODS, ListAndWatchResponse, ListPodResourcesResponse,
    OPTIONS, PREFERRED, PodResources, PreferredAllocationRequest, PreferredAllocationResponse, REGISTER,
    RegisterRequest,
};
use nvshare_device_plugin::checkpoint;
use nvshare_device_plugin::grpc::{self, Answer, Call, Client};
use nvshare_proto::Slot;
use serde_json::json;
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tonic::{Code, Status};

use super::until;

#[derive(Default)]
struct Seen {
    registered: Vec<(RegisterRequest, DevicePluginOptions)>,
    /// The last list, and how many lists came since the last registration.
    devices: Vec<Device>,
    lists: usize,
    followed: Vec<JoinHandle<()>>,
    pods: ListPodResourcesResponse,
}

/// The kubelet.
pub(crate) struct Kubelet {
    folder: PathBuf,
    seen: Arc<Mutex<Seen>>,
    served: [JoinHandle<()>; 2],
}

impl Kubelet {
    /// Starts as a kubelet does: whatever sockets there are go.
    pub(crate) fn start(root: &Path) -> Self {
        let folder = root.join("kubelet/device-plugins");
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            // Its own record stays.
            if path.file_name() != Some(checkpoint::FILE.as_ref()) {
                fs::remove_file(path).unwrap();
            }
        }
        let pods = root.join("kubelet/pod-resources/kubelet.sock");
        let _ = fs::remove_file(&pods);
        let seen = Arc::new(Mutex::new(Seen::default()));
        let serve = |socket: &Path| {
            let (seen, folder) = (Arc::clone(&seen), folder.clone());
            let answers = move |call| answer(Arc::clone(&seen), folder.clone(), call);
            tokio::spawn(grpc::serve(UnixListener::bind(socket).unwrap(), answers))
        };
        let served = [serve(&folder.join("kubelet.sock")), serve(&pods)];
        Self { folder, seen, served }
    }

    /// Waits until a plugin has registered so many times; the last time.
    pub(crate) async fn registered(&self, times: usize) -> (RegisterRequest, DevicePluginOptions) {
        let last = || self.seen.lock().unwrap().registered.get(times - 1).cloned();
        until("a plugin registers", last).await
    }

    /// Waits for a list that is so.
    pub(crate) async fn list(&self, what: &str, is_so: impl Fn(&[Device]) -> bool) -> Vec<Device> {
        let list = || {
            let seen = self.seen.lock().unwrap();
            (seen.lists > 0 && is_so(&seen.devices)).then(|| seen.devices.clone())
        };
        until(what, list).await
    }

    /// How many lists came since the last registration.
    pub(crate) fn lists(&self) -> usize {
        self.seen.lock().unwrap().lists
    }

    async fn plugin(&self) -> Client {
        Client::connect(&self.folder.join("nvshare.sock")).await.unwrap()
    }

    /// Asks for the devices of containers.
    pub(crate) async fn allocate(&self, containers: &[&[Slot]]) -> Result<AllocateResponse, (Code, String)> {
        let container = |slots: &&[Slot]| ContainerAllocateRequest {
            devices_ids: slots.iter().map(Slot::to_string).collect(),
        };
        let request = AllocateRequest { container_requests: containers.iter().map(container).collect() };
        let answer: Result<AllocateResponse, Status> = self.plugin().await.ask(ALLOCATE, request).await;
        answer.map_err(|status| (status.code(), status.message().to_owned()))
    }

    /// Asks which of these devices are preferred.
    pub(crate) async fn prefer(&self, available: &[Slot], must: &[Slot], size: i32) -> Vec<String> {
        let names = |slots: &[Slot]| slots.iter().map(Slot::to_string).collect();
        let container = ContainerPreferredAllocationRequest {
            available_device_ids: names(available),
            must_include_device_ids: names(must),
            allocation_size: size,
        };
        let request = PreferredAllocationRequest { container_requests: vec![container] };
        let answer: PreferredAllocationResponse = self.plugin().await.ask(PREFERRED, request).await.unwrap();
        answer.container_responses.into_iter().next().unwrap().device_ids
    }

    /// Says from now on that pods have these slots of the resource, one container each, and keeps their answers.
    pub(crate) fn run_pods(&self, pods: &[(&str, &[Slot])]) {
        self.keep_answers(&pods.iter().map(|&(_, slots)| slots).collect::<Vec<_>>());
        self.list_pods(pods);
    }

    /// Notes from now on that it keeps the answers for these containers.
    pub(crate) fn keep_answers(&self, containers: &[&[Slot]]) {
        let entry = |slots: &&[Slot]| {
            let ids: Vec<String> = slots.iter().map(Slot::to_string).collect();
            let node = json!({ "-1": ids });
            json!({"PodUID": "u", "ContainerName": "c", "ResourceName": "nvshare.com/gpu", "DeviceIDs": node, "AllocResp": ""})
        };
        let entries: Vec<_> = containers.iter().map(entry).collect();
        let whole = json!({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 1});
        let path = self.folder.join(checkpoint::FILE);
        let new = path.with_extension("new");
        fs::write(&new, whole.to_string()).unwrap();
        fs::rename(new, path).unwrap();
    }

    /// Says from now on that a container of this pod has these CDI devices by a claim.
    pub(crate) fn list_claim(&self, pod: &str, devices: &[String]) {
        let cdi_devices = devices.iter().map(|name| CdiDevice { name: name.clone() }).collect();
        let claim = DynamicResource { claim_resources: vec![ClaimResource { cdi_devices }] };
        let container = ContainerResources {
            name: "main".to_owned(),
            dynamic_resources: vec![claim],
            ..ContainerResources::default()
        };
        self.seen.lock().unwrap().pods.pod_resources = vec![PodResources {
            name: pod.to_owned(),
            namespace: "default".to_owned(),
            containers: vec![container],
        }];
    }

    /// Says from now on that pods have these slots of the resource, one container each.
    pub(crate) fn list_pods(&self, pods: &[(&str, &[Slot])]) {
        let pod = |&(name, slots): &(&str, &[Slot])| {
            let devices = slots.iter().map(|slot| ContainerDevices {
                resource_name: "nvshare.com/gpu".to_owned(),
                device_ids: vec![slot.to_string()],
            });
            let container = ContainerResources {
                name: "main".to_owned(),
                devices: devices.collect(),
                ..ContainerResources::default()
            };
            PodResources {
                name: name.to_owned(),
                namespace: "default".to_owned(),
                containers: vec![container],
            }
        };
        self.seen.lock().unwrap().pods.pod_resources = pods.iter().map(pod).collect();
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.served.iter().for_each(JoinHandle::abort);
        self.seen.lock().unwrap().followed.iter().for_each(JoinHandle::abort);
    }
}

async fn answer(seen: Arc<Mutex<Seen>>, folder: PathBuf, call: Call) -> Answer {
    match call.uri().path() {
        REGISTER => {
            let act = move |request| register(Arc::clone(&seen), folder.clone(), request);
            grpc::unary(call, act).await
        }
        LIST_PODS => {
            let act = move |_: Empty| {
                let pods = seen.lock().unwrap().pods.clone();
                async move { Ok::<ListPodResourcesResponse, _>(pods) }
            };
            grpc::unary(call, act).await
        }
        _ => grpc::unknown(&call),
    }
}

/// The plugin has to answer before this call ends.
async fn register(
    seen: Arc<Mutex<Seen>>,
    folder: PathBuf,
    request: RegisterRequest,
) -> Result<Empty, Status> {
    let no = |error: &dyn std::fmt::Display| Status::failed_precondition(error.to_string());
    let plugin = Client::connect(&folder.join(&request.endpoint)).await.map_err(|error| no(&error))?;
    let options: DevicePluginOptions = plugin.ask(OPTIONS, Empty {}).await?;
    let mut lists = plugin.follow::<Empty, ListAndWatchResponse>(LIST_AND_WATCH, Empty {}).await?;
    let first = lists.message().await?.ok_or_else(|| no(&"no list"))?;
    let mut now = seen.lock().unwrap();
    (now.devices, now.lists) = (first.devices, 1);
    now.registered.push((request, options));
    let follows = Arc::clone(&seen);
    now.followed.push(tokio::spawn(async move {
        // The connection lives as long as its client.
        let _plugin = plugin;
        while let Ok(Some(list)) = lists.message().await {
            let mut seen = follows.lock().unwrap();
            seen.devices = list.devices;
            seen.lists += 1;
        }
    }));
    Ok(Empty {})
}
