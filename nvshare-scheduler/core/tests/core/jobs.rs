//! Jobs: the processes of a container, or of one `nvshare-ctl run`, have their turn together.

use nvshare_core::Identity;
use nvshare_proto::{ClientMessage, Gate, Usage};

use crate::table::{GIB, Table, asked_to_leave, config, granted, twelve_gib};

fn register(table: &mut Table, client: u64, tenant: Option<u64>, gib: u64) {
    let identity = Identity { process: Some(client), tenant, ..Identity::default() };
    let usage = Usage { allocated: gib * GIB, absent: gib * GIB, ..twelve_gib(0) };
    table.register_as(client, identity, Gate::Closed, usage);
}

/// A process of tenant 1 runs, with 6 GiB, and a client waits that needs all of the GPU.
fn one_runs_and_a_big_one_waits() -> Table {
    let mut table = Table::new(config(false));
    register(&mut table, 1, Some(1), 6);
    register(&mut table, 2, Some(1), 6);
    register(&mut table, 3, None, 16);
    register(&mut table, 4, Some(2), 4);
    table.runs(1);
    assert_eq!(granted(&table.say(3, ClientMessage::ReqLock), 3), None);
    table
}

#[test]
fn a_process_joins_the_turn_of_its_job() {
    let mut table = one_runs_and_a_big_one_waits();
    assert_eq!(granted(&table.say(4, ClientMessage::ReqLock), 4), None, "it would delay who waits");
    let epoch = granted(&table.say(2, ClientMessage::ReqLock), 2).expect("its job has the turn");
    table.say(2, ClientMessage::Running { epoch });
    let sent = table.wait_until(1000);
    for process in [1, 2] {
        assert!(asked_to_leave(&sent, process).is_some(), "the turn ends for both: {sent:?}");
    }
}

#[test]
fn a_process_that_comes_when_the_turn_of_its_job_ends_waits_for_the_next() {
    let mut table = one_runs_and_a_big_one_waits();
    assert!(asked_to_leave(&table.wait_until(1000), 1).is_some());
    assert_eq!(granted(&table.say(2, ClientMessage::ReqLock), 2), None);
}
