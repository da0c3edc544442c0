//! The connection to the scheduler, and the thread that keeps it.
//!
//! The library starts no thread before the program first allocates memory or submits work. Then there are two: this one reads
//! and writes frames and does what [`nvshare_client::session`] says; the other moves memory ([`crate::memory::mover`]).
//! A third begins when the program first shares memory ([`crate::process::answering`]).

mod report;
mod wire;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::{Mutex, Once};
use std::time::{Duration, Instant};

use nvshare_client::MoverOrder;
use nvshare_client::launch_window::InFlight;
use nvshare_client::session::{Done, Host, Session};
use nvshare_proto::pace::RECONNECT_EVERY;
use nvshare_proto::{
    ClientMessage, ComputeLimit, Counters, GpuUuid, HandOverPhase, MemoryMode, NO_PLACE, PhaseTime, Register,
    Reply, Request, SchedulerMessage, VERSION, Wishes,
};

use crate::driver;
use crate::memory::backing::swap;
use crate::memory::devices::{self, Account, Device};
use crate::memory::exports;
use crate::memory::mapping::supply;
use crate::memory::mover;
use crate::memory::plain;
use crate::memory::sleep;
use crate::memory::{quota, sharers};
use crate::process::config::Config;
use crate::process::lifecycle::{self, AtExit};
use crate::process::lock::lock;
use crate::process::{answering, bell, config, counters, log, phases, threads};
use crate::work::gate;
pub(crate) use wire::TenantPage;
use wire::{End, Wire};

/// Longest wait until an eviction that is foreseen is prepared for.
const FORESIGHT_IS_LATE: Duration = Duration::from_millis(5);

/// A process that the scheduler refuses asks it again after this time.
const REFUSED_EVERY: Duration = Duration::from_secs(60);

/// Results of the mover that the session has not taken in yet, and since when they are there.
static DONE: Mutex<Vec<(Done, Instant)>> = Mutex::new(Vec::new());

/// Asks the scheduler for the page of this process's tenant, once and without a session.
pub(crate) fn ask_for_page() -> TenantPage<quota::MappedPage> {
    // It connects, writes, reads and closes, on a thread of the program.
    let _whole = threads::Uncancelled::begin();
    match wire::ask_for_page(config::run()) {
        TenantPage::Page((row, descriptor)) => {
            quota::MappedPage::map(&descriptor, row as usize).map_or(TenantPage::NoAnswer, TenantPage::Page)
        }
        TenantPage::None => TenantPage::None,
        TenantPage::NoAnswer => TenantPage::NoAnswer,
    }
}

/// Starts the session: closes the gate, asks the driver for the devices, and starts the threads. Later calls do nothing.
pub(crate) fn start() {
    static START: Once = Once::new();
    if START.is_completed() || driver::device_count().is_err() {
        return;
    }
    threads::look_up();
    START.call_once(|| {
        let Ok(config) = config::get() else {
            // `cuInit` has failed. If the program goes on nevertheless, the library does nothing.
            gate::open(InFlight::Unbounded);
            return;
        };
        devices::discover(config);
        lifecycle::watch_forks(in_forked_child);
        gate::prepare();
        gate::close();
        let started =
            threads::spawn("nvshare-mover", || mover::run(report)) && threads::spawn("nvshare-session", run);
        if started {
            let last_words = wire::send_counters;
            lifecycle::act_at_exit(AtExit {
                last_words,
                nobody_inside: gate::nobody_inside,
                wake: gate::wake,
            });
        } else {
            // Nobody asks the scheduler how much of a seat's limit others have.
            let is_shut_out = config.is_in_seat();
            let so = if is_shut_out { ", without memory of its seat's limit" } else { "" };
            log::warn(format_args!("cannot start threads; the program runs as if alone{so}"));
            devices::all().for_each(Device::stop_metering);
            devices::all().filter(|_| is_shut_out).for_each(Device::shut_out);
            gate::open(InFlight::Unbounded);
        }
    });
}

/// In a forked child: everything passes the gate, and the connection is the parent's.
fn in_forked_child() {
    gate::after_fork_in_child();
    wire::close_after_fork();
    bell::close();
    exports::close_after_fork();
    answering::close_after_fork();
}

fn report(done: Done) {
    lock(&DONE).push((done, Instant::now()));
    bell::ring();
}

/// The thread's life.
fn run() {
    let mut thread = Thread {
        session: Session::new(Duration::ZERO),
        begin: Instant::now(),
        library: Library {
            wire: None,
            version: VERSION,
            broken: None,
            reconnects: false,
            foresees_eviction: false,
            may_open_since: None,
        },
        next_attempt: Instant::now(),
        seat_limits: BTreeMap::new(),
        registered: false,
        lost_for: None,
    };
    loop {
        thread.turn();
    }
}

/// The limit of a device in bytes, as the environment and the seat have it.
fn limit_of(config: &Config, device: &Device) -> Option<u64> {
    config.limit(usize::try_from(device.ordinal).ok()?)
}

/// The session's thread: it waits for events and passes them to the session.
struct Thread {
    session: Session,
    /// When the session's time began.
    begin: Instant,
    library: Library,
    next_attempt: Instant,
    /// The last limit of each device that was the seat's, in bytes. An administrator's own limit is not among them, and stays.
    seat_limits: BTreeMap<GpuUuid, Option<u64>>,
    /// Whether a scheduler has registered the process, now or before.
    registered: bool,
    /// Why the last connection was lost, until a scheduler answers again: the same reason is not logged each second.
    lost_for: Option<String>,
}

impl Thread {
    /// Waits until something happens, and handles it.
    ///
    /// An eviction that was foreseen before the wait is prepared for at the end: this starts a thread, and nobody waits for it.
    /// The scheduler, which may just have been told that the gate is open, runs sooner when this thread waits.
    fn turn(&mut self) {
        self.connect_if_due();
        let timeout = self.timeout();
        let foresaw_eviction = self.library.foresees_eviction;
        let readable = wire::wait(self.library.wire.as_ref(), timeout);
        if readable {
            self.read();
        }
        let done = std::mem::take(&mut *lock(&DONE));
        for (done, at) in done {
            if matches!(done, Done::Restored { .. }) {
                self.library.may_open_since = Some(at);
            }
            self.tell(|session, library, now| session.done(library, done, now));
        }
        for message in supply::take_messages() {
            self.tell(|_, library, _| library.say(message));
        }
        gate::forget_request();
        self.tell(Session::look);
        if foresaw_eviction && std::mem::take(&mut self.library.foresees_eviction) {
            swap::foresee_eviction();
        }
    }

    /// Tells the session something, and then handles what happened to the connection meanwhile.
    fn tell<T>(&mut self, what: impl FnOnce(&mut Session, &mut Library, Duration) -> T) -> T {
        let told = what(&mut self.session, &mut self.library, self.begin.elapsed());
        self.library.flush();
        if std::mem::take(&mut self.library.reconnects) {
            self.next_attempt = Instant::now();
        }
        if let Some(why) = self.library.broken.take() {
            self.lose(&why);
        }
        told
    }

    fn timeout(&self) -> Option<Duration> {
        let reconnect =
            self.library.wire.is_none().then(|| self.next_attempt.saturating_duration_since(Instant::now()));
        let look = self.session.next_look(&self.library, self.begin.elapsed());
        let foreseen = self.library.foresees_eviction.then_some(FORESIGHT_IS_LATE);
        [look, reconnect, foreseen].into_iter().flatten().min()
    }

    fn connect_if_due(&mut self) {
        if self.library.wire.is_some() || Instant::now() < self.next_attempt {
            return;
        }
        self.next_attempt = Instant::now() + RECONNECT_EVERY;
        match Wire::connect(self.library.version) {
            Ok(wire) => {
                self.library.wire = Some(wire);
                // It may change the limits, which are registered.
                let asked = self.ask_for_share();
                let (gate, usage) = self.tell(|session, library, now| session.register(library, now));
                let register = Register {
                    pid: std::process::id(),
                    name: program_name(),
                    memory: config::get().map_or(MemoryMode::Off, |config| config.memory),
                    gate,
                    returns: self.registered,
                    run: config::run(),
                    usage,
                    asked,
                };
                self.tell(|_, library, _| library.send(&Request::Register(register)));
                if let Some(held) = supply::on_registered() {
                    self.tell(|_, library, _| library.say(held));
                }
            }
            Err(error) => {
                log::debug(format_args!("{}: {error}", config::socket().display()));
                // There may be a scheduler by which others share the limit.
                if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) {
                    devices::all().for_each(Device::shut_out);
                }
                // A full queue is a scheduler's: many programs start at once, or it is stopped.
                if error.kind() == ErrorKind::WouldBlock {
                    self.tell(Session::put_off);
                } else {
                    self.tell(Session::found_nobody);
                }
            }
        }
    }

    /// The share of the GPUs' time that the environment, or the seat, asks for.
    ///
    /// A seat may have other limits by now than those that the process knows: an old one would look like a wish of its own.
    fn ask_for_share(&mut self) -> Wishes {
        let Ok(first) = config::get() else { return Wishes::default() };
        let now = first.in_its_seat_now();
        if let Some(now) = &now {
            for device in devices::all() {
                let (before, limit) = (limit_of(first, device), limit_of(now, device));
                let before = self.seat_limits.insert(device.uuid(), limit).unwrap_or(before);
                device.update_for_all(|account| {
                    if account.allocation_limit() == before {
                        account.set_allocation_limit(limit);
                    }
                });
            }
        }
        let config = now.as_ref().unwrap_or(first);
        let limit = |device: &Device| {
            let percent = config.compute_limit(usize::try_from(device.ordinal).ok()?)?;
            Some(ComputeLimit { gpu: device.uuid(), percent })
        };
        Wishes { compute: devices::all().filter_map(limit).collect(), ..config.asked() }
    }

    /// The scheduler has told a limit: it is the seat's if the seat's file has it, which is written first.
    fn note_limit(&mut self, gpu: GpuUuid) {
        let now = config::get().ok().and_then(Config::in_its_seat_now);
        let told = devices::all().find(|device| device.uuid() == gpu);
        if let (Some(now), Some(device)) = (now, told) {
            let limit = limit_of(&now, device);
            if device.allocation_limit() == limit {
                self.seat_limits.insert(gpu, limit);
            }
        }
    }

    fn read(&mut self) {
        let Some(wire) = &mut self.library.wire else { return };
        let replies = wire.receive();
        let (replies, end) = match replies {
            Ok(replies) => (replies, None),
            Err((replies, end)) => (replies, Some(end)),
        };
        for reply in replies {
            // Messages of a lost connection are not valid any more.
            if self.library.wire.is_none() {
                return;
            }
            match reply {
                Reply::Client(SchedulerMessage::Quota { row }) => {
                    if let Err(why) = self.share_quota(row) {
                        return self.lack_quota(&why);
                    }
                }
                Reply::Client(SchedulerMessage::HostMemory { offered, segments }) => {
                    let passed = match &mut self.library.wire {
                        Some(wire) if !segments.is_empty() => wire.take_passed(),
                        _ => Vec::new(),
                    };
                    supply::on_answer(offered, segments, passed);
                }
                // To give memory back takes calls of the driver.
                Reply::Client(SchedulerMessage::HostShort { .. }) if self.session.is_asleep() => {}
                Reply::Client(SchedulerMessage::HostShort { bytes }) => {
                    swap::give_way(bytes);
                }
                Reply::Client(message) => {
                    self.lost_for = None;
                    self.registered = true;
                    if matches!(message, SchedulerMessage::Registered { .. }) {
                        devices::all().for_each(Device::let_in);
                    }
                    log::debug(format_args!("received {message:?}"));
                    if matches!(message, SchedulerMessage::LockOk { .. }) {
                        self.library.may_open_since = Some(Instant::now());
                    }
                    let limited = match &message {
                        SchedulerMessage::Limit(limit) => Some(limit.gpu),
                        _ => None,
                    };
                    self.tell(|session, library, now| session.hear(library, message, now));
                    if let Some(gpu) = limited {
                        self.note_limit(gpu);
                    }
                }
                Reply::Refused { reason } => {
                    self.refused(&reason);
                }
                Reply::Admin(_) => {}
            }
        }
        match end {
            // It has refused the first frame, and registers the process on another connection.
            Some(End::Older { version }) if self.library.wire.is_some() => {
                log::info(format_args!(
                    "the scheduler is older than this library, which goes on in protocol version {version}"
                ));
                self.library.version = version;
                self.tell(|_, library, _| library.reconnect());
            }
            Some(End::Lost(why)) if self.library.wire.take().is_some() => self.lose(&why),
            _ => {}
        }
    }

    /// The scheduler has refused the process. In a seat whose places are taken, others have the seat's limit.
    fn refused(&mut self, reason: &str) {
        let is_shut_out = reason == NO_PLACE && config::get().is_ok_and(Config::is_in_seat);
        let so = if is_shut_out { "; all places of its seat are taken, so it gets no memory" } else { "" };
        log::error(format_args!("the scheduler refuses this process: {reason}{so}"));
        if is_shut_out {
            devices::all().for_each(Device::shut_out);
        }
        self.next_attempt = Instant::now() + REFUSED_EVERY;
    }

    /// The process shares its limits with others of its tenant.
    fn share_quota(&mut self, row: u32) -> Result<(), String> {
        let passed = self.library.wire.as_mut().and_then(|wire| wire.take_passed().pop());
        let descriptor = passed.ok_or("the process has no descriptor left for it")?;
        let page = quota::MappedPage::map(&descriptor, row as usize).map_err(|error| error.to_string())?;
        devices::all().for_each(|device| device.share_quota(Some(page)));
        Ok(())
    }

    /// The process cannot know what others have of a limit that it shares with them: it gets no memory until it can.
    fn lack_quota(&mut self, why: &str) {
        devices::all().for_each(Device::shut_out);
        self.library.wire = None;
        self.next_attempt = Instant::now() + RECONNECT_EVERY;
        self.lose(&format!("it cannot follow the limits that it shares, and gets no memory of them: {why}"));
    }

    /// The connection is gone.
    fn lose(&mut self, why: &str) {
        supply::on_connection_lost();
        // The scheduler takes back what this process had of the tenant's limit.
        devices::all().for_each(|device| device.share_quota(None));
        if self.lost_for.as_deref() != Some(why) {
            log::warn(format_args!("connection to the scheduler lost: {why}; the program goes on"));
            self.lost_for = Some(why.to_owned());
        }
        self.next_attempt = self.next_attempt.max(Instant::now() + Duration::from_millis(100));
        // The next scheduler may be newer.
        self.library.version = VERSION;
        self.tell(Session::lost);
    }
}

/// The library, as the session uses it.
struct Library {
    wire: Option<Wire>,
    /// The protocol's version in which the next connection begins.
    version: u16,
    /// Why the connection ended, until the session is told.
    broken: Option<String>,
    /// Whether to connect again at once.
    reconnects: bool,
    /// Whether memory will have to leave the card after this turn, and the host's memory for it is not prepared yet.
    foresees_eviction: bool,
    /// When the lock was granted, or memory last came back under it: nothing else is waited for.
    may_open_since: Option<Instant>,
}

impl Library {
    fn send(&mut self, request: &Request) {
        let put = self.wire.as_mut().map(|wire| wire.put(request));
        self.note(put);
    }

    /// Sends what was said. Words that the session says at once go out at once.
    fn flush(&mut self) {
        let sent = self.wire.as_mut().map(Wire::flush);
        self.note(sent);
    }

    fn note(&mut self, outcome: Option<Result<(), String>>) {
        if let Some(Err(error)) = outcome {
            self.wire = None;
            self.broken = Some(error);
        }
    }
}

impl Host for Library {
    type TenantQuota = quota::QuotaCell;

    fn used(&self) -> Vec<GpuUuid> {
        devices::used().map(Device::uuid).collect()
    }

    fn all(&self) -> Vec<GpuUuid> {
        devices::uuids()
    }

    fn account(&self, gpu: GpuUuid) -> Option<Account> {
        devices::by_uuid(gpu).map(Device::account)
    }

    fn update<R>(&self, gpu: GpuUuid, change: impl FnOnce(&mut Account) -> R) -> Option<R> {
        devices::by_uuid(gpu).map(|device| device.update_for_all(change))
    }

    fn say(&mut self, message: ClientMessage) {
        log::debug(format_args!("sent {message:?}"));
        self.send(&Request::Client(message));
    }

    fn is_connected(&self) -> bool {
        self.wire.is_some()
    }

    fn reconnect(&mut self) {
        supply::on_connection_lost();
        log::debug(format_args!("registering again"));
        devices::all().for_each(|device| device.share_quota(None));
        self.wire = None;
        self.reconnects = true;
    }

    fn counters(&self) -> Counters {
        report::counters()
    }

    fn take_phases(&mut self, of: Option<GpuUuid>) -> Vec<PhaseTime> {
        phases::take(of)
    }

    fn close_gate(&mut self) {
        self.foresees_eviction = false;
        gate::close();
    }

    fn open_gate(&mut self, in_flight: InFlight) {
        gate::open(in_flight);
        if let Some(since) = self.may_open_since.take() {
            phases::note(HandOverPhase::Open, since.elapsed());
        }
    }

    fn bound(&mut self, in_flight: InFlight) {
        gate::bound(in_flight);
        self.foresees_eviction = in_flight == InFlight::Bounded;
    }

    fn is_nobody_inside(&self) -> bool {
        gate::nobody_inside()
    }

    fn is_anybody_asleep(&self) -> bool {
        gate::anybody_asleep()
    }

    fn has_lost_handle(&self) -> bool {
        plain::has_lost_handle()
    }

    fn elsewhere(&self) -> Vec<GpuUuid> {
        sleep::elsewhere()
    }

    fn change_places(&mut self, gpus: [GpuUuid; 2]) {
        log::info(format_args!("the process is to come back to {} instead of {}", gpus[1], gpus[0]));
        devices::change_places(gpus);
    }

    fn shares(&self) -> Vec<u64> {
        sharers::numbers()
    }

    fn is_anybody_at_door(&self) -> bool {
        gate::door::has_waiters()
    }

    fn submissions(&self) -> u64 {
        gate::totals().0
    }

    fn order(&mut self, order: MoverOrder) {
        mover::post(order);
    }

    fn cancel(&mut self) {
        mover::cancel();
    }

    fn is_evicting(&self) -> bool {
        mover::is_evicting()
    }

    fn progress(&self) -> u64 {
        mover::progress()
    }

    fn count_hand_over(&mut self) {
        counters::hand_over();
    }

    fn count_deferral(&mut self) {
        counters::deferral();
    }

    fn warn_alone(&mut self) {
        log::warn(format_args!(
            "no scheduler at {}; the program runs as if alone and joins when there is one",
            config::socket().display()
        ));
    }

    fn say_waiting(&mut self, patience: Duration) {
        log::warn(format_args!(
            "the scheduler at {} does not answer; the program waits for it, for {} s at most",
            config::socket().display(),
            patience.as_secs()
        ));
    }
}

fn program_name() -> String {
    // A program may have any bytes in its name, and the kernel cuts it after 15 of them.
    let name = std::fs::read("/proc/self/comm").unwrap_or_default();
    String::from_utf8_lossy(&name).trim().chars().take(64).collect()
}
