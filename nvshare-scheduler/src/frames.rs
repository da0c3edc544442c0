//! Frames on a connection.

use std::time::Duration;

use futures_util::SinkExt;
use nvshare_proto::codec::Frames;
use nvshare_proto::{Reply, Request};
use tokio::net::UnixStream;
use tokio::time::timeout;
use tokio_util::codec::Framed;

/// A reader that reads nothing for this long, with its socket full, is cut off.
pub(crate) const WRITE_PATIENCE: Duration = Duration::from_secs(10);

/// A connection as frames.
pub(crate) type Stream = Framed<UnixStream, Frames<Request, Reply>>;

/// Bytes that are kept for reading and for writing, on each connection: there may be thousands. Longer frames take more while
/// they are there.
const BUFFER: usize = 1024;

pub(crate) fn on(stream: UnixStream) -> Stream {
    Framed::with_capacity(stream, Frames::default(), BUFFER)
}

/// Sends replies; false if the other end does not read.
pub(crate) async fn tell_all(framed: &mut Stream, replies: impl IntoIterator<Item = Reply>) -> bool {
    let all = async {
        for reply in replies {
            framed.feed(reply).await?;
        }
        framed.flush().await
    };
    matches!(timeout(WRITE_PATIENCE, all).await, Ok(Ok(())))
}

/// Sends why the connection ends.
pub(crate) async fn refuse(framed: &mut Stream, reason: impl Into<String>) {
    tell_all(framed, [Reply::Refused { reason: reason.into() }]).await;
}
