//! Sends events to an administrator, for as long as the administrator listens.

use std::time::Duration;

use futures_util::StreamExt;
use nvshare_proto::{AdminReply, Reply, WatchFrom};
use tokio::time::timeout;

use crate::events::{Entry, Journal};
use crate::sockets::frames::{Stream, tell_all};

/// The largest number of events that are written at once.
const BATCH: usize = 256;
/// A watcher without news for this long is told that the scheduler lives.
const ALIVE_EVERY: Duration = Duration::from_secs(1);

/// Writes replies; false if the other end does not read.
async fn write(framed: &mut Stream, replies: Vec<AdminReply>) -> bool {
    tell_all(framed, replies.into_iter().map(Reply::Admin)).await
}

/// The frames of an event: its phases come first.
fn frames_of(Entry { event, phases }: Entry) -> impl Iterator<Item = AdminReply> {
    let phases = (!phases.is_empty()).then_some(AdminReply::Phases(phases));
    phases.into_iter().chain([AdminReply::Event(Box::new(event))])
}

/// Sends events until there are no more, or with `follow` until the reader is gone. False: the connection cannot be
/// used any more.
pub(crate) async fn serve(framed: &mut Stream, journal: &Journal, from: WatchFrom, follow: bool) -> bool {
    let mut news = journal.news();
    let mut next = journal.first(from);
    if !write(framed, vec![AdminReply::Watching { boot: journal.boot(), first: next }]).await {
        return false;
    }
    loop {
        news.mark_unchanged();
        let read = journal.read(next, BATCH);
        next += read.missed + read.entries.len() as u64;
        let missed = (read.missed > 0).then_some(AdminReply::Missed { count: read.missed });
        let events = read.entries.into_iter().flat_map(frames_of);
        let replies: Vec<AdminReply> = missed.into_iter().chain(events).collect();
        if !replies.is_empty() {
            if !write(framed, replies).await {
                return false;
            }
            continue;
        }
        if !follow {
            return write(framed, vec![AdminReply::End]).await;
        }
        tokio::select! {
            changed = timeout(ALIVE_EVERY, news.changed()) => match changed {
                Ok(Ok(())) => {}
                // The scheduler is stopping.
                Ok(Err(_)) => return false,
                Err(_) => if !write(framed, vec![AdminReply::Alive]).await {
                    return false;
                },
            },
            // The watcher has gone, or sends something, which a watcher must not.
            _ = framed.next() => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use nvshare_proto::codec::{Frames, encode_in};
    use nvshare_proto::{AdminRequest, HandOverPhase, OLDEST, PhaseTime, Request, VERSION};
    use tokio::io::AsyncWriteExt;
    use tokio::net::UnixStream;
    use tokio_util::codec::Framed;

    use super::*;
    use crate::events::journal::tests::event;
    use crate::sockets::frames;

    /// More than the journal, the sockets and the buffers hold.
    const EVENTS: u64 = 20_000;

    #[tokio::test]
    async fn a_reader_that_does_not_read_learns_how_many_events_it_has_missed() {
        let (own, other) = UnixStream::pair().unwrap();
        let journal = Journal::new(7);
        let kept = std::sync::Arc::clone(&journal);
        tokio::spawn(async move { serve(&mut frames::on(own), &kept, WatchFrom::Now, true).await });
        let mut reader = Framed::new(other, Frames::<Reply, Request>::default());
        let first = reader.next().await.unwrap().unwrap();
        assert_eq!(first, Reply::Admin(AdminReply::Watching { boot: 7, first: 1 }));
        let (mut seen, mut missed) = (0, 0);
        for count in 0..EVENTS {
            journal.push(event(), Vec::new());
            // Some are written before the rest comes at once.
            if count < EVENTS / 4 {
                tokio::task::yield_now().await;
            }
        }
        while seen + missed < EVENTS {
            match reader.next().await.unwrap().unwrap() {
                Reply::Admin(AdminReply::Event(event)) => {
                    assert_eq!(event.seq, 1 + seen + missed);
                    seen += 1;
                }
                Reply::Admin(AdminReply::Missed { count }) => missed += count,
                other => panic!("{other:?}"),
            }
        }
        assert!(seen > 0 && missed > 0 && seen + missed == EVENTS, "{seen} seen, {missed} missed");
    }

    #[tokio::test]
    async fn phases_come_before_their_event_in_each_version() {
        let journal = Journal::new(7);
        let phase = PhaseTime { gpu: None, phase: HandOverPhase::Drain, micros: 5 };
        journal.push(event(), vec![phase]);
        journal.push(event(), Vec::new());
        for version in [OLDEST, VERSION] {
            let (own, mut other) = UnixStream::pair().unwrap();
            let watch = Request::Admin(AdminRequest::Watch { from: WatchFrom::Kept, follow: false });
            other.write_all(&encode_in(version, &watch).unwrap()).await.unwrap();
            let mut own = frames::on(own);
            own.next().await.unwrap().unwrap();
            assert!(serve(&mut own, &journal, WatchFrom::Kept, false).await);
            drop(own);
            let told =
                Framed::new(other, Frames::<Reply, Request>::default()).map(|reply| match reply.unwrap() {
                    Reply::Admin(AdminReply::Phases(phases)) => format!("{} phases", phases.len()),
                    Reply::Admin(AdminReply::Event(event)) => format!("event {}", event.seq),
                    other => format!("{other:?}"),
                });
            let told: Vec<String> = told.collect().await;
            let events: Vec<&str> = told[1..told.len() - 1].iter().map(String::as_str).collect();
            assert_eq!(events, ["1 phases", "event 1", "event 2"], "{version}: {told:?}");
        }
    }
}
