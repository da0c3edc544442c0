//! How a client stands on all of its GPUs: judged once in a round of looks, and used by the look at each of them.
//!
//! A case holds to the end of its round, as long as nothing changes on its GPUs; after a change it is judged anew.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

use nvshare_proto::GpuUuid;

use crate::state::client::{Client, ClientId};
use crate::steps::gangs::Unit;
use crate::steps::turns::length::{End, Split};
use crate::{Core, Time};

/// How a waiter stands. Parts that not every look needs are judged when one does.
#[derive(Debug)]
pub(super) struct Case {
    pub(super) unit: Unit,
    /// It must wait as things are: no room can be made for it, or its gang lacks members.
    pub(super) is_hopeless: bool,
    /// Some of its gang give the lock back.
    pub(super) is_leaving: bool,
    /// How many changes there had been when it was judged.
    changes: u64,
    outlook: OnceLock<Outlook>,
    turn: OnceLock<(Vec<Split>, Option<End>)>,
    /// It watches the GPUs where something is in its way.
    pub(super) watches: OnceLock<()>,
}

/// The clients of several GPUs that were judged in a round, by the first of each gang.
#[derive(Debug, Default)]
pub(crate) struct Cases {
    waiters: BTreeMap<ClientId, Arc<Case>>,
    /// Those who are next, and lack room on one of their GPUs.
    pub(crate) lacking: BTreeSet<ClientId>,
    /// Counts the changes of entries in ledgers.
    pub(crate) changes: u64,
}

impl Cases {
    /// Forgets all: a round begins, or a gang is none any more.
    pub(crate) fn clear(&mut self) {
        self.waiters.clear();
        self.lacking.clear();
    }
}

/// Where a waiter could go.
#[derive(Debug)]
pub(super) struct Outlook {
    /// A compute limit keeps it waiting until then.
    pub(super) paced_until: Option<Time>,
    /// GPUs where others are ahead of it; two at most, since a look wants to know of one besides its own.
    barred: Vec<GpuUuid>,
    /// GPUs that it does not fit beside those who stay.
    pub(super) contested: Vec<GpuUuid>,
    /// Those GPUs are marked as contested.
    pub(super) marked: OnceLock<()>,
}

impl Outlook {
    pub(super) fn is_contested(&self, uuid: GpuUuid) -> bool {
        self.contested.binary_search(&uuid).is_ok()
    }

    /// Whether others are ahead of the waiter on another GPU than this one.
    pub(super) fn is_barred_beside(&self, uuid: GpuUuid) -> bool {
        self.barred.iter().any(|&other| other != uuid)
    }
}

impl Core {
    /// A waiter's case, with its gang.
    pub(super) fn case_of(&mut self, id: ClientId) -> Arc<Case> {
        let known = self.unit(id).first().and_then(|first| self.cases.waiters.get(first));
        // What has changed on its GPUs since then may concern it.
        let holds = |case: &&Arc<Case>| {
            case.changes == self.cases.changes
                || !self.gpus_of(&case.unit).iter().any(|uuid| self.dirty.contains(uuid))
        };
        if let Some(case) = known.filter(holds) {
            return Arc::clone(case);
        }
        self.steps += 1;
        let is_hopeless = self.judge_hopeless(id);
        let unit = self.unit(id);
        let is_leaving = self.is_leaving(&unit);
        let first = unit.first().copied().unwrap_or(id);
        let has_several = self.clients.get(&id).is_some_and(Client::uses_several);
        let (outlook, turn, watches) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        let changes = self.cases.changes;
        let case = Arc::new(Case { unit, is_hopeless, is_leaving, changes, outlook, turn, watches });
        if has_several {
            self.cases.waiters.insert(first, Arc::clone(&case));
        }
        case
    }

    pub(super) fn outlook<'a>(&self, case: &'a Case) -> &'a Outlook {
        case.outlook.get_or_init(|| {
            let unit = &case.unit;
            let gpus = self.gpus_wanted_by(unit);
            let is_barred = |uuid: &GpuUuid| gpus.len() > 1 && !self.may_go(*uuid, unit);
            let is_contested = |uuid: &GpuUuid| !self.fits_beside_members(*uuid, unit);
            Outlook {
                paced_until: self.paced_until(unit),
                barred: gpus.iter().copied().filter(is_barred).take(2).collect(),
                contested: gpus.iter().copied().filter(is_contested).collect(),
                marked: OnceLock::new(),
            }
        })
    }

    /// Those who would have to leave each contested GPU, and when their turns are over.
    pub(super) fn turn_before<'a>(&self, case: &'a Case) -> &'a (Vec<Split>, Option<End>) {
        case.turn.get_or_init(|| {
            let contested = &self.outlook(case).contested;
            let splits: Vec<Split> = contested.iter().map(|&gpu| self.split_for(gpu, &case.unit)).collect();
            let end = self.turns_end(&case.unit, &splits);
            (splits, end)
        })
    }
}
