//! Why slots of a GPU are not given out: it is gone, it is in MIG mode, or it had an error that the driver reports.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, Instant};

use nvshare_proto::GpuUuid;

use crate::devices::NodeGpu;

/// Errors (Xid) that a program's mistakes cause, and after which the GPU goes on: those that NVIDIA's device plugin passes over
/// (<https://docs.nvidia.com/deploy/xid-errors/>): an exception in a kernel, a page fault, a program that was stopped, cleaned up after, failed in
/// video, or took too long to switch.
const OF_PROGRAMS: [u64; 6] = [13, 31, 43, 45, 68, 109];
/// A GPU is given out again after this long without another error.
const QUIET: Duration = Duration::from_secs(600);

/// A trouble of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// It is not there any more.
    Gone,
    /// It is divided by MIG: its parts are devices of their own, which nvshare does not share.
    Mig,
    /// The driver reported this error.
    Xid(u64),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gone => f.write_str("is not there any more, or its driver does not answer"),
            Self::Mig => f.write_str(
                "is in MIG mode, and nvshare shares whole GPUs only: nvidia-smi -mig 0 switches it off",
            ),
            Self::Xid(code) => write!(
                f,
                "had Xid error {code}; its slots are given out again after {} s without one",
                QUIET.as_secs()
            ),
        }
    }
}

#[derive(Debug, Default)]
struct Condition {
    is_gone: bool,
    has_mig: bool,
    xid: Option<(u64, Instant)>,
}

/// The troubles of all GPUs.
#[derive(Debug, Default)]
pub struct Troubles {
    seen: BTreeMap<GpuUuid, Condition>,
    told: BTreeMap<GpuUuid, Trouble>,
}

impl Troubles {
    /// Takes a look into account that found these GPUs.
    pub fn look(&mut self, gpus: &[NodeGpu], found: &[NodeGpu]) {
        for NodeGpu { uuid: gpu, .. } in gpus {
            let found = found.iter().find(|there| there.uuid == *gpu);
            let seen = self.seen.entry(*gpu).or_default();
            let was_gone = std::mem::replace(&mut seen.is_gone, found.is_none());
            seen.has_mig = found.is_some_and(|gpu| gpu.mig);
            // A GPU that comes back was reset.
            seen.xid = seen.xid.filter(|_| !was_gone || seen.is_gone);
        }
    }

    /// The driver reports an error of a GPU.
    pub fn xid(&mut self, gpu: GpuUuid, code: u64, now: Instant) {
        if !OF_PROGRAMS.contains(&code) {
            self.seen.entry(gpu).or_default().xid = Some((code, now));
        }
    }

    fn of(&self, gpu: GpuUuid, now: Instant) -> Option<Trouble> {
        let seen = self.seen.get(&gpu)?;
        let xid = seen.xid.filter(|&(_, at)| now.saturating_duration_since(at) < QUIET);
        let gone = seen.is_gone.then_some(Trouble::Gone);
        gone.or_else(|| seen.has_mig.then_some(Trouble::Mig))
            .or_else(|| xid.map(|(code, _)| Trouble::Xid(code)))
    }

    /// A line for each GPU whose trouble is another one than it was.
    pub fn news(&mut self, gpus: &[NodeGpu], now: Instant) -> Vec<String> {
        let mut lines = Vec::new();
        for &NodeGpu { uuid: gpu, .. } in gpus {
            let trouble = self.of(gpu, now);
            let told = match trouble {
                Some(trouble) => self.told.insert(gpu, trouble),
                None => self.told.remove(&gpu),
            };
            match trouble {
                Some(trouble) if told != Some(trouble) => {
                    lines.push(format!("{gpu} {trouble}; no slot of it is given out"));
                }
                None if told.is_some() => lines.push(format!("slots of {gpu} are given out again")),
                _ => {}
            }
        }
        lines
    }

    /// The GPUs that have trouble, as far as it was told.
    #[must_use]
    pub fn known(&self) -> BTreeSet<GpuUuid> {
        self.told.keys().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::tests::node_gpu;

    #[test]
    fn trouble_comes_and_goes() {
        let gpus = [node_gpu(1), node_gpu(2)];
        let [a, b] = [gpus[0].uuid, gpus[1].uuid];
        let start = Instant::now();
        let at = |second| start + Duration::from_secs(second);
        let mut troubles = Troubles::default();
        let say = |troubles: &mut Troubles, second, expected: &[&str]| {
            let lines = troubles.news(&gpus, at(second));
            assert_eq!(lines.len(), expected.len(), "{lines:?}");
            assert!(lines.iter().zip(expected).all(|(line, part)| line.contains(part)), "{lines:?}");
            troubles.known()
        };
        assert_eq!(say(&mut troubles, 0, &[]), BTreeSet::new());
        troubles.look(&gpus, &gpus[..1]);
        assert_eq!(say(&mut troubles, 0, &["is not there any more"]), [b].into());
        assert_eq!(say(&mut troubles, 1, &[]), [b].into(), "it is told once");
        let divided = NodeGpu { mig: true, ..gpus[0].clone() };
        troubles.look(&gpus, &[divided, gpus[1].clone()]);
        let told = [&*format!("{a} is in MIG mode"), &*format!("slots of {b} are given out again")];
        assert_eq!(say(&mut troubles, 2, &told), [a].into());
        troubles.look(&gpus, &gpus);
        assert_eq!(say(&mut troubles, 3, &["again"]), BTreeSet::new());
        // An error that a program causes is none.
        OF_PROGRAMS.iter().for_each(|&code| troubles.xid(a, code, at(3)));
        assert_eq!(say(&mut troubles, 4, &[]), BTreeSet::new());
        troubles.xid(a, 79, at(10));
        assert_eq!(say(&mut troubles, 10, &["had Xid error 79"]), [a].into());
        troubles.xid(a, 79, at(300));
        assert_eq!(say(&mut troubles, 899, &[]), [a].into());
        assert_eq!(say(&mut troubles, 900, &["again"]), BTreeSet::new());
        // A reset ends it.
        troubles.xid(a, 48, at(901));
        troubles.look(&gpus, &gpus[1..]);
        assert_eq!(say(&mut troubles, 902, &["not there"]), [a].into());
        troubles.look(&gpus, &gpus);
        assert_eq!(say(&mut troubles, 903, &["again"]), BTreeSet::new());
    }
}
