use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A GPU's UUID, written the way NVIDIA's tools write it: `GPU-` and five groups of hexadecimal digits.
///
/// Outside a program's own environment, GPUs are named by their UUIDs: the index of a GPU depends on `CUDA_VISIBLE_DEVICES`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct GpuUuid(pub [u8; 16]);

/// The text is not a GPU UUID.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a GPU UUID; expected GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx")]
pub struct ParseGpuUuidError {
    text: String,
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        for (i, byte) in self.0.iter().enumerate() {
            if matches!(i, 0 | 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for GpuUuid {
    type Err = ParseGpuUuidError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseGpuUuidError { text: text.to_owned() };
        let digits = text.strip_prefix("GPU-").ok_or_else(error)?;
        let groups: Vec<&str> = digits.split('-').collect();
        if groups.iter().map(|g| g.len()).ne([8, 4, 4, 4, 12]) {
            return Err(error());
        }
        let mut bytes = [0; 16];
        let mut hex = groups.iter().flat_map(|g| g.chars()).map(|c| c.to_digit(16));
        for byte in &mut bytes {
            let (Some(Some(high)), Some(Some(low))) = (hex.next(), hex.next()) else { return Err(error()) };
            *byte = (high * 16 + low) as u8;
        }
        Ok(Self(bytes))
    }
}

/// Sixteen bytes on the wire, text for people.
impl Serialize for GpuUuid {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(self)
        } else {
            self.0.serialize(serializer)
        }
    }
}

impl<'de> Deserialize<'de> for GpuUuid {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
        } else {
            <[u8; 16]>::deserialize(deserializer).map(Self)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_bytes_agree() {
        let text = "GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0";
        let uuid: GpuUuid = text.parse().unwrap();
        assert_eq!(uuid.0[0], 0x0f);
        assert_eq!(uuid.0[15], 0xf0);
        assert_eq!(uuid.to_string(), text);
    }

    #[test]
    fn a_text_that_is_no_uuid_is_refused() {
        for text in [
            "",
            "0",
            "GPU-",
            "GPU-0f1e2d3c",
            "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0",
            "GPU-zf1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0",
        ] {
            assert!(text.parse::<GpuUuid>().is_err(), "{text}");
        }
    }
}
