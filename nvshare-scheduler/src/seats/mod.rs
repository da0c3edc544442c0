//! Seats: what containers got. A seat has a folder with a socket and its limits, which is mounted into its container. The
//! listener that accepts a connection says whose it is. A seat is recorded and made before the request for it is answered.

mod folder;
mod record;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nvshare_core::MAX_GPUS_PER_CLIENT;
use nvshare_proto::{GpuUuid, MAX_SEATS, Occupant, Seat, SeatName, TenantSettings, ThrottledLine, Wishes};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, spawn_blocking};
use tokio::time::sleep;
use tracing::info;

use crate::bucket::Rate;
use crate::lock::lock;
use crate::settings::limits;
use crate::sockets::{Bound, Error, Pace};
use crate::{descriptors, log};
use folder::Root;
use record::{Record, Records};

/// The rate at which the connections of one seat's clients are accepted.
const CONNECTIONS: Rate = Rate { burst: 512, each_second: 512 };
/// How often the scheduler looks whether all that belongs to seats is there.
const LOOK_AFTER_EVERY: Duration = Duration::from_secs(1);
/// A process that registers within this time after its seat's limits have changed may have read the earlier ones.
const READ_BEFORE: Duration = Duration::from_secs(10);
/// Longest part of a occupant's name. Kubernetes has the same limit.
const MAX_NAME: usize = 253;
/// Tried again every few milliseconds.
static NOT_ACCEPTED: ThrottledLine = ThrottledLine::new(log::warn);
/// Tried again each second.
static NOT_MADE: ThrottledLine = ThrottledLine::new(log::warn);
/// Tried again each second.
static NOT_KEPT: ThrottledLine = ThrottledLine::new(log::warn);

/// A connection to a seat's socket.
pub(crate) type Arrival = (UnixStream, Inside);

/// All seats, for a server that is about to run.
#[derive(Debug)]
pub struct Opened {
    pub(crate) seats: Seats,
    pub(crate) arrivals: mpsc::Receiver<Arrival>,
}

/// All seats.
#[derive(Debug, Clone)]
pub(crate) struct Seats(Arc<All>);

#[derive(Debug)]
struct All {
    root: Root,
    records: Records,
    most: usize,
    arrivals: mpsc::Sender<Arrival>,
    /// Held for as long as a change takes: one is made at a time.
    changes: Mutex<()>,
    /// Held for moments only.
    places: Mutex<BTreeMap<SeatName, Place>>,
}

/// A seat that there is.
#[derive(Debug)]
struct Place {
    record: Record,
    /// Whether the record's file is older than the record: a client has come.
    is_unkept: bool,
    /// Whether its container has lost it, or it is new, and the core's task has not taken note of that.
    passed_on: bool,
    /// The limits before the last change, and when that was.
    before: Option<(TenantSettings, Instant)>,
    /// Connections, and processes that have left and live on.
    inside: usize,
    /// None: it could not be bound, which is tried again.
    serves: Option<Serves>,
}

impl Place {
    fn of(record: Record) -> Self {
        Self { record, is_unkept: false, passed_on: false, before: None, inside: 0, serves: None }
    }

    /// Another container has the seat, or none. A client may come before its container is named: it counts for the next one.
    fn give(&mut self, occupant: Option<Occupant>) {
        if self.record.occupant.is_some() {
            self.record.came = self.inside > 0;
        }
        self.passed_on |= self.record.occupant.is_some();
        self.record.occupant = occupant;
    }
}

/// A seat's socket, and the task that accepts its connections.
#[derive(Debug)]
struct Serves {
    bound: Arc<Bound>,
    task: AbortHandle,
}

impl Drop for Serves {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The right of one connection to be a seat's. Dropping it says that its process uses the seat no more.
#[derive(Debug)]
pub(crate) struct Inside {
    seats: Seats,
    pub(crate) name: SeatName,
    pub(crate) gpus: Arc<[GpuUuid]>,
}

impl Drop for Inside {
    fn drop(&mut self) {
        if let Some(place) = lock(&self.seats.0.places).get_mut(&self.name) {
            place.inside = place.inside.saturating_sub(1);
        }
    }
}

/// Whether there can be such a seat.
///
/// # Errors
/// The reason why not.
fn check(seat: &Seat) -> Result<(), String> {
    let Seat { slots, given } = seat;
    let gpus: BTreeSet<GpuUuid> = slots.iter().map(|slot| slot.gpu).collect();
    if slots.is_empty() {
        return Err("a seat without a slot".to_owned());
    }
    if slots.len() > MAX_GPUS_PER_CLIENT {
        return Err(format!("{} slots in one seat; at most {MAX_GPUS_PER_CLIENT}", slots.len()));
    }
    if gpus.len() < slots.len() {
        return Err("two slots of one seat on the same GPU".to_owned());
    }
    if given.paused.is_some() {
        return Err("a seat is neither paused nor resumed; its clients are".to_owned());
    }
    limits::check(*given)
}

fn check_occupant(occupant: &Occupant) -> Result<(), String> {
    let is_name = |text: &String| {
        let is_of_names = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        (1..=MAX_NAME).contains(&text.len()) && text.bytes().all(is_of_names)
    };
    let Occupant { namespace, pod, container } = occupant;
    match [namespace, pod, container].into_iter().find(|text| !is_name(text)) {
        Some(text) => Err(format!("{text:?} is no name of a namespace, pod or container")),
        None => Ok(()),
    }
}

impl Opened {
    /// Makes all seats again that are recorded beside `state`, the file for settings made at run time. Their folders are in `root`,
    /// which is made with the first seat. Returns a line about each seat that is not there.
    ///
    /// # Panics
    /// Outside of a runtime.
    #[must_use]
    pub fn open(root: PathBuf, state: Option<&Path>) -> (Self, Vec<String>) {
        // A connection waits in the kernel until the server takes it.
        let (arrivals, received) = mpsc::channel(1);
        let seats = Seats(Arc::new(All {
            root: Root::at(root),
            records: Records::beside(state),
            most: descriptors::most_seats(),
            arrivals,
            changes: Mutex::default(),
            places: Mutex::default(),
        }));
        let (records, mut warnings) = seats.0.records.read();
        let (count, most) = (records.len(), seats.0.most);
        for record in records.into_iter().take(most) {
            let name = record.seat.name();
            lock(&seats.0.places).insert(name, Place::of(record));
            if let Err(error) = seats.serve(name) {
                warnings.push(format!("seat {name} cannot be served: {error}; it is tried again"));
            }
        }
        if count > most {
            warnings.push(format!(
                "{} of {count} recorded seats are left out: {most} are the most",
                count - most
            ));
        }
        let served = lock(&seats.0.places).values().filter(|place| place.serves.is_some()).count();
        if served > 0 {
            info!("seats: {served}, in {}", seats.0.root.path().display());
        }
        (Self { seats, arrivals: received }, warnings)
    }
}

impl Seats {
    /// Makes a seat, or changes its limits. Waits for the disk. Returns what was done.
    ///
    /// # Errors
    /// There can be no such seat, or it cannot be made or recorded.
    pub(crate) fn make(&self, seat: Seat) -> Result<String, String> {
        check(&seat)?;
        let _one = lock(&self.0.changes);
        // Another scheduler may have the same records, too.
        self.0.root.take_if_there().map_err(|error| error.to_string())?;
        let name = seat.name();
        let (before, count) = {
            let places = lock(&self.0.places);
            (places.get(&name).map(|place| place.record.clone()), places.len())
        };
        let given = seat.given;
        let (occupant, came, text) = match &before {
            Some(Record { seat: there, .. }) if *there == seat => {
                self.repair(name).map_err(|error| error.to_string())?;
                return Ok(format!("seat {name} is there"));
            }
            Some(Record { seat: there, .. }) if slots_of(there) != slots_of(&seat) => {
                return Err(format!("seat {name} has other slots: {}", slots_of(there).join(", ")));
            }
            Some(Record { occupant, came, .. }) => (occupant.clone(), *came, "has other limits now"),
            None if count >= MAX_SEATS => {
                return Err(format!("no more seats: there are {count}, which are the most"));
            }
            None if count >= self.0.most => {
                return Err(format!(
                    "no more seats: there are {count}; a higher limit of open files (ulimit -n) allows more, up to {}",
                    MAX_SEATS
                ));
            }
            None => (None, false, "is made"),
        };
        let record = Record { seat, occupant, came };
        // Recorded first: what is recorded and not made is made at the next start.
        self.0.records.keep(&record)?;
        let made = match &before {
            Some(_) => {
                if let Some(place) = lock(&self.0.places).get_mut(&name) {
                    place.before = Some((place.record.seat.given, Instant::now()));
                    place.record = record;
                }
                self.repair(name)
            }
            None => {
                // One of the same name may have been removed a moment ago.
                lock(&self.0.places).insert(name, Place { passed_on: true, ..Place::of(record) });
                self.serve(name)
            }
        };
        made.map_err(|error| {
            if before.is_none() {
                lock(&self.0.places).remove(&name);
                let _ = self.0.records.forget(name);
            }
            error.to_string()
        })?;
        Ok(format!("seat {name} {text}: {}", limits::describe(given)))
    }

    /// Says who holds seats. Waits for the disk. Returns what was done.
    ///
    /// # Errors
    /// A occupant's name is none: nothing is changed. Or a record cannot be written: the change is in force, and does not survive a
    /// restart.
    pub(crate) fn hold(&self, holders: Vec<(SeatName, Option<Occupant>)>) -> Result<String, String> {
        holders.iter().filter_map(|(_, occupant)| occupant.as_ref()).try_for_each(check_occupant)?;
        let (mut changed, mut unknown) = (0, 0);
        let mut kept = Ok(());
        for (name, occupant) in holders {
            // A seat that a container waits for does not wait for all the others' records.
            let _one = lock(&self.0.changes);
            let record = match lock(&self.0.places).get_mut(&name) {
                Some(place) if place.record.occupant != occupant => {
                    place.give(occupant);
                    place.record.clone()
                }
                Some(_) => continue,
                None => {
                    unknown += 1;
                    continue;
                }
            };
            changed += 1;
            kept = kept.and(self.0.records.keep(&record));
        }
        kept?;
        let text = format!("seats with other holders: {changed}");
        Ok(if unknown > 0 { format!("{text}; not known: {unknown}") } else { text })
    }

    /// Removes a seat, if it is there. Waits for the disk. Returns what was done. Asked again after an error, it goes on.
    ///
    /// # Errors
    /// It is in use, or it cannot be removed.
    pub(crate) fn remove(&self, name: SeatName) -> Result<String, String> {
        let _one = lock(&self.0.changes);
        let was_there = {
            let mut places = lock(&self.0.places);
            let inside = places.get(&name).map_or(0, |place| place.inside);
            if inside > 0 {
                return Err(format!("seat {name} is in use: processes or connections: {inside}"));
            }
            self.0.root.take_if_there().map_err(|error| error.to_string())?;
            places.remove(&name).is_some()
        };
        // Also of a seat whose removal has failed half-way.
        self.0.records.forget(name).map_err(|error| format!("a restart brings seat {name} back: {error}"))?;
        self.0.root.remove(name)?;
        Ok(if was_there { format!("seat {name} is removed") } else { format!("there is no seat {name}") })
    }

    /// Returns the limits that a seat sets; nothing, if there is no such seat.
    pub(crate) fn given(&self, name: SeatName) -> TenantSettings {
        lock(&self.0.places).get(&name).map(|place| place.record.seat.given).unwrap_or_default()
    }

    /// Returns the limits of a seat before its last change, for a moment: a process that registers now may have read them.
    pub(crate) fn given_before(&self, name: SeatName) -> Option<TenantSettings> {
        let (before, changed) = lock(&self.0.places).get(&name)?.before?;
        (changed.elapsed() < READ_BEFORE).then_some(before)
    }

    /// The pod and the container that have a seat, or else the seat, in words.
    pub(crate) fn owner(&self, name: SeatName) -> String {
        self.occupant(name).map_or_else(|| format!("seat {name}"), |occupant| occupant.to_string())
    }

    /// The container that has a seat.
    pub(crate) fn occupant(&self, name: SeatName) -> Option<Occupant> {
        lock(&self.0.places).get(&name)?.record.occupant.clone()
    }

    /// Whether a container has lost a seat since this was last asked. A seat that is not there is nobody's.
    pub(crate) fn take_passed_on(&self, name: SeatName) -> bool {
        lock(&self.0.places).get_mut(&name).is_none_or(|place| std::mem::take(&mut place.passed_on))
    }

    /// A client has come to a seat.
    pub(crate) fn came(&self, name: SeatName) {
        if let Some(place) = lock(&self.0.places).get_mut(&name) {
            place.is_unkept |= !place.record.came;
            place.record.came = true;
        }
    }

    /// The seats that a container has, and to which no client came since.
    pub(crate) fn unused(&self) -> BTreeSet<SeatName> {
        let places = lock(&self.0.places);
        let is_unused = |place: &Place| place.record.occupant.is_some() && !place.record.came;
        places.iter().filter(|(_, place)| is_unused(place)).map(|(&name, _)| name).collect()
    }

    /// Each seat, and who holds it.
    pub(crate) fn all(&self) -> Vec<(SeatName, Seat, Option<Occupant>)> {
        let places = lock(&self.0.places);
        let row = |(&name, place): (&SeatName, &Place)| {
            (name, place.record.seat.clone(), place.record.occupant.clone())
        };
        places.iter().map(row).collect()
    }

    /// Makes folders and files anew that somebody removed, binds sockets that could not be bound, and records to which seats clients have
    /// come, for ever.
    pub(crate) async fn look_after(self) {
        loop {
            sleep(LOOK_AFTER_EVERY).await;
            let names: Vec<SeatName> = lock(&self.0.places).keys().copied().collect();
            if names.is_empty() {
                continue;
            }
            let seats = self.clone();
            // The system may take its time.
            let look = spawn_blocking(move || {
                for name in names {
                    let _one = lock(&seats.0.changes);
                    if let Err(error) = seats.repair(name) {
                        NOT_MADE.say(format_args!("seat {name} cannot be served: {error}"));
                    }
                    if let Err(error) = seats.keep(name) {
                        NOT_KEPT.say(format_args!("{error}"));
                    }
                }
            });
            let _ = look.await;
        }
    }

    /// Makes what is missing of a seat that there is. Changes are held.
    fn repair(&self, name: SeatName) -> Result<(), Error> {
        let bound = {
            let places = lock(&self.0.places);
            let Some(place) = places.get(&name) else { return Ok(()) };
            place.serves.as_ref().map(|serves| Arc::clone(&serves.bound))
        };
        if !bound.is_some_and(|bound| bound.is_there()) {
            self.serve(name)
        } else if !self.0.root.has_limits(name, &self.given(name)) {
            self.0.root.write_limits(name, &self.given(name))
        } else {
            Ok(())
        }
    }

    /// Writes the record of a seat to which a client has come. Changes are held.
    fn keep(&self, name: SeatName) -> Result<(), String> {
        let set = |is_unkept: bool| {
            let mut places = lock(&self.0.places);
            let place = places.get_mut(&name)?;
            let was_unkept = std::mem::replace(&mut place.is_unkept, is_unkept);
            was_unkept.then(|| place.record.clone())
        };
        let Some(record) = set(false) else { return Ok(()) };
        self.0.records.keep(&record).inspect_err(|_| drop(set(true)))
    }

    /// Makes a seat's folder, and serves its socket. Changes are held.
    fn serve(&self, name: SeatName) -> Result<(), Error> {
        let bound = Arc::new(self.0.root.make(name, &self.given(name))?);
        let task = tokio::spawn(accept(Arc::clone(&bound), self.clone(), name)).abort_handle();
        if let Some(place) = lock(&self.0.places).get_mut(&name) {
            place.serves = Some(Serves { bound, task });
        }
        Ok(())
    }

    /// A connection has come to a seat's socket; none: the seat is removed.
    fn enter(&self, name: SeatName) -> Option<Inside> {
        let mut places = lock(&self.0.places);
        let place = places.get_mut(&name)?;
        place.inside += 1;
        let gpus = place.record.seat.slots.iter().map(|slot| slot.gpu).collect();
        drop(places);
        Some(Inside { seats: self.clone(), name, gpus })
    }
}

/// Leaves out of what a process asks for what it has from its seat's file: that is no wish of its own, and goes when the seat changes.
pub(crate) fn keep_own_wishes(asked: &mut Wishes, given: &TenantSettings) {
    asked.weight = asked.weight.filter(|_| asked.weight != given.weight);
    asked.priority = asked.priority.filter(|_| asked.priority != given.priority);
    asked.compute.retain(|limit| Some(limit.percent) != given.compute);
}

fn slots_of(seat: &Seat) -> Vec<String> {
    let mut slots: Vec<String> = seat.slots.iter().map(ToString::to_string).collect();
    slots.sort();
    slots
}

/// Accepts a seat's connections.
async fn accept(bound: Arc<Bound>, seats: Seats, name: SeatName) {
    let mut pace = Pace::new(CONNECTIONS, Instant::now());
    loop {
        match pace.accept(bound.listener()).await {
            Ok(stream) => {
                let Some(inside) = seats.enter(name) else { return };
                if seats.0.arrivals.send((stream, inside)).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                NOT_ACCEPTED.say(format_args!("a connection to seat {name} cannot be accepted: {error}"));
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use nvshare_proto::{ComputeLimit, Priority, Slot};

    use super::*;

    #[test]
    fn what_a_process_has_from_its_seat_is_no_wish_of_its_own() {
        let given = TenantSettings { weight: Some(50), compute: Some(40), ..TenantSettings::default() };
        let [gpu, other] = [1, 2].map(|gpu| GpuUuid([gpu; 16]));
        let limits = [40, 30].map(|percent| ComputeLimit { gpu, percent });
        let asks =
            |weight, priority| Wishes { weight, priority, compute: limits.into(), ..Wishes::default() };
        for (weight, priority, kept) in
            [(50, None, None), (40, Some(Priority::Low), Some(40)), (60, None, Some(60))]
        {
            let mut asked = asks(Some(weight), priority);
            keep_own_wishes(&mut asked, &given);
            assert_eq!((asked.weight, asked.priority, asked.compute), (kept, priority, vec![limits[1]]));
        }
        let mut asked = asks(Some(50), Some(Priority::Low));
        keep_own_wishes(&mut asked, &TenantSettings::default());
        assert_eq!(asked, asks(Some(50), Some(Priority::Low)));
        let slot = |gpu| Slot { gpu, number: 0 };
        let seat = |slots: &[Slot]| Seat { slots: slots.into(), given };
        assert_eq!(check(&seat(&[slot(gpu), slot(other)])), Ok(()));
        let many: Vec<Slot> = (0..=MAX_GPUS_PER_CLIENT).map(|gpu| slot(GpuUuid([gpu as u8; 16]))).collect();
        assert!(check(&seat(&many)).unwrap_err().contains("at most"));
    }

    #[tokio::test]
    async fn there_are_so_many_seats_and_no_more() {
        let folder = std::env::temp_dir().join(format!("nvshare-seats-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let state = folder.join("state.toml");
        let open = || Opened::open(folder.join("seats"), Some(&state));
        let (Opened { mut seats, arrivals: _arrivals }, _) = open();
        Arc::get_mut(&mut seats.0).unwrap().most = 2;
        let seat = |number| Seat {
            slots: vec![Slot { gpu: GpuUuid([1; 16]), number }],
            given: TenantSettings::default(),
        };
        let said = [0, 1, 2].map(|number| seats.make(seat(number)));
        assert!(said[0].is_ok() && said[1].is_ok());
        assert_eq!(
            said[2],
            Err("no more seats: there are 2; a higher limit of open files (ulimit -n) allows more, up to 4096".to_owned())
        );
        assert!(seats.make(seat(1)).is_ok(), "it is there");
        // A record that cannot be removed is tried again.
        let record = state.with_extension("seats").join(seat(0).name().to_string());
        std::fs::remove_file(&record).unwrap();
        std::fs::create_dir(&record).unwrap();
        for _ in 0..2 {
            assert!(seats.remove(seat(0).name()).unwrap_err().contains("a restart brings"));
        }
        std::fs::remove_dir(&record).unwrap();
        seats.remove(seat(0).name()).unwrap();
        seats.make(seat(2)).unwrap();
        // A recorded seat whose place something else has is tried again.
        let socket = folder.join("seats").join(seat(2).name().to_string()).join("scheduler.sock");
        lock(&seats.0.places).clear();
        drop(seats);
        tokio::task::yield_now().await;
        let _ = std::fs::remove_file(&socket);
        std::fs::create_dir(&socket).unwrap();
        let (opened, warnings) = open();
        assert!(warnings.iter().any(|line| line.contains("is a directory, not a socket")), "{warnings:?}");
        assert_eq!(opened.seats.all().len(), 2);
        std::fs::remove_dir(&socket).unwrap();
        opened.seats.repair(seat(2).name()).unwrap();
        assert!(std::os::unix::net::UnixStream::connect(&socket).is_ok());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
