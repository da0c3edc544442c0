//! The core with clients that behave, that do not, and that die, in virtual time.

mod claims;
mod cost;
mod events;
mod fairness;
mod follower;
mod gangs;
mod jobs;
mod large;
mod life;
mod memory;
mod model;
mod needs;
mod properties;
mod returns;
mod shares;
mod table;
mod turns;
mod world;
