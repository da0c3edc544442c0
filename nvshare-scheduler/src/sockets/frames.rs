//! Frames on a connection.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use futures_util::SinkExt;
use nvshare_proto::codec::{self, Error, Frames};
use nvshare_proto::{MAX_SEGMENTS, Reply, Request, ThrottledLine};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tokio_util::codec::Framed;

use crate::log;

/// A program may ask each second.
static NOT_SENT: ThrottledLine = ThrottledLine::new(log::warn);

/// A reader that reads nothing for this long, with its socket full, is cut off.
pub(crate) const WRITE_PATIENCE: Duration = Duration::from_secs(10);

/// A connection as frames.
pub(crate) type Stream = Framed<UnixStream, Frames<Request, Reply>>;

/// Bytes that are kept for reading and for writing, on each connection: there may be thousands. Longer frames
/// take more while they are there.
const BUFFER: usize = 1024;

pub(crate) fn on(stream: UnixStream) -> Stream {
    Framed::with_capacity(stream, Frames::default(), BUFFER)
}

/// Longest frame of a connection that takes a place, in bytes. A registration has at most 6 KiB, and a list of what a client has of the
/// host's memory 9 KiB. With its length, the longest frame fills a buffer of 16 KiB.
pub(crate) const MAX_FRAME_OF_CLIENT: usize = (16 << 10) - size_of::<u32>();

/// Longest frame of a registered client, in bytes, once it has listed what it has of the host's memory.
const MAX_FRAME_READ: usize = 4096;

/// Gives back the memory of the frames that were read. The bytes behind them stay.
pub(crate) fn forget_read(framed: &mut Stream) {
    let buffer = framed.read_buffer_mut();
    let rest = std::mem::take(buffer);
    // All that a client says at once is read at once.
    buffer.reserve(BUFFER);
    buffer.extend_from_slice(&rest);
}

/// Lets a registered client say only short things from now on. Its earlier frames take no more memory, nor
/// does a frame that it never completes. Returns false if a longer one has begun.
pub(crate) fn shorten(framed: &mut Stream) -> bool {
    forget_read(framed);
    framed.codec_mut().accept_at_most(MAX_FRAME_READ);
    framed.read_buffer().len() <= MAX_FRAME_READ
}

/// Sends replies; false if the other end does not read. One that fits no frame ends them, and the other end is told so.
pub(crate) async fn tell_all(framed: &mut Stream, replies: impl IntoIterator<Item = Reply>) -> bool {
    let all = async {
        for reply in replies {
            match framed.feed(reply).await {
                Ok(()) => {}
                Err(Error::Io(error)) => return Err(Error::Io(error)),
                Err(error) => {
                    let reason = format!("the answer cannot be sent: {error}");
                    NOT_SENT.say(format_args!("{reason}"));
                    framed.feed(Reply::Refused { reason }).await?;
                    break;
                }
            }
        }
        framed.flush().await
    };
    matches!(timeout(WRITE_PATIENCE, all).await, Ok(Ok(())))
}

/// Sends why the connection ends.
pub(crate) async fn refuse(framed: &mut Stream, reason: impl Into<String>) {
    tell_all(framed, [Reply::Refused { reason: reason.into() }]).await;
}

/// Sends a reply with descriptors, at most [`MAX_SEGMENTS`]. Nothing may wait in the connection's buffer.
///
/// # Errors
/// The socket's errors.
pub(crate) async fn tell_with(
    framed: &Stream,
    reply: &Reply,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let frame = codec::encode_in(framed.codec().version(), reply).map_err(io::Error::other)?;
    let stream = framed.get_ref();
    let send = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_SEGMENTS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        Ok(sendmsg(stream, &[IoSlice::new(&frame)], &mut control, SendFlags::NOSIGNAL)?)
    };
    let sent = stream.async_io(Interest::WRITABLE, send).await?;
    // The kernel takes a frame of a few hundred bytes as a whole, or not at all.
    if sent == frame.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt;
    use nvshare_core::MAX_GPUS_PER_CLIENT;
    use nvshare_proto::{
        AdminReply, ClientMessage, ComputeLimit, GangName, GpuUuid, HostSegment, MAX_GANG_MEMBERS,
        MAX_GANG_NAME, MAX_SEGMENTS_HELD, OLDEST, Priority, Register, Usage, VERSION, Wishes,
    };

    use super::*;

    #[test]
    fn all_that_a_client_says_before_its_frames_are_short_fits_in_each_version() {
        let gpus = || (0..MAX_GPUS_PER_CLIENT).map(|n| GpuUuid([n as u8; 16]));
        let usage = |gpu| Usage { gpu, total: 0, limit: 0, allocated: 0, absent: 0, immovable: 0 };
        let asked = Wishes {
            weight: Some(1),
            priority: Some(Priority::Low),
            compute: gpus().map(|gpu| ComputeLimit { gpu, percent: 50 }).collect(),
            gang: Some(GangName { name: "g".repeat(MAX_GANG_NAME), size: MAX_GANG_MEMBERS }),
            ..Wishes::default()
        };
        // The library cuts names after 64 letters.
        let newcomer = Register::newcomer(1, "\u{10ffff}".repeat(64));
        let register = Register { run: Some(1), usage: gpus().map(usage).collect(), asked, ..newcomer };
        let segments = vec![HostSegment { number: 1, bytes: 1 }; MAX_SEGMENTS_HELD];
        let held = Request::Client(ClientMessage::HostHeld { segments });
        for (request, expected) in [(Request::Register(register), 6 << 10), (held, 9 << 10)] {
            for version in [OLDEST, VERSION] {
                let bytes = codec::encode_in(version, &request).unwrap().len();
                assert!(bytes <= expected && expected <= MAX_FRAME_OF_CLIENT, "{bytes} of {expected}");
            }
        }
    }

    /// As the status of more rows than one frame has room for.
    #[tokio::test]
    async fn an_answer_that_fits_no_frame_is_refused_and_the_connection_goes_on() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut framed = on(ours);
        let reads = tokio::spawn(async move {
            let mut theirs = Framed::new(theirs, Frames::<Reply, Request>::default());
            [theirs.next().await, theirs.next().await].map(|reply| reply.unwrap().unwrap())
        });
        let done = |text: String| Reply::Admin(AdminReply::Done { text });
        assert!(tell_all(&mut framed, [done("x".repeat(1 << 20))]).await);
        assert!(tell_all(&mut framed, [done("y".to_owned())]).await);
        let [first, second] = reads.await.unwrap();
        let Reply::Refused { reason } = first else { panic!("{first:?}") };
        assert!(reason.contains("too long"), "{reason}");
        assert_eq!(second, done("y".to_owned()));
    }

    #[tokio::test]
    async fn a_client_that_may_say_short_things_alone_is_read_as_before() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut framed = on(ours);
        framed.read_buffer_mut().extend_from_slice(&[0; 100]);
        assert!(shorten(&mut framed));
        let buffer = framed.read_buffer();
        assert_eq!((buffer.len(), buffer.capacity() >= BUFFER), (100, true));
        framed.read_buffer_mut().extend_from_slice(&[0; MAX_FRAME_READ]);
        assert!(!shorten(&mut framed), "a longer frame has begun");
    }
}
