//! The settings of the process, from its environment. They are read once, at the first `cuInit`.

#![allow(clippy::disallowed_methods, reason = "the one place that reads the environment")]

use std::env;
use std::fmt;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use nvshare_proto::env as names;
use nvshare_proto::paths;
use nvshare_proto::units::{self, MIB, MIN_MEMORY_LIMIT};
use nvshare_proto::{Enforcement, MemoryMode, Wishes};

use crate::process::log::{self, Level};
use crate::process::seat;

/// Which pieces of memory that the library maps are not copied when they leave the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    /// All are copied.
    Off,
    /// Pieces that are all zero.
    Zeros,
    /// Those, and pieces that the host has by hash.
    Hashes,
    /// The same, but these pieces are copied all the same, and compared: for tests.
    Check,
}

/// The settings of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Config {
    /// Limit in bytes on each device that has none of its own.
    limit: Option<u64>,
    /// Limits by the program's own device index.
    device_limits: Vec<(usize, u64)>,
    /// Compute limit in per cent on each device that has none of its own; 0: none.
    compute_limit: u8,
    /// Compute limits by the program's own device index.
    device_compute_limits: Vec<(usize, u8)>,
    /// The limits of the container's seat, which its programs can lower and not raise.
    seat: Option<SeatLimits>,
    /// The process's own wish for a share of the GPUs' time.
    asked: Wishes,
    pub(crate) memory: MemoryMode,
    pub(crate) content: Content,
    /// One program may allocate more than the GPU has.
    pub(crate) oversubscribe: bool,
    /// Evicted memory comes back in bulk.
    pub(crate) restore: bool,
    /// The process may go off the card.
    pub(crate) sleep: bool,
    /// Memory asked for as device memory looks like it, though it is managed.
    pub(crate) disguise: bool,
    /// Sizes of device memory that stays the driver's own; `None`: nothing is said of it.
    pub(crate) plain: Option<Vec<RangeInclusive<u64>>>,
    pub(crate) log: Level,
}

/// The limits of a seat, on each device, and its share.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SeatLimits {
    /// In bytes.
    limit: Option<u64>,
    /// In per cent.
    compute_limit: Option<u8>,
    asked: Wishes,
}

/// The reason why the environment cannot be followed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Error {
    variable: String,
    reason: String,
    /// The limits of the seat cannot be read, or are not there yet.
    is_of_seat: bool,
}

impl Error {
    /// Logs it.
    fn said(self) -> Self {
        log::error(format_args!("{self}"));
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.variable, self.reason)
    }
}

impl Config {
    /// The limit of a device in bytes, by the program's own index.
    pub(crate) fn limit(&self, index: usize) -> Option<u64> {
        let of_device = self.device_limits.iter().rev().find(|(of, _)| *of == index);
        let own = of_device.map(|&(_, limit)| limit).or(self.limit).filter(|&limit| limit != UNLIMITED);
        least(own, self.seat.as_ref().and_then(|seat| seat.limit))
    }

    /// Whether the container has a seat.
    pub(crate) fn is_in_seat(&self) -> bool {
        self.seat.is_some()
    }

    /// The compute limit of a device in per cent, by the program's own index.
    pub(crate) fn compute_limit(&self, index: usize) -> Option<u8> {
        let own = self.device_compute_limits.iter().rev().find(|(of, _)| *of == index);
        let own =
            own.map(|&(_, percent)| percent).or(Some(self.compute_limit)).filter(|&percent| percent > 0);
        least(own, self.seat.as_ref().and_then(|seat| seat.compute_limit))
    }

    /// The process's share of the GPUs' time, as far as it asks for one, or its seat sets one: the narrower of the two.
    pub(crate) fn asked(&self) -> Wishes {
        let mut asked = self.asked.clone();
        if let Some(SeatLimits { asked: seat, .. }) = &self.seat {
            let strictness = |enforcement| match enforcement {
                Enforcement::Disable => 0,
                Enforcement::Default => 1,
                Enforcement::Force => 2,
            };
            if strictness(seat.enforcement) > strictness(asked.enforcement) {
                asked.enforcement = seat.enforcement;
            }
            asked.weight = least(asked.weight, seat.weight);
            asked.priority = least(asked.priority, seat.priority);
        }
        asked
    }

    /// Keeps to these limits of a seat, and to no others.
    fn keep_to(&mut self, limits: seat::Limits) -> Result<(), Error> {
        let seat = Self::parse(limits.into_iter())?;
        let (limit, compute_limit) = (seat.limit(0), seat.compute_limit(0));
        self.seat = Some(SeatLimits { limit, compute_limit, asked: seat.asked });
        Ok(())
    }

    /// These settings with the limits that the process's seat has now, which may have changed since they were read. None: there is no
    /// seat, or its limits cannot be read.
    pub(crate) fn in_its_seat_now(&self) -> Option<Self> {
        let mut now = self.clone();
        now.keep_to(seat::limits(socket()).ok()??).ok()?;
        Some(now)
    }

    fn parse(variables: impl Iterator<Item = (String, String)>) -> Result<Self, Error> {
        let mut config = Self {
            limit: None,
            device_limits: Vec::new(),
            compute_limit: 0,
            device_compute_limits: Vec::new(),
            seat: None,
            asked: Wishes::default(),
            memory: MemoryMode::Managed,
            content: Content::Hashes,
            oversubscribe: false,
            restore: true,
            sleep: false,
            disguise: true,
            plain: None,
            log: Level::Warn,
        };
        let mut variables: Vec<_> = variables.filter(|(_, value)| !value.is_empty()).collect();
        // The general names sort before the particular ones, which overrule them.
        variables.sort();
        for (variable, value) in variables {
            config.apply(&variable, &value).map_err(|reason| Error {
                variable,
                reason,
                is_of_seat: false,
            })?;
        }
        Ok(config)
    }

    /// Takes the value of a variable over. One function, as it is the list of all variables: one arm for each.
    fn apply(&mut self, variable: &str, value: &str) -> Result<(), String> {
        match variable {
            names::MEM_LIMIT => self.limit = Some(parse_limit(value)?),
            names::HAMI_MEM_LIMIT => self.limit = Some(parse_hami_limit(value)?),
            names::MEM_LIMIT_MB => self.limit = Some(parse_limit_mb(value)?),
            names::COMPUTE_LIMIT => self.compute_limit = parse_compute_limit(value)?,
            names::HAMI_SM_LIMIT => self.compute_limit = parse_hami_compute_limit(value)?,
            names::HAMI_POLICY => {
                self.asked.enforcement =
                    units::parse_enforcement(value).map_err(|error| error.to_string())?;
            }
            names::WEIGHT => {
                self.asked.weight = Some(units::parse_weight(value).map_err(|error| error.to_string())?);
            }
            names::PRIORITY => {
                self.asked.priority = Some(units::parse_priority(value).map_err(|error| error.to_string())?);
            }
            names::GANG => {
                self.asked.gang = Some(units::parse_gang(value).map_err(|error| error.to_string())?);
            }
            names::MEMORY => {
                self.memory = match value {
                    "managed" => MemoryMode::Managed,
                    "swap" => MemoryMode::Swap,
                    "off" => MemoryMode::Off,
                    _ => return Err(format!("{value:?} is not a memory mode; accepted: managed, swap, off")),
                }
            }
            names::CONTENT => {
                self.content = match value {
                    "off" => Content::Off,
                    "zeros" => Content::Zeros,
                    "hashes" => Content::Hashes,
                    "check" => Content::Check,
                    _ => {
                        return Err(format!(
                            "{value:?} is no way to look at contents; accepted: off, zeros, hashes, check"
                        ));
                    }
                }
            }
            names::LOG => {
                self.log = match value {
                    "off" => Level::Off,
                    "error" => Level::Error,
                    "warn" => Level::Warn,
                    "info" => Level::Info,
                    "debug" => Level::Debug,
                    _ => {
                        return Err(format!(
                            "{value:?} is not a level; accepted: off, error, warn, info, debug"
                        ));
                    }
                }
            }
            names::HAMI_LOG_LEVEL => {
                self.log = match value.trim().parse::<u32>() {
                    Ok(0) => Level::Error,
                    Ok(1..=2) => Level::Warn,
                    Ok(3) => Level::Info,
                    Ok(4..) => Level::Debug,
                    Err(_) => return Err(format!("{value:?} is not a level; accepted: 0 to 4")),
                }
            }
            names::DEBUG => {
                if parse_switch(value)? {
                    self.log = Level::Debug;
                }
            }
            names::ENABLE_SINGLE_OVERSUB => self.oversubscribe = parse_switch(value)?,
            names::DISGUISE => self.disguise = parse_switch(value)?,
            names::PLAIN => self.plain = Some(parse_sizes(value)?),
            names::RESTORE => self.restore = parse_switch(value)?,
            names::SLEEP => self.sleep = parse_switch(value)?,
            _ => {
                // `NVSHARE_MEM_LIMIT_MB` itself is matched above.
                let forms = [
                    (names::MEM_LIMIT, parse_limit as fn(&str) -> _),
                    (names::HAMI_MEM_LIMIT, parse_hami_limit),
                ];
                for (name, parse) in forms {
                    if let Some(index) = index_of(variable, name) {
                        self.device_limits.push((index, parse(value)?));
                    }
                }
                let forms = [
                    (names::COMPUTE_LIMIT, parse_compute_limit as fn(&str) -> _),
                    (names::HAMI_SM_LIMIT, parse_hami_compute_limit),
                ];
                for (name, parse) in forms {
                    if let Some(index) = index_of(variable, name) {
                        self.device_compute_limits.push((index, parse(value)?));
                    }
                }
            }
        }
        Ok(())
    }
}

fn parse_limit(value: &str) -> Result<u64, String> {
    if value.trim() == "0" { Err(NOTHING_RUNS.to_owned()) } else { units::parse_limit(value) }
}

/// The device's index behind a variable's name.
fn index_of(variable: &str, name: &str) -> Option<usize> {
    variable.strip_prefix(name)?.strip_prefix('_')?.parse().ok()
}

fn parse_compute_limit(value: &str) -> Result<u8, String> {
    units::parse_percent(value).map_err(|error| error.to_string())
}

/// With HAMi, 0 means that there is no limit.
fn parse_hami_compute_limit(value: &str) -> Result<u8, String> {
    if value.trim() == "0" { Ok(0) } else { parse_compute_limit(value) }
}

/// With HAMi, 0 means that there is no limit.
fn parse_hami_limit(value: &str) -> Result<u64, String> {
    if value.trim() == "0" { Ok(UNLIMITED) } else { parse_limit(value) }
}

/// The narrower one of two limits that may be there.
fn least<T: Ord>(one: Option<T>, other: Option<T>) -> Option<T> {
    one.into_iter().chain(other).min()
}

/// More than any device has.
const UNLIMITED: u64 = u64::MAX;

fn parse_limit_mb(value: &str) -> Result<u64, String> {
    let mib: u64 = value.trim().parse().map_err(|_| format!("{value:?} is not a number of MiB"))?;
    match mib.checked_mul(MIB) {
        Some(0) => Err(NOTHING_RUNS.to_owned()),
        Some(bytes) if bytes < MIN_MEMORY_LIMIT => {
            Err(format!("{mib} MiB are too few; the least is {}", MIN_MEMORY_LIMIT / MIB))
        }
        Some(bytes) => Ok(bytes),
        None => Err(format!("{value:?} MiB are too many")),
    }
}

const NOTHING_RUNS: &str = "a limit of 0 lets nothing run; leave it out for no limit";

/// `all`, or sizes and ranges of sizes: `2MiB,64MiB-1GiB`.
fn parse_sizes(value: &str) -> Result<Vec<RangeInclusive<u64>>, String> {
    match value {
        "all" => return Ok(vec![0..=u64::MAX]),
        "none" => return Ok(Vec::new()),
        _ => {}
    }
    let size = |text: &str| units::parse_bytes(text.trim()).map_err(|error| error.to_string());
    value
        .split(',')
        .map(|item| match item.split_once('-') {
            Some((from, to)) => Ok(size(from)?..=size(to)?),
            None => size(item).map(|size| size..=size),
        })
        .collect()
}

fn parse_switch(value: &str) -> Result<bool, String> {
    match value {
        "1" | "true" | "on" | "yes" => Ok(true),
        "0" | "false" | "off" | "no" => Ok(false),
        _ => Err(format!("{value:?} is not a switch; accepted: 1, 0")),
    }
}

/// The settings. An error is logged once: limits fail closed. An error about the seat does not stay, as its limits may come later.
pub(crate) fn get() -> Result<&'static Config, &'static Error> {
    static CONFIG: OnceLock<Result<Config, Error>> = OnceLock::new();
    static OF_SEAT: OnceLock<Error> = OnceLock::new();
    if let Some(known) = CONFIG.get() {
        return known.as_ref();
    }
    match read() {
        Err(error) if error.is_of_seat => Err(OF_SEAT.get_or_init(|| error.said())),
        Err(error) => CONFIG.get_or_init(|| Err(error.said())).as_ref(),
        Ok(config) => CONFIG
            .get_or_init(|| {
                log::set_level(config.log);
                warn_of_names();
                Ok(config)
            })
            .as_ref(),
    }
}

/// Reads the environment, and the limits of the seat.
fn read() -> Result<Config, Error> {
    let variables = env::vars_os().filter_map(|(name, value)| {
        let name = name.into_string().ok().filter(|name| names::is_of_library(name))?;
        Some((name, value.to_string_lossy().into_owned()))
    });
    let mut config = Config::parse(variables)?;
    match seat::limits(socket()) {
        Ok(None) => {}
        Ok(Some(limits)) => config.keep_to(limits)?,
        Err((variable, reason)) => return Err(Error { variable, reason, is_of_seat: true }),
    }
    Ok(config)
}

/// Whether the process may go off the card: if the program asks for it. Look-ups ask before `cuInit`, and get what the environment says at the first time.
pub(crate) fn sleeps() -> bool {
    static SLEEPS: OnceLock<bool> = OnceLock::new();
    let value = |name: &str| env::var(name).unwrap_or_default();
    *SLEEPS
        .get_or_init(|| value(names::MEMORY) == "swap" && parse_switch(&value(names::SLEEP)).unwrap_or(false))
}

/// Warns of variables that have no effect, though a user may expect one.
fn warn_of_names() {
    let names = env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for complaint in names.filter_map(|name| names::complaint(&name)) {
        log::warn(format_args!("{complaint}"));
    }
    if let Some(named) = names::path(names::SOCKET).filter(|named| named != socket()) {
        let (variable, named, seats) = (names::SOCKET, named.display(), socket().display());
        log::warn(format_args!(
            "{variable}={named} has no effect: this container has a seat, whose socket is {seats}"
        ));
    }
}

/// The path of the scheduler's socket: that of the container's seat, or else the one that the environment names. Both are read once, as
/// the program may change its environment later.
pub(crate) fn socket() -> &'static Path {
    static PATHS: OnceLock<[PathBuf; 2]> = OnceLock::new();
    let paths = || {
        seat::socket().map_or_else(|| [false, true].map(paths::clients_socket), |seat| [seat.clone(), seat])
    };
    let [ours, systems] = PATHS.get_or_init(paths);
    if Path::new(paths::SYSTEM_SOCKET).exists() { systems } else { ours }
}

/// The `nvshare-ctl run` that started this process or an ancestor. It is read once: a program that changes its environment stays in its
/// tenant.
pub(crate) fn run() -> Option<u64> {
    static RUN: OnceLock<Option<u64>> = OnceLock::new();
    *RUN.get_or_init(|| env::var(names::RUN).ok()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvshare_proto::units::GIB;
    use nvshare_proto::{Enforcement, GangName, Priority};

    fn parse(variables: &[(&str, &str)]) -> Result<Config, String> {
        Config::parse(variables.iter().map(|&(n, v)| (n.to_owned(), v.to_owned()))).map_err(|e| e.to_string())
    }

    #[test]
    fn limits_in_general_and_by_device() {
        let config = parse(&[("NVSHARE_MEM_LIMIT_1", "2g"), ("NVSHARE_MEM_LIMIT", "8GiB")]).unwrap();
        assert_eq!(config.limit(0), Some(8 * GIB));
        assert_eq!(config.limit(1), Some(2 * GIB));
        assert_eq!(parse(&[("NVSHARE_MEM_LIMIT_MB", "512")]).unwrap().limit(0), Some(GIB / 2));
        assert_eq!(parse(&[]).unwrap().limit(0), None);
        let hami = [("CUDA_DEVICE_MEMORY_LIMIT", "1g"), ("CUDA_DEVICE_MEMORY_LIMIT_1", "2048m")];
        assert_eq!(parse(&hami).unwrap().limit(0), Some(GIB));
        assert_eq!(parse(&hami).unwrap().limit(1), Some(2 * GIB));
        let none = [("CUDA_DEVICE_MEMORY_LIMIT", "1g"), ("CUDA_DEVICE_MEMORY_LIMIT_1", "0")];
        assert_eq!(parse(&none).unwrap().limit(1), None);
        let both = [("CUDA_DEVICE_MEMORY_LIMIT_0", "1g"), ("NVSHARE_MEM_LIMIT_0", "2g")];
        assert_eq!(parse(&both).unwrap().limit(0), Some(2 * GIB));
    }

    #[test]
    fn shares_in_general_and_by_device() {
        let config = parse(&[
            ("NVSHARE_WEIGHT", "20"),
            ("NVSHARE_PRIORITY", "low"),
            ("NVSHARE_GANG", "ranks:2"),
            ("CUDA_DEVICE_SM_LIMIT", "50"),
            ("CUDA_DEVICE_SM_LIMIT_1", "0"),
            ("NVSHARE_COMPUTE_LIMIT_2", "25"),
            ("GPU_CORE_UTILIZATION_POLICY", "force"),
        ])
        .unwrap();
        assert_eq!([0, 1, 2].map(|index| config.compute_limit(index)), [Some(50), None, Some(25)]);
        let gang = Some(GangName { name: "ranks".to_owned(), size: 2 });
        assert_eq!(
            config.asked,
            Wishes {
                weight: Some(20),
                priority: Some(Priority::Low),
                enforcement: Enforcement::Force,
                compute: Vec::new(),
                gang
            }
        );
        let none = parse(&[]).unwrap();
        assert_eq!((none.compute_limit(0), none.asked), (None, Wishes::default()));
    }

    #[test]
    fn programs_lower_the_limits_of_their_seat_and_cannot_raise_them() {
        let seat = [
            ("NVSHARE_MEM_LIMIT", "4294967296"),
            ("NVSHARE_COMPUTE_LIMIT", "50"),
            ("GPU_CORE_UTILIZATION_POLICY", "default"),
            ("NVSHARE_WEIGHT", "100"),
        ];
        let in_seat = |variables: &[(&str, &str)]| {
            let mut config = parse(variables).unwrap();
            config.keep_to(seat.map(|(n, v)| (n.to_owned(), v.to_owned())).to_vec()).unwrap();
            let Wishes { weight, enforcement, .. } = config.asked();
            (config.limit(0), config.compute_limit(0), weight, enforcement)
        };
        let whole = (Some(4 * GIB), Some(50), Some(100), Enforcement::Default);
        assert_eq!(in_seat(&[]), whole);
        for variables in [
            [("NVSHARE_MEM_LIMIT", "8GiB"), ("NVSHARE_COMPUTE_LIMIT_0", "60")],
            [("CUDA_DEVICE_MEMORY_LIMIT_0", "0"), ("CUDA_DEVICE_SM_LIMIT", "0")],
            [("GPU_CORE_UTILIZATION_POLICY", "disable"), ("NVSHARE_WEIGHT", "10000")],
        ] {
            assert_eq!(in_seat(&variables), whole, "{variables:?}");
        }
        let lower = [
            ("NVSHARE_MEM_LIMIT", "1GiB"),
            ("NVSHARE_COMPUTE_LIMIT", "20"),
            ("NVSHARE_WEIGHT", "1"),
            ("GPU_CORE_UTILIZATION_POLICY", "force"),
        ];
        assert_eq!(in_seat(&lower), (Some(GIB), Some(20), Some(1), Enforcement::Force));
        // The seat's later settings stand in place of its earlier ones, and the program's wishes stay.
        let mut config = parse(&[("NVSHARE_WEIGHT", "80")]).unwrap();
        for (weight, limit, has) in
            [("50", "1GiB", (Some(50), Some(GIB))), ("90", "2GiB", (Some(80), Some(2 * GIB)))]
        {
            let seat = [("NVSHARE_WEIGHT", weight), ("NVSHARE_MEM_LIMIT", limit)];
            config.keep_to(seat.map(|(n, v)| (n.to_owned(), v.to_owned())).to_vec()).unwrap();
            assert_eq!((config.asked().weight, config.limit(0)), has);
        }
    }

    #[test]
    fn sizes_that_stay_plain() {
        let plain = |value| parse(&[("NVSHARE_PLAIN", value)]).map(|config| config.plain.unwrap());
        let sizes = plain("2MiB, 1GiB-2GiB").unwrap();
        for (bytes, expected) in
            [(2 << 20, true), ((2 << 20) + 1, false), (GIB, true), (2 * GIB, true), (3 * GIB, false)]
        {
            assert_eq!(sizes.iter().any(|size| size.contains(&bytes)), expected, "{bytes}");
        }
        assert_eq!(plain("all").unwrap(), [0..=u64::MAX]);
        assert_eq!(plain("none").unwrap(), []);
        assert_eq!(parse(&[]).unwrap().plain, None);
        assert!(plain("some").unwrap_err().starts_with("NVSHARE_PLAIN: "));
    }

    #[test]
    fn values_that_cannot_be_read_are_refused_by_name() {
        for (variable, value) in [
            ("NVSHARE_MEM_LIMIT", "8 potatoes"),
            ("NVSHARE_MEM_LIMIT", "0"),
            ("NVSHARE_MEM_LIMIT", "4"),
            ("NVSHARE_MEM_LIMIT_MB", "63"),
            ("NVSHARE_MEM_LIMIT_MB", "0"),
            ("CUDA_DEVICE_MEMORY_LIMIT", "4"),
            ("NVSHARE_MEM_LIMIT_0", "-1"),
            ("NVSHARE_MEM_LIMIT_MB", "8g"),
            ("NVSHARE_MEMORY", "swapped"),
            ("NVSHARE_CONTENT", "on"),
            ("NVSHARE_WEIGHT", "0"),
            ("NVSHARE_WEIGHT", "-1"),
            ("NVSHARE_WEIGHT", "1000000"),
            ("NVSHARE_COMPUTE_LIMIT", "0"),
            ("NVSHARE_COMPUTE_LIMIT_0", "101"),
            ("CUDA_DEVICE_SM_LIMIT", "101"),
            ("CUDA_DEVICE_SM_LIMIT_1", "half"),
            ("GPU_CORE_UTILIZATION_POLICY", "soft"),
            ("NVSHARE_PRIORITY", "9"),
            ("NVSHARE_GANG", "x:1000"),
            ("NVSHARE_LOG", "loud"),
            ("NVSHARE_RESTORE", "maybe"),
        ] {
            let error = parse(&[(variable, value)]).unwrap_err();
            assert!(error.starts_with(variable), "{error}");
        }
    }
}
