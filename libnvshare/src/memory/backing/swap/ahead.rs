//! Host memory for an eviction: it is made ahead of the eviction, and given back when it is not needed any more.
//!
//! Memory that leaves the card needs a granule of the host for each granule that is not zero. Which ones are zero is known from
//! the last time they left, or is [looked at](content::guess) while the program still runs.
//!
//! The memory is made, or asked of the scheduler, as soon as another client waits: nothing tells the library of others'
//! memory before.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::content;
use crate::memory::allocations;
use crate::memory::devices;
use crate::memory::mapping::copies::HostCopy;
use crate::memory::mapping::{Chunk, GRANULE, host_pool};
use crate::process::lock::lock;
use crate::process::{lifecycle, threads};
use crate::work::contexts::Context;

/// Longest wait for the kernel that looks for zeros.
const KERNEL_IS_LATE: Duration = Duration::from_secs(2);
/// Granules of a pool that hold no contents: the kernel's list.
const OTHERS: u64 = GRANULE;

/// Memory of the host that may be needed for the memory of a context.
#[derive(Debug)]
struct Needed {
    context: Arc<Context>,
    bytes: u64,
}

/// Bytes of the host that a chunk has, or is expected to need when it leaves.
fn of_chunk(chunk: &Chunk) -> u64 {
    if chunk.host.is_empty() {
        return chunk.physical.map_or(0, |_| chunk.bytes);
    }
    let zeros = chunk.host.iter().filter(|copy| **copy == HostCopy::Zero).count();
    chunk.bytes - zeros as u64 * GRANULE
}

/// The host memory that mapped memory may need, by context.
fn needed_by_context() -> Vec<Needed> {
    let mut all: Vec<Needed> = Vec::new();
    allocations::each_mapped(|allocation| {
        // Memory that cannot leave needs none.
        let Some(mapped) = allocation.mapped.as_ref().filter(|mapped| !mapped.is_pinned()) else { return };
        let (context, bytes) =
            (allocation.context_to_move_in(), mapped.lock().iter().map(of_chunk).sum::<u64>());
        match all.iter_mut().find(|needed| Arc::ptr_eq(&needed.context, &context)) {
            Some(needed) => needed.bytes += bytes,
            None => all.push(Needed { context, bytes: OTHERS + bytes }),
        }
    });
    all
}

/// The work of the background thread; each includes the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Task {
    Nothing,
    /// Give back the memory that is not needed.
    Tidy,
    /// Make the memory that is needed as well.
    Prepare,
}

/// The orders to the background thread. All of it is behind one lock, so no order comes between the thread's last look and its end.
#[derive(Debug)]
struct Orders {
    task: Task,
    /// Bytes of the scheduler's memory that other programs lack.
    others_lack: u64,
    has_thread: bool,
}

static ORDERS: Mutex<Orders> = Mutex::new(Orders { task: Task::Nothing, others_lack: 0, has_thread: false });

/// Memory will soon have to leave the card: prepares the host's memory in the background. A failure costs time later.
pub(crate) fn foresee_eviction() {
    let mut any = false;
    allocations::each_mapped(|_| any = true);
    if any {
        order(Task::Prepare, 0);
    }
}

/// Gives unneeded memory of the host back in the background, if that may be a segment or more.
pub(super) fn tidy() {
    if host_pool::may_shrink() {
        order(Task::Tidy, 0);
    }
}

/// Other programs lack `bytes` of the host's memory that the scheduler has handed out. Gives back, in the background, this program's copies
/// there of memory that is on the card.
pub(crate) fn give_way(bytes: u64) {
    order(Task::Tidy, bytes);
}

fn order(task: Task, others_lack: u64) {
    if lifecycle::is_exiting() || lifecycle::is_forked() {
        return;
    }
    let mut orders = lock(&ORDERS);
    orders.task = orders.task.max(task);
    orders.others_lack = orders.others_lack.max(others_lack);
    let begins = !std::mem::replace(&mut orders.has_thread, true);
    drop(orders);
    if begins && !threads::spawn_worker("nvshare-pool", run_thread) {
        lock(&ORDERS).has_thread = false;
    }
}

/// The background thread. It ends when it has no more orders.
fn run_thread() {
    loop {
        let mut orders = lock(&ORDERS);
        let task = std::mem::replace(&mut orders.task, Task::Nothing);
        let others_lack = std::mem::take(&mut orders.others_lack);
        orders.has_thread = task != Task::Nothing;
        drop(orders);
        if others_lack > 0 {
            content::give_way(others_lack);
        }
        match task {
            Task::Nothing => return,
            Task::Tidy => give_back(),
            Task::Prepare => prepare(),
        }
    }
}

fn prepare() {
    let deadline = Instant::now() + KERNEL_IS_LATE;
    for Needed { context, .. } in needed_by_context() {
        while content::is_loading(&context) && Instant::now() < deadline && !lifecycle::is_exiting() {
            threads::sleep(Duration::from_millis(1));
        }
    }
    devices::used().for_each(content::guess);
    for Needed { context, bytes } in needed_by_context() {
        host_pool::grow_ahead(&context, bytes);
    }
    give_back();
}

fn give_back() {
    let needed = needed_by_context();
    host_pool::shrink_all(|context| {
        let of = needed.iter().find(|needed| Arc::ptr_eq(&needed.context, context));
        of.map_or(OTHERS, |needed| needed.bytes)
    });
}
