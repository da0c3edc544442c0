//! What the scheduler times itself: each figure from the message that it sent to the one that answers it.

use nvshare_core::SwitchCost;
use nvshare_proto::{ClientMessage, Gate, SchedulerMessage};

use crate::table::{GIB, MS, Table, asked_to_leave, config, gpu, granted};

const LEAVES: u64 = 1;
const COMES: u64 = 2;

fn of(table: &Table, client: Option<u64>) -> SwitchCost {
    table.core.switch_cost(gpu(0), client).expect("known")
}

#[test]
fn a_hand_over_is_timed_by_the_scheduler_itself() {
    let mut table = Table::new(config(false));
    table.register(LEAVES, Gate::Open, 12 * GIB, 0);
    table.register(COMES, Gate::Closed, 12 * GIB, 12 * GIB);
    assert_eq!(of(&table, None), SwitchCost::default());
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
        let means = [cost.drain, cost.evict, cost.restore, cost.idle].map(|timed| timed.mean());
        assert_eq!(means, [drain, evict, restore, idle].map(|ms| ms.map(MS)), "{client:?}");
    }
    // Nothing that was kept before: what moves is no hand-over with nothing to move.
    assert_eq!(table.core.gpu_status()[0].switch_us[0], 0);
}
