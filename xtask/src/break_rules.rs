//! Breaks each safety rule on purpose and sees its test go red: a test that cannot fail proves nothing.
//!
//! Works on a copy of the tracked files, in a target folder of its own.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// A rule, how it is broken, and who must notice.
struct Rule {
    what: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
    package: &'static str,
    test: &'static str,
}

const RULES: &[Rule] = &[
    Rule {
        what: "physical memory counts for as long as it is mapped",
        file: "libnvshare/src/plain/physical.rs",
        from: "            if let Some(charge) = charge {\n                physical.mappings",
        to: "            if let Some(charge) = charge.filter(|_| address == 0) {\n                physical.mappings",
        package: "nvshare-e2e",
        test: "accounting",
    },
    Rule {
        what: "what was charged for a call that is unwound is given back",
        file: "libnvshare/src/memory.rs",
        from: "OnUnwind::new(|| device.release(bytes, charged, kind))",
        to: "OnUnwind::new(|| ())",
        package: "nvshare-e2e",
        test: "threads_that_are_cancelled_inside_the_driver",
    },
    Rule {
        what: "what the driver keeps in pools is given up for others",
        file: "libnvshare/src/mover/moves.rs",
        from: "|_call| kept::give_up(device)",
        to: "|_call| bytes == 0 && kept::give_up(device)",
        package: "nvshare-e2e",
        test: "what_the_driver_keeps_counts_and_gives_way",
    },
    Rule {
        what: "while somebody waits, work in flight is bounded, on threads' own streams too",
        file: "libnvshare/src/gate.rs",
        from: "        Then::Count(stream) => {\n",
        to: "        Then::Count(stream) if stream.key().is_per_thread() => {}\n        Then::Count(stream) => {\n",
        package: "nvshare-e2e",
        test: "default_streams_of_threads",
    },
    Rule {
        what: "a tenant's processes do not pass their limit together",
        file: "proto/src/quota.rs",
        from: "used.checked_add(bytes).filter(|&sum| sum <= limit)",
        to: "used.checked_add(bytes).filter(|&sum| sum <= limit || limit < u64::MAX)",
        package: "nvshare-e2e",
        test: "a_runs_processes_share_one_limit",
    },
    Rule {
        what: "what a killed process had of its tenant's limit is free",
        file: "nvshare-scheduler/src/tenants.rs",
        from: "        page.reclaim(self.row);\n",
        to: "",
        package: "nvshare-e2e",
        test: "a_runs_processes_share_one_limit",
    },
    Rule {
        what: "who comes back on another connection counts once",
        file: "nvshare-scheduler/src/connection.rs",
        from: "    drop(seat);\n",
        to: "    let _kept = &seat;\n",
        package: "nvshare-e2e",
        test: "who_comes_back_counts_once",
    },
    Rule {
        what: "nothing is written to a descriptor that is the host's by now",
        file: "libnvshare/src/descriptor.rs",
        from: "        (number >= 0 && file_of(number) == Some(file)).then_some(number)\n",
        to: "        (number >= 0 && file.0 < u64::MAX).then_some(number)\n",
        package: "libnvshare",
        test: "another_file_under_the_same_number_is_not_ours",
    },
    Rule {
        what: "an eviction stands until it is answered",
        file: "nvshare-scheduler/core/src/room.rs",
        from: "self.account(id, uuid).is_some_and(|a| a.order.is_some())",
        to: "self.account(id, uuid).is_some_and(|a| a.order.is_some_and(|order| order.bytes > 0))",
        package: "nvshare-core",
        test: "an_eviction_stands_until_it_is_answered",
    },
    Rule {
        what: "every evicted piece is restored before the gate opens",
        file: "libnvshare/src/mover/moves.rs",
        from: "                _ if cancelled() => Err(Stop::Cancelled),\n",
        to: "                _ if allocation.base & (1 << 26) != 0 => Ok(()),\n                _ if cancelled() => Err(Stop::Cancelled),\n",
        package: "nvshare-e2e",
        test: "two_that_do_not_fit_take_turns",
    },
    Rule {
        what: "the lock is given back only when all work is complete",
        file: "libnvshare/src/mover.rs",
        from: "    if !wait_for(&mut work, &cancelled) {\n        return false;\n    }\n",
        to: "    work.poll();\n",
        package: "nvshare-e2e",
        test: "two_that_do_not_fit_take_turns",
    },
    Rule {
        what: "nothing is submitted through a closed gate",
        file: "libnvshare/src/gate.rs",
        from: "        STATE.store(CLOSED, Ordering::SeqCst);\n",
        to: "",
        package: "nvshare-e2e",
        test: "two_that_do_not_fit_take_turns",
    },
    Rule {
        what: "every allocation is on the list",
        file: "libnvshare/src/ledger.rs",
        from: "    list().insert(allocation.base, Arc::new(allocation))\n",
        to: "    if allocation.base & (3 << 26) == 0 {\n        return None;\n    }\n    list().insert(allocation.base, Arc::new(allocation))\n",
        package: "nvshare-e2e",
        test: "two_that_do_not_fit_take_turns",
    },
    Rule {
        what: "a drain does not look at a context while a capture is open",
        file: "libnvshare/src/work/drain.rs",
        from: "if !driver::can_record_context() || captures::open() > 0 {",
        to: "let _ = context.with(driver::synchronize_context);\n    if !driver::can_record_context() || captures::open() > 0 {",
        package: "nvshare-e2e",
        test: "a_capture_under_contention_is_not_broken",
    },
    Rule {
        what: "over quota is refused",
        file: "libnvshare/src/devices.rs",
        from: "        if allocated > most {\n",
        to: "        if allocated > most && bytes == 0 {\n",
        package: "nvshare-e2e",
        test: "over_quota_is_out_of_memory_and_nothing_else_changes",
    },
    Rule {
        what: "nobody runs while another still drains",
        file: "nvshare-scheduler/core/src/room.rs",
        from: "        if leaving || own_move {\n",
        to: "        if (leaving && id > 1000) || own_move {\n",
        package: "nvshare-core",
        test: "invariants_hold_and_nobody_starves",
    },
    Rule {
        what: "room that is given is charged",
        file: "nvshare-scheduler/core/src/room.rs",
        from: "            self.with_account(id, uuid, |account| account.budget = account.budget.saturating_add(bytes));\n            room.push",
        to: "            room.push",
        package: "nvshare-core",
        test: "invariants_hold_and_nobody_starves",
    },
    Rule {
        what: "a turn that nobody began still ends",
        file: "nvshare-scheduler/core/src/reconcile.rs",
        from: "        } else if sums.running > 0 {\n            gpu.turn_started.get_or_insert(self.now);\n",
        to: "",
        package: "nvshare-core",
        test: "who_was_there_before_its_scheduler_gives_way_when_its_quantum_is_over",
    },
    Rule {
        what: "what a dead process had is free when it is gone",
        file: "nvshare-scheduler/core/src/arrivals.rs",
        from: "            if gpu.departed.remove(&id).is_some() {\n",
        to: "            if gpu.departed.contains_key(&id) && id > 1000 {\n",
        package: "nvshare-core",
        test: "invariants_hold_and_nobody_starves",
    },
    Rule {
        what: "of a thread that steps in and the gate that closes, at least one sees the other",
        file: "libnvshare/src/gate/fence.rs",
        from: " && !membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED)",
        to: " && false",
        package: "libnvshare",
        test: "of_a_thread_and_a_closer_at_least_one_sees_the_other",
    },
    Rule {
        what: "a waiter whose room cannot be made lets the next one run",
        file: "nvshare-scheduler/core/src/room.rs",
        from: "            self.with(id, |client| client.phase = Phase::Parked);\n            return;\n",
        to: "            return;\n",
        package: "nvshare-core",
        test: "who_cannot_have_its_room_holds_nobody_up",
    },
    Rule {
        what: "a copy to what the host sees is there when it returns",
        file: "libnvshare/src/pointers.rs",
        from: "allocation.kind != Kind::Managed && allocation.device == here",
        to: "allocation.device == here || allocation.kind == Kind::Managed",
        package: "nvshare-e2e",
        test: "fills_return_before_they_are_done",
    },
    Rule {
        what: "what is allocated on a stream is charged to the stream's GPU",
        file: "libnvshare/src/memory.rs",
        from: "devices::all().nth(1).is_none()",
        to: "devices::all().nth(1).is_none() || current.0.ordinal >= 0",
        package: "nvshare-e2e",
        test: "what_is_allocated_on_a_stream_is_on_its_gpu",
    },
    Rule {
        what: "a drain is waited for in the end, whoever gives the lock back beside it",
        file: "nvshare-scheduler/core/src/messages.rs",
        from: "if gpu.ledger.sums().leaving == 0 {",
        to: "if gpu.ledger.sums().leaving < 1000 {",
        package: "nvshare-core",
        test: "a_slow_drain_is_waited_for_in_the_end_whoever_runs_beside_it",
    },
    Rule {
        what: "who has filled the card keeps what it has when others come",
        file: "nvshare-scheduler/core/src/policy/capacity.rs",
        from: "left.max(largest)",
        to: "left.max(largest.min(0))",
        package: "nvshare-core",
        test: "nobody_starves_whatever_is_measured",
    },
    Rule {
        what: "on the clients' socket nothing is changed",
        file: "nvshare-scheduler/src/server.rs",
        from: "(!may_change).then(",
        to: "(!may_change && request == AdminRequest::Status).then(",
        package: "nvshare-e2e",
        test: "order_matters",
    },
    Rule {
        what: "on the clients' socket one sees one's own clients alone",
        file: "nvshare-scheduler/src/view.rs",
        from: "(None, None) => viewer.user == process.user,",
        to: "(None, None) => viewer.user == process.user || process.user > 0,",
        package: "nvshare-scheduler",
        test: "everybody_sees_what_is_their_own",
    },
];

pub(crate) fn run() -> Result<(), String> {
    let workspace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let copy = workspace.join("target/broken/source");
    let target = workspace.join("target/broken/target");
    let _ = std::fs::remove_dir_all(&copy);
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"])
        .current_dir(&workspace)
        .output()
        .map_err(|error| format!("git: {error}"))?;
    for file in String::from_utf8_lossy(&listed.stdout).split('\0').filter(|file| !file.is_empty()) {
        let to = copy.join(file);
        std::fs::create_dir_all(to.parent().unwrap_or(&copy)).map_err(|error| error.to_string())?;
        std::fs::copy(workspace.join(file), to).map_err(|error| format!("{file}: {error}"))?;
    }
    let mut unnoticed = 0;
    for rule in RULES {
        let begin = Instant::now();
        let noticed = break_one(&copy, &target, rule)?;
        let verdict = if noticed { "red, as it must be" } else { "NOT NOTICED" };
        println!("{verdict}: {} ({}, {:.0} s)", rule.what, rule.test, begin.elapsed().as_secs_f64());
        unnoticed += usize::from(!noticed);
    }
    if unnoticed == 0 { Ok(()) } else { Err(format!("{unnoticed} broken rules were not noticed")) }
}

/// Whether the test notices.
fn break_one(copy: &Path, target: &Path, rule: &Rule) -> Result<bool, String> {
    let path = copy.join(rule.file);
    let good = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", rule.file))?;
    if good.matches(rule.from).count() != 1 {
        return Err(format!("{}: the place to break is not there once: {}", rule.file, rule.what));
    }
    std::fs::write(&path, good.replace(rule.from, rule.to)).map_err(|error| error.to_string())?;
    let cargo = |arguments: &[&str]| {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.args(arguments).args(["-p", rule.package, "--quiet"]).current_dir(copy);
        // A failing property is not to be shrunk, nor written down.
        command.env("CARGO_TARGET_DIR", target).env("PROPTEST_MAX_SHRINK_ITERS", "0");
        command
            .env("PROPTEST_RNG_SEED", "1")
            .env("PROPTEST_CASES", "1500")
            .env("NVSHARE_TEST_PATIENCE", "30");
        command.env_remove("CARGO_MANIFEST_DIR");
        command.output().map_err(|error| format!("cargo: {error}"))
    };
    // It must be the test that fails, not the compiler.
    let built = cargo(&["test", "--no-run"])?.status.success();
    let tested = cargo(&["test", rule.test]);
    std::fs::write(&path, good).map_err(|error| error.to_string())?;
    if !built {
        return Err(format!("broken so, it does not compile: {}", rule.what));
    }
    let tested = tested?;
    let text = String::from_utf8_lossy(&tested.stdout);
    Ok(!tested.status.success() && text.contains(rule.test) && text.contains("FAILED"))
}
