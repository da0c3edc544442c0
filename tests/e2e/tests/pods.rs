//! Pods that have seats, as an administrator sees them: by name, and by no name that a program chose.

use std::io::Write;
use std::os::unix::net::UnixStream;

use nvshare_harness::{World, wait_until};
use nvshare_proto::{
    AdminReply, AdminRequest, ClientMessage, Given, Holder, Register, Reply, Request, SeatName, Usage,
    WatchEvent, WatchFrom, codec,
};

use crate::seats::{CARDS, MIB, Places, ask, card, done, make, seat};

fn pod(name: &str) -> Holder {
    Holder { namespace: "lab".into(), pod: name.into(), container: "main".into() }
}

fn hold(world: &World, name: SeatName, holder: Option<Holder>) {
    done(world, AdminRequest::HoldSeats(vec![(name, holder)]));
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
    let name = make(&world, &seat(0, 0, Given::default()));
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
