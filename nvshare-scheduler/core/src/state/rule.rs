//! How the quantum of a GPU is chosen.

use std::time::Duration;

use nvshare_proto::QuantumRule;

use crate::policy::quantum::{self, AutoTarget};

/// How the quantum of a GPU is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Always this quantum.
    Fixed(Duration),
    /// Chosen by the cost of hand-overs.
    Auto(AutoTarget),
}

impl Rule {
    /// Returns the quantum until something is measured.
    pub(crate) fn initial_quantum(self) -> Duration {
        match self {
            Self::Fixed(quantum) => quantum,
            Self::Auto(target) => quantum::MAX_LENGTH.min(target.max_wait).max(quantum::MIN_LENGTH),
        }
    }

    /// Returns the rule as it is shown to administrators.
    #[must_use]
    pub fn said(self) -> QuantumRule {
        match self {
            Self::Fixed(quantum) => QuantumRule::Fixed { millis: quantum.as_millis() as u64 },
            Self::Auto(AutoTarget { overhead_ppm, max_wait }) => {
                QuantumRule::Auto { overhead_ppm, max_wait_ms: max_wait.as_millis() as u64 }
            }
        }
    }
}

impl From<QuantumRule> for Rule {
    fn from(rule: QuantumRule) -> Self {
        match rule {
            QuantumRule::Fixed { millis } => Self::Fixed(Duration::from_millis(millis)),
            QuantumRule::Auto { overhead_ppm, max_wait_ms } => {
                Self::Auto(AutoTarget { overhead_ppm, max_wait: Duration::from_millis(max_wait_ms) })
            }
        }
    }
}

impl std::fmt::Display for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Fixed(quantum) => write!(f, "{} s", quantum.as_secs_f64()),
            Self::Auto(AutoTarget { overhead_ppm, max_wait }) => write!(
                f,
                "auto: hand-overs cost {} % of the time, and nobody waits for more than {} s",
                f64::from(*overhead_ppm) / 1e4,
                max_wait.as_secs_f64()
            ),
        }
    }
}
