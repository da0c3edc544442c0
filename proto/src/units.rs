//! Sizes and times as people write them.
//!
//! Sizes are powers of two throughout: `8GiB`, `8Gi`, `8g` and `8GB` are all 8 × 2³⁰ bytes, as HAMi-core's users
//! expect of `8g` and Kubernetes' users of `8Gi`. A text that does not parse is an error, never a guess: a mistyped
//! limit must not become "unlimited".

use std::fmt;
use std::time::Duration;

use crate::{Enforcement, GangName, MAX_GANG_MEMBERS, MAX_GANG_NAME, MAX_WEIGHT, Priority, QuantumRule};

/// 2²⁰ bytes.
pub const MIB: u64 = 1 << 20;
/// 2³⁰ bytes.
pub const GIB: u64 = 1 << 30;

/// Forms that [`parse_bytes`] accepts, for error messages.
pub const ACCEPTED_SIZES: &str = "8GiB, 8Gi, 8g, 8192m, 8388608k or a number of bytes";
/// Forms that [`parse_quantum`] and [`parse_grace`] accept, for error messages.
pub const ACCEPTED_QUANTA: &str = "seconds from 0.01 to 86400, fractions allowed";
/// Forms that [`parse_rule`] accepts, for error messages.
const ACCEPTED_RULES: &str = "seconds from 0.01 to 86400, fractions allowed, or auto";

/// Smallest memory limit, and smallest memory for clients to fill: with less, no program gets anything done. A
/// smaller number is most likely a size without its unit.
pub const MIN_MEMORY_LIMIT: u64 = 64 * MIB;

/// Shortest quantum that a scheduler accepts: with shorter ones, turns cost more than they give.
pub const MIN_QUANTUM: Duration = Duration::from_millis(10);
/// Longest quantum that a scheduler accepts.
pub const MAX_QUANTUM: Duration = Duration::from_secs(86_400);

/// Shortest time after which a client goes off the card by itself: to go and come back takes a second.
pub const MIN_SLEEP_AFTER: Duration = Duration::from_secs(1);

/// The text is not a value of the expected kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not {} {what}; accepted: {accepted}", if what.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" })]
pub struct ParseError {
    text: String,
    what: &'static str,
    accepted: &'static str,
}

/// Reads a size in bytes.
///
/// # Errors
/// When the text is empty, negative, not a number, of an unknown unit, or more than 2⁶⁴ − 1 bytes.
pub fn parse_bytes(text: &str) -> Result<u64, ParseError> {
    let error = || ParseError { text: text.to_owned(), what: "size", accepted: ACCEPTED_SIZES };
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits);
    let shift = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "ki" | "kb" | "kib" => 10,
        "m" | "mi" | "mb" | "mib" => 20,
        "g" | "gi" | "gb" | "gib" => 30,
        "t" | "ti" | "tb" | "tib" => 40,
        _ => return Err(error()),
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(1 << shift).ok_or_else(error);
    }
    let fraction: f64 = number.parse().map_err(|_| error())?;
    let bytes = fraction * (1u64 << shift) as f64;
    if shift == 0 || !bytes.is_finite() || bytes >= u64::MAX as f64 {
        return Err(error());
    }
    Ok(bytes as u64)
}

/// Reads a memory limit in bytes.
///
/// # Errors
/// As [`parse_bytes`], and when it is less than [`MIN_MEMORY_LIMIT`].
pub fn parse_limit(text: &str) -> Result<u64, String> {
    match parse_bytes(text).map_err(|error| error.to_string())? {
        bytes if bytes >= MIN_MEMORY_LIMIT => Ok(bytes),
        bytes => Err(format!(
            "{text:?} is {}, and the least is {}; a number without a unit is in bytes, 4g is 4 GiB",
            Bytes(bytes),
            Bytes(MIN_MEMORY_LIMIT)
        )),
    }
}

/// Reads a quantum in seconds, with fractions.
///
/// # Errors
/// When the text is not a number, or not within [`MIN_QUANTUM`] and [`MAX_QUANTUM`].
pub fn parse_quantum(text: &str) -> Result<Duration, ParseError> {
    parse_seconds(text, "quantum")
}

/// The default for the cost of hand-overs, in millionths of the time.
pub const DEFAULT_OVERHEAD_PPM: u32 = 50_000;
/// The default for the longest wait for a turn.
pub const DEFAULT_MAX_WAIT: Duration = Duration::from_secs(30);

/// Reads a rule for quanta: seconds, `auto`, or `auto OVERHEAD MAX-WAIT` as in `auto 5% 30`.
///
/// # Errors
/// As [`parse_quantum`], [`parse_overhead`] and [`parse_max_wait`].
pub fn parse_rule(text: &str) -> Result<QuantumRule, ParseError> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let auto = |overhead_ppm, wait: Duration| QuantumRule::Auto {
        overhead_ppm,
        max_wait_ms: wait.as_millis() as u64,
    };
    match words.as_slice() {
        ["auto"] => Ok(auto(DEFAULT_OVERHEAD_PPM, DEFAULT_MAX_WAIT)),
        ["auto", overhead, wait] => Ok(auto(parse_overhead(overhead)?, parse_max_wait(wait)?)),
        _ => parse_quantum(text)
            .map(|quantum| QuantumRule::Fixed { millis: quantum.as_millis() as u64 })
            .map_err(|error| ParseError { accepted: ACCEPTED_RULES, ..error }),
    }
}

/// Reads the longest wait for a turn, in seconds with fractions.
///
/// # Errors
/// As [`parse_quantum`].
pub fn parse_max_wait(text: &str) -> Result<Duration, ParseError> {
    parse_seconds(text, "longest wait")
}

/// Reads the time, in seconds with fractions, after which a client that does not answer is reported.
///
/// # Errors
/// As [`parse_quantum`].
pub fn parse_grace(text: &str) -> Result<Duration, ParseError> {
    parse_seconds(text, "grace time")
}

/// Reads the time, in seconds with fractions, after which a client without work goes off the card by itself.
///
/// # Errors
/// When the text is not a number from 1 to [`MAX_QUANTUM`].
pub fn parse_sleep_after(text: &str) -> Result<Duration, ParseError> {
    let what = "time to sleep after";
    let long_enough = |time: &Duration| *time >= MIN_SLEEP_AFTER;
    let accepted = "seconds from 1 to 86400, fractions allowed";
    let error = || ParseError { text: text.to_owned(), what, accepted };
    parse_seconds(text, what).ok().filter(long_enough).ok_or_else(error)
}

/// Reads a weight.
///
/// # Errors
/// When the text is not a whole number from 1 to [`MAX_WEIGHT`].
pub fn parse_weight(text: &str) -> Result<u32, ParseError> {
    let error = || ParseError { text: text.to_owned(), what: "weight", accepted: "1 to 10000; usual is 100" };
    text.trim().parse().ok().filter(|weight| (1..=MAX_WEIGHT).contains(weight)).ok_or_else(error)
}

/// Reads a compute limit in per cent.
///
/// # Errors
/// When the text is not a whole number from 1 to 100, with or without a `%` behind it.
pub fn parse_percent(text: &str) -> Result<u8, ParseError> {
    let error = || ParseError { text: text.to_owned(), what: "compute limit", accepted: "1 to 100 per cent" };
    let number = text.trim().trim_end_matches('%').trim_end();
    number.parse().ok().filter(|percent| (1..=100).contains(percent)).ok_or_else(error)
}

/// Reads the largest cost of hand-overs as a part of the time; returns millionths.
///
/// # Errors
/// When the text is not a number from 0.1 to 90, with or without a `%` behind it.
pub fn parse_overhead(text: &str) -> Result<u32, ParseError> {
    let error = || ParseError { text: text.to_owned(), what: "overhead", accepted: "0.1% to 90%" };
    let number: f64 = text.trim().trim_end_matches('%').trim_end().parse().map_err(|_| error())?;
    if (0.1..=90.0).contains(&number) { Ok((number * 10_000.0).round() as u32) } else { Err(error()) }
}

/// Reads a priority.
///
/// # Errors
/// When the text is none of `low`, `normal` and `high`.
pub fn parse_priority(text: &str) -> Result<Priority, ParseError> {
    let found = Priority::ALL.into_iter().find(|priority| priority.name() == text.trim());
    found.ok_or_else(|| ParseError { text: text.to_owned(), what: "priority", accepted: "low, normal, high" })
}

/// Reads how compute limits are enforced.
///
/// # Errors
/// When the text is none of `default`, `force` and `disable`, in whatever case.
pub fn parse_enforcement(text: &str) -> Result<Enforcement, ParseError> {
    let found = Enforcement::ALL.into_iter().find(|how| how.name().eq_ignore_ascii_case(text.trim()));
    found.ok_or_else(|| ParseError {
        text: text.to_owned(),
        what: "policy",
        accepted: "default, force, disable",
    })
}

/// Reads a gang: a name, and behind a colon how many processes it has.
///
/// # Errors
/// When the name is empty or longer than [`MAX_GANG_NAME`] bytes, or the number not from 2 to [`MAX_GANG_MEMBERS`].
pub fn parse_gang(text: &str) -> Result<GangName, ParseError> {
    let error = || ParseError {
        text: text.to_owned(),
        what: "gang",
        accepted: "a name, or name:N with N from 2 to 64",
    };
    let (name, size) = match text.trim().rsplit_once(':') {
        Some((name, size)) => (name, size.parse().map_err(|_| error())?),
        None => (text.trim(), 0),
    };
    let counted = size == 0 && !text.contains(':') || (2..=MAX_GANG_MEMBERS).contains(&size);
    if name.is_empty() || name.len() > MAX_GANG_NAME || !counted {
        return Err(error());
    }
    Ok(GangName { name: name.to_owned(), size })
}

fn parse_seconds(text: &str, what: &'static str) -> Result<Duration, ParseError> {
    let error = || ParseError { text: text.to_owned(), what, accepted: ACCEPTED_QUANTA };
    let trimmed = text.trim();
    let number = trimmed.strip_suffix('s').map_or(trimmed, str::trim_end);
    let seconds: f64 = number.parse().map_err(|_| error())?;
    let quantum = Duration::try_from_secs_f64(seconds).map_err(|_| error())?;
    if (MIN_QUANTUM..=MAX_QUANTUM).contains(&quantum) { Ok(quantum) } else { Err(error()) }
}

/// A size for people: `12.00 GiB`, `512.0 MiB`, `17 B`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(bytes) = *self;
        let text = match bytes {
            0 => "0".to_owned(),
            b if b >= GIB => format!("{:.2} GiB", b as f64 / GIB as f64),
            b if b >= MIB => format!("{:.1} MiB", b as f64 / MIB as f64),
            b if b >= 1024 => format!("{:.1} KiB", b as f64 / 1024.0),
            b => format!("{b} B"),
        };
        f.pad(&text)
    }
}

/// Returns a number, or the largest `u64` where it is larger.
pub fn saturate(number: impl TryInto<u64>) -> u64 {
    number.try_into().unwrap_or(u64::MAX)
}

/// Returns a number, or the largest `u32` where it is larger.
pub fn saturate_u32(number: impl TryInto<u32>) -> u32 {
    number.try_into().unwrap_or(u32::MAX)
}

/// GiB per second over a span, or 0 where no time passed.
#[must_use]
pub fn gib_per_second(bytes: u64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { bytes as f64 / GIB as f64 / time.as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_in_every_accepted_form() {
        for text in [
            "8GiB",
            "8Gi",
            "8g",
            "8G",
            "8gb",
            "8192m",
            "8192MiB",
            "8388608k",
            "8589934592",
            " 8 GiB ",
            "0.0078125t",
        ] {
            assert_eq!(parse_bytes(text), Ok(8 * GIB), "{text}");
        }
        assert_eq!(parse_bytes("1.5g"), Ok(3 * GIB / 2));
        assert_eq!(parse_bytes("0"), Ok(0));
    }

    #[test]
    fn texts_that_are_no_sizes() {
        for text in [
            "",
            "g",
            "-1g",
            "8x",
            "8 g b",
            "1.5",
            "1e9",
            "NaN",
            "inf",
            "0x10",
            "8Gib8",
            "99999999999999999999",
            "99999999t",
            "1.2.3g",
        ] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn limits_too_small_to_be_meant() {
        assert_eq!(parse_limit("64m"), Ok(MIN_MEMORY_LIMIT));
        for text in ["4", "0", "63m", "67108863"] {
            let error = parse_limit(text).unwrap_err();
            assert!(error.contains("the least is 64.0 MiB"), "{error}");
        }
    }

    #[test]
    fn quanta() {
        assert_eq!(parse_quantum("30"), Ok(Duration::from_secs(30)));
        assert_eq!(parse_quantum("0.25"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_quantum("30s"), Ok(Duration::from_secs(30)));
        assert_eq!(parse_quantum("0.5 s"), Ok(Duration::from_millis(500)));
        for text in ["", "0", "s", "30ss", "30m", "-1", "NaN", "inf", "thirty", "1e99", "0.001", "86401"] {
            assert!(parse_quantum(text).is_err(), "{text}");
        }
    }

    #[test]
    fn rules_for_quanta() {
        let auto = |overhead_ppm, max_wait_ms| Ok(QuantumRule::Auto { overhead_ppm, max_wait_ms });
        for (text, expected) in [
            ("30", Ok(QuantumRule::Fixed { millis: 30_000 })),
            ("auto", auto(50_000, 30_000)),
            ("auto 2.5% 0.4", auto(25_000, 400)),
        ] {
            assert_eq!(parse_rule(text), expected);
            assert_eq!(parse_rule(&expected.unwrap().to_string()), parse_rule(text), "as it is written");
        }
        for text in ["", "Auto", "auto 5%", "auto 5% 0", "auto 0% 9", "auto 5% 9 9"] {
            assert!(parse_rule(text).is_err(), "{text}");
        }
        for (error, said) in [
            (
                parse_rule("abc").unwrap_err(),
                "a quantum; accepted: seconds from 0.01 to 86400, fractions allowed, or auto",
            ),
            (
                parse_max_wait("abc").unwrap_err(),
                "a longest wait; accepted: seconds from 0.01 to 86400, fractions allowed",
            ),
            (parse_overhead("abc").unwrap_err(), "an overhead; accepted: 0.1% to 90%"),
        ] {
            assert_eq!(error.to_string(), format!("\"abc\" is not {said}"));
        }
    }

    #[test]
    fn shares() {
        assert_eq!(parse_weight(" 20 "), Ok(20));
        for text in ["", "0", "-1", "1.5", "10001", "many", "99999999999999"] {
            assert!(parse_weight(text).is_err(), "{text}");
        }
        assert_eq!((parse_percent("25"), parse_percent("100 %")), (Ok(25), Ok(100)));
        for text in ["", "0", "-1", "101", "2.5", "%", "all"] {
            assert!(parse_percent(text).is_err(), "{text}");
        }
        assert_eq!((parse_overhead("5%"), parse_overhead("0.5")), (Ok(50_000), Ok(5000)));
        for text in ["", "0", "-1", "91", "NaN", "inf", "five"] {
            assert!(parse_overhead(text).is_err(), "{text}");
        }
        assert_eq!(parse_priority("low"), Ok(Priority::Low));
        assert!(parse_priority("1").is_err());
        assert_eq!(parse_enforcement("FORCE"), Ok(Enforcement::Force));
        assert!(parse_enforcement("soft").unwrap_err().to_string().contains("default, force, disable"));
        let gang = |name: &str, size| Ok(GangName { name: name.to_owned(), size });
        assert_eq!((parse_gang("train"), parse_gang("a:b:4")), (gang("train", 0), gang("a:b", 4)));
        for text in ["", ":4", "a:", "a:0", "a:1", "a:65", "a:-1", &"x".repeat(129)] {
            assert!(parse_gang(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_for_people() {
        for (bytes, text) in
            [(0, "0"), (17, "17 B"), (1536, "1.5 KiB"), (512 * MIB, "512.0 MiB"), (12 * GIB, "12.00 GiB")]
        {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }
}
