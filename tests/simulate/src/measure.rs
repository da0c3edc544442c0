//! The result of a trace under a policy, in numbers.

use std::collections::BTreeMap;

use crate::client::Client;
use crate::trace::Class;
use crate::world::Outcome;

/// Figures of one class of clients, or of all.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Figures {
    pub(crate) clients: usize,
    /// Time on the GPU ÷ time in which there was work, on average over clients: the part that a client got of what it
    /// requested.
    pub(crate) got: f64,
    /// Waits of work that found its gate closed, or had been interrupted: median and 99th percentile, in seconds.
    pub(crate) wait_s: [f64; 2],
    /// Lengths of cycles, 99th percentile, in seconds; none for work without end.
    pub(crate) cycle_p99_s: Option<f64>,
    /// Jain's index of what clients got ÷ weight, among clients of one class on the same GPUs: 1 if all got the same,
    /// 1/n if one got everything.
    pub(crate) jain: f64,
}

/// Figures of one policy.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Summary {
    /// Work done, in GPU-seconds alone ÷ GPU-seconds in which any client had work.
    pub(crate) efficiency: f64,
    pub(crate) moved_gib: f64,
    pub(crate) events: u64,
    pub(crate) all: Figures,
    pub(crate) classes: BTreeMap<Class, Figures>,
}

/// A client with less work than this, in milliseconds, is left out when clients are compared.
const MIN_MS: f64 = 1000.0;

impl Summary {
    pub(crate) fn of(outcome: &Outcome) -> Self {
        let mut classes: BTreeMap<Class, Vec<&Client>> = BTreeMap::new();
        for client in &outcome.clients {
            classes.entry(client.job.class).or_default().push(client);
        }
        let done: f64 = outcome.clients.iter().map(|c| c.seen.done_ms * c.job.gpus.len() as f64).sum();
        let wanted: f64 = outcome.wanted_s.iter().sum();
        Self {
            efficiency: if wanted > 0.0 { done / 1000.0 / wanted } else { 1.0 },
            moved_gib: outcome.moved as f64 / (1u64 << 30) as f64,
            events: outcome.events,
            all: figures(&outcome.clients.iter().collect::<Vec<_>>()),
            classes: classes.into_iter().map(|(class, clients)| (class, figures(&clients))).collect(),
        }
    }

    /// Jain's index of the class in which clients were treated least alike.
    pub(crate) fn least_jain(&self) -> f64 {
        self.classes.values().map(|figures| figures.jain).fold(1.0, f64::min)
    }
}

fn figures(clients: &[&Client]) -> Figures {
    let mut waits: Vec<f32> = clients.iter().flat_map(|client| client.seen.waits.iter().copied()).collect();
    let mut cycles: Vec<f32> = clients.iter().flat_map(|client| client.seen.cycles.iter().copied()).collect();
    let wanted = || clients.iter().filter(|client| client.seen.wanted_ms >= MIN_MS);
    let got: Vec<f64> = wanted().map(|client| client.seen.done_ms / client.seen.wanted_ms).collect();
    let mut groups: BTreeMap<(Class, &[usize]), Vec<f64>> = BTreeMap::new();
    for client in wanted() {
        let got = client.seen.done_ms / client.seen.wanted_ms / f64::from(client.job.weight.max(1));
        groups.entry((client.job.class, &client.job.gpus)).or_default().push(got);
    }
    let groups: Vec<Vec<f64>> = groups.into_values().filter(|group| group.len() > 1).collect();
    let members: usize = groups.iter().map(Vec::len).sum();
    let fair: f64 = groups.iter().map(|group| jain(group) * group.len() as f64).sum();
    Figures {
        clients: clients.len(),
        got: if got.is_empty() { 1.0 } else { got.iter().sum::<f64>() / got.len() as f64 },
        wait_s: [0.5, 0.99].map(|part| percentile(&mut waits, part).unwrap_or(0.0) / 1000.0),
        cycle_p99_s: percentile(&mut cycles, 0.99).map(|ms| ms / 1000.0),
        jain: if members == 0 { 1.0 } else { fair / members as f64 },
    }
}

/// How long work took that came to an end, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Quick {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

/// How long work took that came to an end.
pub(crate) fn quick(outcome: &Outcome) -> Quick {
    let mut cycles: Vec<f32> =
        outcome.clients.iter().flat_map(|client| client.seen.cycles.iter().copied()).collect();
    let [p50, p99, max] = [0.5, 0.99, 1.0].map(|part| percentile(&mut cycles, part).unwrap_or(0.0));
    Quick { p50, p99, max }
}

/// The work done by clients whose work has no end, in milliseconds.
pub(crate) fn long_work(outcome: &Outcome) -> f64 {
    outcome.clients.iter().filter(|client| !client.job.ends_cycles()).map(|client| client.seen.done_ms).sum()
}

fn percentile(numbers: &mut [f32], part: f64) -> Option<f64> {
    let at = (numbers.len().checked_sub(1)? as f64 * part).round() as usize;
    let (_, number, _) = numbers.select_nth_unstable_by(at, f32::total_cmp);
    Some(f64::from(*number))
}

fn jain(numbers: &[f64]) -> f64 {
    let sum: f64 = numbers.iter().sum();
    let squares: f64 = numbers.iter().map(|n| n * n).sum();
    if squares == 0.0 { 1.0 } else { sum * sum / (numbers.len() as f64 * squares) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_and_percentiles() {
        assert!((jain(&[2.0, 2.0, 2.0]) - 1.0).abs() < 1e-9);
        assert!((jain(&[3.0, 0.0, 0.0]) - 1.0 / 3.0).abs() < 1e-9);
        assert!((jain(&[0.0, 0.0]) - 1.0).abs() < 1e-9, "nobody got less than another");
        let mut numbers: Vec<f32> = (0..101u8).rev().map(f32::from).collect();
        assert_eq!(percentile(&mut numbers, 0.5), Some(50.0));
        assert_eq!(percentile(&mut numbers, 0.99), Some(99.0));
        assert_eq!(percentile(&mut [], 0.5), None);
    }
}
