//! The thread that makes segments, hands them out, and takes them back.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nvshare_proto::units::{Bytes, MIB};
use nvshare_proto::{HostSegment, MAX_SEGMENTS, MAX_SEGMENTS_HELD, SEGMENT, ThrottledLine};
use tokio::sync::mpsc as channel;
use tracing::{debug, info, warn};

use super::ledger::Ledger;
use super::movable::MovableBytes;
use super::segment;
use super::{Budget, Lot, MAX_NEWS, News, Owner, Request, Shown};
use crate::lock::lock;
use crate::log;

/// How often the kernel is asked whether a returned segment is still used.
const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// Longest time for such questions at a time, but for the last one of them.
const MAX_LOOK: Duration = Duration::from_millis(50);
/// The time after its start in which a scheduler hears what clients have from an earlier one: each looks for a scheduler once a second.
const HEARS_CLAIMS: Duration = Duration::from_secs(10);
/// Segments are whole numbers of these.
pub(super) const GRANULE: u64 = 2 * MIB;
/// Bytes of the machine's memory that segments leave free.
const LEFT_FREE: u64 = 1 << 30;
/// A small budget is handed out in small segments: a segment of which a part is used is kept from others as a whole.
const SEGMENTS_PER_BUDGET: u64 = 16;
const SMALL: u64 = 32 * MIB;
/// A client is told once in this time that others lack memory.
const TELL_AGAIN: Duration = Duration::from_millis(20);
/// Claims of clients that are not believed.
static NOT_BELIEVED: ThrottledLine = ThrottledLine::new(log::warn);
/// Segments that one owner may have.
pub(super) const MAX_EACH: usize = MAX_SEGMENTS_HELD;

/// A segment that is out.
#[derive(Debug)]
struct Out {
    segment: HostSegment,
    descriptor: Arc<OwnedFd>,
    owner: Owner,
    /// The client that has it; none: it was given back, or the client has gone, and somebody may use it still.
    client: Option<u64>,
}

#[derive(Debug)]
struct Client {
    owner: Owner,
    /// The most that it may have.
    most: MovableBytes,
    /// Bytes that it has from earlier schedulers, as far as they count.
    claims: BTreeMap<u64, u64>,
    news: channel::Sender<News>,
    /// When it was last told that others lack memory.
    told: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Worker {
    ledger: Ledger,
    out: Vec<Out>,
    /// The largest number of segments: each takes a descriptor.
    most: usize,
    /// The largest size of a segment, in bytes.
    largest: u64,
    clients: BTreeMap<u64, Client>,
    /// Bytes that the machine can still give, if it says so.
    available: fn() -> Option<u64>,
    /// Empties a segment if nobody uses it, and says whether that is so.
    empty_if_unused: fn(&OwnedFd) -> bool,
    /// Nothing is handed out before: clients of an earlier scheduler say first what they have.
    opens: Instant,
    /// Until then, claims of clients about segments of an earlier scheduler count.
    hears_claims_until: Instant,
    /// The next segment's number. Those of different schedulers are different.
    next: u64,
    shown: Arc<Mutex<Shown>>,
}

impl Worker {
    /// A worker that has handed out nothing; the arguments are those of [`super::HostMemory::start`].
    pub(super) fn new(
        budget: Budget,
        most: usize,
        boot: u64,
        settle: Duration,
        shown: Arc<Mutex<Shown>>,
    ) -> Self {
        Self {
            ledger: Ledger::new(budget.all, budget.each),
            out: Vec::new(),
            most,
            largest: (budget.all / SEGMENTS_PER_BUDGET).clamp(SMALL, SEGMENT).next_multiple_of(GRANULE),
            clients: BTreeMap::new(),
            available,
            empty_if_unused: segment::empty_if_unused,
            opens: Instant::now() + settle,
            hears_claims_until: Instant::now() + HEARS_CLAIMS.max(settle),
            next: boot,
            shown,
        }
    }

    /// Works until nobody can ask any more.
    pub(super) fn run(mut self, requests: &mpsc::Receiver<Request>) {
        let (mut early, mut next_look) = (Vec::new(), Instant::now());
        loop {
            self.show();
            let now = Instant::now();
            let opens = (!early.is_empty()).then_some(self.opens);
            let looks = self.has_any_back().then_some(next_look);
            let until = opens.into_iter().chain(looks).min();
            let patience =
                until.map_or(Duration::from_secs(3600), |until| until.saturating_duration_since(now));
            match requests.recv_timeout(patience) {
                // The client that asks first must not get what others have already.
                Ok(request @ Request::Make { .. }) if Instant::now() < self.opens => early.push(request),
                Ok(request) => self.serve(request),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if Instant::now() >= self.opens {
                for request in early.drain(..) {
                    self.serve(request);
                }
            }
            if self.has_any_back() && Instant::now() >= next_look {
                // The memory of a large program comes back without a pause, between two requests at most. After a look that was in vain
                // comes a pause, whoever gives back more: pages that a program has locked may make each look long.
                let pause = if self.sweep(MAX_LOOK) { Duration::ZERO } else { LOOK_AGAIN };
                next_look = Instant::now() + pause;
            }
        }
    }

    /// Writes down the figures for administrators.
    fn show(&self) {
        let mut clients: BTreeMap<u64, u64> = BTreeMap::new();
        let out = self.out.iter().filter_map(|out| Some((out.client?, out.segment.bytes)));
        let claims = self.clients.iter().map(|(&id, client)| (id, client.claims.values().sum()));
        for (client, bytes) in out.chain(claims).filter(|(_, bytes)| *bytes > 0) {
            *clients.entry(client).or_default() += bytes;
        }
        *lock(&self.shown) = Shown { used: self.ledger.sum(), clients };
    }

    /// Whether segments were given back that may be used still.
    fn has_any_back(&self) -> bool {
        self.out.iter().any(|out| out.client.is_none())
    }

    fn serve(&mut self, request: Request) {
        match request {
            Request::Open { client, owner, most, news } => {
                let claims = BTreeMap::new();
                let client_of = Client { owner, most, claims, news, told: None };
                self.clients.insert(client, client_of);
            }
            Request::Make { client, bytes, answer } => {
                let (lot, lacking) = self.make(client, bytes);
                let _ = answer.blocking_send(News::Lot(lot));
                self.tell_others(client, lacking);
            }
            Request::Claim { client, segments } => self.claim(client, segments),
            Request::Back { client, number } => {
                let is_it = |out: &&mut Out| out.client == Some(client) && out.segment.number == number;
                if let Some(out) = self.out.iter_mut().find(is_it) {
                    out.client = None;
                } else if let Some(Client { owner, claims, .. }) = self.clients.get_mut(&client)
                    && let Some(bytes) = claims.remove(&number)
                {
                    self.ledger.give_back(*owner, bytes);
                }
            }
            Request::Gone { client } => {
                self.out
                    .iter_mut()
                    .filter(|out| out.client == Some(client))
                    .for_each(|out| out.client = None);
                if let Some(Client { owner, claims, .. }) = self.clients.remove(&client) {
                    claims.values().for_each(|&bytes| self.ledger.give_back(owner, bytes));
                }
            }
        }
    }

    /// A client says what it has from an earlier scheduler; no descriptor comes with that. So no more counts than it could ask for:
    /// segments of lengths that there are, up to what may leave its GPUs, and while such clients come back.
    fn claim(&mut self, client: u64, segments: Vec<HostSegment>) {
        let mut not_believed = 0u64;
        for segment in segments {
            if !self.takes_over(client, segment) {
                not_believed = not_believed.saturating_add(segment.bytes);
            }
        }
        if not_believed > 0 {
            NOT_BELIEVED.say(format_args!(
                "client {client} says that it has {} of the host's memory from an earlier scheduler; this does not count",
                Bytes(not_believed)
            ));
        }
        info!(
            "clients have {} of the host's memory, in part from an earlier scheduler",
            Bytes(self.ledger.sum())
        );
    }

    /// Counts a segment that a client says that it has; false: it does not count.
    fn takes_over(&mut self, client: u64, HostSegment { number, bytes }: HostSegment) -> bool {
        let may_have = self.left_of_memory(client);
        let Some(Client { owner, claims, .. }) = self.clients.get_mut(&client) else { return false };
        // A segment that this scheduler has handed out is in the books.
        let known = self.out.iter_mut().find(|out| out.segment.number == number && out.owner == *owner);
        if let Some(out) = known {
            out.client = out.client.or(Some(client));
            return true;
        }
        let is_segment = (GRANULE..=SEGMENT).contains(&bytes) && bytes.is_multiple_of(GRANULE);
        let is_heard = Instant::now() < self.hears_claims_until && claims.len() < MAX_EACH;
        match claims.entry(number) {
            Entry::Occupied(_) => true,
            Entry::Vacant(claim) if is_segment && is_heard && bytes <= may_have => {
                claim.insert(self.ledger.claim(*owner, bytes));
                true
            }
            Entry::Vacant(_) => false,
        }
    }

    /// Makes segments for a client, up to what may leave its GPUs. Returns them, and the bytes for which there is no room.
    fn make(&mut self, client: u64, bytes: u64) -> (Lot, u64) {
        let bytes = bytes.min(self.left_of_memory(client));
        let Some(&Client { owner, .. }) = self.clients.get(&client) else { return (Lot::new(), 0) };
        let mut lot = Lot::new();
        let mut lacking = bytes.min(MAX_SEGMENTS as u64 * self.largest);
        while lacking > 0 && lot.len() < MAX_SEGMENTS {
            let bytes = lacking.next_multiple_of(GRANULE).min(self.largest).min(self.ledger.left(owner));
            let bytes = bytes - bytes % GRANULE;
            let has = self.out.iter().filter(|out| out.owner == owner).count();
            // One owner leaves others some.
            let is_full = has >= MAX_EACH.min(self.most.div_ceil(2)) || self.out.len() >= self.most;
            if bytes == 0 || is_full {
                break;
            }
            let Some(file) = self.piece(bytes) else { break };
            let descriptor = Arc::new(file);
            if !self.ledger.take(owner, bytes) {
                break;
            }
            let segment = HostSegment { number: self.next, bytes };
            self.next += 1;
            lot.push((segment, Arc::clone(&descriptor)));
            self.out.push(Out { segment, descriptor, owner, client: Some(client) });
            lacking = lacking.saturating_sub(bytes);
        }
        let got: u64 = lot.iter().map(|(segment, _)| segment.bytes).sum();
        debug!("client {client} asks for {} of the host's memory and gets {}", Bytes(bytes), Bytes(got));
        (lot, lacking)
    }

    /// A client lacks `bytes`: clients that have some are told, as far as it could get what they give back.
    fn tell_others(&mut self, asker: u64, lacking: u64) {
        let Some(&Client { owner, .. }) = self.clients.get(&asker) else { return };
        let part = self.ledger.left_of_part(owner);
        for (&id, client) in &mut self.clients {
            let bytes = if client.owner == owner { lacking } else { lacking.min(part) };
            let has_some = !client.claims.is_empty() || self.out.iter().any(|out| out.client == Some(id));
            let knows = client.told.is_some_and(|told| told.elapsed() < TELL_AGAIN);
            // A client that has not read the last news yet is not told; so there is a place for an answer.
            let is_idle = client.news.capacity() == MAX_NEWS;
            if id != asker && bytes > 0 && has_some && !knows && is_idle {
                client.told = Some(Instant::now());
                let _ = client.news.try_send(News::Short(bytes));
                debug!("client {id} is told that client {asker} lacks {} of the host's memory", Bytes(bytes));
            }
        }
    }

    /// A segment of this many bytes; none: the machine has no room for it.
    fn piece(&self, bytes: u64) -> Option<OwnedFd> {
        if (self.available)().is_some_and(|room| room < bytes + LEFT_FREE) {
            return None;
        }
        let failed =
            |error: &io::Error| warn!("no segment of {} of the host's memory: {error}", Bytes(bytes));
        segment::make(bytes).inspect_err(failed).ok()
    }

    /// Bytes that a client has.
    fn has(&self, client: u64) -> u64 {
        let out = self.out.iter().filter(|out| out.client == Some(client)).map(|out| out.segment.bytes);
        let claims = self.clients.get(&client).into_iter().flat_map(|client| client.claims.values().copied());
        out.chain(claims).sum()
    }

    /// Bytes that a client may still get for memory that may leave its GPUs.
    fn left_of_memory(&self, client: u64) -> u64 {
        let most = self.clients.get(&client).map_or(0, |client| client.most.get());
        most.saturating_sub(self.has(client))
    }

    /// Frees segments that were given back and are not used. Looks at one, and at more until this time has passed. Returns whether any
    /// was free.
    fn sweep(&mut self, longest: Duration) -> bool {
        let (begin, before) = (Instant::now(), self.out.len());
        let (mut is_over, mut stay, mut next) = (false, 0, 0);
        let ledger = &mut self.ledger;
        self.out.retain(|out| {
            // Where pages are locked, the kernel waits a moment for them: others wait no longer for that than this.
            let is_looked_at = out.client.is_none() && !is_over;
            let is_free = is_looked_at && (self.empty_if_unused)(&out.descriptor);
            if is_free {
                ledger.give_back(out.owner, out.segment.bytes);
                debug!("{} of the host's memory are free again", Bytes(out.segment.bytes));
            }
            stay += usize::from(!is_free);
            if is_looked_at {
                (is_over, next) = (begin.elapsed() >= longest, stay);
            }
            !is_free
        });
        // The next look begins behind the last one.
        let most = self.out.len().max(1);
        self.out.rotate_left(next % most);
        self.out.len() < before
    }
}

/// Bytes that the machine can still give.
fn available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;
