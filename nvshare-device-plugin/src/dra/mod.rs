//! Dynamic Resource Allocation: the driver publishes each GPU as a device that many claims may have, and prepares claims as seats.
//!
//! Decisions are in modules without IO: [`slices`], [`claims`], [`classes`], [`parameters`], [`quantities`]. Around them: the kubelet
//! ([`registration`], [`messages`]) and the API server ([`mod@server`], [`publish`]). Seats, their record and their CDI devices are the
//! [`Host`]'s, as with the device plugin API.

pub mod claims;
pub mod classes;
pub mod messages;
pub mod parameters;
pub mod publish;
pub mod quantities;
pub mod registration;
pub mod server;
pub mod slices;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use nvshare_proto::cdi::KIND;
use nvshare_proto::{GpuUuid, Priority, SeatName, ThrottledLine};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tonic::Status;
use tracing::{info, warn};

use crate::devices::NodeGpu;
use crate::host::{Host, blocking};
use crate::node_gpus::Versions;
use crate::options::{Options, Strategy};
use crate::pods::GivenOut;
use crate::records::{self, Record, Seats};
use crate::{cdi, pods, upkeep};
use claims::Place;
use classes::Consumer;
use messages::{Claim, ClaimsRequest, Device, PrepareResponse, Prepared, UnprepareResponse, Unprepared};
use server::{Error, Server};

/// The driver's name.
pub const DRIVER: &str = "gpu.nvshare.com";

/// How often a seat whose claim has ended is asked to go.
const TIDY_EVERY: Duration = Duration::from_secs(2);
/// How often the pods of a claim with a high priority are looked at again.
const LOOK_AGAIN_EVERY: Duration = Duration::from_secs(10);

static NOT_REMOVED: ThrottledLine = ThrottledLine::new(|text| warn!("{text}"));

/// The driver of a node.
#[derive(Debug)]
pub struct Driver {
    /// The machine.
    pub host: Arc<Host>,
    server: Server,
    /// Told after each claim that is prepared.
    prepared: GivenOut,
    /// Told after each claim that has ended.
    ended: Notify,
    /// Told when a kubelet has registered the driver: one that starts removes the slices of all drivers.
    registered: Notify,
    /// The GPUs that are offered.
    offered: watch::Sender<BTreeSet<GpuUuid>>,
}

/// The API server of a node's driver.
///
/// # Errors
/// The command line asks for something that cannot be had.
pub async fn server(options: &Options) -> Result<Server, String> {
    let Some(node) = options.node_name.clone().filter(|node| !node.is_empty()) else {
        return Err("--api dra: the name of the node is missing: --node-name, or $NODE_NAME".to_owned());
    };
    if options.device_list_strategy != Strategy::CdiCri {
        return Err(
            "--api dra: containers get claims by names of CDI devices alone: --device-list-strategy cdi-cri"
                .to_owned(),
        );
    }
    classes::check(&options.priority_of_class)?;
    Server::of(node).await
}

/// Serves for ever.
pub async fn serve(host: Arc<Host>, server: Server, versions: Versions) {
    let offered = watch::Sender::new(host.healthy(&host.nvidia(), true));
    let (prepared, [ended, registered]) = (GivenOut::default(), [(); 2].map(|()| Notify::new()));
    let driver = Arc::new(Driver { host, server, prepared, ended, registered, offered });
    let (tell_boot, boot) = watch::channel(None);
    if driver.host.gpus.iter().any(|gpu| slices::most_memory(gpu, &driver.host.options).is_none()) {
        info!(
            "NVML alone knows how much memory a GPU has: without it and without --slot-memory no claim can ask for memory"
        );
    }
    let devices = |offered: &BTreeSet<GpuUuid>| {
        let offered = driver.host.gpus.iter().filter(|gpu| offered.contains(&gpu.uuid));
        offered.map(|gpu: &NodeGpu| slices::device(gpu, &versions, &driver.host.options)).collect()
    };
    let offers = |nvidia: &_, answers| {
        let healthy = driver.host.healthy(nvidia, answers);
        driver.offered.send_if_modified(|old| std::mem::replace(old, healthy) != *old);
    };
    tokio::join!(
        registration::attend(Arc::clone(&driver)),
        publish::keep(&driver.server, devices, driver.offered.subscribe(), &driver.registered),
        upkeep::keep(Arc::clone(&driver.host), offers, tell_boot),
        pods::tell(Arc::clone(&driver.host), boot, &driver.prepared, async |_| {}),
        tidy(&driver),
        forget(&driver),
        look_again(&driver),
    );
}

/// Removes the seats whose claims have ended, for ever. No pod waits for that: the scheduler keeps those that a process still uses, and may be away.
async fn tidy(driver: &Driver) {
    loop {
        driver.remove_ended().await;
        tokio::select! {
            () = sleep(driver.host.options.pause(TIDY_EVERY)) => {}
            () = driver.ended.notified() => {}
        }
    }
}

/// Ends what claims have that are gone, once after the start: a kubelet that was reset, as by `kubeadm reset`, ends none of those that it had.
async fn forget(driver: &Driver) {
    while !driver.end_gone().await {
        sleep(driver.host.options.pause(LOOK_AGAIN_EVERY)).await;
    }
}

/// Lowers claims that have a high priority by a PriorityClass, when other pods have come or those of that class have gone, for ever. The kubelet does
/// not prepare a claim again for a further pod, and a quota of the class counts the pods that are there.
async fn look_again(driver: &Driver) {
    while !driver.host.options.priority_of_class.is_empty() {
        sleep(driver.host.options.pause(LOOK_AGAIN_EVERY)).await;
        driver.lower().await;
    }
}

impl Driver {
    /// Prepares claims, each by itself.
    async fn prepare(self: &Arc<Self>, request: ClaimsRequest) -> PrepareResponse {
        let mut tasks = JoinSet::new();
        for claim in request.claims {
            let driver = Arc::clone(self);
            tasks.spawn(async move {
                let prepared = match driver.prepare_one(&claim).await {
                    Ok(devices) => Prepared { devices, error: String::new() },
                    Err(why) => {
                        let error = format!("claim {}/{}: {why}", claim.namespace, claim.name);
                        warn!("{error}");
                        Prepared { devices: Vec::new(), error }
                    }
                };
                (claim.uid, prepared)
            });
        }
        let claims = tasks.join_all().await.into_iter().collect();
        // A claim's seat has the claim's own name, and so no earlier container.
        self.prepared.add([]);
        PrepareResponse { claims }
    }

    /// Makes the seats of a claim. Returns its devices, the same ones each time.
    async fn prepare_one(&self, claim: &Claim) -> Result<Vec<Device>, String> {
        let seats = self.seats(claim).await?;
        let host = Arc::clone(&self.host);
        let nvidia = blocking(move || Ok(host.nvidia())).await.map_err(words)?;
        let devices = seats.iter().map(|record| {
            let names = self.host.nvidia_names(&nvidia, &record.seat.slots).map_err(words)?;
            Ok(devices(record, &names, self.server.node()))
        });
        let devices = devices.collect::<Result<Vec<_>, String>>()?.concat();
        let names: BTreeSet<SeatName> = seats.iter().map(|record| record.seat.name()).collect();
        for record in seats {
            self.host.give(record).await.map_err(words)?;
        }
        // The seats that the claim had when it was allocated to something else.
        self.end(&claim.uid, &names).await?;
        self.ended.notify_one();
        self.host.publish_soon().await.map_err(words)?;
        Ok(devices)
    }

    /// The seats of a claim, as the API server says now. While it is away, those that the claim was given.
    async fn seats(&self, claim: &Claim) -> Result<Vec<Record>, String> {
        let asked = async {
            let found = self.server.claim(&claim.namespace, &claim.name).await?;
            let pods = self.priorities(&found, &claim.namespace).await?;
            Ok((found, pods))
        };
        match asked.await {
            Ok((found, _)) if found.metadata.uid.as_ref() != Some(&claim.uid) => {
                Err("another claim has this name now".to_owned())
            }
            Ok((found, pods)) => {
                let (host, node) = (Arc::clone(&self.host), self.server.node().to_owned());
                let read = self.host.read(move |known| {
                    let place = Place { node: &node, gpus: &host.gpus, options: &host.options };
                    Some(claims::seats(&found, &pods, place, known).map_err(|refusal| refusal.to_string()))
                });
                read.await.unwrap_or_else(|| Err("it cannot be read".to_owned()))
            }
            Err(Error::Missing(_)) => Err("there is no such claim any more".to_owned()),
            Err(error) => {
                let known = self.recorded(&claim.uid).await;
                if known.is_empty() { Err(error.to_string()) } else { Ok(known) }
            }
        }
    }

    /// The priorities that the pods of a claim bring, where PriorityClasses are mapped: of each pod that is there, that of its class, or none.
    async fn priorities(
        &self,
        claim: &ResourceClaim,
        namespace: &str,
    ) -> Result<Vec<Option<Priority>>, Error> {
        let table = &self.host.options.priority_of_class;
        if table.is_empty() {
            return Ok(Vec::new());
        }
        let mut priorities = Vec::new();
        for consumer in classes::consumers(claim) {
            let Consumer::Pod { name, uid } = consumer else {
                priorities.push(None);
                continue;
            };
            match self.server.pod(namespace, &name).await {
                Ok(pod) if pod.metadata.uid.as_ref() == Some(&uid) => {
                    priorities.push(classes::priority(&pod, table))
                }
                // It has ended, and the claim still names it.
                Ok(_) | Err(Error::Missing(_)) => {}
                Err(error) => {
                    let why = format!("--priority-of-class: its pod {name} cannot be read: {error}");
                    return Err(Error::Away(why));
                }
            }
        }
        if priorities.is_empty() {
            let why = "--priority-of-class: no pod that it is reserved for is there";
            return Err(Error::Away(why.to_owned()));
        }
        Ok(priorities)
    }

    /// Gives claims of a high priority the one that follows from their pods now. Where that cannot be read, nothing changes.
    async fn lower(&self) {
        let is_high = |record: &&Record| record.seat.given.priority == Some(Priority::High);
        let high: Vec<Record> =
            self.host.read(move |known| known.values().filter(is_high).cloned().collect()).await;
        for record in high {
            let Some(of) = &record.claim else { continue };
            let claim = Claim { namespace: of.namespace.clone(), uid: of.uid.clone(), name: of.name.clone() };
            let now = self.seats(&claim).await.unwrap_or_default();
            let Some(now) = now.into_iter().find(|now| now.claim == record.claim && *now != record) else {
                continue;
            };
            let claim = format!("claim {}/{}", claim.namespace, claim.name);
            match self.host.alter(now).await {
                Ok(()) => info!("{claim} has no high priority any more: its pods bring none"),
                Err(error) => warn!("{claim} keeps its high priority for now: {error}"),
            }
        }
    }

    /// Returns the seats that were given to a claim.
    async fn recorded(&self, uid: &str) -> Vec<Record> {
        let uid = uid.to_owned();
        let is_its = move |record: &&Record| record.claim.as_ref().is_some_and(|claim| claim.uid == uid);
        self.host.read(move |known| known.values().filter(is_its).cloned().collect()).await
    }

    /// Ends what was given to a claim, but for some seats.
    async fn end(&self, uid: &str, but: &BTreeSet<SeatName>) -> Result<(), String> {
        for record in self.recorded(uid).await {
            let name = record.seat.name();
            if !but.contains(&name) {
                self.host.change(name, |record| record.claim = None).await?;
            }
        }
        Ok(())
    }

    /// Ends what was given to claims that are gone, or have nothing of this node any more. Returns whether that is done: nothing ends unless the
    /// API server has answered.
    async fn end_gone(&self) -> bool {
        let claims = |known: &Seats| known.values().filter_map(|record| record.claim.clone()).collect();
        let claims: Vec<records::Claim> = self.host.read(claims).await;
        // One that does not have this API says of each claim that there is none.
        if !claims.is_empty() && self.server.list().await.is_err() {
            return false;
        }
        let mut is_done = true;
        for claim in claims {
            let is_gone = match self.server.claim(&claim.namespace, &claim.name).await {
                Ok(found) => {
                    found.metadata.uid.as_ref() != Some(&claim.uid)
                        || !claims::is_here(&found, self.server.node())
                }
                Err(Error::Missing(_)) => true,
                Err(_) => {
                    is_done = false;
                    continue;
                }
            };
            if !is_gone {
                continue;
            }
            let name = format!("claim {}/{}", claim.namespace, claim.name);
            match self.end(&claim.uid, &BTreeSet::new()).await {
                Ok(()) => info!("{name} is gone, and was not ended here: its seat is free"),
                Err(why) => {
                    warn!("{name}, which is gone, has not ended: {why}");
                    is_done = false;
                }
            }
        }
        self.ended.notify_one();
        is_done && self.host.publish_soon().await.is_ok()
    }

    /// Ends claims, each by itself.
    async fn unprepare(&self, request: ClaimsRequest) -> UnprepareResponse {
        let mut claims = std::collections::BTreeMap::new();
        for claim in request.claims {
            let ended = match self.end(&claim.uid, &BTreeSet::new()).await {
                Ok(()) => self.host.publish_soon().await.map_err(words),
                Err(error) => Err(error),
            };
            let ended = ended
                .inspect_err(|why| warn!("claim {}/{} has not ended: {why}", claim.namespace, claim.name));
            claims.insert(claim.uid, Unprepared { error: ended.err().unwrap_or_default() });
        }
        self.ended.notify_one();
        UnprepareResponse { claims }
    }

    /// Removes the seats whose claims have ended.
    async fn remove_ended(&self) {
        let ended = |(name, record): (&SeatName, &Record)| record.claim.is_none().then_some(*name);
        let ended: Vec<SeatName> =
            self.host.read(move |known| known.iter().filter_map(ended).collect()).await;
        for name in ended {
            // Its claim may have been prepared again.
            if let Err(error) = self.host.remove(name, move |host| host.is_unclaimed(name)).await {
                NOT_REMOVED.say(format_args!("seat {name}, whose claim has ended, stays for now: {error}"));
            }
        }
    }
}

fn words(status: Status) -> String {
    status.message().to_owned()
}

/// The devices of a seat: ours, which brings the library and the seat's socket, and NVIDIA's, which brings the GPU.
fn devices(record: &Record, nvidia: &[String], node: &str) -> Vec<Device> {
    let own = format!("{KIND}={}", cdi::device_name(record.seat.name()));
    let requests = record.claim.iter().flat_map(|claim| &claim.requests);
    let of = |((slot, request), nvidia): ((&nvshare_proto::Slot, &String), &String)| Device {
        // The kubelet knows a request, and not which of its choices was allocated.
        request_names: request.split('/').next().map(str::to_owned).into_iter().collect(),
        pool_name: node.to_owned(),
        device_name: slices::device_name(slot.gpu),
        cdi_device_ids: vec![own.clone(), nvidia.clone()],
    };
    record.seat.slots.iter().zip(requests).zip(nvidia).map(of).collect()
}
