//! The last events, for all who watch. Each reader has its own place here: a reader that reads slowly misses events
//! and is told how many, and nothing waits for a reader.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use nvshare_proto::{PhaseTime, WatchEvent, WatchFrom};
use tokio::sync::watch;

use crate::lock::lock;

/// Events that are kept.
const KEPT: usize = 8192;

/// An event, and the phases that its client has told.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    pub(crate) event: WatchEvent,
    pub(crate) phases: Vec<PhaseTime>,
}

/// The last events.
#[derive(Debug)]
pub(crate) struct Journal {
    boot: u64,
    kept: Mutex<Kept>,
    /// The number of the last event.
    last: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Kept {
    entries: VecDeque<Entry>,
    last: u64,
}

impl Kept {
    /// The number of the oldest event, or of the next one if there is none.
    fn oldest(&self) -> u64 {
        self.entries.front().map_or(self.last + 1, |entry| entry.event.seq)
    }
}

/// The events that a reader gets at once.
#[derive(Debug, PartialEq)]
pub(crate) struct Read {
    /// Events that came before these and are lost.
    pub(crate) missed: u64,
    pub(crate) entries: Vec<Entry>,
}

impl Journal {
    /// An empty journal, for the run of the scheduler that `boot` names.
    pub(crate) fn new(boot: u64) -> Arc<Self> {
        Arc::new(Self { boot, kept: Mutex::default(), last: watch::Sender::new(0) })
    }

    pub(crate) fn boot(&self) -> u64 {
        self.boot
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        lock(&self.kept)
    }

    /// Keeps an event and numbers it.
    pub(crate) fn push(&self, event: WatchEvent, phases: Vec<PhaseTime>) {
        let mut kept = self.kept();
        kept.last += 1;
        let seq = kept.last;
        if kept.entries.len() == KEPT {
            kept.entries.pop_front();
        }
        kept.entries.push_back(Entry { event: WatchEvent { seq, ..event }, phases });
        drop(kept);
        self.last.send_replace(seq);
    }

    /// The number of the first event for a reader that asks for `from`.
    pub(crate) fn first(&self, from: WatchFrom) -> u64 {
        let kept = self.kept();
        let oldest = kept.oldest();
        match from {
            WatchFrom::Now => kept.last + 1,
            WatchFrom::After { boot, seq } if boot == self.boot && seq <= kept.last => seq + 1,
            WatchFrom::Kept | WatchFrom::After { .. } => oldest,
        }
    }

    /// Events from number `first` on, at most `most`.
    pub(crate) fn read(&self, first: u64, most: usize) -> Read {
        let kept = self.kept();
        let oldest = kept.oldest();
        let missed = oldest.saturating_sub(first);
        let skip = usize::try_from(first.saturating_sub(oldest)).unwrap_or(usize::MAX);
        Read { missed, entries: kept.entries.iter().skip(skip).take(most).cloned().collect() }
    }

    /// Changes with each event.
    pub(crate) fn news(&self) -> watch::Receiver<u64> {
        self.last.subscribe()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use nvshare_proto::EventKind;

    /// An event that says nothing.
    pub(crate) fn event() -> WatchEvent {
        WatchEvent {
            seq: 0,
            time_us: 0,
            up_us: 0,
            event: EventKind::On,
            client: None,
            pid: None,
            name: None,
            gpus: Vec::new(),
            bytes: None,
            took_us: None,
        }
    }

    fn numbers(read: &Read) -> Vec<u64> {
        read.entries.iter().map(|entry| entry.event.seq).collect()
    }

    #[test]
    fn readers_begin_where_they_ask_and_learn_how_many_events_they_missed() {
        let journal = Journal::new(7);
        assert_eq!([WatchFrom::Now, WatchFrom::Kept].map(|from| journal.first(from)), [1, 1]);
        (0..10).for_each(|_| journal.push(event(), Vec::new()));
        let after = |boot, seq| journal.first(WatchFrom::After { boot, seq });
        assert_eq!((journal.first(WatchFrom::Now), journal.first(WatchFrom::Kept)), (11, 1));
        assert_eq!((after(7, 4), after(7, 10)), (5, 11));
        // A number of another run, or one that does not exist: all events are new.
        assert_eq!((after(6, 4), after(7, 11)), (1, 1));
        assert_eq!(numbers(&journal.read(9, 100)), [9, 10]);
        assert_eq!(numbers(&journal.read(3, 2)), [3, 4]);
        assert_eq!(journal.read(11, 100), Read { missed: 0, entries: Vec::new() });
        (0..KEPT).for_each(|_| journal.push(event(), Vec::new()));
        let late = journal.read(3, 1);
        assert_eq!((late.missed, numbers(&late)), (8, vec![11]));
        assert_eq!(journal.first(WatchFrom::Kept), 11);
    }
}
