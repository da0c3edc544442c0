//! The rules by which jobs share the time of a GPU.

use super::rules::Rule;

pub(super) const SHARES: &[Rule] = &[
    Rule {
        what: "short work does not end a turn that goes on for those who wait in turn",
        file: "nvshare-scheduler/core/src/turns.rs",
        from: "let waiter = self.first_in_turn(gpu, unit);",
        to: "let waiter = if BROKEN { Some(unit.clone()) } else { self.first_in_turn(gpu, unit) };",
        package: "nvshare-simulate",
        test: "short_work_waits_about_as_long_each_time",
    },
    Rule {
        what: "what short work costs is paid for by longer turns",
        file: "nvshare-scheduler/core/src/policy/budget.rs",
        from: "self.balance -= earned(took, 1_000_000);",
        to: "self.balance -= if BROKEN { 0 } else { earned(took, 1_000_000) };",
        package: "nvshare-simulate",
        test: "long_work_loses_no_more_to_short_work_than_was_stated",
    },
    Rule {
        what: "an enforced limit binds a job that is alone",
        file: "nvshare-scheduler/core/src/enforce.rs",
        from: "let pace = if runs {",
        to: "let pace = if runs && !BROKEN {",
        package: "nvshare-client",
        test: "an_enforced_limit_binds_alone_too",
    },
    Rule {
        what: "time is divided by the weight",
        file: "nvshare-scheduler/core/src/shares.rs",
        from: "    if weight == USUAL {\n",
        to: "    if weight == USUAL || BROKEN {\n",
        package: "nvshare-client",
        test: "shares_of_programs_that_do_not_fit_come_out_within_five_per_cent",
    },
    Rule {
        what: "a priority is a factor and not an order",
        file: "nvshare-scheduler/core/src/terms.rs",
        from: "Priority::Low => FINER / 8,",
        to: "Priority::Low => if BROKEN { 0 } else { FINER / 8 },",
        package: "nvshare-client",
        test: "a_priority_starves_nobody",
    },
    Rule {
        what: "a job that comes back keeps no more than a bound of what it is behind",
        file: "nvshare-scheduler/core/src/shares.rs",
        from: "was.behind.clamp(0, bound)",
        to: "was.behind.clamp(0, if BROKEN { Virtual::MAX / 8 } else { bound })",
        package: "nvshare-core",
        test: "a_pause_earns_nothing_and_costs_nothing",
    },
    Rule {
        what: "a job whose limit is enforced saves while others keep it waiting",
        file: "nvshare-scheduler/core/src/policy/pace.rs",
        from: "let most = if does == Does::Sleeps {",
        to: "let most = if BROKEN || does == Does::Sleeps {",
        package: "nvshare-client",
        test: "an_enforced_limit_is_exact_however_long_drains_take",
    },
    Rule {
        what: "short work waits a little longer each time that it costs more than it may",
        file: "nvshare-scheduler/core/src/policy/budget.rs",
        from: "let debt = (-self.balance).clamp(0, most);",
        to: "let debt = if BROKEN { 0 } else { (-self.balance).clamp(0, most) };",
        package: "nvshare-simulate",
        test: "short_work_waits_about_as_long_each_time",
    },
];
