//! The threads that wait for work and move memory.
//!
//! A prefetch call blocks until the memory has moved, so the mover has a thread of its own. It does its orders in order, so that
//! evictions that were ordered are complete before anything is restored. A process with several GPUs moves the memory of all
//! of them at the same time, and keeps the order of each.

mod device;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use nvshare_client::MoverOrder;
use nvshare_client::session::Done;
use nvshare_proto::{Amount, GpuUuid, HandOverPhase};

use crate::memory::backing::WithoutRoom;
use crate::memory::devices::{self, Device};
use crate::memory::{deferred_free, driver_reserve, free, pool_frees, sleep};
use crate::process::lock::lock;
use crate::process::threads::{self, Pace};
use crate::process::{counters, lifecycle, log, phases};
use crate::work::drain::Drain;
use crate::work::gate;

/// Longest wait of an eviction for allocations and frees that are under way: the driver's call may be behind work of the program.
const CHANGE_IS_LATE: Duration = Duration::from_secs(5);
/// How often an eviction that is short is tried again, and the pause before: contexts may be ending.
const AGAIN: u32 = 3;
const BEFORE_AGAIN: Duration = Duration::from_millis(10);

struct Queue {
    orders: VecDeque<(MoverOrder, u64)>,
}

static QUEUE: Mutex<Queue> = Mutex::new(Queue { orders: VecDeque::new() });
static POSTED: Condvar = Condvar::new();
/// Jobs of an earlier generation are given up, except evictions.
static GENERATION: AtomicU64 = AtomicU64::new(0);
/// Grows whenever a drain has less left to wait for.
static PROGRESS: AtomicU64 = AtomicU64::new(0);
/// The number of evictions that are ordered and not complete.
static EVICTIONS: AtomicUsize = AtomicUsize::new(0);
/// The number of restores that are ordered and not over.
static RESTORES: AtomicUsize = AtomicUsize::new(0);
/// Reports results to the session.
static REPORT: OnceLock<fn(Done)> = OnceLock::new();

/// Gives the mover an order.
pub(crate) fn post(order: MoverOrder) {
    if let MoverOrder::Evict(room) = &order {
        EVICTIONS.fetch_add(1, Ordering::SeqCst);
        // Not beside a restore that is not over yet: the eviction would miss what is on its way.
        let is_beside =
            devices::used().nth(1).is_some() && !sleep::is_away() && RESTORES.load(Ordering::SeqCst) == 0;
        if is_beside && evict_beside(*room) {
            return;
        }
    }
    if is_restore(&order) {
        RESTORES.fetch_add(1, Ordering::SeqCst);
    }
    lock(&QUEUE).orders.push_back((order, GENERATION.load(Ordering::SeqCst)));
    POSTED.notify_one();
}

fn is_restore(order: &MoverOrder) -> bool {
    matches!(order, MoverOrder::Restore | MoverOrder::RestoreEarly)
}

/// Gives up the orders so far, except evictions.
pub(crate) fn cancel() {
    GENERATION.fetch_add(1, Ordering::SeqCst);
    log::debug(format_args!("what the mover does is given up, but for evictions"));
}

/// See [`PROGRESS`].
pub(crate) fn progress() -> u64 {
    PROGRESS.load(Ordering::Relaxed)
}

/// Whether an eviction is not complete yet. No memory may be used before it is.
pub(crate) fn is_evicting() -> bool {
    EVICTIONS.load(Ordering::SeqCst) > 0
}

fn report(done: Done) {
    if let Some(report) = REPORT.get() {
        report(done);
    }
}

/// The mover's thread. `to` reports results to the session.
pub(crate) fn run(to: fn(Done)) {
    let _ = REPORT.set(to);
    // The next program waits while this thread finds out that a drain is complete.
    threads::be_punctual();
    loop {
        let (order, generation) = next();
        let cancelled = || GENERATION.load(Ordering::SeqCst) != generation;
        let (is_restore, is_ahead) = (is_restore(&order), order == MoverOrder::RestoreEarly);
        match order {
            MoverOrder::Sleep => report(sleep::go()),
            MoverOrder::Wake => report(sleep::come_back()),
            order if sleep::is_away() => answer_asleep(&order),
            MoverOrder::Evict(room) => evict(room),
            _ if cancelled() => {}
            MoverOrder::Drain(ticket) => {
                if drain(cancelled) {
                    report(Done::Drained(ticket));
                }
            }
            MoverOrder::Restore | MoverOrder::RestoreEarly => {
                let without_room = if is_ahead { WithoutRoom::Wait } else { WithoutRoom::GoOn };
                if let Some(lacking) = restore(without_room, &cancelled) {
                    report(Done::Restored { lacking });
                }
            }
            MoverOrder::Probe => report(probe(cancelled)),
        }
        if is_restore {
            RESTORES.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Answers an order without the driver, while the process is off the card: no work runs, and no memory that moves is there.
fn answer_asleep(order: &MoverOrder) {
    let submissions = gate::totals().0;
    match *order {
        MoverOrder::Evict(Amount { gpu, bytes }) => {
            let charged = devices::by_uuid(gpu).map_or(0, |device| device.account().charged());
            EVICTIONS.fetch_sub(1, Ordering::SeqCst);
            report(Done::EvictionEnds { gpu, short: bytes.min(charged) });
        }
        MoverOrder::Drain(ticket) => report(Done::Drained(ticket)),
        MoverOrder::Probe => report(Done::Quiet { submissions }),
        MoverOrder::Restore | MoverOrder::RestoreEarly | MoverOrder::Sleep | MoverOrder::Wake => {}
    }
}

fn next() -> (MoverOrder, u64) {
    let mut queue = lock(&QUEUE);
    loop {
        if let Some(order) = queue.orders.pop_front() {
            return order;
        }
        queue = POSTED.wait(queue).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Waits until no thread is inside the gate and all submitted work is complete. Returns false if it was given up.
fn drain(cancelled: impl Fn() -> bool) -> bool {
    let begin = Instant::now();
    while !gate::nobody_inside() {
        if cancelled() {
            return false;
        }
        rest(pause_of_drain(begin.elapsed()));
    }
    PROGRESS.fetch_add(1, Ordering::Relaxed);
    let mut work = Drain::begin();
    if !wait_for(&mut work, &cancelled, pause_of_drain) {
        return false;
    }
    pool_frees::see();
    let took = begin.elapsed();
    counters::drained(took.as_nanos() as u64);
    phases::note(HandOverPhase::Drain, took);
    // Before the lock is given back: what was freed is room for the next program, and the driver's free waits for work.
    deferred_free::free_all_due();
    free::finish_late_frees();
    if let Some(_call) = lifecycle::hold_off_exit() {
        devices::used().for_each(driver_reserve::refresh);
    }
    log::debug(format_args!("drained in {:.1} ms", took.as_secs_f64() * 1e3));
    true
}

/// The pause between two looks of a drain that has waited this long. The next program waits for its end.
fn pause_of_drain(waited: Duration) -> Duration {
    const PACE: Pace = Pace { part: 16, most: Duration::from_millis(1) };
    if waited < threads::SOON { Duration::ZERO } else { PACE.pause(waited) }
}

/// Waits until work is complete; returns false if that was given up. `pause` is told the time waited so far.
fn wait_for(
    work: &mut Drain,
    given_up: &impl Fn() -> bool,
    mut pause: impl FnMut(Duration) -> Duration,
) -> bool {
    let (begin, mut left) = (Instant::now(), usize::MAX);
    loop {
        let now = work.poll();
        if now < left {
            left = now;
            PROGRESS.fetch_add(1, Ordering::Relaxed);
        }
        if given_up() {
            return false;
        }
        if left == 0 {
            return true;
        }
        rest(pause(begin.elapsed()));
    }
}

/// Pauses between two looks at work. An order that comes meanwhile ends the pause; while orders wait, pauses are short.
fn rest(pause: Duration) {
    if pause.is_zero() {
        return std::hint::spin_loop();
    }
    let queue = lock(&QUEUE);
    if queue.orders.is_empty() {
        drop(POSTED.wait_timeout(queue, pause));
    } else {
        drop(queue);
        threads::pause();
    }
}

/// Finds out whether all submitted work is complete, without closing the gate.
fn probe(cancelled: impl Fn() -> bool) -> Done {
    const PACE: Pace = Pace { part: 4, most: Duration::from_millis(5) };
    let submissions = gate::totals().0;
    if !gate::nobody_inside() {
        return Done::Busy;
    }
    let mut work = Drain::begin();
    // An event behind complete work is complete after a moment. Other work may take long.
    if wait_for(&mut work, &|| cancelled() || gate::totals().0 != submissions, |waited| PACE.pause(waited)) {
        // The room of an idle process goes to others, and there may be no drain before.
        pool_frees::see();
        Done::Quiet { submissions }
    } else {
        Done::Busy
    }
}

/// Restores memory on all devices at the same time. Returns the room to ask for where it is lacking. `None`: it was given up, or it
/// went ahead of the lock and lacks room still.
fn restore(without_room: WithoutRoom, cancelled: &(dyn Fn() -> bool + Sync)) -> Option<Vec<Amount>> {
    let devices: Vec<&'static Device> = devices::used().collect();
    let one = |device: &'static Device| {
        wait_for_evictions(device, cancelled);
        device::restore(device, without_room, &|| cancelled())
    };
    let restored: Vec<device::AfterRestore> = std::thread::scope(|scope| {
        let (first, others) =
            devices.split_first().map_or((None, &[][..]), |(first, others)| (Some(*first), others));
        let others: Vec<_> = others
            .iter()
            .map(|&device| {
                let beside = threads::spawn_scoped(scope, "nvshare-restore", move || one(device));
                (device, beside)
            })
            .collect();
        let first = first.map(one);
        let wait = |(device, beside): (&'static Device, Option<ScopedJoinHandle<'_, _>>)| {
            // If a thread cannot be started, this thread does the work.
            beside.map_or_else(|| one(device), |thread| thread.join().unwrap_or_default())
        };
        first.into_iter().chain(others.into_iter().map(wait)).collect()
    });
    if !restored.iter().any(|restored| restored.moved) {
        // The absent memory is not on the list yet, as its allocation is under way.
        threads::pause();
    }
    let to_ask_for = |(device, restored): (&&Device, &device::AfterRestore)| {
        (restored.to_ask_for > 0).then_some(Amount { gpu: device.uuid(), bytes: restored.to_ask_for })
    };
    let is_complete = !cancelled() && !restored.iter().any(|restored| restored.is_partial);
    is_complete.then(|| devices.iter().zip(&restored).filter_map(to_ask_for).collect())
}

/// Most processes whose exit has begun have ended after this time.
const ENDS_SOON: Duration = Duration::from_secs(5);
/// The pauses in which that time passes.
const PAUSE_AT_END: Duration = Duration::from_millis(100);

fn evict(Amount { gpu, bytes }: Amount) {
    // Once the driver may shut down, memory stays where it is until the process has ended.
    let device = devices::by_uuid(gpu).filter(|_| !lifecycle::is_exiting());
    let short = device.map_or(bytes, |device| evict_from(device, bytes));
    if short > 0 && lifecycle::is_exiting() {
        // The end of the process gives everything back. At once, others would be refused what is free in a moment.
        let begin = Instant::now();
        while begin.elapsed() < ENDS_SOON {
            threads::sleep(PAUSE_AT_END);
        }
    }
    EVICTIONS.fetch_sub(1, Ordering::SeqCst);
    report(Done::EvictionEnds { gpu, short });
}

/// Evicts bytes of a device; returns how many cannot leave. An allocation that is charged but not on the list yet takes room
/// that the scheduler counts on. It leaves as soon as the driver has made it. So does one that is being freed, and its room is
/// there when the free is over. Memory whose context has ended meanwhile moves in another one.
fn evict_from(device: &'static Device, bytes: u64) -> u64 {
    let report = || report(Done::Evicted(device.uuid()));
    let begin = Instant::now();
    let is_under_way =
        || device.is_changing() && begin.elapsed() < CHANGE_IS_LATE && !lifecycle::is_exiting();
    let (mut short, mut again) = (device::evict(device, bytes, &report), 0);
    while short > 0 && again < AGAIN {
        if is_under_way() {
            while is_under_way() {
                threads::pause();
            }
        } else {
            again += 1;
            threads::sleep(BEFORE_AGAIN);
        }
        short = device::evict(device, short, &report);
    }
    // Memory that was freed meanwhile has left as well, and its room is given back as such.
    short.min(device.account().charged())
}

/// The evictions of one device, in a process with several devices.
#[derive(Debug)]
struct Beside {
    gpu: GpuUuid,
    orders: VecDeque<Amount>,
}

/// Devices that have a thread for evictions.
static BESIDE: Mutex<Vec<Beside>> = Mutex::new(Vec::new());
static BESIDE_ENDS: Condvar = Condvar::new();

/// Evicts on a thread of the device, which ends when it has no more orders. Returns false if no thread can be started.
fn evict_beside(room: Amount) -> bool {
    let mut beside = lock(&BESIDE);
    if let Some(busy) = beside.iter_mut().find(|busy| busy.gpu == room.gpu) {
        busy.orders.push_back(room);
        return true;
    }
    let work = move || {
        let mut order = room;
        loop {
            evict(order);
            let mut beside = lock(&BESIDE);
            let Some(at) = beside.iter().position(|busy| busy.gpu == room.gpu) else { return };
            match beside.get_mut(at).and_then(|busy| busy.orders.pop_front()) {
                Some(next) => order = next,
                None => {
                    beside.swap_remove(at);
                    BESIDE_ENDS.notify_all();
                    return;
                }
            }
        }
    };
    let begun = threads::spawn("nvshare-evict", work);
    if begun {
        beside.push(Beside { gpu: room.gpu, orders: VecDeque::new() });
    }
    begun
}

/// Waits until the evictions of a device are complete, before anything is restored.
fn wait_for_evictions(device: &Device, cancelled: &dyn Fn() -> bool) {
    /// How often the wait looks whether it was given up.
    const LOOK: std::time::Duration = std::time::Duration::from_millis(5);
    let mut beside = lock(&BESIDE);
    while beside.iter().any(|busy| busy.gpu == device.uuid()) && !cancelled() {
        (beside, _) = BESIDE_ENDS.wait_timeout(beside, LOOK).unwrap_or_else(PoisonError::into_inner);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drain_that_ends_soon_is_looked_at_without_pauses() {
        for (waited, pause) in [(0, 0), (49, 0), (50, 50), (800, 50), (8_000, 500), (9_000_000, 1_000)] {
            assert_eq!(pause_of_drain(Duration::from_micros(waited)), Duration::from_micros(pause));
        }
    }
}
