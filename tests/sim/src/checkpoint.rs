//! A process takes itself off the cards and comes back: `cuCheckpointProcess…`, by rules that were measured on an H100 (see "The
//! driver's checkpoint within a program" in `docs/internals/benchmarks-history.md`).
//!
//! A lock waits for the work that runs, and for functions of the host; then calls that use a card wait for the unlock. A checkpoint
//! takes what the process has on the cards to its own memory. While it is away, some calls wait, some answer, some fail, and four
//! end the process. Memory that another process got by a descriptor stays. Managed memory, and memory of CUDA IPC, are refused.
//! A restore that finds too little memory cannot be repeated: the process is lost, and each call says so. A process that has a pool of
//! managed memory, even an empty one, is taken, and no restore succeeds. That a lost card's error comes before all of this was not measured.
//!
//! Measured of calls that wait are allocations, frees, copies, fills, functions of the host and the making of streams. Launches,
//! the other calls that give a stream work, and the setting of limits, are taken to be like them. A call that was not measured fails.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::handles::stop_with;
use crate::memory::Allocation;
use crate::process::{
    self, Failure, ILLEGAL_STATE, NOT_PERMITTED, NOT_READY, NOT_SUPPORTED, OPERATING_SYSTEM, OUT_OF_MEMORY,
    Process, UNKNOWN,
};
use crate::world::{BLOCK, Cards, Kind, Uuid, Way};

/// The states that `cuCheckpointProcessGetState` tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(i32)]
pub(crate) enum Phase {
    #[default]
    Running = 0,
    Locked = 1,
    Away = 2,
    Lost = 3,
}

/// A block that is off its card: the card, the block, and its bytes.
type Saved = (usize, u32, Vec<u8>);

#[derive(Debug, Default)]
struct State {
    phase: Phase,
    /// A lock waits for the work that runs.
    is_locking: bool,
    /// A checkpoint was refused since the lock: another one answers another error.
    was_refused: bool,
    /// Calls under way of those that a lock keeps waiting.
    under_way: usize,
    saved: Vec<Saved>,
    /// Bytes that the last checkpoint took off the cards.
    taken: u64,
}

static STATE: Mutex<State> = Mutex::new(State {
    phase: Phase::Running,
    is_locking: false,
    was_refused: false,
    under_way: 0,
    saved: Vec::new(),
    taken: 0,
});
static CHANGED: Condvar = Condvar::new();

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The effect of the process's absence on a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// It waits, and while the process is locked too.
    Waits,
    Answers,
    Fails,
    /// It ends the process.
    Stops,
}

fn manner(call: &str) -> Manner {
    const WAIT: [&str; 18] = [
        "cuCtxSetLimit",
        "cuMemAlloc",
        "cuMemFree",
        "cuMemcpy",
        "cuMemset",
        "cuMemHost",
        "cuMemPrefetch",
        "cuMemCreate",
        "cuMemRelease",
        "cuMemMap",
        "cuMemUnmap",
        "cuMemSetAccess",
        "cuModuleLoad",
        "cuLaunch",
        "cuGraphLaunch",
        "cuEventRecord",
        "cuStreamCreate",
        "cuStreamWaitEvent",
    ];
    // The end of an event was not measured; it is taken to be like the question for one.
    const STOP: [&str; 5] =
        ["cuCtxSynchronize", "cuStreamSynchronize", "cuStreamQuery", "cuEventQuery", "cuEventDestroy_v2"];
    let is_about = |part: &str| call.contains(part);
    if STOP.contains(&call.trim_end_matches("_ptsz")) {
        Manner::Stops
    } else if WAIT.iter().any(|prefix| call.starts_with(prefix)) {
        Manner::Waits
    } else if ["GetAttribute", "GetCurrent", "SetCurrent", "cuCheckpoint", "cuDeviceGet", "nvsim"]
        .into_iter()
        .any(is_about)
    {
        Manner::Answers
    } else {
        Manner::Fails
    }
}

/// A call that is under way.
#[derive(Debug)]
pub(crate) struct Call {
    is_counted: bool,
}

impl Drop for Call {
    fn drop(&mut self) {
        if self.is_counted && !process::is_forked() {
            state().under_way -= 1;
            CHANGED.notify_all();
        }
    }
}

/// A call begins. An error: the process is away, or lost.
pub(crate) fn begin(call: &str) -> Result<Call, Failure> {
    let manner = manner(call);
    // In a child of the process another thread may have left the lock held.
    if process::is_forked() {
        // One call ends the child of a process that was away (measured on an H200).
        if call == "cuEventQuery" && STATE.try_lock().is_ok_and(|state| state.phase == Phase::Away) {
            stop_with("nvsim: cuEventQuery was called in a child of a process that is off the card\n");
        }
        return Ok(Call { is_counted: false });
    }
    if call.starts_with("cuCheckpoint") {
        return Ok(Call { is_counted: false });
    }
    let mut state = state();
    let waits = |state: &State| {
        manner == Manner::Waits && (state.is_locking || matches!(state.phase, Phase::Locked | Phase::Away))
    };
    while waits(&state) {
        process::look_at_card(call)?;
        let waited = CHANGED.wait_timeout(state, Duration::from_millis(10));
        (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
    }
    if state.phase != Phase::Running {
        process::look_at_card(call)?;
    }
    match (state.phase, manner) {
        (Phase::Lost, _) | (Phase::Away, Manner::Fails) => return Err(OPERATING_SYSTEM),
        (Phase::Away, Manner::Stops) => {
            stop_with(&format!("nvsim: {call} was called while the process is off the card\n"))
        }
        _ => {}
    }
    let is_counted = manner == Manner::Waits;
    state.under_way += usize::from(is_counted);
    Ok(Call { is_counted })
}

/// An error: the process is another one. For that, a process needs rights that no test has.
fn check_own(pid: i32) -> Result<(), Failure> {
    if u32::try_from(pid) == Ok(std::process::id()) { Ok(()) } else { Err(NOT_PERMITTED) }
}

/// The state of this process.
pub(crate) fn phase(pid: i32) -> Result<Phase, Failure> {
    check_own(pid).map(|()| state().phase)
}

/// Locks the process, when what runs has ended; zero milliseconds are no limit.
pub(crate) fn lock(process: &Process, pid: i32, millis: u32) -> Result<(), Failure> {
    check_own(pid)?;
    let until = (millis > 0).then(|| Instant::now() + Duration::from_millis(millis.into()));
    let mut state = state();
    if state.phase != Phase::Running || state.is_locking {
        return Err(ILLEGAL_STATE);
    }
    state.is_locking = true;
    loop {
        if state.under_way == 0 && process.tables().ends(|_| true).is_empty() {
            state.phase = Phase::Locked;
            break;
        }
        if until.is_some_and(|until| Instant::now() >= until) {
            break;
        }
        let waited = CHANGED.wait_timeout(state, Duration::from_millis(1));
        (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
    }
    state.is_locking = false;
    CHANGED.notify_all();
    if state.phase == Phase::Locked { Ok(()) } else { Err(NOT_READY) }
}

/// Takes what the locked process has on the cards to its own memory.
pub(crate) fn checkpoint(process: &Process, pid: i32) -> Result<(), Failure> {
    check_own(pid)?;
    let mut state = state();
    if state.phase != Phase::Locked {
        return Err(ILLEGAL_STATE);
    }
    if state.was_refused {
        return Err(UNKNOWN);
    }
    let tables = process.tables();
    let all = || tables.memory.values().chain(tables.pool.idle());
    if tables.shared.has_ipc() || all().any(|allocation| allocation.managed) {
        state.was_refused = true;
        return Err(NOT_SUPPORTED);
    }
    for allocation in all() {
        let gpu = allocation.gpu;
        let taken = allocation
            .blocks
            .all()
            .into_iter()
            .filter_map(|block| process.world.take_off(gpu, block).map(|bytes| (gpu, block, bytes)));
        state.saved.extend(taken);
    }
    drop(tables);
    state.taken = state.saved.len() as u64 * BLOCK;
    let rate = process.world.config().copy_out;
    transfer(process, &state.saved, Way::ToHost, rate);
    state.phase = Phase::Away;
    Ok(())
}

/// Bytes that the last checkpoint took off the cards.
pub(crate) fn taken() -> u64 {
    state().taken
}

/// Brings the process back to the cards, locked as before. `pairs`: the cards that it sees, by their UUIDs, and those that take their
/// places; or none (measured on H200s: `tests/gpu/probes/gpu_pairs_probe.py`). If some of the cards are missing, or it does not see one,
/// all is as before.
pub(crate) fn restore(process: &Process, pid: i32, pairs: &[[Uuid; 2]]) -> Result<(), Failure> {
    check_own(pid)?;
    let mut state = state();
    if state.phase != Phase::Away {
        return Err(ILLEGAL_STATE);
    }
    if process.tables().pools.values().any(|pool| pool.managed) {
        return Err(OPERATING_SYSTEM);
    }
    let cards = if pairs.is_empty() { None } else { Some(process.world.places_by(pairs)?) };
    let mut saved = std::mem::take(&mut state.saved);
    if let Some(cards) = cards
        && change_cards(process, &mut saved, cards).is_none()
    {
        state.phase = Phase::Lost;
        CHANGED.notify_all();
        return Err(OUT_OF_MEMORY);
    }
    let is_back =
        saved.iter().all(|(gpu, block, bytes)| process.world.put_back(*gpu, *block, bytes).is_some());
    state.phase = if is_back { Phase::Locked } else { Phase::Lost };
    CHANGED.notify_all();
    if !is_back {
        return Err(OUT_OF_MEMORY);
    }
    let rate = process.world.config().to_device;
    transfer(process, &saved, Way::ToDevice, rate);
    Ok(())
}

/// Lets the process's numbers of cards mean other cards, and gives its allocations blocks there. `None`: there are none left.
fn change_cards(process: &Process, saved: &mut [Saved], cards: Cards) -> Option<()> {
    let world = &process.world;
    let tables = process.tables();
    let changes = |gpu: usize| cards[gpu] != world.card(gpu);
    let all = tables.memory.values().chain(tables.pool.idle());
    let moving: Vec<_> = all.filter(|allocation| changes(allocation.gpu)).collect();
    let leave = |of: &&Arc<Allocation>| {
        of.blocks.all().into_iter().map(|block| world.leave_card(of.gpu, block)).collect()
    };
    let kinds: Vec<Vec<Kind>> = moving.iter().map(leave).collect();
    world.set_cards(cards);
    let mut numbers = HashMap::new();
    for (allocation, kinds) in moving.into_iter().zip(kinds) {
        let (before, now) = (allocation.blocks.all(), world.enter_card(allocation.gpu, &kinds)?);
        numbers.extend(
            before.into_iter().zip(now.iter().copied()).map(|(old, new)| ((allocation.gpu, old), new)),
        );
        allocation.blocks.replace(&now);
    }
    for (gpu, block, _) in saved {
        *block = numbers.get(&(*gpu, *block)).copied().unwrap_or(*block);
    }
    Some(())
}

pub(crate) fn unlock(pid: i32) -> Result<(), Failure> {
    check_own(pid)?;
    let mut state = state();
    if state.phase != Phase::Locked {
        return Err(ILLEGAL_STATE);
    }
    state.phase = Phase::Running;
    state.was_refused = false;
    CHANGED.notify_all();
    Ok(())
}

/// Takes the time that the blocks take on the way, by card.
fn transfer(process: &Process, saved: &[Saved], way: Way, rate: f64) {
    let cards = saved.iter().map(|(gpu, ..)| *gpu).collect::<std::collections::BTreeSet<usize>>();
    for gpu in cards {
        let blocks = saved.iter().filter(|(of, ..)| *of == gpu).count() as u64;
        process.world.transfer(gpu, way, Duration::from_secs_f64((blocks * BLOCK) as f64 / rate));
    }
}
