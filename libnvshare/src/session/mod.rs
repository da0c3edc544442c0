//! The connection to the scheduler, and the thread that keeps it.
//!
//! Nothing of this exists before the program first allocates memory or submits work. Then two threads do: this
//! one reads and writes frames and obeys ([`Machine`]), the other moves memory ([`crate::memory::mover`]).

mod wire;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use nvshare_client::machine::{Action, Input, Job, Machine};
use nvshare_proto::units::{GIB, MIB};
use nvshare_proto::{ClientMessage, MemoryMode, Register, Reply, Request, Room, SchedulerMessage};

use crate::driver;
use crate::memory::devices::{self, Account, Device};
use crate::memory::mover::{self, Done};
use crate::memory::quota;
use crate::process::{config, counters, lifecycle, log};
use crate::work::gate;
use wire::{Bell, Wire};

/// Wakes the session's thread.
static BELL: Bell = Bell::new();
/// Threads came to the closed gate.
static ASKED: AtomicBool = AtomicBool::new(false);
/// What the mover has done.
static DONE: Mutex<Vec<Done>> = Mutex::new(Vec::new());

/// Unused room beyond this goes back to the scheduler.
const MOST_UNUSED: u64 = 2 * GIB;
/// Freed memory is offered at once from this much on.
const OFFER_STEP: u64 = 64 * MIB;
/// Attempts to find a scheduler.
const RECONNECT_EVERY: Duration = Duration::from_secs(1);

/// Asks the scheduler for the page of this process's tenant, once and without a session: the page, or that there is
/// none because the tenant has no processes; `None`: nobody answers.
pub(crate) fn look() -> Option<Option<quota::Mapped>> {
    match wire::look(config::run())? {
        Some((row, descriptor)) => quota::Mapped::map(&descriptor, row as usize).ok().map(Some),
        None => Some(None),
    }
}

/// First contact: closes the gate, finds out about devices, and starts the threads. Later calls do nothing.
pub(crate) fn start() {
    static START: Once = Once::new();
    if START.is_completed() || driver::device_count().is_err() {
        return;
    }
    START.call_once(|| {
        let Ok(config) = config::get() else {
            // `cuInit` said no; a program that goes on nevertheless gets nothing by us.
            gate::open(false);
            return;
        };
        devices::discover(config);
        // Now, by a thread of the host: the session's own may not read the environment beside it.
        let _ = wire::path();
        crate::process::fork::watch();
        gate::prepare();
        gate::close();
        let started = spawn("nvshare-mover", || mover::run(report)) && spawn("nvshare-session", run);
        if started {
            lifecycle::watch();
        } else {
            log::warn(format_args!("threads cannot be started; the program runs as if alone"));
            devices::all().for_each(Device::unlimit);
            gate::open(false);
        }
    });
}

/// Starts a thread of ours that no signal of the host's is delivered to.
fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> bool {
    // SAFETY: signal sets are plain memory, filled before use; the thread's mask is put back as it was.
    unsafe {
        let mut all = std::mem::zeroed();
        let mut before = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(body);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        spawned.is_ok()
    }
}

/// Sends the counters a last time.
pub(crate) fn say_counters() {
    wire::send_counters();
}

/// A thread sleeps at the gate.
pub(crate) fn ask_for_lock() {
    if !ASKED.swap(true, Ordering::SeqCst) {
        wake();
    }
}

/// Something changed that the scheduler may have to know.
pub(crate) fn wake() {
    BELL.ring();
}

/// A device is in use from now on.
pub(crate) fn uses(device: &Device) {
    if device.mark_used() {
        wake();
    }
}

/// The calling thread's device is in use.
pub(crate) fn uses_current() {
    if let Ok(ordinal) = driver::current_device()
        && let Some(device) = devices::get(ordinal)
    {
        uses(device);
    }
}

/// Memory of a device was freed.
pub(crate) fn freed(device: &Device) {
    let unused = device.unused();
    if unused > MOST_UNUSED || (unused >= OFFER_STEP && !device.account().is_holding()) {
        wake();
    }
}

/// In a forked child: the connection is the parent's.
pub(crate) fn after_fork_in_child() {
    wire::close_after_fork();
    BELL.close();
}

fn report(done: Done) {
    DONE.lock().unwrap_or_else(PoisonError::into_inner).push(done);
    wake();
}

/// The thread's life.
fn run() {
    let mut session = Session {
        machine: Machine::new(Duration::ZERO),
        begin: Instant::now(),
        wire: None,
        next_attempt: Instant::now(),
        registered: false,
        told: Vec::new(),
    };
    loop {
        session.turn();
    }
}

struct Session {
    machine: Machine,
    /// The moment since when the machine counts time.
    begin: Instant,
    wire: Option<Wire>,
    next_attempt: Instant,
    /// A scheduler has heard of us, now or before.
    registered: bool,
    /// What the scheduler was told to be lacking, by device.
    told: Vec<(nvshare_proto::GpuUuid, u64)>,
}

impl Session {
    /// Waits until something happens, and deals with it.
    fn turn(&mut self) {
        self.connect_if_due();
        let timeout = self.timeout();
        let readable = wire::wait(self.wire.as_ref(), &BELL, timeout);
        if readable {
            self.read();
        }
        let done = std::mem::take(&mut *DONE.lock().unwrap_or_else(PoisonError::into_inner));
        for done in done {
            self.done(done);
        }
        ASKED.store(false, Ordering::SeqCst);
        // Also who came while the gate was open for a moment, and did not wake in time.
        if gate::anybody_asleep() {
            self.feed(Input::Asked);
        }
        self.tell_needs();
        let lacking = is_lacking();
        if self.machine.tick_every(lacking).is_some() {
            let (progress, submissions) = (mover::progress(), gate::totals().0);
            self.feed(Input::Tick { progress, submissions, lacking });
        }
    }

    fn timeout(&self) -> Option<Duration> {
        let reconnect =
            self.wire.is_none().then(|| self.next_attempt.saturating_duration_since(Instant::now()));
        [self.machine.tick_every(is_lacking()), reconnect].into_iter().flatten().min()
    }

    fn connect_if_due(&mut self) {
        if self.wire.is_some() || Instant::now() < self.next_attempt {
            return;
        }
        self.next_attempt = Instant::now() + RECONNECT_EVERY;
        match Wire::connect() {
            Ok(wire) => {
                self.wire = Some(wire);
                let memory = config::get().map_or(MemoryMode::Off, |config| config.memory);
                let register = Register {
                    pid: std::process::id(),
                    name: program_name(),
                    memory,
                    gate: self.machine.gate(),
                    returns: std::mem::replace(&mut self.registered, true),
                    run: config::run(),
                    usage: devices::used().map(Device::usage_to_register).collect(),
                };
                self.told = register.usage.iter().map(|usage| (usage.gpu, 0)).collect();
                self.feed(Input::Registering);
                self.send(&Request::Register(register));
            }
            Err(error) => {
                log::debug(format_args!("{error}"));
                self.feed(Input::Nobody);
            }
        }
    }

    fn read(&mut self) {
        let Some(wire) = &mut self.wire else { return };
        let replies = wire.receive();
        let (replies, error) = match replies {
            Ok(replies) => (replies, None),
            Err((replies, error)) => (replies, Some(error)),
        };
        for reply in replies {
            // What was said on a connection that is gone holds no more.
            if self.wire.is_none() {
                return;
            }
            match reply {
                Reply::Client(SchedulerMessage::Quota { row }) => self.share_quota(row),
                Reply::Client(message) => {
                    log::debug(format_args!("received {message:?}"));
                    self.feed(Input::Message(message));
                }
                Reply::Refused { reason } => {
                    log::error(format_args!("the scheduler refuses this process: {reason}"));
                    self.next_attempt = Instant::now() + Duration::from_secs(60);
                }
                Reply::Admin(_) => {}
            }
        }
        if let Some(error) = error {
            self.lose(&error);
        }
    }

    /// The process shares its limits with others of its tenant.
    fn share_quota(&mut self, row: u32) {
        let Some(descriptor) = self.wire.as_mut().and_then(Wire::take_passed) else { return };
        match quota::Mapped::map(&descriptor, row as usize) {
            Ok(page) => devices::all().for_each(|device| device.share_quota(Some(page))),
            Err(error) => log::warn(format_args!("the page of the limits cannot be mapped: {error}")),
        }
    }

    fn lose(&mut self, why: &str) {
        // What this process had is the scheduler's to take back.
        devices::all().for_each(|device| device.share_quota(None));
        if self.wire.take().is_some() {
            log::warn(format_args!("connection to the scheduler lost: {why}; the program goes on"));
            self.next_attempt = self.next_attempt.max(Instant::now() + Duration::from_millis(100));
            self.feed(Input::Lost);
        }
    }

    fn send(&mut self, request: &Request) {
        let Some(wire) = &mut self.wire else { return };
        if let Err(error) = wire.send(request) {
            self.lose(&error);
        }
    }

    fn say(&mut self, message: ClientMessage) {
        log::debug(format_args!("sent {message:?}"));
        self.send(&Request::Client(message));
    }

    fn done(&mut self, done: Done) {
        match done {
            Done::Drained(ticket) => self.feed(Input::Drained(ticket)),
            Done::Restored { lacking } => self.feed(Input::Restored { lacking }),
            Done::Quiet { submissions } => self.feed(Input::Quiet { submissions }),
            Done::Busy => self.feed(Input::Busy),
            Done::Evicted(gpu) => {
                // Before the use is said: that may be ahead of the room, and never behind it.
                let bytes = devices::by_uuid(gpu).map_or(0, |device| device.update(Account::take_made));
                self.tell_usage(gpu);
                if bytes > 0 {
                    self.say(ClientMessage::Room(Room { gpu, bytes }));
                }
            }
            Done::EvictionEnds { gpu, short } => {
                self.tell_usage(gpu);
                self.say(ClientMessage::Counters(counters::snapshot()));
                self.say(ClientMessage::Evicted { gpu, short });
            }
        }
    }

    fn feed(&mut self, input: Input) {
        for action in self.machine.handle(input, self.begin.elapsed()) {
            self.act(action);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Send(message) => {
                // With the lock goes what was asked for: who waits for room nevertheless asks again.
                if matches!(message, ClientMessage::LockReleased { .. }) {
                    self.told.iter_mut().for_each(|(_, lacking)| *lacking = 0);
                }
                self.say(message);
            }
            Action::Report => self.tell_everything(),
            Action::Close => {
                gate::close();
                devices::all().for_each(Device::let_go);
            }
            Action::Begin { anyway } => self.begin(anyway),
            Action::Bound(bounded) => gate::set_bounded(bounded),
            Action::Post(job) => mover::post(job),
            Action::Cancel => mover::cancel(),
            Action::TryIdle { submissions } => self.try_idle(submissions),
            Action::Give(Room { gpu, bytes }) => {
                if let Some(device) = devices::by_uuid(gpu) {
                    device.update(|account| account.give(bytes));
                    // Room of nothing: there is no more, and what is lacking still is no news.
                    self.now_told(device, if bytes == 0 { device.lacking() } else { 0 });
                }
            }
            Action::Refuse(gpu) => {
                if let Some(device) = devices::by_uuid(gpu) {
                    device.update(Account::refuse);
                    // What is lacking still, the scheduler knows.
                    self.now_told(device, device.lacking());
                }
            }
            Action::Capacity(Room { gpu, bytes }) => {
                if let Some(device) = devices::by_uuid(gpu) {
                    device.set_capacity(bytes);
                }
            }
            Action::Reconnect => {
                log::debug(format_args!("registering again"));
                devices::all().for_each(|device| device.share_quota(None));
                self.wire = None;
                self.next_attempt = Instant::now();
            }
            Action::Return { room, evict } => self.give_back(room, evict),
            Action::ReturnAll => self.return_unused(0),
            Action::Unlimit => devices::all().for_each(Device::unlimit),
            Action::Limit => devices::all().for_each(Device::limit),
            Action::CountHandOver => counters::hand_over(),
            Action::CountDeferral => counters::deferral(),
            Action::WarnAlone => log::warn(format_args!(
                "no scheduler at {}; the program runs as if alone and joins when there is one",
                wire::path().display()
            )),
        }
    }

    /// Opens the gate if all that is allocated may be touched.
    fn begin(&mut self, anyway: bool) {
        // Memory that is leaving may not be touched; and a device that is not held yet holds the others back: all or none.
        if !mover::is_evicting() && devices::all().all(|device| device.update(|account| account.hold(anyway)))
        {
            gate::open(false);
            self.feed(Input::Began);
        } else {
            devices::all().for_each(Device::let_go);
            self.feed(Input::StillAbsent);
        }
    }

    /// Closes the gate if nothing was submitted since all work was complete.
    fn try_idle(&mut self, submissions: u64) {
        let unchanged = || gate::nobody_inside() && gate::totals().0 == submissions;
        if !unchanged() {
            self.feed(Input::Busy);
            return;
        }
        gate::close();
        devices::all().for_each(Device::let_go);
        if unchanged() {
            self.feed(Input::WentIdle);
        } else if devices::all().all(|device| device.update(|account| account.hold(false))) {
            gate::open(true);
            self.feed(Input::Busy);
        } else {
            // Memory was allocated in the moment that the gate was closed.
            devices::all().for_each(Device::let_go);
            self.feed(Input::BusyAndAbsent);
        }
    }

    /// Obeys an EVICT.
    fn give_back(&mut self, Room { gpu, bytes }: Room, evict: bool) {
        let Some(device) = devices::by_uuid(gpu) else { return };
        let unused = device.update(|account| account.take_unused(bytes, !evict));
        self.tell_usage(gpu);
        if unused > 0 {
            self.say(ClientMessage::Room(Room { gpu, bytes: unused }));
        }
        if evict && unused < bytes {
            mover::post(Job::Evict(Room { gpu, bytes: bytes - unused }));
        } else {
            self.say(ClientMessage::Evicted { gpu, short: 0 });
        }
    }

    /// Gives unused room back beyond what is to be kept.
    fn return_unused(&mut self, keep: u64) {
        for device in devices::used() {
            let excess = device.unused().saturating_sub(keep);
            if excess > 0 {
                let bytes = device.update(|account| account.take_unused(excess, false));
                self.tell_usage(device.uuid);
                self.say(ClientMessage::Room(Room { gpu: device.uuid, bytes }));
            }
        }
    }

    /// Says what is new on each device: its use, what allocations wait for, what is not needed.
    fn tell_needs(&mut self) {
        if self.wire.is_none() {
            return;
        }
        for device in devices::used() {
            let gpu = device.uuid;
            let lacking = device.lacking();
            // The first usage also says that the device is in use from now on.
            let is_news = self.now_told(device, lacking);
            if is_news || device.is_usage_stale() {
                self.tell_usage(gpu);
                // Who needs nothing any more says so as well, or others would leave for nobody. What a restore lacks
                // is said by the restore.
                if lacking > 0 || is_news && !self.machine.is_restoring() {
                    self.say(ClientMessage::NeedRoom(Room { gpu, bytes: lacking }));
                }
            }
        }
        let keep = if self.machine.is_running() { MOST_UNUSED } else { u64::MAX };
        self.return_unused(if self.machine.is_parked() { 0 } else { keep });
    }

    /// The scheduler knows that this much is lacking on a device. True: that is news.
    fn now_told(&mut self, device: &Device, lacking: u64) -> bool {
        match self.told.iter_mut().find(|(told, _)| *told == device.uuid) {
            Some((_, told)) => std::mem::replace(told, lacking) != lacking,
            None => {
                self.told.push((device.uuid, lacking));
                true
            }
        }
    }

    fn tell_usage(&mut self, gpu: nvshare_proto::GpuUuid) {
        if let Some(device) = devices::by_uuid(gpu) {
            self.say(ClientMessage::Usage(device.usage()));
        }
    }

    fn tell_everything(&mut self) {
        for device in devices::used() {
            self.tell_usage(device.uuid);
        }
        self.say(ClientMessage::Counters(counters::snapshot()));
    }
}

/// Whether allocations wait for room.
fn is_lacking() -> bool {
    devices::used().any(|device| device.lacking() > 0)
}

fn program_name() -> String {
    let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    name.trim().chars().take(64).collect()
}
