//! The memory that the process shares with others (CUDA IPC), as the scheduler is told.
//!
//! Programs open and close memory over and over, as for each tensor that they pass on. So memory that is not shared any more counts for a
//! while: the gang of the process does not end and begin each time.

use std::time::Duration;

/// For how long memory counts as shared that is not shared any more.
const LINGERS: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct Number {
    number: u64,
    /// Since when it is not shared any more.
    over_since: Option<Duration>,
}

impl Number {
    fn counts(&self, now: Duration) -> bool {
        self.over_since.is_none_or(|since| now < since + LINGERS)
    }
}

/// The numbers of memory that is shared.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    numbers: Vec<Number>,
    /// The scheduler has the numbers as they are.
    is_told: bool,
}

impl Sharing {
    /// There is a new connection, on which nothing is told.
    pub(crate) fn forget_told(&mut self) {
        self.is_told = self.numbers.is_empty();
    }

    /// Looks at what is shared now.
    pub(crate) fn look(&mut self, shared: &[u64], now: Duration) {
        for known in &mut self.numbers {
            let is_over = !shared.contains(&known.number);
            known.over_since = is_over.then(|| known.over_since.unwrap_or(now));
        }
        let before = self.numbers.len();
        self.numbers.retain(|known| known.counts(now));
        self.is_told &= self.numbers.len() == before;
        for &number in shared {
            if !self.numbers.iter().any(|known| known.number == number) {
                self.numbers.push(Number { number, over_since: None });
                self.is_told = false;
            }
        }
    }

    /// The numbers, if the scheduler does not have them as they are. They count as told.
    pub(crate) fn news(&mut self) -> Option<Vec<u64>> {
        let is_news = !std::mem::replace(&mut self.is_told, true);
        is_news.then(|| self.numbers.iter().map(|known| known.number).collect())
    }

    /// Time until a number does not count any more.
    pub(crate) fn next_look(&self, now: Duration) -> Option<Duration> {
        let ends = self.numbers.iter().filter_map(|known| known.over_since).min()?;
        Some((ends + LINGERS).saturating_sub(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn memory_that_is_closed_and_opened_again_is_told_once() {
        let mut sharing = Sharing::default();
        sharing.forget_told();
        assert_eq!(sharing.news(), None, "there is nothing to tell");
        sharing.look(&[7], at(0));
        assert_eq!(sharing.news(), Some(vec![7]));
        for ms in (100..30_000).step_by(100) {
            sharing.look(if ms % 200 == 0 { &[7] } else { &[] }, at(ms));
            assert_eq!(sharing.news(), None);
        }
        sharing.look(&[], at(30_000));
        assert_eq!(sharing.next_look(at(30_000)), Some(LINGERS - at(100)));
        sharing.look(&[8], at(30_100));
        assert_eq!(sharing.news(), Some(vec![7, 8]));
        sharing.look(&[8], at(29_900) + LINGERS);
        assert_eq!((sharing.news(), sharing.next_look(at(40_000))), (Some(vec![8]), None));
        sharing.forget_told();
        assert_eq!(sharing.news(), Some(vec![8]), "to another scheduler");
    }
}
