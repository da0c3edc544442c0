//! Who is there, and what each has.

pub(crate) mod account;
pub(crate) mod client;
pub(crate) mod config;
pub(crate) mod cost;
pub(crate) mod gpu;
pub(crate) mod ledger;
pub(crate) mod rule;
pub(crate) mod share;
pub(crate) mod shares;
pub(crate) mod short;
pub(crate) mod trial;
pub(crate) mod virtual_time;
