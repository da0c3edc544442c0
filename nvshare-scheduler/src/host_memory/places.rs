//! Which processors are near which GPU, for the threads that touch segments.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use nvshare_proto::GpuUuid;
use tokio::task::spawn_blocking;
use tracing::debug;

use super::processors::Processors;
use crate::gpus;

/// Where the kernel describes devices.
pub const SYSFS: &str = "/sys";

/// Folders in which the machine describes its GPUs.
#[derive(Debug, Clone)]
pub struct Descriptions {
    /// The kernel module's folder: which GPU is where on the bus.
    pub gpus: PathBuf,
    /// The kernel's own: what is near a place on the bus.
    pub sysfs: PathBuf,
}

/// Looks for processors near GPUs, once for each GPU.
#[derive(Debug)]
pub(super) struct Places {
    descriptions: Descriptions,
    /// GPUs of which it is known, and those that are being looked at.
    known: Mutex<BTreeSet<GpuUuid>>,
}

impl Places {
    pub(super) fn new(descriptions: Descriptions) -> Self {
        Self { descriptions, known: Mutex::default() }
    }

    /// Looks which processors are near a GPU, and tells them, if that was not done before. The kernel module may take its time
    /// to describe a GPU, so a thread that nobody waits for asks it. What it does not describe is asked again for the next client.
    pub(super) fn look(self: &Arc<Self>, gpu: GpuUuid, tell: impl FnOnce(Processors) + Send + 'static) {
        if !self.lock().insert(gpu) {
            return;
        }
        let places = Arc::clone(self);
        spawn_blocking(move || match places.near(gpu) {
            Ok(near) => {
                debug!("the processors {near} are near {gpu}: memory of the host for it is made there");
                tell(near);
            }
            Err(why) => {
                debug!("memory of the host for {gpu} is made anywhere: {why}");
                places.lock().remove(&gpu);
            }
        });
    }

    fn near(&self, gpu: GpuUuid) -> Result<Processors, String> {
        let listed = gpus::list(&self.descriptions.gpus);
        let bus = listed.into_iter().find(|listed| listed.gpu == gpu).map(|listed| listed.bus);
        let bus = bus.ok_or("its place on the bus is not known")?;
        Processors::near(&self.descriptions.sysfs, &bus)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<GpuUuid>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
