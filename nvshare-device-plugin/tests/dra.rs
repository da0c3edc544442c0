//! The driver of Dynamic Resource Allocation beside a kubelet, an API server and a scheduler that are played.

use std::fs;
use std::time::Duration;

use crate::fakes::{A, ApiServer, B, Claims, Kubelet, Machine, Scheduler, allocated, claim, until};
use nvshare_proto::{GpuUuid, Occupant, Priority, SeatName, TenantSettings};
use serde_json::{Value, json};
use tokio::time::sleep;

pub(crate) const DRA: &str = "--api dra --node-name one";
const GIB: u64 = 1 << 30;

/// The name of a GPU's device.
fn device(gpu: GpuUuid) -> String {
    gpu.to_string().to_lowercase()
}

/// The names of the devices that are published.
fn published(server: &ApiServer) -> Option<Vec<String>> {
    let slice = server.slice()?;
    let devices = slice["spec"]["devices"].as_array()?.iter();
    Some(devices.map(|device| device["name"].as_str().unwrap().to_owned()).collect())
}

async fn until_published(server: &ApiServer, gpus: &[GpuUuid]) -> Value {
    let names: Vec<String> = gpus.iter().copied().map(device).collect();
    until("the GPUs are published", || (published(server)? == names).then(|| server.slice())?).await
}

fn generation(slice: &Value) -> i64 {
    slice["spec"]["pool"]["generation"].as_i64().unwrap()
}

/// The seat of a CDI device, and NVIDIA's device beside it.
fn seat(devices: &[(String, Vec<String>)]) -> (SeatName, String) {
    let [(_, names)] = devices else { panic!("one device: {devices:?}") };
    let [own, nvidia] = &names[..] else { panic!("two names: {names:?}") };
    (own.strip_prefix("nvshare.com/gpu=seat-").unwrap().parse().unwrap(), nvidia.clone())
}

/// Whether a seat has its CDI device.
fn has_device(machine: &Machine, seat: SeatName) -> bool {
    machine.devices().iter().any(|(name, _)| *name == format!("seat-{seat}"))
}

#[tokio::test]
async fn a_gpu_of_one_slot_is_published() {
    let mut machine = Machine::new();
    let _scheduler = Scheduler::start(&machine.root, 1);
    let server = ApiServer::start(&machine.root).await;
    machine.start(&format!("{DRA} --slots 1"));
    let slice = until_published(&server, &[A, B]).await;
    let slots =
        json!({"value": "1", "requestPolicy": {"default": "1", "validRange": {"min": "1", "max": "1"}}});
    assert_eq!(slice["spec"]["devices"][0]["capacity"]["slots"], slots);
}

#[tokio::test]
async fn gpus_are_published_as_devices_that_many_claims_may_have() {
    let mut machine = Machine::new();
    let _scheduler = Scheduler::start(&machine.root, 1);
    let server = ApiServer::start(&machine.root).await;
    machine.start(&format!("{DRA} --slots 4 --slot-memory 2GiB --slot-compute 30"));
    let slice = until_published(&server, &[A, B]).await;
    let metadata = &slice["metadata"];
    assert!(metadata["name"].as_str().unwrap().starts_with("one-gpu.nvshare.com-"));
    let owner =
        json!([{"apiVersion": "v1", "kind": "Node", "name": "one", "uid": "node-uid-1", "controller": true}]);
    assert_eq!(metadata["ownerReferences"], owner);
    let pool = json!({"name": "one", "generation": 1, "resourceSliceCount": 1});
    assert_eq!((&slice["spec"]["pool"], &slice["spec"]["nodeName"]), (&pool, &json!("one")));
    let second = &slice["spec"]["devices"][1];
    assert_eq!(second["allowMultipleAllocations"], true);
    let attributes = json!({
        "uuid": {"string": B.to_string()},
        "index": {"int": 1},
        "numaNode": {"int": 1},
        "productName": {"string": "GPU"},
    });
    assert_eq!(second["attributes"], attributes);
    let memory = json!({"value": "8Gi", "requestPolicy": {"default": "2Gi", "validRange": {"min": "64Mi", "max": "2Gi"}}});
    assert_eq!(second["capacity"]["memory"], memory);
    // It asks for no more than its role allows: see manifests/dra.
    sleep(Duration::from_millis(500)).await;
    let mut asked = server.asked();
    asked.sort();
    asked.dedup();
    assert_eq!(asked, ["GET nodes", "GET resourceslices", "POST resourceslices"]);
}

#[tokio::test]
async fn claims_get_seats_each_by_itself() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let server = ApiServer::start(&machine.root).await;
    machine.start(&format!("{DRA} --slot-memory 4GiB"));
    let kubelet = Claims::find(&machine.root).await;
    let share = |gpu, memory: &str, compute: &str| {
        vec![allocated("gpu", gpu, &json!({"memory": memory, "compute": compute, "slots": "1"}))]
    };
    server.set_claim(claim("a", &share(A, "3Gi", "25"), Some(json!({"weight": 50, "priority": "low"}))));
    server.set_claim(claim("b", &share(B, "1Gi", "100"), None));
    server.set_claim(claim("c", &share(A, "1Gi", "100"), Some(json!({"colour": "red"}))));
    let got = kubelet.prepare(&["a", "b", "c", "d"]).await;
    assert_eq!(
        got["c"].error,
        "claim default/c: SeatParameters: unknown field `colour`, expected one of `weight`, `policy`, `priority`, `gang`"
    );
    assert_eq!(got["d"].error, "claim default/d: there is no such claim any more");
    assert!(got["c"].devices.is_empty() && got["d"].devices.is_empty());
    let [a, b] = ["a", "b"].map(|name| &got[name].devices[..]);
    assert_eq!(
        (a[0].pool_name.as_str(), &a[0].device_name, &a[0].request_names),
        ("one", &device(A), &vec!["gpu".to_owned()])
    );
    assert!(a[0].cdi_device_ids[0].starts_with("nvshare.com/gpu=seat-"));
    assert_eq!(
        (&*a[0].cdi_device_ids[1], &*b[0].cdi_device_ids[1]),
        (&*format!("nvidia.com/gpu={A}"), "nvidia.com/gpu=1")
    );

    // A claim's capacities are its seat's limits.
    let seats = scheduler.seats();
    let of = |gpu: GpuUuid| seats.iter().find(|seat| seat.slots[0].gpu == gpu).unwrap().given;
    let low = TenantSettings {
        memory: Some(3 * GIB),
        compute: Some(25),
        weight: Some(50),
        priority: Some(Priority::Low),
        ..TenantSettings::default()
    };
    assert_eq!((seats.len(), of(A)), (2, low));
    // All of the time is no limit.
    assert_eq!(of(B), TenantSettings { memory: Some(GIB), ..TenantSettings::default() });

    // The same again, each time.
    let (name, _) = seat(&kubelet.prepare_one("a").await.unwrap());
    assert_eq!(
        kubelet.prepare(&["a", "b"]).await,
        [("a", &got["a"]), ("b", &got["b"])].map(|(n, p)| (n.to_owned(), p.clone())).into()
    );
    assert_eq!(machine.devices().len(), 2, "a claim that is refused has no device");
    assert!(has_device(&machine, name));

    assert_eq!(kubelet.unprepare(&["a", "x"]).await, ["", ""]);
    assert!(!has_device(&machine, name));
    assert_eq!(machine.devices().len(), 1);
    until("its seat goes", || (scheduler.removed() == [name]).then_some(())).await;
    assert_eq!(kubelet.unprepare(&["a"]).await, [""]);
}

#[tokio::test]
async fn claims_that_cannot_be_had_are_refused() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let server = ApiServer::start(&machine.root).await;
    machine.start(&format!("{DRA} --slot-memory 4GiB"));
    let kubelet = Claims::find(&machine.root).await;
    let share = |request, gpu, memory: &str| allocated(request, gpu, &json!({"memory": memory}));
    let mut older = share("gpu", A, "1Gi");
    older["pool"] = json!("renamed");
    for (results, told) in [
        (
            vec![share("gpu", A, "0")],
            "memory: 0 of gpu-01010101-0101-0101-0101-010101010101 is allocated to it",
        ),
        (vec![share("gpu", A, "5Gi")], "accepted: 64.0 MiB to 4.00 GiB"),
        (vec![allocated("gpu", A, &json!({"compute": "0"}))], "compute: 0 of"),
        (
            vec![share("one", A, "1Gi"), share("two", A, "1Gi")],
            "several shares of GPU-01010101-0101-0101-0101-010101010101",
        ),
        (vec![share("gpu", GpuUuid([9; 16]), "1Gi")], "which this node does not give out"),
        (vec![older], "of pool renamed is allocated to it, and this node's pool is one"),
    ] {
        server.set_claim(claim("a", &results, None));
        let refused = kubelet.prepare_one("a").await.unwrap_err();
        assert!(refused.starts_with("claim default/a: ") && refused.contains(told), "{refused}");
    }
    assert_eq!(scheduler.seats(), []);
    scheduler.refuse(Some("the disk is full"));
    server.set_claim(claim("a", &[share("gpu", A, "1Gi")], None));
    let refused = kubelet.prepare_one("a").await.unwrap_err();
    assert_eq!(refused, "claim default/a: the scheduler refuses: the disk is full");
    assert!(machine.devices().is_empty());
    // NVIDIA has no device for it.
    scheduler.refuse(None);
    fs::remove_file(machine.nvidia()).unwrap();
    let refused = kubelet.prepare_one("a").await.unwrap_err();
    assert_eq!(refused, format!("claim default/a: no CDI device of NVIDIA has {A}"));
    until("what has no device of NVIDIA is not offered", || server.slices().is_empty().then_some(())).await;
}

#[tokio::test]
async fn each_request_for_an_extended_resource_is_a_seat() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let server = ApiServer::start(&machine.root).await;
    machine.start(DRA);
    let kubelet = Claims::find(&machine.root).await;
    // Two containers of a pod on one GPU.
    let results = ["container-0-request-0", "container-1-request-0"]
        .map(|request| allocated(request, A, &json!({"compute": "100", "slots": "1"})));
    let mut pod = claim("pod", &results, None);
    pod["metadata"]["annotations"] = json!({"resource.kubernetes.io/extended-resource-claim": "true"});
    server.set_claim(pod);
    let got = kubelet.prepare(&["pod"]).await.remove("pod").unwrap();
    let requests: Vec<_> = got.devices.iter().map(|device| device.request_names.concat()).collect();
    assert_eq!(requests, ["container-0-request-0", "container-1-request-0"], "{}", got.error);
    assert_ne!(got.devices[0].cdi_device_ids[0], got.devices[1].cdi_device_ids[0]);
    assert_eq!(scheduler.seats().len(), 2);
    kubelet.unprepare(&["pod"]).await;
    until("both go", || (scheduler.removed().len() == 2).then_some(())).await;

    // A claim of two GPUs is one seat.
    let both = [A, B].map(|gpu| allocated("gpus/large", gpu, &Value::Null));
    server.set_claim(claim("both", &both, None));
    let got = kubelet.prepare(&["both"]).await.remove("both").unwrap();
    assert_eq!(got.devices.len(), 2, "{}", got.error);
    assert_eq!(got.devices[1].request_names, ["gpus"]);
    assert_eq!(got.devices[0].cdi_device_ids[0], got.devices[1].cdi_device_ids[0]);
    let seat = scheduler.seats().pop().unwrap();
    assert_eq!(seat.slots.iter().map(|slot| slot.gpu).collect::<Vec<_>>(), [A, B]);
}

#[tokio::test]
async fn a_claim_outlives_each_part_between_prepare_and_unprepare() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let server = ApiServer::start(&machine.root).await;
    let options = format!("{DRA} --slot-memory 4GiB");
    let driver = machine.start(&options);
    let kubelet = Claims::find(&machine.root).await;
    server.set_claim(claim("a", &[allocated("gpu", A, &json!({"memory": "1Gi"}))], None));
    let first = kubelet.prepare_one("a").await.unwrap();
    let (name, _) = seat(&first);
    let limits = scheduler.seats().pop().unwrap();

    // The machine starts again: /var/run is empty, and the API server is not there yet.
    machine.kill(driver);
    drop(scheduler);
    fs::remove_dir_all(machine.root.join("cdi")).unwrap();
    server.set_away(true);
    let driver = machine.start(&options);
    let kubelet = Claims::find(&machine.root).await;
    assert!(has_device(&machine, name), "before the kubelet finds the driver");
    let scheduler = Scheduler::start(&machine.root, 2);
    let asked = || scheduler.seats().contains(&limits).then_some(());
    until("the scheduler is asked for it again", asked).await;
    assert_eq!(kubelet.prepare_one("a").await.unwrap(), first);
    assert_eq!(scheduler.seats().pop().unwrap(), limits);
    // A new one has to wait.
    let refused = kubelet.prepare_one("new").await.unwrap_err();
    assert!(refused.contains("the API server does not answer"), "{refused}");

    // The claim has been allocated anew meanwhile, as its pod was removed by force.
    server.set_away(false);
    server.set_claim(claim("a", &[allocated("gpu", B, &json!({"memory": "2Gi"}))], None));
    let second = kubelet.prepare_one("a").await.unwrap();
    let (other, _) = seat(&second);
    assert_eq!((second[0].0.as_str(), other == name), (device(B).as_str(), false));
    until("the older seat goes", || (scheduler.removed() == [name]).then_some(())).await;
    assert!(!has_device(&machine, name) && has_device(&machine, other));

    // The end comes while the scheduler is away: no pod waits for it.
    drop(scheduler);
    assert_eq!(kubelet.unprepare(&["a"]).await, [""]);
    assert!(!has_device(&machine, other));
    machine.kill(driver);
    let scheduler = Scheduler::start_refusing(&machine.root, 3, Some("a process uses it"));
    let driver = machine.start(&options);
    machine.says(driver, &format!("seat {other}, whose claim has ended, stays for now: ")).await;
    machine.says(driver, "a process uses it").await;
    scheduler.refuse(None);
    let before = scheduler.removed().len();
    until("it goes once nobody uses it", || (scheduler.removed().len() > before).then_some(())).await;
    let record = machine.root.join("state/claim-seats");
    let is_left = || Some(fs::read_to_string(&record).ok()?.contains(&other.to_string()));
    until("it is forgotten", || (!is_left()?).then_some(())).await;
}

#[tokio::test]
async fn an_api_server_that_is_away_is_said_once_and_found_again() {
    let mut machine = Machine::new();
    let _scheduler = Scheduler::start(&machine.root, 1);
    let server = ApiServer::start(&machine.root).await;
    server.set_away(true);
    let driver = machine.start(DRA);
    let away = "the ResourceSlice of this node may be out of date: the API server does not answer";
    machine.says(driver, away).await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!(machine.log(driver).matches("out of date").count(), 1, "{}", machine.log(driver));
    assert_eq!(machine.log(driver).matches("ERROR").count(), 0, "{}", machine.log(driver));
    server.set_away(false);
    until_published(&server, &[A, B]).await;
    machine.says(driver, "the API server answers again").await;
    // Away once more, while it follows: what changed meanwhile is published afterwards.
    server.set_away(true);
    let gpu = machine.root.join("gpus/0000:02:00.0");
    fs::rename(&gpu, machine.root.join("lost")).unwrap();
    machine.says(driver, &format!("{B} is not there any more")).await;
    server.set_away(false);
    let slice = until_published(&server, &[A]).await;
    assert_eq!(generation(&slice), 2);
    fs::rename(machine.root.join("lost"), &gpu).unwrap();
    let slice = until_published(&server, &[A, B]).await;
    assert_eq!(generation(&slice), 3);
}

#[tokio::test]
async fn fields_that_the_api_server_drops_are_said_once() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let server = ApiServer::start(&machine.root).await;
    server.set_drops(true);
    let driver = machine.start(&format!("{DRA} --slot-memory 2GiB --slot-compute 30"));
    let kubelet = Claims::find(&machine.root).await;
    until_published(&server, &[A, B]).await;
    let drops = "the API server drops allowMultipleAllocations and requestPolicy in silence";
    machine.says(driver, drops).await;
    // The slice counts as written, with the fields that are left.
    sleep(Duration::from_secs(1)).await;
    assert_eq!(generation(&server.slice().unwrap()), 1);
    server.wipe("one");
    until_published(&server, &[A, B]).await;
    assert_eq!(machine.log(driver).matches(drops).count(), 1, "{}", machine.log(driver));
    // A claim then has what the options give to a slot.
    server.set_claim(claim("a", &[allocated("gpu", A, &Value::Null)], None));
    kubelet.prepare_one("a").await.unwrap();
    let given = TenantSettings { memory: Some(2 * GIB), compute: Some(30), ..TenantSettings::default() };
    assert_eq!(scheduler.seats()[0].given, given);
    server.set_drops(false);
    server.wipe("one");
    machine.says(driver, "the API server keeps that GPUs are shared, again").await;
}

#[tokio::test]
async fn slices_of_others_are_left_alone_and_others_may_change_ours() {
    let mut machine = Machine::new();
    let _scheduler = Scheduler::start(&machine.root, 1);
    let server = ApiServer::start(&machine.root).await;
    let pool = |name: &str| json!({"name": name, "generation": 9, "resourceSliceCount": 1});
    let foreign = [
        (
            "foreign-driver",
            json!({"driver": "gpu.example.com", "nodeName": "one", "pool": pool("one"), "devices": []}),
        ),
        (
            "other-node",
            json!({"driver": "gpu.nvshare.com", "nodeName": "two", "pool": pool("two"), "devices": []}),
        ),
    ];
    for (name, spec) in &foreign {
        server.put_slice(name, spec);
    }
    let before = server.slices();
    // A slice that an earlier driver left.
    server.put_slice(
        "stale",
        &json!({"driver": "gpu.nvshare.com", "nodeName": "one", "pool": pool("older"), "devices": []}),
    );
    let driver = machine.start(DRA);
    let own =
        || server.slices().into_iter().filter(|(name, _)| !before.contains_key(name)).collect::<Vec<_>>();
    let is_one = || own().len() == 1 && own()[0].1["spec"]["pool"]["name"] == "one";
    until("there is one slice of the node", || is_one().then_some(())).await;
    let (name, slice) = own().remove(0);
    assert_eq!(generation(&slice), 10);

    // Somebody is faster, twice.
    server.set_rivals(2);
    let gpu = machine.root.join("gpus/0000:02:00.0");
    fs::rename(&gpu, machine.root.join("lost")).unwrap();
    let devices = |count: usize| {
        move |own: &[(String, Value)]| own[0].1["spec"]["devices"].as_array().unwrap().len() == count
    };
    until("the GPU that is lost is not published", || devices(1)(&own()).then_some(())).await;
    assert_eq!((own()[0].0.as_str(), generation(&own()[0].1)), (name.as_str(), 11));
    // Somebody writes something else into ours, and a second one beside it.
    let mut spec = own()[0].1["spec"].clone();
    spec["devices"] = json!([]);
    server.put_slice(&name, &spec);
    until("ours is as it was", || devices(1)(&own()).then_some(())).await;
    server.put_slice("zz-second", &spec);
    until("there is one slice again", || (own().len() == 1).then_some(())).await;

    // The kubelet starts again, and removes all slices of its node.
    server.put_slice("foreign-driver", &foreign[0].1);
    server.wipe("one");
    until("the slice is there again", || is_one().then_some(())).await;
    assert_eq!(server.slices()["other-node"], before["other-node"]);
    assert!(!machine.log(driver).contains("out of date"), "{}", machine.log(driver));
    // The node is made anew, and its slices go with the old one.
    server.set_node("one", "node-uid-2");
    let owner = || own().first()?.1["metadata"]["ownerReferences"][0]["uid"].as_str().map(str::to_owned);
    until("the new node owns the slice", || (owner()? == "node-uid-2").then_some(())).await;
}

#[tokio::test]
async fn a_node_that_is_not_there_is_named() {
    let mut machine = Machine::new();
    let _scheduler = Scheduler::start(&machine.root, 1);
    let server = ApiServer::start(&machine.root).await;
    let driver = machine.start("--api dra --node-name renamed");
    machine.says(driver, "there is no node renamed; is --node-name right?").await;
    assert!(server.slices().is_empty());
    server.set_node("renamed", "node-uid-3");
    until("it is published", || server.slice()).await;
}

#[tokio::test]
async fn the_scheduler_learns_whose_a_claims_seat_is() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    let server = ApiServer::start(&machine.root).await;
    machine.start(DRA);
    let claims = Claims::find(&machine.root).await;
    server.set_claim(claim("a", &[allocated("gpu", A, &Value::Null)], None));
    let devices = claims.prepare_one("a").await.unwrap();
    let (name, _) = seat(&devices);
    kubelet.list_claim("pod", &devices[0].1);
    let holder =
        Occupant { namespace: "default".to_owned(), pod: "pod".to_owned(), container: "main".to_owned() };
    let is_told = || scheduler.held().concat().contains(&(name, Some(holder.clone())));
    until("the scheduler is told", || is_told().then_some(())).await;
}

#[tokio::test]
async fn a_node_has_one_api() {
    let mut machine = Machine::new();
    let _scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    let server = ApiServer::start(&machine.root).await;
    let refused = async |machine: &mut Machine, options: &str, told: &str| {
        let number = machine.start(options);
        assert_eq!(machine.ended(number).await, 1);
        machine.says(number, told).await;
    };
    let plugin = machine.start("");
    kubelet.registered(1).await;
    refused(&mut machine, DRA, "a program with --api device-plugin serves at").await;
    // The kubelet may start its containers again with the answers that it has.
    kubelet.keep_answers(&[&[nvshare_proto::Slot { gpu: A, number: 0 }]]);
    machine.kill(plugin);
    refused(
        &mut machine,
        DRA,
        "containers on this node have slots of nvshare.com/gpu: 1, such as that of seat dabc7573cefc8f50",
    )
    .await;
    kubelet.keep_answers(&[]);
    let driver = machine.start(DRA);
    let claims = Claims::find(&machine.root).await;
    refused(&mut machine, "", "a program with --api dra serves at").await;
    server.set_claim(claim("a", &[allocated("gpu", A, &Value::Null)], None));
    claims.prepare_one("a").await.unwrap();
    machine.kill(driver);
    refused(
        &mut machine,
        "",
        "containers on this node have claims: 1, such as default/a, and a node has one API",
    )
    .await;
    drop(_scheduler);
    refused(&mut machine, "--clean-up", "claims are prepared: 1, such as default/a; remove their pods first")
        .await;

    let scheduler = Scheduler::start(&machine.root, 1);
    machine.start(DRA);
    let claims = Claims::find(&machine.root).await;
    claims.unprepare(&["a"]).await;
    server.remove_claim("a");
    until("its seat goes", || (!scheduler.removed().is_empty()).then_some(())).await;
}

#[tokio::test]
async fn what_the_command_line_lacks_is_said_at_the_start() {
    let mut machine = Machine::new();
    for (options, told) in [
        ("--api dra", "--api dra: the name of the node is missing: --node-name, or $NODE_NAME"),
        ("--api dra --node-name one --device-list-strategy envvar", "names of CDI devices alone"),
        ("--api dra --node-name one --priority-of-class a=low --priority-of-class a=high", "a is said twice"),
        (DRA, "--api dra: no API server is known"),
    ] {
        let number = machine.start(options);
        assert_eq!(machine.ended(number).await, 1, "{options}");
        machine.says(number, told).await;
    }
}
