//! A moment of chaos: orders to give memory back and to go on at will reach a client together, while it has all its memory on
//! the card and work at its gate.
//!
//! Left alone this is rare: memory that waits is told to leave as soon as others want the room. So an administrator's pauses
//! make a state that lasts. While all others are paused, one client gets all its memory; then it is paused too. It is stopped,
//! the others go on, and as soon as it has been told to give memory back, scheduling goes off. When the process goes on, it
//! reads both at once.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nvshare_admin::{Scheduler, Told};
use nvshare_proto::units::MIB;
use nvshare_proto::{AdminRequest, ClientState, ClientStatus, EventKind, TenantSettings, WatchFrom};

use crate::rng::Rng;

use super::chaos::sleep;
use super::trial::Running;
use super::world::World;

/// The longest time for each part of the moment: a client gets its memory, and is told to give it back.
const MAX_MOMENT: Duration = Duration::from_millis(400);
/// A client with less fits beside the others, which then need not have its room.
const MIN_FREE: u64 = 100 * MIB;

/// The processes and the administrator's connection of one world.
#[derive(Debug)]
pub(super) struct Moment<'a> {
    pub(super) world: &'a World,
    pub(super) running: &'a Running,
    pub(super) neighbour: u32,
    pub(super) stop: &'a AtomicBool,
}

impl Moment<'_> {
    /// Makes the moment; whether a client was told to give memory back before scheduling went off.
    pub(super) fn make(&self, rng: &mut Rng) -> bool {
        let scheduler = self.world.administrator();
        let mut paused = BTreeMap::new();
        let is_made = self.with_one_on_the_card(&scheduler, rng, &mut paused).is_some();
        for &client in paused.keys() {
            pause(&scheduler, client, false);
        }
        is_made
    }

    /// `paused`: clients that are paused, and their processes. The caller lets them go on.
    fn with_one_on_the_card(
        &self,
        scheduler: &Scheduler,
        rng: &mut Rng,
        paused: &mut BTreeMap<u64, u32>,
    ) -> Option<()> {
        let large = |client: &ClientStatus| {
            !client.gone && client.usage.iter().map(|usage| usage.allocated).max() >= Some(MIN_FREE)
        };
        let clients: Vec<ClientStatus> = scheduler.status().ok()?.clients.into_iter().filter(large).collect();
        let chosen = clients.get(rng.below(clients.len().max(1)))?;
        let (client, pid) = (chosen.client, chosen.pid);
        self.until(|| {
            let clients = scheduler.status().ok()?.clients;
            for other in clients.iter().filter(|other| !other.gone && other.client != client) {
                if paused.insert(other.client, other.pid).is_none() {
                    pause(scheduler, other.client, true);
                }
            }
            let chosen = clients.iter().find(|other| other.client == client)?;
            (chosen.state == ClientState::Running && has_all_its_memory(chosen)).then_some(())
        })?;
        paused.insert(client, pid);
        pause(scheduler, client, true);
        self.until(|| {
            let clients = scheduler.status().ok()?.clients;
            let chosen = clients.iter().find(|other| other.client == client)?;
            (chosen.state == ClientState::Waiting && has_all_its_memory(chosen)).then_some(())
        })?;
        let mut watch = scheduler.watch(WatchFrom::Now, true).ok()?;
        if !self.signal(pid, libc::SIGSTOP) {
            return None;
        }
        paused.keys().filter(|&&other| other != client).for_each(|&other| pause(scheduler, other, false));
        let is_told = self.until(|| match watch.wait() {
            Ok(Some(Told::Event(event, _))) => {
                (event.event == EventKind::Evict && event.client == Some(client)).then_some(())
            }
            _ => None,
        });
        let is_off = is_told.is_some() && self.world.switch_off();
        self.signal(pid, libc::SIGCONT);
        if !is_off {
            return None;
        }
        sleep(self.stop, rng.range(20, 100));
        let _ = scheduler.change(AdminRequest::On);
        Some(())
    }

    /// Looks again and again, for a short time.
    fn until<T>(&self, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        let begin = Instant::now();
        while begin.elapsed() < MAX_MOMENT && !self.stop.load(Ordering::SeqCst) {
            if let Some(found) = look() {
                return Some(found);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }

    fn signal(&self, pid: u32, signal: i32) -> bool {
        // SAFETY: the neighbour is a child of ours that is waited for only after the disturbances.
        let is_neighbours = || pid == self.neighbour && unsafe { libc::kill(pid.cast_signed(), signal) } == 0;
        self.running.signal(pid, signal) || is_neighbours()
    }
}

/// Tries again where the scheduler does not answer in time: a client that stayed paused would look as if it hung.
fn pause(scheduler: &Scheduler, client: u64, paused: bool) {
    let given = TenantSettings { paused: Some(paused), ..TenantSettings::default() };
    let request = AdminRequest::SetTerms { client, gpu: None, given };
    let _ = (0..10).any(|_| scheduler.change(request.clone()).is_ok());
}

fn has_all_its_memory(client: &ClientStatus) -> bool {
    client.resident > 0 && client.usage.iter().all(|usage| usage.absent == 0)
}
