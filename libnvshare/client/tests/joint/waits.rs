//! Allocations that wait for room, and what the session says of them.

use nvshare_client::account::{Account, DeviceFacts, DriverReserve, Refusal, Wait};
use nvshare_client::{Admission, Caller, Done, Kind, Session};
use nvshare_proto::{Amount, ClientMessage, Epoch, InitialState, SchedulerMessage};

use crate::library::Library;
use crate::world::{CAPACITY, MS, gpu};

const MIB: u64 = 1 << 20;

fn room(mib: u64) -> Amount {
    Amount { gpu: gpu(0), bytes: mib * MIB }
}

/// Begins to wait until there is room. False: it need not.
fn begin_waiting(library: &mut Library, mib: u64, wait: Wait) -> bool {
    library.devices[0].update(|account| account.begin_waiting(mib * MIB, wait))
}

fn end_waiting(library: &mut Library, mib: u64) {
    library.devices[0].update(|account| account.end_waiting(mib * MIB));
}

fn goes_on_waiting(library: &Library, mib: u64) -> bool {
    library.devices[0].account().goes_on_waiting(mib * MIB, Wait::AlsoWhileParked)
}

fn is_refused(library: &Library, mib: u64) -> bool {
    library.devices[0].account().is_refused(mib * MIB)
}

fn needs(library: &Library) -> Vec<u64> {
    let need = |said: &ClientMessage| {
        if let ClientMessage::NeedRoom(need) = said { Some(need.bytes / MIB) } else { None }
    };
    library.said.iter().filter_map(need).collect()
}

fn admit_140_mib(library: &mut Library) -> Result<Admission, Refusal> {
    library.devices[0].update(|account| account.admit(140 * MIB, Kind::ManagedPool, 0, Caller::OutsideGate))
}

/// The room that is lacking comes, and the allocation takes it.
fn gets(library: &mut Library, session: &mut Session, mib: u64) {
    session.hear(library, SchedulerMessage::Room(room(mib)), MS(5));
    session.look(library, MS(5));
    assert_eq!(admit_140_mib(library), Ok(Admission::Charged(140 * MIB)));
}

/// A parked process in which an allocation of 140 MiB waits, and that has room for 30 of them.
fn waits_for_the_rest() -> (Library, Session) {
    let terms =
        DeviceFacts { gpu: gpu(0), total: CAPACITY, limit: None, is_of_seat: false, oversubscribe: false };
    let mut library = Library::new([terms].into_iter());
    let mut session = Session::new(MS(0));
    library.is_connected = true;
    session.register(&mut library, MS(0));
    let registered = SchedulerMessage::Registered { client: 1, hold: InitialState::Parked };
    session.hear(&mut library, registered, MS(1));
    library.devices[0].update(|account| account.set_capacity(CAPACITY));
    // Another allocation has asked for 30 MiB, and does not take it.
    assert!(begin_waiting(&mut library, 30, Wait::AlsoWhileParked));
    session.look(&mut library, MS(1));
    session.hear(&mut library, SchedulerMessage::Room(room(30)), MS(2));
    end_waiting(&mut library, 30);
    assert_eq!(admit_140_mib(&mut library), Ok(Admission::NeedsRoom(140 * MIB)));
    assert!(begin_waiting(&mut library, 140, Wait::AlsoWhileParked));
    library.said.clear();
    session.look(&mut library, MS(3));
    (library, session)
}

/// The lock came with the room between the try and the wait. Asked for once more, it may be refused on a card that is full.
#[test]
fn room_that_comes_before_an_allocation_waits_is_not_asked_for_again() {
    let (mut library, mut session) = waits_for_the_rest();
    end_waiting(&mut library, 140);
    session.hear(&mut library, SchedulerMessage::Room(room(110)), MS(4));
    library.said.clear();
    assert!(!begin_waiting(&mut library, 140, Wait::AlsoWhileParked), "there is room");
    session.look(&mut library, MS(4));
    assert_eq!(needs(&library), []);
    assert_eq!(admit_140_mib(&mut library), Ok(Admission::Charged(140 * MIB)));
}

/// If the room went back as the process is parked, the rest would go back too when it comes alone, and both would be asked for without
/// end.
#[test]
fn an_allocation_that_waits_keeps_the_room_that_it_has() {
    let (mut library, mut session) = waits_for_the_rest();
    assert_eq!(needs(&library), [140]);
    assert!(!library.said.iter().any(|said| matches!(said, ClientMessage::Room(_))), "{:?}", library.said);
    gets(&mut library, &mut session, 110);
}

#[test]
fn an_allocation_whose_room_is_taken_while_it_waits_asks_for_all_of_it() {
    let (mut library, mut session) = waits_for_the_rest();
    library.said.clear();
    session.hear(&mut library, SchedulerMessage::Evict(room(30)), MS(4));
    session.look(&mut library, MS(4));
    let said = |what: ClientMessage| library.said.iter().position(|said| *said == what);
    let back = said(ClientMessage::Room(room(30)));
    let asks = said(ClientMessage::NeedRoom(room(140)));
    assert!(back.is_some() && back < asks, "{:?}", library.said);
    gets(&mut library, &mut session, 140);
}

/// The same program frees memory meanwhile: the scheduler would have others leave for nothing, and may refuse it.
#[test]
fn room_that_the_process_has_again_ends_the_wait() {
    let (mut library, mut session) = waits_for_the_rest();
    session.hear(&mut library, SchedulerMessage::Room(room(110)), MS(4));
    assert_eq!(admit_140_mib(&mut library), Ok(Admission::Charged(140 * MIB)));
    end_waiting(&mut library, 140);
    assert!(begin_waiting(&mut library, 100, Wait::AlsoWhileParked));
    session.look(&mut library, MS(5));
    library.said.clear();
    library.devices[0].update(|account| account.release(140 * MIB, 140 * MIB, Kind::ManagedPool));
    assert!(!goes_on_waiting(&library, 100), "there is room");
    session.look(&mut library, MS(6));
    assert_eq!(needs(&library), [0], "it lacks nothing any more");
    // The room is this allocation's until it has taken it.
    assert!(!library.said.iter().any(|said| matches!(said, ClientMessage::Room(_))), "{:?}", library.said);
    session.hear(&mut library, SchedulerMessage::NoRoom { gpu: gpu(0) }, MS(7));
    assert!(!is_refused(&library, 100), "there is room");
}

/// A part of the room came, and the answer about the rest is of an earlier need.
#[test]
fn room_and_its_end_heard_at_once_refuse_nobody_who_has_enough() {
    let (mut library, mut session) = waits_for_the_rest();
    session.hear(&mut library, SchedulerMessage::Room(room(110)), MS(4));
    session.hear(&mut library, SchedulerMessage::NoRoom { gpu: gpu(0) }, MS(4));
    assert!(!goes_on_waiting(&library, 140) && !is_refused(&library, 140), "there is room");
    assert!(!goes_on_waiting(&library, 150) && !is_refused(&library, 150), "it was not asked for");
}

#[test]
fn a_refusal_is_for_those_that_lack_as_much_as_was_asked_for() {
    let (mut library, mut session) = waits_for_the_rest();
    assert!(begin_waiting(&mut library, 40, Wait::AlsoWhileParked));
    session.look(&mut library, MS(4));
    assert_eq!(needs(&library), [140], "the largest");
    session.hear(&mut library, SchedulerMessage::NoRoom { gpu: gpu(0) }, MS(5));
    assert!(is_refused(&library, 140) && !is_refused(&library, 40));
    for mib in [140, 40] {
        end_waiting(&mut library, mib);
    }
    assert!(begin_waiting(&mut library, 40, Wait::AlsoWhileParked));
    library.said.clear();
    session.look(&mut library, MS(6));
    assert_eq!(needs(&library), [40], "its own need");
}

/// Others would leave for it, or the process would get a turn in which it has nothing to do.
#[test]
fn no_room_is_needed_for_an_allocation_that_does_not_wait() {
    let (mut library, mut session) = waits_for_the_rest();
    end_waiting(&mut library, 140);
    library.said.clear();
    session.look(&mut library, MS(4));
    assert_eq!(needs(&library), [0], "it has given up");
    library.said.clear();
    // The lock went while it was tried.
    assert!(!begin_waiting(&mut library, 140, Wait::WhileHolding));
    session.look(&mut library, MS(5));
    assert_eq!(needs(&library), []);
}

/// A drain, or an answer, has ended all needs, and a smaller one was said first.
#[test]
fn an_allocation_behind_a_smaller_need_says_its_own() {
    let (mut library, _) = waits_for_the_rest();
    library.devices[0].update(Account::let_go);
    assert!(begin_waiting(&mut library, 40, Wait::AlsoWhileParked));
    assert!(goes_on_waiting(&library, 40) && !goes_on_waiting(&library, 140));
    assert!(!is_refused(&library, 140));
}

/// The answer and the smaller need have crossed.
#[test]
fn a_refusal_is_of_the_largest_need_since_the_last_answer() {
    let (mut library, mut session) = waits_for_the_rest();
    end_waiting(&mut library, 140);
    assert!(begin_waiting(&mut library, 100, Wait::AlsoWhileParked));
    library.said.clear();
    session.look(&mut library, MS(4));
    assert_eq!(needs(&library), [100]);
    session.hear(&mut library, SchedulerMessage::NoRoom { gpu: gpu(0) }, MS(5));
    assert!(!is_refused(&library, 100), "it was for 140");
    end_waiting(&mut library, 100);
    assert!(begin_waiting(&mut library, 100, Wait::AlsoWhileParked));
    session.look(&mut library, MS(6));
    session.hear(&mut library, SchedulerMessage::NoRoom { gpu: gpu(0) }, MS(7));
    assert!(is_refused(&library, 100));
}

/// A restore asks for its own room, so the scheduler may hear of it only when the restore is over.
#[test]
fn the_end_of_a_need_in_a_restore_is_told_after_it() {
    let (mut library, mut session) = waits_for_the_rest();
    let epoch = Epoch { boot: 1, counter: 1 };
    library.is_asleep = true;
    let mapped = 10 * MIB;
    let admitted =
        library.devices[0].update(|account| account.admit(mapped, Kind::Mapped, 0, Caller::OutsideGate));
    assert_eq!(admitted, Ok(Admission::Charged(0)));
    session.look(&mut library, MS(4));
    session.hear(&mut library, SchedulerMessage::LockOk { epoch, quantum_ms: 1000, room: vec![] }, MS(5));
    session.look(&mut library, MS(5));
    end_waiting(&mut library, 140);
    library.said.clear();
    session.look(&mut library, MS(6));
    assert_eq!(needs(&library), []);
    library.devices[0].update(|account| {
        assert!(account.charge_all(mapped));
        account.map(mapped);
    });
    session.done(&mut library, Done::Restored { lacking: vec![] }, MS(7));
    session.look(&mut library, MS(7));
    let said = |what: &ClientMessage| library.said.iter().position(|said| said == what);
    let runs = said(&ClientMessage::Running { epoch });
    assert!(runs.is_some() && runs < said(&ClientMessage::NeedRoom(room(0))), "{:?}", library.said);
}

/// A need may be beyond what one client can have.
#[test]
fn room_of_nothing_is_a_refusal() {
    let (mut library, mut session) = waits_for_the_rest();
    session.hear(&mut library, SchedulerMessage::Room(room(0)), MS(4));
    assert!(!goes_on_waiting(&library, 140) && is_refused(&library, 140));
}

/// Its lack may grow to as much while it waits.
#[test]
fn a_refusal_is_forgotten_with_the_last_allocation_that_waits() {
    let (mut library, mut session) = waits_for_the_rest();
    session.hear(&mut library, SchedulerMessage::NoRoom { gpu: gpu(0) }, MS(4));
    assert!(is_refused(&library, 140));
    end_waiting(&mut library, 140);
    assert!(begin_waiting(&mut library, 100, Wait::AlsoWhileParked));
    session.look(&mut library, MS(5));
    session.hear(&mut library, SchedulerMessage::Evict(room(30)), MS(6));
    session.hear(&mut library, SchedulerMessage::Capacity(room(CAPACITY / MIB)), MS(6));
    library.devices[0].update(|account| {
        account.take_unused(30 * MIB);
        account.set_reserve(DriverReserve { plain_pools: 20 * MIB, ..DriverReserve::default() });
    });
    assert!(goes_on_waiting(&library, 100) && !is_refused(&library, 100));
}

/// Room for memory that the process has was refused, and it lacks as much for an allocation later.
#[test]
fn a_need_as_large_as_one_that_has_its_answer_is_told() {
    let (mut library, mut session) = waits_for_the_rest();
    end_waiting(&mut library, 140);
    library.devices[0].update(|account| {
        account.set_reserve(DriverReserve { plain_pools: 50 * MIB, ..DriverReserve::default() });
    });
    session.look(&mut library, MS(4));
    session.hear(&mut library, SchedulerMessage::NoRoom { gpu: gpu(0) }, MS(5));
    let deficit = library.devices[0].account().lacking();
    assert!(deficit > 0);
    library.said.clear();
    session.look(&mut library, MS(6));
    assert_eq!(needs(&library), [], "it has its answer");
    library.devices[0].update(|account| {
        account.set_reserve(DriverReserve { plain_pools: 10 * MIB, ..DriverReserve::default() });
    });
    let free = library.devices[0].account().unused_room();
    let bytes = free + deficit;
    assert!(library.devices[0].update(|account| account.begin_waiting(bytes, Wait::AlsoWhileParked)));
    assert_eq!(library.devices[0].account().lacking(), deficit);
    session.look(&mut library, MS(7));
    assert_eq!(needs(&library).len(), 1, "{:?}", library.said);
}

/// Others would leave for a need that nobody has.
#[test]
fn those_that_wait_for_less_say_so_when_the_largest_has_its_room() {
    let (mut library, _) = waits_for_the_rest();
    assert!(begin_waiting(&mut library, 40, Wait::AlsoWhileParked));
    // One that waits on does not end the waits of others.
    end_waiting(&mut library, 0);
    assert!(goes_on_waiting(&library, 40));
    assert!(begin_waiting(&mut library, 140, Wait::AlsoWhileParked));
    end_waiting(&mut library, 140);
    assert!(!goes_on_waiting(&library, 40) && !is_refused(&library, 40));
}
