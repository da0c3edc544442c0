//! Arguments as people write them: limits, or `none`, and the clients that they are for.

use nvshare_proto::units::{parse_limit, parse_percent};

/// A compute limit in per cent; 0: none.
pub(crate) fn parse_compute_limit(text: &str) -> Result<u8, String> {
    if text == "none" { Ok(0) } else { parse_percent(text).map_err(|error| format!("{error}, or none")) }
}

/// A client's number.
pub(crate) fn parse_client(text: &str) -> Result<u64, String> {
    let wrong =
        |_| format!("{text:?} is no client's number; accepted: a number, as `nvshare-ctl clients` shows it");
    text.parse().map_err(wrong)
}

/// The processes that a share or a limit is for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Target {
    /// Those of a client's tenant, by the client's number.
    Client(u64),
    /// Those of one of Slurm's jobs, by its number, before it has any or later.
    Job(u32),
}

/// A client's number, or `job:` and that of one of Slurm's jobs.
pub(crate) fn parse_target(text: &str) -> Result<Target, String> {
    let Some(job) = text.strip_prefix("job:") else {
        let of_client = parse_client(text).map(Target::Client);
        return of_client.map_err(|why| format!("{why}, or job: and the number of one of Slurm's jobs"));
    };
    job.parse()
        .map(Target::Job)
        .map_err(|_| format!("{text:?} names no job of Slurm; accepted: job: and its number, as in job:123"))
}

/// A memory limit in bytes; 0: none.
pub(crate) fn parse_memory_limit(text: &str) -> Result<u64, String> {
    if text == "none" { Ok(0) } else { parse_limit(text) }
}
