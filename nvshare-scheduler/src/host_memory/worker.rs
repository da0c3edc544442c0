//! The thread that makes segments, hands them out, and takes them back.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nvshare_proto::units::{Bytes, MIB};
use nvshare_proto::{GpuUuid, HostSegment, MOST_SEGMENTS, SEGMENT};
use tracing::{debug, info, warn};

use super::ledger::Ledger;
use super::processors::Processors;
use super::segment::{self, Made};
use super::{Budget, Job, Lot, Owner, Shown};

/// How often the kernel is asked whether a segment is used that was given back.
const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// Longest time for such questions at a time, but for the last one of them.
const LONGEST_LOOK: Duration = Duration::from_millis(50);
/// Segments are whole numbers of these.
const GRANULE: u64 = 2 * MIB;
/// Bytes of the machine's memory that segments leave free.
const MARGIN: u64 = 1 << 30;
/// Segments that one owner may have.
const MOST_EACH: usize = 512;

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
    /// The GPU near which its segments are made.
    gpu: Option<GpuUuid>,
    /// What it has from earlier schedulers, as far as that counts.
    claims: BTreeMap<u64, u64>,
}

#[derive(Debug)]
pub(super) struct Worker {
    ledger: Ledger,
    out: Vec<Out>,
    /// Most segments: each takes a descriptor.
    most: usize,
    clients: BTreeMap<u64, Client>,
    /// The processors near GPUs, where they are known and can be used.
    near: BTreeMap<GpuUuid, Processors>,
    /// Nothing is handed out before: clients of an earlier scheduler say first what they have.
    opens: Instant,
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
            clients: BTreeMap::new(),
            near: BTreeMap::new(),
            opens: Instant::now() + settle,
            next: boot,
            shown,
        }
    }

    /// Works until nobody can ask any more.
    pub(super) fn run(mut self, jobs: &mpsc::Receiver<Job>) {
        let (mut early, mut next_look) = (Vec::new(), Instant::now());
        loop {
            self.show();
            let now = Instant::now();
            let opens = (!early.is_empty()).then_some(self.opens);
            let looks = self.out.iter().any(|out| out.client.is_none()).then_some(next_look);
            let until = opens.into_iter().chain(looks).min();
            let patience =
                until.map_or(Duration::from_secs(3600), |until| until.saturating_duration_since(now));
            match jobs.recv_timeout(patience) {
                // Who asks first must not get what others have already.
                Ok(job @ Job::Make { .. }) if Instant::now() < self.opens => early.push(job),
                Ok(job) => {
                    if self.work(job) {
                        next_look = Instant::now();
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if Instant::now() >= self.opens {
                for job in early.drain(..) {
                    self.work(job);
                }
            }
            if Instant::now() >= next_look {
                self.sweep();
                next_look = Instant::now() + LOOK_AGAIN;
            }
        }
    }

    /// Writes down what is told to administrators.
    fn show(&self) {
        let mut clients: BTreeMap<u64, u64> = BTreeMap::new();
        let out = self.out.iter().filter_map(|out| Some((out.client?, out.segment.bytes)));
        let claims = self.clients.iter().map(|(&id, client)| (id, client.claims.values().sum()));
        for (client, bytes) in out.chain(claims).filter(|(_, bytes)| *bytes > 0) {
            *clients.entry(client).or_default() += bytes;
        }
        *self.shown.lock().unwrap_or_else(PoisonError::into_inner) =
            Shown { used: self.ledger.sum(), clients };
    }

    /// Returns whether segments were given back.
    fn work(&mut self, job: Job) -> bool {
        match job {
            Job::Open { client, owner } => {
                self.clients.insert(client, Client { owner, gpu: None, claims: BTreeMap::new() });
            }
            Job::Uses { client, gpu } => {
                if let Some(client) = self.clients.get_mut(&client) {
                    client.gpu = Some(gpu);
                }
            }
            Job::Near { gpu, processors } => {
                self.near.insert(gpu, processors);
            }
            Job::Make { client, bytes, answer } => {
                let _ = answer.blocking_send(self.make(client, bytes));
            }
            Job::Claim { client, segments } => self.claim(client, segments),
            Job::Back { client, number } => {
                let is_it = |out: &&mut Out| out.client == Some(client) && out.segment.number == number;
                if let Some(out) = self.out.iter_mut().find(is_it) {
                    out.client = None;
                    return true;
                } else if let Some(client) = self.clients.get_mut(&client)
                    && let Some(bytes) = client.claims.remove(&number)
                {
                    self.ledger.give_back(client.owner, bytes);
                }
            }
            Job::Gone { client } => {
                self.out
                    .iter_mut()
                    .filter(|out| out.client == Some(client))
                    .for_each(|out| out.client = None);
                if let Some(Client { owner, claims, .. }) = self.clients.remove(&client) {
                    claims.values().for_each(|&bytes| self.ledger.give_back(owner, bytes));
                }
                return true;
            }
        }
        false
    }

    fn claim(&mut self, client: u64, segments: Vec<HostSegment>) {
        let Some(Client { owner, claims, .. }) = self.clients.get_mut(&client) else { return };
        for HostSegment { number, bytes } in segments {
            // What this scheduler has handed out is in the books.
            let known = self.out.iter_mut().find(|out| out.segment.number == number && out.owner == *owner);
            if let Some(out) = known {
                out.client = out.client.or(Some(client));
            } else if claims.len() < MOST_EACH
                && let Entry::Vacant(claim) = claims.entry(number)
            {
                claim.insert(self.ledger.claim(*owner, bytes));
            }
        }
        info!(
            "clients have {} of the host's memory, in part from an earlier scheduler",
            Bytes(self.ledger.sum())
        );
    }

    fn make(&mut self, client: u64, bytes: u64) -> Lot {
        let Some(&Client { owner, gpu, .. }) = self.clients.get(&client) else { return Lot::new() };
        let mut lot = Lot::new();
        let mut lacking = bytes.min(MOST_SEGMENTS as u64 * SEGMENT);
        while lacking > 0 && lot.len() < MOST_SEGMENTS {
            let bytes = lacking.next_multiple_of(GRANULE).min(SEGMENT).min(self.ledger.left(owner));
            let bytes = bytes - bytes % GRANULE;
            let has = self.out.iter().filter(|out| out.owner == owner).count();
            // One owner leaves others some.
            let is_full = has >= MOST_EACH.min(self.most.div_ceil(2)) || self.out.len() >= self.most;
            if bytes == 0 || is_full || available().is_some_and(|room| room < bytes + MARGIN) {
                break;
            }
            let Some(descriptor) = self.touched(bytes, gpu).map(Arc::new) else { break };
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
        lot
    }

    /// A new segment, made near a GPU.
    fn touched(&mut self, bytes: u64, gpu: Option<GpuUuid>) -> Option<OwnedFd> {
        let near = gpu.and_then(|gpu| Some((gpu, self.near.get(&gpu)?)));
        let Made { file, near: ran } = segment::make(bytes, near.map(|(_, near)| near))
            .inspect_err(|error| warn!("no segment of {} of the host's memory: {error}", Bytes(bytes)))
            .ok()?;
        match (near, ran) {
            (Some((gpu, _)), Some(Ok(ran))) => {
                debug!("{} of the host's memory are made by the processors {ran}, near {gpu}", Bytes(bytes));
            }
            (Some((gpu, _)), Some(Err(error))) => {
                debug!("from now on, memory of the host for {gpu} is made anywhere: {error}");
                self.near.remove(&gpu);
            }
            _ => {}
        }
        Some(file)
    }

    /// Frees what was given back and is not used.
    fn sweep(&mut self) {
        let begin = Instant::now();
        let mut looked_at = 0;
        let ledger = &mut self.ledger;
        self.out.retain(|out| {
            // Where pages are locked, the kernel waits a moment for them: others wait no longer for that than this.
            if out.client.is_some() || begin.elapsed() > LONGEST_LOOK {
                return true;
            }
            let is_free = segment::empty_if_unused(&out.descriptor);
            looked_at += usize::from(!is_free);
            if is_free {
                ledger.give_back(out.owner, out.segment.bytes);
                debug!("{} of the host's memory are free again", Bytes(out.segment.bytes));
            }
            !is_free
        });
        // The next look begins with others.
        let most = self.out.len().max(1);
        self.out.rotate_left(looked_at % most);
    }
}

/// Bytes that the machine can still give.
fn available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}
