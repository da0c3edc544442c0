//! A token bucket: a peer that takes more than its rate is slowed down, and no other peer is.

use std::time::{Duration, Instant};

/// At most `burst` at once, and `each_second` in the long run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rate {
    pub(crate) burst: u32,
    pub(crate) each_second: u32,
}

impl Rate {
    fn tokens_each_second(self) -> f64 {
        f64::from(self.each_second.max(1))
    }
}

#[derive(Debug)]
pub(crate) struct Bucket {
    rate: Rate,
    tokens: f64,
    filled_to: Instant,
}

impl Bucket {
    pub(crate) fn new(rate: Rate, now: Instant) -> Self {
        Self { rate, tokens: f64::from(rate.burst), filled_to: now }
    }

    /// Takes a token; else returns the time until there is one.
    pub(crate) fn take(&mut self, now: Instant) -> Result<(), Duration> {
        self.tokens = self.tokens_at(now);
        self.filled_to = self.filled_to.max(now);
        let wait = self.wait(now);
        if wait.is_zero() {
            self.tokens -= 1.0;
            return Ok(());
        }
        Err(wait)
    }

    /// Takes tokens, also such as are not there yet. Returns how long it takes until there is one again.
    pub(crate) fn charge(&mut self, tokens: u32, now: Instant) -> Duration {
        self.tokens = self.tokens_at(now) - f64::from(tokens);
        self.filled_to = self.filled_to.max(now);
        self.wait(now)
    }

    /// The time until there is a token.
    pub(crate) fn wait(&self, now: Instant) -> Duration {
        Duration::from_secs_f64((1.0 - self.tokens_at(now)).max(0.0) / self.rate.tokens_each_second())
    }

    /// Whether the bucket is full: nothing was taken recently.
    pub(crate) fn is_full(&self, now: Instant) -> bool {
        self.tokens_at(now) >= f64::from(self.rate.burst)
    }

    fn tokens_at(&self, now: Instant) -> f64 {
        let passed = now.saturating_duration_since(self.filled_to).as_secs_f64();
        (self.tokens + passed * self.rate.tokens_each_second()).min(f64::from(self.rate.burst.max(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_followed_by_the_rate() {
        let start = Instant::now();
        let mut bucket = Bucket::new(Rate { burst: 3, each_second: 10 }, start);
        assert!(bucket.is_full(start));
        assert!((0..3).all(|_| bucket.take(start).is_ok()));
        assert!(!bucket.is_full(start));
        let wait = bucket.take(start).unwrap_err();
        assert!(wait > Duration::from_millis(99) && wait < Duration::from_millis(101), "{wait:?}");
        assert!(bucket.take(start + Duration::from_millis(101)).is_ok());
        assert!(bucket.take(start + Duration::from_millis(102)).is_err());
        assert!(bucket.is_full(start + Duration::from_secs(9)));
    }

    #[test]
    fn tokens_that_are_taken_before_they_are_there_are_waited_for() {
        let start = Instant::now();
        let mut bucket = Bucket::new(Rate { burst: 30, each_second: 10 }, start);
        assert!((0..2).all(|_| bucket.charge(10, start).is_zero()));
        assert_eq!(bucket.charge(20, start), Duration::from_millis(1100));
        assert_eq!(bucket.charge(1, start + Duration::from_millis(1100)), Duration::from_millis(100));
    }
}
