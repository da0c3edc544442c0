//! Worlds small enough to be worked out by hand.

use std::time::Duration;

use nvshare_core::Config;

use crate::card::Link;
use crate::measure::Summary;
use crate::policies::{ByTurns, Ours, Rule, Scheduler};
use crate::trace::{self, Class, Mix};
use crate::world::{Outcome, World};

const CARD: u64 = 80 << 30;
const S: fn(u64) -> Duration = Duration::from_secs;

fn run(lines: &str, scheduler: Box<dyn Scheduler>, link: Link, seconds: u64) -> Outcome {
    let trace = trace::parse(lines, 2).unwrap();
    World::new(&trace, scheduler, 2, CARD, link, 1).run(S(seconds))
}

fn ours(lines: &str, tq: u64, seconds: u64) -> Outcome {
    let config = Config { quantum: S(tq), ..Config::default() };
    run(lines, Box::new(Ours::new(config, CARD, Link::MANAGED.memory())), Link::MANAGED, seconds)
}

fn fcfs(lines: &str, tq: u64, seconds: u64) -> Outcome {
    run(lines, Box::new(ByTurns::new(Rule::Fcfs(S(tq)), 2, CARD)), Link::FAULTS, seconds)
}

fn done(outcome: &Outcome, client: usize) -> f64 {
    outcome.clients[client].seen.done_ms / 1000.0
}

fn close(number: f64, expected: f64, by: f64) {
    assert!((number - expected).abs() <= by, "{number} should be {expected}");
}

#[test]
fn one_alone_gets_everything() {
    let one = "training 0 0 20 80 20 0";
    for outcome in [ours(one, 1, 100), fcfs(one, 1000, 100)] {
        // 80 of each 100 ms, once the client's 20 GiB are on the card.
        close(done(&outcome, 0), 80.0, 3.0);
        close(Summary::of(&outcome).efficiency, 0.98, 0.02);
    }
}

#[test]
fn two_that_fit_run_beside_each_other_and_fill_each_others_gaps() {
    let two = "training 0 0 20 50 50 0\ntraining 0 0 20 50 50 0";
    let outcome = ours(two, 1, 100);
    assert_eq!(outcome.moved, 0);
    // Each alone would use the card half of the time; sometimes both do, and then take a little longer.
    assert!(done(&outcome, 0) > 35.0 && done(&outcome, 1) > 35.0, "{outcome:?}");
    let turns = fcfs(two, 5, 100);
    assert!(done(&turns, 0) < 30.0, "{}", done(&turns, 0));
}

#[test]
fn two_that_do_not_fit_share_by_turns_and_pay_for_their_moves() {
    let two = "steady 0 0 60 1e12 0 0\nsteady 0 0 60 1e12 0 0";
    let outcome = ours(two, 10, 400);
    let [one, other] = [done(&outcome, 0), done(&outcome, 1)];
    // 40 of 120 GiB leave and come at each switch: 2.35 s and 0.87 s.
    close(one / other, 1.0, 0.1);
    close(one + other, 400.0 * 10.0 / 13.2, 15.0);
    let moved = outcome.moved as f64 / (1u64 << 30) as f64;
    close(moved, 400.0 / 13.2 * 80.0, 240.0);
    let faults = fcfs(two, 10, 400);
    assert!(done(&faults, 0) + done(&faults, 1) < one + other, "page faults cost more");
}

#[test]
fn work_done_comes_out_in_the_ratio_of_weights_however_memory_moves() {
    // 40 GiB or more leave at each switch and come back: 3 s with managed memory, and 6 s at a half of its rates; quanta are 4 s.
    let slow = |link: Link| Link {
        evict: link.evict / 2.0,
        restore: link.restore / 2.0,
        both: link.both.map(|both| both / 3.0),
        ..link
    };
    let links = [Link::MANAGED, Link::SWAP, Link::COPIES].into_iter().flat_map(|link| [link, slow(link)]);
    for link in links {
        for weights in [vec![20, 30, 40], vec![30, 70], vec![100, 100, 100]] {
            let line = |weight: &u32| format!("steady 0 0 60 1e12 0 0 {weight} changes=3\n");
            let lines: String = weights.iter().map(line).collect();
            let config = Config { quantum: S(4), ..Config::default() };
            let outcome = run(&lines, Box::new(Ours::new(config, CARD, link.memory())), link, 3000);
            let all: f64 = (0..weights.len()).map(|client| done(&outcome, client)).sum();
            for (client, weight) in weights.iter().enumerate() {
                let expected = all * f64::from(*weight) / f64::from(weights.iter().sum::<u32>());
                let got = done(&outcome, client);
                let off = (got / expected - 1.0).abs();
                assert!(off <= 0.02, "{link:?} {weights:?}: {got} s, not {expected}");
            }
        }
    }
}

#[test]
fn copies_go_both_ways_at_once_and_what_has_not_changed_is_not_copied() {
    let run = |link: Link, changes: &str| {
        let two = format!("steady 0 0 60 1e12 0 0 {changes}\nsteady 0 0 60 1e12 0 0 {changes}");
        let config = Config { quantum: S(10), ..Config::default() };
        run(&two, Box::new(Ours::new(config, CARD, link.memory())), link, 400)
    };
    let work = |outcome: &Outcome| done(outcome, 0) + done(outcome, 1);
    let gib = |outcome: &Outcome| outcome.moved as f64 / (1u64 << 30) as f64;
    // 40 of 120 GiB leave and 40 come at each switch, at 77 GiB/s in sum.
    let all = run(Link::COPIES, "changes=0");
    close(work(&all), 400.0 * 10.0 / (10.0 + 80.0 / 77.0), 6.0);
    close(gib(&all), 400.0 / 11.04 * 80.0, 160.0);
    let changed = run(Link::SWAP, "");
    close(work(&changed), work(&all), 0.1);
    // Each job writes a half of its memory in a turn of 10 s, so a half of what leaves is copied: 60 GiB are in all.
    let half = run(Link::SWAP, "changes=3");
    close(gib(&half), gib(&all) * 0.75, 160.0);
    // It comes at 51 GiB/s, and leaves faster than that.
    let nothing = run(Link::SWAP, "changes=0");
    close(work(&nothing), 400.0 * 10.0 / (10.0 + 40.0 / 51.0), 6.0);
    close(gib(&nothing), 400.0 / 10.78 * 40.0, 160.0);
}

#[test]
fn a_gang_runs_on_all_of_its_gpus_or_on_none() {
    let three = "gang 0 0,1 60 1e12 0 0\nsteady 0 0 60 1e12 0 0\nsteady 0 1 60 1e12 0 0";
    for outcome in [ours(three, 5, 600), fcfs(three, 5, 600)] {
        for client in 0..3 {
            // With page faults, most of each turn passes before the memory is on the card.
            assert!(done(&outcome, client) > 0.5, "client {client}: {}", done(&outcome, client));
        }
        let wanted: f64 = outcome.wanted_s.iter().sum();
        assert!(Summary::of(&outcome).efficiency < 1.0 && wanted <= 1200.0 + 1e-6);
    }
}

#[test]
fn all_run_below_nine_tenths_of_the_card_and_one_at_a_time_above() {
    let rule = || Box::new(ByTurns::new(Rule::RunOrSerialise, 2, CARD));
    let two = "steady 0 0 30 1e12 0 0\nsteady 0 0 30 1e12 0 0";
    let together = run(two, rule(), Link::FAULTS, 100);
    // 7.5 s are for the page faults of both.
    close(done(&together, 0) + done(&together, 1), 0.94 * 92.5, 4.0);
    // A third comes in the middle: turns of 150 s from then on.
    let three = format!("{two}\nsteady 50 0 30 1e12 0 0");
    let serial = run(&three, rule(), Link::FAULTS, 1000);
    let all: f64 = (0..3).map(|client| done(&serial, client)).sum();
    assert!((0..3).all(|client| done(&serial, client) > 100.0), "{serial:?}");
    assert!(all > 900.0, "{all}");
}

#[test]
fn the_same_seed_gives_the_same_numbers() {
    let trace = trace::generate(&Mix::default(), 40, 4, 80.0, 300.0, 7);
    let outcome = || {
        let ours =
            Box::new(Ours::new(Config { quantum: S(5), ..Config::default() }, CARD, Link::SWAP.memory()));
        Summary::of(&World::new(&trace, ours, 4, CARD, Link::SWAP, 7).run(S(300)))
    };
    let first = outcome();
    assert_eq!(first, outcome());
    assert_eq!(first.classes.len(), 5);
    assert!(first.classes[&Class::Inference].wait_s[1] > 0.0, "somebody has to wait");
}
