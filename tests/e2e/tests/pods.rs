//! Pods that have seats, as an administrator sees them: by name, and by no name that a program chose.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use nvshare_harness::{Program, Scheduler, World, wait_until};
use nvshare_proto::{
    AdminReply, AdminRequest, ClientMessage, Occupant, Register, Reply, Request, SeatName, TenantSettings,
    Usage, WatchEvent, WatchFrom, codec,
};

use crate::seats::{CARDS, MIB, Places, ask, card, done, make, seat};

fn pod(name: &str) -> Occupant {
    Occupant { namespace: "lab".into(), pod: name.into(), container: "main".into() }
}

fn hold(world: &World, name: SeatName, holder: Option<Occupant>) {
    done(world, AdminRequest::OccupySeats(vec![(name, holder)]));
}

/// The last line of `status`, which is about seats.
fn last_line(world: &World) -> String {
    let output = Scheduler::ctl(world, &["status"]);
    String::from_utf8_lossy(&output.stdout).lines().last().unwrap_or_default().to_owned()
}

/// The series of seats without clients.
fn unused(world: &World) -> Vec<String> {
    let mut stream = UnixStream::connect(world.dir().join("metrics.sock")).expect("a socket");
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").expect("a request");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    let series = text.lines().filter(|line| line.starts_with("nvshare_seats_without_clients"));
    series.map(str::to_owned).collect()
}

#[test]
fn seats_to_which_no_client_came_since_they_were_given_out_are_named() {
    let world = World::simulated(CARDS);
    let places = Places::of(&world);
    let metrics = world.dir().join("metrics.sock").to_string_lossy().into_owned();
    let start = || {
        let scheduler = places.start_with(&world, &["--metrics", &metrics]);
        wait_until("metrics are served", || UnixStream::connect(&metrics).is_ok());
        scheduler
    };
    let scheduler = start();
    let [used, never] = [0, 1].map(|number| make(&world, &seat(number, 0, TenantSettings::default())));
    let run = |name| {
        let job = Program::workload(&world, "job", "--memory 64MiB --block 64MiB --steps 1");
        places.program(job, name).start().finish().intact();
    };
    hold(&world, used, Some(pod("train-0")));
    hold(&world, never, Some(pod("train-1")));
    assert_eq!(
        last_line(&world),
        "seats that containers have: 2; no client came to: lab/train-0/main, lab/train-1/main"
    );
    // One that came and has ended is no sign of a pod that runs without nvshare.
    run(used);
    let one = "seats that containers have: 2; no client came to: lab/train-1/main";
    wait_until("it came", || last_line(&world) == one);
    let series = format!(
        "nvshare_seats_without_clients{{seat=\"{never}\",namespace=\"lab\",pod=\"train-1\",container=\"main\"}} 1"
    );
    wait_until("the metric names it", || unused(&world) == [series.as_str()]);
    // Nor does a restart of the scheduler forget it.
    let record = world.dir().join("nvshare-state.seats").join(used.to_string());
    wait_until("it is recorded", || {
        std::fs::read_to_string(&record).expect("a record").contains("came = true")
    });
    scheduler.kill();
    let _scheduler = start();
    assert_eq!(last_line(&world), one);
    // Another pod has it.
    hold(&world, used, Some(pod("train-2")));
    assert_eq!(
        last_line(&world),
        "seats that containers have: 2; no client came to: lab/train-1/main, lab/train-2/main"
    );
    // A client may come before the pod is named.
    hold(&world, used, None);
    run(used);
    hold(&world, used, Some(pod("train-3")));
    run(never);
    wait_until("all came", || last_line(&world) == "seats that containers have: 2");
    assert_eq!(unused(&world), [""; 0]);
}

#[test]
fn clients_of_the_pod_before_are_not_those_of_the_next_one() {
    let world = World::simulated(CARDS);
    let places = Places::of(&world);
    let _scheduler = places.start(&world);
    let name = make(&world, &seat(0, 0, TenantSettings::default()));
    let run = |job: &str| {
        let job = Program::workload(&world, job, "--memory 64MiB --block 64MiB --steps 1");
        let ran = places.program(job, name).start().finish();
        ran.intact();
        Scheduler::until(&world, "it is gone", |status| {
            status.find(ran.pid).is_some_and(|client| client.gone)
        });
        ran.pid
    };
    let seen = |socket: &Path| {
        let pid = |reply| match reply {
            Reply::Admin(AdminReply::Client(client)) => Some(client.pid),
            _ => None,
        };
        ask(socket, AdminRequest::Status).into_iter().filter_map(pid).collect::<Vec<u32>>()
    };
    hold(&world, name, Some(pod("train-0")));
    let old = run("old");
    assert_eq!(seen(&places.socket(name)), [old]);
    hold(&world, name, Some(pod("train-1")));
    let new = run("new");
    assert_eq!(seen(&places.socket(name)), [new]);
    // They run as one user, outside of containers.
    assert!(seen(Path::new(&places.common)).is_empty());
    // An administrator sees both, and the pod of one.
    let status = Scheduler::status(&world);
    assert_eq!(status.seats[0].clients, [status.client(new).client]);
    assert!(status.find(old).is_some(), "{status:?}");
    let shown = Scheduler::ctl(&world, &["clients", "--all"]).stdout;
    let shown = String::from_utf8_lossy(&shown);
    assert_eq!(shown.matches("lab/train-1/main").count(), 1, "{shown}");
}

/// The events that are kept.
fn events(world: &World) -> Vec<WatchEvent> {
    let watch = AdminRequest::Watch { from: WatchFrom::Kept, follow: false };
    let event = |reply| match reply {
        Reply::Admin(AdminReply::Event(event)) => Some(*event),
        _ => None,
    };
    ask(&world.admin_socket(), watch).into_iter().filter_map(event).collect()
}

#[test]
fn events_name_the_pod_and_never_what_a_client_calls_itself() {
    let world = World::simulated(CARDS);
    let places = Places::of(&world);
    let _scheduler = places.start(&world);
    let name = make(&world, &seat(0, 0, TenantSettings::default()));
    let say = |stream: &mut UnixStream, request| {
        stream.write_all(&codec::encode(&request).expect("a frame")).expect("sent");
    };
    let usage = Usage { gpu: card(0), total: 1024 * MIB, limit: 0, allocated: 0, absent: 0, immovable: 0 };
    let names = |world: &World| {
        let of_clients = events(world).into_iter().filter(|event| event.client.is_some());
        of_clients.filter_map(|event| event.name).collect::<Vec<_>>()
    };
    let mut stream = UnixStream::connect(places.socket(name)).expect("it serves");
    let register = Register { usage: vec![usage], ..Register::newcomer(1, "lab/other-pod/main") };
    say(&mut stream, Request::Register(register));
    wait_until("it is registered", || !names(&world).is_empty());
    let before = format!("seat {name}");
    assert!(names(&world).iter().all(|name| *name == before), "{:?}", names(&world));
    // The kubelet names the container a moment later.
    hold(&world, name, Some(pod("train-0")));
    say(&mut stream, Request::Client(ClientMessage::ReqLock));
    wait_until("its next events name the pod", || {
        names(&world).last().is_some_and(|name| name == "lab/train-0/main")
    });
    // Its last ones too, though nobody has the seat any more.
    hold(&world, name, None);
    drop(stream);
    wait_until("it is gone", || {
        events(&world).iter().any(|event| ["left", "gone"].contains(&event.event.name()))
    });
    let all = names(&world);
    assert_eq!(all.last().map(String::as_str), Some("lab/train-0/main"), "{all:?}");
    assert!(!all.iter().any(|name| name.contains("other-pod")), "{all:?}");
}
