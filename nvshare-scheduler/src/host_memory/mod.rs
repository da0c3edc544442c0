//! The host's memory to which clients' memory is evicted, made by the scheduler on behalf of all of them.
//!
//! One thread makes segments, and takes them back (`worker.rs`). A client asks for one lot at a time. The ledger counts a segment as the
//! client's until the kernel says that nobody uses it any more.

mod ledger;
mod movable;
mod segment;
mod worker;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use nvshare_proto::{GpuUuid, HostSegment, HostStatus, Usage};
use tokio::sync::mpsc as channel;

pub(crate) use ledger::Owner;
use movable::MovableBytes;
use worker::{MAX_EACH, Worker};

use crate::lock::lock;

/// The host's memory that clients may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// All clients together, in bytes.
    pub all: u64,
    /// Each tenant, in bytes.
    pub each: u64,
}

/// A lot of segments with their descriptors.
pub(crate) type Lot = Vec<(HostSegment, Arc<OwnedFd>)>;

/// News for a client.
#[derive(Debug)]
pub(crate) enum News {
    /// The answer to its question.
    Lot(Lot),
    /// Others lack this many bytes.
    Short(u64),
}

/// News that may wait for a client: an answer, and that others lack memory.
const MAX_NEWS: usize = 2;

#[derive(Debug)]
enum Request {
    Open { client: u64, owner: Owner, most: MovableBytes, news: channel::Sender<News> },
    Make { client: u64, bytes: u64, answer: channel::Sender<News> },
    Claim { client: u64, segments: Vec<HostSegment> },
    Back { client: u64, number: u64 },
    Gone { client: u64 },
}

/// Memory of the host, for all connections.
#[derive(Debug, Clone)]
pub(crate) struct HostMemory {
    requests: mpsc::Sender<Request>,
    budget: Budget,
    shown: Arc<Mutex<Shown>>,
}

/// The figures for administrators.
#[derive(Debug, Default)]
struct Shown {
    used: u64,
    clients: BTreeMap<u64, u64>,
}

/// The memory of the host that one client has. Dropping it gives that memory back.
#[derive(Debug)]
pub(crate) struct Account {
    requests: mpsc::Sender<Request>,
    client: u64,
    answer: channel::Sender<News>,
    news: channel::Receiver<News>,
    asks: bool,
    /// The numbers of the segments that the client got, or says that it has. The thread hears of no others: it works for all clients,
    /// and one client can name more in a second than the thread looks at in a minute.
    has: BTreeSet<u64>,
    /// How many segments of earlier schedulers it may name yet.
    may_claim: usize,
    /// How much of its memory may leave each GPU.
    movable: BTreeMap<GpuUuid, u64>,
    most: MovableBytes,
}

impl HostMemory {
    /// Starts the thread. `most`: the number of segments for which the process has descriptors; `boot`: the number of this run of
    /// the scheduler; `settle`: the time for clients of an earlier one to say what they have.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn start(budget: Budget, most: usize, boot: u64, settle: Duration) -> io::Result<Self> {
        let (requests, received) = mpsc::channel();
        let shown = Arc::<Mutex<Shown>>::default();
        let worker = Worker::new(budget, most, boot, settle, Arc::clone(&shown));
        std::thread::Builder::new().name("nvshare-host".to_owned()).spawn(move || worker.run(&received))?;
        Ok(Self { requests, budget, shown })
    }

    /// How much is handed out, and how much of it each client has, by its number. Clients that have none are left out.
    pub(crate) fn status(&self) -> (HostStatus, BTreeMap<u64, u64>) {
        let shown = lock(&self.shown);
        let Budget { all: budget, each } = self.budget;
        (HostStatus { budget, each, used: shown.used }, shown.clients.clone())
    }

    /// The account of a new client.
    pub(crate) fn open(&self, client: u64, owner: Owner) -> Account {
        let (answer, news) = channel::channel(MAX_NEWS);
        let most = MovableBytes::default();
        let _ = self.requests.send(Request::Open { client, owner, most: most.clone(), news: answer.clone() });
        Account {
            requests: self.requests.clone(),
            client,
            answer,
            news,
            asks: false,
            has: BTreeSet::new(),
            may_claim: MAX_EACH,
            movable: BTreeMap::new(),
            most,
        }
    }
}

impl Account {
    /// The client asks for this many bytes. A question beside another one is not answered.
    pub(crate) fn ask(&mut self, bytes: u64) {
        if !std::mem::replace(&mut self.asks, true) {
            let _ =
                self.requests.send(Request::Make { client: self.client, bytes, answer: self.answer.clone() });
        }
    }

    /// The client says what it has on a GPU.
    pub(crate) fn uses(&mut self, &Usage { gpu, allocated, immovable, .. }: &Usage) {
        self.movable.insert(gpu, allocated.saturating_sub(immovable));
        self.most.set(&self.movable);
    }

    /// The client says which segments it has from an earlier scheduler. Segments that it names again, or beyond what one owner may have,
    /// are not heard.
    pub(crate) fn claim(&mut self, mut segments: Vec<HostSegment>) {
        segments.retain(|segment| {
            self.may_claim > 0 && self.has.insert(segment.number) && {
                self.may_claim -= 1;
                true
            }
        });
        if !segments.is_empty() {
            let _ = self.requests.send(Request::Claim { client: self.client, segments });
        }
    }

    /// The client says that it does not use a segment any more.
    pub(crate) fn give_back(&mut self, number: u64) {
        if self.has.remove(&number) {
            let _ = self.requests.send(Request::Back { client: self.client, number });
        }
    }

    /// The next news for the client.
    pub(crate) async fn next(&mut self) -> News {
        let news = self.news.recv().await.unwrap_or(News::Lot(Lot::new()));
        if let News::Lot(lot) = &news {
            self.asks = false;
            self.has.extend(lot.iter().map(|(segment, _)| segment.number));
        }
        news
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let _ = self.requests.send(Request::Gone { client: self.client });
    }
}

#[cfg(test)]
mod tests {
    use nvshare_proto::units::MIB;

    use super::*;

    /// The client has memory that may leave a GPU.
    fn give_memory(account: &mut Account) {
        let gpu = GpuUuid([1; 16]);
        account.uses(&Usage { gpu, total: 1 << 30, limit: 0, allocated: 8 * MIB, absent: 0, immovable: 0 });
    }

    #[tokio::test]
    async fn there_are_no_more_segments_than_descriptors_for_them() {
        let budget = Budget { all: 1 << 30, each: 1 << 30 };
        let host = HostMemory::start(budget, 3, 0, Duration::ZERO).unwrap();
        let mut accounts = [1, 2].map(|client| host.open(client, Owner::Client(client)));
        accounts.iter_mut().for_each(give_memory);
        let mut lots = Vec::new();
        for wanted in [2, 2, 2] {
            for account in &mut accounts {
                account.ask(wanted * MIB);
                let lot = loop {
                    if let News::Lot(lot) = account.next().await {
                        break lot;
                    }
                };
                lots.push(lot);
            }
        }
        let counts: Vec<usize> = lots.iter().map(Vec::len).collect();
        assert_eq!(counts, [1, 1, 1, 0, 0, 0], "one owner has two of three at most");
        let (about, has) = host.status();
        assert_eq!((about.used, has), (6 * MIB, BTreeMap::from([(1, 4 * MIB), (2, 2 * MIB)])));
    }

    /// The bytes that others lack, as an account is told before the answer to a question.
    async fn short(account: &mut Account) -> Vec<u64> {
        account.ask(0);
        let mut short = Vec::new();
        while let News::Short(bytes) = account.next().await {
            short.push(bytes);
        }
        short
    }

    /// Memory that others give back is of no use to an owner that has its part.
    #[tokio::test]
    async fn owners_are_told_what_another_one_lacks_of_its_part() {
        let budget = Budget { all: 12 * MIB, each: 8 * MIB };
        let host = HostMemory::start(budget, 100, 0, Duration::ZERO).unwrap();
        let [one, two] = [1, 2].map(Owner::Tenant);
        let mut accounts =
            [(1, one), (2, two), (3, one), (4, one)].map(|(client, owner)| host.open(client, owner));
        accounts.iter_mut().for_each(give_memory);
        let mut lots = Vec::new();
        // The first two have all of the budget, and the first one all of its part; the last one has nothing.
        for (account, wanted) in [(0, 6), (2, 2), (1, 4), (0, 2)] {
            accounts[account].ask(wanted * MIB);
            lots.push(accounts[account].next().await);
        }
        assert_eq!(short(&mut accounts[1]).await, [], "the other one's part is the bound");
        assert_eq!(short(&mut accounts[2]).await, [2 * MIB], "it is of the same owner");
        accounts[1].ask(6 * MIB);
        lots.push(accounts[1].next().await);
        assert_eq!(short(&mut accounts[0]).await, [4 * MIB], "it could get so much");
        assert_eq!(short(&mut accounts[3]).await, []);
    }

    /// Only news takes the time of the thread, which works for all clients.
    #[tokio::test]
    async fn a_client_that_says_the_same_over_and_over_gives_the_thread_nothing_to_do() {
        let (requests, received) = mpsc::channel();
        let host = HostMemory { requests, budget: Budget { all: 1, each: 1 }, shown: Arc::default() };
        let mut account = host.open(1, Owner::Client(1));
        let held = |number| HostSegment { number, bytes: MIB };
        for _ in 0..100 {
            account.claim(vec![held(1), held(2)]);
            account.give_back(3);
        }
        let said: Vec<Request> = received.try_iter().collect();
        assert!(matches!(&said[..], [Request::Open { .. }, Request::Claim { .. }]), "{said:?}");
        // It can neither claim without end, nor say by turns that it has a segment and that it has not.
        for _ in 0..MAX_EACH {
            account.claim((0..4000).map(held).collect());
            account.give_back(1);
        }
        let claimed =
            |request| if let Request::Claim { segments, .. } = request { segments.len() } else { 0 };
        let (claims, rest): (Vec<Request>, Vec<Request>) =
            received.try_iter().partition(|request| matches!(request, Request::Claim { .. }));
        assert_eq!(claims.into_iter().map(claimed).sum::<usize>(), MAX_EACH - 2);
        assert_eq!(rest.len(), 1, "{rest:?}");
        // It gives back once each segment that it has got.
        let file = std::fs::File::open("/dev/null").unwrap();
        account.answer.try_send(News::Lot(vec![(held(5000), Arc::new(file.into()))])).unwrap();
        account.next().await;
        account.give_back(5000);
        account.give_back(5000);
        let said: Vec<Request> = received.try_iter().collect();
        assert!(matches!(&said[..], [Request::Back { number: 5000, .. }]), "{said:?}");
    }
}
