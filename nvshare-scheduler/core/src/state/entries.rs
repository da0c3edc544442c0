//! The entries of clients in the ledgers of their GPUs. Each change of a client that an entry depends on is
//! made here, so that entries are in step with clients. The [`Agenda`] gets what is to be looked at again.

use std::ops::Bound;
use std::time::Duration;

use nvshare_proto::GpuUuid;

use crate::policy::order;
use crate::state::State;
use crate::state::account::Account;
use crate::state::agenda::Agenda;
use crate::state::client::{Client, ClientId, Job, NextReason, Phase};
use crate::state::config::Config;
use crate::state::entry::{Entry, Standing};
use crate::state::gpu::{CapacityFigures, CapacitySource, Gpu};
use crate::state::place::Place;
use crate::state::share::Activity;
use crate::state::sleep::{Sleep, Sleeper};
use crate::state::virtual_time::VirtualTime;

/// Places of waiting clients, each on one GPU, that one event brings up to date: few enough to cost some
/// microseconds.
const PLACES_REFRESHED: usize = 16;

/// Changes of a client, and of its entries.
impl State {
    /// Changes a client: the time up to now counts for the phase before, and its entries are rewritten.
    /// [`Client::follow_phase`] says what else belongs to a change of its phase. Returns what the change
    /// returns, or `None` if the client is gone.
    pub(crate) fn change_client<T>(
        &mut self,
        agenda: &mut Agenda,
        id: ClientId,
        change: impl FnOnce(&mut Client) -> T,
    ) -> Option<T> {
        let now = self.now;
        let client = self.clients.get_mut(&id)?;
        client.count(now);
        let (slept, before) = (client.is_asleep(), client.phase());
        let changed = change(client);
        client.follow_phase(before, slept, now);
        self.enter(agenda, id);
        Some(changed)
    }

    /// Changes a client's account on one GPU. Returns what the change returns, and the account before and
    /// after it. Returns `None` if the client is gone or does not use the GPU.
    pub(crate) fn change_account<T>(
        &mut self,
        agenda: &mut Agenda,
        id: ClientId,
        gpu: GpuUuid,
        change: impl FnOnce(&mut Account) -> T,
    ) -> Option<(T, [Account; 2])> {
        let now = self.now;
        let client = self.clients.get_mut(&id)?;
        let seen = |client: &Client| (activity(client), client.is_interactive());
        let was = seen(client);
        client.count(now);
        let is_same = seen(client) == was;
        let account = client.accounts.get_mut(&gpu)?;
        let before = **account;
        let changed = change(account);
        let after = **account;
        // Nothing changes on the client's other GPUs, unless its work counts as another kind from now on.
        self.rewrite_entry_on(agenda, id, Some(gpu).filter(|_| is_same));
        Some((changed, [before, after]))
    }

    /// Corrects a client's account by what was measured. Nothing has happened to the client: its time is not
    /// counted. Returns what the correction returns, or `None` if the client is gone or does not use the GPU.
    pub(crate) fn correct_account<T>(
        &mut self,
        agenda: &mut Agenda,
        id: ClientId,
        gpu: GpuUuid,
        correct: impl FnOnce(&mut Account) -> T,
    ) -> Option<T> {
        let corrected = correct(self.clients.get_mut(&id)?.accounts.get_mut(&gpu)?);
        self.enter(agenda, id);
        Some(corrected)
    }

    /// Notes whether a client must wait as things are.
    pub(crate) fn set_must_wait(&mut self, agenda: &mut Agenda, id: ClientId, must_wait: bool) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.must_wait = must_wait;
        }
        self.enter(agenda, id);
    }

    /// Writes a client into the ledgers of its GPUs. A GPU whose entry changed is looked at again.
    pub(crate) fn enter(&mut self, agenda: &mut Agenda, id: ClientId) {
        self.rewrite_entry_on(agenda, id, None);
    }

    /// Writes a client into the ledger of one GPU, or of all. A client that is gone has no entries.
    pub(crate) fn rewrite_entry_on(&mut self, agenda: &mut Agenda, id: ClientId, only: Option<GpuUuid>) {
        let Some(client) = self.clients.get(&id) else { return };
        let (from, to) = only
            .map_or((Bound::Unbounded, Bound::Unbounded), |gpu| (Bound::Included(gpu), Bound::Included(gpu)));
        let activity = activity(client);
        for uuid in client.accounts.range((from, to)).map(|(uuid, _)| uuid) {
            let Some(gpu) = self.gpus.get_mut(uuid) else { continue };
            gpu.shares.advance(self.now);
            let before = gpu.ledger.entry(id).map(|entry| entry.activity);
            if before != Some(activity) {
                let most_kept = gpu.most_kept();
                gpu.shares.change(client.job, before, Some(activity), most_kept);
            }
        }
        client.lead.forget();
        let stands = Stands::of(client, activity, self);
        let mut moves = stands.several || self.jobs.count_clients(client.job) > 1;
        let mut changed = false;
        for (uuid, account) in client.accounts.range((from, to)) {
            let Some(gpu) = self.gpus.get_mut(uuid) else { continue };
            agenda.count_work(1);
            moves |= gpu.goes_ahead(client);
            let entry = stands.entry(client, account, gpu, &self.config);
            let held = gpu.ledger.entry(id).is_some_and(|entry| entry.standing.holds());
            // It is told with the rest of its gang.
            if entry.standing.holds() != held {
                agenda.tell_later([id]);
            }
            if gpu.ledger.set(id, Some(entry)) {
                agenda.queue_with_watchers(gpu);
                agenda.count_change();
                changed = true;
            }
        }
        // The other members of its gang depend on it.
        if let Some(gang) = client.gang.filter(|_| changed) {
            agenda.look_at_gang(gang);
        }
        if client.sleep.is_ordered() || client.sleep == Sleep::Away && client.wants {
            agenda.follow_sleeper(id);
        }
        let waits = stands.standing == Standing::Waits;
        if waits && moves {
            agenda.follow_place(id, only.is_none().then_some(self.events));
        } else if !waits {
            agenda.forget_place(id);
        }
    }

    /// Refreshes the places of waiting clients that move without an event of their own. These are clients of
    /// several GPUs, and clients whose job has other processes. Each event refreshes some, in round robin, so
    /// that its cost is bounded.
    pub(crate) fn refresh_places(&mut self, agenda: &mut Agenda) {
        let mut left = PLACES_REFRESHED;
        let mut ids = Vec::new();
        for id in agenda.moving_from_cursor() {
            debug_assert!(self.clients.contains_key(&id), "a client that is gone has no place");
            ids.push(id);
            let unit = self.unit(id);
            left = left.saturating_sub(self.clients_of(&unit).map(|client| client.accounts.len()).sum());
            if left == 0 {
                break;
            }
        }
        for id in ids {
            agenda.set_refresh_cursor(id);
            self.refresh_place(agenda, id);
        }
    }

    /// Refreshes the place of one client, if it moves and this event has not done so; and those of its gang. If they stood by leads of
    /// different times, another gang could be ahead on one GPU and behind on another.
    pub(crate) fn refresh_place(&mut self, agenda: &mut Agenda, id: ClientId) {
        let unit = self.unit(id);
        if !unit.iter().any(|&rank| agenda.is_place_stale(rank, self.events)) {
            return;
        }
        if unit.len() > 1 {
            for uuid in self.gpus_of(&unit) {
                if let Some(gpu) = self.gpus.get_mut(&uuid) {
                    gpu.shares.advance(self.now);
                }
            }
        }
        for &rank in unit.iter() {
            if agenda.is_place_stale(rank, self.events) {
                self.enter(agenda, rank);
            }
        }
    }

    /// Returns how far a client is ahead of the clock on each GPU that it uses.
    fn lead_on_each(&self, client: &Client) -> impl Iterator<Item = VirtualTime> {
        let has_waited = self.now().saturating_sub(client.waiting_since);
        let waited = if is_ordered(standing(client)) { has_waited } else { Duration::ZERO };
        client.accounts.keys().filter_map(move |uuid| {
            let gpu = self.gpus.get(uuid)?;
            Some(gpu.shares.lead_of_waiter(client.job, waited, gpu.quantum))
        })
    }

    /// Returns how far a client, or its gang, is ahead of the clock on the GPU where it is furthest ahead. A member that cannot drain
    /// runs on while others wait, and they go when it is their turn.
    pub(crate) fn lead_on_all(&self, client: &Client) -> VirtualTime {
        let of_gang = client.gang.and_then(|gang| self.gangs.get(&gang));
        let known = of_gang.map_or(&client.lead, |members| &members.lead);
        known.get_or_compute(self.events, || match of_gang {
            Some(members) => {
                let clients = || members.ids().filter_map(|id| self.clients.get(&id));
                let waits = |client: &&Client| client.waits() && !client.accounts.is_empty();
                let some_wait = clients().any(|client| waits(&client));
                let counted = clients().filter(|client| !some_wait || waits(client));
                order::lead_on_all(counted.flat_map(|client| self.lead_on_each(client)))
            }
            None => order::lead_on_all(self.lead_on_each(client)),
        })
    }
}

/// How a client stands: its entries have this in common.
#[derive(Debug, Clone, Copy)]
struct Stands {
    standing: Standing,
    activity: Activity,
    job: Job,
    /// Its turn comes on several GPUs at once.
    several: bool,
    /// How far it is ahead of the clocks of its GPUs then.
    lead: VirtualTime,
}

impl Stands {
    fn of(client: &Client, activity: Activity, state: &State) -> Self {
        let (standing, several) = (standing(client), client.uses_several());
        let lead = if several && is_ordered(standing) { state.lead_on_all(client) } else { 0 };
        Self { standing, activity, job: state.takes_turns_as(client), several, lead }
    }

    /// Returns the client's entry on one GPU.
    fn entry(self, client: &Client, account: &Account, gpu: &Gpu, config: &Config) -> Entry {
        let floats = self.several && self.standing == Standing::Waits;
        let time = match self.several {
            true if floats => self.lead,
            true => gpu.shares.clock().saturating_add(self.lead),
            false => gpu.shares.time(client.job),
        };
        let time = time.saturating_sub(gpu.head_start_of(client));
        let ordered = is_ordered(self.standing);
        let (pinned, kept) = (client.pinned(account), client.kept(account));
        let said = CapacityFigures { available: account.usage.total, ..CapacityFigures::default() };
        let capacity = match gpu.source {
            CapacitySource::Disputed => config.usable(gpu.uuid, said),
            _ => gpu.capacity,
        };
        Entry {
            standing: self.standing,
            room: account.room,
            pinned,
            demand: account.demand(capacity, kept),
            allocated: account.usage.allocated,
            overhead: if client.sleep.is_off_card() { 0 } else { account.overhead() },
            bytes_ordered_out: account.evict_order.map(|order| order.bytes),
            has_need: account.needs > 0 && !client.stopped && !client.sleep.is_off_card(),
            is_running: client.phase().is_running_or_draining(),
            is_silent: client.is_silent(),
            is_claiming: client.phase() == Phase::Next(NextReason::Claims),
            activity: self.activity,
            payer: client.job,
            job: self.job,
            place: if ordered {
                Place { time, since: client.waiting_since, client: client.id }
            } else {
                Place::nowhere(client.id)
            },
            is_floating: floats,
            total: Some(account.usage.total),
            due: client.first_due(account, config.grace),
            sleeper: Sleeper {
                sleep: client.sleep,
                needs: if client.sleep.is_off_card() { gpu.needs_to_return(account) } else { 0 },
            },
        }
    }
}

/// Whether clients that stand like this have a place in the order of turns.
fn is_ordered(standing: Standing) -> bool {
    matches!(standing, Standing::Waits | Standing::Next)
}

fn standing(client: &Client) -> Standing {
    match client.phase() {
        Phase::Parked if client.waits() => Standing::Waits,
        Phase::Parked => Standing::Parked,
        Phase::Next(_) => Standing::Next,
        Phase::Dropping { .. } | Phase::Drained => Standing::Leaves,
        Phase::Granted { .. } | Phase::Running { .. } | Phase::Idle { .. } => Standing::Holds,
        Phase::Free => Standing::Free,
    }
}

/// Returns a client's activity, as its job's share counts it. A client that does not answer does nothing:
/// nobody waits for a turn of a process that is stopped.
fn activity(client: &Client) -> Activity {
    if client.is_unresponsive {
        return Activity::default();
    }
    let (holds, counted) = (client.phase().uses_a_turn(), client.phase().is_charged_to_its_job());
    let waits = client.waits() && !client.must_wait;
    let active = holds || waits || client.phase().is_next();
    Activity {
        active,
        holds,
        counted,
        runs: client.phase().is_running_or_draining(),
        long: active && !client.is_interactive(),
    }
}
