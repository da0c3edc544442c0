//! Every order in which the gate's handshake and the sums of a quota page can go, by loom.
//!
//! The files under test are the library's and the protocol's own: they are compiled here once more, with loom's atomics in
//! the place of the standard library's. What is not code of ours is modelled: a fence that the kernel runs on all threads
//! (`membarrier`) is a fence of the closer, and the place where the compiler keeps a thread's mark before its look is a
//! fence of that thread, since one is certain to have run there before or after: if the closer asks the kernel for it, which is
//! tried before each model. Each of these two can be left out, and is missed then.

mod gate;
mod quota;

/// `cargo break-rules` asks this in the files that it changes: whether this rule is the one that is broken on purpose.
#[allow(
    dead_code,
    clippy::disallowed_methods,
    reason = "only a patched copy of the sources asks, and its test chooses by it"
)]
pub(crate) fn broken_rule(rule: usize) -> bool {
    std::env::var("NVSHARE_BROKEN_RULE").is_ok_and(|broken| broken == rule.to_string())
}
