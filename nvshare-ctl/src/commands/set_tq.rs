//! `nvshare-ctl set-tq`

use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use nvshare_admin::Scheduler;
use nvshare_proto::units::parse_quantum;
use nvshare_proto::{AdminRequest, GpuStatus, GpuUuid};

use crate::output::{Done, print_line};
use crate::show;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The quantum in seconds, fractions allowed
    #[arg(value_parser = parse_quantum, allow_hyphen_values = true)]
    seconds: Duration,

    /// Change this GPU only; its number, its UUID, or the first characters of its UUID
    #[arg(long, value_name = "GPU")]
    gpu: Option<Gpu>,
}

/// A GPU as people name it.
#[derive(Debug, Clone)]
enum Gpu {
    Index(u32),
    Uuid(GpuUuid),
    /// What a UUID begins with.
    Prefix(String),
}

/// What every UUID begins with.
const PREFIX: &str = "GPU-";

impl FromStr for Gpu {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(index) = text.parse() {
            return Ok(Self::Index(index));
        }
        match text.parse() {
            Ok(uuid) => Ok(Self::Uuid(uuid)),
            Err(_) if text.len() > PREFIX.len() && text.starts_with(PREFIX) => {
                Ok(Self::Prefix(text.to_owned()))
            }
            Err(_) => Err(format!(
                "{text:?} is neither a GPU's number nor its UUID (GPU-xxxxxxxx-…), as `status` shows them"
            )),
        }
    }
}

impl Gpu {
    fn uuid(&self, scheduler: &Scheduler) -> Result<GpuUuid, String> {
        if let Self::Uuid(uuid) = self {
            return Ok(*uuid);
        }
        let gpus = scheduler.status().map_err(|error| error.to_string())?.gpus;
        let is_meant = |gpu: &&GpuStatus| match self {
            Self::Index(index) => gpu.index == Some(*index),
            Self::Uuid(uuid) => gpu.gpu == *uuid,
            Self::Prefix(prefix) => gpu.gpu.to_string().starts_with(prefix.as_str()),
        };
        let meant: Vec<GpuUuid> = gpus.iter().filter(is_meant).map(|gpu| gpu.gpu).collect();
        let known: Vec<String> = gpus.iter().map(show::gpu_name).collect();
        let known =
            if known.is_empty() { "none in use and none listed".to_owned() } else { known.join(", ") };
        match (meant.as_slice(), self) {
            ([one], _) => Ok(*one),
            ([], Self::Index(index)) => Err(format!("there is no GPU {index}; there is {known}")),
            ([], _) => Err(format!("no GPU has a UUID that begins so; there is {known}")),
            _ => Err("several GPUs have UUIDs that begin so".to_owned()),
        }
    }
}

pub(crate) fn run(scheduler: &Scheduler, options: &Options) -> Done {
    let millis = options.seconds.as_millis() as u64;
    let gpu = options.gpu.as_ref().map(|gpu| gpu.uuid(scheduler)).transpose()?;
    print_line(&scheduler.change(AdminRequest::SetQuantum { gpu, millis })?)
}
