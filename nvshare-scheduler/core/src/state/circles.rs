//! Clients that are to be one gang because they share memory.
//!
//! A gang is made once, when all pairs that hang together in it are known. Made pair by pair, each of its members would be written
//! anew for each one that joins: 64 connections of one process could keep the scheduler busy.

use std::collections::BTreeMap;

use nvshare_proto::MAX_GANG_MEMBERS;

use crate::state::State;
use crate::state::client::{Client, ClientId, GangId};

/// Clients that are one gang, or are to be.
#[derive(Debug)]
pub(crate) struct Circle {
    pub(crate) ids: Vec<ClientId>,
    /// The gang as which it goes on; none, if no two of them are one yet.
    pub(crate) gang: Option<GangId>,
    /// The number of the memory by which it was made of others, first.
    pub(crate) made_by: Option<u64>,
    /// All of them become one gang with those that they share memory with.
    joins: bool,
}

impl Circle {
    /// Returns the circle of a client and those that it is granted together with.
    fn of(state: &State, id: ClientId) -> Self {
        let ids = state.unit(id).to_vec();
        let joins = |&id: &ClientId| state.client(id).is_some_and(Client::joins_sharers);
        Self { joins: ids.iter().all(joins), ids, gang: state.gang_of(id), made_by: None }
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
        let Circle { ids, gang, .. } = &mut self.circles[from];
        let (moved, gang) = (std::mem::take(ids), *gang);
        self.places.extend(moved.iter().map(|&id| (id, to)));
        let circle = &mut self.circles[to];
        circle.ids.extend(moved);
        circle.gang = circle.gang.or(gang);
        circle.made_by.get_or_insert(number);
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

    /// Returns those that were made of others.
    pub(crate) fn into_made(self) -> impl Iterator<Item = Circle> {
        self.circles.into_iter().filter(|circle| circle.made_by.is_some() && !circle.ids.is_empty())
    }
}
