//! Disturbs schedulers and clients at random moments.

use std::io::{BufRead, BufReader};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nvshare_proto::{ClientState, ClientStatus};

use crate::rng::Rng;

use super::trial::Running;
use super::world::World;

/// The number of times of each disturbance.
pub(crate) type Done = std::collections::BTreeMap<&'static str, u64>;

/// Shortest time between two kills of schedulers: a new scheduler grants nothing for a while.
const BETWEEN_KILLS: Duration = Duration::from_secs(5);
/// Longest time that clients are stopped until one of them has to leave.
const FOR_A_MOMENT: Duration = Duration::from_millis(500);

/// Changes the quantum, and with chaos kills and stops processes too, until the storm ends.
pub(crate) fn disturb(
    world: &World,
    running: &Running,
    neighbour: u32,
    stop: &AtomicBool,
    seed: u64,
    chaos: bool,
) -> Result<Done, String> {
    let mut rng = Rng::part(seed, 0xc4a0);
    let mut done = Done::new();
    let mut killed = Instant::now();
    while !stop.load(Ordering::SeqCst) {
        sleep(stop, rng.range(30, if chaos { 250 } else { 3000 }));
        let tq = format!("{:.3}", quantum(&mut rng));
        let what = if chaos { rng.below(12) } else { 0 };
        match what {
            0..=2 => {
                world.ctl(&["set-tq", &tq]);
                *done.entry("set-tq").or_default() += 1;
            }
            3..=5 => {
                world.ctl(&["off"]);
                sleep(stop, rng.range(1, 150));
                world.ctl(&["on"]);
                *done.entry("off and on").or_default() += 1;
            }
            6..=8 => {
                if let Some(pid) = running.signal_one(rng.below(1 << 20), libc::SIGSTOP) {
                    sleep(stop, rng.range(1, 300));
                    running.signal(pid, libc::SIGCONT);
                    *done.entry("client stopped").or_default() += 1;
                }
            }
            9..=10 => {
                if off_while_one_has_to_leave(world, running, neighbour, stop, &mut rng) {
                    *done.entry("off and on while a client that has to leave is stopped").or_default() += 1;
                }
            }
            _ => {
                if killed.elapsed() > BETWEEN_KILLS {
                    world.count_turns();
                    world.kill_scheduler();
                    sleep(stop, rng.range(0, 300));
                    world.start_scheduler(quantum(&mut rng))?;
                    *done.entry("scheduler killed").or_default() += 1;
                    killed = Instant::now();
                }
            }
        }
    }
    Ok(done)
}

/// Stops clients that wait with all their memory on the card, until one of them is told to give some back; then scheduling goes
/// off. When they go on, that one reads at once that memory is to leave and that its gate may open, and has work that would
/// run beside the move. Whether one was told in time.
fn off_while_one_has_to_leave(
    world: &World,
    running: &Running,
    neighbour: u32,
    stop: &AtomicBool,
    rng: &mut Rng,
) -> bool {
    let signal = |pid: u32, signal| {
        // SAFETY: the neighbour is a child of ours that is waited for only after the disturbances.
        let is_neighbours = || pid == neighbour && unsafe { libc::kill(pid.cast_signed(), signal) } == 0;
        running.signal(pid, signal) || is_neighbours()
    };
    let Ok(mut watch) = world.watch(FOR_A_MOMENT) else { return false };
    // The events of later moments are told by then.
    sleep(stop, 20);
    // Turns are short meanwhile: others need the room soon.
    world.ctl(&["set-tq", "0.02"]);
    let begin = Instant::now();
    let mut stopped: Vec<u32> = Vec::new();
    while stopped.is_empty() && begin.elapsed() < FOR_A_MOMENT / 2 && !stop.load(Ordering::SeqCst) {
        let clients = world.status().map(|status| status.clients).unwrap_or_default();
        let waiting = clients.iter().filter(|client| waits_with_all_its_memory(client));
        stopped = waiting.map(|client| client.pid).filter(|&pid| signal(pid, libc::SIGSTOP)).collect();
    }
    // What was told before is on its way already.
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_micros() as u64);
    let told = BufReader::new(watch.stdout.take().expect("it is piped")).lines().map_while(Result::ok);
    let is_told = !stopped.is_empty() && { told }.any(|line| is_told_to_leave(&line, &stopped, since));
    if is_told {
        world.ctl(&["off"]);
    }
    stopped.iter().for_each(|&pid| _ = signal(pid, libc::SIGCONT));
    let _ = watch.wait();
    if is_told {
        sleep(stop, rng.range(20, 100));
        world.ctl(&["on"]);
    }
    is_told
}

/// Whether an event says that one of these processes is to give memory back, after a time in microseconds since 1970.
fn is_told_to_leave(event: &str, pids: &[u32], since: u64) -> bool {
    let event: serde_json::Value = serde_json::from_str(event).unwrap_or_default();
    let is_later = event["time_us"].as_u64().is_some_and(|at| at >= since);
    event["event"] == "evict" && is_later && pids.iter().any(|&pid| event["pid"] == pid)
}

fn waits_with_all_its_memory(client: &ClientStatus) -> bool {
    let waits = matches!(client.state, ClientState::Waiting | ClientState::Blocked | ClientState::Idle);
    waits && client.resident > 0 && client.usage.iter().all(|usage| usage.absent == 0)
}

/// A time from 20 to 200 ms, in seconds.
pub(crate) fn quantum(rng: &mut Rng) -> f64 {
    rng.range(20, 200) as f64 / 1000.0
}

fn sleep(stop: &AtomicBool, ms: u64) {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(ms) && !stop.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(ms.min(10)));
    }
}
