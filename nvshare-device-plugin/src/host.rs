//! The machine as both APIs see it: its GPUs, its scheduler, NVIDIA's devices, and the seats that were given out.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nvshare_admin::{Error, Scheduler};
use nvshare_proto::{AdminRequest, GpuUuid, SeatName, Slot};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};
use tonic::Status;
use tracing::warn;

use crate::devices::NodeGpu;
use crate::node_gpus::GpuNews;
use crate::nvidia::Found;
use crate::options::{Api, Options, Strategy};
use crate::records::{Record, Records, Seats, this_boot};
use crate::resources::Resource;
use crate::specifications::Specifications;
use crate::troubles::Troubles;
use crate::{cdi, checkpoint, files, nvidia};

/// For how long a seat is asked for while no scheduler answers, and how often: the kubelet fails a pod for ever. It starts no other pod
/// meanwhile, the scheduler's neither, so that must not be long.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(3), Duration::from_millis(250));

/// A machine.
#[derive(Debug)]
pub struct Host {
    /// The command line.
    pub options: Options,
    /// The resources that are offered.
    pub resources: Vec<Resource>,
    /// The GPUs that are given out.
    pub gpus: Vec<NodeGpu>,
    /// The scheduler.
    pub scheduler: Scheduler,
    /// The seats of single slots, with the limits that are due now: the kubelet chooses among them. A claim has no such choice.
    singles: Seats,
    /// Held while the scheduler is told of a seat and the record is made or read: both have the same limits afterwards.
    order: Arc<tokio::sync::Mutex<()>>,
    records: Mutex<Records>,
    /// Seats that a scheduler has made in this boot of the machine: their folders are there.
    made: Mutex<BTreeSet<SeatName>>,
    troubles: Mutex<Troubles>,
    specifications: Mutex<Specifications>,
}

impl Host {
    /// Reads which seats were given out.
    ///
    /// # Errors
    /// The record cannot be read.
    pub fn open(options: Options, resources: Vec<Resource>, gpus: Vec<NodeGpu>) -> Result<Self, String> {
        let (records, wrong) = Records::open(&options.state, options.api)?;
        wrong.iter().for_each(|line| warn!("{line}"));
        let there = records.are_there(&this_boot()).then(|| records.seats().keys().copied());
        let made = there.into_iter().flatten().collect();
        let counted = gpus.iter().filter(|_| options.api == Api::DevicePlugin);
        let singles = counted.flat_map(|gpu| resources.iter().map(move |resource| (resource, gpu.uuid)));
        let singles = singles
            .flat_map(|(resource, gpu)| resource.slots_of(gpu).map(|slot| resource.record(vec![slot])));
        let folders = vec![options.etc_cdi.clone(), options.cdi_dir.clone()];
        let singles: Seats = singles.map(|record| (record.seat.name(), record)).collect();
        Ok(Self {
            singles,
            scheduler: Scheduler::at(options.admin_socket()),
            order: Arc::default(),
            records: Mutex::new(records),
            made: Mutex::new(made),
            troubles: Mutex::default(),
            specifications: Mutex::new(Specifications::of(folders, cdi::FILE)),
            options,
            resources,
            gpus,
        })
    }

    /// Whether containers get names of CDI devices.
    pub(crate) fn names_devices(&self) -> bool {
        self.options.device_list_strategy == Strategy::CdiCri
    }

    /// The resource that these slots are of, if it is offered.
    pub(crate) fn resource(&self, slots: &[Slot]) -> Option<&Resource> {
        self.resources.iter().find(|resource| resource.has(slots))
    }

    /// A GPU that is given out.
    pub(crate) fn gpu(&self, gpu: GpuUuid) -> Option<&NodeGpu> {
        self.gpus.iter().find(|there| there.uuid == gpu)
    }

    /// NVIDIA's devices, as they are now.
    pub(crate) fn nvidia(&self) -> Found {
        if !self.names_devices() {
            return Found::default();
        }
        let mut specifications = lock(&self.specifications);
        nvidia::find(specifications.now(), self.options.nvidia_cdi_kind.as_deref(), &self.gpus)
    }

    /// Notes what is seen of the GPUs.
    pub(crate) fn see(&self, seen: GpuNews) {
        let mut troubles = lock(&self.troubles);
        match seen {
            GpuNews::All(found) => troubles.look(&self.gpus, &found),
            GpuNews::Xid { gpu, code } => troubles.xid(gpu, code, std::time::Instant::now()),
        }
    }

    /// The GPUs that may be given out: those without trouble, while the scheduler answers. Where containers get names of devices, NVIDIA's are
    /// needed.
    pub(crate) fn healthy(&self, nvidia: &Found, answers: bool) -> BTreeSet<GpuUuid> {
        let troubled = {
            let mut troubles = lock(&self.troubles);
            troubles.news(&self.gpus, std::time::Instant::now()).iter().for_each(|line| warn!("{line}"));
            troubles.known()
        };
        let is_named = |gpu: &NodeGpu| !self.names_devices() || nvidia.names.contains_key(&gpu.uuid);
        let is_healthy = |gpu: &&NodeGpu| answers && is_named(gpu) && !troubled.contains(&gpu.uuid);
        self.gpus.iter().filter(is_healthy).map(|gpu| gpu.uuid).collect()
    }

    /// The seats that were given out.
    pub(crate) async fn seats(self: &Arc<Self>) -> Vec<SeatName> {
        self.read(|seats| seats.keys().copied().collect()).await
    }

    /// Reads the record.
    pub(crate) async fn read<T: Default + Send + 'static>(
        self: &Arc<Self>,
        read: impl FnOnce(&Seats) -> T + Send + 'static,
    ) -> T {
        let host = Arc::clone(self);
        // The record is locked while it is written to the disk.
        spawn_blocking(move || read(lock(&host.records).seats())).await.unwrap_or_default()
    }

    /// Changes a record, if it is there, in order with all else that changes seats. The scheduler is not told.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) async fn change(
        self: &Arc<Self>,
        name: SeatName,
        change: impl FnOnce(&mut Record) + Send + 'static,
    ) -> Result<(), String> {
        let host = Arc::clone(self);
        let write = move || {
            let mut records = lock(&host.records);
            let Some(mut record) = records.seats().get(&name).cloned() else { return Ok(()) };
            change(&mut record);
            records.add(record)
        };
        self.in_order(write).await.unwrap_or_else(|| Err("a record is not written".to_owned()))
    }

    /// Gives a claim's seat other limits or another share, at the scheduler and in the record, unless the claim has ended.
    ///
    /// # Errors
    /// The scheduler refuses or is away, or the file cannot be written. Then the record has it as before.
    pub(crate) async fn alter(self: &Arc<Self>, record: Record) -> Result<(), String> {
        let host = Arc::clone(self);
        let alter = move || {
            let known = lock(&host.records).seats().get(&record.seat.name()).cloned();
            if known.is_none_or(|known| known.claim != record.claim) {
                return Ok(());
            }
            host.make(&record).map_err(|error| error.to_string())?;
            lock(&host.records).add(record)
        };
        self.in_order(alter).await.unwrap_or(Ok(()))
    }

    /// Whether seats can be given out though no scheduler has answered this program yet: an earlier one had some made.
    pub(crate) fn has_seats(&self) -> bool {
        !lock(&self.made).is_empty()
    }

    /// Notes that a scheduler has made all seats in this boot of the machine.
    pub(crate) async fn note_made(self: &Arc<Self>) {
        let host = Arc::clone(self);
        let note = move || lock(&host.records).note_there(this_boot());
        if let Some(Err(error)) = self.in_order(note).await {
            warn!("{error}");
        }
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
            let host = Arc::clone(self);
            let ask = move || {
                // Read only now: an earlier copy may have other limits than the kubelet got since.
                let record = lock(&host.records).seats().get(&name).cloned();
                record.map_or(Ok(()), |record| host.make(&record))
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

    /// Whether the specification of the seats has to be written, since it is not there. It may be that there is no seat.
    pub(crate) fn has_lost_its_specification(&self) -> bool {
        self.names_devices() && !self.options.cdi_dir.join(cdi::FILE).exists()
    }

    /// Writes the specification of the seats. The kubelet keeps answers that name them. Engines warn of one without devices, so there is none
    /// where no seat is.
    ///
    /// # Errors
    /// It cannot be written, or removed.
    pub(crate) fn publish(&self) -> Result<(), String> {
        if !self.names_devices() {
            return Ok(());
        }
        let records = lock(&self.records);
        let is_plugin = self.options.api == Api::DevicePlugin;
        // A single slot has its device ahead. A claim has it from Prepare to Unprepare.
        let mut seats: BTreeMap<SeatName, bool> = self.singles.keys().map(|&name| (name, false)).collect();
        let given = records.seats().iter().filter(|(_, record)| is_plugin || record.claim.is_some());
        let is_gang = |record: &Record| record.claim.as_ref().is_some_and(|claim| claim.gang);
        seats.extend(given.map(|(&name, record)| (name, is_gang(record))));
        let specification = cdi::specification(seats, &self.options);
        let text = serde_json::to_string_pretty(&specification).map_err(|error| error.to_string())?;
        let file = self.options.cdi_dir.join(cdi::FILE);
        // Under the lock: no older list comes behind a newer one.
        if specification.devices.is_empty() {
            files::remove(&file)?;
        } else {
            files::replace(&file, format!("{text}\n").as_bytes())?;
        }
        drop(records);
        Ok(())
    }

    /// [`Host::publish`], without keeping others waiting.
    pub(crate) async fn publish_soon(self: &Arc<Self>) -> Result<(), Status> {
        let host = Arc::clone(self);
        blocking(move || host.publish().map_err(Status::internal)).await
    }

    /// The names of NVIDIA's devices for these slots' GPUs, where containers get names. It waits for the disk.
    ///
    /// # Errors
    /// NVIDIA has none for one of them.
    pub(crate) fn nvidia_names(&self, nvidia: &Found, slots: &[Slot]) -> Result<Vec<String>, Status> {
        let name = |slot: &Slot| {
            nvidia.names.get(&slot.gpu).cloned().ok_or_else(|| {
                Status::failed_precondition(format!("no CDI device of NVIDIA has {}", slot.gpu))
            })
        };
        if self.names_devices() { slots.iter().map(name).collect() } else { Ok(Vec::new()) }
    }

    /// Has the scheduler make a seat.
    fn make(&self, record: &Record) -> Result<(), Error> {
        self.scheduler.change(AdminRequest::Seat(record.seat.clone()))?;
        lock(&self.made).insert(record.seat.name());
        Ok(())
    }

    /// Whether a container may have this seat though no scheduler answers: its folder has its limits.
    fn is_there(&self, record: &Record) -> bool {
        let name = record.seat.name();
        lock(&self.records).seats().get(&name) == Some(record) && lock(&self.made).contains(&name)
    }

    /// Makes a seat, at the scheduler and in the record. It waits for a scheduler that is away, unless the seat is there.
    ///
    /// # Errors
    /// The scheduler refuses it or is away, or it cannot be recorded.
    pub(crate) async fn give(self: &Arc<Self>, record: Record) -> Result<(), Status> {
        let end = Instant::now() + PATIENCE.0;
        loop {
            let (host, record) = (Arc::clone(self), record.clone());
            let make = move || match host.make(&record) {
                Err(Error::NotFound(_) | Error::Silent { .. } | Error::Broken { .. })
                    if host.is_there(&record) =>
                {
                    Ok(Ok(()))
                }
                made => made.map(|()| lock(&host.records).add(record).map_err(Status::internal)),
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

    /// Removes a seat, at the scheduler and in the record, if it still may go when its turn comes. Returns whether it is gone.
    ///
    /// # Errors
    /// The scheduler refuses or is away, or the file cannot be written. Then the record has it as before.
    pub(crate) async fn remove(
        self: &Arc<Self>,
        name: SeatName,
        may_go: impl FnOnce(&Self) -> bool + Send + 'static,
    ) -> Result<bool, String> {
        let host = Arc::clone(self);
        let remove = move || {
            if !may_go(&host) {
                return Ok(false);
            }
            lock(&host.made).remove(&name);
            let removed = host.scheduler.change(AdminRequest::RemoveSeat(name));
            if let Err(Error::Refused(_)) = &removed {
                // It is there as before.
                lock(&host.made).insert(name);
            }
            removed.map_err(|error| error.to_string())?;
            lock(&host.records).remove(name).map(|()| true)
        };
        self.in_order(remove).await.unwrap_or(Ok(false))
    }

    /// Whether a recorded seat is of no claim. It waits for the disk.
    pub(crate) fn is_unclaimed(&self, name: SeatName) -> bool {
        lock(&self.records).seats().get(&name).is_some_and(|record| record.claim.is_none())
    }

    /// Seats that containers have and that are not recorded, as far as their GPUs and resources are there. It waits for the disk.
    pub(crate) fn lost(&self, given: &checkpoint::Seats) -> Vec<Record> {
        let records = lock(&self.records);
        let is_there = |slots: &[Slot]| slots.iter().all(|slot| self.gpu(slot.gpu).is_some());
        let is_lost = |name, slots: &[Slot]| !records.seats().contains_key(name) && is_there(slots);
        let lost = given.iter().filter(|&(name, slots)| is_lost(name, slots));
        lost.filter_map(|(_, slots)| Some(self.resource(slots)?.record(slots.clone()))).collect()
    }

    /// All seats but the single slots that are offered, whose devices are there ahead. It waits for the disk.
    pub(crate) fn seats_that_may_go(&self) -> Vec<SeatName> {
        let records = lock(&self.records);
        records.seats().keys().filter(|name| !self.singles.contains_key(name)).copied().collect()
    }

    /// Some of the single slots whose seats are not there as they are due, and that may have them. It waits for the disk.
    pub(crate) fn singles_to_make(&self, most: usize, is_free: impl Fn(&SeatName) -> bool) -> Vec<Record> {
        let (records, made) = (lock(&self.records), lock(&self.made));
        let is_there = |name, record| records.seats().get(name) == Some(record) && made.contains(name);
        let singles = self.singles.iter().filter(|&(name, record)| is_free(name) && !is_there(name, record));
        singles.map(|(_, record)| record.clone()).take(most).collect()
    }
}

/// Does what waits for the disk.
pub(crate) async fn blocking<T: Send + 'static>(
    act: impl FnOnce() -> Result<T, Status> + Send + 'static,
) -> Result<T, Status> {
    spawn_blocking(act).await.unwrap_or_else(|error| Err(Status::internal(error.to_string())))
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use nvshare_proto::{Priority, Seat, TenantSettings};

    use super::*;
    use crate::records::Claim;

    #[tokio::test]
    async fn a_claim_that_has_ended_is_not_altered() {
        let folder = std::env::temp_dir().join(format!("nvshare-host-{}", std::process::id()));
        let state = folder.to_str().unwrap();
        let options =
            Options::parse_from(["plugin", "--api", "dra", "--state", state, "--admin-socket", "/none"]);
        let host = Arc::new(Host::open(options, Vec::new(), Vec::new()).unwrap());
        let seat =
            Seat { slots: vec![Slot { gpu: GpuUuid([1; 16]), number: 0 }], given: TenantSettings::default() };
        let (name, words) = (seat.name(), || String::from("a"));
        let claim =
            Claim { namespace: words(), name: words(), uid: words(), requests: vec![words()], gang: false };
        let ended = Record { seat: seat.clone(), claim: None };
        let given = TenantSettings { priority: Some(Priority::Low), ..TenantSettings::default() };
        let late = Record { seat: Seat { given, ..seat.clone() }, claim: Some(claim.clone()) };
        let known = || lock(&host.records).seats().get(&name).cloned();
        assert_eq!((host.alter(late.clone()).await, known()), (Ok(()), None));
        lock(&host.records).add(ended.clone()).unwrap();
        assert_eq!((host.alter(late.clone()).await, known()), (Ok(()), Some(ended)));
        // One that is there is for the scheduler, which is away.
        let there = Record { seat, claim: Some(claim) };
        lock(&host.records).add(there.clone()).unwrap();
        assert!(host.alter(late).await.unwrap_err().contains("/none"));
        assert_eq!(known(), Some(there));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
