//! Whose memory leaves for the client that is next.

use nvshare_core::{AutoTarget, Config};
use nvshare_proto::{Amount, ClientMessage, Epoch, Gate, SchedulerMessage};

use crate::table::{GIB, MS, Table, asked_to_leave, config, gpu, granted, room_given};

/// The bytes that each client was told to evict.
pub(crate) fn evicted(sent: &[(u64, SchedulerMessage)]) -> Vec<(u64, u64)> {
    let evict = |(client, message): &(u64, SchedulerMessage)| match message {
        SchedulerMessage::Evict(room) => Some((*client, room.bytes / GIB)),
        _ => None,
    };
    sent.iter().filter_map(evict).collect()
}

/// A client whose memory is all there asks for the lock, and runs without the spare room that comes with it.
pub(crate) fn runs(table: &mut Table, client: u64) -> Epoch {
    let sent = table.say(client, ClientMessage::ReqLock);
    let epoch = granted(&sent, client).unwrap_or_else(|| panic!("{sent:?}"));
    table.say(client, ClientMessage::Running { epoch });
    table.say(client, ClientMessage::Room(Amount { gpu: gpu(0), bytes: room_given(&sent, client) }));
    epoch
}

/// A client runs for a moment and gives the lock back.
pub(crate) fn works(table: &mut Table, client: u64) {
    let epoch = runs(table, client);
    table.now += 3;
    table.say(client, ClientMessage::LockReleased { epoch });
}

#[test]
fn of_those_that_sleep_the_one_that_fell_asleep_first_gives_way() {
    for awake_last in [1, 2] {
        let mut table = Table::new(config(false));
        for client in [1, 2] {
            table.register(client, Gate::Closed, 6 * GIB, 0);
            table.now += 10;
        }
        table.now = 100;
        works(&mut table, awake_last);
        table.register(3, Gate::Closed, 6 * GIB, 6 * GIB);
        let sent = table.say(3, ClientMessage::ReqLock);
        assert_eq!(evicted(&sent), [(3 - awake_last, 2)], "{sent:?}");
    }
}

#[test]
fn short_work_keeps_its_memory_for_as_long_as_it_usually_sleeps() {
    // It usually sleeps for 0.7 s.
    for (sleeps, gives) in [(300, vec![(2, 8)]), (60_000, vec![(1, 4), (2, 4)])] {
        let auto = Some(AutoTarget { overhead_ppm: 500_000, max_wait: MS(1000) });
        let mut table = Table::new(Config { auto, ..config(false) });
        table.register(1, Gate::Closed, 4 * GIB, 0);
        for _ in 0..3 {
            works(&mut table, 1);
            table.now += 700;
        }
        works(&mut table, 1);
        table.register(2, Gate::Closed, 10 * GIB, 0);
        let epoch = runs(&mut table, 2);
        table.register(3, Gate::Closed, 10 * GIB, 10 * GIB);
        table.wait_until(table.now + sleeps);
        let mut sent = table.say(3, ClientMessage::ReqLock);
        sent.append(&mut table.wait_until(table.now + 300));
        assert_eq!(asked_to_leave(&sent, 2), Some(epoch), "{sent:?}");
        let sent = table.say(2, ClientMessage::LockReleased { epoch });
        assert_eq!(evicted(&sent), gives, "after {sleeps} ms: {sent:?}");
    }
}
