//! How many descriptors the process may have, and how clients, segments and seats share them.

use nvshare_proto::MAX_SEATS;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The largest number of clients, whatever the system allows.
const MAX_CLIENTS: usize = 4096;
/// Descriptors of a client: its connection, its process, and its tenant's page.
const PER_CLIENT: usize = 3;
/// Descriptors for all other purposes.
const RESERVED: usize = 64;

/// One of this many parts of all descriptors is for segments of the host's memory, if there are any.
const SEGMENTS_DIVISOR: usize = 4;
/// One of this many parts of all descriptors is for sockets of seats.
const SEATS_DIVISOR: usize = 16;

/// The uses of the process's descriptors that grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Places {
    /// The largest number of clients.
    pub(crate) clients: usize,
    /// The largest number of segments of the host's memory.
    pub(crate) segments: usize,
}

/// Returns how many clients and segments there may be, so that administrators have descriptors too. Raises the process's own limit as far as possible.
pub(crate) fn places(has_segments: bool) -> Places {
    divide(descriptors(), has_segments)
}

/// Returns how many seats there may be: each has a socket. Raises the process's own limit as far as possible.
pub(crate) fn most_seats() -> usize {
    seats(descriptors().saturating_sub(RESERVED))
}

fn seats(descriptors: usize) -> usize {
    (descriptors / SEATS_DIVISOR).clamp(1, MAX_SEATS)
}

/// How many descriptors the process may have.
fn descriptors() -> usize {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    let allowed = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(allowed).unwrap_or(usize::MAX)
}

fn divide(descriptors: usize, has_segments: bool) -> Places {
    let descriptors = descriptors.saturating_sub(RESERVED);
    let segments = if has_segments { (descriptors / SEGMENTS_DIVISOR).max(1) } else { 0 };
    let clients = descriptors.saturating_sub(segments).saturating_sub(seats(descriptors)) / PER_CLIENT;
    Places { clients: clients.clamp(1, MAX_CLIENTS), segments }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_leave_descriptors_for_clients_and_administrators() {
        assert_eq!(divide(1024, false), Places { clients: 300, segments: 0 });
        assert_eq!(divide(1024, true), Places { clients: 220, segments: 240 });
        assert_eq!(divide(64, true), Places { clients: 1, segments: 1 });
        for descriptors in [200, 1024, 4096, 1 << 20, usize::MAX] {
            let Places { clients, segments } = divide(descriptors, true);
            let others = RESERVED + seats(descriptors - RESERVED);
            assert!(segments.saturating_add(clients * PER_CLIENT).saturating_add(others) <= descriptors);
        }
    }
}
