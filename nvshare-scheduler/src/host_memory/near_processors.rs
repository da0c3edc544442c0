//! Which processors are near which GPU, for the threads that touch segments.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use nvshare_proto::GpuUuid;
use tokio::task::spawn_blocking;
use tracing::debug;

use super::processors::Processors;
use crate::gpus;
use crate::lock::lock;

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

/// Looks that are under way at a time, at most: each takes a thread, for as long as the kernel module does not answer, and clients can
/// name GPUs that are none.
const MOST_LOOKS: usize = 16;

/// Looks for processors near GPUs, once for each GPU.
#[derive(Debug)]
pub(super) struct NearProcessors {
    descriptions: Descriptions,
    looks: Mutex<Looks>,
}

#[derive(Debug, Default)]
struct Looks {
    under_way: BTreeSet<GpuUuid>,
    /// GPUs of which it is known.
    known: BTreeSet<GpuUuid>,
}

impl Looks {
    /// Whether a look at a GPU may begin.
    fn begin(&mut self, gpu: GpuUuid) -> bool {
        let has_place = self.under_way.len() < MOST_LOOKS;
        has_place && !self.known.contains(&gpu) && self.under_way.insert(gpu)
    }
}

impl NearProcessors {
    pub(super) fn new(descriptions: Descriptions) -> Self {
        Self { descriptions, looks: Mutex::default() }
    }

    /// Looks which processors are near a GPU, and tells them, if that was not done before. The kernel module may take its time
    /// to describe a GPU, so a thread that nobody waits for asks it. A GPU that it does not describe, or that comes beside too many
    /// others, is asked for again with the next client.
    pub(super) fn look(self: &Arc<Self>, gpu: GpuUuid, tell: impl FnOnce(Processors) + Send + 'static) {
        if !self.lock().begin(gpu) {
            return;
        }
        let places = Arc::clone(self);
        spawn_blocking(move || {
            let near = places.near(gpu);
            let mut looks = places.lock();
            looks.under_way.remove(&gpu);
            match near {
                Ok(near) => {
                    looks.known.insert(gpu);
                    debug!("the processors {near} are near {gpu}: memory of the host for it is made there");
                    tell(near);
                }
                Err(why) => debug!("memory of the host for {gpu} is made anywhere: {why}"),
            }
        });
    }

    fn near(&self, gpu: GpuUuid) -> Result<Processors, String> {
        let listed = gpus::list(&self.descriptions.gpus);
        let bus = listed.into_iter().find(|listed| listed.gpu == gpu).map(|listed| listed.bus);
        let bus = bus.ok_or("its place on the bus is not known")?;
        Processors::near(&self.descriptions.sysfs, &bus)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Looks> {
        lock(&self.looks)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The kernel module keeps who reads waiting, here a pipe to which nobody writes, and clients name what GPUs they like.
    #[test]
    fn made_up_gpus_take_no_more_threads_than_a_machine_has_gpus() {
        let folder = std::env::temp_dir().join(format!("nvshare-made-up-{}", std::process::id()));
        let pipe = folder.join("0000:17:00.0/information");
        fs::create_dir_all(pipe.parent().unwrap()).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let places =
            Arc::new(NearProcessors::new(Descriptions { gpus: folder.clone(), sysfs: folder.clone() }));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let guard = runtime.enter();
        for number in 0..100 {
            places.look(GpuUuid([number; 16]), |_| ());
        }
        let under_way = places.lock().under_way.len();
        drop(guard);
        // Those that wait for the pipe stay, and end with the test.
        runtime.shutdown_background();
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(under_way, MOST_LOOKS);
    }
}
