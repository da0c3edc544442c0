//! `nvshare-ctl clients`

use clap::Args;
use nvshare_admin::{SCHEMA, Scheduler, Status};
use nvshare_proto::ClientStatus;
use serde::Serialize;

use crate::output::{Done, print, print_json, print_line};
use crate::show::{self, CLIENTS, COUNTERS, Layout, Sort};

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
    let columns: Vec<_> = CLIENTS.into_iter().chain(COUNTERS).collect();
    // The program's description comes last: it may be cut short.
    let (command, rest): (Vec<_>, Vec<_>) =
        columns.iter().enumerate().partition(|(_, column)| column.head == "COMMAND");
    let order: Vec<usize> = rest.iter().chain(&command).map(|&(i, _)| i).collect();
    let columns: Vec<_> = order.iter().map(|&i| columns[i]).collect();
    let rows: Vec<Vec<String>> = show::client_rows(&clients, &seats, layout)
        .iter()
        .map(|row| order.iter().map(|&i| row[i].clone()).collect())
        .collect();
    print(&show::render(&columns, &rows, layout))
}
