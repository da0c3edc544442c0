//! The process's devices, and the account of its memory on each.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nvshare_client::machine::RETURN_PATIENCE;
use nvshare_client::{Admission, Caller, DeviceFacts, DriverReserve, Kind, Patience, Refusal, Wait};
use nvshare_proto::env as names;
use nvshare_proto::units::MIB;
use nvshare_proto::{GpuUuid, MemoryMode, ThrottledLine};

use crate::driver;
use crate::driver::types::{
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    CUdevice, CUresult,
};
use crate::memory::quota::{self, QuotaCell};
use crate::process::config::Config;
use crate::process::lock::lock;
use crate::process::unwind::OnUnwind;
use crate::process::{bell, lifecycle, log};
use crate::work::gate;
use crate::work::used_devices;

/// One device of the process.
#[derive(Debug)]
pub(crate) struct Device {
    /// The program's own ordinal.
    pub(crate) ordinal: CUdevice,
    /// A process that is off a device can come back to another one of the same model.
    model: Model,
    /// Bytes of the device, as the driver reports them.
    total: u64,
    /// The memory mode on this device.
    pub(crate) memory: MemoryMode,
    /// Managed memory on the device is moved in bulk: pools may consist of it.
    pub(crate) managed_pools: bool,
    /// Bytes that were free on it when the process first used it.
    free_at_first: OnceLock<u64>,
    account: Mutex<Account>,
    /// Notified when room comes, is refused, or is not needed any more.
    changed: Condvar,
    /// Allocations and frees whose memory is charged, and not on the list.
    under_way: AtomicUsize,
    /// Bytes that nodes of graphs allocate here.
    graph_nodes: AtomicU64,
    /// The first pool that was asked for memory, by its handle; 0: the default pool.
    first_pool: OnceLock<usize>,
    /// Another pool was asked, too.
    several_pools: AtomicBool,
}

/// A device's bytes, its compute capability, and how many multiprocessors it has.
type Model = (u64, [c_int; 3]);

/// An allocation or a free whose memory is charged, and not on the list: it cannot be evicted.
#[derive(Debug)]
pub(crate) struct UnderWay(&'static Device);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::SeqCst);
    }
}

/// An allocation that waited for room, which has come: until this is dropped, the room is not given back as unused.
#[derive(Debug)]
#[must_use]
pub(crate) struct Awaited<'a> {
    device: &'a Device,
    /// Bytes that it waited for; 0: [another wait](Self::keep_need) goes on.
    bytes: u64,
}

impl Awaited<'_> {
    /// Another wait of the allocation goes on, or follows, as it lacks room still. Its need stays at the end of this one, so that those that wait
    /// beside it need not say anew what they need.
    pub(crate) fn keep_need(&mut self) {
        self.bytes = 0;
    }
}

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        self.device.end_waiting(self.bytes);
    }
}

/// A device's account, with this process's place in its tenant's page.
pub(crate) type Account = nvshare_client::Account<QuotaCell>;

static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
/// Whether these are all that the driver has.
static IS_COMPLETE: OnceLock<bool> = OnceLock::new();
/// Devices that the driver does not describe, and that have a limit. Nothing is admitted there, and the scheduler hears nothing of them.
static CLOSED: OnceLock<Vec<Device>> = OnceLock::new();

/// The devices, once [`discover`]ed.
pub(crate) fn all() -> impl Iterator<Item = &'static Device> {
    DEVICES.get().into_iter().flatten()
}

/// The devices that the program uses.
pub(crate) fn used() -> impl Iterator<Item = &'static Device> {
    all().filter(|device| used_devices::contains(device.ordinal))
}

/// The device of this ordinal, a closed one as well.
pub(crate) fn get(ordinal: CUdevice) -> Option<&'static Device> {
    all().chain(CLOSED.get().into_iter().flatten()).find(|device| device.ordinal == ordinal)
}

/// Whether all devices that the driver has are known.
pub(crate) fn are_complete() -> bool {
    IS_COMPLETE.get() == Some(&true)
}

/// The device of this UUID.
pub(crate) fn by_uuid(uuid: GpuUuid) -> Option<&'static Device> {
    all().find(|device| device.uuid() == uuid)
}

/// The GPUs behind the devices, in the order of the devices.
pub(crate) fn uuids() -> Vec<GpuUuid> {
    all().map(Device::uuid).collect()
}

/// Lets two GPUs change places: each device is the other GPU from now on. The process is off its cards.
pub(crate) fn change_places([from, to]: [GpuUuid; 2]) {
    let [Some(one), Some(other)] = [from, to].map(by_uuid) else { return };
    one.update_for_all(|account| account.set_gpu(to));
    other.update_for_all(|account| account.set_gpu(from));
}

/// The unused devices that are like the only one in use. None, if the driver has devices of which nothing is known.
pub(crate) fn alike() -> Vec<GpuUuid> {
    if !are_complete() {
        return Vec::new();
    }
    let facts = |device: &Device| (used_devices::contains(device.ordinal), device.model, device.uuid());
    alike_among(&all().map(facts).collect::<Vec<_>>())
}

/// Of devices that are in use or not, the others that are like the only one in use.
fn alike_among(devices: &[(bool, Model, GpuUuid)]) -> Vec<GpuUuid> {
    let mut used = devices.iter().filter(|(is_used, ..)| *is_used);
    let (Some((_, model, _)), None) = (used.next(), used.next()) else { return Vec::new() };
    let others = devices.iter().filter(|(is_used, other, _)| !is_used && other == model);
    others.map(|&(.., gpu)| gpu).collect()
}

/// Asks the driver for the process's devices, once. Needs `cuInit` to have succeeded.
pub(crate) fn discover(config: &Config) {
    DEVICES.get_or_init(|| {
        let count = driver::device_count().unwrap_or(0).max(0) as usize;
        let (mut devices, mut closed) = (Vec::new(), Vec::new());
        for index in 0..count {
            match identify(index) {
                Ok(identity) => devices.push(describe(index, identity, config)),
                Err(error) if config.limit(index).is_some() => {
                    log::error(format_args!(
                        "device {index} cannot be described: {error:?}; it has a limit, so the program gets no memory there"
                    ));
                    let device = describe(index, (index as CUdevice, GpuUuid([0; 16]), 0), config);
                    device.shut_out();
                    closed.push(device);
                }
                Err(error) => log::warn(format_args!("device {index}: {error:?}")),
            }
        }
        let _ = (IS_COMPLETE.set(devices.len() == count), CLOSED.set(closed));
        devices
    });
}

/// The ordinal of a device, its GPU, and its bytes.
fn identify(index: usize) -> Result<(CUdevice, GpuUuid, u64), CUresult> {
    if index >= used_devices::MAX_DEVICES {
        return Err(CUresult::NOT_SUPPORTED);
    }
    let ordinal = driver::device(index as CUdevice)?;
    Ok((ordinal, GpuUuid(driver::device_uuid(ordinal)?), driver::device_total(ordinal)?))
}

/// A device. An attribute that the driver does not tell is 0, so that memory is not moved for which it is needed.
fn describe(index: usize, (ordinal, gpu, total): (CUdevice, GpuUuid, u64), config: &Config) -> Device {
    let attribute = |attribute| driver::device_attribute(ordinal, attribute).unwrap_or_default();
    let concurrent = attribute(CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS) != 0;
    let mut memory = config.memory;
    if memory == MemoryMode::Managed && !concurrent {
        log::warn(format_args!("device {index} cannot share managed memory; its memory is not moved"));
        memory = MemoryMode::Off;
    }
    if memory == MemoryMode::Swap {
        if attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == 0 {
            log::warn(format_args!("device {index} has no mappings of its own; its memory is not moved"));
            memory = MemoryMode::Off;
        } else {
            gate::expect_empty_addresses();
            if config.oversubscribe {
                log::warn(format_args!(
                    "{} has no effect with {}=swap: absent memory has no page faults that would bring it back",
                    names::ENABLE_SINGLE_OVERSUB,
                    names::MEMORY
                ));
            }
        }
    }
    let (limit, is_of_seat) = (config.limit(index), config.is_in_seat());
    let oversubscribe = config.oversubscribe && memory != MemoryMode::Swap;
    let terms = DeviceFacts { gpu, total, limit, is_of_seat, oversubscribe };
    let attributes = [
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    ];
    Device {
        ordinal,
        model: (total, attributes.map(attribute)),
        total,
        memory,
        managed_pools: concurrent && memory != MemoryMode::Off,
        free_at_first: OnceLock::new(),
        account: Mutex::new(Account::new(terms)),
        changed: Condvar::new(),
        under_way: AtomicUsize::new(0),
        graph_nodes: AtomicU64::new(0),
        first_pool: OnceLock::new(),
        several_pools: AtomicBool::new(false),
    }
}

/// Least room that counts as lost when the driver lacks memory, in bytes: about what a context takes.
const LOST_AT_ONCE: u64 = 256 * MIB;

/// While the client runs, an allocation waits this long for room; then the program gets out of memory.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longer than the session waits for the answer of a scheduler. If there is no scheduler, the session says so at once.
const FIRST_CONTACT: Duration = Duration::from_secs(6);
/// A seat's process waits this long for a scheduler that does not answer: others may have the seat's limit.
const SEATS_FIRST_CONTACT: Duration = Duration::from_secs(60);

impl Device {
    /// The GPU behind the device.
    pub(crate) fn uuid(&self) -> GpuUuid {
        self.lock().gpu()
    }

    /// Whether the driver makes descriptors of files of the device's physical memory.
    pub(crate) fn shares_by_descriptor(&self) -> bool {
        let attribute = CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
        driver::device_attribute(self.ordinal, attribute).is_ok_and(|supported| supported != 0)
    }

    /// Bytes that may be allocated on the device: the limit of the environment, or of an administrator.
    pub(crate) fn allocation_limit(&self) -> Option<u64> {
        self.lock().allocation_limit()
    }

    /// The account, as it is now.
    pub(crate) fn account(&self) -> Account {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, Account> {
        lock(&self.account)
    }

    /// Changes the account, and wakes the threads that wait for a change.
    pub(crate) fn update<T>(&self, change: impl FnOnce(&mut Account) -> T) -> T {
        let mut account = self.lock();
        let result = change(&mut account);
        let waiting = account.is_anybody_waiting();
        drop(account);
        if waiting {
            self.changed.notify_all();
        }
        result
    }

    /// Changes the account, and wakes every waiting thread, whatever it waits for.
    pub(crate) fn update_for_all<T>(&self, change: impl FnOnce(&mut Account) -> T) -> T {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        result
    }

    /// Notes how much memory is free, the first time. A context of the device must be current.
    pub(crate) fn note_free_at_first(&self) {
        self.free_at_first.get_or_init(|| driver::free_memory().unwrap_or(self.total));
    }

    /// Whether the card has `bytes` more for a process without a scheduler, for which nobody makes room. The driver may keep
    /// freed memory and report it as used. So it is enough if the bytes fit into what was free at first, or into what is free
    /// now.
    pub(crate) fn has_it_alone(&self, bytes: u64) -> bool {
        let first = self.free_at_first.get().copied().unwrap_or(self.total);
        if self.lock().fits_alone(bytes, first) {
            return true;
        }
        // The library may not know yet whether there is a scheduler.
        self.wait_for_capacity();
        self.lock().capacity().is_some() || driver::free_memory().is_ok_and(|free| bytes <= free)
    }

    /// Notes that a graph allocates this many bytes here when it runs.
    pub(crate) fn note_graph_node(&self, bytes: u64) {
        self.graph_nodes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The bytes that all graphs allocate here, also those that have ended: no graph takes more.
    pub(crate) fn bytes_of_graph_nodes(&self) -> u64 {
        self.graph_nodes.load(Ordering::Relaxed).min(self.total)
    }

    /// Notes that a pool is asked for memory, by its handle; 0: the default pool. Returns whether no other one was asked so far.
    pub(crate) fn note_pool(&self, pool: usize) -> bool {
        if *self.first_pool.get_or_init(|| pool) != pool {
            self.several_pools.store(true, Ordering::Relaxed);
        }
        !self.several_pools.load(Ordering::Relaxed)
    }

    /// Notes that an allocation is made that is charged, or one is freed, until the result is dropped.
    pub(crate) fn begin_change(&'static self) -> UnderWay {
        self.under_way.fetch_add(1, Ordering::SeqCst);
        UnderWay(self)
    }

    /// Whether memory is charged, and not on the list.
    pub(crate) fn is_changing(&self) -> bool {
        self.under_way.load(Ordering::SeqCst) > 0
    }

    /// See [`Account::admit`]. The allocation is [under way](Self::is_changing) from before it is charged, so that an eviction finds
    /// what it finds charged.
    ///
    /// # Errors
    /// Out of memory when it exceeds the limit or the GPU; the account is unchanged.
    pub(crate) fn admit(
        &'static self,
        bytes: u64,
        kind: Kind,
        kept: u64,
        caller: Caller,
    ) -> Result<(Admission, UnderWay), CUresult> {
        let under_way = self.begin_change();
        let admitted = self.lock().admit(bytes, kind, kept, caller);
        admitted.map(|admission| (admission, under_way)).map_err(|refusal| {
            self.say_refused(bytes, refusal);
            CUresult::OUT_OF_MEMORY
        })
    }

    /// Says why an allocation is refused that does not [fit alone](Self::has_it_alone).
    pub(crate) fn say_full(&self, bytes: u64) {
        let free = driver::free_memory().unwrap_or_default();
        // Whole MiB: a text with fractions would be allocated.
        let [bytes, free] = [bytes.div_ceil(MIB), free / MIB];
        say_of_refusal(format_args!(
            "an allocation of {bytes} MiB is refused: no scheduler makes room, and {free} MiB of the GPU are free"
        ));
    }

    /// Says which limit refuses an allocation.
    fn say_refused(&self, bytes: u64, refusal: Refusal) {
        let (used, most, full) = match refusal {
            Refusal::Own { used, most } if most < self.total => (used, most, "the process's limit"),
            Refusal::Own { used, most } => (used, most, "the GPU"),
            Refusal::Tenants { used, limit } => (used, limit, "the limit of the program's processes"),
        };
        // As above.
        let [bytes, used, most] = [bytes, used, most].map(|bytes| bytes.div_ceil(MIB));
        say_of_refusal(format_args!(
            "an allocation of {bytes} MiB is refused: {full} has {most} MiB, and {used} MiB are in use"
        ));
    }

    /// Shares the limit with the tenant's other processes from now on, or stops doing so.
    pub(crate) fn share_quota(&self, page: Option<quota::MappedPage>) {
        self.update(|account| account.share_limit(page.and_then(|page| page.cell(account.gpu()))));
    }

    /// Takes an allocation out of the account, `charged` bytes of which were charged.
    pub(crate) fn release(&self, bytes: u64, charged: u64, kind: Kind) {
        self.update(|account| account.release(bytes, charged, kind));
    }

    /// Sets the driver's reserve as it was measured after the account had `known`. False: that has changed since then. Bytes that an
    /// allocation has taken from it would count twice, and bytes that were freed not at all.
    pub(crate) fn set_reserve_unless_changed(&self, known: DriverReserve, reserve: DriverReserve) -> bool {
        self.update(|account| {
            let is_same = account.reserve() == known;
            if is_same {
                account.set_reserve(reserve);
            }
            is_same
        })
    }

    /// Sets the driver's reserve on the card.
    pub(crate) fn set_reserve(&self, reserve: DriverReserve) {
        self.update(|account| account.set_reserve(reserve));
    }

    /// Waits until there may be room for `bytes`. Returns None if there will be none. The caller drops the result once it has
    /// taken the room.
    ///
    /// `ask` tells the session of the need.
    pub(crate) fn wait_for_room(&self, bytes: u64, wait: Wait, ask: impl FnOnce()) -> Option<Awaited<'_>> {
        if !self.lock().begin_waiting(bytes, wait) {
            return Some(Awaited { device: self, bytes });
        }
        // The thread may be cancelled while it tells the session.
        let undo = OnUnwind::new(|| self.end_waiting(bytes));
        ask();
        undo.done();
        let mut account = self.lock();
        // A parked client waits for its turn, which may take long. A running client is served or refused soon.
        let mut patience = Patience::new(PATIENCE);
        while account.goes_on_waiting(bytes, wait)
            && let Some(part) = patience.next_part()
        {
            let (was_holding, begin) = (account.is_holding(), Instant::now());
            (account, _) = self.changed.wait_timeout(account, part).unwrap_or_else(PoisonError::into_inner);
            if was_holding && account.is_holding() {
                patience.waited(begin.elapsed());
            }
        }
        let is_in_vain = account.is_refused(bytes) || patience.next_part().is_none();
        drop(account);
        // A wait in vain ends here, as this is dropped.
        Some(Awaited { device: self, bytes }).filter(|_| !is_in_vain)
    }

    /// An allocation that waited for `bytes` does not wait any more. The scheduler hears of it at once, if it knows of a need: others would
    /// leave for nothing.
    fn end_waiting(&self, bytes: u64) {
        let is_news = self.update(|account| {
            let lacked = account.lacking();
            account.end_waiting(bytes);
            account.lacking() != lacked
        });
        if is_news {
            bell::ring();
        }
    }

    /// Whether the scheduler gives the room on the card.
    pub(crate) fn is_room_given(&self) -> bool {
        let account = self.lock();
        account.capacity().is_some() && account.is_metered()
    }

    /// The driver has no memory for `bytes`, though the account had room. Contexts that are not measured yet may have it, or a
    /// process without the library. Some room counts as lost then, and the scheduler is asked for other room. False: there is
    /// no scheduler to ask.
    ///
    /// `ask` tells the session.
    pub(crate) fn lose_room(&self, bytes: u64, ask: impl FnOnce()) -> bool {
        let is_lost = self.update(|account| {
            let is_given = account.capacity().is_some() && account.is_metered();
            if is_given {
                account.lose(bytes.max(LOST_AT_ONCE));
            }
            is_given
        });
        if is_lost {
            static LOST: ThrottledLine = ThrottledLine::new(log::warn);
            LOST.say(format_args!(
                "the GPU has less memory for this program than the scheduler has given: another program has to leave"
            ));
            ask();
        }
        is_lost
    }

    /// The driver has no memory for `bytes`, and no room is counted. Waits for the scheduler, if it was lost a short time ago and may
    /// come back. Returns whether it did: it may have come back.
    pub(crate) fn wait_for_scheduler(&self, bytes: u64) -> bool {
        let account = self.lock();
        let is_expected = |account: &mut Account| account.is_scheduler_expected() && !lifecycle::is_exiting();
        if !account.is_scheduler_expected() {
            return false;
        }
        log::info(format_args!("an allocation of {bytes} bytes waits for the scheduler"));
        // The session says when the wait is over.
        drop(self.changed.wait_timeout_while(account, 2 * RETURN_PATIENCE, is_expected));
        true
    }

    /// Waits, for a short time, until the scheduler has sent the capacity, or it is known that there is no scheduler.
    pub(crate) fn wait_for_capacity(&self) {
        self.wait_while(FIRST_CONTACT, Account::is_capacity_awaited);
    }

    /// Waits until it is known whether others share the limit, if there is one. A seat's process that does not learn it in time gets
    /// nothing of the limit until the scheduler answers.
    pub(crate) fn wait_for_limit(&self) {
        if !self.account().is_limit_of_seat() {
            self.wait_while(FIRST_CONTACT, Account::is_limit_awaited);
        } else if self.wait_while(SEATS_FIRST_CONTACT, Account::is_limit_awaited) {
            log::error(format_args!(
                "the scheduler has not said in {} s which processes share the limit of this container; \
                 the process gets no memory until it does",
                SEATS_FIRST_CONTACT.as_secs()
            ));
            self.shut_out();
        }
    }

    /// Waits until the condition ends, for this long at most; returns whether it still holds.
    fn wait_while(&self, most: Duration, is_unknown: impl Fn(&Account) -> bool) -> bool {
        let wait = |account: &mut Account| is_unknown(account);
        self.changed.wait_timeout_while(self.lock(), most, wait).is_ok_and(|(_, result)| result.timed_out())
    }

    /// Gives the process no more memory until it is [let in](Self::let_in).
    pub(crate) fn shut_out(&self) {
        self.update_for_all(Account::shut_out);
    }

    /// Gives the process, which the scheduler has registered, as much memory as its limit allows.
    pub(crate) fn let_in(&self) {
        self.update_for_all(Account::let_in);
    }

    /// Stops counting room, as there is no other client.
    pub(crate) fn stop_metering(&self) {
        self.update_for_all(Account::stop_metering);
    }

    /// Bytes of room that are lacking now.
    pub(crate) fn lacking(&self) -> u64 {
        self.lock().lacking()
    }

    /// Bytes of unused room.
    pub(crate) fn unused(&self) -> u64 {
        self.lock().unused()
    }

    /// Whether the scheduler's figure of allocated bytes is too old.
    pub(crate) fn is_usage_stale(&self) -> bool {
        self.lock().is_usage_stale()
    }

    /// Has the session tell the scheduler how much is allocated, if its figure is too old.
    pub(crate) fn tell_of_usage(&self) {
        if self.is_usage_stale() {
            bell::ring();
        }
    }
}

/// Says that an allocation within the limits finds no memory on the GPU. The driver is not asked for the free bytes: that may wait for work,
/// and an allocation in stream order waits for none.
pub(crate) fn say_crowded(bytes: u64) {
    let bytes = bytes.div_ceil(MIB);
    say_of_refusal(format_args!(
        "an allocation of {bytes} MiB is refused: other programs keep their memory on the GPU"
    ));
}

/// Says why an allocation is refused. A process warns of its first one alone: some programs find the end of the memory by trying.
fn say_of_refusal(text: std::fmt::Arguments<'_>) {
    static HAS_WARNED: AtomicBool = AtomicBool::new(false);
    let say = if HAS_WARNED.swap(true, Ordering::Relaxed) { log::info } else { log::warn };
    say(text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_process_of_one_device_has_others_like_it() {
        let [a, b, c] = [1, 2, 3].map(|number| GpuUuid([number; 16]));
        let (small, large) = ((1 << 30, [7, 5, 40]), (2 << 30, [7, 5, 40]));
        for (devices, others) in [
            (vec![(true, small, a), (false, small, b), (false, large, c)], vec![b]),
            (vec![(false, small, a), (true, small, b), (false, small, c)], vec![a, c]),
            (vec![(true, small, a), (true, small, b), (false, small, c)], vec![]),
            (vec![(false, small, a), (false, small, b)], vec![]),
            (vec![(true, small, a)], vec![]),
        ] {
            assert_eq!(alike_among(&devices), others, "{devices:?}");
        }
    }
}
