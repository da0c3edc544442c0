//! Backings of device memory: how memory is kept, leaves the card and comes back.
//!
//! | backing | an allocation is | leaves by | comes back by |
//! |---|---|---|---|
//! | managed ([`mover`](crate::memory::mover)) | managed memory | a prefetch to the host | a prefetch, or by page faults |
//! | [`swap`] | addresses of the library, with physical memory behind them in chunks | a copy; then the chunk is unmapped and released | a new chunk, mapped, and a copy |
//!
//! A backing moves memory and keeps the account of the device true; it decides nothing. When moving fails:
//!
//! - out: the memory stays where it is, and counts there;
//! - in, managed: the pages come by faults when they are touched;
//! - in, swap: the memory stays unmapped, and the gate stays closed until it is back.

pub(crate) mod swap;
