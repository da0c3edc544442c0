//! A machine whose folders are not as they should be, wrong options, and a kubelet that refuses: each is said with its path, and nothing goes
//! round in circles.

use std::fs;
use std::time::Duration;

use nvshare_device_plugin::api::HEALTHY;
use nvshare_proto::GpuUuid;
use tokio::time::sleep;

use crate::fakes::{A, B, Kubelet, Machine, Scheduler, ahead, are_all, slot, write};

#[tokio::test]
async fn a_folder_that_cannot_be_had_at_the_start_ends_the_plugin() {
    for (folder, path) in [("lib", "lib/libnvshare.so"), ("state", "state/claim-seats")] {
        let mut machine = Machine::new();
        write(&machine.root.join(folder), "it is a file");
        let plugin = machine.start("");
        assert_eq!(machine.ended(plugin).await, 1);
        let log = machine.log(plugin);
        let path = machine.root.join(path).display().to_string();
        let said = log.lines().filter(|line| line.contains("ERROR") && line.contains(&path)).count();
        assert_eq!((said, log.lines().count() < 5), (1, true), "{log}");
    }
}

#[tokio::test]
async fn a_folder_of_devices_that_cannot_be_written_is_said_and_waited_for() {
    let mut machine = Machine::new();
    let _scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    let folder = machine.root.join("cdi");
    write(&folder, "it is a file");
    let plugin = machine.start("");
    machine.says(plugin, &format!("{}: ", machine.specification().display())).await;
    sleep(Duration::from_secs(3)).await;
    assert!(
        kubelet.registrations() == 0 && machine.log(plugin).lines().count() < 10,
        "{}",
        machine.log(plugin)
    );
    fs::remove_file(&folder).unwrap();
    kubelet.registered(1).await;
    assert!(machine.specification().exists());
}

#[tokio::test]
async fn a_record_that_cannot_be_written_fails_the_pod_with_its_path() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    // A folder has the name under which the file is made, before it is renamed.
    let new = machine.root.join("state/.device-plugin-seats.device-plugin");
    write(&new.join("x"), "");
    let plugin = machine.start("");
    kubelet.list("all slots", are_all(HEALTHY)).await;
    let (_, why) = kubelet.allocate(&[&[slot(A, 0)]]).await.unwrap_err();
    let record = machine.root.join("state/device-plugin-seats").display().to_string();
    assert!(why.starts_with(&record), "{why}");
    machine.says(plugin, &format!("nvshare.com/gpu is not given out: {record}")).await;
    fs::remove_dir_all(&new).unwrap();
    ahead(&scheduler, 20).await;
    kubelet.allocate(&[&[slot(A, 0)]]).await.unwrap();
}

#[tokio::test]
async fn a_kubelets_folder_that_is_none_is_said_and_waited_for() {
    let mut machine = Machine::new();
    let _scheduler = Scheduler::start(&machine.root, 1);
    let folder = machine.root.join("kubelet/device-plugins");
    fs::remove_dir(&folder).unwrap();
    let plugin = machine.start("");
    machine.says(plugin, &format!("waiting for a kubelet at {}: No such file", folder.display())).await;
    fs::create_dir(&folder).unwrap();
    // The plugin's own socket cannot be made.
    let own = folder.join("nvshare.sock");
    let kubelet = Kubelet::start(&machine.root);
    kubelet.registered(1).await;
    machine.kill(plugin);
    fs::remove_file(&own).unwrap();
    write(&own.join("x"), "");
    let plugin = machine.start("");
    machine.says(plugin, &format!("{}: Address already in use", own.display())).await;
    sleep(Duration::from_secs(3)).await;
    assert!(machine.log(plugin).lines().count() < 10, "{}", machine.log(plugin));
    fs::remove_dir_all(&own).unwrap();
    kubelet.registered(2).await;
}

#[tokio::test]
async fn a_kubelet_that_refuses_is_asked_more_and_more_seldom() {
    let mut machine = Machine::new();
    let _scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    kubelet.refuse(Some("requested API version \"v1beta1\" is not supported by kubelet"));
    let plugin = machine.start("");
    let socket = machine.root.join("kubelet/device-plugins/kubelet.sock");
    let why = "requested API version \"v1beta1\" is not supported by kubelet";
    machine.says(plugin, &format!("not registered at {}: {why}", socket.display())).await;
    sleep(Duration::from_secs(5)).await;
    // After 1/4 s, 1/2 s, 1 s, 2 s and 4 s.
    assert!((3..=6).contains(&kubelet.refused()), "{} times", kubelet.refused());
    let log = machine.log(plugin);
    assert_eq!(log.lines().filter(|line| line.contains(why)).count(), 1, "{log}");
    kubelet.refuse(None);
    kubelet.registered(1).await;
    kubelet.list("all slots", are_all(HEALTHY)).await;
}

#[tokio::test]
async fn each_node_has_a_file_of_its_gpus() {
    let mut machine = Machine::new();
    let _scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    let folder = machine.root.join("gpus-of");
    let of = |node: &str| folder.join(node);
    write(&of("one"), &format!("{B}\n"));
    write(&of("empty"), "");
    let option = |node: &str| format!("--slots 2 --gpus-of {}", of(node).display());
    let plugin = machine.start(&option("one"));
    let list = kubelet.list("the slots of B", are_all(HEALTHY)).await;
    assert_eq!(
        list.iter().map(|device| device.id.clone()).collect::<Vec<_>>(),
        [0, 1].map(|n| slot(B, n).to_string())
    );
    machine.kill(plugin);

    // Another node is not in the map.
    let plugin = machine.start(&option("other"));
    machine.says(plugin, &format!("--gpus-of: {} is not there, so all GPUs", of("other").display())).await;
    kubelet.registered(2).await;
    kubelet.list("the slots of both", |devices| devices.len() == 4).await;
    machine.kill(plugin);

    for (node, why) in [("empty", "it names no GPU"), ("none/one", "No such file")] {
        let plugin = machine.start(&option(node));
        assert_eq!(machine.ended(plugin).await, 1);
        machine.says(plugin, &format!("--gpus-of: {}: {why}", of(node).display())).await;
    }
}

#[tokio::test]
async fn a_next_plugin_that_cannot_serve_takes_nothing_from_the_one_that_does() {
    let mut machine = Machine::new();
    let _scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    machine.start("");
    kubelet.registered(1).await;
    // Behind the lock they would wait for the first one, and say nothing.
    for (options, why) in [
        (format!("--gpus {}", GpuUuid([3; 16])), "is not there; this machine has"),
        (format!("--gpus-of {}", machine.root.join("none/one").display()), "none/one: No such file"),
        ("--slots 1000 --also two=slots=1000 --also three=slots=1000".to_owned(), "has 4096 seats"),
    ] {
        let next = machine.start(&options);
        assert_eq!(machine.ended(next).await, 1);
        machine.says(next, why).await;
    }
    fs::remove_file(machine.root.join("build/libnvshare.so")).unwrap();
    let next = machine.start("");
    assert_eq!(machine.ended(next).await, 1);
    machine.says(next, "build/libnvshare.so: No such file").await;
    kubelet.allocate(&[&[slot(A, 0)]]).await.unwrap();
    assert_eq!(kubelet.registrations(), 1);
}

#[tokio::test]
async fn a_clean_up_without_the_folder_of_features_is_refused() {
    let mut machine = Machine::new();
    let (features, run) = (machine.root.join("features"), machine.root.join("run"));
    let places = format!("--features-dir {} --run-dir {}", features.display(), run.display());
    let plugin = machine.start(&format!("--clean-up {places}"));
    assert_eq!(machine.ended(plugin).await, 1);
    machine.says(plugin, &format!("--features-dir: {} is no folder", features.display())).await;
}
