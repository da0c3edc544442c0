//! The work that long work loses to switching, and how soon short work is done, for each part of the time that switching may
//! take: `--overheads`.

use std::time::Duration;

use nvshare_core::{AutoTarget, Config, Time};

use crate::card::Link;
use crate::measure::{self, Quick};
use crate::policies::Ours;
use crate::trace::Job;
use crate::world::{Outcome, World};
use crate::{Options, Policy};

/// Short work beside long work on some GPUs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Beside<'a> {
    pub(crate) trace: &'a [Job],
    pub(crate) gpus: usize,
    /// Bytes of each GPU.
    pub(crate) card: u64,
    pub(crate) seed: u64,
    pub(crate) until: Time,
}

/// The outcome.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Came {
    pub(crate) quick: Quick,
    /// The part of its work that long work lost because of short work.
    pub(crate) loss: f64,
    /// Bytes that were moved.
    pub(crate) moved: u64,
}

impl Beside<'_> {
    /// Runs it, and its long work alone.
    pub(crate) fn come(&self, link: Link, auto: AutoTarget) -> Came {
        let run = |trace: &[Job]| -> Outcome {
            let config = Config { auto: Some(auto), ..Config::default() };
            let ours = Box::new(Ours::new(config, self.card, link.memory()));
            World::new(trace, ours, self.gpus, self.card, link, self.seed).run(self.until)
        };
        let (beside, alone) = (run(self.trace), run(&self.long_work()));
        Came {
            quick: measure::quick(&beside),
            loss: 1.0 - measure::long_work(&beside) / measure::long_work(&alone),
            moved: beside.moved,
        }
    }

    fn long_work(&self) -> Vec<Job> {
        self.trace.iter().filter(|job| !job.ends_cycles()).cloned().collect()
    }
}

/// One line for each overhead and each way that memory moves.
pub(crate) fn print(options: &Options, trace: &[Job], until: Time) -> Result<(), String> {
    let max_wait =
        Duration::try_from_secs_f64(options.max_wait).map_err(|_| "a wait without meaning".to_owned())?;
    let (gpus, card) = (usize::from(options.gpus), options.gpu_memory);
    let beside = Beside { trace, gpus, card, seed: options.seed, until };
    let long = beside.long_work().len();
    if long == 0 || long == trace.len() {
        return Err(
            "there has to be work that ends and work that does not: one would wait for the other".to_owned()
        );
    }
    println!("policy   overhead   short work p50       p99       max   long work loses   moved GiB");
    for (policy, name, link) in [
        (Policy::Managed, "managed", Link::MANAGED),
        (Policy::Swap, "swap", Link::SWAP),
        (Policy::Copies, "copies", Link::COPIES),
    ] {
        if !options.policy.is_empty() && !options.policy.contains(&policy) {
            continue;
        }
        for &overhead_ppm in &options.overheads {
            let Came { quick: Quick { p50, p99, max }, loss, moved } =
                beside.come(link, AutoTarget { overhead_ppm, max_wait });
            println!(
                "{name:<8} {:>6} % {p50:>14.0} ms {p99:>6.0} ms {max:>6.0} ms {:>15.1} % {:>11.0}",
                f64::from(overhead_ppm) / 1e4,
                loss * 100.0,
                moved as f64 / (1u64 << 30) as f64
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace;

    const ONE_JOB: &str = include_str!("../traces/burst.txt");
    const TWO_JOBS: &str = include_str!("../traces/burst-two-jobs.txt");

    /// Ten minutes on 14 GiB, where no two programs fit.
    fn came(lines: &str, link: Link, percent: u32) -> Came {
        let trace = trace::parse(lines, 1).unwrap();
        let until = Duration::from_secs(600);
        let beside = Beside { trace: &trace, gpus: 1, card: 14 << 30, seed: 1, until };
        beside.come(link, AutoTarget { overhead_ppm: percent * 10_000, max_wait: Duration::from_secs(30) })
    }

    #[test]
    fn long_work_loses_no_more_to_short_work_than_was_stated() {
        for (lines, jobs) in [(ONE_JOB, 1), (TWO_JOBS, 2)] {
            for link in [Link::MANAGED, Link::SWAP, Link::COPIES] {
                for percent in [2, 5, 10, 15, 25, 50] {
                    let came = came(lines, link, percent);
                    // Beyond it: the debt of ten seconds with which short work may go ahead, its own work of 3.3 of 700 ms
                    // at most, and what is lost before the scheduler has seen that it is short.
                    let most = f64::from(percent) / 100.0 * (1.0 + 10.0 / 600.0) + 0.0033 / 0.7 + 0.002;
                    assert!(came.loss <= most, "{jobs} jobs, {percent} %, {link:?}: {came:?}");
                }
            }
        }
    }

    #[test]
    fn short_work_comes_soon_where_little_has_to_be_copied() {
        let came = came(ONE_JOB, Link::SWAP, 15);
        assert!(came.quick.p99 <= 250.0 && came.loss <= 0.15, "{came:?}");
    }

    #[test]
    fn short_work_waits_about_as_long_each_time() {
        for (lines, percents, most) in [(ONE_JOB, [5, 10, 15], 1.15), (TWO_JOBS, [10, 15, 25], 1.25)] {
            for percent in percents {
                let Quick { p50, p99, .. } = came(lines, Link::MANAGED, percent).quick;
                assert!(p99 <= p50 * most, "{percent} %: {p50} ms and {p99} ms");
            }
        }
        // A visit takes two hand-overs of 0.16 s and up to 25 ms until it is seen to be over. At 5 per cent there is one in 7 s.
        let came = came(ONE_JOB, Link::MANAGED, 5);
        assert!(came.quick.p99 <= 7000.0, "{came:?}");
    }
}
