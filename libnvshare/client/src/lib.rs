//! The decisions of the preloaded library: its side of the protocol, and the sums of its memory.
//!
//! There is no CUDA here, no IO, no lock and no clock. The library calls these functions under its locks, waits, and makes the
//! driver's calls. Tests call the same functions beside the real scheduler's core, in virtual time.
//!
//! | module | |
//! |---|---|
//! | [`machine`] | the client's side of the protocol: messages of the scheduler in, actions out |
//! | [`session`] | the machine and the accounts together: what the scheduler is told, and when |
//! | [`account`] | the sums of one device: bytes allocated and charged, room, and allocations that wait for room |
//! | [`residency`] | what of one allocation is on the card, and the piece of it that leaves next |
//! | [`slabs`] | which parts are free of the memory that small allocations share |
//! | [`content`] | what is known of a piece of memory: whether it is all zero, and its hash |
//! | [`launch_window`] | how much work may be in flight while another client waits |
//! | [`pauses`] | how long a program pauses in its work, and when it counts as idle |

#![forbid(unsafe_code)]
// The crate runs in programs that are not ours, and must never stop them.
#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::print_stderr
)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod account;
pub mod content;
pub mod kind;
pub mod launch_window;
pub mod machine;
pub mod pauses;
pub mod residency;
pub mod session;
mod sharing;
pub mod slabs;

pub use account::{
    Account, Admission, Caller, DeviceFacts, DriverReserve, Patience, Refusal, TenantQuota, Wait,
};
pub use kind::Kind;
pub use machine::{Action, Input, Machine, MoverOrder, Ticket};
pub use residency::{Piece, Residency};
pub use session::{Done, Host, Session};
