//! The real client beside the real scheduler's core, in virtual time.
//!
//! Each process of a world is a [`Session`](nvshare_client::Session) with its accounts, a mover that takes its time, and a
//! program that computes, pauses, allocates, defers its drains and dies. Their messages cross those of the core: each
//! takes a while, drawn from a seed. After each event the invariants are checked against what the processes do.

mod agenda;
mod checks;
mod exchange;
mod fairness;
mod follower;
mod found;
mod gangs;
mod interactive;
mod library;
mod memory;
mod mover;
mod plan;
mod program;
mod properties;
mod returned;
mod several;
mod shares;
mod terms;
mod turns;
mod waits;
mod world;
