//! Disturbs schedulers and clients at random moments.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nvshare_proto::{AdminRequest, ClientState, ClientStatus};

use crate::rng::Rng;

use super::moment::Moment;
use super::trial::Running;
use super::world::World;

/// The number of times of each disturbance.
pub(crate) type Done = std::collections::BTreeMap<&'static str, u64>;

/// Shortest time between two kills of schedulers: a new scheduler grants nothing for a while.
const BETWEEN_KILLS: Duration = Duration::from_secs(5);

/// Changes the quantum, and with chaos kills and stops processes too, until the storm ends. `sleeps`: programs are ordered off the card.
pub(crate) fn disturb(
    world: &World,
    running: &Running,
    neighbour: u32,
    stop: &AtomicBool,
    seed: u64,
    chaos: bool,
    sleeps: bool,
) -> Result<Done, String> {
    let mut rng = Rng::part(seed, 0xc4a0);
    let mut done = Done::new();
    let mut killed = Instant::now();
    while !stop.load(Ordering::SeqCst) {
        let until = Instant::now() + Duration::from_millis(rng.range(30, if chaos { 250 } else { 3000 }));
        let tq = format!("{:.3}", quantum(&mut rng));
        let what = if chaos { rng.below(12) } else { 0 };
        // Most programs are at work, and stay on the card. Any call wakes the others.
        while Instant::now() < until && !stop.load(Ordering::SeqCst) {
            if sleeps {
                let (ordered, asleep) = order_sleep(world).unwrap_or_default();
                *done.entry("ordered to sleep").or_default() += ordered;
                *done.entry("seen asleep").or_default() += asleep;
            }
            sleep(stop, 20);
        }
        match what {
            0..=2 => {
                world.ctl(&["set-tq", &tq]);
                *done.entry("set-tq").or_default() += 1;
            }
            3..=5 => {
                let is_off = world.switch_off();
                sleep(stop, rng.range(1, 150));
                world.ctl(&["on"]);
                *done.entry("off and on").or_default() += u64::from(is_off);
            }
            6..=8 => {
                if let Some(pid) = running.signal_one(rng.below(1 << 20), libc::SIGSTOP) {
                    sleep(stop, rng.range(1, 300));
                    running.signal(pid, libc::SIGCONT);
                    *done.entry("client stopped").or_default() += 1;
                }
            }
            9..=10 => {
                if (Moment { world, running, neighbour, stop }).make(&mut rng) {
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

/// Orders all clients to go off the card. Returns how many may, and how many are off it already.
fn order_sleep(world: &World) -> Option<(u64, u64)> {
    let scheduler = world.administrator();
    let clients = scheduler.status().ok()?.clients;
    let is_asleep = |client: &&ClientStatus| client.state == ClientState::Asleep;
    let asleep = clients.iter().filter(is_asleep).count() as u64;
    let may = |client: &&ClientStatus| {
        let order = AdminRequest::Sleep { client: client.client };
        !client.gone && !is_asleep(client) && scheduler.change(order).is_ok()
    };
    Some((clients.iter().filter(may).count() as u64, asleep))
}

/// A time from 20 to 200 ms, in seconds.
pub(crate) fn quantum(rng: &mut Rng) -> f64 {
    rng.range(20, 200) as f64 / 1000.0
}

pub(super) fn sleep(stop: &AtomicBool, ms: u64) {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(ms) && !stop.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(ms.min(10)));
    }
}
