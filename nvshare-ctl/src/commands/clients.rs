//! `nvshare-ctl clients`

use clap::Args;
use nvshare_admin::{SCHEMA, Scheduler, Status};
use nvshare_proto::ClientStatus;
use serde::Serialize;

use crate::output::{Done, print, print_json, print_line};
use crate::show::{self, Layout, Sort};

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Print JSON (docs/status.md describes it)
    #[arg(long)]
    json: bool,

    /// Also show the last clients that have ended
    #[arg(long)]
    all: bool,

    /// Show all columns at full length
    #[arg(long)]
    wide: bool,

    /// Order of the clients
    #[arg(long, value_name = "KEY", default_value = "client")]
    sort: Sort,
}

#[derive(Debug, Serialize)]
struct Clients {
    schema: u32,
    clients: Vec<ClientStatus>,
}

pub(crate) fn run(scheduler: &Scheduler, options: &Options) -> Done {
    let Status { mut clients, seats, .. } = scheduler.status()?;
    clients.retain(|client| options.all || !client.gone);
    options.sort.sort(&mut clients);
    if options.json {
        return print_json(&Clients { schema: SCHEMA, clients });
    }
    if clients.is_empty() {
        return print_line("no clients");
    }
    let layout = Layout::of_output(options.wide);
    let (columns, rows) = show::client_table(&clients, &seats, layout, true);
    print(&show::render(&columns, &rows, layout))
}
