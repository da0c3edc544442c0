//! Frames and their contents; the only place that knows how messages become bytes.
//!
//! A frame is a length (u32, little endian, without itself), the protocol version (u16, little endian) and one
//! message in bincode: little endian, integers of fixed width. A frame is at most [`MAX_FRAME`] bytes; a longer
//! one is refused before anything is read into memory. The version comes before the message, so that each end
//! can name the other's version even when it cannot read its messages.
//!
//! Each end speaks [`VERSION`] and the versions down to [`OLDEST`]. The end that connects begins with the newest. The scheduler answers a
//! connection in the version of its first frame. One that is too new for it, it refuses, in its own version; then the other end connects
//! again and speaks that, if it can.
//!
//! So the bytes of a message stay what they are. A message that changes is a new one, behind the others of its enum, and VERSION is one
//! higher; [`Message::since`] says so, and no older end is sent it.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{OLDEST, VERSION};

/// Longest frame in bytes, without its length.
pub const MAX_FRAME: usize = 64 * 1024;

const LENGTH: usize = size_of::<u32>();
const HEADER: usize = size_of::<u16>();

/// Why a frame cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The length is more than [`MAX_FRAME`], or than this end accepts by now.
    #[error("a frame of {0} bytes is too long")]
    TooLong(usize),
    /// The frame is too short for a version.
    #[error("frame of {0} bytes is too short")]
    TooShort(usize),
    /// The other end speaks a version that this one does not.
    #[error("protocol version {theirs}; this is version {VERSION}")]
    Version {
        /// The other end's version.
        theirs: u16,
    },
    /// The version of the other end has no such message.
    #[error("protocol version {version} has no such message")]
    TooNew {
        /// The version that is spoken.
        version: u16,
    },
    /// The content is no message of this version.
    #[error("malformed message: {0}")]
    Malformed(String),
    /// The stream failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

fn config() -> impl bincode::config::Config {
    bincode::config::standard().with_little_endian().with_fixed_int_encoding().with_limit::<MAX_FRAME>()
}

/// A message that one end sends.
pub trait Message: Serialize {
    /// The first version that has this message.
    fn since(&self) -> u16 {
        OLDEST
    }
}

/// One whole frame of [`VERSION`], its length included.
///
/// # Errors
/// [`Error::TooLong`] when the message does not fit a frame.
pub fn encode(message: &impl Message) -> Result<Vec<u8>, Error> {
    encode_in(VERSION, message)
}

/// One whole frame of a version that is spoken.
///
/// # Errors
/// [`Error::TooLong`], or [`Error::TooNew`] when that version has no such message.
pub fn encode_in(version: u16, message: &impl Message) -> Result<Vec<u8>, Error> {
    if version < message.since() {
        return Err(Error::TooNew { version });
    }
    let body =
        bincode::serde::encode_to_vec(message, config()).map_err(|e| Error::Malformed(e.to_string()))?;
    let length = HEADER + body.len();
    if length > MAX_FRAME {
        return Err(Error::TooLong(length));
    }
    let mut frame = Vec::with_capacity(LENGTH + length);
    frame.extend_from_slice(&(length as u32).to_le_bytes());
    frame.extend_from_slice(&version.to_le_bytes());
    frame.extend_from_slice(&body);
    Ok(frame)
}

/// [`encode_in`] for an end that leaves out what the other end does not know: `None` when that version has no such message.
///
/// # Errors
/// [`Error::TooLong`] when the message does not fit a frame.
pub fn encode_if_known(version: u16, message: &impl Message) -> Result<Option<Vec<u8>>, Error> {
    match encode_in(version, message) {
        Err(Error::TooNew { .. }) => Ok(None),
        frame => frame.map(Some),
    }
}

/// The length of the frame at the start of `buffer`, without itself, if so much of it is there.
fn length(buffer: &[u8]) -> Option<usize> {
    buffer.first_chunk::<LENGTH>().map(|length| u32::from_le_bytes(*length) as usize)
}

/// The version of the frame at the start of `buffer`, if so much of it is there.
#[must_use]
pub fn version(buffer: &[u8]) -> Option<u16> {
    let (_, rest) = buffer.split_first_chunk::<LENGTH>()?;
    rest.first_chunk().map(|version| u16::from_le_bytes(*version))
}

/// The version to go on with, on another connection, after the answer at the start of `buffer` to frames of version `spoken`: the
/// other end is older, and speaks one that is spoken here.
#[must_use]
pub fn falls_back(spoken: u16, buffer: &[u8]) -> Option<u16> {
    version(buffer).filter(|theirs| (OLDEST..spoken).contains(theirs))
}

/// The frame at the start of `buffer`: how many bytes it takes, and its message. `None` while it is incomplete.
///
/// # Errors
/// The frame is too long or too short, of a version that is not spoken, or contains no message. The stream cannot be used any more.
pub fn decode<T: DeserializeOwned>(buffer: &[u8]) -> Result<Option<(usize, T)>, Error> {
    let Some(length) = length(buffer) else { return Ok(None) };
    if length > MAX_FRAME {
        return Err(Error::TooLong(length));
    }
    let Some(frame) = buffer.get(LENGTH..LENGTH + length) else { return Ok(None) };
    let Some((version, body)) = frame.split_first_chunk::<HEADER>() else {
        return Err(Error::TooShort(length));
    };
    let theirs = u16::from_le_bytes(*version);
    if !(OLDEST..=VERSION).contains(&theirs) {
        return Err(Error::Version { theirs });
    }
    let (message, used) =
        bincode::serde::decode_from_slice(body, config()).map_err(|e| Error::Malformed(e.to_string()))?;
    if used != body.len() {
        return Err(Error::Malformed(format!("{} bytes left over", body.len() - used)));
    }
    Ok(Some((LENGTH + length, message)))
}

/// [`encode_in`] and [`decode`] for [`tokio_util::codec::Framed`]: reads `In`, writes `Out`. All frames of a connection have the
/// version of the first one that was read; a message that this version does not have is left out.
#[cfg(feature = "tokio")]
#[derive(Debug)]
pub struct Frames<In, Out> {
    version: Option<u16>,
    longest: usize,
    messages: std::marker::PhantomData<fn(Out) -> In>,
}

#[cfg(feature = "tokio")]
impl<In, Out> Default for Frames<In, Out> {
    fn default() -> Self {
        Self { version: None, longest: MAX_FRAME, messages: std::marker::PhantomData }
    }
}

#[cfg(feature = "tokio")]
impl<In, Out> Frames<In, Out> {
    /// The version that is written.
    #[must_use]
    pub fn version(&self) -> u16 {
        self.version.unwrap_or(VERSION)
    }

    /// Refuses frames of more than `longest` bytes from now on: the part of an incomplete frame that has come takes memory.
    pub fn accept_at_most(&mut self, longest: usize) {
        self.longest = longest;
    }
}

#[cfg(feature = "tokio")]
impl<In: DeserializeOwned, Out> tokio_util::codec::Decoder for Frames<In, Out> {
    type Item = In;
    type Error = Error;

    fn decode(&mut self, buffer: &mut bytes::BytesMut) -> Result<Option<In>, Error> {
        if let Some(length) = length(buffer).filter(|&length| length > self.longest) {
            return Err(Error::TooLong(length));
        }
        let theirs = version(buffer);
        let Some((used, message)) = decode(buffer)? else { return Ok(None) };
        match (self.version, theirs) {
            (Some(first), Some(theirs)) if first != theirs => return Err(Error::Version { theirs }),
            _ => self.version = theirs,
        }
        bytes::Buf::advance(buffer, used);
        Ok(Some(message))
    }
}

#[cfg(feature = "tokio")]
impl<In, Out: Message> tokio_util::codec::Encoder<Out> for Frames<In, Out> {
    type Error = Error;

    fn encode(&mut self, message: Out, buffer: &mut bytes::BytesMut) -> Result<(), Error> {
        let frame = encode_if_known(self.version(), &message)?;
        buffer.extend_from_slice(&frame.unwrap_or_default());
        Ok(())
    }
}
