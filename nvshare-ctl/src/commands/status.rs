//! `nvshare-ctl status`

use clap::Args;
use nvshare_proto::units::Bytes;

use super::table;
use crate::connection::Scheduler;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Print everything as JSON: sizes in bytes, times as their names say
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(scheduler: &Scheduler, options: &Options) -> Result<(), String> {
    let status = scheduler.status()?;
    if options.json {
        println!("{}", serde_json::to_string_pretty(&status).map_err(|error| error.to_string())?);
        return Ok(());
    }
    let on = if status.scheduler.scheduling { "on" } else { "OFF: everybody runs" };
    println!(
        "nvshare-scheduler {} (pid {}), up {} s, scheduling {on}, TQ {} s",
        status.scheduler.version,
        status.scheduler.pid,
        status.scheduler.uptime_s,
        seconds(status.scheduler.quantum_ms),
    );
    if status.gpus.is_empty() {
        println!("no GPU is in use");
        return Ok(());
    }
    println!();
    let list = |ids: &[u64]| {
        if ids.is_empty() {
            "-".to_owned()
        } else {
            ids.iter().map(u64::to_string).collect::<Vec<_>>().join(",")
        }
    };
    let rows: Vec<Vec<String>> = status
        .gpus
        .iter()
        .map(|gpu| {
            vec![
                gpu.gpu.to_string(),
                list(&gpu.holders),
                list(&gpu.waiters),
                Bytes(gpu.capacity).to_string(),
                Bytes(gpu.allocated).to_string(),
                Bytes(gpu.resident).to_string(),
                Bytes(gpu.overhead).to_string(),
                seconds(gpu.quantum_ms),
                gpu.turns.to_string(),
            ]
        })
        .collect();
    table::print(
        &["GPU", "HOLDERS", "WAITERS", "CAPACITY", "ALLOCATED", "RESIDENT", "OVERHEAD", "TQ s", "TURNS"],
        &rows,
    );
    println!();
    super::clients::print(&status, false);
    Ok(())
}

fn seconds(millis: u64) -> String {
    format!("{}", millis as f64 / 1e3)
}
