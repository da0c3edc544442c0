//! A connection: frames become commands for the core's task, and its answers become frames.

mod bounds;
mod client;
mod returns;
mod watchers;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use nvshare_proto::{AdminRequest, NO_PLACE, Reply, Request, ThrottledLine};
use rustix::net::{RecvFlags, recv};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};
use tracing::debug;

pub(crate) use bounds::Bounds;

use crate::core_task::Command;
use crate::events::Journal;
use crate::host_memory::HostMemory;
use crate::identity::processes::{Image, Looks};
use crate::identity::{Caller, Peer, Tenants, Viewer, see_others};
use crate::log;
use crate::seats::Inside;
use crate::settings::limits;
use crate::sockets::frames::{self, Stream, refuse, tell_all};
use bounds::Place;
use returns::Returns;

/// A connection that says nothing for this long is closed, unless it is a registered client's.
const FIRST_FRAME_PATIENCE: Duration = Duration::from_secs(10);
/// How often a process that has left and lives on is looked at: whether it runs another program by now.
const LOOK_AT_IMAGES: Duration = Duration::from_secs(1);
/// One for each connection that is refused.
static TOO_MANY: ThrottledLine = ThrottledLine::new(log::warn);

/// State that all connections share.
#[derive(Debug, Clone)]
pub(crate) struct Shared {
    pub(crate) commands: mpsc::Sender<Command>,
    pub(crate) tenants: Arc<Tenants>,
    /// Places for clients; none: the administrators' socket, which always has a place.
    pub(crate) bounds: Option<Arc<Bounds>>,
    /// Processes that came, and tasks that wait for the end of those that went.
    pub(crate) returns: Arc<Returns>,
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
            returns: Arc::default(),
            looks: Looks::default(),
            journal,
            host,
        }
    }

    /// Tells the core when the process of a client that has disconnected is gone, or runs another program than `image`. The client's
    /// place stays taken until then, or until the process comes back on another connection.
    fn wait_for_end(&self, client: u64, caller: Caller, image: Option<Image>, place: Option<Place>) {
        let (commands, identity) = (self.commands.clone(), caller.peer.identity);
        let wait = move |client| {
            let wait = async move {
                tokio::select! {
                    () = caller.peer.gone() => {}
                    () = runs_another(&caller.peer, image) => {}
                }
                let _ = commands.send(Command::Exited { client, identity }).await;
                drop((place, caller));
            };
            tokio::spawn(wait).abort_handle()
        };
        match identity.process {
            Some(process) => self.returns.leave(process, client, image, wait),
            None => _ = wait(client),
        }
    }
}

/// Waits until a process runs another program than this; for ever where nobody can tell. The earlier program's memory on GPUs went with
/// it.
async fn runs_another(peer: &Peer, image: Option<Image>) {
    let Some((pid, before)) = peer.identity.pid.zip(image) else { return std::future::pending().await };
    let mut last = None;
    loop {
        sleep(LOOK_AT_IMAGES).await;
        // A program that cannot be seen now is no sign. At the look before, the driver may still have been freeing the memory.
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

/// Serves a connection from its first frame to its end. `seat` is the one whose listener accepted it, if that is a seat's.
pub(crate) async fn serve(stream: UnixStream, seat: Option<Inside>, shared: Shared) {
    let caller = Caller::at(&stream, seat);
    let mut framed = frames::on(stream);
    let place = match &shared.bounds {
        None => None,
        Some(bounds) => {
            let Some(place) = bounds.take(caller.whom()) else {
                TOO_MANY.say(format_args!("too many connections: one more of {} is refused", caller.whom()));
                return refuse(&mut framed, NO_PLACE).await;
            };
            // Half a frame takes memory for as long as its process is waited for, and thousands may send one.
            framed.codec_mut().accept_at_most(frames::MAX_FRAME_OF_CLIENT);
            Some(place)
        }
    };
    connection(framed, caller, place, &shared).await;
}

/// Serves a connection until its first request tells what it is for.
async fn connection(mut framed: Stream, caller: Caller, place: Option<Place>, shared: &Shared) {
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
            Request::Admin(mut request) => {
                // A list of seats is refused here in any case. In memory it has nine times the bytes of its frame.
                if place.is_some()
                    && let AdminRequest::OccupySeats(seats) = &mut request
                {
                    *seats = Vec::new();
                }
                // A user who asks too often waits, and delays nobody else.
                while let Some(Err(wait)) = place.as_ref().map(|place| place.ask(Instant::now())) {
                    frames::forget_read(&mut framed);
                    sleep(wait).await;
                }
                let viewer = shared.bounds.is_some().then(|| caller.viewer());
                let replies = administer(request, viewer, &shared.commands).await;
                if !tell_all(&mut framed, replies).await {
                    return;
                }
            }
            Request::Register(register) => {
                return client::serve(framed, caller, place, register, shared).await;
            }
            Request::Look { run } => {
                let shown = match caller.tenant(run) {
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
        None => {
            // Limits fail closed: a prolog has to hear that nobody would enforce them.
            if matches!(&request, AdminRequest::SetJobBounds { given, .. } if !limits::takes_back(given))
                && let Ok(Err(reason)) = spawn_blocking(see_others).await
            {
                return vec![Reply::Refused { reason }];
            }
            Command::Admin { request, answer }
        }
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

#[cfg(test)]
mod tests {
    use futures_util::SinkExt;
    use nvshare_proto::codec::Frames;
    use nvshare_proto::{ClientMessage, GpuUuid, Register, Seat, Slot, TenantSettings};
    use tokio_util::codec::Framed;

    use super::*;
    use crate::seats::Opened;

    /// Returns the next command of this kind.
    async fn hear(told: &mut mpsc::Receiver<Command>, is_it: impl Fn(&Command) -> bool) -> Option<Command> {
        loop {
            let command = told.recv().await?;
            if is_it(&command) {
                return Some(command);
            }
        }
    }

    /// It ends, and comes back before the end of its process is known, or is away for a while.
    #[tokio::test]
    async fn a_process_that_came_back_has_one_place() {
        for is_away in [false, true] {
            let (commands, mut told) = mpsc::channel(16);
            let bounds = Bounds::new(4, std::path::PathBuf::new());
            let shared = Shared::new(commands, Some(Arc::clone(&bounds)), Journal::new(0), None);
            let come = async || {
                let (client, stream) = UnixStream::pair().unwrap();
                tokio::spawn(serve(stream, None, shared.clone()));
                let mut client = Framed::new(client, Frames::<Reply, Request>::default());
                client.send(Request::Register(Register::newcomer(1, "x"))).await.unwrap();
                client
            };
            // A newcomer has the other end of what is told to it.
            let mut newcomers = Vec::new();
            let first = come().await;
            newcomers.extend(hear(&mut told, |command| matches!(command, Command::Register(_))).await);
            drop(first);
            if is_away {
                let is_gone = |command: &Command| matches!(command, Command::Disconnected { .. });
                hear(&mut told, is_gone).await;
                // It is waited for.
                tokio::task::yield_now().await;
            }
            let _second = come().await;
            newcomers.extend(hear(&mut told, |command| matches!(command, Command::Register(_))).await);
            let (stream, _other) = UnixStream::pair().unwrap();
            let whom = Caller::at(&stream, None).whom();
            // Two of four are for one user.
            let mut third = bounds.take(whom.clone());
            for _ in 0..500 {
                if third.is_some() {
                    break;
                }
                sleep(Duration::from_millis(10)).await;
                third = bounds.take(whom.clone());
            }
            assert!(third.is_some() && bounds.take(whom).is_none(), "away: {is_away}");
        }
    }

    /// NVML is asked about each of them.
    #[tokio::test]
    async fn a_process_names_no_more_gpus_than_the_machine_can_have_in_any_message() {
        let (commands, _told) = mpsc::channel(16);
        let bounds = Bounds::new(4, std::path::PathBuf::new());
        let shared = Shared::new(commands, Some(bounds), Journal::new(0), None);
        let (client, stream) = UnixStream::pair().unwrap();
        tokio::spawn(serve(stream, None, shared));
        let mut client = Framed::new(client, Frames::<Reply, Request>::default());
        client.send(Request::Register(Register::newcomer(1, "x"))).await.unwrap();
        for gpus in [0..64, 64..65] {
            let gpus = gpus.map(|n| GpuUuid([n; 16])).collect();
            client.send(Request::Client(ClientMessage::Elsewhere { gpus })).await.unwrap();
        }
        let reply = timeout(FIRST_FRAME_PATIENCE, client.next()).await.expect("an answer");
        let Some(Ok(Reply::Refused { reason })) = reply else { panic!("{reply:?}") };
        assert!(reason.contains("more GPUs"), "{reason}");
    }

    #[tokio::test]
    async fn a_process_of_a_seat_comes_back_to_gpus_of_its_seat_alone() {
        let folder = std::env::temp_dir().join(format!("nvshare-elsewhere-{}", std::process::id()));
        let (Opened { seats, mut arrivals }, _) =
            Opened::open(folder.join("seats"), Some(&folder.join("state.toml")));
        let [own, other] = [1, 2].map(|n| GpuUuid([n; 16]));
        let slots = vec![Slot { gpu: own, number: 0 }];
        let seat = Seat { slots, given: TenantSettings::default() };
        let socket = folder.join("seats").join(seat.name().to_string()).join("scheduler.sock");
        seats.make(seat).unwrap();
        let client = UnixStream::connect(socket).await.unwrap();
        let (stream, inside) = arrivals.recv().await.unwrap();
        let (commands, mut told) = mpsc::channel(16);
        let shared = Shared::new(commands, Some(Bounds::new(4, folder.clone())), Journal::new(0), None);
        tokio::spawn(serve(stream, Some(inside), shared));
        let mut client = Framed::new(client, Frames::<Reply, Request>::default());
        client.send(Request::Register(Register::newcomer(1, "x"))).await.unwrap();
        let newcomer = hear(&mut told, |command| matches!(command, Command::Register(_))).await;
        let said = ClientMessage::Elsewhere { gpus: vec![other, own] };
        client.send(Request::Client(said)).await.unwrap();
        let is_answer =
            |command: &Command| matches!(command, Command::Message { .. } | Command::Disconnected { .. });
        let heard = hear(&mut told, is_answer).await;
        let Some(Command::Message { message, .. }) = heard else { panic!("the connection ended") };
        assert_eq!(message, ClientMessage::Elsewhere { gpus: vec![own] });
        drop(newcomer);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
