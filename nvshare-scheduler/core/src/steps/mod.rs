//! What is done: each step changes the state, and says what follows for clients.

pub(crate) mod enforce;
pub(crate) mod gangs;
pub(crate) mod measure;
pub(crate) mod outgrown;
pub(crate) mod overdue;
pub(crate) mod reconcile;
pub(crate) mod room;
pub(crate) mod terms;
pub(crate) mod turns;
pub(crate) mod views;
