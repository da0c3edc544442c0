//! Turns: which client is next, which clients have to leave for it, and when.

pub(crate) mod case;
mod claim;
mod hopeless;
mod length;
mod queue;
