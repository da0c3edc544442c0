//! A GPU in the form in which people name it.

use std::str::FromStr;

use nvshare_admin::Scheduler;
use nvshare_proto::{GpuStatus, GpuUuid};

use crate::output::Failure;
use crate::show;

/// See the module's documentation.
#[derive(Debug, Clone)]
pub(crate) enum Gpu {
    Index(u32),
    Uuid(GpuUuid),
    /// The beginning of a UUID.
    Prefix(String),
}

/// The beginning of every UUID.
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
    /// The GPU's UUID; asks the scheduler if the name is a number or a part.
    pub(crate) fn uuid(&self, scheduler: &Scheduler) -> Result<GpuUuid, Failure> {
        if let Self::Uuid(uuid) = self {
            return Ok(*uuid);
        }
        let gpus = scheduler.status()?.gpus;
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
            ([], Self::Index(index)) => Err(format!("there is no GPU {index}; there is {known}").into()),
            ([], _) => Err(format!("no GPU has a UUID that begins so; there is {known}").into()),
            _ => Err("several GPUs have UUIDs that begin so".to_owned().into()),
        }
    }
}
