//! `nvshare-ctl on`, `nvshare-ctl off`, `nvshare-ctl reset`

use clap::Args;
use nvshare_admin::Scheduler;
use nvshare_proto::AdminRequest;

use crate::output::{Done, print_line};

#[derive(Debug, Args)]
pub(crate) struct OffOptions {
    /// Switch off even if not all memory fits: page faults will then move it, slowly
    #[arg(long)]
    force: bool,
}

pub(crate) fn on(scheduler: &Scheduler) -> Done {
    print_line(&scheduler.change(AdminRequest::On)?)
}

pub(crate) fn off(scheduler: &Scheduler, options: &OffOptions) -> Done {
    print_line(&scheduler.change(AdminRequest::Off { force: options.force })?)
}

pub(crate) fn reset(scheduler: &Scheduler) -> Done {
    print_line(&scheduler.change(AdminRequest::Reset)?)
}
