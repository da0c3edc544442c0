//! The core with clients for which tests speak, message by message, in virtual time. The joint tests of `nvshare-client` are those
//! in which real clients answer.

mod blocked;
mod bounds;
mod claims;
mod cost;
mod deferred;
mod events;
mod exchange;
mod gangs;
mod interactive;
mod jobs;
mod large;
mod memory;
mod needs;
mod returns;
mod sharers;
mod sleep;
mod stopped;
mod table;
mod turns;
mod victims;
mod warnings;
