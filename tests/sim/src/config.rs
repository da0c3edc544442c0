//! The simulated machine: one with a T4, unless the environment says otherwise.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nvshare_proto::units::{GIB, parse_bytes};

use crate::process::{ECC_UNCORRECTABLE, Failure};

/// The card and its link. Sizes and rates are those that a program sees; the real stores are smaller by `scale`.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// The folder of the world's file: processes that name the same folder share the cards.
    pub(crate) dir: PathBuf,
    pub(crate) gpus: u32,
    /// Cards that the process sees, in its own order.
    pub(crate) visible: Vec<usize>,
    /// Bytes of each card.
    pub(crate) memory: u64,
    /// Bytes of its card that a context takes, the stacks of its kernels for each KiB of their limit, and a module.
    pub(crate) context: u64,
    pub(crate) stacks: u64,
    pub(crate) module: u64,
    /// A block of 2 MiB is this many times smaller in the stores.
    pub(crate) scale: u64,
    /// Bytes per second of a bulk copy to the card, and from it.
    pub(crate) to_device: f64,
    pub(crate) to_host: f64,
    /// Bytes per second of a copy from the card to page-locked memory.
    pub(crate) copy_out: f64,
    /// Bytes per second at which the driver page-locks memory of the program.
    pub(crate) register: f64,
    /// Blocks that are copied as a whole between a card and page-locked memory keep only as many bytes there as the store
    /// has. So a program that moves its memory that way, and does not look at it, needs no more host memory than the
    /// simulator has for it.
    pub(crate) sparse: bool,
    /// Bytes per second that page faults move.
    pub(crate) fault: f64,
    /// Bytes per second of first touches by a kernel.
    pub(crate) first_touch: f64,
    /// The driver keeps the frames of managed memory that has moved to the host.
    pub(crate) keeps_pages: bool,
    /// Pools may be of managed memory, as from CUDA 13 on.
    pub(crate) managed_pools: bool,
    /// A process that is off its cards comes back to no other one.
    pub(crate) fixed_cards: bool,
    /// The driver has `cuCtxRecordEvent`, as from 12.5 on.
    pub(crate) context_record: bool,
    /// Functions are loaded when they are launched first.
    pub(crate) lazy_loading: bool,
    /// Ended handles and freed addresses are handed out again at once, as malloc does. Otherwise they are never reused, so
    /// that a use after the end is certain to be seen.
    pub(crate) reuse_handles: bool,
    /// Microseconds that each call with a stream takes before it looks at the handle.
    pub(crate) entry_us: u64,
    /// N: each N-th event of a context fails: out of memory. 0: none fails.
    pub(crate) context_events_fail: u64,
    /// Bytes that a process may page-lock.
    pub(crate) most_locked: u64,
    /// Memory that several processes can map is page-locked like any.
    pub(crate) locks_shared: bool,
    /// Bytes that a process may page-lock of memory that no other can map.
    pub(crate) most_private: u64,
    /// The wrong answer of the card about pieces that nvshare's kernel looks at.
    pub(crate) lie: Option<Lie>,
    /// The driver compiles no PTX that has this entry.
    pub(crate) refused_ptx: Option<String>,
    /// N and a time: each N-th allocation on a card takes this long; 0: none does.
    pub(crate) slow_allocations: (u64, Duration),
    /// Calls of a kind wait for as long as this file is there; one that waits makes a file of that name with the ending `waits`.
    pub(crate) held: Option<(Held, PathBuf)>,
    /// The driver has no UUID for this device of the process.
    pub(crate) unnamed: Option<i32>,
    /// Cards cannot reach each other's memory for as long as this file is there.
    pub(crate) refused_peers: Option<PathBuf>,
    /// While this file is there, a card is lost: see [`Config::lost`].
    pub(crate) lost: Option<PathBuf>,
}

/// Kinds of calls that a test may hold up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Held {
    /// Allocations on a card.
    Allocations,
    /// Calls that make mapped memory accessible.
    Access,
    /// Calls that begin a capture.
    Capture,
    /// Copies to page-locked memory: each waits before it begins.
    Out,
    /// Copies from page-locked memory.
    In,
    /// The first free of memory, or of reserved addresses, that finds the file. Other frees go on.
    Free,
    /// Launches of the kernel by which nvshare looks at memory: each waits before the kernel is in its stream.
    Look,
    /// Ends of the page-lock of registered memory.
    Unregister,
}

/// A wrong answer of a card about pieces of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lie {
    /// Every other piece is all zero.
    Zeros,
    /// All pieces have the same hash.
    Unchanged,
}

impl Config {
    /// Whether cards cannot reach each other's memory now.
    pub(crate) fn refuses_peers(&self) -> bool {
        self.refused_peers.as_deref().is_some_and(Path::exists)
    }

    /// From `CUDA_VISIBLE_DEVICES` (indices), `NVSIM_DIR`, `NVSIM_GPUS`, `NVSIM_MEMORY`, `NVSIM_SCALE`, and the rates in GB/s `NVSIM_TO_DEVICE`,
    /// `NVSIM_CONTEXT`, `NVSIM_STACKS`, `NVSIM_MODULE` (bytes), `NVSIM_TO_HOST`, `NVSIM_COPY_OUT`, `NVSIM_REGISTER`, `NVSIM_FAULT`, `NVSIM_FIRST_TOUCH`; `NVSIM_SPARSE=1`, `NVSIM_KEEPS_PAGES=1`, `NVSIM_MANAGED_POOLS=0`, `NVSIM_CTX_RECORD=0`, `NVSIM_FIXED_CARDS=1`, `CUDA_MODULE_LOADING=EAGER`; `NVSIM_REUSE_HANDLES=1`,
    /// `NVSIM_ENTRY_US`, `NVSIM_CTX_RECORD_FAILS`, `NVSIM_SLOW_ALLOCATIONS` (how often, and milliseconds: `4:300`), `NVSIM_HELD` (a kind of calls, and a file: `out:/tmp/held`),
    /// `NVSIM_UNNAMED` (a device), `NVSIM_REFUSED_PEERS` and `NVSIM_LOST` (files),
    /// `NVSIM_MOST_LOCKED` and `NVSIM_MOST_PRIVATE` (bytes), `NVSIM_LOCK_SHARED=0`, `NVSIM_LIE` (`zeros`, `unchanged`), `NVSIM_REFUSED_PTX`.
    pub(crate) fn from_env() -> Self {
        let number = |name: &str, default: f64| {
            env::var(name)
                .ok()
                .and_then(|text| text.parse::<f64>().ok())
                .filter(|n| *n > 0.0)
                .unwrap_or(default)
        };
        let bytes = |name: &str, default: u64| {
            env::var(name).ok().and_then(|text| parse_bytes(&text).ok()).unwrap_or(default)
        };
        let most = |name: &str| bytes(name, u64::MAX);
        let gpus = number("NVSIM_GPUS", 1.0) as u32;
        let visible = env::var("CUDA_VISIBLE_DEVICES").map_or_else(
            |_| (0..gpus as usize).collect(),
            // The first entry that is not a card ends the list, as with the driver.
            |list| {
                list.split(',').map_while(|i| i.trim().parse().ok().filter(|&i| i < gpus as usize)).collect()
            },
        );
        // T4: 12 GB by faults took 47 s; PCIe 3 x16 moves 12 GB/s one way, managed memory leaves at half of it.
        Self {
            dir: env::var_os("NVSIM_DIR").map_or_else(|| env::temp_dir().join("nvsim"), PathBuf::from),
            gpus,
            visible,
            memory: bytes("NVSIM_MEMORY", 16 * GIB),
            context: bytes("NVSIM_CONTEXT", 0),
            stacks: bytes("NVSIM_STACKS", 0),
            module: bytes("NVSIM_MODULE", 0),
            scale: (number("NVSIM_SCALE", 64.0) as u64).clamp(1, 512).next_power_of_two(),
            to_device: number("NVSIM_TO_DEVICE", 12.0) * 1e9,
            to_host: number("NVSIM_TO_HOST", 6.0) * 1e9,
            copy_out: number("NVSIM_COPY_OUT", 12.0) * 1e9,
            register: number("NVSIM_REGISTER", 50.0) * 1e9,
            sparse: env::var("NVSIM_SPARSE").as_deref() == Ok("1"),
            keeps_pages: env::var("NVSIM_KEEPS_PAGES").as_deref() == Ok("1"),
            managed_pools: env::var("NVSIM_MANAGED_POOLS").as_deref() != Ok("0"),
            fixed_cards: env::var_os("NVSIM_FIXED_CARDS").is_some(),
            context_record: env::var("NVSIM_CTX_RECORD").as_deref() != Ok("0"),
            lazy_loading: env::var("CUDA_MODULE_LOADING").as_deref() != Ok("EAGER"),
            reuse_handles: env::var("NVSIM_REUSE_HANDLES").as_deref() == Ok("1"),
            entry_us: number("NVSIM_ENTRY_US", 0.0) as u64,
            context_events_fail: number("NVSIM_CTX_RECORD_FAILS", 0.0) as u64,
            most_locked: most("NVSIM_MOST_LOCKED"),
            locks_shared: env::var("NVSIM_LOCK_SHARED").as_deref() != Ok("0"),
            most_private: most("NVSIM_MOST_PRIVATE"),
            lie: match env::var("NVSIM_LIE").as_deref() {
                Ok("zeros") => Some(Lie::Zeros),
                Ok("unchanged") => Some(Lie::Unchanged),
                _ => None,
            },
            refused_ptx: env::var("NVSIM_REFUSED_PTX").ok(),
            slow_allocations: slow_allocations().unwrap_or_default(),
            held: env::var("NVSIM_HELD").ok().map(|text| held(&text)),
            unnamed: env::var("NVSIM_UNNAMED").ok().and_then(|device| device.parse().ok()),
            refused_peers: env::var_os("NVSIM_REFUSED_PEERS").map(PathBuf::from),
            lost: env::var_os("NVSIM_LOST").map(PathBuf::from),
            fault: number("NVSIM_FAULT", 0.256) * 1e9,
            first_touch: number("NVSIM_FIRST_TOUCH", 5.0) * 1e9,
        }
    }

    /// Waits while calls of this kind are held up, and says so by a file.
    pub(crate) fn wait_while_held(&self, what: Held) {
        let is_this = |(held, file): &&(Held, PathBuf)| *held == what && file.exists();
        if let Some((_, file)) = self.held.as_ref().filter(is_this) {
            let _ = std::fs::write(file.with_extension("waits"), "");
            while file.exists() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// The same for the first call that finds the file.
    pub(crate) fn wait_once_while_held(&self, what: Held) {
        if self.held.as_ref().is_some_and(|(_, file)| !file.with_extension("waits").exists()) {
            self.wait_while_held(what);
        }
    }

    /// The code that a call on a card answers, if the card is lost. The file says the code, the card, and which call answers so: 214,
    /// the first and all of them, if it does not say.
    pub(crate) fn lost(&self, gpu: usize, call: &str) -> Option<Failure> {
        let text = std::fs::read_to_string(self.lost.as_ref()?).ok()?;
        let mut words = text.split_whitespace();
        let code = words.next().and_then(|code| code.parse().ok()).unwrap_or(ECC_UNCORRECTABLE);
        let card = words.next().and_then(|card| card.parse().ok()).unwrap_or(0);
        let is_it = gpu == card && words.next().is_none_or(|only| only == call);
        if is_it {
            // A test waits for that.
            let _ = std::fs::write(self.lost.as_ref()?.with_extension("met"), "");
        }
        is_it.then_some(code)
    }
}

fn slow_allocations() -> Option<(u64, Duration)> {
    let text = env::var("NVSIM_SLOW_ALLOCATIONS").ok()?;
    let (each, millis) = text.split_once(':')?;
    Some((each.parse().ok()?, Duration::from_millis(millis.parse().ok()?)))
}

/// Reads `NVSIM_HELD`. A test that holds up no call that there is would show nothing, so the process stops.
fn held(text: &str) -> (Held, PathBuf) {
    let kinds = [
        ("allocations", Held::Allocations),
        ("access", Held::Access),
        ("capture", Held::Capture),
        ("out", Held::Out),
        ("in", Held::In),
        ("free", Held::Free),
        ("look", Held::Look),
        ("unregister", Held::Unregister),
    ];
    let read = text.split_once(':').and_then(|(kind, file)| {
        let (_, held) = kinds.into_iter().find(|(name, _)| *name == kind)?;
        Some((held, PathBuf::from(file)))
    });
    read.unwrap_or_else(|| {
        eprintln!("NVSIM_HELD: {text:?} is no kind of calls with a file");
        std::process::abort()
    })
}

/// Counts a call. Returns true for one in `each` calls; if `each` is 0, for none.
pub(crate) fn is_each(each: u64, count: &AtomicU64) -> bool {
    each > 0 && (count.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(each)
}
