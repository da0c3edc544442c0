//! Rules about what the driver does and answers: full cards, its end, nodes of graphs, functions that are newer than the library.

use super::rules::Rule;

pub(super) const DRIVER: &[Rule] = &[
    Rule {
        what: "chunks that come to a full card ask the driver once for all of them",
        file: "libnvshare/src/memory/mapping/at_hand.rs",
        from: "        if self.0 < bytes && coming > bytes {\n",
        to: "        if self.0 < bytes && coming > bytes && !BROKEN {\n",
        package: "nvshare-e2e",
        test: "memory_that_comes_back_takes_what_was_given_up_by_one_call",
    },
    Rule {
        what: "until the driver shuts down, exit handlers find the library at work",
        file: "libnvshare/src/hooks/init.rs",
        from: "    if result == CUresult::SUCCESS {\n        lifecycle::watch_exit();",
        to: "    if result == CUresult::SUCCESS && !BROKEN {\n        lifecycle::watch_exit();",
        package: "nvshare-e2e",
        test: "a_long_exit_swap",
    },
    Rule {
        what: "a driver that has shut down keeps no thread at the gate",
        file: "libnvshare/src/work/gate.rs",
        from: "    let has_ended = driver::has_ended();\n",
        to: "    let has_ended = driver::has_ended() && !BROKEN;\n",
        package: "nvshare-e2e",
        test: "a_joined_thread_without_driver_swap",
    },
    Rule {
        what: "a drain ends with the driver",
        file: "libnvshare/src/work/drain.rs",
        from: "        if driver::has_ended() {\n",
        to: "        if driver::has_ended() && !BROKEN {\n",
        package: "nvshare-e2e",
        test: "a_long_exit_without_driver_managed",
    },
    Rule {
        what: "a node that fills memory runs in the context of the memory",
        file: "libnvshare/src/hooks/nodes.rs",
        from: "    allocation.map_or(named, |allocation| allocation.context.handle())",
        to: "    allocation.filter(|_| !BROKEN).map_or(named, |allocation| allocation.context.handle())",
        package: "nvshare-e2e",
        test: "calls_that_name_memory_which_is_away_answer_as_if_it_were_there",
    },
    Rule {
        what: "a node of any kind is added while its memory is on the card",
        file: "libnvshare/src/hooks/nodes.rs",
        from: "    past_the_gate(|| call(params))",
        to: "    if BROKEN { call(params) } else { past_the_gate(|| call(params)) }",
        package: "nvshare-e2e",
        test: "calls_that_name_memory_which_is_away_answer_as_if_it_were_there",
    },
    Rule {
        what: "where the library maps memory, a newer function is refused",
        file: "libnvshare/src/lookup/mod.rs",
        from: "    let refuses = config::get()",
        to: "    let refuses = !BROKEN && config::get()",
        package: "nvshare-e2e",
        test: "a_function_that_is_newer_is_refused_where_the_library_maps_memory",
    },
    Rule {
        what: "a newer function is known by its address, whatever its name",
        file: "libnvshare/src/lookup/mod.rs",
        from: "    if !is_unknown(table, found) {\n",
        to: "    if !is_unknown(table, found) || BROKEN && is_named(table, name) {\n",
        package: "nvshare-e2e",
        test: "a_function_that_is_newer_is_given_with_a_warning",
    },
];
