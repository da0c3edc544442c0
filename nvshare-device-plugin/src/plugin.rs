//! The device plugin API: its list of devices, and its answers to the kubelet.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nvshare_proto::{GpuUuid, SeatName, Slot, ThrottledLine};
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::WatchStream;
use tonic::Status;
use tracing::{info, warn};

use crate::api::{
    self, AllocateRequest, AllocateResponse, ContainerPreferredAllocationResponse, Device,
    DevicePluginOptions, Empty, ListAndWatchResponse, PreferredAllocationRequest,
    PreferredAllocationResponse,
};
use crate::grpc::{self, Answer, Call};
use crate::host::{Host, blocking, lock};
use crate::nvidia::Found;
use crate::pods::GivenOut;
use crate::records::Record;
use crate::resources::Resource;
use crate::unused::Unused;
use crate::{allocate, checkpoint, devices, preferred};

/// The largest number of seats that are made ahead, before the scheduler is told again which pods have seats.
const AHEAD: usize = 50;

static NOT_REMOVED: ThrottledLine = ThrottledLine::new(|text| warn!("{text}"));

/// The state of the plugin.
#[derive(Debug)]
pub struct Plugin {
    /// The machine.
    pub host: Arc<Host>,
    /// The resources, each with its list.
    pub offers: Vec<Arc<Offer>>,
    /// Told after each seat that is given out.
    pub allocated: GivenOut,
    unused: Mutex<Unused>,
    /// The GPUs whose slots were healthy in the last lists, and whether these had none at all.
    offered: Mutex<Option<(BTreeSet<GpuUuid>, bool)>>,
}

/// A resource, and the list of its devices.
#[derive(Debug)]
pub struct Offer {
    /// The resource.
    pub resource: Resource,
    devices: watch::Sender<ListAndWatchResponse>,
}

/// Things that are to be done about seats.
#[derive(Debug, Default)]
pub(crate) struct Due {
    /// Some of those of single slots that are to be made ahead.
    pub(crate) ahead: Vec<Record>,
    /// Those that containers have, and that are not recorded.
    pub(crate) lost: Vec<Record>,
    /// Those that no container has had for a while.
    pub(crate) over: Vec<SeatName>,
}

/// The slots that a container asks for, and the names of NVIDIA's devices for them.
type Wishes = (Vec<Slot>, Vec<String>);

/// The calls that the plugin wants.
pub const WANTED: DevicePluginOptions =
    DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true };

impl Plugin {
    /// The plugin of a machine. The scheduler counts as there until it is seen not to be.
    #[must_use]
    pub fn of(host: Arc<Host>) -> Self {
        let offer = |resource: &Resource| {
            let devices = watch::Sender::new(ListAndWatchResponse::default());
            Arc::new(Offer { resource: resource.clone(), devices })
        };
        let offers = host.resources.iter().map(offer).collect();
        let plugin = Self {
            offers,
            allocated: GivenOut::default(),
            unused: Mutex::default(),
            offered: Mutex::default(),
            host,
        };
        plugin.offer(&plugin.host.nvidia(), true);
        plugin
    }

    /// Offers the GPUs' slots of all resources, as healthy ones where the GPU is. Lists are long: they are made where something has changed.
    pub(crate) fn offer(&self, nvidia: &Found, answers: bool) {
        let now = (self.host.healthy(nvidia, answers), self.host.names_devices() && !nvidia.any);
        let mut last = lock(&self.offered);
        if last.as_ref() == Some(&now) {
            return;
        }
        let (healthy, is_none) = last.insert(now);
        let is_healthy = |gpu: &devices::NodeGpu| healthy.contains(&gpu.uuid);
        let gpus = if *is_none { &[] } else { &self.host.gpus[..] };
        for offer in &self.offers {
            offer.set(devices::list(gpus, &offer.resource, is_healthy));
        }
    }

    /// Returns the things that are to be done about seats. One look waits for the disk once: looks are all that the plugin does when nothing happens.
    ///
    /// `given`: the seats that the kubelet's record names; none: there is no record. `is_whole`: what it does not name may go.
    pub(crate) async fn due(self: &Arc<Self>, given: Option<Arc<checkpoint::Seats>>, is_whole: bool) -> Due {
        let (plugin, patience) = (Arc::clone(self), self.patience());
        let look = move || {
            let host = &plugin.host;
            let is_free = |name: &SeatName| given.as_ref().is_none_or(|given| !given.contains_key(name));
            let ahead = host.singles_to_make(AHEAD, is_free);
            let Some(given) = &given else { return Due { ahead, ..Due::default() } };
            let lost = host.lost(given);
            if !is_whole {
                return Due { ahead, lost, over: Vec::new() };
            }
            let (held, may_go) = (given.keys().copied().collect(), host.seats_that_may_go());
            let (mut unused, now) = (lock(&plugin.unused), Instant::now());
            unused.look(may_go, &held, now);
            Due { ahead, lost, over: unused.over(patience, now) }
        };
        spawn_blocking(look).await.unwrap_or_default()
    }

    /// Makes the seats that the kubelet's record names and ours does not, which may have been lost or torn: the kubelet starts their containers
    /// again with the answers that it has.
    pub(crate) async fn restore(&self, lost: Vec<Record>) -> Result<(), Status> {
        let (mut is_any, mut outcome) = (false, Ok(()));
        for record in lost {
            let name = record.seat.name();
            match self.give(record).await {
                Ok(()) => {
                    is_any = true;
                    warn!("seat {name}, which a container has, was not recorded any more; it is again");
                }
                // The others have nothing to do with it.
                Err(status) => outcome = Err(status),
            }
        }
        if is_any {
            self.host.publish_soon().await?;
        }
        outcome
    }

    /// Makes seats of single slots ahead, so that a slot can be given out at once while the scheduler is replaced. A slot that no container has
    /// gets the limits that are due now.
    pub(crate) async fn prepare(&self, ahead: Vec<Record>) -> Result<(), Status> {
        for record in ahead {
            self.give(record).await?;
        }
        Ok(())
    }

    /// For how long a seat stays that no container has.
    fn patience(&self) -> Duration {
        Duration::from_secs(self.host.options.keep_unused)
    }

    /// Removes the seats that no container has had for a while.
    pub(crate) async fn retire(self: &Arc<Self>, over: Vec<SeatName>) -> Result<(), Status> {
        let patience = self.patience();
        let mut gone = 0;
        for name in over {
            let plugin = Arc::clone(self);
            let may_go = move |_: &Host| {
                let mut unused = lock(&plugin.unused);
                // It may have been given out since.
                let may_go = unused.is_over(name, patience, Instant::now());
                if may_go {
                    // Where this fails, it is tried again after as long.
                    unused.keep(name);
                }
                may_go
            };
            match self.host.remove(name, may_go).await {
                Ok(is_gone) => gone += usize::from(is_gone),
                Err(error) => NOT_REMOVED.say(format_args!("seat {name} stays: {error}")),
            }
        }
        if gone == 0 {
            return Ok(());
        }
        info!("seats that are removed, as no container has had them for {} s: {gone}", patience.as_secs());
        self.host.publish_soon().await
    }

    /// Gives seats out.
    async fn allocate(
        self: &Arc<Self>,
        offer: &Arc<Offer>,
        request: AllocateRequest,
    ) -> Result<AllocateResponse, Status> {
        let (plugin, offers) = (Arc::clone(self), Arc::clone(offer));
        let asked = blocking(move || plugin.read(&offers.resource, &request)).await?;
        for (slots, _) in &asked {
            self.give(offer.resource.record(slots.clone())).await?;
        }
        self.host.publish_soon().await?;
        // The kubelet asks once for each container: one that starts again keeps its seat without a word.
        self.allocated.add(asked.iter().map(|(slots, _)| SeatName::of(slots)));
        let options = &self.host.options;
        let responses = asked.iter().map(|(slots, names)| allocate::response(slots, names, options));
        Ok(AllocateResponse { container_responses: responses.collect() })
    }

    /// The slots of a resource that each container asks for.
    fn read(&self, resource: &Resource, request: &AllocateRequest) -> Result<Vec<Wishes>, Status> {
        let (is_offered, multi_gpu) =
            (|gpu: GpuUuid| self.host.gpu(gpu).is_some(), self.host.options.multi_gpu);
        let asked = request.container_requests.iter();
        let asked =
            asked.map(|container| allocate::slots(&container.devices_ids, resource, multi_gpu, is_offered));
        let asked: Vec<Vec<Slot>> = asked
            .collect::<Result<_, _>>()
            .map_err(|refusal| Status::invalid_argument(refusal.to_string()))?;
        let nvidia = self.host.nvidia();
        let names = asked.iter().map(|slots| self.host.nvidia_names(&nvidia, slots));
        let names = names.collect::<Result<Vec<_>, _>>()?;
        Ok(asked.into_iter().zip(names).collect())
    }

    /// Makes a seat.
    async fn give(&self, record: Record) -> Result<(), Status> {
        lock(&self.unused).keep(record.seat.name());
        self.host.give(record).await
    }
}

impl Offer {
    /// Tells the kubelet of a list that differs from the last one.
    fn set(&self, devices: Vec<Device>) {
        let list = ListAndWatchResponse { devices };
        let changes = |old: &mut ListAndWatchResponse| {
            let differs = *old != list;
            *old = list;
            differs
        };
        if self.devices.send_if_modified(changes) {
            let list = self.devices.borrow();
            let healthy = list.devices.iter().filter(|device| device.health == api::HEALTHY).count();
            let (count, name) = (list.devices.len(), &self.resource.name);
            info!("{count} slots of {name} are offered, {healthy} of them healthy");
        }
    }

    /// Whether a kubelet follows the list.
    pub(crate) fn is_followed(&self) -> bool {
        self.devices.receiver_count() > 0
    }
}

fn prefer(request: &PreferredAllocationRequest) -> PreferredAllocationResponse {
    let containers = request.container_requests.iter().map(|container| {
        let size = container.allocation_size.try_into().unwrap_or_default();
        let device_ids =
            preferred::choose(&container.available_device_ids, &container.must_include_device_ids, size);
        ContainerPreferredAllocationResponse { device_ids }
    });
    PreferredAllocationResponse { container_responses: containers.collect() }
}

/// Answers a call of the kubelet for a resource.
pub async fn answer(plugin: Arc<Plugin>, offer: Arc<Offer>, call: Call) -> Answer {
    match call.uri().path() {
        api::OPTIONS => grpc::unary(call, |_: Empty| async { Ok(WANTED) }).await,
        api::LIST_AND_WATCH => {
            let open = || WatchStream::new(offer.devices.subscribe()).map(Ok);
            grpc::stream::<Empty, ListAndWatchResponse, _, _>(call, open).await
        }
        api::PREFERRED => grpc::unary(call, |request| async move { Ok(prefer(&request)) }).await,
        api::ALLOCATE => {
            let act = move |request: AllocateRequest| {
                let (plugin, offer) = (Arc::clone(&plugin), Arc::clone(&offer));
                async move {
                    let (name, done) = (&offer.resource.name, plugin.allocate(&offer, request).await);
                    done.inspect_err(|status| warn!("{name} is not given out: {}", status.message()))
                }
            };
            grpc::unary(call, act).await
        }
        _ => grpc::unknown(&call),
    }
}
