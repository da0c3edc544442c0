//! The table of hooks, made from the list of [entry points](crate::entry_points).

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};

use super::macros::{gated_hook, handled_hook, prompt_hook};
use super::{
    arrays, callbacks, captures, contexts, graphs, init, ipc, memory, memory_info, pointers, pools,
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
        gated { $( $gclass:ident $gname:ident $gargs:tt $(and $gper_thread:ident)? on $stream:expr; )* }
        prompt { $( $pclass:ident $pname:ident $pargs:tt and $pper_thread:ident as $ordered:ident of $pointers:tt; )* }
        handled { $( $hclass:ident $hname:ident $hargs:tt = $handler:path; )* }
        looked_up { $( $lclass:ident $lname:ident $largs:tt = $lookup:path; )* }
        called { $( $cname:ident $cargs:tt $(and $cper_thread:ident)?; )* }
        forwarded { $( $fname:ident )* }
    ) => {
        /// The hooks, under the names of the functions that they stand for.
        #[allow(non_snake_case, reason = "the driver's own names")]
        mod hooks {
            use super::*;

            $( gated_hook!($gname, false, $gargs, $stream); $( gated_hook!($gper_thread, true, $gargs, $stream); )? )*
            $( prompt_hook!($pname, false, $pargs, $ordered, $pointers); prompt_hook!($pper_thread, true, $pargs, $ordered, $pointers); )*
            $( handled_hook!($hname, $hargs, $handler); )*
            $( handled_hook!($lname, $largs, $lookup, &TABLE); )*
        }

        /// Every function of the driver that is known.
        pub(crate) static TABLE: Table = Table {
            hooks: &[
                $( hook!($gname), $( hook!($gper_thread), )? )*
                $( hook!($pname), hook!($pper_thread), )*
                $( hook!($hname), )*
                $( hook!($lname), )*
            ],
            without_hook: &[
                $( stringify!($cname), $( stringify!($cper_thread), )? )*
                $( stringify!($fname), )*
            ],
        };

        /// What is done about each function, for `docs/entry-points.md`.
        #[cfg(test)]
        static DEEDS: &[(&str, &str)] = &[
            $( (stringify!($gname), stringify!($gclass)), $( (stringify!($gper_thread), stringify!($gclass)), )? )*
            $( (stringify!($pname), stringify!($pclass)), (stringify!($pper_thread), stringify!($pclass)), )*
            $( (stringify!($hname), stringify!($hclass)), )*
            $( (stringify!($lname), stringify!($lclass)), )*
            $( (stringify!($cname), "forward"), $( (stringify!($cper_thread), "forward"), )? )*
            $( (stringify!($fname), "forward"), )*
        ];
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
        let deeds: BTreeMap<&str, &str> = DEEDS.iter().copied().collect();
        let mut page = include_str!("entry-points.head.md").to_owned();
        for (name, deed) in deeds {
            let done = match deed {
                "submit" | "copy" | "fill" => "gated",
                "forward" => "left alone",
                _ => "handled",
            };
            page.push_str(&format!("| `{name}` | {deed} | {done} |\n"));
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
