//! Clients and schedulers that come back.

use nvshare_core::{Config, Core, Event, Identity, Output};
use nvshare_proto::{ClientMessage, Gate, SchedulerMessage};

use crate::table::registered;
use crate::world::{GIB, MS, config};

#[test]
fn who_is_back_before_it_is_known_to_be_gone_is_charged_once() {
    let mut core = Core::new(config(false));
    let again = |client| match registered(client, Gate::Closed, 0) {
        Event::Registered { register, .. } => {
            let identity = Identity { pid: Some(9), process: Some(77) };
            Event::Registered { client, identity, register }
        }
        other => other,
    };
    core.handle(again(0), MS(0));
    core.handle(again(1), MS(1));
    core.handle(Event::Disconnected { client: 0, process_remains: true }, MS(2));
    assert_eq!(core.gpu_status()[0].resident, 12 * GIB);
}

#[test]
fn who_was_parked_before_its_scheduler_waits_for_those_who_run() {
    let mut core = Core::new(Config { settle: MS(1300), ..config(false) });
    let granted = |core: &mut Core| {
        std::iter::from_fn(|| core.poll_output())
            .any(|o| matches!(o, Output::Send { client: 1, message: SchedulerMessage::LockOk { .. } }))
    };
    core.handle(registered(1, Gate::Closed, 8 * GIB), MS(100));
    core.handle(Event::Message { client: 1, message: ClientMessage::ReqLock }, MS(101));
    assert!(!granted(&mut core), "what the other fills is not known yet");
    assert_eq!(core.next_deadline(), Some(MS(1300)));
    core.handle(registered(2, Gate::Open, 0), MS(900));
    core.handle(Event::Deadline, MS(1300));
    assert!(!granted(&mut core), "the other runs");
    // The other is gone, with what it had.
    core.handle(Event::Disconnected { client: 2, process_remains: false }, MS(1400));
    assert!(granted(&mut core));
}
