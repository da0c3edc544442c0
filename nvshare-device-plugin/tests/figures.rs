//! The plugin's resources and speed, beside a kubelet and a scheduler that are played.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use crate::fakes::{A, B, Kubelet, Machine, Scheduler, until};
use nvshare_proto::{SeatName, Slot};
use tokio::time::sleep;

/// The resources that a process has taken so far: milliseconds of a processor, and bytes.
fn taken(pid: u32) -> (u64, u64) {
    let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
    // Behind the name in brackets, which may have blanks: `proc_pid_stat(5)` counts ticks of 10 ms in its 14th and 15th field.
    let stat = read("stat");
    let fields = stat.rsplit_once(") ").unwrap().1.split(' ').skip(11).take(2);
    let ticks: u64 = fields.map(|field| field.parse::<u64>().unwrap()).sum();
    let status = read("status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    (ticks * 10, line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10)
}

/// `docs/internals/testing.md` has the figures of a release build.
#[tokio::test]
#[ignore = "measures, for a minute and a half"]
async fn the_plugin_takes_little() {
    const IDLE: Duration = Duration::from_secs(80);
    let mut machine = Machine::new();
    let scheduler = Scheduler::start(&machine.root, 1);
    let kubelet = Kubelet::start(&machine.root);
    let begin = Instant::now();
    let plugin = machine.start_usual("--slots 50");
    kubelet.registered(1).await;
    let ready = begin.elapsed();
    let seats: Vec<[Slot; 1]> =
        (0..100).map(|n| [Slot { gpu: if n < 50 { A } else { B }, number: n % 50 }]).collect();
    for seat in &seats {
        kubelet.allocate(&[seat]).await.unwrap();
    }
    let names: Vec<String> = (0..seats.len()).map(|number| format!("pod-{number}")).collect();
    let pods: Vec<(&str, &[Slot])> =
        names.iter().map(String::as_str).zip(seats.iter().map(|seat| &seat[..])).collect();
    let begin = Instant::now();
    kubelet.run_pods(&pods);
    let are_named = || {
        let held = scheduler.held().into_iter().flatten();
        let named: BTreeSet<SeatName> =
            held.filter(|(_, holder)| holder.is_some()).map(|(seat, _)| seat).collect();
        (named.len() == seats.len()).then_some(())
    };
    until("all seats are named", are_named).await;
    let named = begin.elapsed();
    sleep(Duration::from_secs(5)).await;
    let (before, _) = taken(machine.pid(plugin));
    sleep(IDLE).await;
    let (after, resident) = taken(machine.pid(plugin));
    let idle = (after - before) as f64 / IDLE.as_millis() as f64;
    let next = machine.start_usual("--slots 50");
    machine.says(next, "waiting for another nvshare-device-plugin").await;
    let begin = Instant::now();
    machine.kill(plugin);
    kubelet.registered(2).await;
    let followed = begin.elapsed();
    println!(
        "ready after {ready:.1?}; 100 seats named after {named:.1?}; then {:.1} MiB and {:.3} % of a processor; the next one ready {followed:.1?} \
         after its end",
        resident as f64 / f64::from(1 << 20),
        idle * 100.0
    );
    assert!(
        ready <= Duration::from_secs(1)
            && followed <= Duration::from_secs(1)
            && named <= Duration::from_secs(5)
    );
    assert!(resident < 20 << 20 && idle <= 0.001);
}
