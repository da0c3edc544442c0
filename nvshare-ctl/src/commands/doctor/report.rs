//! The findings, as text.

use serde::Serialize;

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Level {
    /// No problem.
    Ok,
    /// Programs run, and a part does not work as well as it could.
    Warning,
    /// Programs do not run, or do not share.
    Error,
}

/// A finding.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Finding {
    pub(super) level: Level,
    /// The part that was checked.
    pub(super) subject: &'static str,
    /// The result.
    pub(super) text: String,
    /// How to correct the problem.
    pub(super) advice: Option<String>,
}

impl Finding {
    pub(super) fn ok(subject: &'static str, text: impl Into<String>) -> Self {
        Self { level: Level::Ok, subject, text: text.into(), advice: None }
    }

    pub(super) fn warning(subject: &'static str, text: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { level: Level::Warning, subject, text: text.into(), advice: Some(advice.into()) }
    }

    pub(super) fn error(subject: &'static str, text: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { level: Level::Error, subject, text: text.into(), advice: Some(advice.into()) }
    }
}

/// A line for each finding, and one for its advice.
pub(super) fn text(findings: &[Finding], unknown: &[String]) -> String {
    let mut text = String::new();
    for Finding { level, subject, text: seen, advice } in findings {
        let level = match level {
            Level::Ok => "ok",
            Level::Warning => "warning",
            Level::Error => "ERROR",
        };
        text += &format!("{level:<8} {subject:<12} {seen}\n");
        if let Some(advice) = advice {
            text += &format!("{:<8} {:<12} -> {advice}\n", "", "");
        }
    }
    unknown.iter().fold(text, |text, name| text + &format!("{:<8} {:<12} {name}\n", "unknown", "driver"))
}
