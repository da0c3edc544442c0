//! Settings of claims beside their capacities, and the files and folders that claims leave on a machine.

use std::fs;

use crate::dra::DRA;
use crate::fakes::{A, ApiServer, B, Claims, Kubelet, Machine, Scheduler, allocated, claim, write};
use nvshare_proto::SeatName;
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
    assert!(fs::read_to_string(&record).unwrap().starts_with(seat));
    for file in ["scheduler.sock", "limits"] {
        write(&run.join("nvshare-seats").join(seat).join(file), "");
    }
    // A driver that was killed as it wrote.
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
