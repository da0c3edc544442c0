//! The configuration file.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::metrics::Address;
use nvshare_core::Together;
use nvshare_proto::units;
use nvshare_proto::{GpuUuid, QuantumRule};
use serde::de::{self, Deserialize, Deserializer, Visitor};

/// The contents of a configuration file. A name that is not here is an error.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct File {
    #[serde(default, deserialize_with = "path")]
    pub(super) socket: Option<PathBuf>,
    #[serde(default, deserialize_with = "path")]
    pub(super) admin_socket: Option<PathBuf>,
    #[serde(default, deserialize_with = "path")]
    pub(super) seats: Option<PathBuf>,
    pub(super) tq: Option<Tq>,
    pub(super) gpu_memory: Option<Memory>,
    pub(super) reserve: Option<Size>,
    pub(super) host_memory: Option<Memory>,
    pub(super) host_memory_each: Option<Memory>,
    pub(super) exclusive: Option<bool>,
    pub(super) together: Option<How>,
    pub(super) grace: Option<Grace>,
    pub(super) log: Option<Level>,
    pub(super) metrics: Option<Metrics>,
    #[serde(default)]
    pub(super) gpu: BTreeMap<GpuUuid, Gpu>,
}

/// The part about one GPU.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Gpu {
    pub(super) tq: Option<Tq>,
    pub(super) gpu_memory: Option<Memory>,
    pub(super) reserve: Option<Size>,
}

/// A path that is not empty.
fn path<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PathBuf>, D::Error> {
    let path = PathBuf::deserialize(deserializer)?;
    if path.as_os_str().is_empty() { Err(de::Error::custom("the path is empty")) } else { Ok(Some(path)) }
}

/// Parses a file's text; an error names the line.
pub(crate) fn parse<T: de::DeserializeOwned>(text: &str) -> Result<T, String> {
    toml::from_str(text).map_err(|error| {
        let line = error
            .span()
            .and_then(|span| text.get(..span.start))
            .map(|before| before.matches('\n').count() + 1);
        let message = error.message().trim().replace('\n', " ");
        line.map_or_else(|| message.clone(), |line| format!("line {line}: {message}"))
    })
}

/// Declares a value that is written as on the command line, or as a plain number.
macro_rules! written {
    ($name:ident, $holds:ty, $parse:expr, $what:literal) => {
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub(super) struct $name(pub(super) $holds);

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(Written($what)).and_then(|text| {
                    $parse(&text).map(Self).map_err(|error| de::Error::custom(error.to_string()))
                })
            }
        }
    };
}

written!(Tq, QuantumRule, units::parse_rule, "seconds, or auto");
written!(Grace, Duration, units::parse_grace, "seconds");
written!(Size, u64, units::parse_bytes, "a size");
written!(Memory, u64, units::parse_limit, "a size");
written!(How, Together, together, "measure or always");
written!(Level, tracing::Level, level, "a level");

pub(super) fn together(text: &str) -> Result<Together, String> {
    match text {
        "measure" => Ok(Together::Measure),
        "always" => Ok(Together::Always),
        _ => Err(format!("{text:?} is no way to run together; accepted: measure, always")),
    }
}

pub(super) fn level(text: &str) -> Result<tracing::Level, String> {
    text.parse().map_err(|_| format!("{text:?} is not a level; accepted: error, warn, info, debug, trace"))
}

/// The address at which metrics are read.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Metrics(pub(super) Address);

impl<'de> Deserialize<'de> for Metrics {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Self).map_err(de::Error::custom)
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use nvshare_proto::units::{GIB, MIB};

    #[test]
    fn everything_that_a_file_may_say() {
        let file: File = parse(
            "tq = 0.5\ngpu-memory = \"40GiB\"\nreserve = 0\nexclusive = true\ngrace = \"20\"\nlog = \"warn\"\n\
             socket = \"/a\"\nadmin-socket = \"/b\"\n\
             [gpu.GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0]\ntq = 5\nreserve = \"512m\"\n",
        )
        .unwrap();
        assert_eq!(file.tq, Some(Tq(QuantumRule::Fixed { millis: 500 })));
        assert_eq!(file.gpu_memory, Some(Memory(40 * GIB)));
        assert_eq!((file.reserve, file.exclusive), (Some(Size(0)), Some(true)));
        assert_eq!(file.grace, Some(Grace(Duration::from_secs(20))));
        assert_eq!(file.log, Some(Level(tracing::Level::WARN)));
        assert_eq!((file.socket, file.admin_socket), (Some("/a".into()), Some("/b".into())));
        let (_, gpu) = file.gpu.first_key_value().unwrap();
        assert_eq!(
            (gpu.tq, gpu.reserve),
            (Some(Tq(QuantumRule::Fixed { millis: 5000 })), Some(Size(512 * MIB)))
        );
    }

    #[test]
    fn an_error_says_which_line_and_why() {
        for (text, line, why) in [
            ("tq = 1\ntqq = 4\n", 2, "unknown field `tqq`"),
            ("\n\ntq = 0\n", 3, "is not a quantum; accepted: seconds"),
            ("gpu-memory = 4\n", 1, "the least is 64.0 MiB"),
            ("reserve = -1\n", 1, "is not a size"),
            ("exclusive = 1\n", 1, "invalid type"),
            ("together = \"never\"\n", 1, "accepted: measure, always"),
            ("tq = [1]\n", 1, "expected seconds"),
            ("log = \"loud\"\n", 1, "is not a level"),
            ("socket = \"\"\n", 1, "the path is empty"),
            ("tq = \n", 1, ""),
            ("tq = 1\ntq = 2\n", 2, "duplicate key"),
            ("[gpu.0]\ntq = 1\n", 1, "is not a GPU UUID"),
            ("[gpu.GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0]\nlog = 1\n", 2, "unknown field `log`"),
        ] {
            let error = parse::<File>(text).unwrap_err();
            assert!(error.starts_with(&format!("line {line}: ")) && error.contains(why), "{text}: {error}");
        }
    }
}
