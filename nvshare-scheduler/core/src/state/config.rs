//! The administrator's choices, and what follows from them for one GPU.

use std::collections::BTreeMap;
use std::time::Duration;

use nvshare_proto::GpuUuid;
use nvshare_proto::units::MIB;

use crate::policy::capacity;
use crate::policy::exchange::Exchange;
use crate::policy::quantum::AutoTarget;
use crate::policy::sleep::Card;
use crate::state::gpu::CapacityFigures;
use crate::state::rule::Rule;

/// The administrator's choices at the start.
#[derive(Debug, Clone)]
pub struct Config {
    /// Names this run of the scheduler in its grants.
    pub boot: u64,
    /// How long a client keeps the lock while another client waits.
    pub quantum: Duration,
    /// If set, the quantum follows from the cost of hand-overs instead.
    pub auto: Option<AutoTarget>,
    /// Bytes of each GPU that clients may fill together, at most what the GPU has; none: what the GPU has,
    /// less the reserve.
    pub gpu_memory: Option<u64>,
    /// Bytes of each GPU that are left to contexts, modules and the driver; none: 1536 MiB, and of a small
    /// GPU an eighth at most.
    pub reserve: Option<u64>,
    /// Settings that differ on single GPUs.
    pub gpus: BTreeMap<GpuUuid, GpuConfig>,
    /// One client at a time, even where memory fits.
    pub exclusive: bool,
    /// Whose memory comes to the GPU while that of others leaves.
    pub exchange: Exchange,
    /// After this long without an answer, a client is reported as stuck.
    pub grace: Duration,
    /// A client that has had no work for this long goes off the card by itself where others lack memory; none: never.
    pub sleep_after: Option<Duration>,
    /// A client that waits for its way back to a card may come back to another one where there is room.
    pub wake_elsewhere: bool,
    /// When clients come back from an earlier scheduler, nobody is granted anything for this long after the
    /// start. The scheduler must know all clients that run before it gives their memory away.
    pub settle: Duration,
    /// Clients of an earlier scheduler are known to exist, though none has come back yet.
    pub restarted: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            boot: 1,
            quantum: Duration::from_secs(30),
            auto: None,
            gpu_memory: None,
            reserve: None,
            gpus: BTreeMap::new(),
            exclusive: false,
            exchange: Exchange::default(),
            grace: Duration::from_secs(10),
            sleep_after: None,
            wake_elsewhere: false,
            settle: Duration::ZERO,
            restarted: false,
        }
    }
}

/// The settings of one GPU that differ from the rest of the configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuConfig {
    /// How long a client keeps the lock while another client waits.
    pub quantum: Option<Duration>,
    /// If set, the quantum follows from the cost of hand-overs instead.
    pub auto: Option<AutoTarget>,
    /// Bytes that clients may fill together.
    pub gpu_memory: Option<u64>,
    /// Bytes that are left to contexts, modules and the driver.
    pub reserve: Option<u64>,
}

impl Config {
    /// Returns how the quantum of a GPU is chosen.
    #[must_use]
    pub fn rule(&self, gpu: GpuUuid) -> Rule {
        let own = self.gpus.get(&gpu);
        let own = own.and_then(|own| own.auto.map(Rule::Auto).or(own.quantum.map(Rule::Fixed)));
        own.unwrap_or_else(|| self.general_rule())
    }

    /// Returns how the quantum is chosen on GPUs without a rule of their own.
    #[must_use]
    pub fn general_rule(&self) -> Rule {
        self.auto.map_or(Rule::Fixed(self.quantum), Rule::Auto)
    }

    /// Sets how the quantum is chosen on GPUs without a rule of their own.
    pub fn set_general_rule(&mut self, rule: Rule) {
        match rule {
            Rule::Fixed(quantum) => (self.quantum, self.auto) = (quantum, None),
            Rule::Auto(auto) => self.auto = Some(auto),
        }
    }

    /// Sets the rule of one GPU; without a GPU, that of all GPUs, known and unknown.
    pub fn set_rule(&mut self, gpu: Option<GpuUuid>, rule: Rule) {
        match gpu {
            Some(gpu) => {
                let own = self.gpus.entry(gpu).or_default();
                (own.quantum, own.auto) = match rule {
                    Rule::Fixed(quantum) => (Some(quantum), None),
                    Rule::Auto(auto) => (None, Some(auto)),
                };
            }
            None => {
                self.set_general_rule(rule);
                self.gpus.values_mut().for_each(|own| (own.quantum, own.auto) = (None, None));
            }
        }
    }

    /// Returns the bytes of a GPU that clients may fill together, where that is a fixed number. A GPU with a
    /// reserve of its own has none.
    #[must_use]
    pub fn fixed_memory(&self, gpu: GpuUuid) -> Option<u64> {
        let own = self.gpus.get(&gpu);
        let general = self.gpu_memory.filter(|_| own.is_none_or(|own| own.reserve.is_none()));
        own.and_then(|own| own.gpu_memory).or(general)
    }

    /// Returns the bytes of a GPU that clients may fill together: see [`capacity::usable`].
    pub(crate) fn usable(&self, gpu: GpuUuid, size: CapacityFigures) -> u64 {
        let CapacityFigures { available, largest, .. } = size;
        if let Some(fixed) = self.fixed_memory(gpu) {
            return fixed.min(available);
        }
        let overhead = size.overhead.saturating_add(size.set_aside);
        capacity::usable(available, self.reserve(gpu, available), overhead, largest)
    }

    /// Returns the bytes of a GPU that are left to contexts, modules and the driver.
    fn reserve(&self, gpu: GpuUuid, available: u64) -> u64 {
        let own = self.gpus.get(&gpu).and_then(|own| own.reserve);
        own.or(self.reserve).unwrap_or((1536 * MIB).min(available / 8))
    }

    /// Whether contexts and modules take more of a GPU than is left to them: see [`capacity`].
    pub(crate) fn has_many_contexts(&self, gpu: GpuUuid, size: CapacityFigures) -> bool {
        size.overhead > self.reserve(gpu, size.available) / 2
    }

    /// Returns a GPU as a process finds it that comes back to the card; the others on their way back need
    /// `waking` bytes.
    pub(crate) fn card(&self, gpu: GpuUuid, size: CapacityFigures, waking: u64) -> Card {
        let CapacityFigures { available, overhead, free, .. } = size;
        Card { available, reserve: self.reserve(gpu, available), overhead, waking, free }
    }
}

#[cfg(test)]
mod tests {
    use nvshare_proto::units::GIB;

    use super::*;

    const ONE: GpuUuid = GpuUuid([1; 16]);

    fn measured(available: u64) -> CapacityFigures {
        CapacityFigures { available, ..CapacityFigures::default() }
    }

    #[test]
    fn memory_of_a_gpu_in_general_and_by_itself() {
        let own = |gpu_memory, reserve| GpuConfig { gpu_memory, reserve, ..GpuConfig::default() };
        for (general, own, expected) in [
            (Some(8 * GIB), GpuConfig::default(), 8 * GIB),
            (Some(8 * GIB), own(Some(4 * GIB), None), 4 * GIB),
            // A reserve of its own replaces the general number.
            (Some(8 * GIB), own(None, Some(GIB)), 15 * GIB),
            (None, own(None, Some(2 * GIB)), 14 * GIB),
            (None, GpuConfig::default(), 16 * GIB - 1536 * MIB),
            // The capacity is never more than the GPU has.
            (Some(80 * GIB), GpuConfig::default(), 16 * GIB),
        ] {
            let config =
                Config { gpu_memory: general, gpus: [(ONE, own.clone())].into(), ..Config::default() };
            assert_eq!(config.usable(ONE, measured(16 * GIB)), expected, "{general:?} {own:?}");
        }
    }
}
