use std::os::fd::AsFd;

use nvshare_proto::GpuUuid;
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
        let (news, _) = channel::channel(MAX_NEWS);
        let most = MovableBytes::default();
        most.set(&[(gpu(client as u8), ALL)].into());
        worker.serve(Request::Open { client, owner: Owner::Client(client), most, news });
    }
    worker
}

fn file(fd: impl AsFd) -> (u64, u64, u64) {
    let about = fstat(fd).unwrap();
    (about.st_ino, about.st_size as u64, about.st_blocks as u64 * 512)
}

/// The first client says that it has a segment from an earlier scheduler.
fn claim(bytes: u64) -> Request {
    Request::Claim { client: 1, segments: vec![HostSegment { number: 9, bytes }] }
}

#[test]
fn a_scheduler_that_has_run_for_a_while_hears_no_more_of_earlier_ones() {
    let mut worker = worker(100, Duration::ZERO);
    worker.hears_claims_until = Instant::now();
    worker.serve(claim(2 * MIB));
    assert_eq!(worker.ledger.sum(), 0);
    // It knows the segments that it has handed out itself: the client comes back on another connection.
    let lot = worker.make(1, 2 * MIB).0;
    worker.out[0].client = None;
    worker.serve(Request::Claim { client: 1, segments: vec![lot[0].0] });
    assert_eq!((worker.ledger.sum(), worker.out[0].client), (2 * MIB, Some(1)));
    let mut early = self::worker(100, Duration::from_secs(60));
    early.serve(claim(2 * MIB));
    assert_eq!(early.ledger.sum(), 2 * MIB);
}

/// The kernel takes its time to say so of pages that are locked. Memory between the two, and in use, does not count.
#[test]
fn a_segment_that_stays_in_use_delays_those_behind_it_by_one_look() {
    let mut worker = worker(100, Duration::ZERO);
    let used: Vec<Lot> = (0..8).map(|_| worker.make(1, 2 * MIB).0).collect();
    let (locked, free) = (worker.make(2, 4 * MIB).0, worker.make(2, 6 * MIB).0);
    for lot in [&locked, &free] {
        worker.serve(Request::Back { client: 2, number: lot[0].0.number });
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
        std::thread::sleep(MAX_LOOK);
        segment::empty_if_unused(segment)
    };
    (0..SEGMENTS).for_each(|_| drop(worker.make(1, 2 * MIB)));
    worker.show();
    let (requests, received) = mpsc::channel();
    requests.send(Request::Gone { client: 1 }).unwrap();
    let works = std::thread::spawn(move || worker.run(&received));
    while shown.lock().unwrap().used > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(requests);
    works.join().unwrap();
    let looks = LOOKS.lock().unwrap();
    // A busy machine may hold some of them up.
    let prompt = looks.windows(2).filter(|pair| pair[1] - pair[0] < LOOK_AGAIN).count();
    assert!(prompt >= looks.len() / 2, "{prompt} of {} looks followed at once", looks.len());
}

/// Pages are locked, and the kernel waits a moment for them at each look. Clients come and go, and give back more of them.
#[test]
fn memory_that_stays_in_use_is_looked_at_once_in_a_while() {
    static LOOKS: Mutex<u32> = Mutex::new(0);
    let mut worker = worker(100, Duration::ZERO);
    worker.empty_if_unused = |_| {
        *LOOKS.lock().unwrap() += 1;
        std::thread::sleep(MAX_LOOK);
        false
    };
    let segments: Vec<u64> = (0..8).map(|_| worker.make(1, 2 * MIB).0[0].0.number).collect();
    let (requests, received) = mpsc::channel();
    let begin = Instant::now();
    let works = std::thread::spawn(move || worker.run(&received));
    for number in segments {
        requests.send(Request::Back { client: 1, number }).unwrap();
        requests.send(Request::Gone { client: 2 }).unwrap();
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(requests);
    works.join().unwrap();
    let (looks, most) = (*LOOKS.lock().unwrap(), 1 + begin.elapsed().as_millis() / LOOK_AGAIN.as_millis());
    assert!(u128::from(looks) <= most, "{looks} looks");
}
