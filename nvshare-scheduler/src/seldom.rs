//! A place in the program that would write the same warning again and again, as when the process is out of descriptors.

use std::fmt;
use std::sync::Mutex;
use std::time::Instant;

use nvshare_proto::{LeftOut, Repeated};
use tracing::warn;

use crate::lock::lock;

/// Writes a warning once a minute at most, with how often it was left out.
#[derive(Debug)]
pub(crate) struct Seldom(Mutex<Option<(Instant, Repeated)>>);

impl Seldom {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    pub(crate) fn warn(&self, text: fmt::Arguments<'_>) {
        if let Some(left_out) = self.again(Instant::now()) {
            warn!("{text}{left_out}");
        }
    }

    fn again(&self, now: Instant) -> Option<LeftOut> {
        let mut state = lock(&self.0);
        let (first, repeated) = state.get_or_insert((now, Repeated::new()));
        repeated.again(now.saturating_duration_since(*first))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_loop_of_failures_writes_two_lines_in_a_minute_and_a_half() {
        let (seldom, begin) = (Seldom::new(), Instant::now());
        let written = (0..1800).filter_map(|n| seldom.again(begin + Duration::from_millis(50) * n));
        let written: Vec<String> = written.map(|left_out| left_out.to_string()).collect();
        assert_eq!(written, ["", " (and 1199 times more since the last such line)"]);
    }
}
