use std::os::fd::AsFd;

use rustix::fs::fstat;

use super::*;

const ALL: u64 = 64 * MIB;

fn gpu(number: u8) -> GpuUuid {
    GpuUuid([number; 16])
}

fn plenty() -> Option<u64> {
    Some(1 << 50)
}

/// A worker that may hand out 64 MiB, with two clients on a GPU each.
fn worker(most: usize, settle: Duration) -> Worker {
    let budget = Budget { all: ALL, each: ALL };
    let mut worker = Worker::new(budget, most, 0, settle, Arc::default());
    worker.available = plenty;
    worker.largest = SEGMENT;
    for client in [1, 2] {
        let (news, _) = channel::channel(MOST_NEWS);
        let most = Most::default();
        most.set(&[(gpu(client as u8), ALL)].into());
        worker.work(Job::Open { client, owner: Owner::Client(client), most, news });
        worker.work(Job::Uses { client, gpu: gpu(client as u8) });
    }
    worker
}

/// Both clients are on the first client's GPU, and 40 MiB of each do not fit.
fn contention() -> Vec<Contended> {
    let movable = vec![(1, 60 * MIB), (2, 60 * MIB)];
    vec![Contended { gpu: gpu(1), beyond: 40 * MIB, largest: 60 * MIB, movable }]
}

/// Lets the worker do all that there is to do at a time.
fn settled(worker: &mut Worker, now: Instant) -> Option<Instant> {
    loop {
        let next = worker.tend(now);
        if next != Some(now) {
            return next;
        }
    }
}

/// A worker that has made ready all that it may.
fn prepared(most: usize) -> Worker {
    let mut worker = worker(most, Duration::ZERO);
    worker.work(Job::Foresee(contention()));
    settled(&mut worker, Instant::now());
    assert_eq!((worker.stock.bytes(), worker.ledger.sum()), (ALL, 0));
    worker
}

fn answer_of(news: &mut channel::Receiver<News>) -> Lot {
    match news.try_recv() {
        Ok(News::Lot(lot)) => lot,
        other => panic!("{other:?}"),
    }
}

fn sum(lot: &Lot) -> u64 {
    lot.iter().map(|(segment, _)| segment.bytes).sum()
}

fn file(fd: impl AsFd) -> (u64, u64, u64) {
    let about = fstat(fd).unwrap();
    (about.st_ino, about.st_size as u64, about.st_blocks as u64 * 512)
}

#[test]
fn segments_are_ready_before_anybody_asks_and_are_handed_out_first() {
    let mut worker = prepared(100);
    let ready = worker.stock.take_any().unwrap();
    let (number, ..) = file(&ready.file);
    worker.stock.add(ready);
    let lot = worker.make(1, 32 * MIB).0;
    assert_eq!(file(&lot[0].1), (number, 32 * MIB, 32 * MIB), "no more than it has asked for");
    assert_eq!((worker.stock.bytes(), worker.ledger.sum()), (0, 32 * MIB));
    // 8 MiB of the one and 40 of the other may still have to leave.
    settled(&mut worker, Instant::now());
    assert_eq!(worker.stock.bytes(), ALL - 32 * MIB);
}

#[test]
fn nothing_is_ready_before_contention_nor_before_clients_have_said_what_they_have() {
    let now = Instant::now();
    let mut early = worker(100, Duration::from_secs(60));
    assert_eq!((early.tend(now), early.stock.count()), (None, 0));
    early.work(Job::Foresee(contention()));
    assert_eq!((early.tend(now), early.stock.count()), (Some(early.opens), 0));
    let opens = early.opens;
    settled(&mut early, opens);
    assert_eq!(early.stock.bytes(), ALL);
    let mut worker = worker(100, Duration::ZERO);
    assert_eq!((worker.tend(now), worker.stock.count()), (None, 0));
}

#[test]
fn what_is_ready_goes_a_while_after_contention() {
    let mut worker = prepared(100);
    let now = Instant::now();
    worker.work(Job::Foresee(Vec::new()));
    assert_eq!(settled(&mut worker, now), Some(now + LINGERS));
    worker.work(Job::Foresee(contention()));
    settled(&mut worker, now + LINGERS);
    assert_eq!(worker.stock.bytes(), ALL, "contention has come back");
    worker.work(Job::Foresee(Vec::new()));
    settled(&mut worker, now + LINGERS);
    assert_eq!(settled(&mut worker, now + 2 * LINGERS), None, "nothing is left to do");
    assert_eq!(worker.stock.bytes(), 0);
}

/// Who asks is on another node than what is ready, which takes all that there is: of the budget, of descriptors, of the machine's memory.
#[test]
fn what_is_ready_is_in_nobodys_way() {
    let scarce = || Some(MARGIN);
    for (most, available, what) in
        [(100, plenty as fn() -> Option<u64>, "budget"), (1, plenty, "descriptors"), (100, scarce, "memory")]
    {
        let mut worker = worker(most, Duration::ZERO);
        worker.near.insert(gpu(1), Processors::of_this_thread().unwrap().last());
        worker.work(Job::Foresee(contention()));
        settled(&mut worker, Instant::now());
        assert_eq!(worker.stock.bytes(), ALL);
        worker.available = available;
        assert_eq!(sum(&worker.make(2, ALL).0), ALL, "{what}");
        assert_eq!((worker.stock.count(), worker.ledger.sum(), worker.out.len()), (0, ALL, 1), "{what}");
        settled(&mut worker, Instant::now());
        assert_eq!(worker.stock.count(), 0, "{what}: there is room for no more");
    }
}

/// Also who asks for little near it: it would be cut.
#[test]
fn what_is_ready_is_kept_for_who_needs_most_of_it_near_its_gpu_while_there_is_room() {
    for (ready, client, asked) in [(32, 2, 32), (56, 1, 8)] {
        let mut worker = prepared(100);
        worker.near.insert(gpu(2), Processors::of_this_thread().unwrap().last());
        let kept = worker.stock.take_any().unwrap();
        segment::cut(&kept.file, ready * MIB).unwrap();
        worker.stock.add(Ready { bytes: ready * MIB, ..kept });
        let lot = worker.make(client, asked * MIB).0;
        assert_eq!((sum(&lot), worker.stock.bytes()), (asked * MIB, ready * MIB), "{client}");
    }
}

/// The first client says that it has a segment from an earlier scheduler.
fn claim(bytes: u64) -> Job {
    Job::Claim { client: 1, segments: vec![HostSegment { number: 9, bytes }] }
}

#[test]
fn a_scheduler_that_has_run_for_a_while_hears_no_more_of_earlier_ones() {
    let mut worker = worker(100, Duration::ZERO);
    worker.hears_claims_until = Instant::now();
    worker.work(claim(2 * MIB));
    assert_eq!(worker.ledger.sum(), 0);
    // What it has handed out itself it knows: the client comes back on another connection.
    let lot = worker.make(1, 2 * MIB).0;
    worker.out[0].client = None;
    worker.work(Job::Claim { client: 1, segments: vec![lot[0].0] });
    assert_eq!((worker.ledger.sum(), worker.out[0].client), (2 * MIB, Some(1)));
    let mut early = self::worker(100, Duration::from_secs(60));
    early.work(claim(2 * MIB));
    assert_eq!(early.ledger.sum(), 2 * MIB);
}

#[test]
fn what_is_ready_goes_when_there_is_no_room_for_it() {
    let mut short = prepared(100);
    short.available = || Some(MARGIN - 1);
    settled(&mut short, Instant::now());
    assert_eq!(short.stock.count(), 0, "the machine is short of memory");
    let mut claimed = prepared(100);
    claimed.work(claim(ALL));
    settled(&mut claimed, Instant::now());
    assert_eq!((claimed.stock.count(), claimed.ledger.sum()), (0, ALL), "it is another's since long ago");
}

#[test]
fn a_granule_says_nothing_about_a_clients_memory() {
    let mut worker = prepared(100);
    for client in [1, 2] {
        let (answer, mut lots) = channel::channel(MOST_NEWS);
        worker.work(Job::Make { client, bytes: GRANULE, answer });
        let lot = answer_of(&mut lots);
        worker.work(Job::Back { client, number: lot[0].0.number });
    }
    assert_eq!(worker.wanted().values().map(|(_, bytes)| *bytes).sum::<u64>(), ALL - 2 * GRANULE);
}

#[test]
fn a_client_that_has_said_what_it_needs_is_prepared_for_no_more() {
    let mut worker = prepared(100);
    // Of the 60 MiB of each, the rest is zeros.
    let lots = [(1, 4 * MIB), (2, 6 * MIB)].map(|(client, bytes)| {
        let (answer, mut lots) = channel::channel(MOST_NEWS);
        worker.work(Job::Make { client, bytes, answer });
        answer_of(&mut lots)
    });
    assert_eq!(lots.each_ref().map(sum), [4 * MIB, 6 * MIB]);
    assert!(worker.wanted().is_empty(), "{:?}", worker.wanted());
    // It has grown.
    let mut grown = contention();
    grown[0].movable[0].1 += 2 * MIB;
    worker.work(Job::Foresee(grown));
    assert_eq!(worker.wanted().len(), 1);
}

/// The kernel takes its time to say so of pages that are locked. What lies between the two, and is in use, does not count.
#[test]
fn a_segment_that_stays_in_use_delays_those_behind_it_by_one_look() {
    let mut worker = worker(100, Duration::ZERO);
    let used: Vec<Lot> = (0..8).map(|_| worker.make(1, 2 * MIB).0).collect();
    let (locked, free) = (worker.make(2, 4 * MIB).0, worker.make(2, 6 * MIB).0);
    for lot in [&locked, &free] {
        worker.work(Job::Back { client: 2, number: lot[0].0.number });
    }
    worker.empty_if_unused = |segment| file(segment).1 != 4 * MIB && segment::empty_if_unused(segment);
    worker.sweep(Duration::ZERO);
    assert_eq!(worker.ledger.sum(), 26 * MIB, "one is looked at");
    worker.sweep(Duration::ZERO);
    assert_eq!(worker.ledger.sum(), 20 * MIB, "then the next one");
    for _ in 0..4 {
        worker.sweep(Duration::ZERO);
    }
    assert_eq!(worker.out.len(), used.len() + 1);
    worker.empty_if_unused = segment::empty_if_unused;
    worker.sweep(Duration::ZERO);
    assert_eq!(worker.ledger.sum(), 16 * MIB);
}

/// The kernel takes as long for a segment as one look may last, so that each look frees one.
#[test]
fn what_a_client_had_comes_back_without_pauses() {
    const SEGMENTS: u32 = 24;
    let mut worker = worker(100, Duration::ZERO);
    let shown = Arc::clone(&worker.shown);
    static LOOKS: Mutex<Vec<Instant>> = Mutex::new(Vec::new());
    worker.empty_if_unused = |segment| {
        LOOKS.lock().unwrap().push(Instant::now());
        std::thread::sleep(LONGEST_LOOK);
        segment::empty_if_unused(segment)
    };
    (0..SEGMENTS).for_each(|_| drop(worker.make(1, 2 * MIB)));
    worker.show();
    let (jobs, received) = mpsc::channel();
    jobs.send(Job::Gone { client: 1 }).unwrap();
    let works = std::thread::spawn(move || worker.run(&received));
    while shown.lock().unwrap().used > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(jobs);
    works.join().unwrap();
    let looks = LOOKS.lock().unwrap();
    // A busy machine may hold some of them up.
    let prompt = looks.windows(2).filter(|pair| pair[1] - pair[0] < LOOK_AGAIN).count();
    assert!(prompt >= looks.len() / 2, "{prompt} of {} looks followed at once", looks.len());
}
