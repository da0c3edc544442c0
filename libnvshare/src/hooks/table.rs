//! The table of hooks, made from the list of [entry points](crate::entry_points).

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};

use super::macros::{at_gate, hook_function, once_more, treated, unless_forked};
use super::{
    arrays, callbacks, captures, contexts, graphs, init, ipc, memory, memory_info, nodes, pointers, pools,
    stream_ordered, streams, thunks, vmm,
};
use crate::driver::functions;
use crate::driver::types::*;
use crate::entry_points::entry_points;
use crate::lookup::{Hook, HookAddress, Table, get_proc_address};
use crate::work::stream_key::StreamKey;

const NULL: CUstream = CUstream::NULL;

macro_rules! hooks {
    (
        hooked { $( $class:ident $gate:tt $name:ident $args:tt $(and $per_thread:ident)? = $kind:ident $deed:tt; )* }
        called { $( $cname:ident $cargs:tt $(and $cper_thread:ident)?; )* }
        forwarded { $( $fname:ident )* }
    ) => {
        /// The hooks, under the names of the functions that they stand for.
        #[allow(non_snake_case, reason = "the driver's own names")]
        mod hooks {
            use super::*;

            $(
                hook_function!($gate $name false $args $kind $deed);
                $( hook_function!($gate $per_thread true $args $kind $deed); )?
            )*
        }

        /// Every function of the driver that is known.
        pub(crate) static TABLE: Table = Table {
            hooks: &[ $( hook!($name), $( hook!($per_thread), )? )* ],
            without_hook: &[
                $( stringify!($cname), $( stringify!($cper_thread), )? )*
                $( stringify!($fname), )*
            ],
            thunks: thunks::THUNKS,
            has_thunk: thunks::is_for,
        };

        /// The treatment of each function that has a hook, for `docs/entry-points.md`.
        #[cfg(test)]
        static CLASSES: &[(&str, &str)] = &[
            $( (stringify!($name), stringify!($class)), $( (stringify!($per_thread), stringify!($class)), )? )*
        ];

        /// The class of each row, the function, and its place at the gate.
        #[cfg(test)]
        static GATES: &[(&str, &str, &str)] =
            &[ $( (stringify!($class), stringify!($name), stringify!($gate)), )* ];
    };
}

macro_rules! hook {
    ($name:ident) => {
        Hook {
            name: stringify!($name),
            address: HookAddress(hooks::$name as *const ()),
            real: functions::$name.slot(),
        }
    };
}

entry_points!(hooks);

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashSet};

    use super::*;
    use crate::lookup;

    #[test]
    fn exact_names_only() {
        for name in ["cuLaunchKernel", "cuMemAlloc_v2", "cuMemcpyHtoD_v2_ptds", "cuGetProcAddress_v2"] {
            assert!(lookup::is_hooked(&TABLE, name), "{name}");
        }
        for name in
            ["", "cu", "cuLaunchKernel2", "cudnnCreate", "cublasCreate_v2", "cuEventQuery", "cuDeviceGet"]
        {
            assert!(!lookup::is_hooked(&TABLE, name), "{name}");
        }
    }

    /// The page about the table; `NVSHARE_GOLDEN=write cargo test -p libnvshare` writes it anew.
    #[test]
    fn the_page_is_of_this_table() {
        let forwarded = TABLE.without_hook.iter().map(|&name| (name, "forward"));
        let classes: BTreeMap<&str, &str> = CLASSES.iter().copied().chain(forwarded).collect();
        let mut page = include_str!("entry-points.head.md").to_owned();
        for (name, class) in classes {
            let done = match class {
                "submit" | "copy" | "fill" => "gated",
                "forward" => "left alone",
                _ => "handled",
            };
            page.push_str(&format!("| `{name}` | {class} | {done} |\n"));
        }
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/entry-points.md");
        if std::env::var_os("NVSHARE_GOLDEN").is_some_and(|what| what == "write") {
            std::fs::write(path, &page).unwrap();
        }
        assert!(std::fs::read_to_string(path).unwrap() == page, "docs/entry-points.md is of another table");
    }

    /// Why the functions of a class pass no gate.
    const WITHOUT_GATE: [(&str, &str); 9] = [
        ("init", "there is no session before it"),
        ("context", "it submits no work, and what it ends is waited for by the driver"),
        ("allocate", "new memory is admitted, which steps in by itself and waits for room outside the gate"),
        ("free", "it names memory that the program does not use any more"),
        ("view", "the library answers for memory that is away"),
        ("share", "memory of other processes stays on the card"),
        ("stream", "it submits no work"),
        ("capture", "nothing runs on a capturing stream"),
        ("resolve", "it looks a name up"),
    ];

    /// Why the handler of a function passes the gate itself.
    const BY_HANDLER: [(&str, &str); 18] = [
        ("cuGraphLaunch", GRAPH_MEMORY),
        ("cuGraphUpload", GRAPH_MEMORY),
        ("cuGraphAddMemAllocNode", REFUSED_FIRST),
        ("cuGraphAddNode", REFUSED_FIRST),
        ("cuGraphAddNode_v2", REFUSED_FIRST),
        ("cuGraphAddNode_v3", REFUSED_FIRST),
        ("cuMemMap", ONLY_OURS),
        ("cuMemSetAccess", ONLY_OURS),
        ("cuMemExportToShareableHandle", ONLY_OURS),
        ("cuMulticastBindMem", ONLY_OURS),
        ("cuMulticastBindAddr", ONLY_OURS),
        ("cuMulticastBindMem_v2", ONLY_OURS),
        ("cuMulticastBindAddr_v2", ONLY_OURS),
        ("cuLogicalEndpointBindMem", ONLY_OURS),
        ("cuLogicalEndpointBindAddr", ONLY_OURS),
        ("cuPointerSetAttribute", ONLY_OURS),
        ("cuMemGetHandleForAddressRange", ONLY_OURS),
        ("cuIpcGetMemHandle", ONLY_OURS),
    ];
    const GRAPH_MEMORY: &str = "the driver's reserve is measured before and after it, outside the gate";
    const REFUSED_FIRST: &str = "a limit refuses it before it waits";
    const ONLY_OURS: &str =
        "only memory that the library moves may be away, and the call may name other memory";

    #[test]
    fn each_function_passes_the_gate_or_says_why_not() {
        let is_class = |class: &str| WITHOUT_GATE.iter().any(|(known, _)| *known == class);
        let is_handled = |name: &str| BY_HANDLER.iter().any(|(known, _)| *known == name);
        for &(class, name, gate) in GATES {
            match gate {
                "[handler]" => assert!(is_handled(name), "{name}: why does the handler pass the gate?"),
                "[none]" => assert!(is_class(class), "{name} is of the class {class}, which passes the gate"),
                _ => assert!(gate == "[addresses]" || gate.starts_with("[on "), "{name}: {gate}"),
            }
        }
        let has = |class: &str, gate: &str| GATES.iter().any(|row| (row.0, row.2) == (class, gate));
        let is_by_handler = |name: &str| GATES.iter().any(|row| (row.1, row.2) == (name, "[handler]"));
        let unused = WITHOUT_GATE.iter().find(|(class, _)| !has(class, "[none]"));
        assert_eq!(unused, None, "no function of this class is without a gate");
        let unused = BY_HANDLER.iter().find(|(name, _)| !is_by_handler(name));
        assert_eq!(unused, None, "the handler of this function does not pass the gate");
    }

    /// A kernel's parameters are words to the driver. A child graph's nodes have named their memory before.
    #[test]
    fn nodes_that_name_memory_pass_the_gate() {
        const NAME_NONE: [&str; 7] =
            ["AddChildGraph", "Empty", "Event", "ExternalSemaphores", "Host", "Kernel", "MemFree"];
        let is_of_node = |name: &&str| {
            name.starts_with("cuGraph")
                && name.contains("Node")
                && ["Add", "SetParams"].iter().any(|does| name.contains(does))
        };
        let names_some = |name: &&str| !NAME_NONE.iter().any(|none| name.contains(none));
        let left_alone = TABLE.without_hook.iter().copied().filter(is_of_node);
        let left_alone: Vec<&str> = left_alone.filter(names_some).collect();
        assert!(left_alone.is_empty(), "{left_alone:?}");
    }

    #[test]
    fn each_function_without_a_hook_has_a_thunk() {
        assert!(TABLE.thunks.iter().map(|thunk| thunk.name).eq(TABLE.without_hook.iter().copied()));
        let without: Vec<&str> =
            TABLE.without_hook.iter().copied().filter(|name| !(TABLE.has_thunk)(name)).collect();
        assert!(without.iter().all(|name| name.contains("Checkpoint") || *name == "cuGetExportTable"));
        assert_eq!(without.len(), 8, "{without:?}");
    }

    #[test]
    fn no_name_is_in_the_table_twice() {
        let mut seen = HashSet::new();
        for name in TABLE.names() {
            assert!(seen.insert(name), "{name}");
        }
    }
}
