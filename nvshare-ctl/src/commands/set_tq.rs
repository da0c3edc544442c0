//! `nvshare-ctl set-tq`

use std::time::Duration;

use clap::Args;
use nvshare_admin::Scheduler;
use nvshare_proto::units::{DEFAULT_MAX_WAIT, parse_max_wait, parse_overhead, parse_rule};
use nvshare_proto::{AdminRequest, QuantumRule};

use crate::gpu::Gpu;
use crate::output::{Done, Failure, print_line};

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The quantum in seconds, fractions allowed; or auto: chosen by the measured cost of hand-overs
    #[arg(value_parser = parse_rule, allow_hyphen_values = true, value_name = "SECONDS|auto")]
    quantum: QuantumRule,

    /// With auto: largest part of the time that hand-overs may cost [default: 5%]
    #[arg(long, value_name = "PERCENT", value_parser = parse_overhead)]
    overhead: Option<u32>,

    /// With auto: longest wait for a turn, in seconds; this comes before the overhead [default: 30]
    #[arg(long, value_name = "SECONDS", value_parser = parse_max_wait)]
    max_wait: Option<Duration>,

    /// Change this GPU only; its number, its UUID, or the first characters of its UUID
    #[arg(long, value_name = "GPU")]
    gpu: Option<Gpu>,
}

impl Options {
    fn rule(&self) -> Result<QuantumRule, String> {
        match self.quantum {
            QuantumRule::Auto { overhead_ppm, .. } => Ok(QuantumRule::Auto {
                overhead_ppm: self.overhead.unwrap_or(overhead_ppm),
                max_wait_ms: self.max_wait.unwrap_or(DEFAULT_MAX_WAIT).as_millis() as u64,
            }),
            QuantumRule::Fixed { .. } if self.overhead.is_some() || self.max_wait.is_some() => {
                Err("--overhead and --max-wait are for `set-tq auto`".to_owned())
            }
            fixed @ QuantumRule::Fixed { .. } => Ok(fixed),
        }
    }
}

pub(crate) fn run(scheduler: &Scheduler, options: &Options) -> Done {
    let quantum = options.rule().map_err(Failure::from)?;
    let gpu = options.gpu.as_ref().map(|gpu| gpu.uuid(scheduler)).transpose()?;
    print_line(&scheduler.change(AdminRequest::SetQuantum { gpu, quantum })?)
}
