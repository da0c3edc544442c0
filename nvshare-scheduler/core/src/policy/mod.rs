//! The questions that a scheduler answers, one small pure function each.
//!
//! | question | file |
//! |---|---|
//! | how much may clients fill? | [`capacity`] |
//! | who is next? | [`next`] |
//! | who runs together? | [`together`] |
//! | is the turn over? | [`turn`] |
//! | who gives memory back, and how much? | [`victims`] |
//!
//! A policy sees plain numbers, knows nothing of messages, and changes nothing.

pub mod capacity;
pub mod next;
pub mod together;
pub mod turn;
pub mod victims;
