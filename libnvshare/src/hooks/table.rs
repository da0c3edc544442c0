//! The table of hooks, made from the list of [entry points](crate::entry_points).

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};

use super::macros::{gated_hook, handled_hook, naming_hook, prompt_hook};
use super::{
    arrays, callbacks, captures, contexts, graphs, init, ipc, memory, memory_info, nodes, pointers, pools,
    stream_ordered, streams, vmm,
};
use crate::driver::functions;
use crate::driver::types::*;
use crate::entry_points::entry_points;
use crate::lookup::{Hook, HookAddress, Table, get_proc_address};
use crate::work::stream_key::StreamKey;

const NULL: CUstream = CUstream::NULL;

macro_rules! hooks {
    (
        hooked { $( $class:ident $name:ident $args:tt $(and $per_thread:ident)? = $kind:ident $deed:tt; )* }
        called { $( $cname:ident $cargs:tt $(and $cper_thread:ident)?; )* }
        forwarded { $( $fname:ident )* }
    ) => {
        /// The hooks, under the names of the functions that they stand for.
        #[allow(non_snake_case, reason = "the driver's own names")]
        mod hooks {
            use super::*;

            $( hook_function!($kind $name false $args $deed); $( hook_function!($kind $per_thread true $args $deed); )? )*
        }

        /// Every function of the driver that is known.
        pub(crate) static TABLE: Table = Table {
            hooks: &[ $( hook!($name), $( hook!($per_thread), )? )* ],
            without_hook: &[
                $( stringify!($cname), $( stringify!($cper_thread), )? )*
                $( stringify!($fname), )*
            ],
        };

        /// The treatment of each function that has a hook, for `docs/entry-points.md`.
        #[cfg(test)]
        static CLASSES: &[(&str, &str)] = &[
            $( (stringify!($name), stringify!($class)), $( (stringify!($per_thread), stringify!($class)), )? )*
        ];
    };
}

/// The hook of one row.
macro_rules! hook_function {
    (gated $name:ident $per_thread:literal $args:tt ($stream:expr)) => {
        gated_hook!($name, $per_thread, $args, $stream);
    };
    (naming $name:ident $per_thread:literal $args:tt ()) => {
        naming_hook!($name, $args);
    };
    (prompt $name:ident $per_thread:literal $args:tt ($ordered:ident, $($pointer:ident),+)) => {
        prompt_hook!($name, $per_thread, $args, $ordered, ($($pointer),+));
    };
    (handled $name:ident $per_thread:literal $args:tt ($handler:path)) => {
        handled_hook!($name, $args, $handler);
    };
    (looked_up $name:ident $per_thread:literal $args:tt ($handler:path)) => {
        handled_hook!($name, $args, $handler, &TABLE);
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

    /// The page about the table; `NVSHARE_UPDATE=1 cargo test -p libnvshare` writes it anew.
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
        if std::env::var_os("NVSHARE_UPDATE").is_some() {
            std::fs::write(path, &page).unwrap();
        }
        assert!(std::fs::read_to_string(path).unwrap() == page, "docs/entry-points.md is of another table");
    }

    #[test]
    fn no_name_is_in_the_table_twice() {
        let mut seen = HashSet::new();
        for name in TABLE.names() {
            assert!(seen.insert(name), "{name}");
        }
    }
}
