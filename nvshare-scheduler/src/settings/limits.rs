//! The values that administrators may set.

use std::fmt::Write as _;
use std::time::Duration;

use nvshare_proto::units::{Bytes, MAX_QUANTUM, MIN_MEMORY_LIMIT, MIN_QUANTUM};
use nvshare_proto::{DEFAULT_WEIGHT, MAX_WEIGHT, Priority, QuantumRule, TenantSettings};

/// Whether a quantum can be followed.
///
/// # Errors
/// The reason why it cannot.
pub(crate) fn quantum(rule: QuantumRule) -> Result<(), String> {
    let (what, millis) = match rule {
        QuantumRule::Fixed { millis } => ("a quantum", millis),
        QuantumRule::Auto { max_wait_ms, .. } => ("a wait", max_wait_ms),
    };
    let time = Duration::from_millis(millis);
    if !(MIN_QUANTUM..=MAX_QUANTUM).contains(&time) {
        return Err(format!("{what} of {} s is out of range", time.as_secs_f64()));
    }
    match rule {
        QuantumRule::Auto { overhead_ppm, .. } if !(1000..=900_000).contains(&overhead_ppm) => {
            Err(format!("an overhead of {} % is out of range: 0.1 % to 90 %", f64::from(overhead_ppm) / 1e4))
        }
        _ => Ok(()),
    }
}

/// Whether settings only take back what was said: they are what everybody has without a word.
pub(crate) fn takes_back(given: &TenantSettings) -> bool {
    let TenantSettings { weight, priority, compute, enforcement: _, memory, paused: _ } = *given;
    weight.is_none_or(|weight| weight == DEFAULT_WEIGHT)
        && priority.is_none_or(|priority| priority == Priority::default())
        && compute.is_none_or(|percent| percent == 0)
        && memory.is_none_or(|bytes| bytes == 0)
}

/// Returns the settings as lines of a file.
pub(crate) fn lines(given: TenantSettings) -> String {
    let TenantSettings { weight, priority, compute, enforcement, memory, paused: _ } = given;
    let mut text = String::new();
    // Writing to a text cannot fail.
    let _ = weight.map(|weight| writeln!(text, "weight = {weight}"));
    let _ = priority.map(|priority| writeln!(text, "priority = \"{}\"", priority.name()));
    let _ = compute.map(|percent| writeln!(text, "compute = {percent}"));
    let _ = enforcement.map(|how| writeln!(text, "enforcement = \"{}\"", how.name()));
    // The format has no larger numbers, nor has any machine so much.
    let _ = memory.map(|bytes| writeln!(text, "memory = {}", bytes.min(i64::MAX.cast_unsigned())));
    text
}

/// Checks that the settings can be followed; they can where nothing is set.
///
/// # Errors
/// The first setting that cannot be followed.
pub(crate) fn check(given: TenantSettings) -> Result<(), String> {
    if let Some(weight) = given.weight.filter(|weight| !(1..=MAX_WEIGHT).contains(weight)) {
        return Err(format!("a weight of {weight} is out of range: 1 to {MAX_WEIGHT}"));
    }
    if let Some(percent) = given.compute.filter(|&percent| percent > 100) {
        return Err(format!("a compute limit of {percent} % is out of range: 1 to 100"));
    }
    match given.memory {
        Some(bytes @ 1..MIN_MEMORY_LIMIT) => Err(format!(
            "a memory limit of {bytes} bytes is too small: the least is {}",
            Bytes(MIN_MEMORY_LIMIT)
        )),
        _ => Ok(()),
    }
}

/// Returns the settings in words.
pub(crate) fn describe(given: TenantSettings) -> String {
    let limit = |kind, size: Option<String>| match size {
        Some(size) => format!("{kind} limit {size}"),
        None => format!("no {kind} limit"),
    };
    let settings = [
        given.weight.map(|weight| format!("weight {weight}")),
        given.priority.map(|priority| format!("priority {}", priority.name())),
        given.compute.map(|percent| limit("compute", (percent > 0).then(|| format!("{percent} %")))),
        given.enforcement.map(|how| format!("policy {}", how.name())),
        given.memory.map(|bytes| limit("memory", (bytes > 0).then(|| Bytes(bytes).to_string()))),
        given.paused.map(|paused| if paused { "paused" } else { "resumed" }.to_owned()),
    ];
    let said: Vec<String> = settings.into_iter().flatten().collect();
    if said.is_empty() { "no limits".to_owned() } else { said.join(", ") }
}

/// Returns the settings that a command gives, in words.
///
/// # Errors
/// There is none, or one that cannot be followed.
pub(crate) fn given(given: TenantSettings) -> Result<String, String> {
    if given == TenantSettings::default() {
        return Err("say what to limit: --memory 8g, --compute 25 or --policy force".to_owned());
    }
    check(given).map(|()| describe(given))
}

#[cfg(test)]
mod tests {
    use nvshare_proto::{Enforcement, Priority};

    use super::*;

    #[test]
    fn settings_out_of_range_are_refused() {
        let none = TenantSettings::default();
        for (wrong, why) in [
            (TenantSettings { weight: Some(0), ..none }, "weight of 0"),
            (TenantSettings { weight: Some(u32::MAX), ..none }, "out of range"),
            (TenantSettings { compute: Some(101), ..none }, "compute limit of 101 %"),
            (TenantSettings { memory: Some(1), ..none }, "the least is 64.0 MiB"),
            (none, "say what to limit"),
        ] {
            let error = given(wrong).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        let all = TenantSettings {
            weight: Some(20),
            priority: Some(Priority::High),
            compute: Some(0),
            enforcement: Some(Enforcement::Force),
            memory: Some(8 << 30),
            paused: Some(false),
        };
        let said = "weight 20, priority high, no compute limit, policy force, memory limit 8.00 GiB, resumed";
        assert_eq!(given(all), Ok(said.to_owned()));
        let none_at_all = (check(none), describe(none));
        assert_eq!(none_at_all, (Ok(()), "no limits".to_owned()), "a seat may have none");
        let lifted = TenantSettings { compute: Some(0), memory: Some(0), ..none };
        assert_eq!(given(lifted), Ok("no compute limit, no memory limit".to_owned()));
    }

    #[test]
    fn quanta_out_of_range_are_refused() {
        let auto = |overhead_ppm, max_wait_ms| QuantumRule::Auto { overhead_ppm, max_wait_ms };
        for (rule, fine) in [
            (QuantumRule::Fixed { millis: 9 }, false),
            (QuantumRule::Fixed { millis: 10 }, true),
            (QuantumRule::Fixed { millis: u64::MAX }, false),
            (auto(50_000, 30_000), true),
            (auto(50_000, 0), false),
            (auto(0, 30_000), false),
            (auto(999_999, 30_000), false),
        ] {
            assert_eq!(quantum(rule).is_ok(), fine, "{rule:?}");
        }
    }
}
