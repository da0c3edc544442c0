//! Whose the seats are: the kubelet says which container has which devices, and the scheduler is told.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nvshare_admin::Error;
use nvshare_proto::{AdminRequest, Occupant, SeatName, Slot, ThrottledLine};
use tokio::sync::{Notify, watch};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use crate::api::{Empty, LIST_PODS, ListPodResourcesResponse};
use crate::grpc::Client;
use crate::host::{Host, lock};
use crate::kubelet::{self, Identity};
use crate::options::Options;
use crate::plugin::Plugin;
use crate::resources::Numbers;
use crate::{cdi, checkpoint};

const LOOK_EVERY: Duration = Duration::from_secs(2);
/// The kubelet notes what it gives to a container soon after it has it.
const SETTLE: Duration = Duration::from_millis(300);
/// A kubelet is asked anew after this long without an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most seats in a message: names of pods are long, and a message is 64 KiB at most.
const MAX_PODS_NAMED: usize = 100;

static NO_PODS: ThrottledLine = ThrottledLine::new(|text| info!("{text}"));
static NOT_TOLD: ThrottledLine = ThrottledLine::new(|text| warn!("{text}"));
static NO_RECORD: ThrottledLine = ThrottledLine::new(|text| warn!("{text}"));
static NOT_AHEAD: ThrottledLine = ThrottledLine::new(|text| info!("{text}"));
static NOT_MADE: ThrottledLine = ThrottledLine::new(|text| warn!("{text}"));

/// Seats and the containers that have them.
pub type Occupants = BTreeMap<SeatName, Occupant>;
/// The same as the kubelet lists it, in no order that lasts. Containers of several pods may have the seat of one claim.
pub type Listed = BTreeMap<SeatName, Vec<Occupant>>;
/// A seat, and the container that has it now.
pub type Change = (SeatName, Option<Occupant>);

/// A container is gone after this number of looks in a row that do not find it: a kubelet that starts again knows no pods for a while.
const MISSES: u32 = 5;

/// The seats that were given out since the last look at who has them.
#[derive(Debug, Default)]
pub struct GivenOut {
    seats: Mutex<Vec<SeatName>>,
    any: Notify,
}

impl GivenOut {
    /// Notes seats that new containers get.
    pub fn add(&self, seats: impl IntoIterator<Item = SeatName>) {
        lock(&self.seats).extend(seats);
        self.any.notify_one();
    }

    fn take(&self) -> Vec<SeatName> {
        std::mem::take(&mut *lock(&self.seats))
    }
}

/// Which containers have seats, over several looks.
#[derive(Debug, Default)]
pub struct Held {
    now: Occupants,
    missed: BTreeMap<SeatName, u32>,
}

impl Held {
    /// Takes over what a scheduler knows of those that are listed: the plugin may have started again.
    fn knowing(mut recorded: Occupants, listed: &Listed) -> Self {
        recorded.retain(|seat, occupant| listed.get(seat).is_some_and(|of_seat| of_seat.contains(occupant)));
        Self { now: recorded, missed: BTreeMap::new() }
    }

    /// Forgets who had these seats: another container gets them, whatever its name.
    pub fn forget(&mut self, seats: &[SeatName]) {
        self.now.retain(|seat, _| !seats.contains(seat));
        self.missed.retain(|seat, _| !seats.contains(seat));
    }

    /// Takes a look into account. Returns which containers have seats. The container that has had a seat stays its holder while it is listed,
    /// whoever else is: another holder ends what administrators said of the seat.
    pub fn look(&mut self, listed: &Listed) -> &Occupants {
        let before = std::mem::take(&mut self.now);
        self.now = listed
            .iter()
            .filter_map(|(seat, listed)| {
                let known = before.get(seat).filter(|known| listed.contains(known));
                Some((*seat, known.or_else(|| listed.iter().min())?.clone()))
            })
            .collect();
        let missed = std::mem::take(&mut self.missed);
        for (seat, occupant) in
            before.into_iter().filter(|(seat, _)| !self.now.contains_key(seat)).collect::<Vec<_>>()
        {
            let misses = missed.get(&seat).map_or(1, |misses| misses + 1);
            if misses < MISSES {
                self.missed.insert(seat, misses);
                self.now.insert(seat, occupant);
            }
        }
        &self.now
    }
}

/// Which containers have which seat. `main`: the name of the main resource.
#[must_use]
pub fn holders(pods: &ListPodResourcesResponse, main: &str) -> Listed {
    let mut holders = Listed::new();
    for pod in &pods.pod_resources {
        for container in &pod.containers {
            // A device for each NUMA node may stand by itself.
            let mut slots: BTreeMap<Numbers, Vec<Slot>> = BTreeMap::new();
            for devices in &container.devices {
                let Some(numbers) = Numbers::of_resource(&devices.resource_name, main) else { continue };
                let ids = devices.device_ids.iter();
                slots.entry(numbers).or_default().extend(ids.filter_map(|id| numbers.slot(id).ok()));
            }
            let seats = slots.values().filter(|slots| !slots.is_empty()).map(|slots| SeatName::of(slots));
            // A claim's seat is known by the name of its device.
            let claimed = container.dynamic_resources.iter().flat_map(|claim| &claim.claim_resources);
            let names = claimed.flat_map(|claim| &claim.cdi_devices);
            let claimed = names.filter_map(|device| cdi::seat_of_qualified(&device.name));
            let occupant = || Occupant {
                namespace: pod.namespace.clone(),
                pod: pod.name.clone(),
                container: container.name.clone(),
            };
            seats.chain(claimed).for_each(|seat| holders.entry(seat).or_default().push(occupant()));
        }
    }
    holders
}

/// News for the scheduler: changes, or all holders where it knows nothing yet.
///
/// `told`: what it was told; none: nothing. Then `seats` are all that were given out.
#[must_use]
pub fn changes(told: Option<&Occupants>, now: &Occupants, seats: &[SeatName]) -> Vec<Change> {
    let was = |seat: &SeatName| told.and_then(|told| told.get(seat));
    let is_new = |seat: &SeatName| told.is_none() || was(seat) != now.get(seat);
    let known = told.into_iter().chain([now]).flat_map(Occupants::keys);
    let mut named: Vec<SeatName> = seats.iter().chain(known).copied().collect();
    named.sort_unstable();
    named.dedup();
    named.retain(is_new);
    named.into_iter().map(|seat| (seat, now.get(&seat).cloned())).collect()
}

/// News for the scheduler of seats that another container gets: nobody has them any more. `told` is as for [`changes`], and takes the news into
/// account.
fn set_free(told: Option<&mut Occupants>, seats: &[SeatName]) -> Vec<Change> {
    let free = |seat: &SeatName| (*seat, None);
    match told {
        None => seats.iter().map(free).collect(),
        Some(told) => seats.iter().filter(|seat| told.remove(seat).is_some()).map(free).collect(),
    }
}

fn socket(options: &Options) -> PathBuf {
    options.kubelet.join("pod-resources/kubelet.sock")
}

/// Which containers have which seat now.
///
/// # Errors
/// The kubelet does not answer.
pub async fn holders_now(options: &Options) -> Result<Listed, String> {
    let socket = socket(options);
    let pods = list(&mut None, &socket).await.map_err(|error| format!("{}: {error}", socket.display()))?;
    Ok(holders(&pods, &options.resource))
}

fn kept(options: &Options) -> PathBuf {
    options.kubelet.join("device-plugins").join(checkpoint::FILE)
}

/// The kubelet's own record as it was read last, and its file then.
#[derive(Debug, Default)]
pub struct Kept(Option<(Identity, Arc<checkpoint::Seats>)>);

impl Kept {
    /// The same as [`given`]. It is read again only where it is another file: the kubelet writes it anew and renames it.
    async fn now(&mut self, options: &Options) -> Result<Option<Arc<checkpoint::Seats>>, String> {
        let file = kubelet::identity(&kept(options));
        if let Some((_, seats)) = self.0.as_ref().filter(|(known, _)| file == Some(*known)) {
            return Ok(Some(Arc::clone(seats)));
        }
        let seats = given(options).await?.map(Arc::new);
        self.0 = file.zip(seats.clone());
        Ok(seats)
    }
}

/// The seats that the kubelet's own record names. None: there is no record, so nothing was given out yet.
///
/// # Errors
/// The record cannot be read, or has another form.
pub async fn given(options: &Options) -> Result<Option<checkpoint::Seats>, String> {
    let path = kept(options);
    let resource = options.resource.clone();
    let read = move || {
        match fs::read_to_string(&path) {
            Ok(text) => checkpoint::seats(&text, &resource).map(Some),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.to_string()),
        }
        .map_err(|error| format!("{}: {error}", path.display()))
    };
    spawn_blocking(read).await.unwrap_or_else(|error| Err(error.to_string()))
}

/// Tells the scheduler whose the seats are, for ever. `boot`: which run of the scheduler answers, if any. `look` is told what the kubelet lists.
pub async fn tell(
    host: Arc<Host>,
    boot: watch::Receiver<Option<u64>>,
    given_out: &GivenOut,
    mut look: impl AsyncFnMut(&Listed),
) {
    let socket = socket(&host.options);
    let mut kubelet = None;
    // The holders that were told, and the run of the scheduler that knows them.
    let mut told: Option<(u64, Occupants)> = None;
    let mut held: Option<Held> = None;
    // The last list, and what it says.
    let (mut listed, mut last) = (Listed::new(), ListPodResourcesResponse::default());
    // Seats of which the scheduler is still to be told that nobody has them.
    let mut free: Vec<SeatName> = Vec::new();
    loop {
        let run = *boot.borrow();
        if let Some(run) = run {
            free.extend(given_out.take());
            match list(&mut kubelet, &socket).await {
                Ok(pods) => {
                    if pods != last {
                        (listed, last) = (holders(&pods, &host.options.resource), pods);
                    }
                    look(&listed).await;
                    if held.is_none() {
                        held = Some(Held::knowing(recorded(&host).await, &listed));
                    }
                    let held = held.get_or_insert_default();
                    held.forget(&free);
                    let now = held.look(&listed);
                    let mut known = told.take_if(|(to, _)| *to == run).map(|(_, known)| known);
                    let seats = if known.is_none() { host.seats().await } else { Vec::new() };
                    let freed = send(&host, set_free(known.as_mut(), &free)).await;
                    // A seat is set free once: a scheduler that refuses has done it, and cannot keep it.
                    if matches!(freed, Ok(()) | Err(Error::Refused(_))) {
                        free.clear();
                    }
                    let changes = changes(known.as_ref(), now, &seats);
                    let sent = if free.is_empty() { send(&host, changes).await } else { freed };
                    told = match sent {
                        Ok(()) => Some((run, now.clone())),
                        Err(error) => {
                            NOT_TOLD.say(format_args!(
                                "the scheduler is not told which pods have seats: {error}"
                            ));
                            None
                        }
                    };
                }
                Err(error) => {
                    kubelet = None;
                    let socket = socket.display();
                    NO_PODS.say(format_args!(
                        "the scheduler does not learn which pods have seats: {socket}: {error}"
                    ));
                }
            }
        }
        tokio::select! {
            () = sleep(host.options.pause(LOOK_EVERY)) => {}
            () = given_out.any.notified() => sleep(SETTLE).await,
        }
    }
}

/// Makes seats that the kubelet's record names and that are not there, and single slots' ahead, and removes those that nobody has. Without the
/// record, or where it does not name what the kubelet itself lists, nothing is removed.
pub async fn keep_in_step(plugin: &Arc<Plugin>, kept: &mut Kept, listed: &Listed) {
    let given = match kept.now(&plugin.host.options).await {
        Ok(given) => given,
        Err(error) => return NO_RECORD.say(format_args!("{error}; no seat is removed")),
    };
    let names_all = |given: &Arc<checkpoint::Seats>| listed.keys().all(|seat| given.contains_key(seat));
    let is_whole = given.as_ref().is_some_and(names_all);
    let due = plugin.due(given, is_whole).await;
    if let Err(status) = plugin.prepare(due.ahead).await {
        NOT_AHEAD.say(format_args!("a slot has no seat until it is given out: {}", status.message()));
    }
    let restored = plugin.restore(due.lost).await;
    if let Err(status) = restored.and(plugin.retire(due.over).await) {
        NOT_MADE.say(format_args!("the seats are not as the kubelet has them: {}", status.message()));
    }
}

async fn list(client: &mut Option<Client>, socket: &Path) -> Result<ListPodResourcesResponse, String> {
    let ask = async {
        let connected = match client.take() {
            Some(client) => client,
            None => Client::connect(socket).await.map_err(|error| error.to_string())?,
        };
        let pods = connected.ask(LIST_PODS, Empty {}).await.map_err(|status| status.message().to_owned())?;
        *client = Some(connected);
        Ok(pods)
    };
    timeout(PATIENCE, ask).await.map_err(|_| "no answer".to_owned())?
}

/// The containers that the scheduler takes for the holders of seats; none, where it does not say.
async fn recorded(host: &Arc<Host>) -> Occupants {
    let host = Arc::clone(host);
    let status = spawn_blocking(move || host.scheduler.status()).await;
    let seats = status.ok().and_then(Result::ok).map(|status| status.seats).unwrap_or_default();
    seats.into_iter().filter_map(|seat| Some((seat.name, seat.occupant?))).collect()
}

async fn send(host: &Arc<Host>, changes: Vec<Change>) -> Result<(), Error> {
    if changes.is_empty() {
        return Ok(());
    }
    let host = Arc::clone(host);
    let send = move || {
        changes
            .chunks(MAX_PODS_NAMED)
            .try_for_each(|some| host.scheduler.change(AdminRequest::OccupySeats(some.to_vec())).map(drop))
    };
    spawn_blocking(send).await.unwrap_or_else(|error| Err(Error::Refused(error.to_string())))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use nvshare_proto::GpuUuid;

    use super::*;
    use crate::api::{
        CdiDevice, ClaimResource, ContainerDevices, ContainerResources, DynamicResource, PodResources,
    };

    fn slot(gpu: u8, number: u32) -> Slot {
        Slot { gpu: GpuUuid([gpu; 16]), number }
    }

    fn occupant(container: &str) -> Occupant {
        Occupant { namespace: "n".to_owned(), pod: "p".to_owned(), container: container.to_owned() }
    }

    fn listed(occupants: &Occupants) -> Listed {
        occupants.iter().map(|(seat, occupant)| (*seat, vec![occupant.clone()])).collect()
    }

    #[test]
    fn a_containers_devices_make_its_seat() {
        let devices = |resource: &str, slots: &[Slot]| ContainerDevices {
            resource_name: resource.to_owned(),
            device_ids: slots.iter().map(Slot::to_string).collect(),
        };
        let (ours, small) = ("nvshare.com/gpu", "nvshare.com/gpu.small");
        let container = |name: &str, devices| ContainerResources {
            name: name.to_owned(),
            devices,
            ..ContainerResources::default()
        };
        let claimed = SeatName::of(&[slot(4, 9)]);
        let names = [format!("nvshare.com/gpu=seat-{claimed}"), "nvidia.com/gpu=0".to_owned()];
        let names = names.map(|name| CdiDevice { name }).to_vec();
        let claim = DynamicResource { claim_resources: vec![ClaimResource { cdi_devices: names }] };
        let by_claim =
            ContainerResources { dynamic_resources: vec![claim], ..container("claim", Vec::new()) };
        let containers = vec![
            container("both", vec![devices(ours, &[slot(2, 1)]), devices(ours, &[slot(1, 0)])]),
            container("other", vec![devices("nvidia.com/gpu", &[slot(3, 0)])]),
            container("none", vec![]),
            container("one", vec![devices(ours, &[slot(1, 2)])]),
            container("two", vec![devices(ours, &[slot(1, 5)]), devices(small, &[slot(1, 2)])]),
            by_claim,
        ];
        let pod = PodResources { name: "p".to_owned(), namespace: "n".to_owned(), containers };
        let found = holders(&ListPodResourcesResponse { pod_resources: vec![pod] }, ours);
        let both = SeatName::of(&[slot(1, 0), slot(2, 1)]);
        let one = SeatName::of(&[slot(1, 2)]);
        let of_small = Numbers::of_resource(small, ours).unwrap().slot(&slot(1, 2).to_string()).unwrap();
        let two = [slot(1, 5), of_small].map(|slot| (SeatName::of(&[slot]), occupant("two")));
        let others = [(both, occupant("both")), (one, occupant("one")), (claimed, occupant("claim"))];
        assert_eq!(found, listed(&others.into_iter().chain(two).collect()));
    }

    #[tokio::test]
    async fn the_kubelets_record_is_read_again_when_it_is_another_file() {
        let kubelet = std::env::temp_dir().join(format!("nvshare-kept-{}", std::process::id()));
        let options = Options::parse_from(["plugin", "--kubelet", kubelet.to_str().unwrap()]);
        let mut record = Kept::default();
        assert_eq!(record.now(&options).await, Ok(None));

        let path = kept(&options);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let write = |number| {
            let slot = slot(1, number);
            let text = format!(
                r#"{{"Data":{{"PodDeviceEntries":[{{"ResourceName":"nvshare.com/gpu","DeviceIDs":["{slot}"]}}]}}}}"#
            );
            fs::write(path.with_extension("new"), text).unwrap();
            fs::rename(path.with_extension("new"), &path).unwrap();
            checkpoint::Seats::from([(SeatName::of(&[slot]), vec![slot])])
        };
        for number in [0, 1] {
            let expected = write(number);
            let read = record.now(&options).await.unwrap().unwrap();
            assert_eq!(*read, expected);
            let again = record.now(&options).await.unwrap().unwrap();
            assert!(Arc::ptr_eq(&read, &again), "it is not read again");
        }
        // Without the file, nothing that was read before is known.
        fs::remove_dir_all(&kubelet).unwrap();
        assert_eq!(record.now(&options).await, Ok(None));
    }

    #[test]
    fn a_container_is_gone_when_several_looks_do_not_find_it() {
        let [a, b] = [1, 2].map(|number| SeatName::of(&[slot(1, number)]));
        let of = |pairs: &[(SeatName, &str)]| -> Occupants {
            pairs.iter().map(|&(seat, name)| (seat, occupant(name))).collect()
        };
        let both = of(&[(a, "x"), (b, "y")]);
        let mut held = Held::default();
        assert_eq!(*held.look(&listed(&both)), both);
        // The kubelet starts again, twice.
        for misses in [MISSES - 1, MISSES - 1] {
            (0..misses).for_each(|_| assert_eq!(*held.look(&Listed::new()), both));
            assert_eq!(*held.look(&listed(&both)), both);
        }
        // Another container has a seat at once.
        let other = of(&[(a, "z")]);
        let look = |held: &mut Held| held.look(&listed(&other)).clone();
        (1..MISSES).for_each(|_| assert_eq!(look(&mut held), of(&[(a, "z"), (b, "y")])));
        assert_eq!(look(&mut held), other);
    }

    #[test]
    fn a_seat_of_several_containers_keeps_its_holder_in_whatever_order_they_are_listed() {
        let seat = SeatName::of(&[slot(1, 0)]);
        let mut held = Held::default();
        for (names, holder) in [
            (&["b"][..], "b"),
            (&["a", "b"], "b"),
            (&["b", "a"], "b"),
            (&["c", "b", "a"], "b"),
            (&["c", "a"], "a"),
            (&["a", "c"], "a"),
            (&[], "a"),
            (&["c"], "c"),
        ] {
            let of_seat: Vec<Occupant> = names.iter().map(|name| occupant(name)).collect();
            // The kubelet names no seat that nobody has.
            let listed = [(seat, of_seat)].into_iter().filter(|(_, of_seat)| !of_seat.is_empty()).collect();
            assert_eq!(held.look(&listed)[&seat], occupant(holder), "{names:?}");
        }
        // The plugin starts again, and asks the scheduler.
        let listed = Listed::from([(seat, vec![occupant("a"), occupant("b")])]);
        for (recorded, holder) in [("b", "b"), ("gone", "a")] {
            let mut held = Held::knowing(Occupants::from([(seat, occupant(recorded))]), &listed);
            assert_eq!(held.look(&listed)[&seat], occupant(holder));
        }
    }

    #[test]
    fn what_changed_is_told_and_all_to_who_knows_nothing() {
        let seats = [1, 2, 3].map(|number| SeatName::of(&[slot(1, number)]));
        let [a, b, c] = seats;
        let of = |pairs: &[(SeatName, &str)]| -> Occupants {
            pairs.iter().map(|&(seat, name)| (seat, occupant(name))).collect()
        };
        let some = |seat, name| (seat, Some(occupant(name)));
        let sorted = |mut changes: Vec<Change>| {
            changes.sort_by_key(|change| change.0);
            changes
        };
        let before = of(&[(a, "x"), (b, "y")]);
        let now = of(&[(a, "x"), (c, "z")]);
        for (told, now, expected) in [
            (Some(&before), &before, vec![]),
            (Some(&before), &now, vec![(b, None), some(c, "z")]),
            (None, &now, vec![some(a, "x"), (b, None), some(c, "z")]),
            (Some(&before), &of(&[(a, "other"), (b, "y")]), vec![some(a, "other")]),
        ] {
            assert_eq!(changes(told, now, &seats), sorted(expected));
        }
        assert_eq!(changes(None, &now, &[]), sorted(vec![some(a, "x"), some(c, "z")]));
    }
}
