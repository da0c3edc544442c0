//! What an administrator chooses: applied at the start, and changed while clients run.

use std::time::Duration;

use nvshare_proto::units::{Bytes, MIB};
use nvshare_proto::{EventKind, GpuUuid};

use crate::gpu::{Gpu, Size, Source};
use crate::policy::capacity;
use crate::{Config, Core, Time};

/// What differs on one GPU from the rest of the configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuConfig {
    /// How long a client keeps the lock while somebody waits.
    pub quantum: Option<Duration>,
    /// What clients may fill together, in bytes.
    pub gpu_memory: Option<u64>,
    /// Bytes that are left to contexts, modules and the driver.
    pub reserve: Option<u64>,
}

impl Config {
    /// The quantum of a GPU.
    #[must_use]
    pub fn quantum(&self, gpu: GpuUuid) -> Duration {
        self.gpus.get(&gpu).and_then(|own| own.quantum).unwrap_or(self.quantum)
    }

    /// What clients may fill of a GPU together, in bytes, where that is a fixed number. A GPU with a reserve of its own
    /// has none.
    #[must_use]
    pub fn fixed_memory(&self, gpu: GpuUuid) -> Option<u64> {
        let own = self.gpus.get(&gpu);
        let general = self.gpu_memory.filter(|_| own.is_none_or(|own| own.reserve.is_none()));
        own.and_then(|own| own.gpu_memory).or(general)
    }

    /// What clients may fill of a GPU together: see [`capacity::usable`].
    pub(crate) fn usable(&self, gpu: GpuUuid, size: Size) -> u64 {
        let Size { available, overhead, largest } = size;
        if let Some(fixed) = self.fixed_memory(gpu) {
            return fixed.min(available);
        }
        let own = self.gpus.get(&gpu).and_then(|own| own.reserve);
        let reserve = own.or(self.reserve).unwrap_or((1536 * MIB).min(available / 8));
        capacity::usable(available, reserve, overhead, largest)
    }
}

impl Core {
    /// Sets the quantum of one GPU, or of all and of those to come. Returns a line that says what was done.
    pub fn set_quantum(&mut self, gpu: Option<GpuUuid>, quantum: Duration, now: Time) -> String {
        let mut config = self.config.clone();
        let text = match gpu {
            Some(uuid) => {
                config.gpus.entry(uuid).or_default().quantum = Some(quantum);
                format!("quantum of {uuid} is {} s", quantum.as_secs_f64())
            }
            None => {
                config.quantum = quantum;
                config.gpus.values_mut().for_each(|own| own.quantum = None);
                format!("quantum of every GPU is {} s", quantum.as_secs_f64())
            }
        };
        self.configure(config, now);
        self.tell_setting(EventKind::Quantum, gpu, Some(quantum));
        text
    }

    /// Takes another configuration; what names this run of the scheduler stays.
    pub fn configure(&mut self, config: Config, now: Time) {
        self.now = self.now.max(now);
        let Config { boot, settle, restarted, .. } = self.config;
        self.config = Config { boot, settle, restarted, ..config };
        for uuid in self.gpus.keys().copied().collect::<Vec<_>>() {
            let quantum = self.config.quantum(uuid);
            let Some(gpu) = self.gpus.get_mut(&uuid) else { continue };
            gpu.quantum = quantum;
            let (size, source) = (gpu.size, gpu.source);
            self.dirty.insert(uuid);
            self.size(uuid, size, source);
            self.settle_disputes(uuid);
        }
        self.reconcile();
    }

    /// A GPU's capacity follows from what is known of it.
    pub(crate) fn size(&mut self, uuid: GpuUuid, size: Size, source: Source) {
        self.on_capacity(uuid, self.config.usable(uuid, size), source);
        if let Some(gpu) = self.gpus.get_mut(&uuid) {
            gpu.size = size;
        }
    }

    /// A client says how much memory a GPU has, of which clients may fill a fixed number: who says most bounds it.
    pub(crate) fn size_by_client(&mut self, uuid: GpuUuid, total: u64) -> u64 {
        let fixed = self.config.fixed_memory(uuid);
        let known = self.gpus.get(&uuid).map(|gpu| gpu.size.available);
        if known.is_none_or(|known| known < total) {
            if let Some(fixed) = fixed.filter(|&fixed| fixed > total) {
                self.warn(format!(
                    "clients may fill {} of {uuid}, which has {}: more than that is not given away",
                    Bytes(fixed),
                    Bytes(total)
                ));
            }
            self.size(uuid, Size { available: total, ..Size::default() }, Source::Clients);
        }
        self.gpus.get(&uuid).map_or(0, |gpu: &Gpu| gpu.capacity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvshare_proto::units::GIB;

    const ONE: GpuUuid = GpuUuid([1; 16]);
    const OTHER: GpuUuid = GpuUuid([2; 16]);

    fn config() -> Config {
        let own = GpuConfig { quantum: Some(Duration::from_secs(5)), ..GpuConfig::default() };
        Config { gpus: [(ONE, own)].into(), ..Config::default() }
    }

    fn measured(available: u64) -> Size {
        Size { available, ..Size::default() }
    }

    #[test]
    fn a_gpu_has_its_own_quantum_until_one_is_set_for_all() {
        let mut core = Core::new(config());
        assert_eq!(core.config.quantum(ONE), Duration::from_secs(5));
        assert_eq!(core.config.quantum(OTHER), Duration::from_secs(30));
        core.set_quantum(Some(OTHER), Duration::from_secs(7), Time::ZERO);
        assert_eq!(core.config.quantum(OTHER), Duration::from_secs(7));
        core.set_quantum(None, Duration::from_secs(9), Time::ZERO);
        assert_eq!([ONE, OTHER].map(|gpu| core.config.quantum(gpu)), [Duration::from_secs(9); 2]);
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
            // There is no more than the GPU has.
            (Some(80 * GIB), GpuConfig::default(), 16 * GIB),
        ] {
            let config =
                Config { gpu_memory: general, gpus: [(ONE, own.clone())].into(), ..Config::default() };
            assert_eq!(config.usable(ONE, measured(16 * GIB)), expected, "{general:?} {own:?}");
        }
    }

    #[test]
    fn another_configuration_is_followed_at_once() {
        let mut core = Core::new(config());
        core.size(ONE, measured(16 * GIB), Source::Certain);
        core.configure(Config { gpu_memory: Some(4 * GIB), boot: 99, ..Config::default() }, Time::ZERO);
        let gpu = &core.gpu_status()[0];
        assert_eq!((gpu.capacity, gpu.quantum_ms), (4 * GIB, 30_000));
        assert_eq!(core.config.boot, Config::default().boot, "grants name the same run of the scheduler");
    }

    #[test]
    fn a_fixed_number_is_bounded_by_the_largest_claim() {
        let mut core = Core::new(Config { gpu_memory: Some(80 * GIB), ..Config::default() });
        assert_eq!(core.size_by_client(ONE, 1), 1);
        assert_eq!(core.size_by_client(ONE, 16 * GIB), 16 * GIB);
        assert_eq!(core.size_by_client(ONE, GIB), 16 * GIB);
    }
}
