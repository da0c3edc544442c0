//! How many clients there may be.

#![allow(unsafe_code, reason = "the limit of descriptors is asked for by a raw system call")]

/// Most clients, whatever the system allows.
const MOST: usize = 4096;
/// Descriptors of a client: its connection, its process, and its tenant's page.
const EACH: usize = 3;
/// Descriptors for everything else.
const OTHERS: usize = 64;

/// Clients whose descriptors leave some for administrators. The process's own limit is raised as far as it may be.
pub(crate) fn clients() -> usize {
    let mut limit = libc::rlimit { rlim_cur: 1024, rlim_max: 1024 };
    // SAFETY: a place for the answer; then a limit within what the system allows.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
            libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        }
    }
    let descriptors = usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX);
    (descriptors.saturating_sub(OTHERS) / EACH).clamp(1, MOST)
}
