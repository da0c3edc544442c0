//! Short work that goes ahead of long work: what of the state the policy is asked with (see [`ahead`]).

use std::time::Duration;

use nvshare_proto::units::saturate_u32;

use crate::Time;
use crate::policy::ahead::{self, ShortWork};
use crate::state::State;
use crate::state::client::{Client, ClientId};
use crate::state::gangs::Unit;
use crate::state::gpu::Gpu;
use crate::state::rule::Rule;

/// Short work waits at most this many times as long as between visits that cost no more than they may. Being
/// more than 1, it leaves something for the hand-overs of long work.
const WAIT_PER_VISIT_INTERVAL: f64 = 1.2;

/// Whether a unit is one interactive client: a client of a gang is none.
pub(crate) fn is_interactive(state: &State, unit: &Unit) -> bool {
    state.clients_of(unit).any(Client::is_interactive)
}

/// Returns the time that a GPU stood still until it was known that the short work of the leavers was done.
pub(crate) fn idle_detection_time(state: &State, leavers: &[ClientId]) -> Duration {
    let short =
        state.clients_of(leavers).filter(|client| client.phase().is_idle() && client.is_interactive());
    short.map(|client| client.rhythm.idle_detection()).max().unwrap_or_default()
}

/// The clients whose work holds a GPU and would have to leave it for a waiter.
#[derive(Debug, Default)]
pub(crate) struct LongWork {
    /// Somebody's work runs.
    runs: bool,
    /// One of them is interactive, and done soon.
    has_interactive: bool,
}

impl LongWork {
    /// Adds a client that holds the GPU.
    pub(crate) fn add_holder(&mut self, client: &Client) {
        self.runs = true;
        self.has_interactive |= client.is_interactive();
    }

    /// Returns when they give way to short work. Returns `None` if they do so in its turn, or where nobody
    /// has said what switching may cost.
    pub(crate) fn gives_way_at(&self, state: &State, gpu: &Gpu, unit: &Unit, cost: Duration) -> Option<Time> {
        let Rule::Auto(target) = gpu.rule else { return None };
        if !self.runs || self.has_interactive || !is_interactive(state, unit) {
            return None;
        }
        let client = state.client(unit.first())?;
        // One visit: there and back, and until it is known that it is over. Others that are short come as
        // often.
        let visits =
            (cost * 2 + client.rhythm.usual_idle_detection()) * saturate_u32(gpu.shares.short().max(1));
        let visit_interval = visits.mul_f64(1e6 / f64::from(target.overhead_ppm.max(1)));
        // A client that comes this seldom stays within the budget, so it is not delayed, whatever others have
        // cost.
        let is_frequent = client.rhythm.last_sleep() < visit_interval;
        let delay =
            if is_frequent { gpu.budget.delays(target.overhead_ppm, visit_interval) } else { Duration::ZERO };
        let delayed = client.waiting_since.saturating_add(delay);
        // A turn of long work that ends puts the whole cost of its hand-over on the next visit. That visit
        // waits that much longer, and no more.
        let latest = client.waiting_since.saturating_add(visit_interval.mul_f64(WAIT_PER_VISIT_INTERVAL));
        ahead::earliest(&ShortWork {
            allowed_at: gpu.budget.allows_at(target.overhead_ppm).max(delayed).min(latest),
            since: client.waiting_since,
            max_wait: target.max_wait,
            cost,
            lead: gpu.shares.time(client.job).saturating_sub(gpu.shares.clock()),
            most_ahead: ahead::most_ahead(gpu.quantum, target.max_wait, gpu.shares.active()),
        })
    }
}
