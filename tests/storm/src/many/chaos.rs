//! Disturbs schedulers and clients at random moments.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nvshare_proto::{ClientState, ClientStatus};

use crate::rng::Rng;

use super::trial::Running;
use super::world::World;

/// The number of times of each disturbance.
pub(crate) type Done = std::collections::BTreeMap<&'static str, u64>;

/// Shortest time between two kills of schedulers: a new scheduler grants nothing for a while.
const BETWEEN_KILLS: Duration = Duration::from_secs(5);

/// Changes the quantum, and with chaos kills and stops processes too, until the storm ends.
pub(crate) fn disturb(
    world: &World,
    running: &Running,
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
                // After SIGCONT the client reads at once the messages of that time: to give memory back, and that
                // scheduling is off. A client that waits with memory on the card has to give it back next.
                if let Some(pid) = stop_one_that_has_to_leave(world, running, &mut rng) {
                    // Turns are short meanwhile: others need the room soon.
                    world.ctl(&["set-tq", "0.02"]);
                    sleep(stop, rng.range(50, 500));
                    world.ctl(&["off"]);
                    running.signal(pid, libc::SIGCONT);
                    sleep(stop, rng.range(20, 100));
                    world.ctl(&["on"]);
                    *done.entry("off and on while a client is stopped").or_default() += 1;
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

/// Stops a client that waits while its memory is on the card. `None`: there is none.
fn stop_one_that_has_to_leave(world: &World, running: &Running, rng: &mut Rng) -> Option<u32> {
    let clients = world.status()?.clients;
    let has_to = |client: &&ClientStatus| client.state == ClientState::Waiting && client.resident > 0;
    let pids: Vec<u32> = clients.iter().filter(has_to).map(|client| client.pid).collect();
    let pid = rng.pick(&pids)?;
    running.signal(pid, libc::SIGSTOP).then_some(pid)
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
