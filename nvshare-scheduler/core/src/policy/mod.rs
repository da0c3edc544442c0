//! The questions that a scheduler answers, one small pure function each.
//!
//! | question | file |
//! |---|---|
//! | when does short work go ahead of long work? | [`ahead`] |
//! | what may switching still cost? | [`budget`] |
//! | how much may clients fill? | [`capacity`] |
//! | who is entitled to how much of the time? | [`entitled`] |
//! | what does the client that is next get while others leave? | [`exchange`] |
//! | who is next, and who may pass it? | [`order`] |
//! | how is a compute limit enforced? | [`pace`] |
//! | how long is an answer waited for, and when is it asked for again? | [`patience`] |
//! | how long is a turn? | [`quantum`] |
//! | when does a client that rests go to sleep by itself? | [`rest`] |
//! | who is interactive? | [`rhythm`] |
//! | when does a client go to sleep, and when may it come back? | [`sleep`] |
//! | who takes turns though all fits, and how long? | [`slices`] |
//! | who runs together? | [`together`] |
//! | is the turn over? | [`turn`] |
//! | who gives memory back, and how much? | [`victims`] |
//!
//! A policy sees plain numbers, knows nothing of messages, and changes nothing.

pub(crate) mod ahead;
pub(crate) mod budget;
pub(crate) mod capacity;
pub(crate) mod entitled;
pub(crate) mod exchange;
pub(crate) mod order;
pub(crate) mod pace;
pub(crate) mod patience;
pub(crate) mod quantum;
pub(crate) mod rest;
pub(crate) mod rhythm;
pub(crate) mod sleep;
pub(crate) mod slices;
pub(crate) mod together;
pub(crate) mod turn;
pub(crate) mod victims;
