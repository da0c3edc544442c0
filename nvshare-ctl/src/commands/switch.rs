//! `nvshare-ctl on`, `nvshare-ctl off`, `nvshare-ctl reset`

use clap::Args;
use nvshare_proto::AdminRequest;

use crate::connection::Scheduler;

#[derive(Debug, Args)]
pub(crate) struct OffOptions {
    /// Even if not everything fits: page faults will move memory
    #[arg(long)]
    force: bool,
}

pub(crate) fn on(scheduler: &Scheduler) -> Result<(), String> {
    println!("{}", scheduler.change(AdminRequest::On)?);
    Ok(())
}

pub(crate) fn off(scheduler: &Scheduler, options: &OffOptions) -> Result<(), String> {
    println!("{}", scheduler.change(AdminRequest::Off { force: options.force })?);
    Ok(())
}

pub(crate) fn reset(scheduler: &Scheduler) -> Result<(), String> {
    println!("{}", scheduler.change(AdminRequest::Reset)?);
    Ok(())
}
