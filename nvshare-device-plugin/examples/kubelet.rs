//! A kubelet that is played, for `tests/e2e/containers.sh`: `kubelet FOLDER POD=SLOT…`.
//!
//! It asks the plugin that registers in FOLDER for a slot for each pod, prints a line with the pod's CDI devices, and goes on as a kubelet
//! that runs these pods. Without pods it needs no plugin.

#![allow(clippy::unwrap_used, clippy::print_stdout, dead_code, missing_docs, reason = "a part of a test")]

#[path = "../tests/fakes/kubelet.rs"]
mod kubelet;

use std::path::PathBuf;
use std::time::Duration;

use nvshare_device_plugin::api::HEALTHY;
use nvshare_proto::Slot;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let mut words = std::env::args().skip(1);
    let folder = PathBuf::from(words.next().expect("the kubelet's folder"));
    let pods: Vec<(String, [Slot; 1])> = words
        .map(|word| {
            let (pod, slot) = word.split_once('=').expect("POD=SLOT");
            (pod.to_owned(), [slot.parse().expect("a slot")])
        })
        .collect();
    let kubelet = kubelet::Kubelet::start(&folder);
    if !pods.is_empty() {
        kubelet.list("healthy slots", |list| list.iter().any(|device| device.health == HEALTHY)).await;
        let asked: Vec<&[Slot]> = pods.iter().map(|(_, slot)| &slot[..]).collect();
        let got = kubelet.allocate(&asked).await.expect("slots");
        for container in got.container_responses {
            let names: Vec<String> = container.cdi_devices.into_iter().map(|device| device.name).collect();
            println!("{}", names.join(" "));
        }
    }
    let run: Vec<(&str, &[Slot])> = pods.iter().map(|(pod, slot)| (pod.as_str(), &slot[..])).collect();
    kubelet.run_pods(&run);
    std::future::pending().await
}

async fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    for _ in 0..600 {
        if let Some(found) = look() {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("this does not happen: {what}");
}
