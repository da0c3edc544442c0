//! The kubelet's side of Dynamic Resource Allocation: it finds the driver's socket, registers it, and has claims prepared.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use nvshare_device_plugin::api::Empty;
use nvshare_device_plugin::dra::DRIVER;
use nvshare_device_plugin::dra::messages::{
    Claim, ClaimsRequest, GET_INFO, NOTIFY, PREPARE, PluginInfo, PrepareResponse, Prepared,
    RegistrationStatus, UNPREPARE, UnprepareResponse,
};
use nvshare_device_plugin::grpc::Client;
use nvshare_proto::GpuUuid;
use serde_json::{Value, json};

use super::until;

/// A driver that is registered.
pub(crate) struct Claims(Client);

impl Claims {
    /// Waits for a driver, as a kubelet that has just started: whatever socket is there is asked.
    pub(crate) async fn find(root: &Path) -> Self {
        let folder = root.join("kubelet/plugins_registry");
        let is_served = |path: &Path| std::os::unix::net::UnixStream::connect(path).is_ok();
        let socket = || {
            let sockets = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
            sockets
                .into_iter()
                .find(|path| path.extension().is_some_and(|end| end == "sock") && is_served(path))
        };
        let socket = until("a driver's socket", socket).await;
        let found = Client::connect(&socket).await.unwrap();
        let info: PluginInfo = found.ask(GET_INFO, Empty {}).await.unwrap();
        assert_eq!((info.kind.as_str(), info.name.as_str()), ("DRAPlugin", DRIVER));
        assert_eq!(info.supported_versions, ["v1.DRAPlugin"]);
        let driver = Client::connect(Path::new(&info.endpoint)).await.unwrap();
        let registered = RegistrationStatus { plugin_registered: true, error: String::new() };
        let Empty {} = found.ask(NOTIFY, registered).await.unwrap();
        Self(driver)
    }

    /// Has claims of the namespace `default` prepared: their names, which are their UIDs as well.
    pub(crate) async fn prepare(&self, names: &[&str]) -> BTreeMap<String, Prepared> {
        let answer: PrepareResponse = self.0.ask(PREPARE, request(names)).await.unwrap();
        assert!(names.iter().eq(answer.claims.keys()), "each claim has an answer");
        answer.claims
    }

    /// The same for one claim: its devices' names, each with the CDI devices, or why there are none.
    pub(crate) async fn prepare_one(&self, name: &str) -> Result<Vec<(String, Vec<String>)>, String> {
        let prepared = self.prepare(&[name]).await.remove(name).unwrap();
        let devices = prepared.devices.into_iter().map(|device| (device.device_name, device.cdi_device_ids));
        if prepared.error.is_empty() { Ok(devices.collect()) } else { Err(prepared.error) }
    }

    /// Says that these claims are not used any more; what went wrong.
    pub(crate) async fn unprepare(&self, names: &[&str]) -> Vec<String> {
        let answer: UnprepareResponse = self.0.ask(UNPREPARE, request(names)).await.unwrap();
        assert!(names.iter().eq(answer.claims.keys()), "each claim has an answer");
        answer.claims.into_values().map(|one| one.error).collect()
    }
}

fn request(names: &[&str]) -> ClaimsRequest {
    let claim = |name: &&str| Claim {
        namespace: "default".to_owned(),
        uid: (*name).to_owned(),
        name: (*name).to_owned(),
    };
    ClaimsRequest { claims: names.iter().map(claim).collect() }
}

/// The device that is allocated for a request: a share of a GPU of the node `one`, with these capacities.
pub(crate) fn allocated(request: &str, gpu: GpuUuid, consumed: &Value) -> Value {
    let device = gpu.to_string().to_lowercase();
    let mut result = json!({"request": request, "driver": DRIVER, "pool": "one", "device": device});
    if !consumed.is_null() {
        result["consumedCapacity"] = consumed.clone();
        result["shareID"] = json!("b2f1c7a4-0000-4000-8000-000000000001");
    }
    result
}

/// The same claim, reserved for these pods: their names, which are their UIDs as well.
pub(crate) fn reserved(mut claim: Value, pods: &[&str]) -> Value {
    let consumers = pods.iter().map(|name| json!({"resource": "pods", "name": name, "uid": name}));
    claim["status"]["reservedFor"] = consumers.collect();
    claim
}

/// A claim of the namespace `default`, whose name is its UID as well, with what is allocated to it.
pub(crate) fn claim(name: &str, results: &[Value], parameters: Option<Value>) -> Value {
    let config = parameters.map(|fields| {
        let mut parameters = json!({"apiVersion": "nvshare.com/v1alpha1", "kind": "SeatParameters"});
        parameters.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        json!({"source": "FromClaim", "opaque": {"driver": DRIVER, "parameters": parameters}})
    });
    let config: Vec<Value> = config.into_iter().collect();
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": "default", "name": name, "uid": name},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": DRIVER}}]}},
        "status": {"allocation": {"devices": {"results": results, "config": config}}},
    })
}
