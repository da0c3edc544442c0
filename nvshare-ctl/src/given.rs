//! Limits as people write them, or `none`, and the clients that they are for.

use nvshare_proto::units::{parse_limit, parse_percent};

/// A compute limit in per cent; 0: none.
pub(crate) fn compute(text: &str) -> Result<u8, String> {
    if text == "none" { Ok(0) } else { parse_percent(text).map_err(|error| format!("{error}, or none")) }
}

/// A client's number.
pub(crate) fn client(text: &str) -> Result<u64, String> {
    let wrong =
        |_| format!("{text:?} is no client's number; accepted: a number, as `nvshare-ctl clients` shows it");
    text.parse().map_err(wrong)
}

/// A memory limit in bytes; 0: none.
pub(crate) fn memory(text: &str) -> Result<u64, String> {
    if text == "none" { Ok(0) } else { parse_limit(text) }
}
