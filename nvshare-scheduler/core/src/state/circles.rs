//! Clients that are to be one gang because they share memory.
//!
//! A gang is made once, when all pairs that hang together in it are known. Made pair by pair, each of its members would be written
//! anew for each one that joins: 64 connections of one process could keep the scheduler busy.

use std::collections::BTreeMap;

use nvshare_proto::MAX_GANG_MEMBERS;

use crate::state::State;
use crate::state::client::{Client, ClientId, Gang, GangId};

/// Clients that are one gang, or are to be.
#[derive(Debug)]
struct Circle {
    ids: Vec<ClientId>,
    /// The gang that it goes on as; one client has none.
    gang: Option<GangId>,
    /// All of them become one gang with those that they share memory with.
    joins: bool,
    /// It was made of several.
    is_new: bool,
}

impl Circle {
    /// Returns the circle of a client and those that it is granted together with.
    fn of(state: &State, id: ClientId) -> Self {
        let ids = state.unit(id).to_vec();
        let joins = |&id: &ClientId| state.client(id).is_some_and(Client::joins_sharers);
        Self { joins: ids.iter().all(joins), ids, gang: state.gang_of(id), is_new: false }
    }
}

/// Circles that become larger ones.
#[derive(Debug, Default)]
pub(crate) struct Circles {
    circles: Vec<Circle>,
    /// The circle of each client that is in one.
    places: BTreeMap<ClientId, usize>,
}

impl Circles {
    /// Makes the circles of two clients one, which share memory of this number. A gang has a largest size, and a client that has named
    /// its gang stays with that.
    pub(crate) fn join(&mut self, state: &State, [one, other]: [ClientId; 2], number: u64) {
        let [to, from] = [one, other].map(|id| self.place(state, id));
        let (circle, added) = (&self.circles[to], &self.circles[from]);
        let size = circle.ids.len() + added.ids.len();
        if to == from || size > MAX_GANG_MEMBERS as usize || !circle.joins || !added.joins {
            return;
        }
        let gang = circle.gang.or(added.gang).unwrap_or(GangId(number));
        let moved = std::mem::take(&mut self.circles[from].ids);
        self.places.extend(moved.iter().map(|&id| (id, to)));
        let circle = &mut self.circles[to];
        circle.ids.extend(moved);
        (circle.gang, circle.is_new) = (Some(gang), true);
    }

    /// Returns the place of a client's circle.
    fn place(&mut self, state: &State, id: ClientId) -> usize {
        if let Some(&place) = self.places.get(&id) {
            return place;
        }
        let (place, circle) = (self.circles.len(), Circle::of(state, id));
        self.places.extend(circle.ids.iter().map(|&id| (id, place)));
        self.circles.push(circle);
        place
    }

    /// Returns the members of each gang that is to be made, with its name.
    pub(crate) fn into_gangs(self) -> impl Iterator<Item = (Vec<ClientId>, Gang)> {
        let made = self.circles.into_iter().filter(|circle| circle.is_new && !circle.ids.is_empty());
        made.filter_map(|circle| Some((circle.ids, Gang { number: circle.gang?.0, size: 0 })))
    }
}
