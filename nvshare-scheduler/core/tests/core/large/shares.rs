//! The shares of programs that do not fit, where a switch takes long beside the quantum. The times in which they compute are compared:
//! from the open gate until they have drained.

use std::time::Duration;

use nvshare_core::Config;
use nvshare_proto::Wishes;

use super::honest::Honest;
use super::world::World;
use crate::table::{MS, config};

const QUANTUM: u64 = 4000;

/// How a switch is made, with its milliseconds.
#[derive(Debug, Clone, Copy)]
enum Switch {
    /// One client's memory leaves, and then the other's comes.
    OneAfterTheOther(u64),
    /// Both go at the same time: little is left to bring back when all has left.
    AtTheSameTime(u64),
}

fn job(weight: u32, switch: Switch) -> Honest {
    let asked = Wishes { weight: Some(weight), ..Wishes::default() };
    let (evicts_in, restores_in) = match switch {
        Switch::OneAfterTheOther(ms) => (ms * 2 / 3, ms / 3),
        Switch::AtTheSameTime(ms) => (ms * 19 / 20, ms / 20),
    };
    Honest { asked, evicts_in, restores_in, ..Honest::new(0, 12) }
}

/// The times in which these compute, in seconds, up to some moments.
fn computed<const N: usize>(jobs: &[Honest], quantum: u64, moments: [u64; N]) -> [Vec<f64>; N] {
    let mut world = World::new(Config { quantum: MS(quantum), ..config(false) });
    let roles: Vec<usize> = jobs.iter().map(|job| world.add(0, job.clone())).collect();
    moments.map(|seconds| {
        world.run(Duration::from_secs(seconds), |_| {});
        roles.iter().map(|&role| world.computed(role).as_secs_f64()).collect()
    })
}

#[test]
fn time_computed_comes_out_in_the_ratio_of_weights_however_long_switches_take() {
    for weights in [vec![20, 30, 40], vec![30, 70], vec![100, 100, 100], vec![10, 80]] {
        for ms in [0, 100, 1000, 3000] {
            for switch in [Switch::OneAfterTheOther(ms), Switch::AtTheSameTime(ms)] {
                let jobs: Vec<Honest> = weights.iter().map(|&weight| job(weight, switch)).collect();
                let [soon, late] = computed(&jobs, QUANTUM, [300, 6000]);
                for (after, got) in [(300, soon), (6000, late)] {
                    let (sum, of) = (got.iter().sum::<f64>(), f64::from(weights.iter().sum::<u32>()));
                    for (&weight, got) in weights.iter().zip(&got) {
                        let expected = sum * f64::from(weight) / of;
                        // A job that has just had its turn, or is about to have it, is that far from its share.
                        let turn = f64::from(weight) / f64::from(weights[0]) * (QUANTUM as f64 / 1e3 + 0.1);
                        let most =
                            if after == 300 { f64::max(expected * 0.05, turn) } else { expected * 0.01 };
                        println!("{weights:?} {switch:?} {after} s: {:.2} %", (got / expected - 1.0) * 100.0);
                        assert!(
                            (got - expected).abs() <= most,
                            "{weights:?}, {switch:?}, {after} s: {got} s of {expected}"
                        );
                    }
                }
            }
        }
    }
}

/// Seconds of each of two equal jobs in 3000 s. Restores of the first one take `restores_in` milliseconds, those of the other no time.
fn beside_an_expensive_one(restores_in: u64, quantum: u64, gives_back: u64) -> [f64; 2] {
    let expensive = Honest { restores_in, gives_back, ..Honest::new(0, 12) };
    let cheap = Honest { restores_in: 0, ..Honest::new(0, 12) };
    let [got] = computed(&[expensive, cheap], quantum, [3000]);
    [got[0], got[1]]
}

#[test]
fn who_is_expensive_to_switch_gains_nothing_and_costs_others_no_more_time_than_it_computes() {
    for (restores_in, gives_back) in
        [(0, 0), (100, 0), (1000, 0), (3900, 0), (8000, 0), (12_000, 0), (3000, 5), (3000, 500)]
    {
        let [expensive, cheap] = beside_an_expensive_one(restores_in, QUANTUM, gives_back);
        let lost = 3000.0 - expensive - cheap;
        let what = format!(
            "{restores_in} ms, gives back after {gives_back} ms: {expensive} and {cheap} s, {lost} s lost"
        );
        println!("{what}");
        // It has no more than the other.
        assert!(expensive <= cheap * 1.02, "{what}");
        // A third of the time is the other's, whatever happens: a turn of each, and a restore that is as long.
        assert!(cheap >= 1000.0 * 0.98, "{what}");
        // As long as restores are no longer than turns, both compute for as long. Beyond, a restore counts instead of its turn.
        let ratio = f64::max(restores_in as f64 / (QUANTUM + 20) as f64, 1.0);
        let turns = 2.0 * f64::max(restores_in as f64, QUANTUM as f64) / 1e3;
        assert!(gives_back > 0 || (cheap - expensive * ratio).abs() <= turns, "{what}");
    }
}
