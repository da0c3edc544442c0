//! Jobs: the processes of a container, or of one `nvshare-ctl run`, have their turn together.

use nvshare_core::{Event, Identity};
use nvshare_proto::{ClientMessage, Gate, SchedulerMessage, TenantSettings, Usage};

use crate::table::{GIB, MS, Table, asked_to_leave, config, granted, twelve_gib};

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

/// A container that starts again in its pod is the same tenant. Another pod's, which gets the seat after it, is too.
#[test]
fn words_of_administrators_about_a_seat_go_with_its_container() {
    let seat = TenantSettings { weight: Some(50), memory: Some(8 * GIB), ..TenantSettings::default() };
    let given = TenantSettings { weight: Some(400), memory: Some(2 * GIB), paused: Some(true), ..seat };
    let usage = |limit| Usage { limit, allocated: GIB, absent: GIB, ..twelve_gib(0) };
    let comes = |table: &mut Table, client| {
        let identity = Identity { process: Some(client), tenant: Some(1), ..Identity::default() };
        table.register_as(client, identity, Gate::Closed, usage(8 * GIB))
    };
    let goes = |table: &mut Table, client| {
        table.happens(Event::Disconnected { client, process_remains: false });
    };
    // The limits that clients are told, the weight of the last client, and whether it is paused.
    let seen = |table: &Table, sent: Vec<(u64, SchedulerMessage)>| {
        let limit = |(_, message): (u64, SchedulerMessage)| match message {
            SchedulerMessage::Limit(limit) => Some(limit.bytes),
            _ => None,
        };
        let share = table.core.client_status().pop().expect("it is there").share;
        (sent.into_iter().filter_map(limit).collect::<Vec<u64>>(), share.weight, share.paused)
    };
    let mut table = Table::new(config(false));
    table.core.set_tenant_bounds(1, seat, MS(0));
    let sent = comes(&mut table, 1);
    assert_eq!(seen(&table, sent), (vec![], 50, false));
    table.core.give(1, None, given, MS(0)).expect("it is there");
    let sent = table.sent();
    assert_eq!(seen(&table, sent), (vec![2 * GIB], 400, true));
    goes(&mut table, 1);
    let sent = comes(&mut table, 2);
    assert_eq!(seen(&table, sent), (vec![2 * GIB], 400, true), "its container has started again");
    // It came before its pod was named. The limit that it was told is no wish of its own.
    table.say(2, ClientMessage::Usage(usage(2 * GIB)));
    table.core.forget_tenant_terms(1, MS(0));
    let sent = table.sent();
    assert_eq!(seen(&table, sent), (vec![8 * GIB], 50, false));
    table.core.give(2, None, given, MS(0)).expect("it is there");
    goes(&mut table, 2);
    table.core.forget_tenant_terms(1, MS(0));
    let sent = comes(&mut table, 3);
    assert_eq!(seen(&table, sent), (vec![], 50, false));
}
