//! The work that long work loses to switching, and how soon short work is done, for each part of the time that switching may
//! take: `--overheads`.

use std::time::Duration;

use nvshare_core::{Auto, Config, Time};

use crate::card::Link;
use crate::measure::{self, Quick};
use crate::policies::Ours;
use crate::trace::Job;
use crate::world::{Outcome, World};
use crate::{Options, Policy};

/// One line for each overhead and each way that memory moves.
pub(crate) fn print(options: &Options, trace: &[Job], until: Time) -> Result<(), String> {
    let max_wait =
        Duration::try_from_secs_f64(options.max_wait).map_err(|_| "a wait without meaning".to_owned())?;
    let long: Vec<Job> = trace.iter().filter(|job| !job.ends_cycles()).cloned().collect();
    if long.is_empty() || long.len() == trace.len() {
        return Err(
            "there has to be work that ends and work that does not: one would wait for the other".to_owned()
        );
    }
    println!("policy   overhead   short work p50       p99       max   long work loses   moved GiB");
    for (policy, name, link) in
        [(Policy::Managed, "managed", Link::MANAGED), (Policy::Swap, "swap", Link::SWAP)]
    {
        if !options.policy.is_empty() && !options.policy.contains(&policy) {
            continue;
        }
        for &overhead_ppm in &options.overheads {
            let auto = Auto { overhead_ppm, max_wait };
            let beside = run(options, trace, link, auto, until);
            let alone = run(options, &long, link, auto, until);
            let Quick { p50, p99, max } = measure::quick(&beside);
            let loss = 1.0 - measure::long_work(&beside) / measure::long_work(&alone);
            println!(
                "{name:<8} {:>6} % {p50:>14.0} ms {p99:>6.0} ms {max:>6.0} ms {:>15.1} % {:>11.0}",
                f64::from(overhead_ppm) / 1e4,
                loss * 100.0,
                beside.moved as f64 / (1u64 << 30) as f64
            );
        }
    }
    Ok(())
}

fn run(options: &Options, trace: &[Job], link: Link, auto: Auto, until: Time) -> Outcome {
    let config = Config { auto: Some(auto), ..Config::default() };
    let ours = Box::new(Ours::new(config, options.gpu_memory));
    World::new(trace, ours, usize::from(options.gpus), options.gpu_memory, link, options.seed).run(until)
}
