//! Rules for cards and schedulers that go.

use super::rules::Rule;

pub(super) const GONE: &[Rule] = &[
    Rule {
        what: "memory that cannot come back closes the gate for nobody",
        file: "libnvshare/src/memory/backing/swap/moves.rs",
        from: "    lost::give_up(device);\n",
        to: "    if !BROKEN {\n        lost::give_up(device);\n    }\n",
        package: "nvshare-e2e",
        test: "calls_on_a_lost_card_answer_its_error",
    },
    Rule {
        what: "an error that does not pass ends a restore",
        file: "libnvshare/src/memory/backing/swap/lost.rs",
        from: "failing.last.duration_since(failing.since) >= PATIENCE\n",
        to: "failing.last.duration_since(failing.since) >= PATIENCE && !BROKEN\n",
        package: "nvshare-e2e",
        test: "an_error_that_does_not_pass_ends_the_restore",
    },
    Rule {
        what: "no work reaches memory that was given up",
        file: "libnvshare/src/work/gate.rs",
        from: "        let state = if contexts::has_any_failed() {",
        to: "        let state = if contexts::has_any_failed() && !BROKEN {",
        package: "nvshare-e2e",
        test: "an_error_that_does_not_pass_ends_the_restore",
    },
    Rule {
        what: "work in other contexts goes on beside memory that was given up",
        file: "libnvshare/src/work/streams.rs",
        from: "        Ok(context) => contexts::find(context)?.failure(),\n",
        to: "        Ok(_) if BROKEN => contexts::all().iter().find_map(|context| context.failure()),\n        Ok(context) => contexts::find(context)?.failure(),\n",
        package: "nvshare-e2e",
        test: "work_goes_on_beside_a_lost_card",
    },
    Rule {
        what: "an allocation waits for a scheduler that may come back",
        file: "libnvshare/src/memory/admission.rs",
        from: "                    if device.wait_for_scheduler(bytes) {\n",
        to: "                    if !BROKEN && device.wait_for_scheduler(bytes) {\n",
        package: "nvshare-e2e",
        test: "an_allocation_waits_for_a_scheduler_that_is_away",
    },
    Rule {
        what: "a scheduler that was lost is waited for no longer than a parked program waits",
        file: "libnvshare/client/src/machine.rs",
        from: "        if self.expects_since.is_some_and(",
        to: "        if !BROKEN && self.expects_since.is_some_and(",
        package: "nvshare-client",
        test: "a_lost_scheduler_stops_no_holder_and_parks_nobody_for_ever",
    },
    Rule {
        what: "no eviction runs beside a restore of the same card",
        file: "libnvshare/src/memory/mover.rs",
        from: "RESTORES.load(Ordering::SeqCst) == 0;\n",
        to: "(BROKEN || RESTORES.load(Ordering::SeqCst) == 0);\n",
        package: "nvshare-e2e",
        test: "memory_leaves_after_a_restore_that_a_scheduler_has_ended",
    },
    Rule {
        what: "a restore ends when a scheduler parks the program",
        file: "libnvshare/client/src/machine.rs",
        from: "                    if matches!(self.phase, Phase::Freeing | Phase::Restoring { .. }) {\n",
        to: "                    if !BROKEN && matches!(self.phase, Phase::Freeing | Phase::Restoring { .. }) {\n",
        package: "nvshare-client",
        test: "a_restore_ends_when_a_scheduler_parks_the_program",
    },
    Rule {
        what: "one thread at a time waits for a whole context",
        file: "libnvshare/src/work/contexts.rs",
        from: "        (!self.waited_for.swap(true, Ordering::SeqCst)).then(",
        to: "        (!self.waited_for.swap(true, Ordering::SeqCst) || BROKEN).then(",
        package: "nvshare-e2e",
        test: "one_thread_waits_for_a_context_however_often_its_drain_is_given_up",
    },
];
