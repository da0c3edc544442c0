//! The session: the machine and the accounts of the devices together, with the abilities of the library as a [`Host`].
//!
//! [`Session`] is told of events and calls its [`Host`], which sends messages to the scheduler, opens or closes the gate, and
//! orders moves of memory. It decides when the scheduler learns of which sums. The order of messages matters. A usage goes
//! before the room that it explains, so that the scheduler never takes room for free that is still charged.

use std::time::Duration;

use nvshare_proto::units::{GIB, MIB};
use nvshare_proto::{Amount, ClientMessage, Counters, Gate, GpuUuid, PhaseTime, SchedulerMessage, Usage};

use crate::account::{Absent, Account, TenantQuota};
use crate::launch_window::InFlight;
use crate::machine::{Action, Input, Machine, MoverOrder, Ticket};
use crate::sharing::Sharing;

/// Unused room beyond this goes back to the scheduler, in bytes.
const MAX_UNUSED: u64 = 2 * GIB;
/// Freed memory is offered to the scheduler at once from this size on, in bytes.
const OFFER_STEP: u64 = 64 * MIB;

/// The result of a [`MoverOrder`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Done {
    /// All work is complete.
    Drained(Ticket),
    /// Memory is restored as far as there was room.
    Restored {
        /// The rooms to ask for on devices that lack room for the rest: see [`Account::to_ask_for`].
        lacking: Vec<Amount>,
    },
    /// More memory of this GPU is on the host now.
    Evicted(GpuUuid),
    /// The EVICT is done but for bytes that the host cannot take.
    EvictionEnds {
        /// The GPU of the EVICT.
        gpu: GpuUuid,
        /// Bytes that could not be moved.
        short: u64,
    },
    /// All work is complete that was submitted until the count of submissions had this value.
    Quiet {
        /// The count.
        submissions: u64,
    },
    /// Some work is not complete.
    Busy,
    /// The process is off the card.
    Asleep,
    /// It could not go off the card.
    CannotSleep {
        /// The reason: one line.
        reason: String,
        /// Whether it stays as long as the process lives.
        for_good: bool,
    },
    /// It is still off the card. The driver has refused the other GPU, to which it was sent, and it can come back to its own.
    MovedBack,
    /// The process is back on the card.
    Awake {
        /// How long the way back took.
        took: Duration,
    },
}

/// The functions of the library that the session needs.
pub trait Host {
    /// The process's place among its tenant's processes, which share a limit.
    type TenantQuota: TenantQuota;

    /// The GPUs in use, always in the same order.
    fn used(&self) -> Vec<GpuUuid>;
    /// All GPUs of the process, used or not.
    fn all(&self) -> Vec<GpuUuid>;
    /// A device's account, as it is now; `None`: the process has no such GPU.
    fn account(&self, gpu: GpuUuid) -> Option<Account<Self::TenantQuota>>;
    /// Changes a device's account, and wakes threads that wait for a change.
    fn update<R>(&self, gpu: GpuUuid, change: impl FnOnce(&mut Account<Self::TenantQuota>) -> R)
    -> Option<R>;

    /// Sends this message to the scheduler, if there is a connection.
    fn say(&mut self, message: ClientMessage);
    /// Whether there is a connection.
    fn is_connected(&self) -> bool;
    /// Ends the connection and registers again on another.
    fn reconnect(&mut self);
    /// The process's counters, as they are now.
    fn counters(&self) -> Counters;
    /// Takes the times of phases of a hand-over that are over and that the scheduler has not been told: of this GPU, or all.
    fn take_phases(&mut self, of: Option<GpuUuid>) -> Vec<PhaseTime>;

    /// Closes the gate.
    fn close_gate(&mut self);
    /// Opens the gate.
    fn open_gate(&mut self, in_flight: InFlight);
    /// Bounds work in flight, or stops doing so, while the gate is open.
    fn bound(&mut self, in_flight: InFlight);
    /// Whether no thread is inside the gate.
    fn is_nobody_inside(&self) -> bool;
    /// Whether threads sleep at the gate.
    fn is_anybody_asleep(&self) -> bool;
    /// Whether calls of the program wait for the process to come back to the card.
    fn is_anybody_at_door(&self) -> bool;
    /// Whether the driver has refused a handle of managed memory to the program.
    fn has_lost_handle(&self) -> bool;
    /// GPUs to which the process, which is off its card, can come back instead; at most
    /// [`MAX_ELSEWHERE`](nvshare_proto::MAX_ELSEWHERE).
    fn elsewhere(&self) -> Vec<GpuUuid>;
    /// Lets these two GPUs change places: the process, which is off its card, comes back to the other one.
    fn change_places(&mut self, gpus: [GpuUuid; 2]);
    /// The numbers of memory that the process shares now.
    fn shares(&self) -> Vec<u64>;
    /// Submissions that passed the gate since the start.
    fn submissions(&self) -> u64;

    /// Orders a job from the mover.
    fn order(&mut self, order: MoverOrder);
    /// Has the mover give up the orders so far that can be given up.
    fn cancel(&mut self);
    /// Whether evictions are ordered and not complete.
    fn is_evicting(&self) -> bool;
    /// A number that grows whenever a drain comes nearer to its end.
    fn progress(&self) -> u64;

    /// Counts that the process has given the lock back.
    fn count_hand_over(&mut self);
    /// Counts that a drain was given up.
    fn count_deferral(&mut self);
    /// Tells the user that the program runs without a scheduler.
    fn warn_alone(&mut self);
    /// Tells the user that the program waits for the scheduler's answer, and for how long at most.
    fn say_waiting(&mut self, patience: Duration);
}

/// Whether a device has so much unused room that it is offered at once, rather than at the next round of the session.
#[must_use]
pub fn is_worth_offering<T: TenantQuota>(account: &Account<T>) -> bool {
    let unused = account.unused();
    unused > MAX_UNUSED || (unused >= OFFER_STEP && !account.is_holding())
}

/// See the [module's documentation](self).
#[derive(Debug)]
pub struct Session {
    machine: Machine,
    /// The room of each device that the scheduler was told to be lacking.
    told: Vec<Told>,
    /// The scheduler was told that memory cannot be shared.
    told_of_sharing: bool,
    sharing: Sharing,
}

impl Session {
    /// A session that has no connection yet.
    #[must_use]
    pub fn new(now: Duration) -> Self {
        let sharing = Sharing::default();
        Self { machine: Machine::new(now), told: Vec::new(), told_of_sharing: false, sharing }
    }

    /// There is a connection, and REGISTER is sent on it. Returns what REGISTER says of the gate and of each device.
    pub fn register<H: Host>(&mut self, host: &mut H, now: Duration) -> (Gate, Vec<Usage>) {
        let gate = self.machine.gate();
        let tell = |gpu| host.update(gpu, Account::usage_to_register);
        let usage: Vec<Usage> = host.used().into_iter().filter_map(tell).collect();
        self.told = usage.iter().map(|usage| Told { gpu: usage.gpu, lacking: 0, asked: 0 }).collect();
        self.told_of_sharing = false;
        self.sharing.forget_told();
        self.feed(host, Input::Registering, now);
        (gate, usage)
    }

    /// There is a scheduler, and no place among the connections that it is about to take.
    pub fn put_off<H: Host>(&mut self, host: &mut H, now: Duration) {
        self.feed(host, Input::Registering, now);
    }

    /// The connection is gone.
    pub fn lost<H: Host>(&mut self, host: &mut H, now: Duration) {
        update_all(host, Account::lose_scheduler);
        self.feed(host, Input::Lost, now);
    }

    /// No scheduler can be found.
    pub fn found_nobody<H: Host>(&mut self, host: &mut H, now: Duration) {
        update_all(host, Account::find_nobody);
        self.feed(host, Input::Nobody, now);
    }

    /// The scheduler sent this message.
    pub fn hear<H: Host>(&mut self, host: &mut H, message: SchedulerMessage, now: Duration) {
        self.feed(host, Input::Message(message), now);
    }

    /// The mover has done this.
    pub fn done<H: Host>(&mut self, host: &mut H, done: Done, now: Duration) {
        match done {
            Done::Drained(ticket) => self.feed(host, Input::Drained(ticket), now),
            Done::Restored { lacking } if !lacking.is_empty() && is_outgrown(host) => {
                self.feed(host, Input::Outgrown, now);
            }
            Done::Restored { lacking } => self.feed(host, Input::Restored { lacking }, now),
            Done::Quiet { submissions } => self.feed(host, Input::Quiet { submissions }, now),
            Done::Busy => self.feed(host, Input::Busy, now),
            Done::Asleep => self.feed(host, Input::Asleep, now),
            Done::CannotSleep { reason, for_good } => {
                self.feed(host, Input::CannotSleep { reason, for_good }, now);
            }
            Done::MovedBack => self.feed(host, Input::MovedBack, now),
            Done::Awake { took } => self.feed(host, Input::Awake { took }, now),
            Done::Evicted(gpu) => {
                let bytes = host.update(gpu, Account::take_made).unwrap_or(0);
                tell_usage(host, gpu);
                if bytes > 0 {
                    host.say(ClientMessage::Room(Amount { gpu, bytes }));
                }
            }
            Done::EvictionEnds { gpu, short } => {
                tell_usage(host, gpu);
                let counters = host.counters();
                host.say(ClientMessage::Counters(counters));
                tell_phases(host, Some(gpu));
                host.say(ClientMessage::Evicted { gpu, short });
            }
        }
    }

    /// Looks at changes that no event reports: threads that sleep at the gate, needs, time. To be called after each
    /// event, and when [`Self::next_look`] says.
    pub fn look<H: Host>(&mut self, host: &mut H, now: Duration) {
        // Also for threads that came while the gate was open for a moment, and did not wake in time.
        if host.is_anybody_asleep() {
            self.feed(host, Input::ThreadsWaiting, now);
        }
        if host.is_anybody_at_door() {
            self.feed(host, Input::CallsWaiting, now);
        }
        self.tell_needs(host);
        if !self.told_of_sharing && host.is_connected() && host.has_lost_handle() {
            self.told_of_sharing = true;
            host.say(ClientMessage::CannotShare);
        }
        self.sharing.look(&host.shares(), now);
        if host.is_connected()
            && let Some(with) = self.sharing.news()
        {
            host.say(ClientMessage::Shares { with });
        }
        let lacking = is_lacking(host);
        if self.machine.next_tick(lacking, now).is_some() {
            let (progress, submissions) = (host.progress(), host.submissions());
            self.feed(host, Input::Tick { progress, submissions, lacking }, now);
        }
    }

    /// Whether the process is off the card, or on its way there or back: nothing may call the driver.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        self.machine.is_asleep()
    }

    /// Time until [`Self::look`] is to be called, if no event comes before; `None`: only after events.
    #[must_use]
    pub fn next_look<H: Host>(&self, host: &H, now: Duration) -> Option<Duration> {
        let looks = [self.machine.next_tick(is_lacking(host), now), self.sharing.next_look(now)];
        looks.into_iter().flatten().min()
    }

    fn feed<H: Host>(&mut self, host: &mut H, input: Input, now: Duration) {
        for action in self.machine.handle(input, now) {
            self.act(host, action, now);
        }
    }

    fn act<H: Host>(&mut self, host: &mut H, action: Action, now: Duration) {
        match action {
            Action::Send(message) => {
                if matches!(message, ClientMessage::LockReleased { .. } | ClientMessage::Idle { .. }) {
                    update_all(host, Account::end_turn);
                }
                // The scheduler forgets needs with the lock: an allocation that still waits for room asks again.
                if matches!(message, ClientMessage::LockReleased { .. }) {
                    self.told.iter_mut().for_each(|told| (told.lacking, told.asked) = (0, 0));
                }
                if matches!(message, ClientMessage::LockReleased { .. } | ClientMessage::Running { .. }) {
                    tell_phases(host, None);
                }
                let elsewhere = if message == ClientMessage::Asleep { host.elsewhere() } else { Vec::new() };
                host.say(message);
                if !elsewhere.is_empty() {
                    host.say(ClientMessage::Elsewhere { gpus: elsewhere });
                }
            }
            Action::ChangePlaces { gpus } => host.change_places(gpus),
            Action::Report => tell_everything(host),
            Action::Close => close(host),
            Action::Begin { anyway } => self.begin(host, anyway, now),
            Action::Bound(in_flight) => host.bound(in_flight),
            Action::Post(job) => host.order(job),
            Action::Cancel => host.cancel(),
            Action::TryIdle { submissions } => self.try_idle(host, submissions, now),
            Action::Give(Amount { gpu, bytes }) => {
                if host.update(gpu, |account| account.give(bytes)).is_some() {
                    self.answered(gpu, 0);
                }
            }
            Action::Refuse(gpu) => {
                let asked = self.asked(gpu);
                if let Some(lacking) = host.update(gpu, |account| {
                    account.refuse(asked);
                    account.lacking()
                }) {
                    // The scheduler knows of the room that is still lacking.
                    self.answered(gpu, lacking);
                }
            }
            Action::Capacity(Amount { gpu, bytes }) => {
                host.update(gpu, |account| account.set_capacity(bytes));
            }
            Action::AllocationLimit(Amount { gpu, bytes }) => {
                let limit = Some(bytes).filter(|&bytes| bytes > 0);
                host.update(gpu, |account| account.set_allocation_limit(limit));
                tell_usage(host, gpu);
            }
            Action::Reconnect => host.reconnect(),
            Action::Return { room, evict } => give_back(host, room, evict),
            Action::ReturnAll => return_unused(host, |_| 0),
            Action::StopMetering => update_all(host, Account::stop_metering),
            Action::Expect(expected) => update_all(host, |account| account.expect_scheduler(expected)),
            Action::StartMetering => update_all(host, Account::start_metering),
            Action::StartMeteringAnew => {
                update_all(host, Account::start_metering);
                // The scheduler need not know of the others, and a seat does not have them.
                for gpu in host.used() {
                    if let Some(usage) = host.update(gpu, Account::start_metering_anew) {
                        host.say(ClientMessage::Usage(usage));
                    }
                }
            }
            Action::CountHandOver => host.count_hand_over(),
            Action::CountDeferral => host.count_deferral(),
            Action::WarnAlone => host.warn_alone(),
            Action::SayWaiting(patience) => host.say_waiting(patience),
        }
    }

    /// Opens the gate if all allocated memory may be touched.
    fn begin<H: Host>(&mut self, host: &mut H, anyway: bool, now: Duration) {
        // Memory that is leaving may not be touched. All devices are held or none: one that cannot be held yet delays
        // the others.
        let absent = if anyway { Absent::ComesByFaults } else { Absent::ComesFirst };
        if !host.is_evicting() && hold_all(host, absent) {
            host.open_gate(self.machine.in_flight());
            self.feed(host, Input::Began, now);
        } else {
            update_all(host, Account::let_go);
            self.feed(host, Input::StillAbsent, now);
        }
    }

    /// Closes the gate if nothing was submitted since all work was complete.
    fn try_idle<H: Host>(&mut self, host: &mut H, submissions: u64, now: Duration) {
        let is_unchanged = |host: &H| host.is_nobody_inside() && host.submissions() == submissions;
        if !is_unchanged(host) {
            self.feed(host, Input::Busy, now);
            return;
        }
        close(host);
        if is_unchanged(host) {
            self.feed(host, Input::WentIdle, now);
            // A thread that did not wake while the gate was open sleeps on, and rings no second time.
            if host.is_anybody_asleep() {
                self.feed(host, Input::ThreadsWaiting, now);
            }
        } else if hold_all(host, Absent::ComesFirst) {
            host.open_gate(InFlight::Bounded);
            self.feed(host, Input::Busy, now);
        } else {
            // Memory was allocated in the moment that the gate was closed.
            update_all(host, Account::let_go);
            self.feed(host, Input::BusyAndAbsent, now);
        }
    }

    /// Tells the scheduler the news of each device: room that is not needed, usage, and needs.
    fn tell_needs<H: Host>(&mut self, host: &mut H) {
        if !host.is_connected() {
            return;
        }
        let machine = &self.machine;
        let keep = |account: &Account<H::TenantQuota>| {
            if account.is_anybody_waiting() {
                // Room comes in pieces. If one went back while an allocation waits for the rest, it would be asked for again.
                u64::MAX
            } else if machine.is_next() {
                // The room is for memory that comes back.
                account.absent()
            } else if machine.is_running() {
                MAX_UNUSED
            } else if machine.is_parked() {
                0
            } else {
                u64::MAX
            }
        };
        return_unused(host, keep);
        // The scheduler takes what is lacking for the rest of what is needed beside the room that it knows of.
        for gpu in host.used() {
            let Some(account) = host.account(gpu) else { continue };
            let lacking = account.lacking();
            // The first usage also says that the device is in use from now on.
            let is_known = self.told_of(gpu).is_some();
            // Room that a restore lacks is reported by the restore. The end of a need can be told after it.
            let is_late = lacking == 0 && self.machine.is_restoring();
            // A need may be as large as the one before, which has its answer.
            let is_unasked = account.is_room_awaited() && lacking > 0 && self.asked(gpu) == 0;
            let is_news = !(is_late && is_known) && self.now_told(gpu, lacking) || is_unasked;
            if is_news || account.is_usage_stale() {
                tell_usage(host, gpu);
                // A process that needs no room any more says so as well, or others would leave for nobody.
                if lacking > 0 || is_news && !is_late {
                    let bytes = account.to_ask_for(lacking);
                    self.ask(gpu, lacking);
                    host.say(ClientMessage::NeedRoom(Amount { gpu, bytes }));
                }
            }
        }
    }

    /// The scheduler is told that this much is lacking on a device. Returns whether this is news.
    fn now_told(&mut self, gpu: GpuUuid, lacking: u64) -> bool {
        let before = self.told_of(gpu).map(|told| std::mem::replace(&mut told.lacking, lacking));
        if before.is_none() {
            self.told.push(Told { gpu, lacking, asked: 0 });
        }
        before != Some(lacking)
    }

    /// The scheduler is asked for this much that is lacking on a device.
    fn ask(&mut self, gpu: GpuUuid, lacking: u64) {
        if let Some(told) = self.told_of(gpu) {
            told.asked = told.asked.max(lacking);
        }
    }

    /// The scheduler has answered the needs on a device, and knows that this much is lacking there.
    fn answered(&mut self, gpu: GpuUuid, lacking: u64) {
        self.now_told(gpu, lacking);
        if let Some(told) = self.told_of(gpu) {
            told.asked = 0;
        }
    }

    /// Returns the most that the scheduler was asked for on a device since its last answer. A refusal may be of that, though less is
    /// lacking by now.
    fn asked(&mut self, gpu: GpuUuid) -> u64 {
        self.told_of(gpu).map_or(0, |told| told.asked)
    }

    fn told_of(&mut self, gpu: GpuUuid) -> Option<&mut Told> {
        self.told.iter_mut().find(|told| told.gpu == gpu)
    }
}

/// The room of a device that the scheduler was told to be lacking, in bytes.
#[derive(Debug, Clone, Copy)]
struct Told {
    gpu: GpuUuid,
    /// The bytes that it was told last.
    lacking: u64,
    /// The most bytes that it was asked for since its last answer.
    asked: u64,
}

fn close<H: Host>(host: &mut H) {
    host.close_gate();
    update_all(host, Account::let_go);
}

fn update_all<H: Host>(host: &H, change: impl Fn(&mut Account<H::TenantQuota>)) {
    for gpu in host.all() {
        host.update(gpu, &change);
    }
}

/// Holds each device, up to the first that cannot be held.
fn hold_all<H: Host>(host: &H, absent: Absent) -> bool {
    host.all().into_iter().all(|gpu| host.update(gpu, |account| account.hold(absent)).unwrap_or(true))
}

/// Whether any device lacks room.
fn is_lacking<H: Host>(host: &H) -> bool {
    host.used().into_iter().any(|gpu| host.account(gpu).is_some_and(|account| account.lacking() > 0))
}

/// Whether a GPU has become too small for memory that has to be there at once. A process that may exceed a GPU keeps the lock: without
/// it, it would wait for room for all that it has.
fn is_outgrown<H: Host>(host: &H) -> bool {
    let accounts: Vec<_> = host.used().into_iter().filter_map(|gpu| host.account(gpu)).collect();
    accounts.iter().any(Account::has_outgrown_card) && !accounts.iter().any(Account::may_exceed_card)
}

/// Carries out an EVICT.
fn give_back<H: Host>(host: &mut H, Amount { gpu, bytes }: Amount, evict: bool) {
    let take = if evict { Account::take_unused } else { Account::take_spare };
    let Some(unused) = host.update(gpu, |account| take(account, bytes)) else { return };
    tell_usage(host, gpu);
    if unused > 0 {
        host.say(ClientMessage::Room(Amount { gpu, bytes: unused }));
    }
    if evict && unused < bytes {
        host.order(MoverOrder::Evict(Amount { gpu, bytes: bytes - unused }));
    } else {
        host.say(ClientMessage::Evicted { gpu, short: 0 });
    }
}

/// Gives unused room back, beyond the bytes that an account is to `keep`.
fn return_unused<H: Host>(host: &mut H, keep: impl Fn(&Account<H::TenantQuota>) -> u64) {
    for gpu in host.used() {
        let excess = host.account(gpu).map_or(0, |account| account.unused().saturating_sub(keep(&account)));
        if excess > 0 {
            let bytes = host.update(gpu, |account| account.take_unused(excess)).unwrap_or(0);
            tell_usage(host, gpu);
            host.say(ClientMessage::Room(Amount { gpu, bytes }));
        }
    }
}

fn tell_usage<H: Host>(host: &mut H, gpu: GpuUuid) {
    if let Some(usage) = host.update(gpu, Account::usage) {
        host.say(ClientMessage::Usage(usage));
    }
}

/// Tells the phases that end with the next message.
fn tell_phases<H: Host>(host: &mut H, of: Option<GpuUuid>) {
    let phases = host.take_phases(of);
    if !phases.is_empty() {
        host.say(ClientMessage::Phases(phases));
    }
}

fn tell_everything<H: Host>(host: &mut H) {
    for gpu in host.used() {
        tell_usage(host, gpu);
    }
    let counters = host.counters();
    host.say(ClientMessage::Counters(counters));
}
