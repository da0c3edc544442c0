//! Further resources beside the main one, with a kubelet and a scheduler that are played.

use std::fs;
use std::time::Duration;

use crate::fakes::{A, B, Kubelet, Machine, Scheduler, ahead, are_all, holder, slot, until};
use nvshare_device_plugin::api::HEALTHY;
use nvshare_device_plugin::resources::Numbers;
use nvshare_proto::{Priority, Seat, SeatName, Slot, TenantSettings};
use tokio::time::sleep;
use tonic::Code;

const MAIN: &str = "nvshare.com/gpu";
const ROWS: &str = "--slots 3 --slot-memory 2GiB --also small=memory=512m,slots=2 \
                    --also high=compute=50,priority=high,slots=1,weight=300";

/// The slot of a seat that the kubelet calls so in a further resource.
fn of(row: &str, slot: Slot) -> Slot {
    let numbers = Numbers::of_resource(&format!("{MAIN}.{row}"), MAIN).unwrap();
    numbers.slot(&slot.to_string()).unwrap()
}

const fn memory(bytes: u64) -> TenantSettings {
    TenantSettings {
        memory: Some(bytes),
        weight: None,
        priority: None,
        compute: None,
        enforcement: None,
        paused: None,
    }
}

const SMALL: TenantSettings = memory(512 << 20);

fn high() -> TenantSettings {
    TenantSettings { compute: Some(50), priority: Some(Priority::High), weight: Some(300), ..memory(2 << 30) }
}

#[tokio::test]
async fn each_resource_has_its_own_slots_and_a_seat_the_limits_of_its_resource() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    let plugin = machine.start(ROWS);
    let (small, urgent) = (kubelet.of("small"), kubelet.of("high"));
    for (counted, name, socket, count) in [
        (&*kubelet, MAIN, "nvshare.sock", 6),
        (&small, "nvshare.com/gpu.small", "nvshare-small.sock", 4),
        (&urgent, "nvshare.com/gpu.high", "nvshare-high.sock", 2),
    ] {
        let (request, _) = counted.registered(1).await;
        assert_eq!((request.resource_name.as_str(), request.endpoint.as_str()), (name, socket));
        let list = counted.list("its slots", are_all(HEALTHY)).await;
        assert_eq!((list.len(), list[0].id.as_str()), (count, &*slot(A, 0).to_string()));
        machine.says(plugin, &format!("registered {name} at")).await;
    }
    ahead(&scheduler, 12).await;

    // The same name of a slot is another seat in each resource.
    let a = slot(A, 0);
    let slots = [a, of("small", a), of("high", a)];
    let mut devices = Vec::new();
    for (counted, slot, given) in
        [(&*kubelet, slots[0], memory(2 << 30)), (&small, slots[1], SMALL), (&urgent, slots[2], high())]
    {
        let got = counted.allocate(&[&[a]]).await.unwrap().container_responses;
        assert_eq!(scheduler.seats().last(), Some(&Seat { slots: vec![slot], given }));
        let device = got[0].cdi_devices[0].name.clone();
        assert_eq!(device, format!("{MAIN}=seat-{}", SeatName::of(&[slot])));
        devices.push(device);
    }
    devices.dedup();
    assert_eq!((devices.len(), machine.devices().len()), (3, 12));
    let seats = scheduler.seats();
    let made_ahead = |slot, given| seats[..12].contains(&Seat { slots: vec![slot], given });
    assert!(made_ahead(slot(B, 2), memory(2 << 30)) && made_ahead(of("small", slot(B, 1)), SMALL));
    assert!(made_ahead(of("high", slot(B, 0)), high()));

    // A slot that is not offered is refused by the resource's own name, though another resource has it.
    let refused = small.allocate(&[&[slot(A, 2)]]).await.unwrap_err();
    let why =
        format!("invalid allocation request for 'nvshare.com/gpu.small': unknown device: {}", slot(A, 2));
    assert_eq!(refused, (Code::InvalidArgument, why));
    machine.says(plugin, "nvshare.com/gpu.small is not given out: invalid allocation request").await;

    // The kubelet says of each resource which pod has it.
    kubelet.run_pods(&[("main", &[a])]);
    small.run_pods(&[("tiny", &[a])]);
    let is_told = |slot, pod| {
        let told = (SeatName::of(&[slot]), Some(holder(pod)));
        scheduler.held().iter().flatten().any(|held| *held == told)
    };
    until("both are told", || (is_told(slots[0], "main") && is_told(slots[1], "tiny")).then_some(())).await;
}

#[tokio::test]
async fn all_resources_are_registered_again_when_the_kubelet_starts_again() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    machine.start(ROWS);
    ahead(&scheduler, 12).await;
    let all = |kubelet: &Kubelet| [kubelet.of("small"), kubelet.of("high")];
    for counted in [(*kubelet).clone()].into_iter().chain(all(&kubelet)) {
        counted.registered(1).await;
    }
    drop(kubelet);
    let kubelet = Kubelet::start(&machine.root);
    kubelet.registered(1).await;
    for counted in all(&kubelet) {
        counted.registered(1).await;
        counted.allocate(&[&[slot(A, 0)]]).await.unwrap();
    }
    // A socket that is gone is made again; the others stay.
    fs::remove_file(machine.root.join("kubelet/device-plugins/nvshare-small.sock")).unwrap();
    kubelet.of("small").registered(2).await;
    kubelet.of("small").allocate(&[&[slot(A, 1)]]).await.unwrap();
    assert_eq!((kubelet.registrations(), kubelet.of("high").registrations()), (1, 1));
}

#[tokio::test]
async fn a_seat_of_a_resource_outlives_its_record_and_the_resource() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    let a = slot(A, 1);
    let seat = Seat { slots: vec![of("small", a)], given: SMALL };
    // The kubelet's record names it, and ours does not.
    kubelet.of("small").run_pods(&[("tiny", &[a])]);
    let plugin = machine.start(ROWS);
    machine.says(plugin, "was not recorded any more; it is again").await;
    assert!(scheduler.seats().contains(&seat));

    // Another order, other limits, and one resource less: the container has its seat as long as the kubelet says so.
    machine.kill(plugin);
    let before = scheduler.seats().len();
    let plugin = machine.start("--keep-unused 1 --also other=slots=1");
    let is_made = || scheduler.seats()[before..].contains(&seat);
    until("it is made again, with its limits", || is_made().then_some(())).await;
    let gone = SeatName::of(&[of("small", slot(A, 0))]);
    until("one that no container has goes", || scheduler.removed().contains(&gone).then_some(())).await;
    sleep(Duration::from_secs(2)).await;
    assert!(!scheduler.removed().contains(&seat.name()));
    kubelet.of("small").run_pods(&[]);
    until("it goes", || scheduler.removed().contains(&seat.name()).then_some(())).await;
    machine.says(plugin, "seats that are removed").await;
}

#[tokio::test]
async fn rows_that_cannot_be_had_are_said_at_the_start() {
    let mut machine = Machine::new();
    for (options, status, why) in [
        ("--also a=slots=1 --also a=slots=2", 1, "--also a: there are two rows of this name"),
        ("--api dra --node-name n --also a=slots=1", 1, "--also: with --api dra there are no slots"),
        ("--priority-of-class a=low", 1, "--priority-of-class: a device plugin sees no pods; --also offers"),
        ("--also a=slots=0", 2, "\"0\" is no number of slots; accepted: 1 to 1000"),
        ("--also a=size=1g", 2, "\"size\" is no key; accepted: slots, memory, compute, weight, priority"),
    ] {
        let plugin = machine.start(options);
        assert_eq!(machine.ended(plugin).await, status, "{options}");
        machine.says(plugin, why).await;
    }
}
