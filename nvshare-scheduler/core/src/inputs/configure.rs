//! The administrator's choices: applied at the start, and changed while clients run.

use nvshare_proto::units::Bytes;
use nvshare_proto::{EventKind, GpuUuid};

use crate::report::warnings::Topic;
use crate::state::config::Config;
use crate::state::gpu::{Gpu, Size, Source};
use crate::state::rule::Rule;
use crate::{Core, Time};

impl Core {
    /// Sets how the quantum is chosen on one GPU, or on all GPUs, known and unknown. Returns a line that says what was
    /// done.
    pub fn set_quantum(&mut self, gpu: Option<GpuUuid>, rule: Rule, now: Time) -> String {
        let mut config = self.config.clone();
        config.set_rule(gpu, rule);
        self.configure(config, now);
        self.tell_setting(
            EventKind::Quantum,
            gpu,
            if let Rule::Fixed(quantum) = rule { Some(quantum) } else { None },
        );
        match gpu {
            Some(uuid) => format!("quantum of {uuid} is {rule}"),
            None => format!("quantum of every GPU is {rule}"),
        }
    }

    /// Applies another configuration. The number that names this run of the scheduler stays, and the settings of its start.
    pub fn configure(&mut self, config: Config, now: Time) {
        self.begin_event(now);
        let Config { boot, settle, restarted, .. } = self.config;
        self.config = Config { boot, settle, restarted, ..config };
        for uuid in self.gpus.keys().copied().collect::<Vec<_>>() {
            let rule = self.config.rule(uuid);
            let Some(gpu) = self.gpus.get_mut(&uuid) else { continue };
            if gpu.rule != rule {
                (gpu.rule, gpu.quantum) = (rule, rule.at_first());
            }
            let (size, source) = (gpu.size, gpu.source);
            self.dirty.insert(uuid);
            self.size(uuid, size, source);
            self.settle_disputes(uuid);
        }
        self.reconcile();
    }

    /// Sets a GPU's size and source, and the capacity that follows from them.
    pub(crate) fn size(&mut self, uuid: GpuUuid, size: Size, source: Source) {
        self.on_capacity(uuid, self.config.usable(uuid, size), source);
        if let Some(gpu) = self.gpus.get_mut(&uuid) {
            gpu.size = size;
        }
    }

    /// A client says how large a GPU is, of which clients may fill a fixed number of bytes. The largest size that a client
    /// says bounds that number. Returns the capacity.
    pub(crate) fn size_by_client(&mut self, uuid: GpuUuid, total: u64) -> u64 {
        let fixed = self.config.fixed_memory(uuid);
        let known = self.gpus.get(&uuid).map(|gpu| gpu.size.available);
        if known.is_none_or(|known| known < total) {
            if let Some(fixed) = fixed.filter(|&fixed| fixed > total) {
                let text = format!(
                    "clients may fill {} of {uuid}, which has {}: more than that is not given away",
                    Bytes(fixed),
                    Bytes(total)
                );
                self.warn_of_gpu(Topic::TooMuch, uuid, &text);
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

    fn fixed(seconds: u64) -> Rule {
        Rule::Fixed(Duration::from_secs(seconds))
    }

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
        assert_eq!(core.config.rule(ONE), fixed(5));
        assert_eq!(core.config.rule(OTHER), fixed(30));
        core.set_quantum(Some(OTHER), fixed(7), Time::ZERO);
        assert_eq!(core.config.rule(OTHER), fixed(7));
        core.set_quantum(None, fixed(9), Time::ZERO);
        assert_eq!([ONE, OTHER].map(|gpu| core.config.rule(gpu)), [fixed(9); 2]);
        let auto = Rule::Auto(Auto { overhead_ppm: 50_000, max_wait: Duration::from_secs(60) });
        core.set_quantum(Some(ONE), auto, Time::ZERO);
        assert_eq!([ONE, OTHER].map(|gpu| core.config.rule(gpu)), [auto, fixed(9)]);
        core.set_quantum(None, auto, Time::ZERO);
        core.set_quantum(Some(ONE), fixed(3), Time::ZERO);
        assert_eq!([ONE, OTHER].map(|gpu| core.config.rule(gpu)), [fixed(3), auto]);
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::policy::quantum::Auto;
    use crate::state::config::GpuConfig;
    use nvshare_proto::units::{GIB, MIB};

    const ONE: GpuUuid = GpuUuid([1; 16]);
    const OTHER: GpuUuid = GpuUuid([2; 16]);

    fn fixed(seconds: u64) -> Rule {
        Rule::Fixed(Duration::from_secs(seconds))
    }

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
        assert_eq!(core.config.rule(ONE), fixed(5));
        assert_eq!(core.config.rule(OTHER), fixed(30));
        core.set_quantum(Some(OTHER), fixed(7), Time::ZERO);
        assert_eq!(core.config.rule(OTHER), fixed(7));
        core.set_quantum(None, fixed(9), Time::ZERO);
        assert_eq!([ONE, OTHER].map(|gpu| core.config.rule(gpu)), [fixed(9); 2]);
        let auto = Rule::Auto(Auto { overhead_ppm: 50_000, max_wait: Duration::from_secs(60) });
        core.set_quantum(Some(ONE), auto, Time::ZERO);
        assert_eq!([ONE, OTHER].map(|gpu| core.config.rule(gpu)), [auto, fixed(9)]);
        core.set_quantum(None, auto, Time::ZERO);
        core.set_quantum(Some(ONE), fixed(3), Time::ZERO);
        assert_eq!([ONE, OTHER].map(|gpu| core.config.rule(gpu)), [fixed(3), auto]);
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
