//! A connection: frames become commands for the core's task, and its answers become frames.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::{SinkExt, StreamExt};
use nvshare_core::{Gang, Identity, MOST_GPUS_EACH};
use nvshare_proto::{AdminRequest, ClientMessage, Register, Reply, Request, SchedulerMessage, Seldom, Usage};
use rustix::net::{RecvFlags, recv};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use crate::bounds::{Bounds, Place};
use crate::bucket::{Bucket, Rate};
use crate::commands::Command;
use crate::frames::{self, Stream, WRITE_PATIENCE, refuse, tell_all};
use crate::host_memory::{Account, HostMemory, Lot, News, Owner};
use crate::identity::Peer;
use crate::journal::Journal;
use crate::lock::lock;
use crate::log;
use crate::processes::{self, Described, Image, Looks};
use crate::tenants::{Seat, Tenant, Tenants};
use crate::view::Viewer;
use crate::watchers;

/// Frames that wait for a client that does not read, before it is cut off.
const BACKLOG: usize = 256;
/// A connection that says nothing for this long is closed, unless it is a registered client's.
const FIRST_FRAME_PATIENCE: Duration = Duration::from_secs(10);
/// How long a client that comes back may send long frames.
const LISTS_FOR: Duration = Duration::from_secs(10);
/// Longest time, for each frame and altogether, for which the socket of a process that is gone is read.
const LAST_WORDS: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(50)];
/// How often a process that has left and lives on is looked at: whether it runs another program by now.
const LOOK_AT_IMAGES: Duration = Duration::from_secs(1);
/// Longest name of a program that is shown.
const LONGEST_NAME: usize = 64;
/// The reason for refusing a process that names more GPUs than the machine can have.
const TOO_MANY_GPUS: &str = "more GPUs are named than the machine can have";
/// Frames that one connection may send.
const FRAMES: Rate = Rate { burst: 8000, each_second: 4000 };
/// One for each connection that is refused.
static TOO_MANY: Seldom = Seldom::new(log::warn);
/// One for each process.
static NO_SEAT: Seldom = Seldom::new(log::warn);

/// State that all connections share.
#[derive(Debug, Clone)]
pub(crate) struct Shared {
    pub(crate) commands: mpsc::Sender<Command>,
    pub(crate) tenants: Arc<Tenants>,
    /// Places for clients; none: the administrators' socket, which always has a place.
    pub(crate) bounds: Option<Arc<Bounds>>,
    /// Tasks that wait for the end of a process, or of its program: one for each process, however often it came and went.
    pub(crate) waits: Arc<Mutex<BTreeMap<u64, AbortHandle>>>,
    /// Looks at processes that take a while.
    pub(crate) looks: Looks,
    /// The events, for administrators.
    pub(crate) journal: Arc<Journal>,
    /// Memory of the host for clients, if the scheduler hands out any.
    pub(crate) host: Option<HostMemory>,
}

impl Shared {
    pub(crate) fn new(
        commands: mpsc::Sender<Command>,
        bounds: Option<Arc<Bounds>>,
        journal: Arc<Journal>,
        host: Option<HostMemory>,
    ) -> Self {
        Self {
            commands,
            tenants: Arc::default(),
            bounds,
            waits: Arc::default(),
            looks: Looks::default(),
            journal,
            host,
        }
    }

    /// Tells the core when the process of a client that has disconnected is gone, or runs another program than `image`. The client's
    /// place stays taken until then, or until the process has come back: then its place is counted again.
    fn wait_for_end(&self, client: u64, peer: Peer, image: Option<Image>, place: Option<Place>) {
        let (commands, identity) = (self.commands.clone(), peer.identity);
        let wait = tokio::spawn(async move {
            tokio::select! {
                () = peer.gone() => {}
                () = runs_another(&peer, image) => {}
            }
            let _ = commands.send(Command::Exited { client, identity }).await;
            drop(place);
        });
        let mut waits = lock(&self.waits);
        waits.retain(|_, wait| !wait.is_finished());
        if let Some(before) = identity.process.and_then(|process| waits.insert(process, wait.abort_handle()))
        {
            before.abort();
        }
    }
}

/// Waits until a process runs another program than this; for ever where nobody can tell. What the earlier program had on GPUs went with it.
async fn runs_another(peer: &Peer, image: Option<Image>) {
    let Some((pid, before)) = peer.identity.pid.zip(image) else { return std::future::pending().await };
    let mut last = None;
    loop {
        sleep(LOOK_AT_IMAGES).await;
        // What cannot be seen now is no sign. One look before, the driver may still have been freeing the memory.
        let now = peer.read(|| Image::of(pid)).flatten().filter(|&now| now != before);
        if now.is_some() && now == last {
            return;
        }
        last = now;
    }
}

/// Whether the other end has hung up and said nothing. Connections that end at once cost others less if nothing is asked about
/// their process.
pub(crate) fn is_over(stream: &UnixStream) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    recv(stream, &mut [0], flags).is_ok_and(|(read, _)| read == 0)
}

/// Serves a connection from its first frame to its end.
pub(crate) async fn serve(stream: UnixStream, shared: Shared) {
    let peer = Peer::of(&stream);
    let user = stream.peer_cred().ok().map(|cred| cred.uid());
    let mut framed = frames::on(stream);
    let place = match &shared.bounds {
        None => None,
        Some(bounds) => {
            let Some(place) = bounds.take(peer.groups.whom(user)) else {
                TOO_MANY.say(format_args!("too many connections: one more of user {user:?} is refused"));
                return refuse(&mut framed, "too many connections").await;
            };
            Some(place)
        }
    };
    connection(framed, peer, place, &shared).await;
}

/// Serves a connection until its first request tells what it is for.
async fn connection(mut framed: Stream, peer: Peer, place: Option<Place>, shared: &Shared) {
    loop {
        let request = match timeout(FIRST_FRAME_PATIENCE, framed.next()).await {
            // The other end says nothing.
            Err(_) => return,
            Ok(Some(Ok(request))) => request,
            Ok(Some(Err(error))) => {
                debug!("a connection is refused: {error}");
                return refuse(&mut framed, error.to_string()).await;
            }
            Ok(None) => return,
        };
        match request {
            Request::Admin(AdminRequest::Watch { from, follow }) if shared.bounds.is_none() => {
                if !watchers::serve(&mut framed, &shared.journal, from, follow).await {
                    return;
                }
            }
            Request::Admin(request) => {
                // A user who asks too often waits, and delays nobody else.
                while let Some(Err(wait)) = place.as_ref().map(|place| place.ask(Instant::now())) {
                    sleep(wait).await;
                }
                let viewer = shared.bounds.is_some().then(|| process(framed.get_ref(), &peer));
                if !tell_all(&mut framed, administer(request, viewer, &shared.commands).await).await {
                    return;
                }
            }
            Request::Register(register) => return client(framed, peer, place, register, shared).await,
            Request::Look { run } => {
                let user = framed.get_ref().peer_cred().ok().map(|cred| cred.uid());
                let shown = match peer.read(|| Tenant::of(&peer.groups, user, run)) {
                    Some(Some(tenant)) => shared.tenants.show(&tenant, &framed).await,
                    _ => Err(std::io::ErrorKind::NotFound.into()),
                };
                if shown.is_err() {
                    refuse(&mut framed, "there is no tenant to look at").await;
                }
                return;
            }
            Request::Client(_) => {
                return refuse(&mut framed, "a process registers before it says anything else").await;
            }
        }
    }
}

/// Answers a request; on the clients' socket, `viewer` is the process that asks.
async fn administer(
    request: AdminRequest,
    viewer: Option<Viewer>,
    commands: &mpsc::Sender<Command>,
) -> Vec<Reply> {
    let (answer, answered) = oneshot::channel();
    let command = match viewer {
        None => Command::Admin { request, answer },
        Some(viewer) if request == AdminRequest::Status => Command::Look { viewer, answer },
        Some(_) => {
            let what = match request {
                AdminRequest::Watch { .. } => "events are told",
                _ => "changes are accepted",
            };
            let reason = format!("{what} on the administrators' socket only");
            return vec![Reply::Refused { reason }];
        }
    };
    let sent = commands.send(command).await;
    match (sent, answered.await) {
        (Ok(()), Ok(replies)) => replies,
        _ => vec![Reply::Refused { reason: "the scheduler is stopping".to_owned() }],
    }
}

/// The kernel's description of the process at the other end.
fn process(stream: &UnixStream, peer: &Peer) -> Option<Described> {
    let (pid, user) = (peer.identity.pid?, stream.peer_cred().ok()?.uid());
    peer.read(|| processes::describe(pid, user, &peer.groups))?
}

/// Serves the connection of a registered process.
async fn client(
    mut framed: Stream,
    peer: Peer,
    place: Option<Place>,
    mut register: Register,
    shared: &Shared,
) {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let commands = &shared.commands;
    // A user or container that registers too often waits, and no other does.
    while let Some(Err(wait)) = place.as_ref().map(|place| place.register(Instant::now())) {
        sleep(wait).await;
    }
    let client = LAST.fetch_add(1, Ordering::Relaxed) + 1;
    let user = framed.get_ref().peer_cred().ok().map(|cred| cred.uid());
    // A process that has ended needs nothing, and whoever has its socket now may be of another tenant.
    let Some(tenant) = peer.read(|| Tenant::of(&peer.groups, user, register.run)) else { return };
    let gang = register
        .asked
        .gang
        .take()
        .map(|gang| Gang { number: Tenant::gang(tenant.as_ref(), user, &gang.name), size: gang.size });
    // The runs of a gang are one job; a container is one job with all its processes.
    let own_tenant = tenant.clone();
    let own = tenant.as_ref().filter(|tenant| gang.is_none() || matches!(tenant, Tenant::Container(_)));
    let identity = Identity { tenant: own.map(Tenant::number), gang, ..peer.identity };
    let (frames, mut outgoing) = mpsc::channel(BACKLOG);
    register.name = shown(&register.name);
    if register.usage.len() > MOST_GPUS_EACH {
        let reason = format!("{} GPUs in one registration; at most {MOST_GPUS_EACH}", register.usage.len());
        return refuse(&mut framed, reason).await;
    }
    if place.as_ref().is_some_and(|place| !place.names(register.usage.iter().map(|usage| usage.gpu))) {
        return refuse(&mut framed, TOO_MANY_GPUS).await;
    }
    // Held for as long as the connection lives: dropping the seat frees the process's bytes in the quota.
    let seat = seat(&framed, tenant, &shared.tenants).await;
    let owner = match (&own_tenant, peer.identity.process) {
        (Some(tenant), _) => Owner::Tenant(tenant.number()),
        (None, Some(process)) => Owner::Process(process),
        (None, None) => Owner::Client(client),
    };
    let mut host = shared.host.as_ref().map(|host| host.open(client, owner));
    register.usage.iter().for_each(|usage| uses(&mut host, usage));
    let process = process(framed.get_ref(), &peer);
    let image = peer.identity.pid.and_then(|pid| peer.read(|| Image::of(pid))?);
    let was_here = register.returns;
    if commands
        .send(Command::Register { client, identity, process, register: Box::new(register), frames })
        .await
        .is_err()
    {
        return;
    }
    // A client that was here before may list memory of the host that it has.
    let mut lists = std::pin::pin!(sleep(if was_here { LISTS_FOR } else { Duration::ZERO }));
    let mut listed = false;
    let mut look = std::pin::pin!(shared.looks.clone().command(peer.identity.pid));
    let mut looked = false;
    let mut process_gone = false;
    let mut bucket = Bucket::new(FRAMES, Instant::now());
    let mut pause = None;
    loop {
        let refusal = tokio::select! {
            // Messages of the core go first.
            biased;
            reply = outgoing.recv() => match reply {
                Some(message) => {
                    let sent = timeout(WRITE_PATIENCE, framed.send(Reply::Client(message))).await;
                    if sent.is_err() {
                        warn!("client {client} does not read; it is cut off");
                    }
                    if !matches!(sent, Ok(Ok(()))) { break }
                    None
                }
                // The core cut the client off.
                None => break,
            },
            news = news_of(&mut host) => {
                let told = match news {
                    News::Lot(lot) => tell_of_host(&mut framed, true, lot).await,
                    News::Short(bytes) => {
                        let short = Reply::Client(SchedulerMessage::HostShort { bytes });
                        timeout(WRITE_PATIENCE, framed.send(short)).await.map_or(Err(()), |sent| sent.map_err(|_| ()))
                    }
                };
                if told.is_err() { break }
                None
            }
            () = &mut lists, if !listed => {
                listed = true;
                (!frames::shorten(&mut framed)).then(|| "a frame is longer than any that is due".to_owned())
            }
            command = &mut look, if !looked => {
                looked = true;
                // The number is the process's for as long as that lives.
                if let Some(command) = command.filter(|_| peer.lives())
                    && commands.send(Command::Described { client, command }).await.is_err() { break }
                None
            }
            () = peer.gone(), if !process_gone => {
                // A child may have inherited the socket; the process that registered is gone. Its last messages, if
                // any, are here already.
                process_gone = true;
                let [each, all] = LAST_WORDS;
                let _ = timeout(all, async {
                    while let Ok(Some(Ok(Request::Client(message)))) = timeout(each, framed.next()).await {
                        let _ = commands.send(Command::Message { client, message }).await;
                    }
                })
                .await;
                break;
            }
            // A client that sends too many frames is read at the allowed rate.
            () = sleep(pause.unwrap_or_default()), if pause.is_some() => {
                pause = bucket.take(Instant::now()).err();
                None
            }
            request = framed.next(), if pause.is_none() => match request {
                Some(Ok(Request::Client(ClientMessage::Usage(usage))))
                    if place.as_ref().is_some_and(|place| !place.names([usage.gpu].into_iter())) =>
                {
                    Some(TOO_MANY_GPUS.to_owned())
                }
                Some(Ok(Request::Client(message @ (ClientMessage::HostWanted { .. } | ClientMessage::HostHeld { .. } | ClientMessage::HostBack { .. })))) => {
                    pause = bucket.take(Instant::now()).err();
                    let is_asked = matches!(message, ClientMessage::HostWanted { .. });
                    let is_answered = hear_of_host(&mut host, message);
                    if is_asked && !is_answered && tell_of_host(&mut framed, false, Lot::new()).await.is_err() { break }
                    None
                }
                Some(Ok(Request::Client(message))) => {
                    if let ClientMessage::Usage(usage) = &message {
                        uses(&mut host, usage);
                    }
                    pause = bucket.take(Instant::now()).err();
                    if commands.send(Command::Message { client, message }).await.is_err() { break }
                    None
                }
                Some(Ok(Request::Register(_) | Request::Look { .. })) => Some("this connection is registered already".to_owned()),
                Some(Ok(Request::Admin(_))) => Some("an administrator's request on a client's connection".to_owned()),
                Some(Err(error)) => Some(error.to_string()),
                None => break,
            },
        };
        if let Some(reason) = refusal {
            warn!("client {client} is refused: {reason}");
            refuse(&mut framed, reason).await;
            break;
        }
    }
    drop(host);
    // The process may come back at once, on another connection, and is counted again then.
    drop(seat);
    let process_remains = !process_gone && peer.lives();
    let _ = commands.send(Command::Disconnected { client, process_remains }).await;
    if process_remains {
        shared.wait_for_end(client, peer, image, place);
    }
}

/// What a client is told next about memory of the host; nothing, if the scheduler has none.
async fn news_of(host: &mut Option<Account>) -> News {
    match host {
        Some(host) => host.next().await,
        None => std::future::pending().await,
    }
}

/// A client says what it has on a GPU: memory of the host for that is made near it.
fn uses(host: &mut Option<Account>, usage: &Usage) {
    if let Some(host) = host {
        host.uses(usage);
    }
}

/// A client says something about memory of the host. False: the scheduler has none.
fn hear_of_host(host: &mut Option<Account>, message: ClientMessage) -> bool {
    let Some(host) = host else { return false };
    match message {
        ClientMessage::HostWanted { bytes } => host.ask(bytes),
        ClientMessage::HostHeld { segments } => host.claim(segments),
        ClientMessage::HostBack { segment } => host.give_back(segment),
        _ => {}
    }
    true
}

/// Sends segments of the host's memory, with their descriptors.
async fn tell_of_host(framed: &mut Stream, offered: bool, lot: Lot) -> Result<(), ()> {
    let segments = lot.iter().map(|(segment, _)| *segment).collect();
    let reply = Reply::Client(SchedulerMessage::HostMemory { offered, segments });
    let descriptors: Vec<_> = lot.iter().map(|(_, descriptor)| descriptor.as_fd()).collect();
    let sent = async {
        // What waits before it goes first.
        SinkExt::<Reply>::flush(framed).await.map_err(|_| ())?;
        frames::tell_with(framed, &reply, &descriptors).await.map_err(|_| ())
    };
    timeout(WRITE_PATIENCE, sent).await.map_err(|_| ())?
}

/// A name that may be shown to people and sent in frames: without characters that control a terminal or the direction of text.
fn shown(name: &str) -> String {
    name.chars().filter(|&c| processes::is_harmless(c)).take(LONGEST_NAME).collect()
}

/// The process's place in its tenant, if it has one; the process is told of it. Without one, its limits are its own.
async fn seat(framed: &Stream, tenant: Option<Tenant>, tenants: &Tenants) -> Option<Seat> {
    let joined = match tenants.join(tenant?) {
        Ok(seat) => seat.tell(framed).await.map(|()| seat),
        Err(error) => Err(error),
    };
    joined
        .inspect_err(|error| {
            NO_SEAT.say(format_args!("a process cannot share its tenant's limits, and has its own: {error}"));
        })
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_shown_as_they_are_read() {
        for (name, expected) in [
            ("python3.12", "python3.12"),
            ("tr\u{e4}ner 2", "tr\u{e4}ner 2"),
            ("a\u{202e}exe.b\u{7}\u{200b}\n", "aexe.b"),
            (&"x".repeat(99), &"x".repeat(LONGEST_NAME)),
        ] {
            assert_eq!(shown(name), expected);
        }
    }
}
