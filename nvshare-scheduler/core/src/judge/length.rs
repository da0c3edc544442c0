//! How long a turn lasts: when the clients that would have to leave for a waiter have had theirs.

use std::time::Duration;

use nvshare_proto::GpuUuid;
use nvshare_proto::units::{saturate, saturate_u32};

use crate::Time;
use crate::judge::short::{LongWork, is_interactive};
use crate::policy::turn::{self, Turn};
use crate::policy::{patience, quantum, slices};
use crate::state::State;
use crate::state::account::Account;
use crate::state::client::{Client, ClientId, Job, NextReason, Phase};
use crate::state::gangs::Unit;
use crate::state::gpu::Gpu;
use crate::state::ledger::Group;
use crate::state::rule::Rule;

/// Virtual times that differ by no more than this count as equal, in nanoseconds.
const EVEN: i64 = 1_000_000;

/// When the turns of the clients that leave for a waiter are over.
#[derive(Debug, Clone, Copy)]
pub(crate) struct End {
    /// When the waiter may have the GPUs.
    pub(crate) at: Time,
    /// When the turns are over for the clients that wait in turn. The waiter goes ahead of them if this is
    /// later.
    pub(crate) in_turn: Time,
}

/// The clients that stay on a GPU, by whether they fit it together with a waiter.
#[derive(Debug)]
pub(crate) struct Split {
    pub(crate) gpu: GpuUuid,
    /// The waiter, and those that stay.
    pub(crate) kept: Group,
    pub(crate) leavers: Vec<ClientId>,
}

/// The clients that would have to leave a GPU for a waiter.
#[derive(Debug, Default)]
struct Held {
    /// The jobs of the clients that are not idle.
    jobs: Vec<Job>,
    work: LongWork,
    /// When the last of them became idle, if all are.
    idle_since: Option<Time>,
    /// How long the idle ones keep their places.
    patience: Duration,
    /// How many drains of one of them, or of its gang, were given up one after the other.
    deferrals: u32,
    /// When they may be asked: a drain that was given up is not tried again at once, and a rank that restores is waited for.
    not_before: Time,
    /// Since when the last rank has been idle of those whose gangs work on, if there is one.
    rank_idle_since: Option<Time>,
}

impl State {
    /// Splits the clients that stay on a GPU by whether they fit it together with a waiter.
    pub(crate) fn split_for(&self, gpu: &Gpu, unit: &Unit) -> Split {
        let (kept, leavers) = self.keep_what_fits(gpu, Some(unit), self.staying_by_turn(gpu));
        Split { gpu: gpu.uuid, kept, leavers: self.with_their_gangs(leavers) }
    }

    /// Returns when the turns of the clients that leave for a waiter are over; `None` while that is unknown.
    pub(crate) fn turns_end(&self, unit: &Unit, splits: &[Split]) -> Option<End> {
        let mut ends = End { at: Time::ZERO, in_turn: Time::ZERO };
        for split in splits {
            let End { at, in_turn } = self.turn_end_on(self.gpu(split.gpu)?, unit, &split.leavers)?;
            ends = End { at: ends.at.max(at), in_turn: ends.in_turn.max(in_turn) };
        }
        Some(ends)
    }

    /// Returns the same for the clients that leave one GPU.
    fn turn_end_on(&self, gpu: &Gpu, unit: &Unit, leavers: &[ClientId]) -> Option<End> {
        let to_move = self.bytes_to_move(gpu, unit);
        // An idle holder that stays saves only its own return: the waiter's turn comes anyhow.
        let leavers_demand = leavers.iter().map(|&leaver| gpu.demand(leaver)).sum::<u128>();
        let to_return = saturate(leavers_demand).min(to_move);
        let move_cost = if to_return == 0 { Duration::ZERO } else { gpu.rates.there_and_back(to_return) };
        let held = self.held_by(leavers, move_cost)?;
        let cost = self.hand_over_cost(gpu, unit, to_move);
        let Some(sooner) = held.work.gives_way_at(self, gpu, unit, cost) else {
            let at = turn::ends(&self.turn(gpu, unit, &held)?)?;
            return Some(End { at, in_turn: at });
        };
        // Short work has what it may cost. It takes the turn only when that is over for the clients that wait
        // in turn. Otherwise nobody would have to pay for the hand-overs to it.
        gpu.turn.started()?;
        let waiter = self.first_in_turn(gpu, unit);
        let in_turn = waiter.and_then(|waiter| turn::ends(&self.turn(gpu, &waiter, &held)?));
        let in_turn = in_turn.unwrap_or(Time::MAX);
        Some(End { at: in_turn.min(sooner.max(held.not_before)), in_turn })
    }

    /// Returns by whose work a GPU is held; `None` if a turn has not begun, so that it cannot be over.
    fn held_by(&self, leavers: &[ClientId], move_cost: Duration) -> Option<Held> {
        let mut held = Held {
            idle_since: Some(Time::ZERO),
            not_before: self.gangs_complete_by(leavers),
            ..Held::default()
        };
        for leaver in leavers {
            let client = self.client(*leaver)?;
            held.rank_idle_since = held.rank_idle_since.max(self.keeps_mates_waiting_since(client));
            match client.phase() {
                Phase::Next(NextReason::Claims) | Phase::Granted { begins: true, .. } => return None,
                Phase::Idle { since, .. } => {
                    held.idle_since = held.idle_since.map(|idle| idle.max(since));
                    let usual = move_cost.saturating_mul(turn::IDLE_FACTOR);
                    held.patience = held.patience.max(client.rhythm.patience(move_cost, usual));
                }
                // A gang is idle when all its members are; a parked member does nothing.
                Phase::Parked => {}
                _ => {
                    held.idle_since = None;
                    if client.deferrals > 0 {
                        held.deferrals = held.deferrals.max(client.deferrals);
                        held.not_before = held.not_before.max(client.drains_again_at);
                    }
                    held.work.add_holder(client);
                    held.jobs.push(client.job);
                }
            }
        }
        Some(held)
    }

    /// Returns when these clients may be asked for the lock: a drain that was given up is not tried again at once, and a rank that comes in is
    /// waited for.
    pub(crate) fn earliest_drain(&self, ids: &[ClientId]) -> Time {
        self.retries_drains_at(ids).max(self.gangs_complete_by(ids))
    }

    /// Returns when drains of these clients that were given up may all be tried again.
    pub(crate) fn retries_drains_at(&self, ids: &[ClientId]) -> Time {
        self.clients_of(ids).map(|client| client.drains_again_at).max().unwrap_or(Time::ZERO)
    }

    /// Returns when the gangs of these clients are complete at the latest, of which a rank brings its memory back while others work. These
    /// may not be able to drain before. One that waits for room may wait for those very clients.
    pub(crate) fn gangs_complete_by(&self, ids: &[ClientId]) -> Time {
        let works_by = |client: &Client| match client.phase() {
            Phase::Granted { until, .. } if !client.is_silent() && !client.needs_room() => {
                self.keeps_mates_waiting_since(client).map(|_| until)
            }
            _ => None,
        };
        self.clients_of(ids).filter_map(works_by).max().unwrap_or(Time::ZERO)
    }

    /// Returns since when a rank does not work while others of its gang do. Their kernels may wait for its next ones: they could not
    /// drain without it.
    pub(crate) fn keeps_mates_waiting_since(&self, client: &Client) -> Option<Time> {
        let since = match client.phase() {
            Phase::Idle { since, .. } | Phase::Granted { since, .. } => since,
            Phase::Next(NextReason::Resumes) => client.waiting_since,
            _ => return None,
        };
        let unit = self.unit_of(client);
        self.clients_of(&unit).any(|mate| mate.phase().is_running_or_draining()).then_some(since)
    }

    /// Returns the first waiter, besides a unit, that is not interactive.
    fn first_in_turn(&self, gpu: &Gpu, unit: &Unit) -> Option<Unit> {
        let others = gpu.active_waiters().map(|place| place.client).filter(|id| !unit.contains(id));
        others.map(|id| self.unit(id)).find(|unit| !is_interactive(self, unit))
    }

    /// Returns the turn of the clients that hold a GPU, as a waiter sees it.
    fn turn(&self, gpu: &Gpu, waiter: &Unit, held: &Held) -> Option<Turn> {
        let one = waiter.iter().copied().find(|&id| gpu.ledger.entry(id).is_some())?;
        let own_job = self.client(one)?.job;
        let (own, own_weight) = (gpu.shares.time(own_job), gpu.shares.weight(own_job));
        let mut catches_up = Duration::ZERO;
        let mut heaviest = own_weight;
        for &job in &held.jobs {
            let behind = own.saturating_sub(gpu.shares.time(job));
            let weight = gpu.shares.weight(job);
            heaviest = heaviest.max(weight);
            // A smaller difference does not count.
            if behind > EVEN {
                catches_up = catches_up.max(gpu.shares.time_to_reach(job, own));
            }
        }
        let beside = saturate_u32(gpu.shares.holding().max(1));
        let ratio = slices::ratio(heaviest, own_weight);
        let quantum = self.owed_quantum(gpu, waiter, self.bytes_to_move(gpu, waiter));
        let beyond = self.accounts_on(gpu, waiter).map(|account| account.cost.overrun_allowance(quantum));
        Some(Turn {
            started: gpu.turn.started(),
            quantum,
            most_quanta: slices::most_quanta(ratio, turn::MAX_QUANTA),
            even_at: self.now().saturating_add(catches_up.saturating_mul(beside)),
            beyond: gpu.longest_drain.max(slices::allowance(
                ratio,
                quantum,
                beyond.max().unwrap_or_default(),
            )),
            not_before: held.not_before,
            rank_idle_since: held.rank_idle_since,
            rank_patience: patience::drain_patience(gpu.deferrals.max(held.deferrals)),
            idle_since: held.idle_since,
            patience: held.patience,
        })
    }

    /// Returns the length of a turn that ends for a waiter, for which `to_move` bytes have to move.
    pub(crate) fn quantum(&self, gpu: &Gpu, unit: &Unit, to_move: u64) -> Duration {
        if to_move == 0 && gpu.shares.are_unequal() {
            return slices::length(gpu.cost.gap.mean());
        }
        let Rule::Auto(target) = gpu.rule else { return gpu.quantum };
        quantum::auto(target, self.cost_of_moving(gpu, unit, to_move), gpu.shares.long())
    }

    /// Returns the time of a hand-over to a unit: as measured on average, else estimated from the bytes to
    /// move.
    pub(crate) fn hand_over_cost(&self, gpu: &Gpu, unit: &Unit, to_move: u64) -> Duration {
        let costs = self.accounts_on(gpu, unit).filter_map(|account| account.cost.gap.mean());
        costs.max().unwrap_or_else(|| gpu.rates.there_and_back(to_move))
    }

    fn accounts_on(&self, gpu: &Gpu, unit: &Unit) -> impl Iterator<Item = &Account> {
        unit.on(gpu.uuid).iter().filter_map(|&id| self.account(id, gpu.uuid))
    }

    /// Returns the hand-over cost for as many bytes as have to move now.
    fn cost_of_moving(&self, gpu: &Gpu, unit: &Unit, to_move: u64) -> Duration {
        let apart = gpu.rates.there_and_back(to_move);
        let costs = self.accounts_on(gpu, unit).filter_map(|account| account.cost_of_moving(to_move, apart));
        costs.max().unwrap_or(apart)
    }

    /// Returns the same as [`State::quantum`], and longer while switching has cost more than it may.
    fn owed_quantum(&self, gpu: &Gpu, unit: &Unit, to_move: u64) -> Duration {
        let quantum = self.quantum(gpu, unit, to_move);
        let (Rule::Auto(target), Some(started), 1..) = (gpu.rule, gpu.turn.started(), to_move) else {
            return quantum;
        };
        let owed = gpu.budget.paid_at(target.overhead_ppm).saturating_sub(started);
        let longest = quantum::longest(target, self.hand_over_cost(gpu, unit, to_move), gpu.shares.long());
        quantum.max(owed.min(longest))
    }
}
