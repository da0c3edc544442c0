//! `nvshare-ctl set-tq`

use std::time::Duration;

use clap::Args;
use nvshare_proto::units::parse_quantum;
use nvshare_proto::{AdminRequest, GpuUuid};

use crate::connection::Scheduler;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The quantum in seconds, fractions allowed
    #[arg(value_parser = parse_quantum, allow_hyphen_values = true)]
    seconds: Duration,

    /// On this GPU only, by its UUID
    #[arg(long, value_name = "UUID")]
    gpu: Option<GpuUuid>,
}

pub(crate) fn run(scheduler: &Scheduler, options: &Options) -> Result<(), String> {
    let millis = options.seconds.as_millis() as u64;
    println!("{}", scheduler.change(AdminRequest::SetQuantum { gpu: options.gpu, millis })?);
    Ok(())
}
