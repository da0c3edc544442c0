//! A kubelet: it removes what is there, dials back while it is asked to register, and follows the list.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Deref;
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
struct GpuNews {
    /// By the names of the plugin's sockets.
    plugins: BTreeMap<String, Plugin>,
    followed: Vec<JoinHandle<()>>,
    /// Of each resource: the pods that have it, and what its containers got.
    pods: BTreeMap<String, Vec<PodResources>>,
    answers: BTreeMap<String, Vec<Vec<String>>>,
    /// Why registrations are refused, and how many were.
    refuses: Option<String>,
    refused: usize,
}

#[derive(Default)]
struct Plugin {
    registered: Vec<(RegisterRequest, DevicePluginOptions)>,
    /// The last list, and how many lists came since the last registration.
    devices: Vec<Device>,
    lists: usize,
}

/// The kubelet, and what it knows of the main resource.
pub(crate) struct Kubelet {
    main: Counted,
    served: [JoinHandle<()>; 2],
}

impl Deref for Kubelet {
    type Target = Counted;

    fn deref(&self) -> &Counted {
        &self.main
    }
}

/// A resource, as the kubelet knows it.
#[derive(Clone)]
pub(crate) struct Counted {
    folder: PathBuf,
    seen: Arc<Mutex<GpuNews>>,
    resource: String,
    socket: String,
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
        let seen = Arc::new(Mutex::new(GpuNews::default()));
        let serve = |socket: &Path| {
            let (seen, folder) = (Arc::clone(&seen), folder.clone());
            let answers = move |call| answer(Arc::clone(&seen), folder.clone(), call);
            tokio::spawn(grpc::serve(UnixListener::bind(socket).unwrap(), answers))
        };
        let served = [serve(&folder.join("kubelet.sock")), serve(&pods)];
        let (resource, socket) = ("nvshare.com/gpu".to_owned(), "nvshare.sock".to_owned());
        Self { main: Counted { folder, seen, resource, socket }, served }
    }

    /// Refuses registrations from now on for this reason, or no more.
    pub(crate) fn refuse(&self, why: Option<&str>) {
        self.main.seen.lock().unwrap().refuses = why.map(str::to_owned);
    }

    /// How many registrations it has refused.
    pub(crate) fn refused(&self) -> usize {
        self.main.seen.lock().unwrap().refused
    }

    /// A further resource, as it knows it.
    pub(crate) fn of(&self, name: &str) -> Counted {
        let resource = format!("{}.{name}", self.resource);
        Counted { resource, socket: format!("nvshare-{name}.sock"), ..self.main.clone() }
    }
}

impl Counted {
    fn plugin<T>(&self, read: impl FnOnce(&Plugin) -> T) -> T {
        read(self.seen.lock().unwrap().plugins.entry(self.socket.clone()).or_default())
    }

    /// Waits until a plugin has registered `times` times. Returns the last registration.
    pub(crate) async fn registered(&self, times: usize) -> (RegisterRequest, DevicePluginOptions) {
        let last = || self.plugin(|plugin| plugin.registered.get(times - 1).cloned());
        until("a plugin registers", last).await
    }

    /// How many times a plugin has registered.
    pub(crate) fn registrations(&self) -> usize {
        self.plugin(|plugin| plugin.registered.len())
    }

    /// Waits for a list of which `is_so` is true.
    pub(crate) async fn list(&self, what: &str, is_so: impl Fn(&[Device]) -> bool) -> Vec<Device> {
        let list =
            |plugin: &Plugin| (plugin.lists > 0 && is_so(&plugin.devices)).then(|| plugin.devices.clone());
        until(what, || self.plugin(list)).await
    }

    /// How many lists came since the last registration.
    pub(crate) fn lists(&self) -> usize {
        self.plugin(|plugin| plugin.lists)
    }

    async fn connect(&self) -> Client {
        Client::connect(&self.folder.join(&self.socket)).await.unwrap()
    }

    /// Asks for the devices of containers.
    pub(crate) async fn allocate(&self, containers: &[&[Slot]]) -> Result<AllocateResponse, (Code, String)> {
        let container = |slots: &&[Slot]| ContainerAllocateRequest {
            devices_ids: slots.iter().map(Slot::to_string).collect(),
        };
        let request = AllocateRequest { container_requests: containers.iter().map(container).collect() };
        let answer: Result<AllocateResponse, Status> = self.connect().await.ask(ALLOCATE, request).await;
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
        let answer: PreferredAllocationResponse = self.connect().await.ask(PREFERRED, request).await.unwrap();
        answer.container_responses.into_iter().next().unwrap().device_ids
    }

    /// Says from now on that pods have these slots of the resource, one container each, and keeps their answers.
    pub(crate) fn run_pods(&self, pods: &[(&str, &[Slot])]) {
        self.keep_answers(&pods.iter().map(|&(_, slots)| slots).collect::<Vec<_>>());
        self.list_pods(pods);
    }

    /// Notes from now on that it keeps the answers for these containers.
    pub(crate) fn keep_answers(&self, containers: &[&[Slot]]) {
        let ids = containers.iter().map(|slots| slots.iter().map(Slot::to_string).collect()).collect();
        let mut seen = self.seen.lock().unwrap();
        seen.answers.insert(self.resource.clone(), ids);
        let entry = |(resource, ids): (&String, &Vec<String>)| {
            let node = json!({ "-1": ids });
            json!({"PodUID": "u", "ContainerName": "c", "ResourceName": resource, "DeviceIDs": node, "AllocResp": ""})
        };
        let all = seen.answers.iter().flat_map(|(resource, all)| all.iter().map(move |ids| (resource, ids)));
        let entries: Vec<_> = all.map(entry).collect();
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
        let (name, namespace) = (pod.to_owned(), "default".to_owned());
        let pod = PodResources { name, namespace, containers: vec![container] };
        self.seen.lock().unwrap().pods.insert(self.resource.clone(), vec![pod]);
    }

    /// Says from now on that pods have these slots of the resource, one container each.
    pub(crate) fn list_pods(&self, pods: &[(&str, &[Slot])]) {
        let pod = |&(name, slots): &(&str, &[Slot])| {
            let devices = slots.iter().map(|slot| ContainerDevices {
                resource_name: self.resource.clone(),
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
        self.seen.lock().unwrap().pods.insert(self.resource.clone(), pods.iter().map(pod).collect());
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.served.iter().for_each(JoinHandle::abort);
        self.main.seen.lock().unwrap().followed.iter().for_each(JoinHandle::abort);
    }
}

async fn answer(seen: Arc<Mutex<GpuNews>>, folder: PathBuf, call: Call) -> Answer {
    match call.uri().path() {
        REGISTER => {
            let act = move |request| register(Arc::clone(&seen), folder.clone(), request);
            grpc::unary(call, act).await
        }
        LIST_PODS => {
            let act = move |_: Empty| {
                let pod_resources = seen.lock().unwrap().pods.values().flatten().cloned().collect();
                async move { Ok::<_, Status>(ListPodResourcesResponse { pod_resources }) }
            };
            grpc::unary(call, act).await
        }
        _ => grpc::unknown(&call),
    }
}

/// The plugin has to answer before this call ends.
async fn register(
    seen: Arc<Mutex<GpuNews>>,
    folder: PathBuf,
    request: RegisterRequest,
) -> Result<Empty, Status> {
    let no = |error: &dyn std::fmt::Display| Status::failed_precondition(error.to_string());
    {
        let mut seen = seen.lock().unwrap();
        if let Some(why) = seen.refuses.clone() {
            seen.refused += 1;
            return Err(no(&why));
        }
    }
    let plugin = Client::connect(&folder.join(&request.endpoint)).await.map_err(|error| no(&error))?;
    let options: DevicePluginOptions = plugin.ask(OPTIONS, Empty {}).await?;
    let mut lists = plugin.follow::<Empty, ListAndWatchResponse>(LIST_AND_WATCH, Empty {}).await?;
    let first = lists.message().await?.ok_or_else(|| no(&"no list"))?;
    let mut now = seen.lock().unwrap();
    let socket = request.endpoint.clone();
    let known = now.plugins.entry(socket.clone()).or_default();
    (known.devices, known.lists) = (first.devices, 1);
    known.registered.push((request, options));
    let follows = Arc::clone(&seen);
    now.followed.push(tokio::spawn(async move {
        // The connection lives as long as its client.
        let _plugin = plugin;
        while let Ok(Some(list)) = lists.message().await {
            let mut seen = follows.lock().unwrap();
            let known = seen.plugins.entry(socket.clone()).or_default();
            known.devices = list.devices;
            known.lists += 1;
        }
    }));
    Ok(Empty {})
}
