//! The plugin: what it knows, and its answers to the kubelet.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nvshare_admin::{Error, Scheduler};
use nvshare_proto::cdi::KIND;
use nvshare_proto::{AdminRequest, GpuUuid, Seat, SeatName, Slot};
use tokio::sync::{Notify, watch};
use tokio::task::spawn_blocking;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::WatchStream;
use tonic::Status;
use tracing::{info, warn};

use crate::api::{
    self, AllocateRequest, AllocateResponse, ContainerPreferredAllocationResponse, DevicePluginOptions,
    Empty, ListAndWatchResponse, PreferredAllocationRequest, PreferredAllocationResponse,
};
use crate::devices::Card;
use crate::grpc::{self, Answer, Call};
use crate::nvidia::Found;
use crate::options::{Options, Strategy};
use crate::records::Records;
use crate::specifications::Specifications;
use crate::{allocate, cdi, devices, files, nvidia, preferred};

/// What the plugin knows.
#[derive(Debug)]
pub struct Plugin {
    /// The command line.
    pub options: Options,
    /// The GPUs that are given out.
    pub cards: Vec<Card>,
    /// The scheduler.
    pub scheduler: Scheduler,
    /// Told after each seat that is given out.
    pub allocated: Notify,
    records: Mutex<Records>,
    specifications: Mutex<Specifications>,
    devices: watch::Sender<ListAndWatchResponse>,
}

/// The calls that the plugin wants.
pub const WANTED: DevicePluginOptions =
    DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true };

impl Plugin {
    /// Reads which seats were given out. The scheduler counts as there until it is seen not to be.
    ///
    /// # Errors
    /// The record cannot be read.
    pub fn open(options: Options, cards: Vec<Card>) -> Result<Self, String> {
        let (records, wrong) = Records::open(&options.state)?;
        wrong.iter().for_each(|line| warn!("{line}"));
        let folders = vec![options.etc_cdi.clone(), options.cdi_dir.clone()];
        let plugin = Self {
            scheduler: Scheduler::at(options.admin_socket()),
            allocated: Notify::new(),
            records: Mutex::new(records),
            specifications: Mutex::new(Specifications::of(folders, cdi::FILE)),
            devices: watch::Sender::new(ListAndWatchResponse::default()),
            options,
            cards,
        };
        plugin.offer(&plugin.nvidia(), true);
        Ok(plugin)
    }

    /// Whether containers get names of CDI devices.
    pub(crate) fn names_devices(&self) -> bool {
        self.options.device_list_strategy == Strategy::CdiCri
    }

    /// NVIDIA's devices, as they are now.
    pub(crate) fn nvidia(&self) -> Found {
        if !self.names_devices() {
            return Found::default();
        }
        let mut specifications = lock(&self.specifications);
        nvidia::find(specifications.now(), self.options.nvidia_cdi_kind.as_deref(), &self.cards)
    }

    /// Offers the GPUs' slots, as healthy ones where the scheduler answers. Where containers get names of devices, NVIDIA's are needed.
    pub(crate) fn offer(&self, nvidia: &Found, answers: bool) {
        let is_named = |card: &Card| !self.names_devices() || nvidia.names.contains_key(&card.gpu);
        let mut list = devices::list(&self.cards, self.options.slots, |card| answers && is_named(card));
        if self.names_devices() && !nvidia.any {
            list.clear();
        }
        let list = ListAndWatchResponse { devices: list };
        let changes = |old: &mut ListAndWatchResponse| {
            let differs = *old != list;
            *old = list;
            differs
        };
        if self.devices.send_if_modified(changes) {
            let list = self.devices.borrow();
            let healthy = list.devices.iter().filter(|device| device.health == api::HEALTHY).count();
            info!("{} slots are offered, {healthy} of them healthy", list.devices.len());
        }
    }

    /// Whether a kubelet follows the list.
    pub(crate) fn is_followed(&self) -> bool {
        self.devices.receiver_count() > 0
    }

    /// The seats that were given out.
    pub(crate) fn seats(&self) -> Vec<SeatName> {
        lock(&self.records).seats().keys().copied().collect()
    }

    /// Asks the scheduler for all seats that were given out, with the limits that they had: containers that start again mount their folders, whatever another run of the
    /// scheduler knows. It waits for the scheduler.
    ///
    /// # Errors
    /// The scheduler is gone. What it refuses is logged.
    pub(crate) fn make_all_again(&self) -> Result<(), Error> {
        let all: Vec<Seat> = lock(&self.records).seats().values().cloned().collect();
        for seat in all {
            match self.scheduler.change(AdminRequest::Seat(seat)) {
                Err(Error::Refused(why)) => warn!("a seat that was given out is refused: {why}"),
                made => drop(made?),
            }
        }
        Ok(())
    }

    /// Whether the specification of the seats has to be written, since it is not there.
    pub(crate) fn has_lost_its_specification(&self) -> bool {
        self.names_devices() && !self.options.cdi_dir.join(cdi::FILE).exists()
    }

    /// Writes the specification of the seats: each single slot ahead, and all that was given out. It stays for ever, as the kubelet's
    /// answers name it.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) fn publish(&self) -> Result<(), String> {
        if !self.names_devices() {
            return Ok(());
        }
        let records = lock(&self.records);
        let singles = self.cards.iter().flat_map(|card| devices::slots(card, self.options.slots));
        let mut seats: Vec<SeatName> = singles.map(|slot| SeatName::of(&[slot])).collect();
        seats.extend(records.seats().keys());
        seats.sort_unstable();
        seats.dedup();
        let specification = cdi::specification(seats.into_iter(), &self.options);
        let text = serde_json::to_string_pretty(&specification).map_err(|error| error.to_string())?;
        // Under the lock: no older list comes behind a newer one.
        files::replace(&self.options.cdi_dir.join(cdi::FILE), format!("{text}\n").as_bytes())?;
        drop(records);
        Ok(())
    }

    /// Gives seats out. It waits for the scheduler and the disk.
    fn allocate(&self, request: &AllocateRequest) -> Result<AllocateResponse, Status> {
        let is_offered = |gpu: GpuUuid| self.cards.iter().any(|card| card.gpu == gpu);
        let asked = request.container_requests.iter();
        let asked = asked.map(|container| allocate::slots(&container.devices_ids, &self.options, is_offered));
        let asked: Vec<Vec<Slot>> = asked
            .collect::<Result<_, _>>()
            .map_err(|refusal| Status::invalid_argument(refusal.to_string()))?;
        let nvidia = self.nvidia();
        let names = |slots: &Vec<Slot>| -> Result<Vec<String>, Status> {
            let name = |slot: &Slot| {
                nvidia.names.get(&slot.gpu).cloned().ok_or_else(|| {
                    Status::failed_precondition(format!("no CDI device of NVIDIA has {}", slot.gpu))
                })
            };
            if self.names_devices() { slots.iter().map(name).collect() } else { Ok(Vec::new()) }
        };
        let names = asked.iter().map(names).collect::<Result<Vec<_>, _>>()?;
        for slots in &asked {
            let seat = Seat { slots: slots.clone(), given: self.options.given() };
            self.scheduler.change(AdminRequest::Seat(seat.clone())).map_err(|error| match error {
                Error::Refused(_) => Status::failed_precondition(format!("the scheduler refuses: {error}")),
                _ => Status::unavailable(error.to_string()),
            })?;
            lock(&self.records).add(seat).map_err(Status::internal)?;
        }
        self.publish().map_err(Status::internal)?;
        self.allocated.notify_one();
        let responses = asked.iter().zip(&names);
        let responses = responses.map(|(slots, names)| allocate::response(slots, names, &self.options));
        Ok(AllocateResponse { container_responses: responses.collect() })
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

/// Answers a call of the kubelet.
pub async fn answer(plugin: Arc<Plugin>, call: Call) -> Answer {
    match call.uri().path() {
        api::OPTIONS => grpc::unary(call, |_: Empty| async { Ok(WANTED) }).await,
        api::LIST_AND_WATCH => {
            let open = || WatchStream::new(plugin.devices.subscribe()).map(Ok);
            grpc::stream::<Empty, ListAndWatchResponse, _, _>(call, open).await
        }
        api::PREFERRED => grpc::unary(call, |request| async move { Ok(prefer(&request)) }).await,
        api::ALLOCATE => {
            let act = move |request: AllocateRequest| {
                let plugin = Arc::clone(&plugin);
                async move {
                    let done = spawn_blocking(move || plugin.allocate(&request)).await;
                    let done = done.unwrap_or_else(|error| Err(Status::internal(error.to_string())));
                    done.inspect_err(|status| warn!("{KIND} is not given out: {}", status.message()))
                }
            };
            grpc::unary(call, act).await
        }
        _ => grpc::unknown(&call),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
