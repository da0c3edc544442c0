//! Reports to the scheduler about the process.

use nvshare_proto::Counters;

use crate::memory::devices;
use crate::process::counters;
use crate::work::gate;

/// All counters, as of now.
pub(super) fn counters() -> Counters {
    let (gated, passed_by) = gate::totals();
    let counted = counters::snapshot();
    Counters {
        gated,
        passed_by: passed_by + counted.passed_by,
        managed: devices::all().map(|device| device.account().allocated()).sum(),
        ..counted
    }
}
