//! Times that the scheduler measures itself: each from the message that it sent to the one that answers it.

use nvshare_core::{AutoTarget, Config, HandOverCosts};
use nvshare_proto::units::MIB;
use nvshare_proto::{ClientMessage, Epoch, Gate, SchedulerMessage, Usage};

use crate::table::{GIB, MS, Table, asked_to_leave, config, gpu, granted};

const LEAVES: u64 = 1;
const COMES: u64 = 2;

fn of(table: &Table, client: Option<u64>) -> HandOverCosts {
    table.core.switch_cost(gpu(0), client).expect("known")
}

#[test]
fn a_hand_over_is_timed_by_the_scheduler_itself() {
    let mut table = Table::new(config(false));
    table.register(LEAVES, Gate::Open, 12 * GIB, 0);
    table.register(COMES, Gate::Closed, 12 * GIB, 12 * GIB);
    assert_eq!(of(&table, None), HandOverCosts::default());
    let mut sent = table.say(COMES, ClientMessage::ReqLock);
    sent.append(&mut table.wait_until(1000));
    let epoch = asked_to_leave(&sent, LEAVES).unwrap_or_else(|| panic!("{sent:?}"));
    table.now = 1070;
    let sent = table.say(LEAVES, ClientMessage::LockReleased { epoch });
    let evict = sent.iter().find_map(|(to, message)| match message {
        SchedulerMessage::Evict(room) if *to == LEAVES => Some(*room),
        _ => None,
    });
    table.now = 1570;
    let sent = table.say(LEAVES, ClientMessage::Room(evict.unwrap_or_else(|| panic!("{sent:?}"))));
    table.say(LEAVES, ClientMessage::Evicted { gpu: gpu(0), short: 0 });
    let epoch = granted(&sent, COMES).unwrap_or_else(|| panic!("{sent:?}"));
    table.now = 1900;
    table.say(COMES, ClientMessage::Running { epoch });
    for (client, [drain, evict, restore, idle]) in [
        (None, [Some(70), Some(500), Some(330), Some(830)]),
        (Some(LEAVES), [Some(70), Some(500), None, None]),
        (Some(COMES), [None, None, Some(330), Some(830)]),
    ] {
        let cost = of(&table, client);
        let means = [cost.drain, cost.evict, cost.restore, cost.gap].map(|timed| timed.mean());
        assert_eq!(means, [drain, evict, restore, idle].map(|ms| ms.map(MS)), "{client:?}");
    }
    // Nothing that was kept before: what moves is no hand-over with nothing to move.
    assert_eq!(table.core.gpu_status()[0].switch_us[0], 0);
}

/// The turn passes from the one to the other, which begins after `took` milliseconds.
fn passes(table: &mut Table, from: (u64, Epoch), to: u64, took: u64) -> Epoch {
    let (leaves, epoch) = from;
    let mut sent = Vec::new();
    for _ in 0..4000 {
        if asked_to_leave(&sent, leaves).is_some() {
            break;
        }
        sent.append(&mut table.wait_until(table.now + 100));
    }
    assert_eq!(asked_to_leave(&sent, leaves), Some(epoch));
    let sent = table.say(leaves, ClientMessage::LockReleased { epoch });
    table.say(leaves, ClientMessage::ReqLock);
    table.now += took;
    let sent = table.give_back(sent);
    let epoch = granted(&sent, to).unwrap_or_else(|| panic!("{sent:?}"));
    table.say(to, ClientMessage::Running { epoch });
    epoch
}

#[test]
fn hand_overs_of_programs_that_were_small_say_how_long_those_of_large_ones_take() {
    let auto = Some(AutoTarget { overhead_ppm: 50_000, max_wait: MS(300_000) });
    let mut table = Table::new(Config { auto, ..config(false) });
    let usage = |allocated, absent| Usage { allocated, absent, ..crate::table::twelve_gib(0) };
    table.register(LEAVES, Gate::Closed, 12 * GIB, 0);
    table.register(COMES, Gate::Closed, 4 * GIB + 64 * MIB, 64 * MIB);
    let first = table.runs(LEAVES);
    table.say(COMES, ClientMessage::ReqLock);
    let epoch = passes(&mut table, (LEAVES, first), COMES, 2);
    table.say(COMES, ClientMessage::Usage(usage(4 * GIB + 64 * MIB, 0)));
    table.say(LEAVES, ClientMessage::Usage(usage(12 * GIB, 64 * MIB)));
    let epoch = passes(&mut table, (COMES, epoch), LEAVES, 2);
    table.say(LEAVES, ClientMessage::Usage(usage(12 * GIB, 0)));
    // It has grown meanwhile: 8 GiB have to leave for it from now on.
    table.say(COMES, ClientMessage::Usage(usage(12 * GIB, 8 * GIB)));
    let epoch = passes(&mut table, (LEAVES, epoch), COMES, 210);
    table.say(COMES, ClientMessage::Usage(usage(12 * GIB, 0)));
    table.say(LEAVES, ClientMessage::Usage(usage(12 * GIB, 8 * GIB)));
    let epoch = passes(&mut table, (COMES, epoch), LEAVES, 210);
    table.say(LEAVES, ClientMessage::Usage(usage(12 * GIB, 0)));
    table.say(COMES, ClientMessage::Usage(usage(12 * GIB, 8 * GIB)));
    passes(&mut table, (LEAVES, epoch), COMES, 210);
    // 0.21 s are a twentieth of 4.2 s.
    let quantum = table.core.gpu_status()[0].quantum_ms;
    assert!(quantum.abs_diff(3990) <= 3990 / 4, "{quantum} ms");
}
