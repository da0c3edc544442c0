//! The verdict on a waiter: how it stands on all of its GPUs, and what follows on one of them.
//!
//! A client of several GPUs is judged once in a round of looks, and the look at each of them uses its
//! [`Case`]. A case holds to the end of its round, as long as nothing changes on its GPUs; after a change it
//! is judged anew.

use std::cell::Cell;
use std::sync::OnceLock;

use nvshare_proto::GpuUuid;

use crate::Time;
use crate::judge::length::{End, Split};
use crate::policy::order;
use crate::state::State;
use crate::state::client::{Client, ClientId, Phase};
use crate::state::entry::Standing;
use crate::state::gangs::Unit;
use crate::state::gpu::{CapacitySource, Gpu};
use crate::state::ledger::Group;

/// Waiters that are ahead of another one and fit at once, of which a look asks whether they are free to go. Any more come later, when they
/// are further ahead.
const ASKED_ABOUT: u32 = 4;

/// How a waiter stands. Parts that not every look needs are judged when one does.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) unit: Unit,
    /// It must wait as things are: no room can be made for it, or its gang lacks members.
    pub(crate) is_must_wait: bool,
    /// Some of its gang give the lock back.
    is_leaving: bool,
    /// How many changes there had been when it was judged.
    pub(crate) changes: u64,
    outlook: OnceLock<Outlook>,
    plan: OnceLock<TurnPlan>,
}

/// Where a waiter could go.
#[derive(Debug)]
pub(crate) struct Outlook {
    /// A compute limit keeps it waiting until then.
    paced_until: Option<Time>,
    /// GPUs where another waiter is ahead of it; two at most, since a look asks for one besides its own.
    not_first_on: Vec<GpuUuid>,
    /// GPUs that it does not fit beside the clients that stay.
    pub(crate) full_gpus: Vec<GpuUuid>,
    /// It fits, and others of its gang run already. Their kernels may wait for its own: they could not leave without it. So it delays nobody.
    completes_gang: bool,
}

impl Outlook {
    pub(crate) fn does_not_fit_on(&self, uuid: GpuUuid) -> bool {
        self.full_gpus.binary_search(&uuid).is_ok()
    }

    /// Returns the GPUs where something is in its way.
    pub(crate) fn gpus_in_its_way(&self) -> Vec<GpuUuid> {
        [&self.not_first_on[..], &self.full_gpus[..]].concat()
    }

    /// Whether others are ahead of the waiter on another GPU than this one.
    fn is_not_first_beside(&self, uuid: GpuUuid) -> bool {
        self.not_first_on.iter().any(|&other| other != uuid)
    }
}

/// How a waiter would get the turn.
#[derive(Debug)]
pub(crate) struct TurnPlan {
    /// The clients that would have to leave each full GPU.
    pub(crate) splits: Vec<Split>,
    /// When their turns are over, or `None` while that is unknown.
    pub(crate) end: Option<End>,
}

/// The first client of a GPU's queue that does not fit beside the others: clients behind it must not delay
/// it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head {
    /// The demand of the head, or of the largest client that waits right behind it; in bytes.
    demand: u128,
    /// Bytes that stay when the head comes: those of clients that keep running beside it, and memory that
    /// cannot be moved.
    stays: u128,
}

impl Head {
    /// Counts a waiter of this demand with the head: later waiters delay it no more than the head.
    pub(crate) fn line_up(&mut self, demand: u128) {
        self.demand = self.demand.max(demand);
    }
}

/// The verdict on a waiter, as the look at one GPU sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Verdict {
    /// It must wait as things are.
    MustWait,
    /// Members of its gang give the lock back.
    GangIsLeaving,
    /// It would delay the head of the queue.
    WouldDelayHead,
    /// A compute limit keeps it waiting until then.
    Paced(Time),
    /// Others are ahead of it on another GPU.
    NotFirstElsewhere,
    /// It fits beside the clients that stay.
    Fits,
    /// Others would have to leave for it.
    NeedsTurn,
}

impl Case {
    pub(crate) fn new(unit: Unit, is_must_wait: bool, is_leaving: bool, changes: u64) -> Self {
        Self { unit, is_must_wait, is_leaving, changes, outlook: OnceLock::new(), plan: OnceLock::new() }
    }
}

impl State {
    pub(crate) fn outlook<'a>(&self, case: &'a Case) -> &'a Outlook {
        case.outlook.get_or_init(|| {
            let unit = &case.unit;
            let uuids = self.gpus_wanted_by(unit);
            let gpus = || self.gpus_among(&uuids);
            let full = gpus().filter(|gpu| !self.fits_beside_staying(gpu, unit));
            let full_gpus: Vec<GpuUuid> = full.map(|gpu| gpu.uuid).collect();
            let completes_gang = full_gpus.is_empty() && self.runs_in_part(unit);
            let barred = gpus().filter(|gpu| uuids.len() > 1 && !completes_gang && !self.may_go(gpu, unit));
            Outlook {
                paced_until: self.paced_until(unit),
                not_first_on: barred.map(|gpu| gpu.uuid).take(2).collect(),
                full_gpus,
                completes_gang,
            }
        })
    }

    /// Returns the clients that would have to leave for a waiter, and when.
    pub(crate) fn turn_plan<'a>(&self, case: &'a Case) -> &'a TurnPlan {
        case.plan.get_or_init(|| {
            let full = self.gpus_among(&self.outlook(case).full_gpus);
            let splits: Vec<Split> = full.map(|gpu| self.split_for(gpu, &case.unit)).collect();
            let end = self.turns_end(&case.unit, &splits);
            TurnPlan { splits, end }
        })
    }

    /// Judges a waiter, as the look at one GPU sees it.
    pub(crate) fn judge(&self, gpu: &Gpu, client: &Client, case: &Case, head: Option<&Head>) -> Verdict {
        if case.is_must_wait {
            return Verdict::MustWait;
        }
        if case.is_leaving {
            return Verdict::GangIsLeaving;
        }
        let would_delay = head.is_some_and(|head| self.would_delay(gpu, &case.unit, head));
        let completes_gang = || self.runs_in_part(&case.unit) && self.outlook(case).completes_gang;
        if would_delay && !has_the_turn(gpu, client) && !completes_gang() {
            return Verdict::WouldDelayHead;
        }
        let outlook = self.outlook(case);
        match outlook.paced_until {
            Some(until) => Verdict::Paced(until),
            None if outlook.is_not_first_beside(gpu.uuid) => Verdict::NotFirstElsewhere,
            None if outlook.full_gpus.is_empty() => Verdict::Fits,
            None => Verdict::NeedsTurn,
        }
    }

    /// Returns a waiter of each gang that runs in part and has one on a GPU.
    pub(crate) fn waiters_of_half_gangs(&self, uuid: GpuUuid) -> Vec<ClientId> {
        let half = self.units_of_gangs(uuid).filter(|unit| self.runs_in_part(unit));
        let waiter =
            |unit: Unit| self.clients_of(unit.on(uuid)).find(|client| client.waits()).map(|client| client.id);
        half.filter_map(waiter).collect()
    }

    /// Whether some clients of a unit run, and others wait.
    fn runs_in_part(&self, unit: &Unit) -> bool {
        unit.len() > 1 && self.clients_of(unit).any(|client| matches!(client.phase(), Phase::Running { .. }))
    }

    /// Whether a holder gave up too many drains in a row: it is not expected to leave.
    pub(crate) fn somebody_defers(&self, gpu: &Gpu) -> bool {
        let mut holders = gpu.ledger.holders().iter().filter_map(|id| self.client(*id));
        holders.any(|client| client.stubborn_until.is_some())
    }

    /// Returns the head of a GPU's queue, beside the clients that keep running when it comes.
    pub(crate) fn head(&self, gpu: &Gpu, unit: &Unit) -> Head {
        head_beside(gpu, unit, self.keep_what_fits(gpu, Some(unit), self.staying_by_turn(gpu)).0)
    }

    /// Whether even the smallest other waiter would delay the head and no waiter's job has the turn.
    pub(crate) fn would_everybody_delay(&self, gpu: &Gpu, head: &Head) -> bool {
        let would_delay = |least| self.demand_would_delay(gpu, u128::from(least), head, gpu.capacity);
        gpu.ledger.least_waiting_demand().is_none_or(|least| {
            gpu.source != CapacitySource::Disputed
                && (gpu.ledger.sums().leaving > 0 || !gpu.ledger.has_waiter_in_turn())
                && would_delay(least)
        })
    }

    fn would_delay(&self, gpu: &Gpu, unit: &Unit, head: &Head) -> bool {
        let capacity = self.capacity(gpu, unit.first());
        self.demand_would_delay(gpu, gpu.demand_of(unit), head, capacity)
    }

    fn demand_would_delay(&self, gpu: &Gpu, demand: u128, head: &Head, capacity: u64) -> bool {
        self.config().exclusive
            || gpu.takes_slices()
            || order::would_delay(demand, head.demand, head.stays, capacity)
    }

    /// Whether no client is ahead of a waiter on a GPU. Clients that must wait as things are, or that the waiter does not delay, do not
    /// count. Those that fit at once count if they would go first.
    fn may_go(&self, gpu: &Gpu, unit: &Unit) -> bool {
        let left = Cell::new(ASKED_ABOUT);
        self.is_first(gpu, unit, |others| {
            self.precedes(others, unit) && take_one(&left) && self.is_free_to_go(gpu, others)
        })
    }

    /// Whether no client is ahead of a waiter on a GPU: see [`Self::may_go`]. `counts`: whether clients do that are ahead and fit at once.
    fn is_first(&self, gpu: &Gpu, unit: &Unit, counts: impl Fn(&Unit) -> bool) -> bool {
        let places = self.clients_of(unit.on(gpu.uuid)).map(|client| self.place_on(gpu, client));
        let own = places.min();
        let mut head: Option<Head> = None;
        for place in gpu.waiting().take_while(|place| own.is_some_and(|own| *place < own)) {
            let other = self.client(place.client);
            debug_assert!(other.is_some(), "a client that is gone waits for nothing");
            // Behind the first place of the unit there is nobody ahead of it.
            let Some(other) = other.filter(|other| !unit.contains(&other.id)) else { break };
            self.count_look();
            let others = self.unit_of(other);
            // Whether it must wait is known from the last look at it, which may be due.
            let must_wait = other.must_wait || self.no_room_for(other).is_some() || self.is_stopped(&others);
            if must_wait || self.paced_until(&others).is_some() {
                continue;
            }
            let fits = self.fits_beside_staying(gpu, &others);
            let mut lined_up = head.unwrap_or_else(|| match fits {
                // All that stay would be kept.
                true => head_beside(
                    gpu,
                    &others,
                    gpu.with_unit(gpu.ledger.sums().staying, &others, Standing::is_staying),
                ),
                false => self.head(gpu, &others),
            });
            lined_up.line_up(gpu.demand_of(&others));
            let would_delay = self.would_delay(gpu, unit, &lined_up);
            if fits && !(would_delay && counts(&others)) {
                continue;
            }
            if would_delay {
                return false;
            }
            head = Some(lined_up);
        }
        true
    }

    /// Whether clients of several GPUs are before a unit in an order that is the same on all GPUs. On a single GPU short work may have a
    /// head start. This order has none, so no two units wait for each other.
    fn precedes(&self, others: &Unit, unit: &Unit) -> bool {
        let order = |unit: &Unit| {
            let client = self.clients_of(unit).next()?;
            Some((self.lead_on_all(client), client.waiting_since, unit.first()))
        };
        self.gpus_wanted_by(others).len() > 1 && order(others) < order(unit) && !self.is_leaving(others)
    }

    /// Whether nobody is ahead of clients on their other GPUs, so that they go as soon as they are looked at: in this round, or when a
    /// turn is over there. If another unit took this GPU meanwhile, they could get one of their GPUs at a time for ever, and never all.
    fn is_free_to_go(&self, gpu: &Gpu, unit: &Unit) -> bool {
        let wanted = self.gpus_wanted_by(unit);
        let mut elsewhere = self.gpus_among(&wanted).filter(|other| other.uuid != gpu.uuid);
        elsewhere.all(|other| self.is_first(other, unit, |_| false))
    }
}

/// Takes one of those that are left. Returns whether there was one.
fn take_one(left: &Cell<u32>) -> bool {
    left.replace(left.get().saturating_sub(1)) > 0
}

/// Returns the head of a GPU's queue, beside the clients that keep running when it comes, with it.
pub(crate) fn head_beside(gpu: &Gpu, unit: &Unit, kept: Group) -> Head {
    let demand = gpu.with_unit(Group::default(), unit, |_| false).demand;
    Head { demand, stays: kept.demand - demand + gpu.ledger.pinned_beside(kept) }
}

/// Whether the turn is that of a client's job: it ends for the whole job at once, so a client that joins it
/// delays nobody.
fn has_the_turn(gpu: &Gpu, client: &Client) -> bool {
    gpu.ledger.sums().leaving == 0 && gpu.shares.is_holding(client.job)
}

/// Whether no waiter is small enough to fit beside the clients that stay.
pub(crate) fn nobody_else_fits(gpu: &Gpu) -> bool {
    let staying = gpu.ledger.sums().staying;
    let is_too_large = |least| staying.demand + u128::from(least) > u128::from(gpu.capacity);
    gpu.ledger.least_waiting_demand().is_none_or(|least| staying.count > 0 && is_too_large(least))
}
