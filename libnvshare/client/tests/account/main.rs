//! The account against a model that recomputes everything: random operations, and after each of them the sums, what the
//! scheduler has given, and the tenant's part.

mod model;

use nvshare_client::Kind;
use nvshare_client::account::{
    Absent, Account, Admission, Caller, DeviceFacts, DriverReserve, Refusal, TURNS_WITHOUT, Wait,
};
use proptest::prelude::*;

use model::{Allocation, Model, Shared, TOTAL, terms};

/// An operation on an account. Sizes are small numbers: bytes, whatever they stand for. Allocations are chosen by a
/// number that is taken modulo how many there are.
#[derive(Debug, Clone)]
enum Operation {
    Allocate {
        bytes: u64,
        kind: Kind,
        /// Of what pools of the kind keep, the part of the pool that is asked.
        kept: u64,
        open: bool,
    },
    Free(usize),
    /// An allocation is freed, and its memory kept.
    SetAside(usize),
    TakeAgain,
    DropAside,
    /// A piece of an allocation comes back, and this much of it fails to.
    Restore {
        which: usize,
        fails: u64,
    },
    Evict {
        which: usize,
        bytes: u64,
    },
    EvictUnused(u64),
    Lose(u64),
    EvictLost(u64),
    Give(u64),
    TakeUnused {
        bytes: u64,
        coming_back: bool,
    },
    Reserve(DriverReserve),
    InitialState(bool),
    EndTurn,
    LetGo,
    Unlimit,
    Limit,
    LimitAnew,
    Tell,
    TellMade,
    Register,
    Capacity(u64),
    BeginWaiting {
        bytes: u64,
        parked: bool,
    },
    EndWaiting(u64),
    Refuse(u64),
    JoinTenant(bool),
}

fn kind() -> impl Strategy<Value = Kind> {
    use Kind::{DeviceAsManaged, ManagedPool, Plain, PlainPool, ProgramsManaged, SmallPlain};
    prop::sample::select(vec![
        DeviceAsManaged,
        DeviceAsManaged,
        DeviceAsManaged,
        ProgramsManaged,
        Plain,
        PlainPool,
        ManagedPool,
        SmallPlain,
    ])
}

fn operation() -> impl Strategy<Value = Operation> {
    use Operation::*;
    let reserve = (0..8u64, 0..8u64, 0..8u64);
    prop_oneof![
        6 => (1..30u64, kind(), 0..30u64, any::<bool>())
            .prop_map(|(bytes, kind, kept, open)| Allocate { bytes, kind, kept, open }),
        3 => any::<usize>().prop_map(Free),
        2 => any::<usize>().prop_map(SetAside),
        2 => Just(TakeAgain),
        1 => Just(DropAside),
        4 => (any::<usize>(), 0..20u64).prop_map(|(which, fails)| Restore { which, fails }),
        4 => (any::<usize>(), 1..30u64).prop_map(|(which, bytes)| Evict { which, bytes }),
        1 => (1..30u64).prop_map(EvictUnused),
        1 => (1..30u64).prop_map(Lose),
        1 => (1..30u64).prop_map(EvictLost),
        4 => (0..60u64).prop_map(Give),
        2 => (1..60u64, any::<bool>()).prop_map(|(bytes, coming_back)| TakeUnused { bytes, coming_back }),
        1 => reserve.prop_map(|(plain_pools, managed_pools, graphs)| {
            Reserve(DriverReserve { plain_pools, managed_pools, graphs })
        }),
        2 => any::<bool>().prop_map(InitialState),
        2 => Just(EndTurn),
        2 => Just(LetGo),
        1 => Just(Unlimit),
        1 => Just(Limit),
        1 => Just(LimitAnew),
        2 => Just(Tell),
        2 => Just(TellMade),
        1 => Just(Register),
        1 => (50..TOTAL).prop_map(Capacity),
        2 => (1..60u64, any::<bool>()).prop_map(|(bytes, parked)| BeginWaiting { bytes, parked }),
        1 => (0..60u64).prop_map(EndWaiting),
        1 => (0..40u64).prop_map(Refuse),
        1 => any::<bool>().prop_map(JoinTenant),
    ]
}

/// One function, as it is the list of all operations: one arm for each.
fn apply(account: &mut Account<Shared>, model: &mut Model, operation: Operation) {
    match operation {
        Operation::Allocate { bytes, kind, kept, open } => allocate(account, model, bytes, kind, kept, open),
        Operation::Free(which) => {
            if let Some(freed) = model.remove(which) {
                if freed.kind.is_pools() && freed.bytes % 2 == 0 {
                    account.keep(freed.bytes, freed.charged, freed.kind);
                    *model.reserve.of(freed.kind).unwrap() += freed.charged;
                } else {
                    account.release(freed.bytes, freed.charged, freed.kind);
                }
            }
        }
        Operation::SetAside(which) => {
            let can_stay = |freed: &Allocation| freed.kind == Kind::DeviceAsManaged;
            if model.choose(which).is_some_and(|freed| can_stay(freed)) {
                let freed = model.remove(which).expect("it was chosen");
                account.set_aside(freed.bytes);
                model.aside.push(freed);
            }
        }
        Operation::TakeAgain => {
            if let Some(kept) = model.aside.pop() {
                let before = *account;
                if account.take_again(kept.bytes).is_ok() {
                    assert!(account.used() <= model.limit(), "the limit is passed");
                    model.insert(kept.bytes, kept.charged, kept.kind);
                } else {
                    assert!(before.used() + kept.bytes > model.limit(), "it is within the limit");
                    model.assert_unchanged(&before, account);
                    model.aside.push(kept);
                }
            }
        }
        Operation::DropAside => {
            if let Some(kept) = model.aside.pop() {
                account.release_aside(kept.bytes, kept.charged, kept.kind);
            }
        }
        Operation::Restore { which, fails } => {
            if let Some(allocation) = model.choose(which) {
                let charged = account.charge(allocation.bytes - allocation.charged);
                let fails = fails.min(charged);
                account.uncharge(fails);
                allocation.charged += charged - fails;
            }
        }
        Operation::Evict { which, bytes } => {
            if let Some(allocation) = model.choose(which).filter(|allocation| allocation.kind.is_movable()) {
                let bytes = bytes.min(allocation.charged);
                allocation.charged -= bytes;
                account.discharge(bytes);
            }
        }
        Operation::EvictUnused(bytes) => {
            let before = account.unused_room();
            let taken = bytes.min(before);
            assert_eq!(account.evict_unused(bytes), taken);
        }
        Operation::Lose(bytes) => {
            account.lose(bytes);
            if model.is_metered {
                model.lost += bytes;
                model.turns_without = 0;
            }
        }
        Operation::EvictLost(bytes) => {
            assert_eq!(account.evict_lost(bytes), bytes.min(model.lost));
            model.lost -= bytes.min(model.lost);
        }
        Operation::Give(bytes) => {
            account.give(bytes);
            model.granted += i128::from(bytes);
            model.awaited = 0;
        }
        Operation::TakeUnused { bytes, coming_back } => {
            let stays = if coming_back { account.absent() } else { 0 };
            let expected = bytes.min(account.unused_room().saturating_sub(stays));
            let taken = if coming_back { account.take_spare(bytes) } else { account.take_unused(bytes) };
            assert_eq!(taken, expected);
            model.granted -= i128::from(expected);
        }
        Operation::Reserve(reserve) => {
            account.set_reserve(reserve);
            model.reserve = reserve;
        }
        Operation::InitialState(anyway) => {
            let nothing_is_missing = account.absent() <= account.never_fits();
            let absent = if anyway { Absent::ComesByFaults } else { Absent::ComesFirst };
            assert_eq!(account.hold(absent), anyway || nothing_is_missing);
        }
        Operation::LetGo => {
            account.let_go();
            model.awaited = 0;
        }
        Operation::EndTurn => {
            account.end_turn();
            model.turns_without += 1;
            if model.turns_without >= TURNS_WITHOUT {
                (model.lost, model.turns_without) = (0, 0);
            }
        }
        Operation::Unlimit => {
            account.stop_metering();
            model.is_metered = false;
            model.lost = 0;
            model.awaited = 0;
        }
        Operation::Limit => {
            account.start_metering();
            // The scheduler goes by what it was told last: what was allocated and not absent.
            model.granted = i128::from(model.told);
            model.lost = 0;
            model.is_metered = true;
        }
        Operation::LimitAnew => {
            let usage = account.start_metering_anew();
            model.told = usage.allocated - usage.absent;
            assert_eq!((model.told, account.take_made()), (account.charged(), 0), "nothing is told twice");
            model.granted = i128::from(model.told);
            model.lost = 0;
            model.is_metered = true;
        }
        Operation::Tell => {
            let usage = account.usage();
            model.told = usage.allocated - usage.absent;
            let allocated = account.allocated() + model.lost;
            assert_eq!((usage.allocated, usage.absent), (allocated, account.absent()));
        }
        Operation::TellMade => model.granted -= i128::from(account.take_made()),
        Operation::Register => {
            account.usage_to_register();
            model.told = account.charged();
            model.granted = i128::from(account.charged());
            model.lost = 0;
        }
        Operation::Capacity(bytes) => {
            account.set_capacity(bytes);
            (model.lost, model.turns_without) = (0, 0);
        }
        Operation::BeginWaiting { bytes, parked } => {
            let wait = if parked { Wait::AlsoWhileParked } else { Wait::WhileHolding };
            let waits = model.is_metered
                && i128::from(bytes) > model.room(account)
                && (parked || account.is_holding());
            assert_eq!(account.begin_waiting(bytes, wait), waits);
            assert!(!account.is_refused(bytes) || !waits, "it was not asked for yet");
            assert_eq!(account.goes_on_waiting(bytes, wait), waits);
            model.waiting += 1;
            if waits {
                model.awaited = model.awaited.max(bytes);
            }
        }
        Operation::EndWaiting(bytes) => {
            if model.waiting > 0 {
                account.end_waiting(bytes);
                model.waiting -= 1;
                if model.waiting == 0 || bytes >= model.awaited {
                    model.awaited = 0;
                }
            }
        }
        Operation::Refuse(asked) => {
            account.refuse(asked);
            // Nobody waits, or an eviction has made room that is on its way to the scheduler.
            let asked = if model.waiting > 0 && { *account }.take_made() == 0 { asked } else { 0 };
            model.awaited = 0;
            (model.lost, model.turns_without) = (0, 0);
            for bytes in 1..60 {
                let lacks = (i128::from(bytes) - model.room(account)).max(0) as u64;
                let is_refused = model.is_metered && asked > 0 && lacks >= asked;
                assert_eq!(account.is_refused(bytes), is_refused, "{bytes} of {asked}");
                assert!(
                    !account.goes_on_waiting(bytes, Wait::AlsoWhileParked),
                    "it asks anew, or is refused"
                );
            }
        }
        Operation::JoinTenant(joins) => {
            if let Some(tenant) = account.tenant() {
                tenant.leave(account.allocated() - account.aside());
            }
            account.share_limit(joins.then_some(model.tenant));
        }
    }
}

fn allocate(account: &mut Account<Shared>, model: &mut Model, bytes: u64, kind: Kind, kept: u64, open: bool) {
    let before = *account;
    let caller = if open { Caller::InsideGate } else { Caller::OutsideGate };
    let admitted = account.admit(bytes, kind, kept, caller);
    match admitted {
        Ok(Admission::Charged(charged)) => {
            let again = model.reserve.of(kind).map_or(0, |all| bytes.min(*all).min(kept));
            let needs_it_now = open || kind.needs_room();
            if needs_it_now {
                if let Some(kept) = model.reserve.of(kind) {
                    *kept -= again;
                }
                assert!(charged == bytes || before.may_spill(kind), "{charged} of {bytes} have room");
            } else {
                assert_eq!(charged, 0, "nothing is brought to the card while the lock is elsewhere");
            }
            model.insert(bytes, charged, kind);
            let limit = model.limit();
            assert!(account.allocated() <= limit && account.used() <= limit, "the limit is passed");
        }
        Ok(Admission::NeedsRoom(wanted)) => {
            assert!(i128::from(wanted) > model.room(&before) && model.is_metered);
            model.assert_unchanged(&before, account);
            let mut waits = before;
            let wait = Wait::AlsoWhileParked;
            assert!(
                waits.begin_waiting(wanted, wait) && waits.goes_on_waiting(wanted, wait),
                "it tries again for ever"
            );
        }
        Ok(Admission::Again) => {
            assert!(before.is_holding() && !open && !kind.needs_room());
            model.assert_unchanged(&before, account);
        }
        Err(refusal) => {
            model.assert_unchanged(&before, account);
            match refusal {
                Refusal::Own { used, most } => assert!(used + bytes > most, "{used} and {bytes} of {most}"),
                Refusal::Tenants { used, limit } => {
                    assert!(used + bytes > limit, "{used} and {bytes} of {limit}")
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        rng_seed: proptest::test_runner::RngSeed::Fixed(1),
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_sums_are_what_they_are_when_they_are_computed_anew(
        limited in any::<bool>(),
        oversubscribe in prop::bool::weighted(0.2),
        operations in prop::collection::vec(operation(), 1..150),
    ) {
        let mut model = Model::new(limited);
        let mut account = Account::new(terms(limited, oversubscribe));
        for operation in operations {
            let told = format!("{operation:?}");
            apply(&mut account, &mut model, operation);
            model.agrees(&account, &told);
        }
    }
}

/// Else the card would have more than the scheduler has given, and the process more than its limit.
#[test]
fn what_another_pool_keeps_serves_no_allocation() {
    let mut account: Account<Shared> = Account::new(terms(true, false));
    account.set_capacity(TOTAL);
    account.give(60);
    let ask = |mut account: Account<Shared>, bytes, kept| {
        account.admit(bytes, Kind::PlainPool, kept, Caller::InsideGate)
    };
    account.admit(50, Kind::PlainPool, 0, Caller::InsideGate).unwrap();
    account.keep(50, 50, Kind::PlainPool);
    assert_eq!(ask(account, 50, 50), Ok(Admission::Charged(50)), "the pool has kept it");
    assert_eq!(ask(account, 50, u64::MAX), Ok(Admission::Charged(50)), "there is no other pool");
    assert_eq!(ask(account, 50, 45), Ok(Admission::Charged(50)), "there is room for the rest");
    assert_eq!(ask(account, 50, 20), Ok(Admission::NeedsRoom(30)));
    assert_eq!(ask(account, 50, 0), Ok(Admission::NeedsRoom(50)));
    assert!(matches!(ask(account, 80, 0), Err(Refusal::Own { used: 50, .. })));
}

/// It would try again and again, as nothing that it waits for can come.
#[test]
fn an_allocation_that_takes_no_room_waits_for_none() {
    let mut account: Account<Shared> = Account::new(terms(false, false));
    account.set_capacity(TOTAL);
    account.give(50);
    account.admit(50, Kind::PlainPool, 0, Caller::InsideGate).unwrap();
    account.keep(50, 50, Kind::PlainPool);
    // The driver has rounded it up.
    account.set_reserve(DriverReserve { plain_pools: 60, ..DriverReserve::default() });
    assert_eq!(account.lacking(), 10);
    let admitted = account.admit(8, Kind::PlainPool, u64::MAX, Caller::InsideGate);
    assert_eq!(admitted, Ok(Admission::Charged(8)));
    let mut spills: Account<Shared> = Account::new(terms(false, true));
    spills.set_capacity(10);
    spills.set_reserve(DriverReserve { managed_pools: 10, ..DriverReserve::default() });
    assert_eq!(spills.charge_whole(20), Ok(0), "the card is full of its own memory");
}

#[test]
fn a_process_that_fits_the_card_again_says_so_at_once() {
    let mut account: Account<Shared> = Account::new(terms(false, false));
    account.set_capacity(TOTAL);
    account.admit(100, Kind::Mapped, 0, Caller::OutsideGate).unwrap();
    account.usage();
    account.set_capacity(90);
    assert!(!account.is_usage_stale());
    account.release(5, 0, Kind::Mapped);
    assert!(!account.is_usage_stale());
    account.release(5, 0, Kind::Mapped);
    assert!(account.is_usage_stale());
    account.usage();
    assert!(!account.is_usage_stale());
}

#[test]
fn memory_of_a_broken_context_is_immovable_until_it_is_freed() {
    let mut account: Account<Shared> = Account::new(terms(false, false));
    account.stop_metering();
    for bytes in [5, 3] {
        assert_eq!(account.admit(bytes, Kind::Mapped, 0, Caller::InsideGate), Ok(Admission::Charged(bytes)));
    }
    account.pin(5);
    assert_eq!(account.usage().immovable, 5);
    account.unpin(5);
    account.release(5, 5, Kind::Mapped);
    let usage = account.usage();
    assert_eq!((usage.immovable, usage.allocated), (0, 3), "the other memory can be moved still");
    account.pin(3);
    assert_eq!(account.usage().immovable, 3);
}

/// No other program makes room for what the driver refuses at once, and the sums stay what they were.
#[test]
fn more_than_a_process_can_address_is_refused_at_once() {
    for bytes in [1 << 50, u64::MAX] {
        let mut account: Account<Shared> = Account::new(terms(false, false));
        account.set_capacity(TOTAL);
        account.admit(5, Kind::ProgramsManaged, 0, Caller::OutsideGate).unwrap();
        let refused = account.admit(bytes, Kind::ProgramsManaged, 0, Caller::OutsideGate);
        assert!(matches!(refused, Err(Refusal::Own { used: 5, .. })), "{refused:?}");
        assert_eq!(account.allocated(), 5);
    }
}

#[test]
fn a_process_that_is_shut_out_keeps_what_it_has_and_gets_no_more_until_it_is_let_in() {
    let mut account: Account<Shared> = Account::new(terms(true, false));
    assert!(account.is_limit_awaited(), "others may share the limit");
    account.stop_metering();
    assert!(!account.is_limit_awaited());
    let mut ask = |change: fn(&mut Account<Shared>)| {
        change(&mut account);
        account.admit(5, Kind::Mapped, 0, Caller::InsideGate)
    };
    let outcomes = [Account::let_in, Account::shut_out, Account::let_in].map(&mut ask);
    let refused = Err(Refusal::Own { used: 5, most: 0 });
    assert_eq!(outcomes, [Ok(Admission::Charged(5)), refused, Ok(Admission::Charged(5))]);
    // It does not wait for what it was refused already.
    let mut account: Account<Shared> = Account::new(terms(true, false));
    account.shut_out();
    assert!(!account.is_limit_awaited() && !account.is_capacity_awaited());
    assert!(!Account::<Shared>::new(terms(false, false)).is_limit_awaited(), "there is none");
}

/// Others may have the card's memory, which they need not leave before the capacity is known: an allocation that is judged by the
/// memory that is free would be refused.
#[test]
fn a_scheduler_that_does_not_schedule_is_waited_for_until_it_tells_the_capacity() {
    let mut account: Account<Shared> = Account::new(terms(true, false));
    account.let_in();
    account.stop_metering();
    assert!(account.is_capacity_awaited() && account.is_limit_awaited());
    let mut told = account;
    told.set_capacity(TOTAL);
    assert!(!told.is_capacity_awaited() && !told.is_limit_awaited());
    account.lose_scheduler();
    assert!(!account.is_capacity_awaited() && !account.is_limit_awaited(), "nobody tells it");
}

#[test]
fn a_seats_process_has_nothing_of_the_limit_until_the_scheduler_answers_or_is_found_missing() {
    let of_a_seat = || Account::<Shared>::new(DeviceFacts { is_of_seat: true, ..terms(true, false) });
    let ask = |account: &mut Account<Shared>| account.admit(5, Kind::Mapped, 0, Caller::InsideGate);
    let refused = Err(Refusal::Own { used: 0, most: 0 });
    // The session has given up the wait for an answer.
    let mut unanswered = of_a_seat();
    unanswered.stop_metering();
    assert!(unanswered.is_limit_awaited());
    assert_eq!(ask(&mut unanswered), refused);
    let (mut missing, mut answered) = (unanswered, unanswered);
    missing.find_nobody();
    answered.set_capacity(TOTAL);
    for account in [&mut missing, &mut answered] {
        assert!(!account.is_limit_awaited(), "{account:?}");
        assert_eq!(ask(account), Ok(Admission::Charged(5)), "{account:?}");
    }
    // The allocation has waited long enough. Nobody else gives it what others may have.
    unanswered.shut_out();
    unanswered.find_nobody();
    assert_eq!(ask(&mut unanswered), refused);
    unanswered.let_in();
    assert!(
        unanswered.is_limit_awaited(),
        "the scheduler has answered, and says next which processes share the limit"
    );
}
