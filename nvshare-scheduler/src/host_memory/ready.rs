//! How much memory of the host is made before anybody asks for it: what the next eviction on each GPU is expected to need.
//!
//! A client lacks = the memory that may have to leave it, less its memory of the host, and less what it said that it does not need:
//! pieces of zeros, and pieces for which it has memory of its own. A client never lacks more than the GPU's clients have beyond its
//! capacity, nor more than its tenant may still get.
//!
//! Ready = the least of
//! - what all clients of the GPU lack;
//! - what they have beyond the GPU's capacity;
//! - what the largest of them has: in one hand-over no more leaves than the next client needs.

use std::collections::BTreeMap;

use nvshare_core::Contended;
use nvshare_proto::GpuUuid;

/// Facts about a client beside its memory on GPUs, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Known {
    /// Its memory of the host.
    pub(super) has: u64,
    /// The part of its memory that needs none of the host's, as far as it has said.
    pub(super) spared: u64,
    /// How much it may still get.
    pub(super) left: u64,
}

/// Bytes to have ready for each GPU. A client of which nothing is known gets nothing. The host's memory of a client counts for its GPUs
/// in their order.
pub(super) fn wanted(contended: &[Contended], mut known: BTreeMap<u64, Known>) -> BTreeMap<GpuUuid, u64> {
    let mut lacks = |(client, movable): &(u64, u64), beyond: u64| {
        let Some(known) = known.get_mut(client) else { return 0 };
        let spared = known.spared.min(*movable);
        known.spared -= spared;
        let leaves = (movable - spared).min(beyond);
        let has = known.has.min(leaves);
        known.has -= has;
        let lacks = (leaves - has).min(known.left);
        known.left -= lacks;
        lacks
    };
    let of = |gpu: &Contended| {
        let all =
            gpu.movable.iter().fold(0, |sum: u64, client| sum.saturating_add(lacks(client, gpu.beyond)));
        (gpu.gpu, all.min(gpu.beyond).min(gpu.largest))
    };
    contended.iter().map(of).filter(|(_, bytes)| *bytes > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A GPU of 16, and clients by their memory there.
    fn on(gpu: u8, clients: &[(u64, u64)]) -> Contended {
        let all: u64 = clients.iter().map(|(_, bytes)| bytes).sum();
        let largest = clients.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0).min(16);
        Contended { gpu: GpuUuid([gpu; 16]), beyond: all - 16, largest, movable: clients.to_vec() }
    }

    fn ready(contended: &[Contended], known: &[(u64, Known)]) -> Vec<u64> {
        let wanted = wanted(contended, known.iter().copied().collect());
        contended.iter().map(|gpu| wanted.get(&gpu.gpu).copied().unwrap_or(0)).collect()
    }

    const fn has(has: u64, spared: u64) -> Known {
        Known { has, spared, left: 1000 }
    }

    #[test]
    fn what_the_next_eviction_needs_is_ready() {
        let two = || on(1, &[(1, 12), (2, 12)]);
        for (what, gpu, known, expected) in [
            ("both may have to leave, one at a time", two(), &[(1, has(0, 0)), (2, has(0, 0))][..], 8),
            ("one is served", two(), &[(1, has(12, 0)), (2, has(0, 0))], 8),
            ("in part", two(), &[(1, has(12, 0)), (2, has(5, 0))], 3),
            ("both are served", two(), &[(1, has(8, 0)), (2, has(12, 0))], 0),
            ("zeros need nothing", two(), &[(1, has(3, 9)), (2, has(0, 0))], 8),
            ("nor those of the last", two(), &[(1, has(3, 9)), (2, has(1, 11))], 0),
            ("what has grown since", on(1, &[(1, 12), (2, 14)]), &[(1, has(12, 0)), (2, has(1, 11))], 2),
            ("who is gone", two(), &[(1, has(0, 0))], 8),
            ("nobody", two(), &[], 0),
            ("a little beyond", on(1, &[(1, 12), (2, 5)]), &[(1, has(0, 0)), (2, has(0, 0))], 1),
            (
                "two make place for one",
                on(1, &[(1, 6), (2, 6), (3, 12)]),
                &[(1, has(0, 0)), (2, has(0, 0)), (3, has(0, 0))],
                8,
            ),
            (
                "a crowd leaves one by one",
                on(1, &[(1, 12), (2, 12), (3, 12), (4, 12)]),
                &[(1, has(0, 0)), (2, has(0, 0)), (3, has(0, 0)), (4, has(0, 0))],
                12,
            ),
        ] {
            assert_eq!(ready(&[gpu], known), [expected], "{what}");
        }
    }

    #[test]
    fn no_tenant_is_prepared_for_more_than_it_may_get() {
        let known = [(1, Known { left: 3, ..Known::default() }), (2, Known { left: 1, ..Known::default() })];
        assert_eq!(ready(&[on(1, &[(1, 12), (2, 12)])], &known), [4]);
    }

    #[test]
    fn what_a_client_has_counts_once_for_all_of_its_gpus() {
        let gpus = [on(1, &[(1, 12), (2, 12)]), on(2, &[(1, 12), (3, 12)])];
        let known = |bytes| [(1, has(bytes, 0)), (2, has(8, 0)), (3, has(8, 0))];
        assert_eq!(ready(&gpus, &known(0)), [8, 8]);
        assert_eq!(ready(&gpus, &known(10)), [0, 6]);
        assert_eq!(ready(&gpus, &known(16)), [0, 0]);
        let known = [(1, has(0, 20)), (2, has(8, 0)), (3, has(8, 0))];
        assert_eq!(ready(&gpus, &known), [0, 4]);
    }
}
