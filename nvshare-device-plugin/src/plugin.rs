//! The plugin: what it knows, and its answers to the kubelet.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nvshare_admin::{Error, Scheduler};
use nvshare_proto::{AdminRequest, GpuUuid, Seat, SeatName, Seldom, Slot};
use tokio::sync::{Notify, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::WatchStream;
use tonic::Status;
use tracing::{info, warn};

use crate::api::{
    self, AllocateRequest, AllocateResponse, ContainerPreferredAllocationResponse, DevicePluginOptions,
    Empty, ListAndWatchResponse, PreferredAllocationRequest, PreferredAllocationResponse,
};
use crate::cards::Seen;
use crate::checkpoint;
use crate::devices::Card;
use crate::grpc::{self, Answer, Call};
use crate::nvidia::Found;
use crate::options::{Options, Strategy};
use crate::records::{Records, Seats};
use crate::specifications::Specifications;
use crate::troubles::Troubles;
use crate::unused::Unused;
use crate::{allocate, cdi, devices, files, nvidia, preferred};

/// So long a seat is asked for while no scheduler answers, and how often: the kubelet fails a pod for ever. It starts no other pod meanwhile,
/// the scheduler's neither, so it must not be long.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(3), Duration::from_millis(250));
/// So many seats are made ahead at most before the scheduler is told again which pods have seats.
const AHEAD: usize = 50;

static NOT_REMOVED: Seldom = Seldom::new(|text| warn!("{text}"));

/// What the plugin knows.
#[derive(Debug)]
pub struct Plugin {
    /// The command line.
    pub options: Options,
    /// The GPUs that are given out.
    pub cards: Vec<Card>,
    /// The scheduler.
    pub scheduler: Scheduler,
    /// The seats of single slots, with the limits that are due now.
    singles: Seats,
    /// Told after each seat that is given out.
    pub allocated: Notify,
    /// Held while the scheduler is told of a seat and the record is made or read: both have the same limits afterwards.
    order: Arc<tokio::sync::Mutex<()>>,
    records: Mutex<Records>,
    /// Seats that a scheduler has made since this plugin started: their folders are there.
    made: Mutex<BTreeSet<SeatName>>,
    unused: Mutex<Unused>,
    troubles: Mutex<Troubles>,
    specifications: Mutex<Specifications>,
    devices: watch::Sender<ListAndWatchResponse>,
}

/// The slots that a container asks for, and the names of NVIDIA's devices for them.
type Asked = (Vec<Slot>, Vec<String>);

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
        let given = options.given();
        let slots = cards.iter().flat_map(|card| devices::slots(card, options.slots));
        let singles = slots.map(|slot| Seat { slots: vec![slot], given });
        let folders = vec![options.etc_cdi.clone(), options.cdi_dir.clone()];
        let plugin = Self {
            singles: singles.map(|seat| (seat.name(), seat)).collect(),
            scheduler: Scheduler::at(options.admin_socket()),
            allocated: Notify::new(),
            order: Arc::default(),
            records: Mutex::new(records),
            made: Mutex::default(),
            unused: Mutex::default(),
            troubles: Mutex::default(),
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

    /// Notes what is seen of the GPUs.
    pub(crate) fn see(&self, seen: Seen) {
        let mut troubles = lock(&self.troubles);
        match seen {
            Seen::Cards(found) => troubles.look(&self.cards, &found),
            Seen::Xid { gpu, code } => troubles.xid(gpu, code, std::time::Instant::now()),
        }
    }

    /// Offers the GPUs' slots, as healthy ones where the scheduler answers and the GPU has no trouble. Where containers get names of devices,
    /// NVIDIA's are needed.
    pub(crate) fn offer(&self, nvidia: &Found, answers: bool) {
        let troubled = {
            let mut troubles = lock(&self.troubles);
            troubles.news(&self.cards, std::time::Instant::now()).iter().for_each(|line| warn!("{line}"));
            troubles.known()
        };
        let is_named = |card: &Card| !self.names_devices() || nvidia.names.contains_key(&card.gpu);
        let is_healthy = |card: &Card| answers && is_named(card) && !troubled.contains(&card.gpu);
        let mut list = devices::list(&self.cards, self.options.slots, is_healthy);
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
    pub(crate) async fn seats(self: &Arc<Self>) -> Vec<SeatName> {
        let plugin = Arc::clone(self);
        // The record is locked while it is written to the disk.
        let read = move || lock(&plugin.records).seats().keys().copied().collect();
        spawn_blocking(read).await.unwrap_or_default()
    }

    /// Makes the seats that the kubelet's record names and ours does not, which may have been lost or torn: the kubelet starts their containers
    /// again with the answers that it has.
    pub(crate) async fn restore(self: &Arc<Self>, given: &checkpoint::Seats) -> Result<(), Status> {
        let known: BTreeSet<SeatName> = self.seats().await.into_iter().collect();
        let is_ours =
            |slots: &[Slot]| slots.iter().all(|slot| self.cards.iter().any(|card| card.gpu == slot.gpu));
        let lost = given.iter().filter(|(name, slots)| !known.contains(name) && is_ours(slots));
        let (mut is_any, mut outcome) = (false, Ok(()));
        for (name, slots) in lost {
            match self.give(Seat { slots: slots.clone(), given: self.options.given() }).await {
                Ok(_) => {
                    is_any = true;
                    warn!("seat {name}, which a container has, was not recorded any more; it is again");
                }
                // The others have nothing to do with it.
                Err(status) => outcome = Err(status),
            }
        }
        if is_any {
            self.publish_soon().await?;
        }
        outcome
    }

    /// Makes seats of single slots ahead, a few at each look, so that a slot can be given out at once while the scheduler is replaced. A slot
    /// that no container has gets the limits that are due now. `given`: those that containers have.
    pub(crate) async fn prepare(
        self: &Arc<Self>,
        given: Option<Arc<checkpoint::Seats>>,
    ) -> Result<(), Status> {
        let plugin = Arc::clone(self);
        let find = move || {
            let (records, made) = (lock(&plugin.records), lock(&plugin.made));
            let is_free = |name| given.as_ref().is_none_or(|given| !given.contains_key(name));
            let is_there = |name, seat| records.seats().get(name) == Some(seat) && made.contains(name);
            let singles =
                plugin.singles.iter().filter(|&(name, seat)| is_free(name) && !is_there(name, seat));
            singles.map(|(_, seat)| seat.clone()).take(AHEAD).collect()
        };
        let missing: Vec<Seat> = spawn_blocking(find).await.unwrap_or_default();
        for seat in missing {
            self.give(seat).await?;
        }
        Ok(())
    }

    /// Removes the seats that no container has had for a while. `held`: those that containers have now.
    pub(crate) async fn retire(self: &Arc<Self>, held: BTreeSet<SeatName>) -> Result<(), Status> {
        let patience = Duration::from_secs(self.options.keep_unused);
        let plugin = Arc::clone(self);
        let look = move || {
            let may_go = plugin.seats_that_may_go();
            let (mut unused, now) = (lock(&plugin.unused), std::time::Instant::now());
            unused.look(may_go, &held, now);
            unused.over(patience, now)
        };
        let over = spawn_blocking(look).await.unwrap_or_default();
        let mut gone = 0;
        for name in over {
            let plugin = Arc::clone(self);
            let remove = move || {
                // It may have been given out since.
                if !lock(&plugin.unused).is_over(name, patience, std::time::Instant::now()) {
                    return Ok(false);
                }
                // Where this fails, it is tried again after as long.
                lock(&plugin.unused).keep(name);
                lock(&plugin.made).remove(&name);
                let removed = plugin.scheduler.change(AdminRequest::RemoveSeat(name));
                if let Err(Error::Refused(_)) = &removed {
                    // It is there as before.
                    lock(&plugin.made).insert(name);
                }
                removed.map_err(|error| error.to_string())?;
                lock(&plugin.records).remove(name).map(|()| true)
            };
            match self.in_order(remove).await {
                Some(Ok(is_gone)) => gone += usize::from(is_gone),
                Some(Err(error)) => NOT_REMOVED.say(format_args!("seat {name} stays: {error}")),
                None => {}
            }
        }
        if gone == 0 {
            return Ok(());
        }
        info!("seats that are removed, as no container has had them for {} s: {gone}", patience.as_secs());
        self.publish_soon().await
    }

    /// All seats but the single slots that are offered, whose devices are there ahead. It waits for the disk.
    fn seats_that_may_go(&self) -> Vec<SeatName> {
        let records = lock(&self.records);
        records.seats().keys().filter(|name| !self.singles.contains_key(name)).copied().collect()
    }

    /// Asks the scheduler for these seats again, with the limits that are recorded: containers that start again mount their folders, whatever
    /// another run of the scheduler knows. Returns those that it refuses, and why it refused the last of them.
    ///
    /// # Errors
    /// The scheduler is gone.
    pub(crate) async fn make_again(
        self: &Arc<Self>,
        seats: Vec<SeatName>,
    ) -> Result<(Vec<SeatName>, String), Error> {
        let (mut refused, mut why) = (Vec::new(), String::new());
        for name in seats {
            let plugin = Arc::clone(self);
            let ask = move || {
                // Read only now: an earlier copy may have other limits than the kubelet got since.
                let seat = lock(&plugin.records).seats().get(&name).cloned();
                seat.map_or(Ok(()), |seat| plugin.make(&seat))
            };
            match self.in_order(ask).await {
                Some(Err(Error::Refused(reason))) => {
                    refused.push(name);
                    why = reason;
                }
                Some(asked) => asked?,
                None => {}
            }
        }
        Ok((refused, why))
    }

    /// Does what waits for the scheduler and the disk, with nothing else beside it that does so. None: it panicked.
    async fn in_order<T: Send + 'static>(&self, act: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let order = Arc::clone(&self.order).lock_owned().await;
        // It goes on, and keeps its place, also if nobody waits for it any more.
        let act = move || {
            let _order = order;
            act()
        };
        spawn_blocking(act).await.ok()
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
        let mut seats: Vec<SeatName> = self.singles.keys().copied().collect();
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

    async fn publish_soon(self: &Arc<Self>) -> Result<(), Status> {
        let plugin = Arc::clone(self);
        blocking(move || plugin.publish().map_err(Status::internal)).await
    }

    /// Gives seats out.
    async fn allocate(self: &Arc<Self>, request: AllocateRequest) -> Result<AllocateResponse, Status> {
        let plugin = Arc::clone(self);
        let asked = blocking(move || plugin.read(&request)).await?;
        for (slots, _) in &asked {
            self.give(Seat { slots: slots.clone(), given: self.options.given() }).await?;
        }
        self.publish_soon().await?;
        self.allocated.notify_one();
        let responses = asked.iter().map(|(slots, names)| allocate::response(slots, names, &self.options));
        Ok(AllocateResponse { container_responses: responses.collect() })
    }

    /// What each container asks for.
    fn read(&self, request: &AllocateRequest) -> Result<Vec<Asked>, Status> {
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
        Ok(asked.into_iter().zip(names).collect())
    }

    /// Has the scheduler make a seat.
    fn make(&self, seat: &Seat) -> Result<(), Error> {
        self.scheduler.change(AdminRequest::Seat(seat.clone()))?;
        lock(&self.made).insert(seat.name());
        Ok(())
    }

    /// Whether a container may have this seat though no scheduler answers: its folder has its limits.
    fn is_there(&self, seat: &Seat) -> bool {
        let name = seat.name();
        lock(&self.records).seats().get(&name) == Some(seat) && lock(&self.made).contains(&name)
    }

    /// Makes a seat, at the scheduler and in the record. It waits for a scheduler that is away, unless the seat is there.
    async fn give(self: &Arc<Self>, seat: Seat) -> Result<(), Status> {
        let end = Instant::now() + PATIENCE.0;
        loop {
            let (plugin, seat) = (Arc::clone(self), seat.clone());
            let make = move || {
                lock(&plugin.unused).keep(seat.name());
                match plugin.make(&seat) {
                    Err(Error::NotFound(_) | Error::Silent { .. } | Error::Broken { .. })
                        if plugin.is_there(&seat) =>
                    {
                        Ok(Ok(()))
                    }
                    made => made.map(|()| lock(&plugin.records).add(seat).map_err(Status::internal)),
                }
            };
            let made = self.in_order(make).await;
            match made.ok_or_else(|| Status::internal("a seat is not made"))? {
                Ok(recorded) => return recorded,
                Err(Error::NotFound(_) | Error::Silent { .. } | Error::Broken { .. })
                    if Instant::now() < end => {}
                Err(Error::Refused(why)) => {
                    return Err(Status::failed_precondition(format!("the scheduler refuses: {why}")));
                }
                Err(error) => return Err(Status::unavailable(error.to_string())),
            }
            sleep(PATIENCE.1).await;
        }
    }
}

/// Does what waits for the disk.
async fn blocking<T: Send + 'static>(
    act: impl FnOnce() -> Result<T, Status> + Send + 'static,
) -> Result<T, Status> {
    spawn_blocking(act).await.unwrap_or_else(|error| Err(Status::internal(error.to_string())))
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
                    let resource = &plugin.options.resource;
                    let done = plugin.allocate(request).await;
                    done.inspect_err(|status| warn!("{resource} is not given out: {}", status.message()))
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
