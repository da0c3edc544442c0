//! How many descriptors the process may have, and how clients, segments and seats share them.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Most clients, even if the system allows more.
const MOST: usize = 4096;
/// Descriptors of a client: its connection, its process, and its tenant's page.
const EACH: usize = 3;
/// Descriptors for all other purposes.
const OTHERS: usize = 64;

/// One of this many parts of all descriptors is for segments of the host's memory, if there are any.
const PART_OF_SEGMENTS: usize = 4;
/// One of this many parts of all descriptors is for sockets of seats.
const PART_OF_SEATS: usize = 16;
/// Most seats, even if the system allows more.
pub(crate) const MOST_SEATS: usize = 4096;

/// The uses of the process's descriptors that grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Most {
    /// Most clients.
    pub(crate) clients: usize,
    /// Most segments of the host's memory.
    pub(crate) segments: usize,
}

/// The numbers that leave descriptors for administrators. Raises the process's own limit as far as possible.
pub(crate) fn most(has_segments: bool) -> Most {
    shared_out(descriptors(), has_segments)
}

/// Most seats: each has a socket. Raises the process's own limit as far as possible.
pub(crate) fn most_seats() -> usize {
    seats(descriptors().saturating_sub(OTHERS))
}

fn seats(descriptors: usize) -> usize {
    (descriptors / PART_OF_SEATS).clamp(1, MOST_SEATS)
}

/// How many descriptors the process may have.
fn descriptors() -> usize {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    let allowed = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(allowed).unwrap_or(usize::MAX)
}

fn shared_out(descriptors: usize, has_segments: bool) -> Most {
    let descriptors = descriptors.saturating_sub(OTHERS);
    let segments = if has_segments { (descriptors / PART_OF_SEGMENTS).max(1) } else { 0 };
    let clients = descriptors.saturating_sub(segments).saturating_sub(seats(descriptors)) / EACH;
    Most { clients: clients.clamp(1, MOST), segments }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_leave_descriptors_for_clients_and_administrators() {
        assert_eq!(shared_out(1024, false), Most { clients: 300, segments: 0 });
        assert_eq!(shared_out(1024, true), Most { clients: 220, segments: 240 });
        assert_eq!(shared_out(64, true), Most { clients: 1, segments: 1 });
        for descriptors in [200, 1024, 4096, 1 << 20, usize::MAX] {
            let Most { clients, segments } = shared_out(descriptors, true);
            let others = OTHERS + seats(descriptors - OTHERS);
            assert!(segments.saturating_add(clients * EACH).saturating_add(others) <= descriptors);
        }
    }
}
