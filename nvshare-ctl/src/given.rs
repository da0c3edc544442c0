//! Limits as people write them, or `none`.

use nvshare_proto::units::{parse_limit, parse_percent};

/// A compute limit in per cent; 0: none.
pub(crate) fn compute(text: &str) -> Result<u8, String> {
    if text == "none" { Ok(0) } else { parse_percent(text).map_err(|error| format!("{error}, or none")) }
}

/// A memory limit in bytes; 0: none.
pub(crate) fn memory(text: &str) -> Result<u64, String> {
    if text == "none" { Ok(0) } else { parse_limit(text) }
}
