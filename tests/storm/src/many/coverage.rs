//! Counts how often each feature was composed.

use std::collections::{BTreeMap, BTreeSet};

/// The capability of simulated drivers alone: moods.
pub(crate) const SIMULATED: &str = "simulated";

/// Features, with the capability that each needs (empty: none).
pub(crate) const FEATURES: &[(&str, &str)] = &[
    ("allocation", ""),
    ("allocation refused", ""),
    ("allocations beside work", ""),
    ("blocking stream", ""),
    ("burst", ""),
    ("capture", ""),
    ("capture in global mode", ""),
    ("capture in relaxed mode", ""),
    ("capture in thread-local mode", ""),
    ("capture joined from a second stream", "joins"),
    ("capture of a blocking stream", ""),
    ("capture of a non-blocking stream", ""),
    ("card lost", SIMULATED),
    ("context attached and detached", "attach"),
    ("context destroyed", ""),
    ("context ended", ""),
    ("context made", ""),
    ("context on a second device", "two devices"),
    ("context pushed and popped", ""),
    ("context synchronised", ""),
    ("context synchronised by choice", ""),
    ("copied in", ""),
    ("copied out", ""),
    ("copy between devices", "peer and two devices"),
    ("copy between devices by address", "peer and two devices"),
    ("copy in stream order to the device", ""),
    ("copy in stream order to the host", ""),
    ("copy of rows to the device", "rows"),
    ("copy of rows to the host", "rows"),
    ("copy on the device", ""),
    ("copy to the device", ""),
    ("copy to the host", ""),
    ("created context", ""),
    ("cuMemAlloc", ""),
    ("cuMemAllocAsync", "async"),
    ("cuMemAllocFromPoolAsync", "async"),
    ("cuMemAllocManaged", ""),
    ("cuMemAllocPitch", "pitch"),
    ("cuMemCreate and cuMemMap", "mapped"),
    ("driver before 12.5", SIMULATED),
    ("event destroyed while it is waited for", ""),
    ("event kept", ""),
    ("event on the legacy stream", ""),
    ("event queried", ""),
    ("event waited for", ""),
    ("events of contexts that fail", SIMULATED),
    ("exit from another thread", ""),
    ("exit handler that lingers", ""),
    ("exit handler that reads memory", ""),
    ("exit with work in flight", ""),
    ("fill", ""),
    ("fill of bytes", "small fills"),
    ("fill of half words", "small fills"),
    ("fill of words", ""),
    ("fork", ""),
    ("fork and exec", ""),
    ("free", ""),
    ("freed in stream order", "async"),
    ("graph built", "nodes"),
    ("graph destroyed", ""),
    ("graph destroyed with work in flight", ""),
    ("graph launched", ""),
    ("graph updated", "graph update"),
    ("graph with a memory node", "graph memory"),
    ("green context", "green"),
    ("host function", ""),
    ("host function of a blocking stream waits for another blocking one", ""),
    ("host function waits for another thread", ""),
    ("host memory freed", ""),
    ("kernel", ""),
    ("kernel on a peer's memory", "peer access"),
    ("legacy stream", ""),
    ("managed memory touched by the host", "managed by the host"),
    ("memory asked for", ""),
    ("memory shared with a process", "memory shared with a process"),
    ("module loaded late", ""),
    ("module unloaded", ""),
    ("more streams than queues", ""),
    ("node changed in an executable graph", "nodes"),
    ("node changed in its graph", "nodes"),
    ("node of any kind", "nodes"),
    ("node of any kind with data of its edges", "nodes"),
    ("node of one kind", "nodes"),
    ("node that names no context", "nodes"),
    ("non-blocking stream", ""),
    ("order by the legacy stream", ""),
    ("pageable host memory", ""),
    ("pause", ""),
    ("peer access begins", "peer access"),
    ("peer access ends", "peer access"),
    ("peer copy", "peer"),
    ("per-thread stream", ""),
    ("per-thread stream in a second context", ""),
    ("per-thread streams of two contexts in turn", ""),
    ("pinned host memory", ""),
    ("prefetch", ""),
    ("primary context", ""),
    ("primary context released", ""),
    ("primary context reset", ""),
    ("registered host memory", "register"),
    ("rest", "sleep"),
    ("rows copied in", "rows"),
    ("rows copied out", "rows"),
    ("shared memory kept open", "memory shared with a process"),
    ("slow allocations", SIMULATED),
    ("stream destroyed", ""),
    ("stream destroyed with work in flight", ""),
    ("stream left to the end of its context", ""),
    ("stream made", ""),
    ("stream queried", ""),
    ("stream synchronised", ""),
    ("stream waits for an event", ""),
    ("stream with a priority", ""),
    ("wait for an event of another context", ""),
];

/// Sums of features over programs.
#[derive(Debug, Default)]
pub(crate) struct Coverage(BTreeMap<String, u64>);

impl Coverage {
    pub(crate) fn add(&mut self, features: &BTreeMap<String, u64>) {
        for (name, count) in features {
            *self.0.entry(name.clone()).or_default() += count;
        }
    }

    /// The table, and the features that were never composed though the driver has the capability.
    pub(crate) fn table(&self, caps: &BTreeSet<String>) -> (String, Vec<&'static str>) {
        let mut text = String::new();
        let mut missing = Vec::new();
        for &(name, needs) in FEATURES {
            let count = self.0.get(name).copied().unwrap_or(0);
            if !needs.is_empty() && needs.split(" and ").any(|need| !caps.contains(need)) {
                text.push_str(&format!("{:>9}  {name}\n", "not here"));
                continue;
            }
            text.push_str(&format!("{count:>9}  {name}\n"));
            if count == 0 {
                missing.push(name);
            }
        }
        // A feature that is counted and not listed would never be reported as missing.
        for (name, count) in self.0.iter().filter(|(name, _)| FEATURES.iter().all(|(known, _)| known != name))
        {
            text.push_str(&format!("{count:>9}  {name} (not listed)\n"));
        }
        (text, missing)
    }
}
