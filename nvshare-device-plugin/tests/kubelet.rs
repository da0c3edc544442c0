//! The plugin beside a kubelet and a scheduler that are played, in a folder that is its machine.

use std::fs;
use std::io;
use std::time::Duration;

use crate::fakes::{A, B, Kubelet, Machine, Scheduler, ahead, are_all, holder, slot, until, write};
use nvshare_device_plugin::api::{
    ContainerAllocateResponse, Device, DevicePluginOptions, HEALTHY, UNHEALTHY,
};
use nvshare_proto::{GpuUuid, Seat, SeatName, Slot, TenantSettings};
use serde_json::json;
use tokio::time::sleep;
use tonic::Code;

fn names(response: &ContainerAllocateResponse) -> Vec<&str> {
    response.cdi_devices.iter().map(|device| device.name.as_str()).collect()
}

fn ours(slots: &[Slot]) -> String {
    format!("nvshare.com/gpu=seat-{}", SeatName::of(slots))
}

#[tokio::test]
async fn a_container_gets_a_seat() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    machine.start("--slots 3 --slot-memory 2GiB --slot-compute 30");

    let (request, options) = kubelet.registered(1).await;
    assert_eq!((request.version.as_str(), request.endpoint.as_str()), ("v1beta1", "nvshare.sock"));
    assert_eq!(request.resource_name, "nvshare.com/gpu");
    let wanted = DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true };
    assert_eq!((request.options, options), (Some(wanted.clone()), wanted));

    let list = kubelet.list("six slots", are_all(HEALTHY)).await;
    let node = |device: &Device| device.topology.as_ref().map(|topology| topology.nodes[0].id);
    let short: Vec<_> = list.iter().map(|device| (device.id.clone(), node(device))).collect();
    let all = [(A, None), (B, Some(1))];
    let all = all.iter().flat_map(|&(gpu, node)| (0..3).map(move |n| (slot(gpu, n).to_string(), node)));
    assert_eq!(short, all.collect::<Vec<_>>());
    assert_eq!(fs::read_to_string(machine.root.join("lib/libnvshare.so")).unwrap(), "the library");

    ahead(&scheduler, 6).await;
    // NVIDIA's names: A's UUID, and for B the number of the device that has its file.
    let [one, other] = [slot(A, 1), slot(B, 0)];
    let got = kubelet.allocate(&[&[one], &[other]]).await.unwrap().container_responses;
    assert_eq!(names(&got[0]), [ours(&[one]), format!("nvidia.com/gpu={A}")]);
    assert_eq!(names(&got[1]), [ours(&[other]), "nvidia.com/gpu=1".to_owned()]);
    assert!(got.iter().all(|container| container.envs.is_empty() && container.mounts.is_empty()));
    let given = TenantSettings { memory: Some(2 << 30), compute: Some(30), ..TenantSettings::default() };
    let seat = |slot| Seat { slots: vec![slot], given };
    let all = [A, B].into_iter().flat_map(|gpu| (0..3).map(move |number| slot(gpu, number)));
    let mut made = scheduler.seats();
    assert_eq!(made.split_off(6), [one, other].map(seat));
    made.sort_by_key(|seat| seat.slots.clone());
    assert_eq!(made, all.map(seat).collect::<Vec<_>>());

    let again = kubelet.allocate(&[&[one], &[other]]).await.unwrap().container_responses;
    assert_eq!(again, got);

    let devices = machine.devices();
    assert_eq!(devices.len(), 6, "each slot has its device ahead");
    let seat = SeatName::of(&[one]).to_string();
    let (_, device) = devices.iter().find(|(name, _)| *name == format!("seat-{seat}")).unwrap();
    let options = ["ro", "nosuid", "nodev", "bind"];
    let mount =
        |host: &str, inside: &str| json!({"hostPath": host, "containerPath": inside, "options": options});
    let library = machine.root.join("lib");
    let edits = json!({
        "env": ["LD_PRELOAD=/usr/lib/nvshare/libnvshare.so"],
        "mounts": [
            mount(library.to_str().unwrap(), "/usr/lib/nvshare"),
            mount(&format!("/var/run/nvshare-seats/{seat}"), "/var/run/nvshare"),
            mount(&format!("/var/run/nvshare-seats/{seat}"), &format!("/var/run/nvshare-seats/{seat}")),
        ],
    });
    assert_eq!(*device, json!({"name": format!("seat-{seat}"), "containerEdits": edits}));

    let free = [slot(A, 0), slot(A, 2), slot(B, 1), slot(B, 2), slot(B, 0)];
    assert_eq!(kubelet.prefer(&free, &[], 1).await, [slot(B, 0).to_string()]);
    assert_eq!(
        kubelet.prefer(&free, &[slot(B, 2)], 2).await,
        [slot(B, 2), slot(A, 0)].map(|s| s.to_string())
    );
}

#[tokio::test]
async fn what_no_container_may_have_is_refused() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    machine.start(&format!("--slots 2 --gpus {A}"));
    kubelet.list("two slots", |devices| devices.len() == 2).await;
    ahead(&scheduler, 2).await;

    let two = "request for 'nvshare.com/gpu: 2' too large: maximum request size for shared resources is 1";
    let unknown = |slot| format!("invalid allocation request for 'nvshare.com/gpu': unknown device: {slot}");
    for (asked, told) in [
        (&[slot(A, 0), slot(A, 1)][..], two.to_owned()),
        (&[slot(A, 2)], unknown(slot(A, 2))),
        (&[slot(B, 0)], unknown(slot(B, 0))),
        (&[], "invalid allocation request for 'nvshare.com/gpu': no device is named".to_owned()),
    ] {
        // The first container's seat is not made either.
        let refused = kubelet.allocate(&[&[slot(A, 0)], asked]).await.unwrap_err();
        assert_eq!(refused, (Code::InvalidArgument, told));
    }
    assert_eq!(scheduler.seats().len(), 2, "those that are made ahead");

    // The scheduler says what helps.
    for why in ["the disk is full", "no more seats: there are 3; a higher limit of open files allows more"] {
        scheduler.refuse(Some(why));
        let refused = kubelet.allocate(&[&[slot(A, 0)]]).await.unwrap_err();
        assert_eq!(refused, (Code::FailedPrecondition, format!("the scheduler refuses: {why}")));
    }
    scheduler.refuse(None);
    kubelet.allocate(&[&[slot(A, 0)]]).await.unwrap();
}

#[tokio::test]
async fn a_resource_is_called_by_its_name() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    let plugin = machine.start("--resource example.org/part");
    assert_eq!(kubelet.registered(1).await.0.resource_name, "example.org/part");
    scheduler.refuse(Some("the disk is full"));
    kubelet.allocate(&[&[slot(A, 0)]]).await.unwrap_err();
    machine.says(plugin, "example.org/part is not given out: the scheduler refuses: the disk is full").await;
}

#[tokio::test]
async fn a_set_of_gpus_outlives_the_plugin_and_the_machines_start() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    let first = machine.start("--multi-gpu --slot-memory 2GiB");
    kubelet.registered(1).await;
    ahead(&scheduler, 20).await;

    // An init container has both, and the container after it one of them.
    let [a, b] = [slot(A, 9), slot(B, 3)];
    let got = kubelet.allocate(&[&[b, a]]).await.unwrap();
    let both = [ours(&[a, b]), format!("nvidia.com/gpu={A}"), "nvidia.com/gpu=1".to_owned()];
    assert_eq!(names(&got.container_responses[0]), both);
    let then = kubelet.allocate(&[&[a]]).await.unwrap();
    assert_eq!(names(&then.container_responses[0]), [ours(&[a]), format!("nvidia.com/gpu={A}")]);
    assert_eq!(scheduler.seats().len(), 22);
    kubelet.keep_answers(&[&[b, a], &[a]]);
    let same = kubelet.allocate(&[&[a, slot(A, 1)]]).await.unwrap_err();
    assert!(
        same.1.ends_with(&format!("several slots of {A}; a container gets one slot of a GPU")),
        "{same:?}"
    );
    let devices = machine.devices();
    assert_eq!(devices.len(), 21);
    let has = |seat: &[Slot]| devices.iter().any(|(name, _)| *name == format!("seat-{}", SeatName::of(seat)));
    assert!(has(&[a, b]) && has(&[a]));

    // The folder is emptied while the plugin runs.
    fs::remove_file(machine.specification()).unwrap();
    until("the specification is back", || machine.specification().exists().then_some(())).await;
    assert_eq!(machine.devices(), devices);

    // The machine starts anew; a line of the record is torn.
    machine.kill(first);
    drop((kubelet, scheduler));
    let scheduler = Scheduler::start(&machine.root, 2);
    fs::remove_dir_all(machine.root.join("cdi")).unwrap();
    let record = machine.root.join("state/device-plugin-seats");
    let text = fs::read_to_string(&record).unwrap();
    write(&record, &format!("{text}dabc7573cefc8f50 GPU-0101"));
    let kubelet = Kubelet::start(&machine.root);
    let second = machine.start("--multi-gpu");
    kubelet.registered(1).await;
    // It is there before the kubelet starts a container.
    assert_eq!(machine.devices(), devices);
    let torn =
        format!("{}: line {} names no seat and is left out", record.display(), text.lines().count() + 1);
    machine.says(second, &torn).await;
    // Another run of the scheduler gets both seats, with the limits that they had. Those that no container has get new ones.
    let old = TenantSettings { memory: Some(2 << 30), ..TenantSettings::default() };
    ahead(&scheduler, 21 + 19).await;
    let mut again = scheduler.seats();
    let anew = again.split_off(21);
    assert!(again.iter().all(|seat| seat.given == old), "{again:?}");
    assert!(anew.iter().all(|seat| seat.given == TenantSettings::default() && seat.slots != [a]), "{anew:?}");
    assert_eq!(kubelet.allocate(&[&[b, a]]).await.unwrap(), got);
    assert_eq!(kubelet.allocate(&[&[a]]).await.unwrap(), then);
}

#[tokio::test]
async fn a_set_that_no_container_may_have_again_is_removed() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    let plugin = machine.start("--multi-gpu --keep-unused 1");
    kubelet.registered(1).await;
    let [init, app, other, late] = [
        vec![slot(A, 0), slot(B, 0)],
        vec![slot(A, 0)],
        vec![slot(A, 1), slot(B, 1)],
        vec![slot(A, 2), slot(B, 2)],
    ];
    let has = |machine: &Machine, slots: &[Slot]| {
        machine.devices().iter().any(|(name, _)| ours(slots).ends_with(name.as_str()))
    };
    // The init container of the first pod is in no list; the kubelet may start it again.
    kubelet.allocate(&[&init]).await.unwrap();
    kubelet.allocate(&[&app]).await.unwrap();
    kubelet.allocate(&[&other]).await.unwrap();
    kubelet.keep_answers(&[&init, &app, &other]);
    kubelet.list_pods(&[("one", &app), ("other", &other)]);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(scheduler.removed(), []);

    // The other pod is gone.
    kubelet.run_pods(&[("one", &app)]);
    kubelet.keep_answers(&[&init, &app]);
    let removed = async |times: usize| {
        until("it is removed", || (scheduler.removed().len() >= times).then_some(())).await;
        assert_eq!(scheduler.removed(), vec![SeatName::of(&other); times]);
    };
    removed(1).await;
    until("its device is gone", || (!has(&machine, &other)).then_some(())).await;
    assert!(has(&machine, &init) && has(&machine, &app));
    machine.says(plugin, "seats that are removed, as no container has had them for 1 s: 1").await;
    // It is there again for the next container.
    kubelet.allocate(&[&other]).await.unwrap();
    assert!(has(&machine, &other));
    removed(2).await;

    // If the kubelet lists a pod that its record lacks, or the record is unreadable, the plugin removes no seat.
    kubelet.allocate(&[&late]).await.unwrap();
    kubelet.list_pods(&[("late", &late)]);
    let count = scheduler.removed().len();
    sleep(Duration::from_secs(2)).await;
    write(&machine.root.join("kubelet/device-plugins/kubelet_internal_checkpoint"), "{}");
    machine.says(plugin, "no seat is removed").await;
    kubelet.list_pods(&[]);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(scheduler.removed().len(), count);
    // While a process uses it, it stays.
    scheduler.refuse(Some("seat is in use"));
    kubelet.keep_answers(&[&init, &app]);
    machine.says(plugin, "stays: seat is in use").await;
    assert!(has(&machine, &late));
    scheduler.refuse(None);
    let both = count + 2;
    until("it is tried again", || (scheduler.removed().len() >= both).then_some(())).await;
    until("its device is gone", || (!has(&machine, &late)).then_some(())).await;
}

#[tokio::test]
async fn a_set_that_the_kubelet_has_and_the_record_lost_is_there_again() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    let set = vec![slot(A, 4), slot(B, 4)];
    kubelet.keep_answers(&[&set]);
    let plugin = machine.start("--multi-gpu --slot-memory 2GiB");
    machine.says(plugin, "was not recorded any more; it is again").await;
    let given = TenantSettings { memory: Some(2 << 30), ..TenantSettings::default() };
    assert!(scheduler.seats().contains(&Seat { slots: set.clone(), given }));
    let is_there = || machine.devices().iter().any(|(name, _)| ours(&set).ends_with(name.as_str()));
    until("its device is there", || is_there().then_some(())).await;
}

#[tokio::test]
async fn a_gpu_that_is_lost_or_divided_gives_out_no_slot_until_it_is_back() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    let plugin = machine.start("--slots 1");
    kubelet.list("two slots", are_all(HEALTHY)).await;
    ahead(&scheduler, 2).await;
    // A container has the slot of a GPU that will be lost.
    let given = kubelet.allocate(&[&[slot(A, 0)]]).await.unwrap();
    let health = |a: &'static str, b: &'static str| {
        move |devices: &[Device]| devices.iter().map(|device| device.health.as_str()).eq([a, b])
    };
    let (gpu, away) = (machine.root.join("gpus/0000:02:00.0"), machine.root.join("away"));
    fs::rename(&gpu, &away).unwrap();
    kubelet.list("B is lost", health(HEALTHY, UNHEALTHY)).await;
    machine.says(plugin, &format!("{B} is not there any more, or its driver does not answer")).await;
    fs::rename(&away, &gpu).unwrap();
    kubelet.list("B is back", are_all(HEALTHY)).await;
    machine.says(plugin, &format!("slots of {B} are given out again")).await;

    let part = machine.root.join("capabilities/gpu0/mig/gi1");
    fs::create_dir_all(&part).unwrap();
    kubelet.list("A is divided", health(UNHEALTHY, HEALTHY)).await;
    machine.says(plugin, &format!("{A} is in MIG mode, and nvshare shares whole GPUs only")).await;
    fs::remove_dir(&part).unwrap();
    kubelet.list("A is whole", are_all(HEALTHY)).await;

    // A plugin that starts while a GPU is lost serves the others. The container that has the lost one can start again as it was.
    let gpu = machine.root.join("gpus/0000:01:00.0");
    fs::rename(&gpu, &away).unwrap();
    let devices = machine.devices();
    machine.kill(plugin);
    let plugin = machine.start(&format!("--slots 1 --gpus {A},{B}"));
    kubelet.registered(2).await;
    // It comes behind those that are there.
    kubelet.list("B alone", health(HEALTHY, UNHEALTHY)).await;
    machine.says(plugin, &format!("{A} is not there any more, or its driver does not answer")).await;
    kubelet.allocate(&[&[slot(B, 0)]]).await.unwrap();
    assert_eq!(machine.devices(), devices);
    fs::rename(&away, &gpu).unwrap();
    kubelet.list("A is back again", are_all(HEALTHY)).await;
    assert_eq!(kubelet.allocate(&[&[slot(A, 0)]]).await.unwrap(), given);

    // The driver is gone.
    fs::rename(machine.root.join("gpus"), machine.root.join("none")).unwrap();
    kubelet.list("no driver", are_all(UNHEALTHY)).await;
}

#[tokio::test]
async fn a_kubelet_that_starts_again_finds_the_plugin() {
    let mut machine = Machine::new();
    let _scheduler = Scheduler::start(&machine.root, 1);
    let plugin = machine.start("");
    machine.says(plugin, "waiting for a kubelet at").await;
    let first = Kubelet::start(&machine.root);
    first.registered(1).await;
    first.list("all slots", |devices| devices.len() == 20).await;
    assert_eq!(first.lists(), 1);

    drop(first);
    let second = Kubelet::start(&machine.root);
    second.registered(1).await;
    second.list("all slots", |devices| devices.len() == 20).await;

    // Somebody removes the plugin's socket alone.
    fs::remove_file(machine.root.join("kubelet/device-plugins/nvshare.sock")).unwrap();
    second.registered(2).await;
    second.allocate(&[&[slot(A, 0)]]).await.unwrap();
}

#[tokio::test]
async fn the_scheduler_learns_whose_the_seats_are() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    machine.start("--multi-gpu");
    kubelet.registered(1).await;
    ahead(&scheduler, 20).await;
    let [set, one] = [vec![slot(A, 0), slot(B, 7)], vec![slot(A, 1)]];
    let [set_name, one_name] = [SeatName::of(&set), SeatName::of(&one)];
    kubelet.allocate(&[&set]).await.unwrap();
    kubelet.run_pods(&[("set", &set)]);
    // Each that the scheduler was told to have a seat, and none.
    let said = |seat| -> Vec<_> {
        let all = scheduler.held().concat();
        all.into_iter().filter(|(name, _)| *name == seat).map(|(_, holder)| holder).collect()
    };
    let told = async |seat, holder: Option<&str>| {
        let is_last = || said(seat).last() == Some(&holder.map(crate::fakes::holder));
        until("the scheduler is told", || is_last().then_some(())).await;
    };
    told(set_name, Some("set")).await;

    kubelet.allocate(&[&one]).await.unwrap();
    kubelet.run_pods(&[("set", &set), ("one", &one)]);
    told(one_name, Some("one")).await;
    kubelet.run_pods(&[("one", &one)]);
    told(set_name, None).await;
    assert!(said(set_name).windows(2).all(|two| two[0] != two[1]), "only what has changed is told");
    // A pod of the same name comes before anybody has seen that the first one is gone.
    let before = said(one_name).len();
    kubelet.allocate(&[&one]).await.unwrap();
    until("it is told anew", || (said(one_name).len() >= before + 2).then_some(())).await;
    assert_eq!(said(one_name)[before..before + 2], [None, Some(holder("one"))]);
}

#[tokio::test]
async fn without_devices_of_nvidia_no_slot_is_offered() {
    let mut machine = Machine::new();
    let _scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    fs::remove_file(machine.nvidia()).unwrap();
    let plugin = machine.start("");
    kubelet.registered(1).await;
    assert_eq!(kubelet.list("an empty list", <[Device]>::is_empty).await, []);
    machine
        .says(plugin, "no CDI device of kind nvidia.com/gpu nor of k8s.device-plugin.nvidia.com/gpu is in")
        .await;
    let (code, why) = kubelet.allocate(&[&[slot(A, 0)]]).await.unwrap_err();
    assert_eq!((code, why), (Code::FailedPrecondition, format!("no CDI device of NVIDIA has {A}")));

    // One is written badly at first.
    write(&machine.nvidia(), "kind: [");
    machine.says(plugin, "nvidia.yaml: no specification of devices:").await;
    machine.generate_nvidia();
    kubelet.list("all slots", are_all(HEALTHY)).await;
    kubelet.allocate(&[&[slot(A, 0)]]).await.unwrap();
}

#[tokio::test]
async fn where_engines_know_no_devices_containers_get_variables_and_mounts() {
    let mut machine = Machine::new();
    let _scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    fs::remove_file(machine.nvidia()).unwrap();
    machine.start("--device-list-strategy envvar --preload file");
    kubelet.list("all slots", are_all(HEALTHY)).await;
    let got = kubelet.allocate(&[&[slot(B, 0)]]).await.unwrap().container_responses;
    let variables: Vec<_> = got[0].envs.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    assert_eq!(variables, [("NVIDIA_VISIBLE_DEVICES", B.to_string().as_str())]);
    let file = &got[0].mounts[3];
    assert_eq!((file.container_path.as_str(), file.read_only), ("/etc/ld.so.preload", true));
    assert_eq!(fs::read_to_string(&file.host_path).unwrap(), "/usr/lib/nvshare/libnvshare.so\n");
    assert!(!machine.specification().exists());
}

#[tokio::test]
async fn two_plugins_do_not_quarrel() {
    let mut machine = Machine::new();
    let _scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    let first = machine.start("");
    kubelet.registered(1).await;
    let second = machine.start("");
    machine.says(second, "waiting for another nvshare-device-plugin").await;
    kubelet.allocate(&[&[slot(A, 0)]]).await.unwrap();
    assert!(!machine.log(second).contains("registered"));
    machine.kill(first);
    kubelet.registered(2).await;
    kubelet.allocate(&[&[slot(A, 0)]]).await.unwrap();
}

#[tokio::test]
async fn a_gpu_that_is_not_ready_is_waited_for() {
    let mut machine = Machine::new();
    let _scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    let third = machine.root.join("gpus/0000:03:00.0/information");
    write(&third, "GPU UUID: \t GPU-????????-????-????-????-????????????\n");
    let waits = machine.start("--device-list-strategy envvar");
    machine.says(waits, "the UUIDs of 2 of 3 GPUs can be read; waiting").await;
    write(&third, &format!("GPU UUID: \t {}\n", GpuUuid([3; 16])));
    let list = kubelet.list("the slots of three GPUs", |devices| !devices.is_empty()).await;
    assert_eq!(list.len(), 30);

    // GPUs that are named and there need no other.
    machine.kill(waits);
    write(&third, "GPU UUID: \t GPU-????????-????-????-????-????????????\n");
    let named = machine.start(&format!("--device-list-strategy envvar --gpus {A}"));
    kubelet.registered(2).await;
    assert!(!machine.log(named).contains("waiting for the others"));
}

#[tokio::test]
async fn a_gpu_that_comes_too_late_is_offered_by_the_next_plugin() {
    let mut machine = Machine::new();
    let _scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    let third = machine.root.join("gpus/0000:03:00.0/information");
    write(&third, "GPU UUID: \t GPU-????????-????-????-????-????????????\n");
    let options = "--device-list-strategy envvar --hurry 60";
    let plugin = machine.start_usual(options);
    assert_eq!(kubelet.list("the slots of two GPUs", |devices| !devices.is_empty()).await.len(), 20);
    machine.says(plugin, "2 of 3 GPUs are offered: the UUIDs of the others cannot be read").await;
    let late = GpuUuid([3; 16]);
    write(&third, &format!("GPU UUID: \t {late}\n"));
    assert_eq!(machine.ended(plugin).await, 1);
    machine.says(plugin, &format!("{late} was not there at the start: a new start offers it, too")).await;
    machine.start_usual(options);
    kubelet.list("the slots of three GPUs", |devices| devices.len() == 30).await;
}

#[tokio::test]
async fn what_cannot_be_had_is_said_at_the_start() {
    let mut machine = Machine::new();
    let missing = GpuUuid([3; 16]);
    let plugin = machine.start(&format!("--gpus {missing}"));
    assert_eq!(machine.ended(plugin).await, 1);
    machine.says(plugin, &format!("--gpus: {missing} is not there; this machine has {A}, {B}")).await;

    fs::remove_file(machine.root.join("build/libnvshare.so")).unwrap();
    let plugin = machine.start("");
    assert_eq!(machine.ended(plugin).await, 1);
    machine.says(plugin, "build/libnvshare.so: No such file").await;

    fs::rename(machine.root.join("gpus"), machine.root.join("none")).unwrap();
    write(&machine.root.join("build/libnvshare.so"), "the library");
    let plugin = machine.start("");
    machine.says(plugin, "no GPU is there yet").await;
    machine.kill(plugin);
    write(
        &machine.root.join("gpus/0000:01:00.0/information"),
        "GPU UUID: \t GPU-????????-????-????-????-????????????\n",
    );
    let plugin = machine.start("");
    machine.says(plugin, "no GPU of 1 in").await;
    machine.kill(plugin);
    let plugin = machine.start("--slots 1000 --also two=slots=1000 --also three=slots=1000");
    fs::remove_dir_all(machine.root.join("gpus")).unwrap();
    fs::rename(machine.root.join("none"), machine.root.join("gpus")).unwrap();
    assert_eq!(machine.ended(plugin).await, 1);
    machine.says(plugin, "2 GPUs would have 6000 slots together, and a scheduler has 4096 seats").await;
}

#[tokio::test]
async fn an_upgrade_leaves_programs_the_library_that_they_have() {
    let mut machine = Machine::new();
    let library = machine.root.join("lib/libnvshare.so");
    let plugin = machine.start("");
    machine.says(plugin, "installed").await;
    let mut mapped = fs::File::open(&library).unwrap();
    machine.kill(plugin);

    write(&machine.root.join("build/libnvshare.so"), "the next one");
    let plugin = machine.start("");
    machine.says(plugin, "installed").await;
    assert_eq!(fs::read_to_string(&library).unwrap(), "the next one");
    assert_eq!(io::read_to_string(&mut mapped).unwrap(), "the library");
    assert_eq!(fs::read_dir(machine.root.join("lib")).unwrap().count(), 1, "no other file is left");
}

#[tokio::test]
async fn what_is_left_on_a_machine_is_removed_when_no_pod_needs_it() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    let at = |name: &str| machine.root.join(name);
    let (features, run) = (at("features"), at("run"));
    let left = [at("cdi"), at("lib"), at("state"), features.clone(), run.clone()];
    let places = format!("--features-dir {} --run-dir {}", features.display(), run.display());
    let plugin = machine.start(&places);
    kubelet.registered(1).await;
    assert_eq!(
        fs::read_to_string(features.join("nvshare")).unwrap(),
        "nvshare.com/gpu.count=2\nnvshare.com/gpu.slots=10\n"
    );
    kubelet.allocate(&[&[slot(A, 0)]]).await.unwrap();
    kubelet.run_pods(&[("one", &[slot(A, 0)])]);
    // Files of the scheduler.
    for file in ["nvshare-seats/dabc7573cefc8f50/limits", "nvshare-seats/.new/x", "nvshare/scheduler.sock"] {
        write(&run.join(file), "");
    }
    write(&machine.root.join("state/state.seats/dabc7573cefc8f50"), "");

    let clean_up = format!("--clean-up {places}");
    let refused = async |machine: &mut Machine, why: &str| {
        let number = machine.start(&clean_up);
        assert_eq!(machine.ended(number).await, 1);
        machine.says(number, why).await;
    };
    refused(&mut machine, "an nvshare-device-plugin runs at").await;
    machine.kill(plugin);
    refused(&mut machine, "a scheduler answers at").await;
    drop(scheduler);
    refused(&mut machine, "containers that have seats: 1, such as default/one/main").await;
    drop(kubelet);
    refused(&mut machine, "pod-resources/kubelet.sock").await;
    assert!(machine.specification().exists() && machine.root.join("lib/libnvshare.so").exists());

    // A kubelet that has just started lists nothing, and its record is there.
    let kubelet = Kubelet::start(&machine.root);
    refused(&mut machine, "the kubelet's record names seats: 1").await;
    kubelet.run_pods(&[]);
    // Of a plugin that had another resource.
    let socket = machine.root.join("kubelet/device-plugins/nvshare-small.sock");
    write(&socket, "");
    // Twice: it does not matter whether anything is left.
    for _ in 0..2 {
        let number = machine.start(&clean_up);
        assert_eq!(machine.ended(number).await, 0, "{}", machine.log(number));
        let files = |folder: &std::path::Path| fs::read_dir(folder).into_iter().flatten().count();
        assert!(left.iter().all(|folder| files(folder) == 0), "{left:?}");
    }
    assert!(machine.nvidia().exists(), "it is not ours");
    assert!(!socket.exists());
}
