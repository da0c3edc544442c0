//! The tenants that have series of their own. Programs name themselves, and any user can start them without end: tenants
//! without a place here are counted together.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nvshare_core::Time;
use nvshare_proto::GpuUuid;

use super::gpus::Gpus;
use super::{OfGpu, OfTenant};

/// Tenants on GPUs that have series of their own.
const MAX_TENANTS: usize = 1024;
/// Those of one user, or of one container.
const MAX_EACH: usize = 128;
/// Tenants that have gone are shown for this long, so that a reader sees their last figures.
pub(super) const SHOWN_AFTER_END: Duration = Duration::from_secs(600);
/// The label of what has no series of its own.
pub(super) const OTHER: &str = "other";

/// A user, a container, or a seat: the labels that no program chooses.
type Whose = (String, String, String, String);

/// See the module's documentation. Each tenant is one on one GPU.
#[derive(Debug, Default)]
pub(super) struct Tenants {
    known: BTreeMap<OfTenant, Tenant>,
    /// Those that have gone, in the order in which they went.
    gone: BTreeSet<(Time, OfTenant)>,
    /// How many each user or container has.
    each: BTreeMap<Whose, usize>,
    /// On how many GPUs each tenant is.
    wholes: BTreeMap<OfTenant, usize>,
    pub(super) gpus: Gpus,
}

/// Clients of a tenant on a GPU.
#[derive(Debug, Default)]
struct Tenant {
    clients: usize,
    ended: Time,
}

fn whose(tenant: &OfTenant) -> Whose {
    (tenant.user.clone(), tenant.pod_uid.clone(), tenant.container_id.clone(), tenant.seat.clone())
}

/// The series of all that have none of their own.
pub(super) fn others_on(gpu: &OfGpu) -> OfTenant {
    OfTenant { program: OTHER.to_owned(), ..OfTenant::default() }.on(gpu)
}

impl Tenants {
    /// Whether a tenant that is not known may have series of its own.
    fn has_place_for(&self, tenant: &OfTenant) -> bool {
        self.known.len() < MAX_TENANTS && self.each.get(&whose(tenant)).is_none_or(|&has| has < MAX_EACH)
    }

    /// The figures of a tenant on a GPU, or on all of them, in a map that grows no larger than the counters are.
    pub(super) fn figures_in<'a, T: Default>(
        &self,
        shown: &'a mut BTreeMap<OfTenant, T>,
        tenant: &OfTenant,
        gpu: Option<GpuUuid>,
    ) -> &'a mut T {
        let gpu = gpu.map_or_else(OfGpu::default, |gpu| self.gpus.shown(gpu));
        let own = tenant.on(&gpu);
        let is_known = self.known.contains_key(&own) || self.wholes.contains_key(&own);
        // One that no event has named yet is not known.
        let is_own = is_known || self.has_place_for(&own) && shown.len() < MAX_TENANTS;
        shown.entry(if is_own { own } else { others_on(&gpu) }).or_default()
    }

    /// A client of the tenant is on a GPU. Returns the labels under which it counts there.
    pub(super) fn join(&mut self, tenant: &OfTenant, gpu: &OfGpu) -> OfTenant {
        let own = tenant.on(gpu);
        if !self.known.contains_key(&own) {
            if !self.has_place_for(&own) {
                return others_on(gpu);
            }
            *self.each.entry(whose(&own)).or_default() += 1;
            *self.wholes.entry(own.on_all()).or_default() += 1;
        }
        let known = self.known.entry(own.clone()).or_default();
        known.clients += 1;
        self.gone.remove(&(known.ended, own.clone()));
        own
    }

    /// A client that counted under these labels has gone.
    pub(super) fn leave(&mut self, own: &OfTenant, now: Time) {
        // The series of those that count together is never forgotten.
        let Some(known) = self.known.get_mut(own) else { return };
        known.clients = known.clients.saturating_sub(1);
        if known.clients == 0 {
            known.ended = now;
            self.gone.insert((now, own.clone()));
        }
    }

    /// Forgets a tenant on a GPU that has gone long ago. Returns it, and whether it is on no GPU any more.
    pub(super) fn forget_one(&mut self, now: Time) -> Option<(OfTenant, bool)> {
        self.gone.first().filter(|(ended, _)| *ended + SHOWN_AFTER_END < now)?;
        let (_, old) = self.gone.pop_first()?;
        self.known.remove(&old);
        lower(&mut self.each, whose(&old));
        let is_last = lower(&mut self.wholes, old.on_all());
        Some((old, is_last))
    }
}

/// Counts one less. Returns whether there is none any more.
fn lower<K: Ord>(counts: &mut BTreeMap<K, usize>, key: K) -> bool {
    let left = counts.get(&key).map_or(0, |count| count.saturating_sub(1));
    if left == 0 {
        counts.remove(&key);
    } else {
        counts.insert(key, left);
    }
    left == 0
}
