//! Seats at a real scheduler, under programs that run, while the kubelet (played), the plugin and the scheduler start again in any order.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use crate::fakes::{Kubelet, Machine, until};
use nvshare_device_plugin::api::HEALTHY;
use nvshare_device_plugin::resources::Numbers;
use nvshare_harness::{Program, Running, Scheduler, World};
use nvshare_proto::{GpuUuid, Occupant, Priority, SeatName, Slot};
use tokio::time::sleep;

const MIB: u64 = 1 << 20;
const CARDS: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64"), ("NVSIM_GPUS", "2")];
const PLUGIN: &str = "--multi-gpu --slot-memory 384MiB --keep-unused 2";

/// A simulated card.
fn card(number: u8) -> GpuUuid {
    format!("GPU-51600000-0000-4000-8000-0000000000{number:02x}").parse().unwrap()
}

/// A container with a program in it.
struct Container {
    pod: String,
    slots: Vec<Slot>,
    program: Running,
}

/// The node: what starts again, and what must not notice.
struct Node {
    world: World,
    machine: Machine,
    kubelet: Option<Kubelet>,
    plugin: usize,
    scheduler: Option<Scheduler>,
    containers: Vec<Container>,
}

impl Node {
    fn start(options: &'static str) -> Self {
        let world = World::simulated(CARDS);
        let mut machine = Machine::with([card(0), card(1)]);
        // The plugin finds the scheduler where the machine has it.
        std::os::unix::fs::symlink(world.admin_socket(), machine.root.join("admin.sock")).unwrap();
        let kubelet = Some(Kubelet::start(&machine.root));
        let plugin = machine.start(options);
        let mut node = Self { world, machine, kubelet, plugin, scheduler: None, containers: Vec::new() };
        node.start_scheduler();
        node
    }

    fn seats(&self) -> PathBuf {
        self.world.dir().join("seats")
    }

    fn start_scheduler(&mut self) {
        let at = |path: PathBuf| path.to_string_lossy().into_owned();
        let (common, seats) = (at(self.world.dir().join("common/scheduler.sock")), at(self.seats()));
        let arguments = ["--socket", &common, "--seats", &seats, "--gpu-memory", "1GiB", "--tq", "0.1"];
        self.scheduler = Some(Scheduler::start(&self.world, &[&arguments[..], &["--log", "warn"]].concat()));
    }

    fn list_pods(&self) {
        let pods: Vec<(&str, &[Slot])> =
            self.containers.iter().map(|container| (container.pod.as_str(), &container.slots[..])).collect();
        self.kubelet.as_ref().unwrap().run_pods(&pods);
    }

    /// A pod comes. Its program lasts until it is told to end.
    async fn admit(&mut self, pod: &str, slots: Vec<Slot>) {
        self.kubelet.as_ref().unwrap().allocate(&[&slots]).await.unwrap();
        let program = self.run(pod, &slots);
        self.containers.push(Container { pod: pod.to_owned(), slots, program });
        self.list_pods();
    }

    /// A program in a seat. It lasts until it is told to end.
    fn run(&self, pod: &str, slots: &[Slot]) -> Running {
        let socket = self.seats().join(SeatName::of(slots).to_string()).join("scheduler.sock");
        let devices = if slots.len() > 1 {
            "0,1"
        } else if slots[0].gpu == card(0) {
            "0"
        } else {
            "1"
        };
        let program = Program::workload(&self.world, pod, "--memory 256MiB --block 64MiB --kernel-us 500");
        let program =
            program.env("NVSHARE_SOCKET", &socket.to_string_lossy()).env("CUDA_VISIBLE_DEVICES", devices);
        program.until_told().start()
    }

    /// One of the three starts again, `which` says which.
    fn restart(&mut self, which: u32) {
        match which % 3 {
            0 => {
                self.kubelet = None;
                self.kubelet = Some(Kubelet::start(&self.machine.root));
                self.list_pods();
            }
            1 => {
                self.machine.kill(self.plugin);
                self.plugin = self.machine.start(PLUGIN);
            }
            _ => {
                self.scheduler.take().unwrap().kill();
                self.start_scheduler();
            }
        }
    }

    /// Waits until the kubelet has its list, and each container its seat, its limit, its name and its client.
    async fn until_whole(&self) {
        let kubelet = self.kubelet.as_ref().unwrap();
        let all_healthy = |devices: &[nvshare_device_plugin::api::Device]| {
            devices.len() == 20 && devices.iter().all(|device| device.health == HEALTHY)
        };
        kubelet.list("all slots are healthy", all_healthy).await;
        let devices: BTreeSet<String> = self.machine.devices().into_iter().map(|(name, _)| name).collect();
        for container in &self.containers {
            let name = SeatName::of(&container.slots);
            assert!(devices.contains(&format!("seat-{name}")), "{}", container.pod);
            assert!(container.program.lives(), "{}: {}", container.pod, container.program.log());
        }
        let is_whole = || {
            let status = Scheduler::status(&self.world);
            let is_fine = |container: &Container| {
                let holder = Occupant {
                    namespace: "default".into(),
                    pod: container.pod.clone(),
                    container: "main".into(),
                };
                let name = SeatName::of(&container.slots);
                let row = status.seats.iter().find(|row| row.name == name)?;
                let client = status.find(container.program.pid())?;
                let has_limit = client.usage.iter().all(|usage| usage.limit == 384 * MIB);
                let is_named = row.occupant.as_ref() == Some(&holder);
                let is_there = row.clients.contains(&client.client) && !client.usage.is_empty();
                (is_named && is_there && has_limit && row.seat.given.memory == Some(384 * MIB)).then_some(())
            };
            self.containers.iter().all(|container| is_fine(container).is_some()).then_some(())
        };
        until("each container has its seat, its limit, its name and its client", is_whole).await;
    }
}

/// Restarts in an order that follows from the seed. After each few of them all is looked at.
async fn survives(restarts: u32, at_once: u32, mut seed: u64) {
    let mut next = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        u32::try_from(seed >> 33).unwrap()
    };
    let mut node = Node::start(PLUGIN);
    node.kubelet.as_ref().unwrap().registered(1).await;
    let slot = |gpu, number| Slot { gpu: card(gpu), number };
    node.admit("a", vec![slot(0, 0)]).await;
    node.admit("b", vec![slot(0, 1)]).await;
    node.admit("c", vec![slot(1, 0)]).await;
    node.admit("set", vec![slot(0, 2), slot(1, 2)]).await;
    node.until_whole().await;
    let mut done = 0;
    while done < restarts {
        for _ in 0..at_once.min(restarts - done) {
            node.restart(next());
            sleep(Duration::from_millis(u64::from(next() % 120))).await;
            done += 1;
        }
        node.until_whole().await;
        // Another pod comes into a set of its own, and goes.
        if next() % 2 == 0 {
            let number = 3 + next() % 7;
            node.admit("short", vec![slot(0, number), slot(1, number)]).await;
            node.until_whole().await;
            let short = node.containers.pop().unwrap();
            short.program.signal(9);
            let _ = short.program.finish();
            node.list_pods();
        }
    }
    // Their sets are gone, and no other seat is. Those of single slots stay.
    let set = SeatName::of(&[slot(0, 2), slot(1, 2)]);
    let are_gone = || {
        let left = Scheduler::status(&node.world).seats;
        let singles = left.iter().filter(|row| row.seat.slots.len() == 1).count();
        let sets: Vec<SeatName> =
            left.iter().filter(|row| row.seat.slots.len() > 1).map(|row| row.name).collect();
        (singles == 20 && sets == [set]).then_some(())
    };
    until("the seats of pods that are gone are removed", are_gone).await;
    let programs: Vec<Running> = node.containers.drain(..).map(|container| container.program).collect();
    let Ok(programs) = <[Running; 4]>::try_from(programs) else { panic!("four programs") };
    node.world.stop_intact(programs);
}

#[tokio::test]
async fn a_pod_has_the_limit_and_the_priority_of_the_resource_that_it_asks_for() {
    let mut node = Node::start("--slot-memory 384MiB --also high=memory=320MiB,priority=high,slots=2");
    let (place, numbers) =
        (Slot { gpu: card(0), number: 0 }, Numbers::of_resource("nvshare.com/gpu.high", "nvshare.com/gpu"));
    let slots = [numbers.unwrap().slot(&place.to_string()).unwrap()];
    let high = node.kubelet.as_ref().unwrap().of("high");
    high.registered(1).await;
    node.kubelet.as_ref().unwrap().registered(1).await;
    node.admit("usual", vec![place]).await;
    high.allocate(&[&[place]]).await.unwrap();
    high.run_pods(&[("urgent", &[place])]);
    let urgent = node.run("urgent", &slots);
    let usual = node.containers.pop().unwrap();
    let has = |pod: &str, slots: &[Slot], pid, memory, priority| {
        let status = Scheduler::status(&node.world);
        let row = status.seats.iter().find(|row| row.name == SeatName::of(slots))?;
        let client = status.find(pid)?;
        let is_named = row.occupant.as_ref().is_some_and(|holder| holder.pod == pod);
        let has_limit = !client.usage.is_empty() && client.usage.iter().all(|usage| usage.limit == memory);
        let is_its_own = row.clients.contains(&client.client) && client.share.priority == priority;
        (is_named && has_limit && is_its_own && row.seat.given.memory == Some(memory)).then_some(())
    };
    for (pod, slots, pid, memory, priority) in [
        ("usual", &usual.slots[..], usual.program.pid(), 384 * MIB, Priority::Normal),
        ("urgent", &slots[..], urgent.pid(), 320 * MIB, Priority::High),
    ] {
        until(pod, || has(pod, slots, pid, memory, priority)).await;
    }
    node.world.stop_intact([usual.program, urgent]);
}

/// Five at once, so that the plugin is among them: a kubelet that is played leaves its old connections open, and the plugin would ask there.
#[tokio::test]
async fn restarts_in_any_order_take_nothing_from_a_pod() {
    survives(5, 5, 1).await;
}

#[tokio::test]
#[ignore = "takes two minutes"]
async fn a_thousand_restarts_in_any_order_take_nothing_from_a_pod() {
    survives(1000, 20, 2).await;
}
