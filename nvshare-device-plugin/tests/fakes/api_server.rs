//! An API server, as far as the driver asks it: nodes, pods, claims, and ResourceSlices with a strict schema, versions, and watches.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};

use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use nvshare_device_plugin::dra::quantities;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;

type Body = BoxBody<Bytes, io::Error>;

#[derive(Default)]
struct State {
    version: u64,
    nodes: BTreeMap<String, Value>,
    pods: BTreeMap<String, Value>,
    /// Whether the driver's role has no right to get pods.
    hides_pods: bool,
    claims: BTreeMap<String, Value>,
    slices: BTreeMap<String, Value>,
    /// Version, type, and slice.
    events: Vec<(u64, &'static str, Value)>,
    is_away: bool,
    /// Whether it drops the fields of DRAConsumableCapacity.
    drops: bool,
    /// How often somebody else changes a slice just before it is replaced.
    rivals: u32,
    /// Method and kind of each request.
    asked: Vec<String>,
}

/// The API server.
pub(crate) struct ApiServer {
    state: Arc<Mutex<State>>,
    /// Told after each change.
    changed: Arc<watch::Sender<()>>,
    task: JoinHandle<()>,
}

impl ApiServer {
    /// Starts one that has the node `one`, and writes how it is reached.
    pub(crate) async fn start(root: &Path) -> Self {
        let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap();
        let address = listener.local_addr().unwrap();
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{address}")}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {}}],
        });
        fs::write(root.join("kubeconfig"), config.to_string()).unwrap();
        let (state, changed) = (Arc::<Mutex<State>>::default(), Arc::new(watch::Sender::new(())));
        let serves = (Arc::clone(&state), Arc::clone(&changed));
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (state, changed) = serves.clone();
                let service =
                    service_fn(move |request| answer(Arc::clone(&state), Arc::clone(&changed), request));
                tokio::spawn(async move {
                    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        let server = Self { state, changed, task };
        server.set_node("one", "node-uid-1");
        server
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut self.state.lock().unwrap());
        self.changed.send_replace(());
        changed
    }

    /// There is such a node from now on.
    pub(crate) fn set_node(&self, name: &str, uid: &str) {
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "uid": uid}});
        self.change(|state| {
            state.nodes.insert(name.to_owned(), node);
            state.collect_garbage();
        });
    }

    /// There is such a pod in the namespace `default` from now on, whose name is its UID as well.
    pub(crate) fn set_pod(&self, name: &str, class: Option<&str>) {
        let mut pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"namespace": "default", "name": name, "uid": name},
            "spec": {"containers": [{"name": "main", "image": "any"}]},
        });
        if let Some(class) = class {
            pod["spec"]["priorityClassName"] = json!(class);
        }
        self.change(|state| state.pods.insert(name.to_owned(), pod));
    }

    /// Has the driver's role without the right to get pods from now on, or with it.
    pub(crate) fn set_hides_pods(&self, hides: bool) {
        self.change(|state| state.hides_pods = hides);
    }

    /// There is such a claim from now on.
    pub(crate) fn set_claim(&self, claim: Value) {
        check(&claim, &claim_schema(), "claim").unwrap();
        let name = claim["metadata"]["name"].as_str().unwrap().to_owned();
        self.change(|state| state.claims.insert(name, claim));
    }

    /// There is no such claim any more.
    pub(crate) fn remove_claim(&self, name: &str) {
        self.change(|state| state.claims.remove(name));
    }

    /// Answers nobody from now on, or again.
    pub(crate) fn set_away(&self, is_away: bool) {
        self.change(|state| state.is_away = is_away);
    }

    /// Has the feature gate of consumable capacity off from now on, or on again.
    pub(crate) fn set_drops(&self, drops: bool) {
        self.change(|state| state.drops = drops);
    }

    /// Lets somebody else be faster, this number of times.
    pub(crate) fn set_rivals(&self, rivals: u32) {
        self.change(|state| state.rivals = rivals);
    }

    /// Somebody else puts a slice there.
    pub(crate) fn put_slice(&self, name: &str, spec: &Value) {
        let slice = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": name, "uid": format!("uid-{name}")},
            "spec": spec,
        });
        self.change(|state| state.store(name, slice, "ADDED"));
    }

    /// Removes slices, as a kubelet does that starts: those of its node.
    pub(crate) fn wipe(&self, node: &str) {
        self.change(|state| {
            let of_node = |(_, slice): &(&String, &Value)| slice["spec"]["nodeName"] == node;
            let names: Vec<String> =
                state.slices.iter().filter(of_node).map(|(name, _)| name.clone()).collect();
            names.iter().for_each(|name| state.remove(name));
        });
    }

    /// All slices by their names.
    pub(crate) fn slices(&self) -> BTreeMap<String, Value> {
        self.state.lock().unwrap().slices.clone()
    }

    /// The only slice of the driver, if there is one alone.
    pub(crate) fn slice(&self) -> Option<Value> {
        let slices = self.slices();
        let mut own = slices.values().filter(|slice| slice["spec"]["driver"] == "gpu.nvshare.com");
        own.next().filter(|_| own.next().is_none()).cloned()
    }

    /// Method and kind of each request so far.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.state.lock().unwrap().asked.clone()
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl State {
    fn store(&mut self, name: &str, mut slice: Value, event: &'static str) {
        self.version += 1;
        slice["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.events.push((self.version, event, slice.clone()));
        self.slices.insert(name.to_owned(), slice);
    }

    fn remove(&mut self, name: &str) {
        let Some(slice) = self.slices.remove(name) else { return };
        self.version += 1;
        self.events.push((self.version, "DELETED", slice));
    }

    /// Removes slices whose owner is not there any more.
    fn collect_garbage(&mut self) {
        let is_owned = |slice: &Value| {
            let owners = slice["metadata"]["ownerReferences"].as_array();
            owners.is_none_or(|owners| {
                owners
                    .iter()
                    .any(|owner| self.nodes.values().any(|node| node["metadata"]["uid"] == owner["uid"]))
            })
        };
        let lost: Vec<String> =
            self.slices.iter().filter(|(_, slice)| !is_owned(slice)).map(|(name, _)| name.clone()).collect();
        lost.iter().for_each(|name| self.remove(name));
    }

    /// Takes a slice in, as the gates have it.
    fn admit(&self, mut slice: Value) -> Result<Value, Refused> {
        let invalid = |why: String| refused(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", why);
        check(&slice, &slice_schema(), "slice")
            .map_err(|why| refused(StatusCode::BAD_REQUEST, "BadRequest", why))?;
        if self.drops {
            for device in slice["spec"]["devices"].as_array_mut().into_iter().flatten() {
                device.as_object_mut().unwrap().remove("allowMultipleAllocations");
                for capacity in
                    device["capacity"].as_object_mut().into_iter().flat_map(|all| all.values_mut())
                {
                    capacity.as_object_mut().unwrap().remove("requestPolicy");
                }
            }
        }
        validate(&slice["spec"]).map_err(invalid)?;
        let owner = &slice["metadata"]["ownerReferences"][0];
        if owner["kind"] != "Node" || owner["apiVersion"] != "v1" || owner["controller"] != true {
            return Err(invalid(format!("no node owns it: {owner}")));
        }
        Ok(slice)
    }
}

type Refused = (StatusCode, Value);
type Query = BTreeMap<String, String>;

fn refused(code: StatusCode, reason: &str, message: String) -> Refused {
    let status = json!({
        "apiVersion": "v1",
        "kind": "Status",
        "metadata": {},
        "status": "Failure",
        "code": code.as_u16(),
        "reason": reason,
        "message": message,
    });
    (code, status)
}

fn missing(what: &str) -> Refused {
    refused(StatusCode::NOT_FOUND, "NotFound", format!("{what} not found"))
}

fn decoded(text: &str) -> String {
    text.replace("%3D", "=").replace("%2C", ",").replace("%2F", "/")
}

async fn answer(
    state: Arc<Mutex<State>>,
    changed: Arc<watch::Sender<()>>,
    request: Request<Incoming>,
) -> io::Result<Response<Body>> {
    let away = || io::Error::other("away");
    if state.lock().unwrap().is_away {
        return Err(away());
    }
    let (head, body) = request.into_parts();
    let pairs = head.uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
    let query: Query = pairs.map(|(name, value)| (name.to_owned(), decoded(value))).collect();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let parts: Vec<&str> = head.uri.path().trim_matches('/').split('/').collect();
    let answered = {
        let mut state = state.lock().unwrap();
        let kind = match parts[..] {
            ["api", "v1", "nodes", _] => "nodes",
            ["api", "v1", "namespaces", "default", "pods", _] => "pods",
            ["apis", "resource.k8s.io", "v1", "namespaces", "default", "resourceclaims", _] => {
                "resourceclaims"
            }
            ["apis", "resource.k8s.io", "v1", "resourceslices", ..] => "resourceslices",
            _ => "unknown",
        };
        state.asked.push(format!("{} {kind}", head.method));
        handle(&mut state, &head.method, kind, &parts, &query, &body)
    };
    changed.send_replace(());
    match answered {
        Ok(Answered::Object(value)) => Ok(respond(StatusCode::OK, &value)),
        Ok(Answered::Watch(from)) => Ok(follow(state, changed.subscribe(), query, from)),
        Err((code, status)) => Ok(respond(code, &status)),
    }
}

enum Answered {
    Object(Value),
    /// Events after this version.
    Watch(u64),
}

fn respond(code: StatusCode, value: &Value) -> Response<Body> {
    let body = Full::new(Bytes::from(value.to_string())).map_err(|never| match never {}).boxed();
    Response::builder().status(code).header("content-type", "application/json").body(body).unwrap()
}

/// Answers one request.
fn handle(
    state: &mut State,
    method: &Method,
    kind: &str,
    parts: &[&str],
    query: &Query,
    body: &[u8],
) -> Result<Answered, Refused> {
    let name = parts.last().copied().unwrap_or_default();
    let conflict = |why: &str| refused(StatusCode::CONFLICT, "Conflict", format!("{name}: {why}"));
    let sent = || -> Value { serde_json::from_slice(body).unwrap_or_default() };
    let found = match (method, kind, parts.len()) {
        (&Method::GET, "nodes", _) => state.nodes.get(name).cloned().ok_or_else(|| missing(name))?,
        (&Method::GET, "pods", _) if !state.hides_pods => {
            state.pods.get(name).cloned().ok_or_else(|| missing(name))?
        }
        (&Method::GET, "resourceclaims", _) => {
            state.claims.get(name).cloned().ok_or_else(|| missing(name))?
        }
        (&Method::GET, "resourceslices", 4) if query.get("watch").is_some_and(|watch| watch == "true") => {
            return Ok(Answered::Watch(query["resourceVersion"].parse().unwrap()));
        }
        (&Method::GET, "resourceslices", 4) => {
            let items: Vec<&Value> =
                state.slices.values().filter(|slice| is_selected(slice, query)).collect();
            let version = state.version.to_string();
            json!({"kind": "ResourceSliceList", "apiVersion": "resource.k8s.io/v1", "metadata": {"resourceVersion": version}, "items": items})
        }
        (&Method::POST, "resourceslices", 4) => {
            let mut slice = state.admit(sent())?;
            let prefix = slice["metadata"]["generateName"].as_str().expect("a name is generated");
            let name = format!("{prefix}{:05}", state.version);
            slice["metadata"]["name"] = json!(name);
            slice["metadata"]["uid"] = json!(format!("uid-{name}"));
            state.store(&name, slice, "ADDED");
            let stored = state.slices[&name].clone();
            state.collect_garbage();
            stored
        }
        (&Method::PUT, "resourceslices", 5) => {
            if state.rivals > 0 {
                state.rivals -= 1;
                let slice = state.slices.get(name).cloned().ok_or_else(|| missing(name))?;
                state.store(name, slice, "MODIFIED");
            }
            let old = state.slices.get(name).cloned().ok_or_else(|| missing(name))?;
            let slice = state.admit(sent())?;
            if slice["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"] {
                return Err(conflict("the object has been modified"));
            }
            for field in ["/spec/driver", "/spec/nodeName", "/spec/pool/name", "/metadata/uid"] {
                assert_eq!(slice.pointer(field), old.pointer(field), "{field} is immutable");
            }
            assert!(
                slice["spec"]["pool"]["generation"].as_i64() > old["spec"]["pool"]["generation"].as_i64()
            );
            state.store(name, slice, "MODIFIED");
            state.slices[name].clone()
        }
        (&Method::DELETE, "resourceslices", 5) => {
            let old = state.slices.get(name).cloned().ok_or_else(|| missing(name))?;
            if sent()["preconditions"]["resourceVersion"] != old["metadata"]["resourceVersion"] {
                return Err(conflict("the object has been modified"));
            }
            state.remove(name);
            old
        }
        _ => {
            return Err(refused(StatusCode::FORBIDDEN, "Forbidden", format!("{method} {kind} is forbidden")));
        }
    };
    Ok(Answered::Object(found))
}

fn is_selected(slice: &Value, query: &Query) -> bool {
    let selectors = query.get("fieldSelector").into_iter().flat_map(|all| all.split(','));
    selectors.filter_map(|one| one.split_once('=')).all(|(field, value)| {
        let pointer = format!("/{}", field.replace('.', "/"));
        slice.pointer(&pointer).and_then(Value::as_str) == Some(value)
    })
}

/// Sends the events after a version, until the server is away.
fn follow(
    state: Arc<Mutex<State>>,
    mut changed: watch::Receiver<()>,
    query: Query,
    from: u64,
) -> Response<Body> {
    let (send, receive) = mpsc::channel(16);
    tokio::spawn(async move {
        let mut from = from;
        loop {
            let (lines, is_away) = {
                let state = state.lock().unwrap();
                let later = state.events.iter().filter(|(version, ..)| *version > from);
                let later = later.filter(|(.., slice)| is_selected(slice, &query));
                let lines: String = later
                    .map(|(_, kind, slice)| format!("{}\n", json!({"type": kind, "object": slice})))
                    .collect();
                from = state.version;
                (lines, state.is_away)
            };
            let is_over = is_away
                || (!lines.is_empty() && send.send(Ok(Frame::data(Bytes::from(lines)))).await.is_err());
            if is_over || changed.changed().await.is_err() {
                return;
            }
        }
    });
    let body = BodyExt::boxed(StreamBody::new(ReceiverStream::new(receive)));
    Response::builder().header("content-type", "application/json").body(body).unwrap()
}

/// Whether a value has the fields of a schema and no others. A schema is a type, a list of one schema, or fields; `!` marks those that have to be
/// there, and `*` stands for any name.
fn check(value: &Value, schema: &Value, path: &str) -> Result<(), String> {
    let wrong = || Err(format!("{path}: {value} is not {schema}"));
    match (schema, value) {
        (Value::String(kind), _) => {
            let is_so = match kind.as_str() {
                "any" => true,
                "bool" => value.is_boolean(),
                "int" => value.is_i64(),
                "quantity" => value.as_str().is_some_and(|text| number(text).is_some()),
                _ => value.is_string(),
            };
            if is_so { Ok(()) } else { wrong() }
        }
        (Value::Array(of), Value::Array(values)) => {
            values.iter().enumerate().try_for_each(|(n, value)| check(value, &of[0], &format!("{path}[{n}]")))
        }
        (Value::Object(fields), Value::Object(values)) => {
            for (name, value) in values {
                let known =
                    [name.as_str(), &format!("{name}!"), "*"].into_iter().find_map(|name| fields.get(name));
                let path = format!("{path}.{name}");
                check(value, known.ok_or_else(|| format!("unknown field \"{path}\""))?, &path)?;
            }
            let needed = fields.keys().filter_map(|name| name.strip_suffix('!'));
            match needed.into_iter().find(|name| !values.contains_key(*name)) {
                Some(name) => Err(format!("{path}.{name}: Required value")),
                None => Ok(()),
            }
        }
        _ => wrong(),
    }
}

fn number(text: &str) -> Option<u64> {
    quantities::whole(&serde_json::from_value(json!(text)).unwrap())
}

fn metadata_schema() -> Value {
    let owner = json!({"apiVersion!": "string", "kind!": "string", "name!": "string", "uid!": "string", "controller": "bool", "blockOwnerDeletion": "bool"});
    json!({
        "name": "string", "generateName": "string", "namespace": "string", "uid": "string", "resourceVersion": "string",
        "annotations": {"*": "string"}, "labels": {"*": "string"}, "ownerReferences": [owner],
    })
}

/// `ResourceSlice` of `resource.k8s.io/v1` of Kubernetes 1.34, without what concerns partitions and taints.
fn slice_schema() -> Value {
    let range = json!({"min!": "quantity", "max": "quantity", "step": "quantity"});
    let policy = json!({"default": "quantity", "validRange": range, "validValues": ["quantity"]});
    let device = json!({
        "name!": "string",
        "attributes": {"*": {"int": "int", "bool": "bool", "string": "string", "version": "string"}},
        "capacity": {"*": {"value!": "quantity", "requestPolicy": policy}},
        "allowMultipleAllocations": "bool",
    });
    json!({
        "apiVersion!": "string",
        "kind!": "string",
        "metadata!": metadata_schema(),
        "spec!": {
            "driver!": "string",
            "nodeName": "string",
            "allNodes": "bool",
            "pool!": {"name!": "string", "generation!": "int", "resourceSliceCount!": "int"},
            "devices": [device],
        },
    })
}

/// `ResourceClaim` of `resource.k8s.io/v1`, as far as the tests write it.
fn claim_schema() -> Value {
    let result = json!({
        "request!": "string", "driver!": "string", "pool!": "string", "device!": "string", "adminAccess": "bool",
        "shareID": "string", "consumedCapacity": {"*": "string"},
    });
    let config = json!({"source!": "string", "requests": ["string"], "opaque": {"driver!": "string", "parameters!": "any"}});
    json!({
        "apiVersion!": "string",
        "kind!": "string",
        "metadata!": metadata_schema(),
        "spec!": "any",
        "status": {
            "allocation": {"devices": {"results": [result], "config": [config]}},
            "reservedFor": [{"apiGroup": "string", "resource!": "string", "name!": "string", "uid!": "string"}],
        },
    })
}

/// Checks the rules for slices that a schema cannot express.
fn validate(spec: &Value) -> Result<(), String> {
    if spec.get("nodeName").is_some() == spec.get("allNodes").is_some() {
        return Err("exactly one of nodeName and allNodes is required".to_owned());
    }
    let is_label = |name: &str| {
        (1..=63).contains(&name.len())
            && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
            && !name.starts_with('-')
            && !name.ends_with('-')
    };
    let is_version = |text: &str| {
        let is_number = |part: &str| part == "0" || part.parse::<u64>().is_ok_and(|_| !part.starts_with('0'));
        text.split('.').count() == 3 && text.split('.').all(is_number)
    };
    let mut names = Vec::new();
    for device in spec["devices"].as_array().into_iter().flatten() {
        let name = device["name"].as_str().unwrap();
        if !is_label(name) || names.contains(&name) {
            return Err(format!("{name}: not a label, or not unique"));
        }
        names.push(name);
        let attributes = device["attributes"].as_object().into_iter().flatten();
        for (name, attribute) in attributes.clone() {
            let fields = attribute.as_object().unwrap();
            let is_short = fields.values().all(|value| value.as_str().is_none_or(|text| text.len() <= 64));
            let is_semantic = attribute["version"].as_str().is_none_or(is_version);
            if fields.len() != 1 || !is_short || !is_semantic {
                return Err(format!("attribute {name}: {attribute}"));
            }
        }
        let capacities = device["capacity"].as_object().into_iter().flatten();
        if attributes.count() + capacities.clone().count() > 32 {
            return Err("more than 32 attributes and capacities".to_owned());
        }
        for (name, capacity) in capacities {
            let Some(policy) = capacity.get("requestPolicy") else { continue };
            if device["allowMultipleAllocations"] != true {
                return Err(format!("capacity {name}: requestPolicy without allowMultipleAllocations"));
            }
            let of = |value: &Value| number(value.as_str().unwrap()).unwrap();
            let range = &policy["validRange"];
            let [value, default, min, max] =
                [&capacity["value"], &policy["default"], &range["min"], &range["max"]].map(of);
            if !(min <= default && default <= max && max <= value) {
                return Err(format!("capacity {name}: {capacity}"));
            }
            if let Some(step) = range.get("step").map(of)
                && (min + step > value || [default, max].iter().any(|value| (value - min) % step != 0))
            {
                return Err(format!("capacity {name}: not whole steps: {capacity}"));
            }
        }
    }
    Ok(())
}
