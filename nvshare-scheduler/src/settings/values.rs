//! The values of settings, as the command line, the configuration file and the file of what was set at run
//! time write them.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use nvshare_proto::{QuantumRule, units};
use serde::de::{self, Deserialize, Deserializer, Visitor};

/// Declares a value that a command line writes, and a file in the same way or as a plain number.
macro_rules! written {
    ($name:ident, $holds:ty, $parse:expr, $error:ty, $what:literal) => {
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub(super) struct $name(pub(super) $holds);

        impl FromStr for $name {
            type Err = $error;

            fn from_str(text: &str) -> Result<Self, $error> {
                $parse(text).map(Self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = deserializer.deserialize_any(Written($what))?;
                text.parse().map_err(|error: $error| de::Error::custom(error.to_string()))
            }
        }
    };
}

written!(Tq, QuantumRule, units::parse_rule, units::ParseError, "seconds, or auto");
written!(Grace, Duration, units::parse_grace, units::ParseError, "seconds");
written!(SleepAfter, Duration, units::parse_sleep_after, units::ParseError, "seconds");
written!(Size, u64, units::parse_bytes, units::ParseError, "a size");
written!(Memory, u64, units::parse_limit, String, "a size");
written!(Level, tracing::Level, level, String, "a level");

fn level(text: &str) -> Result<tracing::Level, String> {
    text.parse().map_err(|_| format!("{text:?} is not a level; accepted: error, warn, info, debug, trace"))
}

/// Takes a text or a number, as text.
struct Written(&'static str);

impl Visitor<'_> for Written {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<String, E> {
        Ok(text.to_owned())
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<String, E> {
        Ok(number.to_string())
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<String, E> {
        Ok(number.to_string())
    }
}

/// Reads a file's path that is not empty.
pub(super) fn path<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PathBuf>, D::Error> {
    let path = PathBuf::deserialize(deserializer)?;
    if path.as_os_str().is_empty() { Err(de::Error::custom("the path is empty")) } else { Ok(Some(path)) }
}

/// Reads a value that a file writes as a text, and never as a number.
pub(super) fn text<'de, D: Deserializer<'de>, T: FromStr<Err = String>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(de::Error::custom)
}
