//! Takes the process off its cards, and brings it back, by the driver's checkpoint. The mover's thread does this.
//!
//! Before, the gate is closed and all work is complete, so that the scheduler has taken the room of all memory that moves. Then the
//! [door] closes. From then on the program's calls wait. Those that are under way have to end. No thread may be between the door and
//! the driver, and no thread of the library may call it. If a step fails, those before it are undone, and the process goes on.
//!
//! NVML waits as well while the process is off the card, as the driver suspends it. So its calls wait at the door too
//! (`hooks/nvml/unhooked.rs`).
//!
//! A process that uses one of several GPUs that are alike may come back to another one. The [devices] have changed places by then, and the
//! driver is told at the restore. All that the program has on its device is on the other card afterwards, at the same addresses.
//!
//! A thread that comes to the door while the others are looked at means that the program is at work. So does one at the gate.

mod stacks;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use nvshare_client::Kind;
use nvshare_client::session::Done;
use nvshare_proto::{GpuUuid, MAX_ELSEWHERE, MemoryMode};

use self::stacks::Stacks;
use super::{allocations, devices, exports, imports, physical, pools};
use crate::driver;
use crate::driver::types::CUresult;
use crate::process::blocked::Unseen;
use crate::process::lock::lock;
use crate::process::{config, host_memory, lifecycle, log, threads};
use crate::work::captures;
use crate::work::contexts::{self, Context};
use crate::work::drain::Drain;
use crate::work::gate::{self, door};
use crate::work::used_devices;

/// The program's threads, and its calls that are under way, have this long to come to rest.
const PATIENCE: Duration = Duration::from_secs(2);
/// The pause between two looks.
const LOOK: Duration = Duration::from_millis(1);
/// How often the way back is tried, where the driver refuses it, and the pause between.
const TRIES: u32 = 3;
const BEFORE_AGAIN: Duration = Duration::from_millis(50);

/// Bytes of the host that the driver's copy of contexts and modules takes at most: those of PyTorch and JAX take up to 0.9 GiB.
const CONTEXTS: u64 = 1 << 30;

/// The process is off the card.
static AWAY: AtomicBool = AtomicBool::new(false);
/// The stacks that the contexts gave back before.
static STACKS: Mutex<Stacks> = Mutex::new(Stacks::none());
/// The GPUs behind the devices when the process went.
static LEFT: Mutex<Vec<GpuUuid>> = Mutex::new(Vec::new());
/// The driver has refused another GPU. It is not asked again.
static IS_BOUND: AtomicBool = AtomicBool::new(false);
/// Finds the functions of the driver and of NVML that the program is linked to, and whose calls pass the door by.
static LINKED: OnceLock<Linked> = OnceLock::new();
type Linked = Box<dyn Fn() -> Vec<String> + Send + Sync>;

/// Why the process stays on the card.
#[derive(Debug)]
struct Stays {
    reason: String,
    for_good: bool,
}

impl Stays {
    fn now(reason: impl fmt::Display) -> Self {
        Self { reason: reason.to_string(), for_good: false }
    }

    fn for_good(reason: impl fmt::Display) -> Self {
        Self { reason: reason.to_string(), for_good: true }
    }

    /// The driver has refused a step.
    fn refused(step: &str, error: CUresult) -> Self {
        match error {
            CUresult::NOT_READY => Self::now("a call or work of it is under way"),
            CUresult::NOT_SUPPORTED => Self::for_good(format_args!("the driver does not {step}: {error:?}")),
            error => Self::now(format_args!("the driver does not {step}: {error:?}")),
        }
    }
}

/// Hangs the door, before the first call of the driver. `linked` finds the functions that the program is linked to past it.
pub(crate) fn prepare(linked: Linked) {
    let _ = LINKED.set(linked);
    door::hang();
}

/// Whether the process is off the card. Then nothing may call the driver.
pub(super) fn is_away() -> bool {
    AWAY.load(Ordering::SeqCst)
}

/// Takes the process off the card, if that can be.
pub(super) fn go() -> Done {
    let begin = Instant::now();
    match check_for_good().and_then(|()| behind_the_door()) {
        Ok(()) => {
            log::info(format_args!(
                "the process is off the card, after {:.3} s",
                begin.elapsed().as_secs_f64()
            ));
            Done::Asleep
        }
        Err(Stays { reason, for_good }) => {
            log::info(format_args!("the process does not go off the card: {reason}"));
            Done::CannotSleep { reason, for_good }
        }
    }
}

/// Reasons that do not change as long as the process lives.
fn check_for_good() -> Result<(), Stays> {
    if !door::is_hung() {
        let is_swap = config::get().is_ok_and(|config| config.memory == MemoryMode::Swap);
        let reason = if is_swap { "NVSHARE_SLEEP is not 1" } else { "NVSHARE_MEMORY is not swap" };
        return Err(Stays::for_good(reason));
    }
    if !driver::can_checkpoint() {
        return Err(Stays::for_good(
            "its driver cannot take a process off the card, as those of CUDA 12.8 can",
        ));
    }
    let linked = LINKED.get().map(|find| find()).unwrap_or_default();
    match linked.first() {
        Some(name) => Err(Stays::for_good(format_args!("its program is linked to {name}"))),
        None => Ok(()),
    }
}

/// Reasons that are looked for while the program's calls are kept out.
fn check_now() -> Result<(), Stays> {
    if let Some(name) = door::passed_by() {
        return Err(Stays::for_good(format_args!("its program may call {name} past the library")));
    }
    if captures::open() > 0 {
        return Err(Stays::now("a capture is open"));
    }
    if imports::has_any() {
        return Err(Stays::now("it has memory of other processes"));
    }
    // They would reach memory that the driver is about to replace, or whose copy it brings back later.
    if physical::is_reached() {
        return Err(Stays::for_good("others reach its memory, or it reaches theirs"));
    }
    // The driver takes such a process off the card and cannot bring it back: the restore answers 304 (measured).
    if pools::has_managed() {
        return Err(Stays::for_good("it has a pool of managed memory"));
    }
    // The scheduler keeps nothing free there for its way back.
    let is_unknown =
        |context: &Arc<Context>| !context.life().is_over() && !used_devices::contains(context.device());
    if contexts::all().iter().any(is_unknown) {
        return Err(Stays::now("it has a context on a GPU that it does not use"));
    }
    // The memory that does not move is on the card, and the driver copies it.
    let stays = devices::all().map(|device| device.account().charged()).sum();
    check_host(host_memory::room(), stays)?;
    let is_managed = |kind| matches!(kind, Kind::DeviceAsManaged | Kind::ProgramsManaged | Kind::ManagedPool);
    for device in devices::all() {
        let all = allocations::of_device(device.ordinal);
        if all.iter().any(|allocation| is_managed(allocation.kind)) {
            return Err(Stays::now("it has managed memory"));
        }
        if all.iter().any(|allocation| allocation.is_pinned()) {
            return Err(Stays::now("others may reach its memory"));
        }
        if device.account().movable_on_card() > 0 {
            return Err(Stays::now("some of its memory is on the card"));
        }
    }
    Ok(())
}

/// The driver copies to memory of the process, which the machine or a control group may not have. Then the kernel would end it.
fn check_host(room: u64, stays: u64) -> Result<(), Stays> {
    if room < stays.saturating_add(CONTEXTS) {
        return Err(Stays::now("the host has too little memory for what the driver copies"));
    }
    Ok(())
}

/// Closes the door, and opens it again if the process stays.
fn behind_the_door() -> Result<(), Stays> {
    if gate::closed_period().is_none() {
        return Err(Stays::now("it is at work"));
    }
    door::close();
    let gone = settle().and_then(|()| check_now()).and_then(|()| leave_cards());
    match gone {
        Ok(()) => {
            *lock(&LEFT) = devices::uuids();
            AWAY.store(true, Ordering::SeqCst);
        }
        Err(_) => door::open(),
    }
    gone
}

/// Waits until nobody is on the way from the door to the driver, or in a call that is counted. All work is complete then.
fn settle() -> Result<(), Stays> {
    let does_not_say =
        |error| Stays::for_good(format_args!("the kernel does not say what its threads do: {error}"));
    let begin = Instant::now();
    let mut unseen = Unseen::others().map_err(does_not_say)?;
    let mut work = None;
    loop {
        if door::has_waiters() || gate::anybody_asleep() {
            return Err(Stays::now("it is at work"));
        }
        let busy = if !gate::nobody_inside() || !door::has_nobody_inside() {
            "a call of it is under way"
        } else if threads::has_workers() {
            "its memory is being freed or moved"
        } else if !unseen.look().map_err(does_not_say)? {
            "its threads are busy"
        } else if work.get_or_insert_with(Drain::begin).poll() > 0 {
            "work of it is under way"
        } else {
            return Ok(());
        };
        if begin.elapsed() >= PATIENCE {
            return Err(Stays::now(busy));
        }
        threads::sleep(LOOK);
    }
}

/// The driver's own steps.
fn leave_cards() -> Result<(), Stays> {
    let Some(_way) = lifecycle::hold_off_exit_on_the_way() else { return Err(Stays::now("it ends")) };
    let stacks = Stacks::give_back();
    let begin = Instant::now();
    let locked = driver::lock_process(PATIENCE).map_err(|error| Stays::refused("lock it", error));
    let lock_took = begin.elapsed();
    let gone = locked.and_then(|()| {
        driver::checkpoint_process().map_err(|error| Stays::refused("take it off the card", error))
    });
    log::debug(format_args!(
        "the driver's lock took {:.3} s, its checkpoint {:.3} s",
        lock_took.as_secs_f64(),
        (begin.elapsed() - lock_took).as_secs_f64()
    ));
    if gone.is_ok() {
        *lock(&STACKS) = stacks;
    } else if unlock() {
        stacks.take_again();
    }
    gone
}

/// Lets the program's calls go on. A process that is not locked refuses that. False: it is still locked, and calls of the driver may wait.
fn unlock() -> bool {
    let unlocked = several_times(driver::unlock_process);
    if let Err(error) =
        unlocked.or_else(|error| if error == CUresult::ILLEGAL_STATE { Ok(()) } else { Err(error) })
    {
        log::error(format_args!(
            "the driver does not unlock the process, whose calls may wait for ever: {error:?}"
        ));
        return false;
    }
    true
}

/// Brings the process back to the card. If the driver cannot, the process is lost, and each of its calls gets the driver's error.
pub(super) fn come_back() -> Done {
    let begin = Instant::now();
    if is_away()
        && let Some(_way) = lifecycle::hold_off_exit_on_the_way()
    {
        let left = lock(&LEFT).clone();
        let pairs = restore_pairs(&left, &devices::uuids());
        match several_times(|| driver::restore_process(&pairs)) {
            Ok(()) => {
                let stacks = std::mem::replace(&mut *lock(&STACKS), Stacks::none());
                if unlock() {
                    stacks.take_again();
                }
                log::info(format_args!("the process is back, after {:.3} s", begin.elapsed().as_secs_f64()));
            }
            // Its state is as before, and the scheduler has room for it elsewhere.
            Err(CUresult::INVALID_VALUE) if !pairs.is_empty() => {
                IS_BOUND.store(true, Ordering::SeqCst);
                log::warn(format_args!(
                    "the driver does not bring the process back to another GPU; it comes back to its own"
                ));
                return_to(&left);
                return Done::MovedBack;
            }
            Err(error) => {
                log::error(format_args!(
                    "the driver cannot bring the process back, so it is lost: {error:?}"
                ));
            }
        }
        AWAY.store(false, Ordering::SeqCst);
        door::open();
    }
    Done::Awake { took: begin.elapsed() }
}

/// GPUs to which the process can come back instead of the one that it has left.
pub(crate) fn elsewhere() -> Vec<GpuUuid> {
    // A limit holds on one GPU, for this process or for its tenant together. Those that get memory of the process expect it on the GPU
    // that it is on.
    let is_limited = devices::used().any(|device| device.allocation_limit().is_some());
    if is_limited || exports::has_any() || IS_BOUND.load(Ordering::SeqCst) {
        return Vec::new();
    }
    let mut gpus = devices::alike();
    gpus.truncate(MAX_ELSEWHERE);
    gpus
}

/// For each device the GPU that it was and the one that it is; nothing, if each is what it was.
fn restore_pairs(left: &[GpuUuid], now: &[GpuUuid]) -> Vec<[GpuUuid; 2]> {
    if left == now {
        return Vec::new();
    }
    left.iter().zip(now).map(|(&left, &now)| [left, now]).collect()
}

/// Lets the devices be the GPUs again that the process has left.
fn return_to(left: &[GpuUuid]) {
    for (device, &gpu) in devices::all().zip(left) {
        devices::change_places([device.uuid(), gpu]);
    }
}

/// A step that must not fail, as often as it may help.
fn several_times(step: impl Fn() -> Result<(), CUresult>) -> Result<(), CUresult> {
    let mut result = step();
    for _ in 1..TRIES {
        // A step that has been taken is not taken again, nor one that will never be.
        if matches!(result, Ok(()) | Err(CUresult::ILLEGAL_STATE | CUresult::INVALID_VALUE)) {
            break;
        }
        threads::sleep(BEFORE_AGAIN);
        result = step();
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_is_told_of_each_device_if_any_is_another_gpu() {
        let [a, b, c] = [1, 2, 3].map(|number| GpuUuid([number; 16]));
        assert_eq!(restore_pairs(&[a, b, c], &[a, b, c]), Vec::<[GpuUuid; 2]>::new());
        assert_eq!(restore_pairs(&[a, b, c], &[b, a, c]), [[a, b], [b, a], [c, c]]);
    }

    #[test]
    fn the_host_has_room_for_contexts_and_for_what_does_not_move() {
        for (room, stays, fits) in [
            (u64::MAX, 0, true),
            (CONTEXTS, 0, true),
            (CONTEXTS - 1, 0, false),
            (CONTEXTS + 4, 5, false),
            (CONTEXTS + 5, 5, true),
            (0, u64::MAX, false),
        ] {
            assert_eq!(check_host(room, stays).is_ok(), fits, "{room} {stays}");
        }
    }
}
