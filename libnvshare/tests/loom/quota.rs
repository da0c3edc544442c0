//! The sums of a quota page: processes charge and discharge, and the scheduler takes back what a dead one had.

#[path = "../../../proto/src/quota/sums.rs"]
mod sums;

/// In the place of the standard library's.
mod atomics {
    pub(super) use loom::sync::atomic::{AtomicU64, Ordering};
}

use atomics::{AtomicU64, Ordering};
use loom::sync::Arc;
use loom::thread;

const LIMIT: u64 = 100;

/// A tenant of two processes.
struct TenantQuota {
    used: AtomicU64,
    own: [AtomicU64; 2],
}

impl TenantQuota {
    fn new(own: [u64; 2]) -> Arc<Self> {
        let used = AtomicU64::new(own.iter().sum());
        Arc::new(Self { used, own: own.map(AtomicU64::new) })
    }

    fn charge(&self, process: usize, bytes: u64) -> bool {
        let charged = sums::charge(&self.used, &self.own[process], bytes, LIMIT).is_ok();
        assert!(self.used.load(Ordering::SeqCst) <= LIMIT, "the limit is passed");
        charged
    }

    fn discharge(&self, process: usize, bytes: u64) {
        sums::discharge(&self.used, &self.own[process], bytes);
    }

    /// When everything is over: the sum is what the processes have.
    fn adds_up(&self) -> [u64; 2] {
        let own = [0, 1].map(|process: usize| self.own[process].load(Ordering::SeqCst));
        assert_eq!(self.used.load(Ordering::SeqCst), own[0] + own[1]);
        own
    }
}

fn spawn(tenant: &Arc<TenantQuota>, work: impl FnOnce(&TenantQuota) + 'static) -> thread::JoinHandle<()> {
    let tenant = Arc::clone(tenant);
    thread::spawn(move || work(&tenant))
}

#[test]
fn the_last_byte_goes_to_one_process() {
    loom::model(|| {
        let tenant = TenantQuota::new([0, 0]);
        let other = spawn(&tenant, |tenant| {
            tenant.charge(1, 60);
        });
        tenant.charge(0, 60);
        other.join().unwrap();
        let mut own = tenant.adds_up();
        own.sort_unstable();
        assert_eq!(own, [0, 60]);
    });
}

#[test]
fn bytes_that_one_frees_another_can_have() {
    loom::model(|| {
        let tenant = TenantQuota::new([60, 0]);
        let other = spawn(&tenant, |tenant| {
            tenant.charge(1, 60);
        });
        tenant.discharge(0, 60);
        other.join().unwrap();
        let [first, second] = tenant.adds_up();
        assert_eq!(first, 0);
        assert!(second == 0 || second == 60);
        assert!(second == 60 || tenant.charge(1, 60), "what is free is free");
    });
}

/// The scheduler takes back what a process had whose connection is gone, while its last threads still free.
#[test]
fn bytes_are_taken_back_once() {
    loom::model(|| {
        let tenant = TenantQuota::new([60, 40]);
        let scheduler = spawn(&tenant, |tenant| sums::reclaim(&tenant.used, &tenant.own[0]));
        let other = spawn(&tenant, |tenant| tenant.discharge(1, 10));
        tenant.discharge(0, 20);
        scheduler.join().unwrap();
        other.join().unwrap();
        assert_eq!(tenant.adds_up(), [0, 30]);
    });
}

#[test]
fn two_processes_that_come_to_a_gpu_find_the_same_column() {
    loom::model(|| {
        let gpus: Arc<[AtomicU64; 2]> = Arc::new([0, 0].map(AtomicU64::new));
        let other = thread::spawn({
            let gpus = Arc::clone(&gpus);
            move || [sums::column(&gpus[..], 7), sums::column(&gpus[..], 8)]
        });
        let mine = [sums::column(&gpus[..], 8), sums::column(&gpus[..], 7)];
        let theirs = other.join().unwrap();
        assert_eq!(mine, [theirs[1], theirs[0]]);
        assert_ne!(mine[0], mine[1]);
        assert_eq!(sums::column(&gpus[..], 9), None);
    });
}
