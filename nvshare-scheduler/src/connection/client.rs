//! The connection of a registered process.

use std::ops::ControlFlow::{self, Break, Continue};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::{SinkExt, StreamExt};
use nvshare_core::{Gang, Identity, MAX_GPUS_PER_CLIENT};
use nvshare_proto::codec::Error;
use nvshare_proto::{
    ClientMessage, GpuUuid, MAX_GANG_MEMBERS, Register, Reply, Request, SchedulerMessage, ThrottledLine,
    Usage,
};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tracing::warn;

use super::Shared;
use super::bounds::Place;
use crate::bucket::{Bucket, Rate};
use crate::core_task::{Command, Newcomer};
use crate::host_memory::{Account, Lot, News, Owner};
use crate::identity::processes::{self, Image};
use crate::identity::{Caller, Row, Tenant, Tenants};
use crate::log;
use crate::sockets::frames::{self, Stream, WRITE_PATIENCE, refuse};

/// Frames that wait for a client that does not read, before it is cut off.
const BACKLOG: usize = 256;
/// The time in which a client that comes back may send long frames.
const LISTS_FOR: Duration = Duration::from_secs(10);
/// Longest time, for each frame and altogether, for which the socket of a process that is gone is read.
const LAST_WORDS: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(50)];
/// Longest name of a program that is shown.
const MAX_NAME: usize = 64;
/// Longest reason of a client that does not sleep, in letters.
const MAX_REASON: usize = 200;
/// The reason for refusing a process that names more GPUs than the machine can have.
const TOO_MANY_GPUS: &str = "more GPUs are named than the machine can have";
/// Frames that one connection may send.
const FRAMES: Rate = Rate { burst: 8000, each_second: 4000 };
/// As many count one that says what memory is shared: it may have a gang of 64 made anew.
const FRAMES_OF_SHARES: u32 = 250;
/// One for each process.
static NO_ROW: ThrottledLine = ThrottledLine::new(log::warn);

/// Why a connection ends.
enum End {
    /// The other end, or the core, has ended it.
    Over,
    /// The process that registered has ended.
    ProcessGone,
    /// The client did what it may not do.
    Refused(String),
}

/// Whether the connection goes on.
type Step = ControlFlow<End>;

fn refused(reason: impl Into<String>) -> Step {
    Break(End::Refused(reason.into()))
}

/// A registered process, as its connection's task sees it.
struct Client<'a> {
    /// The client's number.
    id: u64,
    framed: Stream,
    caller: Caller,
    tenant: Option<Tenant>,
    place: Option<Place>,
    shared: &'a Shared,
    /// Messages of the core.
    outgoing: mpsc::Receiver<SchedulerMessage>,
    /// Its memory of the host, if the scheduler hands out any.
    host: Option<Account>,
    bucket: Bucket,
    /// When the client is read again, because it has sent too many frames.
    read_again_at: Option<Instant>,
}

/// Registers a process, and serves its connection.
pub(super) async fn serve(
    mut framed: Stream,
    caller: Caller,
    place: Option<Place>,
    mut register: Register,
    shared: &Shared,
) {
    static LAST: AtomicU64 = AtomicU64::new(0);
    // A user or container that registers too often waits, and no other does.
    while let Some(Err(wait)) = place.as_ref().map(|place| place.register(Instant::now())) {
        frames::forget_read(&mut framed);
        sleep(wait).await;
    }
    let id = LAST.fetch_add(1, Ordering::Relaxed) + 1;
    // A process that has ended needs nothing.
    let Some(tenant) = caller.tenant(register.run) else { return };
    let gang = register
        .asked
        .gang
        .take()
        .map(|gang| Gang { number: Tenant::gang(tenant.as_ref(), caller.user, &gang.name), size: gang.size });
    // The runs of a gang share the time as one; so do all processes of a container, a seat, or one of Slurm's jobs.
    let own = tenant.as_ref().filter(|tenant| gang.is_none() || tenant.is_given());
    let identity = Identity { tenant: own.map(Tenant::number), gang, ..caller.peer.identity };
    let (to_client, outgoing) = mpsc::channel(BACKLOG);
    register.name = shown(&register.name);
    if register.usage.len() > MAX_GPUS_PER_CLIENT {
        let reason =
            format!("{} GPUs in one registration; at most {MAX_GPUS_PER_CLIENT}", register.usage.len());
        return refuse(&mut framed, reason).await;
    }
    if let Some(reason) = refusal(&caller, place.as_ref(), register.usage.iter().map(|usage| usage.gpu)) {
        warn!("client {id} is refused: {reason}");
        return refuse(&mut framed, reason).await;
    }
    let owner = match (&tenant, caller.peer.identity.process) {
        (Some(tenant), _) => Owner::Tenant(tenant.number()),
        (None, Some(process)) => Owner::Process(process),
        (None, None) => Owner::Client(id),
    };
    let job = tenant.as_ref().and_then(Tenant::job);
    // Held for as long as the connection lives: dropping the row frees the process's bytes in the quota.
    let row = row(&framed, tenant.clone(), &shared.tenants).await;
    let host = shared.host.as_ref().map(|host| host.open(id, owner));
    let process = caller.described();
    let image = caller.peer.identity.pid.and_then(|pid| caller.peer.read(|| Image::of(pid))?);
    let seat = caller.seat.as_ref().map(|seat| seat.name);
    let lists_for = if register.returns { LISTS_FOR } else { Duration::ZERO };
    let bucket = Bucket::new(FRAMES, Instant::now());
    let mut client =
        Client { id, framed, caller, tenant, place, shared, outgoing, host, bucket, read_again_at: None };
    register.usage.iter().for_each(|usage| client.uses(usage));
    let number = client.caller.peer.identity.process;
    number.into_iter().for_each(|number| shared.returns.come(number, image));
    let newcomer = Newcomer { client: id, identity, process, seat, job, register, outgoing: to_client };
    if shared.commands.send(Command::Register(Box::new(newcomer))).await.is_err() {
        return;
    }
    let end = client.run(lists_for).await;
    if let End::Refused(reason) = &end {
        warn!("client {id} is refused: {reason}");
        refuse(&mut client.framed, reason).await;
    }
    let Client { caller, place, host, .. } = client;
    drop(host);
    // The process may come back at once, on another connection, and is counted again then.
    drop(row);
    let process_remains = !matches!(end, End::ProcessGone) && caller.peer.lives();
    let _ = shared.commands.send(Command::Disconnected { client: id, process_remains }).await;
    if process_remains {
        shared.wait_for_end(id, caller, image, place);
    } else if let Some(last) = number.and_then(|number| shared.returns.end(number, id)) {
        let identity = caller.peer.identity;
        let _ = shared.commands.send(Command::Exited { client: last, identity }).await;
    }
}

impl Client<'_> {
    /// Serves the connection to its end. A client that was here before may list its memory of the host for `lists_for`.
    async fn run(&mut self, lists_for: Duration) -> End {
        let mut lists = std::pin::pin!(sleep(lists_for));
        let mut listed = false;
        let mut look = std::pin::pin!(self.shared.looks.clone().command(self.caller.peer.identity.pid));
        let mut looked = false;
        loop {
            let step = tokio::select! {
                // Messages of the core go first.
                biased;
                reply = self.outgoing.recv() => self.tell(reply).await,
                news = news_of(&mut self.host) => self.tell_news(news).await,
                () = &mut lists, if !listed => {
                    listed = true;
                    self.shorten()
                }
                command = &mut look, if !looked => {
                    looked = true;
                    self.describe(command).await
                }
                () = self.caller.peer.gone() => self.hear_last_words().await,
                // A client that sends too many frames is read at the allowed rate.
                () = sleep_until(self.read_again_at), if self.read_again_at.is_some() => {
                    self.read_again_at = None;
                    Continue(())
                }
                request = self.framed.next(), if self.read_again_at.is_none() => match request {
                    Some(Ok(Request::Client(message))) => self.hear(message).await,
                    Some(Ok(Request::Register(_) | Request::Look { .. })) => {
                        refused("this connection is registered already")
                    }
                    Some(Ok(Request::Admin(_))) => refused("an administrator's request on a client's connection"),
                    // It has closed the connection before it had read all.
                    Some(Err(Error::Io(_))) => Break(End::Over),
                    Some(Err(error)) => refused(error.to_string()),
                    None => Break(End::Over),
                },
            };
            if let Break(end) = step {
                return end;
            }
        }
    }

    /// Sends a message of the core, and those behind it, in one go: they wake the client once. None: the core cut the client off.
    async fn tell(&mut self, message: Option<SchedulerMessage>) -> Step {
        let Some(first) = message else { return Break(End::Over) };
        let Self { framed, outgoing, .. } = self;
        let all = async {
            framed.feed(Reply::Client(first)).await?;
            while let Ok(next) = outgoing.try_recv() {
                framed.feed(Reply::Client(next)).await?;
            }
            SinkExt::<Reply>::flush(framed).await
        };
        let sent = timeout(WRITE_PATIENCE, all).await;
        if sent.is_err() {
            warn!("client {} does not read; it is cut off", self.id);
        }
        if matches!(sent, Ok(Ok(()))) { Continue(()) } else { Break(End::Over) }
    }

    async fn tell_news(&mut self, news: News) -> Step {
        match news {
            News::Lot(lot) => self.tell_of_host(true, lot).await,
            News::Short(bytes) => {
                let short = Reply::Client(SchedulerMessage::HostShort { bytes });
                let sent = timeout(WRITE_PATIENCE, self.framed.send(short)).await;
                if matches!(sent, Ok(Ok(()))) { Continue(()) } else { Break(End::Over) }
            }
        }
    }

    /// Sends segments of the host's memory, with their descriptors.
    async fn tell_of_host(&mut self, offered: bool, lot: Lot) -> Step {
        let segments = lot.iter().map(|(segment, _)| *segment).collect();
        let reply = Reply::Client(SchedulerMessage::HostMemory { offered, segments });
        let descriptors: Vec<_> = lot.iter().map(|(_, descriptor)| descriptor.as_fd()).collect();
        let sent = async {
            // Frames that wait go first.
            SinkExt::<Reply>::flush(&mut self.framed).await.map_err(|_| ())?;
            frames::tell_with(&self.framed, &reply, &descriptors).await.map_err(|_| ())
        };
        match timeout(WRITE_PATIENCE, sent).await {
            Ok(Ok(())) => Continue(()),
            _ => Break(End::Over),
        }
    }

    /// The client has listed what it had.
    fn shorten(&mut self) -> Step {
        if frames::shorten(&mut self.framed) {
            Continue(())
        } else {
            refused("a frame is longer than any that is due")
        }
    }

    /// A look at the process has found its command. The number is the process's for as long as that lives.
    async fn describe(&mut self, command: Option<String>) -> Step {
        let Some(command) = command.filter(|_| self.caller.peer.lives()) else { return Continue(()) };
        self.command(Command::Described { client: self.id, command }).await
    }

    /// The process that registered is gone; a child may have inherited the socket. Its last messages, if any, are here already.
    async fn hear_last_words(&mut self) -> Step {
        let [each, all] = LAST_WORDS;
        let client = self.id;
        let _ = timeout(all, async {
            while let Ok(Some(Ok(Request::Client(message)))) = timeout(each, self.framed.next()).await {
                let message = self.for_core(message);
                if self.refusal(&message).is_some() {
                    break;
                }
                let _ = self.shared.commands.send(Command::Message { client, message }).await;
            }
        })
        .await;
        Break(End::ProcessGone)
    }

    /// A message as the core may take it.
    fn for_core(&self, message: ClientMessage) -> ClientMessage {
        match message {
            // It is shown to people, as names are.
            ClientMessage::CannotSleep { reason, for_good } => {
                ClientMessage::CannotSleep { reason: harmless(&reason, MAX_REASON), for_good }
            }
            // Anybody can learn a number: it counts among the processes of one owner, as a gang's name does.
            ClientMessage::Shares { with } => {
                let of_owner = |number: &u64| {
                    Tenant::gang(self.tenant.as_ref(), self.caller.user, &format!("memory {number}"))
                };
                ClientMessage::Shares {
                    with: with.iter().take(MAX_GANG_MEMBERS as usize).map(of_owner).collect(),
                }
            }
            // A process may see GPUs that are not its seat's, and does not come back to these.
            ClientMessage::Elsewhere { mut gpus } => {
                gpus.retain(|&gpu| self.caller.refusal([gpu]).is_none());
                ClientMessage::Elsewhere { gpus }
            }
            message => message,
        }
    }

    /// Why the client may not name the GPUs of a message, if it may not.
    fn refusal(&self, message: &ClientMessage) -> Option<String> {
        let gpus = match message {
            ClientMessage::Usage(usage) => std::slice::from_ref(&usage.gpu),
            ClientMessage::Elsewhere { gpus } => gpus,
            _ => return None,
        };
        refusal(&self.caller, self.place.as_ref(), gpus.iter().copied())
    }

    /// Obeys a message of the client.
    async fn hear(&mut self, message: ClientMessage) -> Step {
        let message = self.for_core(message);
        if let Some(reason) = self.refusal(&message) {
            return refused(reason);
        }
        if let ClientMessage::Usage(usage) = &message {
            self.uses(usage);
        }
        self.count_frame(&message);
        match message {
            ClientMessage::HostWanted { bytes } => match &mut self.host {
                Some(host) => host.ask(bytes),
                None => return self.tell_of_host(false, Lot::new()).await,
            },
            ClientMessage::HostHeld { segments } => {
                if let Some(host) = &mut self.host {
                    host.claim(segments);
                }
            }
            ClientMessage::HostBack { segment } => {
                if let Some(host) = &mut self.host {
                    host.give_back(segment);
                }
            }
            message => return self.command(Command::Message { client: self.id, message }).await,
        }
        Continue(())
    }

    /// The client says what it has on a GPU: as much of the host's memory may be its own.
    fn uses(&mut self, usage: &Usage) {
        if let Some(host) = &mut self.host {
            host.uses(usage);
        }
    }

    fn count_frame(&mut self, message: &ClientMessage) {
        let now = Instant::now();
        let frames = if matches!(message, ClientMessage::Shares { .. }) { FRAMES_OF_SHARES } else { 1 };
        let wait = self.bucket.charge(frames, now);
        self.read_again_at = (!wait.is_zero()).then(|| now + wait);
    }

    /// Tells the core; the connection ends with it.
    async fn command(&self, command: Command) -> Step {
        match self.shared.commands.send(command).await {
            Ok(()) => Continue(()),
            Err(_) => Break(End::Over),
        }
    }
}

async fn sleep_until(time: Option<Instant>) {
    sleep(time.map_or(Duration::ZERO, |time| time.saturating_duration_since(Instant::now()))).await;
}

/// Why a process may not name these GPUs, if it may not.
fn refusal(
    caller: &Caller,
    place: Option<&Place>,
    gpus: impl Iterator<Item = GpuUuid> + Clone,
) -> Option<String> {
    caller
        .refusal(gpus.clone())
        .or_else(|| place.is_some_and(|place| !place.names(gpus)).then(|| TOO_MANY_GPUS.to_owned()))
}

/// The next news for a client about memory of the host; there is none, ever, if the scheduler hands out none.
async fn news_of(host: &mut Option<Account>) -> News {
    match host {
        Some(host) => host.next().await,
        None => std::future::pending().await,
    }
}

/// A name that may be shown to people and sent in frames: without characters that control a terminal or the direction of text.
fn shown(name: &str) -> String {
    harmless(name, MAX_NAME)
}

/// As much of a text as may be shown, and as this many letters have.
fn harmless(text: &str, longest: usize) -> String {
    text.chars().filter(|&c| processes::is_harmless(c)).take(longest).collect()
}

/// The process's place in its tenant, if it has one; the process is told of it. Without one, its limits are its own.
async fn row(framed: &Stream, tenant: Option<Tenant>, tenants: &Tenants) -> Option<Row> {
    let joined = match tenants.join(tenant?) {
        Ok(row) => row.tell(framed).await.map(|()| row),
        Err(error) => Err(error),
    };
    joined
        .inspect_err(|error| {
            NO_ROW.say(format_args!("a process cannot share its tenant's limits, and has its own: {error}"));
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
            (&"x".repeat(99), &"x".repeat(MAX_NAME)),
        ] {
            assert_eq!(shown(name), expected);
        }
    }
}
