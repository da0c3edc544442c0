//! The plugin while the scheduler, which is played, is away, is replaced or starts again.

use std::time::{Duration, Instant};

use crate::fakes::{A, B, Kubelet, Machine, Scheduler, ahead, are_all, holder, slot, until};
use nvshare_device_plugin::api::{HEALTHY, UNHEALTHY};
use nvshare_proto::{SeatName, Slot};
use tokio::time::sleep;
use tonic::Code;

#[tokio::test]
async fn no_slot_is_healthy_without_a_scheduler() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    let plugin = machine.start("--multi-gpu --grace 2");
    kubelet.registered(1).await;
    kubelet.list("healthy slots", are_all(HEALTHY)).await;
    kubelet.allocate(&[&[slot(A, 0)]]).await.unwrap();
    kubelet.run_pods(&[("one", &[slot(A, 0)])]);
    until("the pod is told", || scheduler.held().iter().flatten().any(|held| held.1.is_some()).then_some(()))
        .await;

    drop(scheduler);
    kubelet.list("slots that are not healthy", are_all(UNHEALTHY)).await;
    let (code, why) = kubelet.allocate(&[&[slot(A, 1), slot(B, 1)]]).await.unwrap_err();
    assert_eq!(code, Code::Unavailable);
    assert!(why.starts_with("no scheduler answers at"), "{why}");
    machine.says(plugin, "until then no seat is given out").await;

    // Another run of it knows nothing of seats and pods.
    let scheduler = Scheduler::start(&machine.root, 2);
    kubelet.list("healthy slots", are_all(HEALTHY)).await;
    let held = until("all is told", || scheduler.held().into_iter().next()).await;
    let of_pods: Vec<_> = held.iter().filter(|(_, holder)| holder.is_some()).collect();
    assert_eq!((held.len(), of_pods), (20, vec![&(SeatName::of(&[slot(A, 0)]), Some(holder("one")))]));
    assert_eq!(scheduler.seats().len(), 20, "their folders are there before");
}

#[tokio::test]
async fn a_plugin_that_starts_before_the_scheduler_offers_nothing_yet() {
    let mut machine = Machine::new();
    let kubelet = Kubelet::start(&machine.root);
    let plugin = machine.start("");
    kubelet.registered(1).await;
    kubelet.list("slots that are not healthy", are_all(UNHEALTHY)).await;
    machine.says(plugin, "until then no seat is given out").await;
    let _scheduler = Scheduler::start(&machine.root, 1);
    kubelet.list("healthy slots", are_all(HEALTHY)).await;
}

#[tokio::test]
async fn a_plugin_that_starts_again_gives_out_the_seats_that_are_there() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    let plugin = machine.start("--slots 1");
    kubelet.list("healthy slots", are_all(HEALTHY)).await;
    ahead(&scheduler, 2).await;
    let record = machine.root.join("state/device-plugin-seats");
    let recorded = || Some(std::fs::read_to_string(&record).ok()?.lines().count() == 3).filter(|&is| is);
    until("both seats and this boot are recorded", recorded).await;
    // Both are replaced at once, as by an upgrade.
    machine.kill(plugin);
    drop(scheduler);
    let plugin = machine.start("--slots 1");
    kubelet.registered(2).await;
    kubelet.list("healthy slots", are_all(HEALTHY)).await;
    let began = Instant::now();
    kubelet.allocate(&[&[slot(A, 0)]]).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert!(!machine.log(plugin).contains("no seat is given out"));

    // After a reboot their folders are gone.
    machine.kill(plugin);
    let text = std::fs::read_to_string(&record).unwrap();
    let seats = text.split_once('\n').unwrap().1;
    std::fs::write(&record, format!("boot another\n{seats}")).unwrap();
    let plugin = machine.start("--slots 1");
    kubelet.registered(3).await;
    kubelet.list("slots that are not healthy", are_all(UNHEALTHY)).await;
    machine.says(plugin, "until then no seat is given out").await;
}

#[tokio::test]
async fn a_scheduler_that_is_replaced_makes_no_slot_unhealthy() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    // A third of what it usually has, and of what Kubernetes takes.
    let plugin = machine.start("--multi-gpu --grace 20");
    kubelet.list("healthy slots", are_all(HEALTHY)).await;
    ahead(&scheduler, 20).await;
    drop(scheduler);
    // Kubernetes learns of slots that are not healthy seconds later, and until then a kubelet fails pods that come.
    sleep(Duration::from_secs(6)).await;
    let root = machine.root.clone();
    let comes = async {
        sleep(Duration::from_secs(2)).await;
        Scheduler::start(&root, 2)
    };
    // A slot is given out at once, also one that no container had before. While a kubelet waits, it does not start the scheduler's pod either.
    let began = Instant::now();
    for number in 0..10 {
        kubelet.allocate(&[&[slot(A, number)]]).await.unwrap();
    }
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    let asked: &[&[Slot]] = &[&[slot(A, 1), slot(B, 1)]];
    let (got, _scheduler) = tokio::join!(kubelet.allocate(asked), comes);
    got.unwrap();
    assert_eq!(kubelet.lists(), 1, "{}", machine.log(plugin));
}

#[tokio::test]
async fn a_seat_that_is_refused_after_a_start_is_asked_for_again() {
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    let plugin = machine.start("--slots 1");
    kubelet.registered(1).await;
    let seats = [slot(A, 0), slot(B, 0)].map(|slot| vec![slot]);
    kubelet.allocate(&[&seats[0], &seats[1]]).await.unwrap();
    drop(scheduler);
    let scheduler = Scheduler::start_refusing(&machine.root, 2, Some("the disk is full"));
    machine.says(plugin, "the scheduler refuses 2 seats that were given out").await;
    machine.says(plugin, "the disk is full").await;
    let refused = scheduler.seats().len();
    scheduler.refuse(None);
    let again = || Some(scheduler.seats()).filter(|seats| seats.len() >= refused + 2);
    let again = until("they are asked for again", again).await;
    assert!(seats.iter().all(|slots| again[refused..].iter().any(|seat| seat.slots == *slots)));
    // Then they are there.
    let made = again.len();
    sleep(Duration::from_secs(1)).await;
    assert!(scheduler.seats().len() <= made + 2);
}
