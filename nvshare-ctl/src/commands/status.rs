//! `nvshare-ctl status`

use clap::Args;
use nvshare_admin::{Scheduler, Status};

use crate::output::{Done, print, print_json};
use crate::show::{self, GPUS, Layout, Sort};

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Print JSON (docs/status.md describes it)
    #[arg(long)]
    json: bool,

    /// Show all columns at full length
    #[arg(long)]
    wide: bool,

    /// Order of the clients
    #[arg(long, value_name = "KEY", default_value = "client")]
    sort: Sort,
}

pub(crate) fn run(scheduler: &Scheduler, options: &Options) -> Done {
    let mut status = scheduler.status()?;
    options.sort.sort(&mut status.clients);
    if options.json { print_json(&status) } else { print(&text(&status, Layout::of_output(options.wide))) }
}

fn text(status: &Status, layout: Layout) -> String {
    let about = &status.scheduler;
    let scheduling = if about.scheduling { "on" } else { "OFF (all programs run at the same time)" };
    let mut text = format!(
        "nvshare-scheduler {} (pid {}), up {}, scheduling {scheduling}, TQ {}\n",
        about.version,
        about.pid,
        show::span(about.uptime_s),
        show::quantum(about, &status.gpus),
    );
    text.extend(about.host_memory.map(|host| show::host_memory(host) + "\n"));
    if status.gpus.is_empty() {
        text += "no GPU is in use\n";
    } else {
        text += "\n";
        text += &show::render(&GPUS, &show::gpu_rows(&status.gpus), layout);
        text += "\n";
        text += &clients(status, layout);
    }
    let notes: Vec<String> = show::reasons(status)
        .into_iter()
        .chain(show::asleep(status))
        .chain(show::short_turns(&status.gpus))
        .chain(show::kept(status))
        .chain(show::mixed(status))
        .chain(show::others(&status.gpus))
        .chain(show::seats(status))
        .collect();
    if !notes.is_empty() {
        text += &format!("\n{}\n", notes.join("\n"));
    }
    text
}

/// The table of the clients that are not gone.
fn clients(status: &Status, layout: Layout) -> String {
    let clients: Vec<_> = status.clients.iter().filter(|client| !client.gone).cloned().collect();
    if !clients.is_empty() {
        let (columns, rows) = show::client_table(&clients, &status.seats, layout, false);
        show::render(&columns, &rows, layout)
    } else if status.scheduler.restricted {
        "no clients of this user\n".to_owned()
    } else {
        "no clients\n".to_owned()
    }
}
