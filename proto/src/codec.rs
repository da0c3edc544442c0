//! Frames and their contents; the only place that knows how messages become bytes.
//!
//! A frame is a length (u32, little endian, without itself), the protocol version (u16, little endian) and one
//! message in bincode: little endian, integers of fixed width. A frame is at most [`MAX_FRAME`] bytes; a longer
//! one is refused before anything is read into memory. The version comes before the message, so that each end
//! can name the other's version even when it cannot read its messages.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::VERSION;

/// Longest frame in bytes, without its length.
pub const MAX_FRAME: usize = 64 * 1024;

const LENGTH: usize = size_of::<u32>();
const HEADER: usize = size_of::<u16>();

/// Why a frame cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The length is more than [`MAX_FRAME`].
    #[error("frame of {0} bytes; at most {MAX_FRAME} are accepted")]
    TooLong(usize),
    /// The frame is too short for a version.
    #[error("frame of {0} bytes is too short")]
    TooShort(usize),
    /// The other end speaks another version.
    #[error("protocol version {theirs}; this is version {VERSION}")]
    Version {
        /// The other end's version.
        theirs: u16,
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

/// One whole frame, its length included.
///
/// # Errors
/// [`Error::TooLong`] when the message does not fit a frame.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, Error> {
    let body =
        bincode::serde::encode_to_vec(message, config()).map_err(|e| Error::Malformed(e.to_string()))?;
    let length = HEADER + body.len();
    if length > MAX_FRAME {
        return Err(Error::TooLong(length));
    }
    let mut frame = Vec::with_capacity(LENGTH + length);
    frame.extend_from_slice(&(length as u32).to_le_bytes());
    frame.extend_from_slice(&VERSION.to_le_bytes());
    frame.extend_from_slice(&body);
    Ok(frame)
}

/// The frame at the start of `buffer`: how many bytes it takes, and its message. `None` while it is incomplete.
///
/// # Errors
/// The frame is too long or too short, of another version, or contains no message. The stream cannot be used any more.
pub fn decode<T: DeserializeOwned>(buffer: &[u8]) -> Result<Option<(usize, T)>, Error> {
    let Some((length, rest)) = buffer.split_first_chunk::<LENGTH>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if length > MAX_FRAME {
        return Err(Error::TooLong(length));
    }
    let Some(frame) = rest.get(..length) else { return Ok(None) };
    let Some((version, body)) = frame.split_first_chunk::<HEADER>() else {
        return Err(Error::TooShort(length));
    };
    let theirs = u16::from_le_bytes(*version);
    if theirs != VERSION {
        return Err(Error::Version { theirs });
    }
    let (message, used) =
        bincode::serde::decode_from_slice(body, config()).map_err(|e| Error::Malformed(e.to_string()))?;
    if used != body.len() {
        return Err(Error::Malformed(format!("{} bytes left over", body.len() - used)));
    }
    Ok(Some((LENGTH + length, message)))
}

/// [`encode`] and [`decode`] for [`tokio_util::codec::Framed`]: reads `In`, writes `Out`.
#[cfg(feature = "tokio")]
#[derive(Debug)]
pub struct Frames<In, Out>(std::marker::PhantomData<fn(Out) -> In>);

#[cfg(feature = "tokio")]
impl<In, Out> Default for Frames<In, Out> {
    fn default() -> Self {
        Self(std::marker::PhantomData)
    }
}

#[cfg(feature = "tokio")]
impl<In: DeserializeOwned, Out> tokio_util::codec::Decoder for Frames<In, Out> {
    type Item = In;
    type Error = Error;

    fn decode(&mut self, buffer: &mut bytes::BytesMut) -> Result<Option<In>, Error> {
        let Some((used, message)) = decode(buffer)? else { return Ok(None) };
        bytes::Buf::advance(buffer, used);
        Ok(Some(message))
    }
}

#[cfg(feature = "tokio")]
impl<In, Out: Serialize> tokio_util::codec::Encoder<Out> for Frames<In, Out> {
    type Error = Error;

    fn encode(&mut self, message: Out, buffer: &mut bytes::BytesMut) -> Result<(), Error> {
        buffer.extend_from_slice(&encode(&message)?);
        Ok(())
    }
}
