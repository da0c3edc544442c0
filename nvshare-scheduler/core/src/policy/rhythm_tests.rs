//! Rhythms as lists of works and sleeps, in milliseconds.

use super::*;

const MS: fn(u64) -> Duration = Duration::from_millis;

/// Returns the rhythm of a client that has worked and slept like this.
fn rhythm(spells: &[(u64, u64)]) -> Rhythm {
    let (mut rhythm, mut now) = (Rhythm::default(), Duration::ZERO);
    for &(work, sleep) in spells {
        rhythm.add_work(MS(work));
        now += MS(work);
        rhythm.fall_asleep(now);
        now += MS(sleep);
        rhythm.wake(now);
    }
    rhythm
}

#[test]
fn short_work_and_longer_sleeps_are_interactive() {
    for (spells, expected) in [
        (&[(3, 700), (3, 700)][..], true),
        // One spell is too few to tell.
        (&[(3, 700)], false),
        (&[], false),
        // Long work, and a hog that sleeps a little.
        (&[(3, 700), (501, 9000)], false),
        (&[(400, 20), (400, 20), (400, 20)], false),
        (&[(400, 400), (400, 400)], true),
        // A client that asks again at once has not slept: this is one spell.
        (&[(300, 0), (300, 1), (300, 19), (10, 9000), (10, 9000)], false),
        (&[(1, 0); 100], false),
        // Four spells later, the long one is forgotten.
        (&[(9000, 700), (3, 700), (3, 700), (3, 700)], false),
        (&[(9000, 700), (3, 700), (3, 700), (3, 700), (3, 700)], true),
    ] {
        assert_eq!(rhythm(spells).is_interactive(), expected, "{spells:?}");
    }
}

#[test]
fn work_that_goes_on_for_long_is_no_longer_short() {
    let mut rhythm = rhythm(&[(3, 700), (3, 700)]);
    rhythm.add_work(MAX_SHORT_WORK);
    assert!(rhythm.is_interactive());
    rhythm.add_work(MS(1));
    assert!(!rhythm.is_interactive());
    rhythm.discard_current_work();
    assert!(rhythm.is_interactive(), "what it did while nobody waited says nothing");
}

#[test]
fn a_place_is_kept_where_that_costs_less_than_moving() {
    for (spells, cost, expected) in [
        // A loop with 60 ms of host work, and one whose sleeps are as long as hand-overs.
        (&[(100, 60), (100, 60)][..], 160, 320),
        (&[(3, 160), (3, 160)], 160, 320),
        (&[(3, 300), (3, 700)], 160, 0),
        // One sleep is too few to tell.
        (&[(3, 9000)], 160, 320),
        (&[], 160, 320),
        // Nothing moves: at once, whatever it does.
        (&[(100, 60), (100, 60)], 0, 0),
    ] {
        assert_eq!(rhythm(spells).patience(MS(cost), MS(2 * cost)), MS(expected), "{spells:?}, {cost} ms");
    }
}

#[test]
fn the_last_sleep_is_the_one_before_the_present_spell() {
    for (spells, expected) in [
        (&[][..], 0),
        (&[(3, 700)], 700),
        (&[(3, 700), (3, 10)], 700),
        (&[(3, 1000), (3, 2000), (3, 3000), (3, 4000)], 4000),
        (&[(3, 1000), (3, 2000), (3, 3000), (3, 4000), (3, 5000)], 5000),
    ] {
        assert_eq!(rhythm(spells).last_sleep(), MS(expected), "{spells:?}");
    }
}

#[test]
fn a_sleep_of_more_than_twice_the_longest_is_not_expected_to_end_soon() {
    let mut rhythm = rhythm(&[(3, 700), (3, 300)]);
    assert!(rhythm.asleep_since().is_none() && !rhythm.may_wake_soon(MS(2000)), "it does not sleep");
    rhythm.fall_asleep(MS(2000));
    assert_eq!(rhythm.asleep_since(), Some(MS(2000)));
    assert!(
        rhythm.may_wake_soon(MS(2000)) && rhythm.may_wake_soon(MS(3400)) && !rhythm.may_wake_soon(MS(3401))
    );
    let mut unknown = Rhythm::default();
    unknown.fall_asleep(MS(2000));
    assert!(!unknown.may_wake_soon(MS(2001)));
}
