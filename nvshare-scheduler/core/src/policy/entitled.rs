//! The part of a GPU's time that each job is entitled to while all of them want it.
//!
//! Time is shared by weight. A compute limit takes from a job what is beyond the limit, and gives it to the
//! jobs that may have more. If no job may, it is shared in proportion to the limits, except for jobs whose
//! limit is enforced. So limits of 20, 30 and 40 come out as 2:3:4, and three limits of 100 as a third each.
//! A limit of 30 beside a job without one comes out as 30:70.

/// The terms of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Terms {
    /// The job's weight against others.
    pub(crate) weight: u64,
    /// Per cent of the time that the job may have while others want it.
    pub(crate) limit: Option<u8>,
    /// The job may not have more than its limit, even when nobody wants the rest.
    pub(crate) forced: bool,
}

/// Returns the weights by which time is shared, in the order of the jobs. Their sum is the sum of the jobs'
/// own weights.
#[must_use]
pub(crate) fn weights(jobs: &[Terms]) -> Vec<u64> {
    let all: f64 = jobs.iter().map(|job| job.weight as f64).sum();
    let mut parts: Vec<Option<f64>> = vec![None; jobs.len()];
    let mut left = 1.0;
    loop {
        let open = || jobs.iter().zip(&parts).filter(|(_, part)| part.is_none()).map(|(job, _)| job);
        let weight: f64 = open().map(|job| job.weight as f64).sum();
        let fair = |job: &Terms| left * job.weight as f64 / weight;
        // The tightest limit first, one at a time: the others get more of the rest.
        let tightest = jobs
            .iter()
            .enumerate()
            .filter(|(at, _)| parts.get(*at) == Some(&None))
            .filter_map(|(at, job)| Some((at, limit(job)?, fair(job))))
            .filter(|(_, limit, fair)| limit <= fair)
            .min_by(|a, b| (a.1 / a.2).total_cmp(&(b.1 / b.2)));
        if let Some((at, limit, _)) = tightest {
            if let Some(part) = parts.get_mut(at) {
                *part = Some(limit);
            }
            left = f64::max(left - limit, 0.0);
            continue;
        }
        let fairs: Vec<f64> = jobs.iter().map(fair).collect();
        let nobody_may_have_more = open().next().is_none();
        let unforced: f64 = jobs.iter().filter(|job| !job.forced).filter_map(limit).sum();
        let weigh = |((job, part), fair): ((&Terms, &Option<f64>), &f64)| {
            let part = match part {
                None => *fair,
                Some(part) if nobody_may_have_more && !job.forced => part + left * part / unforced,
                Some(part) => *part,
            };
            ((part * all).round() as u64).max(1)
        };
        return jobs.iter().zip(&parts).zip(&fairs).map(weigh).collect();
    }
}

fn limit(job: &Terms) -> Option<f64> {
    job.limit.map(|percent| f64::from(percent.clamp(1, 100)) / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn job(weight: u64, limit: u8) -> Terms {
        Terms { weight, limit: Some(limit).filter(|&limit| limit > 0), forced: false }
    }

    #[test]
    fn limits_and_weights_give_the_expected_parts() {
        for (jobs, expected) in [
            (vec![job(100, 20), job(100, 30), job(100, 40)], vec![222, 333, 444]),
            (vec![job(100, 30), job(100, 70)], vec![300, 700]),
            (vec![job(100, 100); 3], vec![333, 333, 333]),
            (vec![job(100, 50); 3], vec![333, 333, 333]),
            (vec![job(20, 0), job(30, 0), job(40, 0)], vec![222, 333, 444]),
            // The rest goes to jobs that may have more.
            (vec![job(100, 30), job(100, 0)], vec![300, 700]),
            (vec![job(100, 20), job(100, 80), job(100, 100)], vec![200, 400, 400]),
            (vec![job(300, 0), job(100, 10)], vec![900, 100]),
            // No job may have more: the rest is shared in proportion.
            (vec![job(100, 20), job(100, 20)], vec![500, 500]),
            (vec![job(100, 10)], vec![1000]),
            // A job whose limit is enforced gets no more.
            (vec![Terms { forced: true, ..job(100, 20) }, job(100, 20)], vec![200, 800]),
            (vec![Terms { forced: true, ..job(100, 20) }, job(100, 0)], vec![200, 800]),
            (Vec::new(), Vec::new()),
        ] {
            let sum: u64 = jobs.iter().map(|job| job.weight).sum();
            let got: Vec<u64> = weights(&jobs).iter().map(|weight| weight * 1000 / sum.max(1)).collect();
            let near =
                got.iter().zip(&expected).all(|(got, expected): (&u64, &u64)| got.abs_diff(*expected) <= 5);
            assert!(near && got.len() == expected.len(), "{jobs:?}: {got:?}, not {expected:?}");
        }
    }

    fn terms() -> impl Strategy<Value = Terms> {
        (64..640_000u64, prop::option::of(1..=100u8), any::<bool>())
            .prop_map(|(weight, limit, forced)| Terms { weight, limit, forced: forced && limit.is_some() })
    }

    proptest! {
        #[test]
        fn nobody_is_left_out_and_nothing_is_given_twice(jobs in prop::collection::vec(terms(), 1..20)) {
            let got = weights(&jobs);
            let all: u64 = jobs.iter().map(|job| job.weight).sum();
            let sum: u64 = got.iter().sum();
            // Each weight is rounded, and at least 1.
            let slack = jobs.len() as u64 * 2;
            prop_assert!(sum <= all + slack, "{got:?} of {all}");
            prop_assert!(got.iter().all(|&weight| weight > 0));
            let somebody_may = jobs.iter().any(|job| !job.forced);
            prop_assert!(!somebody_may || sum + slack >= all, "{got:?} of {all}");
            for (job, got) in jobs.iter().zip(&got) {
                if let (true, Some(limit)) = (job.forced, job.limit) {
                    prop_assert!(*got <= all * u64::from(limit) / 100 + 2, "{job:?} has {got} of {all}");
                }
            }
        }
    }
}
