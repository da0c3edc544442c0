//! Settings of claims beside their capacities, and the files and folders that claims leave on a machine.

use std::fs;

use crate::dra::DRA;
use crate::fakes::{
    A, ApiServer, B, Claims, Kubelet, Machine, Scheduler, allocated, claim, reserved, until, write,
};
use nvshare_proto::{Priority, SeatName};
use serde_json::{Value, json};

#[tokio::test]
async fn the_processes_of_a_claim_are_a_gang_where_it_says_so() {
    let mut machine = Machine::new();
    let _scheduler = Scheduler::start(&machine.root, 1);
    let server = ApiServer::start(&machine.root).await;
    let driver = machine.start(DRA);
    let kubelet = Claims::find(&machine.root).await;
    let both = [A, B].map(|gpu| allocated("gpus", gpu, &Value::Null));
    server.set_claim(claim("ranks", &both, Some(json!({"gang": true}))));
    server.set_claim(claim("sweep", &both, None));
    let variables = |machine: &Machine, seat: SeatName| {
        let devices = machine.devices();
        let device = devices.iter().find(|(name, _)| *name == format!("seat-{seat}")).unwrap();
        device.1["containerEdits"]["env"].to_string()
    };
    let of = async |name: &str| {
        let prepared = kubelet.prepare(&[name]).await.remove(name).unwrap();
        let id = prepared.devices[0].cdi_device_ids[0].clone();
        id.strip_prefix("nvshare.com/gpu=seat-").unwrap().parse::<SeatName>().unwrap()
    };
    let (ranks, sweep) = (of("ranks").await, of("sweep").await);
    assert!(variables(&machine, ranks).contains("\"NVSHARE_GANG=claim\""));
    assert!(!variables(&machine, sweep).contains("GANG"));
    // Also after a start of the machine.
    machine.kill(driver);
    fs::remove_dir_all(machine.root.join("cdi")).unwrap();
    server.set_away(true);
    machine.start(DRA);
    let _kubelet = Claims::find(&machine.root).await;
    assert!(variables(&machine, ranks).contains("\"NVSHARE_GANG=claim\""));
    assert!(!variables(&machine, sweep).contains("GANG"));
}

#[tokio::test]
async fn a_claim_has_the_priority_of_its_pods_class() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let server = ApiServer::start(&machine.root).await;
    let driver =
        machine.start(&format!("{DRA} --priority-of-class batch=low --priority-of-class urgent=high"));
    let kubelet = Claims::find(&machine.root).await;
    for (pod, class) in [
        ("batch", Some("batch")),
        ("urgent", Some("urgent")),
        ("critical", Some("system-node-critical")),
        ("plain", None),
    ] {
        server.set_pod(pod, class);
    }
    let parameters = |priority: &str| Some(json!({"priority": priority}));
    for (name, pods, said, expected) in [
        ("a", &["batch"][..], None, Priority::Low),
        ("b", &["urgent"], None, Priority::High),
        ("c", &["urgent"], parameters("low"), Priority::Low),
        ("d", &["batch"], parameters("normal"), Priority::Low),
        ("e", &["urgent"], parameters("high"), Priority::High),
        ("f", &["critical"], None, Priority::Normal),
        ("g", &["plain"], parameters("low"), Priority::Low),
        // They share a seat. One that is gone counts no more.
        ("h", &["urgent", "batch"], None, Priority::Low),
        ("i", &["urgent", "plain"], None, Priority::Normal),
        ("j", &["gone", "urgent"], None, Priority::High),
    ] {
        server.set_claim(reserved(claim(name, &[allocated("gpu", A, &Value::Null)], said), pods));
        kubelet.prepare_one(name).await.unwrap();
        assert_eq!(scheduler.seats().pop().unwrap().given.priority, Some(expected), "{name}");
    }
    let seats = scheduler.seats().len();
    let refused = async |pods: &[&str], said, told: &str| {
        server.set_claim(reserved(claim("x", &[allocated("gpu", A, &Value::Null)], said), pods));
        let why = kubelet.prepare_one("x").await.unwrap_err();
        assert!(why.starts_with("claim default/x: ") && why.contains(told), "{why}");
    };
    refused(&["plain"], parameters("high"), "a priority in a claim that is higher than its DeviceClass")
        .await;
    let gone = "--priority-of-class: no pod that it is reserved for is there";
    refused(&["gone"], None, gone).await;
    refused(&[], None, gone).await;
    // A later pod of this name is another.
    let mut older = reserved(claim("x", &[allocated("gpu", A, &Value::Null)], None), &["urgent"]);
    older["status"]["reservedFor"][0]["uid"] = json!("older");
    server.set_claim(older);
    assert!(kubelet.prepare_one("x").await.unwrap_err().contains(gone));
    server.set_hides_pods(true);
    let hidden = "--priority-of-class: its pod urgent cannot be read: the API server says 403: ";
    refused(&["urgent"], None, hidden).await;
    machine.says(driver, hidden).await;
    assert_eq!(scheduler.seats().len(), seats, "none has a seat");
    // A claim that was prepared is known; the other is tried again.
    kubelet.prepare_one("b").await.unwrap();
    assert_eq!(scheduler.seats().pop().unwrap().given.priority, Some(Priority::High));
    server.set_hides_pods(false);
    kubelet.prepare_one("x").await.unwrap();
    assert_eq!(scheduler.seats().pop().unwrap().given.priority, Some(Priority::High));
    assert!(server.asked().iter().all(|asked| !asked.contains("pods") || asked == "GET pods"));

    // A pod without the class shares a claim later, for which the kubelet prepares nothing.
    let seat = scheduler.seats().pop().unwrap();
    let shared = claim("x", &[allocated("gpu", A, &Value::Null)], None);
    server.set_claim(reserved(shared, &["urgent", "plain"]));
    let lowered = || {
        let seats = scheduler.seats();
        let last = seats.iter().rfind(|last| last.slots == seat.slots)?;
        (last.given.priority == Some(Priority::Normal)).then_some(())
    };
    until("the claim is lowered", lowered).await;
    machine.says(driver, "claim default/x has no high priority any more: its pods bring none").await;
}

/// The kubelet was reset meanwhile, and ends none of them.
#[tokio::test]
async fn claims_that_are_gone_at_a_start_are_forgotten() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let server = ApiServer::start(&machine.root).await;
    let driver = machine.start(DRA);
    let kubelet = Claims::find(&machine.root).await;
    let of = |name| claim(name, &[allocated("gpu", A, &Value::Null)], None);
    let names = ["anew", "elsewhere", "free", "here", "removed"];
    names.iter().for_each(|name| server.set_claim(of(name)));
    let prepared = kubelet.prepare(&names).await;
    let seat = |name: &str| {
        let id = &prepared[name].devices[0].cdi_device_ids[0];
        id.strip_prefix("nvshare.com/gpu=").unwrap().to_owned()
    };
    let devices = |machine: &Machine| machine.devices().into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    let all = devices(&machine);
    let record = machine.root.join("state/claim-seats");
    assert_eq!(all.len(), names.len());
    let is_recorded = |name: &str| {
        let record = fs::read_to_string(&record).unwrap();
        record.contains(seat(name).strip_prefix("seat-").unwrap())
    };

    server.remove_claim("removed");
    let mut anew = of("anew");
    anew["metadata"]["uid"] = json!("another");
    server.set_claim(anew);
    let mut elsewhere = of("elsewhere");
    elsewhere["status"]["allocation"]["devices"]["results"][0]["pool"] = json!("two");
    server.set_claim(elsewhere);
    let mut free = of("free");
    free["status"].as_object_mut().unwrap().remove("allocation");
    server.set_claim(free);
    server.set_away(true);
    machine.kill(driver);
    let driver = machine.start(DRA);
    let _kubelet = Claims::find(&machine.root).await;
    machine.says(driver, "the ResourceSlice of this node may be out of date").await;
    assert_eq!(devices(&machine), all, "nobody says that they are gone");
    server.set_away(false);
    until("the others go", || (scheduler.removed().len() == 4).then_some(())).await;
    until("they are forgotten", || (!is_recorded("removed") && !is_recorded("free")).then_some(())).await;
    assert_eq!(devices(&machine), [seat("here")]);
    assert!(
        is_recorded("here")
            && !scheduler.removed().iter().any(|name| seat("here").contains(&name.to_string()))
    );
    machine.says(driver, "claim default/removed is gone, and was not ended here").await;
}

#[tokio::test]
async fn what_claims_leave_on_a_machine_is_removed() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    let server = ApiServer::start(&machine.root).await;
    let run = machine.root.join("run");
    let driver = machine.start(DRA);
    let claims = Claims::find(&machine.root).await;
    server.set_claim(claim("a", &[allocated("gpu", A, &Value::Null)], None));
    let devices = claims.prepare_one("a").await.unwrap();
    kubelet.list_claim("pod", &devices[0].1);
    let clean_up = format!("--clean-up --run-dir {}", run.display());
    let ends = async |machine: &mut Machine, status: i32, told: &str| {
        let number = machine.start(&clean_up);
        assert_eq!(machine.ended(number).await, status, "{}", machine.log(number));
        machine.says(number, told).await;
    };
    ends(&mut machine, 1, "an nvshare-device-plugin runs at").await;
    // The claim ends while the scheduler is away, so its seat is recorded still.
    drop(scheduler);
    assert_eq!(claims.unprepare(&["a"]).await, [""]);
    machine.kill(driver);
    let seat = devices[0].1[0].strip_prefix("nvshare.com/gpu=seat-").unwrap();
    let record = machine.root.join("state/claim-seats");
    let is_recorded = |line: &str| line.starts_with(seat);
    assert!(fs::read_to_string(&record).unwrap().lines().any(is_recorded));
    for file in ["scheduler.sock", "limits"] {
        write(&run.join("nvshare-seats").join(seat).join(file), "");
    }
    // A driver that was killed as it wrote, and the file of one that was killed as the claim ended.
    assert!(!machine.specification().exists(), "no seat has a device");
    write(&machine.specification(), "{}");
    let unfinished = machine.root.join("cdi/.nvshare.com-gpu.json.device-plugin");
    write(&unfinished, "{");
    let registry = machine.root.join("kubelet/plugins_registry");
    let other = registry.join("gpu.example.com-reg.sock");
    write(&other, "");
    ends(&mut machine, 1, "containers that have seats: 1, such as default/pod/main").await;
    assert!(record.exists() && machine.specification().exists());

    kubelet.list_pods(&[]);
    ends(&mut machine, 0, "plugins_registry/gpu.nvshare.com@localhost.sock").await;
    for gone in
        [&run.join("nvshare-seats"), &machine.root.join("state"), &machine.specification(), &unfinished]
    {
        assert!(!gone.exists(), "{}", gone.display());
    }
    let left = |folder: &std::path::Path| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    assert_eq!(left(&registry).collect::<Vec<_>>(), [other], "that of another driver stays");
    // Another one may have it mounted.
    assert_eq!(left(&machine.root.join("cdi")).count(), 0);
    assert!(machine.nvidia().exists(), "it is not ours");
    // Nothing is left to remove.
    ends(&mut machine, 0, "").await;
}
