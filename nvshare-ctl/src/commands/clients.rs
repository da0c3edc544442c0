//! `nvshare-ctl clients`

use std::time::Duration;

use clap::Args;
use nvshare_proto::units::{Bytes, gib_per_second};

use super::table;
use crate::connection::{Scheduler, Status};

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Print as JSON: sizes in bytes, times as their names say
    #[arg(long)]
    json: bool,

    /// Also show clients that are gone
    #[arg(long)]
    all: bool,
}

pub(crate) fn run(scheduler: &Scheduler, options: &Options) -> Result<(), String> {
    let mut status = scheduler.status()?;
    if options.json {
        status.clients.retain(|client| options.all || !client.gone);
        println!("{}", serde_json::to_string_pretty(&status.clients).map_err(|error| error.to_string())?);
    } else {
        print(&status, options.all);
    }
    Ok(())
}

/// One line a client.
pub(super) fn print(status: &Status, all: bool) {
    let clients: Vec<_> = status.clients.iter().filter(|client| all || !client.gone).collect();
    if clients.is_empty() {
        println!("no clients");
        return;
    }
    let rows: Vec<Vec<String>> = clients
        .into_iter()
        .map(|client| {
            let counters = &client.counters;
            let allocated = client.usage.iter().map(|usage| usage.allocated).sum();
            let rate = gib_per_second(counters.restored, Duration::from_nanos(counters.restore_ns));
            vec![
                client.client.to_string(),
                client.name.clone(),
                format!("{:?}", client.state).to_lowercase(),
                client.pid.to_string(),
                Bytes(allocated).to_string(),
                Bytes(client.resident).to_string(),
                counters.gated.to_string(),
                counters.passed_by.to_string(),
                counters.hand_overs.to_string(),
                Bytes(counters.evicted).to_string(),
                Bytes(counters.restored).to_string(),
                format!("{rate:.1}"),
                format!("{:.1}", client.held_ms as f64 / 1e3),
                format!("{:.1}", client.waited_ms as f64 / 1e3),
            ]
        })
        .collect();
    let head = [
        "CLIENT",
        "PROGRAM",
        "STATE",
        "PID",
        "ALLOCATED",
        "RESIDENT",
        "GATED",
        "PASSED BY",
        "HAND-OVERS",
        "EVICTED",
        "RESTORED",
        "GiB/s",
        "HELD s",
        "WAITED s",
    ];
    table::print(&head, &rows);
}
