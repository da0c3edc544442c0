//! Room of real clients: asked for, and not given back.

use std::time::Duration;

use nvshare_client::account::DeviceFacts;
use nvshare_client::{Admission, Caller, Done, Kind, MoverOrder, Session};
use nvshare_proto::{Amount, ClientMessage, ClientState, Epoch, InitialState, SchedulerMessage};

use crate::library::Library;
use crate::plan::{Plan, steady};
use crate::world::{CAPACITY, GIB, MS, Process, World, config, gpu};

#[test]
fn a_need_that_crossed_with_its_room_holds_nobody_up() {
    // It grows on two GPUs; the room for one arrives first, and it asks for the other once more.
    let grows = Plan { gpus: vec![gpu(0), gpu(1)], grows_every: Some(401), ..steady(14, 845) };
    let other = Plan { pause: 10, starts_at: 501, ..steady(2, 301) };
    let plans = vec![Plan { runs_already: true, ..grows }, other];
    for seed in (0..32).chain([4_477_790_973_996_748_370]) {
        let mut world = World::new(plans.clone(), config(false), seed);
        world.run(MS(80_000));
        let is_done = |p: &Process| p.program.served >= MS(p.plan.work);
        assert!(world.processes.iter().all(is_done), "seed {seed}: {:?}", world.core.client_status());
    }
}

#[test]
fn a_client_that_cannot_evict_keeps_others_waiting_until_it_is_gone() {
    let stuck = Plan { cannot_evict: true, work: 500, dies_at: Some(8_000), ..steady(12, 500) };
    let mut world = World::new(vec![stuck, Plan { starts_at: 200, ..steady(12, 500) }], config(false), 5);
    world.run(MS(7_500));
    assert_eq!(world.served(1), Duration::ZERO);
    assert!(
        world.core.client_status().iter().any(|c| c.state == ClientState::Blocked),
        "{:?}",
        world.core.client_status()
    );
    world.run(MS(20_000));
    assert!(world.served(1) >= MS(500));
}

const EPOCH: Epoch = Epoch { boot: 1, counter: 1 };

fn of(bytes: u64) -> Amount {
    Amount { gpu: gpu(0), bytes }
}

/// A process with 12 GiB that the library maps, and `managed` bytes that its program asked for as managed memory. It is granted the lock of
/// a GPU that has 8 GiB by now, and as much of the mapped memory is back.
fn restored_in_part(managed: u64) -> (Library, Session) {
    let facts =
        DeviceFacts { gpu: gpu(0), total: CAPACITY, limit: None, is_of_seat: false, oversubscribe: false };
    let (mut library, mut session) = (Library::new([facts].into_iter()), Session::new(MS(0)));
    (library.is_connected, library.is_asleep) = (true, true);
    session.register(&mut library, MS(0));
    let hold = InitialState::Parked;
    session.hear(&mut library, SchedulerMessage::Registered { client: 1, hold }, MS(1));
    session.hear(&mut library, SchedulerMessage::Capacity(of(CAPACITY)), MS(1));
    for (bytes, kind) in [(12 * GIB, Kind::Mapped), (managed, Kind::ProgramsManaged)] {
        let admitted =
            library.devices[0].update(|account| account.admit(bytes, kind, 0, Caller::OutsideGate));
        assert_eq!(admitted, Ok(Admission::Charged(0)));
    }
    session.look(&mut library, MS(1));
    session.hear(&mut library, SchedulerMessage::Capacity(of(8 * GIB)), MS(2));
    let granted = SchedulerMessage::LockOk { epoch: EPOCH, quantum_ms: 1000, room: vec![of(8 * GIB)] };
    session.hear(&mut library, granted, MS(2));
    let lacking = library.devices[0].update(|account| {
        let came = account.charge(12 * GIB);
        account.map(came);
        account.to_ask_for_after_restore(0, 12 * GIB - came)
    });
    library.orders.clear();
    library.said.clear();
    session.done(&mut library, Done::Restored { lacking: vec![of(lacking)] }, MS(3));
    (library, session)
}

#[test]
fn a_lock_that_is_no_use_because_the_gpu_is_too_small_by_now_is_given_back() {
    let (mut library, mut session) = restored_in_part(0);
    let Some((MoverOrder::Drain(ticket), _)) = library.orders.pop_back() else {
        panic!("it does not drain: {:?}", library.said)
    };
    session.done(&mut library, Done::Drained(ticket), MS(4));
    let said = |what: ClientMessage| library.said.iter().position(|said| *said == what);
    let released = said(ClientMessage::LockReleased { epoch: EPOCH });
    assert!(released.is_some() && released < said(ClientMessage::ReqLock), "{:?}", library.said);
}

/// The scheduler does not know which of its memory has to be on the GPU at once.
#[test]
fn a_process_with_managed_memory_of_its_own_waits_for_room_with_the_lock() {
    let (library, _) = restored_in_part(GIB);
    assert!(library.said.contains(&ClientMessage::NeedRoom(of(12 * GIB))), "{:?}", library.said);
    assert!(library.orders.is_empty(), "{:?}", library.orders);
}
