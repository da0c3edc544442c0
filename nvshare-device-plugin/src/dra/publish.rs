//! Keeps the node's ResourceSlice as the node is.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::resource::v1::Device;
use nvshare_proto::GpuUuid;
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};
use tokio_stream::StreamExt;
use tracing::{info, warn};

use super::server::{Error, Server};
use super::slices;

/// A try that failed is repeated after the first of these times, and then after twice as long each time, up to the second.
const AGAIN: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));
/// The length of a watch in seconds. Then the slices are listed again.
const WATCH: u32 = 240;
/// A connection that says nothing for this long is given up.
const MAX_WATCH: Duration = Duration::from_secs(WATCH as u64 + 10);
/// Slices are listed no sooner after one another.
const PAUSE: Duration = Duration::from_millis(200);

/// The slice that is published, and its outcome.
#[derive(Debug, Default)]
struct Published {
    /// The slice that was written last, and as the API server keeps it.
    written: Option<(Vec<Device>, Vec<Device>)>,
    /// Whether it was said that fields are dropped.
    has_complained: bool,
}

/// Publishes the devices of the GPUs that are offered, for ever. `again`: told when slices may have been removed.
pub async fn keep(
    server: &Server,
    devices: impl Fn(&BTreeSet<GpuUuid>) -> Vec<Device>,
    mut offered: watch::Receiver<BTreeSet<GpuUuid>>,
    again: &Notify,
) {
    // The line of the log about an API server that is away.
    let (mut published, mut pause, mut said) = (Published::default(), AGAIN.0, String::new());
    loop {
        let wanted = devices(&offered.borrow_and_update());
        let watched = match published.write(server, &wanted).await {
            Ok(version) => server.watch(&version, WATCH).await,
            Err(error) => Err(error),
        };
        match watched {
            Ok(events) => {
                if !std::mem::take(&mut said).is_empty() {
                    info!("the API server answers again");
                }
                pause = AGAIN.0;
                let mut events = Box::pin(events);
                // An event, the end of the watch, or an error: all are a reason to list anew.
                tokio::select! {
                    _ = timeout(MAX_WATCH, events.next()) => {}
                    _ = offered.changed() => {}
                    () = again.notified() => {}
                }
                sleep(PAUSE).await;
                continue;
            }
            // It is read again.
            Err(Error::Conflict(_)) => {}
            Err(error) => {
                let why = error.to_string();
                if why != said {
                    warn!("the ResourceSlice of this node may be out of date: {why}; it is tried again");
                }
                said = why;
            }
        }
        sleep(pause).await;
        pause = (2 * pause).min(AGAIN.1);
    }
}

impl Published {
    /// Makes the slices as they should be. Returns the version of the list that shows it.
    async fn write(&mut self, server: &Server, wanted: &[Device]) -> Result<String, Error> {
        loop {
            let listed = server.list().await?;
            let known = self.written.as_ref().filter(|(devices, _)| devices == wanted);
            let stored = known.map(|(_, stored)| stored.as_slice());
            let steps = slices::plan(server.node(), wanted, &listed.items, stored);
            if steps.is_empty() {
                return Ok(listed.metadata.resource_version.unwrap_or_default());
            }
            for step in steps {
                let Some(slice) = server.carry_out(step).await? else { continue };
                let generation = slice.spec.pool.generation;
                let stored = slice.spec.devices.unwrap_or_default();
                info!("published devices: {}, generation {generation}", stored.len());
                self.complain(slices::is_shared(&stored));
                self.written = Some((wanted.to_vec(), stored));
            }
        }
    }

    /// Says it once where the API server drops what makes devices shared.
    fn complain(&mut self, is_shared: bool) {
        if is_shared == self.has_complained {
            if is_shared {
                info!("the API server keeps that GPUs are shared, again");
            } else {
                warn!(
                    "the API server drops allowMultipleAllocations and requestPolicy in silence: its feature gate \
                     DRAConsumableCapacity is off (Kubernetes 1.34 and 1.35). Each GPU goes to one claim alone until \
                     it is on, for the scheduler and the kubelets too"
                );
            }
            self.has_complained = !is_shared;
        }
    }
}
