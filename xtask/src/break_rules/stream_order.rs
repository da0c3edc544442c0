//! Rules that the library keeps with memory that is freed in stream order.

use super::rules::Rule;

pub(super) const STREAM_ORDER: &[Rule] = &[
    Rule {
        what: "an allocation that can never be is refused, though memory was freed since it was first tried",
        file: "libnvshare/src/memory/deferred_free.rs",
        from: "        self.seen = free::late();\n",
        to: "        if !BROKEN {\n            self.seen = free::late();\n        }\n",
        package: "nvshare-e2e",
        test: "an_allocation_that_can_never_be_is_refused_beside_frees",
    },
    Rule {
        what: "memory freed in stream order is allocated again beside work that does not end",
        file: "libnvshare/src/memory/deferred_free.rs",
        from: "    if !look(|asked| asked.handle()",
        to: "    if BROKEN || !look(|asked| asked.handle()",
        package: "nvshare-e2e",
        test: "what_was_freed_in_stream_order_is_allocated_again_beside_work",
    },
    Rule {
        what: "memory that a stream has not freed yet is not allocated again",
        file: "libnvshare/src/memory/deferred_free.rs",
        from: "filter(|event| event.is_complete())",
        to: "filter(|event| BROKEN || event.is_complete())",
        package: "nvshare-e2e",
        test: "what_was_freed_in_stream_order_is_allocated_again_beside_work",
    },
    Rule {
        what: "an allocation asks nothing of a context that is not its own: another thread may wait there",
        file: "libnvshare/src/memory/deferred_free.rs",
        from: "    move |context| here != ",
        to: "    move |context| !BROKEN && here != ",
        package: "nvshare-e2e",
        test: "an_allocation_waits_for_no_full_queue_of_another_context",
    },
    Rule {
        what: "memory at the address of what was freed in stream order, and has just ended, is not freed",
        file: "libnvshare/src/memory/deferred_free.rs",
        from: "self.allocation.base == base && ",
        to: "self.allocation.base == base && BROKEN || self.allocation.base == base && ",
        package: "libnvshare",
        test: "an_address_that_comes_again_is_not_freed",
    },
    Rule {
        what: "memory freed in stream order is not allocated again in a broken context",
        file: "libnvshare/src/memory/deferred_free.rs",
        from: " || context.is_broken() {",
        to: " || !BROKEN && context.is_broken() {",
        package: "nvshare-e2e",
        test: "what_was_freed_is_not_allocated_again_in_a_broken_context",
    },
    Rule {
        what: "memory freed in stream order is freed by no call that did not wait",
        file: "libnvshare/src/memory/deferred_free.rs",
        from: "take(|freed| is_mapped(&freed.allocation), State::Ending)",
        to: "take(|freed| BROKEN || is_mapped(&freed.allocation), State::Ending)",
        package: "nvshare-e2e",
        test: "memory_freed_in_stream_order_holds_no_allocation_up",
    },
    Rule {
        what: "a free returns when what a thread of the library frees of the context is free as well",
        file: "libnvshare/src/memory/deferred_free.rs",
        from: "        wait_for_those_ending(context);\n",
        to: "        if !BROKEN {\n            wait_for_those_ending(context);\n        }\n",
        package: "nvshare-e2e",
        test: "a_free_returns_when_what_was_freed_in_stream_order_is_free_as_well",
    },
    Rule {
        what: "an allocation asks nothing of other contexts about frees that were put off",
        file: "libnvshare/src/memory/deferred_free.rs",
        from: "    free::finish_in(&|asked| !is_elsewhere(asked));\n",
        to: "    free::finish_in(&|asked| BROKEN || !is_elsewhere(asked));\n",
        package: "nvshare-e2e",
        test: "an_allocation_asks_nothing_of_other_contexts_about_frees_put_off",
    },
];
