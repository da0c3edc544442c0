//! When a program counts as idle.

use super::*;

#[test]
fn idle_after_a_pause_behind_complete_work_and_not_between_steps() {
    let mut client = Client::running_contended();
    assert_eq!(client.tick(1, 0, 10), []);
    assert_eq!(client.tick(6, 0, 10), [Action::Post(MoverOrder::Probe)]);
    assert_eq!(client.feed(Input::Quiet { submissions: 10 }), []);
    // The next step comes 20 ms later: not idle.
    assert_eq!(client.tick(20, 0, 11), []);
    assert_eq!(client.tick(6, 0, 11), [Action::Post(MoverOrder::Probe)]);
    assert_eq!(client.feed(Input::Quiet { submissions: 11 }), []);
    assert_eq!(client.tick(24, 0, 11), []);
    assert_eq!(client.tick(2, 0, 11), [Action::TryIdle { submissions: 11 }]);
    assert!(client.feed(Input::WentIdle).contains(&Action::Send(ClientMessage::Idle { epoch: epoch(1) })));
    // Work again: the client may still have the lock, and requests it.
    assert!(client.feed(Input::ThreadsWaiting).contains(&Action::Send(ClientMessage::ReqLock)));
}

#[test]
fn a_holder_is_looked_at_less_often_the_longer_it_is_busy() {
    let mut client = Client::running_contended();
    let next_look = |client: &Client| client.machine.next_tick(false, client.now);
    assert_eq!(next_look(&client), Some(MS(5)));
    assert_eq!(client.tick(112, 0, 10), []);
    assert_eq!(next_look(&client), Some(MS(7)));
    assert_eq!(client.tick(888, 0, 20), []);
    assert_eq!(next_look(&client), Some(MS(10)));
    assert_eq!(client.tick(10, 0, 20), [Action::Post(MoverOrder::Probe)]);
    assert_eq!(next_look(&client), None, "the mover answers");
    assert_eq!(client.feed(Input::Busy), []);
    assert_eq!(next_look(&client), Some(MS(10)));
    assert_eq!(client.tick(10, 0, 20), [Action::Post(MoverOrder::Probe)]);
    // It is looked at when it is idle, and soon if it is busy again.
    assert_eq!(client.feed(Input::Quiet { submissions: 20 }), []);
    assert_eq!(next_look(&client), Some(MS(5)));
    assert_eq!(client.tick(22, 0, 20), []);
    assert_eq!(next_look(&client), Some(MS(3)));
    assert_eq!(client.tick(3, 0, 21), []);
    assert_eq!(next_look(&client), Some(MS(5)));
}

#[test]
fn an_earlier_look_at_the_work_does_not_make_a_new_grant_idle() {
    let mut client = Client::running_contended();
    assert_eq!(client.tick(1, 0, 10), []);
    assert_eq!(client.tick(6, 0, 10), [Action::Post(MoverOrder::Probe)]);
    client.hear(SchedulerMessage::DropLock { epoch: epoch(1), patience_ms: 200 });
    // The mover's answer was on its way already.
    client.feed(Input::Quiet { submissions: 10 });
    client.feed(Input::Drained(1));
    client.feed(Input::ThreadsWaiting);
    client.now += MS(1000);
    client.hear(SchedulerMessage::LockOk { epoch: epoch(2), quantum_ms: 1000, room: vec![] });
    client.feed(Input::Began);
    assert_eq!(client.tick(0, 0, 10), [], "the thread has had no time to wake");
}

/// A client of which nothing is known, and that has just become idle.
fn idle() -> Client {
    let mut client = Client::running_contended();
    client.feed(Input::WentIdle);
    client
}

/// A client that works under a grant for 10 ms, while another client waits, with a pause of `pause` in the middle. Returns how long all
/// work is complete before the gate closes.
fn spell(client: &mut Client, counter: u64, pause: u64) -> Duration {
    let submissions = counter * 10;
    client.feed(Input::ThreadsWaiting);
    client.hear(SchedulerMessage::LockOk { epoch: epoch(counter), quantum_ms: 1000, room: vec![] });
    client.feed(Input::Began);
    client.tick(1, 0, submissions);
    if pause > 0 {
        client.tick(5, 0, submissions);
        client.feed(Input::Quiet { submissions });
        assert_eq!(client.tick(pause, 0, submissions + 1), [], "a pause of {pause} ms");
    }
    let submissions = submissions + 1;
    client.tick(1, 0, submissions);
    assert_eq!(client.tick(5, 0, submissions), [Action::Post(MoverOrder::Probe)]);
    client.feed(Input::Quiet { submissions });
    let complete = client.now;
    while client.tick(1, 0, submissions).is_empty() {}
    client.feed(Input::WentIdle);
    client.now - complete
}

/// Runs spells with these pauses, each behind a sleep of 100 ms, and returns after how long each was over.
fn idle_after(client: &mut Client, pauses: &[u64]) -> Vec<u64> {
    let mut times = Vec::new();
    for &pause in pauses {
        client.now += MS(100);
        times.push(spell(client, client.machine.last_drain + 2, pause).as_millis() as u64);
    }
    times
}

#[test]
fn a_program_of_short_work_without_pauses_is_idle_sooner() {
    let mut client = idle();
    assert_eq!(idle_after(&mut client, &[0; 6]), [25, 25, 25, 4, 4, 4]);
    // Longer pauses are kept in mind for four spells.
    assert_eq!(idle_after(&mut client, &[3, 0, 0, 0, 0, 0]), [6, 6, 6, 6, 6, 4]);
}

#[test]
fn a_pause_that_was_taken_for_idleness_counts() {
    let mut client = idle();
    idle_after(&mut client, &[0; 5]);
    client.now += MS(12);
    client.feed(Input::ThreadsWaiting);
    assert_eq!(idle_after(&mut client, &[0; 5]), [25, 25, 25, 25, 4]);
}

#[test]
fn a_long_spell_says_nothing_of_the_next_ones() {
    let mut client = idle();
    idle_after(&mut client, &[0; 5]);
    client.now += MS(100);
    client.feed(Input::ThreadsWaiting);
    // Its lock is taken in the middle, and it waits.
    client.hear(SchedulerMessage::LockOk { epoch: epoch(50), quantum_ms: 1000, room: vec![] });
    client.feed(Input::Began);
    client.hear(SchedulerMessage::DropLock { epoch: epoch(50), patience_ms: 200 });
    client.feed(Input::Drained(1));
    client.now += MS(500);
    assert_eq!(idle_after(&mut client, &[0; 6]), [4, 25, 25, 25, 25, 4]);
}
