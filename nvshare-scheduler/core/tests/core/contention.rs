//! GPUs on which memory will have to leave, before anybody waits.

use nvshare_core::{Contended, Event, Identity};
use nvshare_proto::{ClientMessage, Gate, MemoryMode, Register, Usage};

use crate::table::{GIB, MS, Table, config, gpu, newcomer, twelve_gib};

fn comes(table: &mut Table, client: u64, memory: MemoryMode, usage: Usage) {
    let register = Register { memory, ..newcomer(Gate::Closed, usage) };
    let identity = Identity { pid: Some(9), process: Some(client), ..Identity::default() };
    table.happens(Event::Registered { client, identity, register });
}

fn usage(allocated: u64, immovable: u64) -> Usage {
    Usage { allocated: allocated * GIB, immovable: immovable * GIB, ..twelve_gib(0) }
}

#[test]
fn contention_is_foreseen_before_anybody_waits_and_ends_with_what_does_not_fit() {
    let mut table = Table::new(config(false));
    comes(&mut table, 1, MemoryMode::Swap, usage(12, 1));
    comes(&mut table, 2, MemoryMode::Swap, usage(4, 0));
    assert_eq!(table.core.contended(), [], "they fit");
    table.say(2, ClientMessage::Usage(usage(10, 0)));
    let mut expected = Contended {
        gpu: gpu(0),
        beyond: 6 * GIB,
        largest: 12 * GIB,
        movable: vec![(1, 11 * GIB), (2, 10 * GIB)],
    };
    assert_eq!(table.core.contended(), [expected.clone()]);
    // Managed memory takes its place, and no memory that is made for it.
    comes(&mut table, 3, MemoryMode::Managed, usage(3, 0));
    expected.beyond = 9 * GIB;
    assert_eq!(table.core.contended(), [expected]);
    table.happens(Event::Disconnected { client: 1, process_remains: false });
    assert_eq!(table.core.contended(), []);
}

#[test]
fn nothing_leaves_for_one_program_alone_or_while_scheduling_is_off() {
    let mut table = Table::new(config(false));
    comes(&mut table, 1, MemoryMode::Swap, usage(20, 0));
    assert_eq!(table.core.contended(), [], "it is alone");
    comes(&mut table, 2, MemoryMode::Swap, usage(0, 0));
    assert_eq!(table.core.contended(), [], "the other one has nothing");
    table.say(2, ClientMessage::Usage(usage(1, 0)));
    assert_eq!(table.core.contended().len(), 1);
    assert_eq!(table.core.contended()[0].largest, 16 * GIB, "no more than the GPU has");
    table.core.switch_off(true, MS(1)).unwrap();
    assert_eq!(table.core.contended(), []);
}
