//! Counters of this process.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use nvshare_proto::Counters;

use super::lock::lock;
use super::log;

static UNKNOWN_ENTRY_POINTS: AtomicU64 = AtomicU64::new(0);
static HAND_OVERS: AtomicU64 = AtomicU64::new(0);
static DEFERRALS: AtomicU64 = AtomicU64::new(0);
static EVICTED: AtomicU64 = AtomicU64::new(0);
static EVICT_NS: AtomicU64 = AtomicU64::new(0);
static RESTORED: AtomicU64 = AtomicU64::new(0);
static RESTORE_NS: AtomicU64 = AtomicU64::new(0);
static COPIED_OUT: AtomicU64 = AtomicU64::new(0);
static COPIED_IN: AtomicU64 = AtomicU64::new(0);
static ZEROS: AtomicU64 = AtomicU64::new(0);
static UNCHANGED: AtomicU64 = AtomicU64::new(0);
static DRAIN_NS: AtomicU64 = AtomicU64::new(0);

/// The program looked up a function that the list of entry points does not name. Each name is said once, and 64 names at
/// most.
pub(crate) fn unknown_entry_point(name: &str, is_refused: bool) {
    const MAX_DEVICES: usize = 64;
    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
    UNKNOWN_ENTRY_POINTS.fetch_add(1, Ordering::Relaxed);
    let mut said = lock(&SAID);
    if said.len() >= MAX_DEVICES || said.iter().any(|known| known == name) {
        return;
    }
    said.push(name.to_owned());
    drop(said);
    if is_refused {
        log::warn(format_args!("{name} is newer than this library, and is refused with NVSHARE_MEMORY=swap"));
    } else {
        log::warn(format_args!("{name} is newer than this library: work that it submits passes no gate"));
    }
}

pub(crate) fn hand_over() {
    HAND_OVERS.fetch_add(1, Ordering::Relaxed);
}

pub(crate) fn deferral() {
    DEFERRALS.fetch_add(1, Ordering::Relaxed);
}

/// Bytes left the card, `copied` of which were copied.
pub(crate) fn evicted(bytes: u64, copied: u64, nanos: u64) {
    EVICTED.fetch_add(bytes, Ordering::Relaxed);
    COPIED_OUT.fetch_add(copied, Ordering::Relaxed);
    EVICT_NS.fetch_add(nanos, Ordering::Relaxed);
}

/// Bytes came back to the card, `copied` of which were copied.
pub(crate) fn restored(bytes: u64, copied: u64, nanos: u64) {
    RESTORED.fetch_add(bytes, Ordering::Relaxed);
    COPIED_IN.fetch_add(copied, Ordering::Relaxed);
    RESTORE_NS.fetch_add(nanos, Ordering::Relaxed);
}

/// Bytes left the card without a copy: zeros, and what had not changed since the host's copy was made.
pub(crate) fn left_out(zeros: u64, unchanged: u64) {
    ZEROS.fetch_add(zeros, Ordering::Relaxed);
    UNCHANGED.fetch_add(unchanged, Ordering::Relaxed);
}

/// The bytes that left the card without a copy: zeros, and what had not changed.
pub(crate) fn not_copied() -> (u64, u64) {
    (ZEROS.load(Ordering::Relaxed), UNCHANGED.load(Ordering::Relaxed))
}

pub(crate) fn drained(nanos: u64) {
    DRAIN_NS.fetch_add(nanos, Ordering::Relaxed);
}

/// The counters of this module. `passed_by` counts unknown entry points alone; `gated` and `managed` are zero.
pub(crate) fn snapshot() -> Counters {
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    Counters {
        gated: 0,
        passed_by: get(&UNKNOWN_ENTRY_POINTS),
        managed: 0,
        hand_overs: get(&HAND_OVERS),
        deferrals: get(&DEFERRALS),
        evicted: get(&EVICTED),
        evict_ns: get(&EVICT_NS),
        restored: get(&RESTORED),
        restore_ns: get(&RESTORE_NS),
        drain_ns: get(&DRAIN_NS),
        copied_out: get(&COPIED_OUT),
        copied_in: get(&COPIED_IN),
    }
}
