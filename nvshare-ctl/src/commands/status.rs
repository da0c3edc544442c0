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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use nvshare_admin::SCHEMA;
    use nvshare_proto::{
        Amount, AsleepStatus, ClientMemory, ClientState, ClientStatus, ComputeLimit, Counters, Enforcement,
        GpuStatus, GpuUuid, HostStatus, MemoryMode, MemoryStatus, Occupant, Others, Priority, ProcessInfo,
        QuantumRule, SchedulerStatus, Seat, SeatStatus, ShareStatus, Slot, TenantSettings, Usage,
    };
    use serde_json::Value;

    use super::*;

    /// A status of which nothing is empty or unknown. No structure of it is made with `..`, so that a new field cannot be left out.
    fn full() -> Status {
        let gpu = GpuUuid([7; 16]);
        let scheduler = SchedulerStatus {
            version: "1".to_owned(),
            pid: 1,
            uptime_s: 1,
            scheduling: true,
            quantum_ms: 1,
            restricted: true,
            host_memory: Some(HostStatus { budget: 1, each: 1, used: 1 }),
        };
        let shown = GpuStatus {
            gpu,
            index: Some(0),
            name: Some("H200".to_owned()),
            capacity: 1,
            allocated: 1,
            resident: 1,
            overhead: 1,
            quantum_ms: 1,
            holders: vec![1],
            waiters: vec![1],
            turns: 1,
            switch_us: [1; 4],
            others: Some(Others { clients: 1, allocated: 1, holders: 1, waiters: 1 }),
            rule: QuantumRule::Auto { overhead_ppm: 1, max_wait_ms: 1 },
            switch_cost_us: 1,
            slices: true,
            by_measure: false,
            side_by_side: 0,
        };
        let fixed = GpuStatus { rule: QuantumRule::Fixed { millis: 1 }, ..shown.clone() };
        let client = ClientStatus {
            client: 1,
            pid: 1,
            name: "job".to_owned(),
            process: Some(ProcessInfo {
                user: 1,
                command: "job".to_owned(),
                container: Some("c".to_owned()),
                pod: Some("p".to_owned()),
                job: Some("j".to_owned()),
            }),
            state: ClientState::Blocked,
            blocked_on: Some(gpu),
            stuck: true,
            gone: true,
            usage: vec![Usage { gpu, total: 1, limit: 1, allocated: 1, absent: 1, immovable: 1 }],
            resident: 1,
            overhead: 1,
            held_ms: 1,
            waited_ms: 1,
            counters: Counters::default(),
            share: ShareStatus {
                weight: 1,
                priority: Priority::Normal,
                enforcement: Enforcement::default(),
                compute: vec![ComputeLimit { gpu, percent: 1 }],
                paused: true,
                processes: 1,
            },
            host_memory: 1,
        };
        let given = TenantSettings {
            weight: Some(1),
            priority: Some(Priority::Normal),
            compute: Some(1),
            enforcement: Some(Enforcement::default()),
            memory: Some(1),
            paused: Some(true),
        };
        let seat = Seat { slots: vec![Slot { gpu, number: 0 }], given };
        let name = seat.name();
        let occupant = Occupant { namespace: "n".to_owned(), pod: "p".to_owned(), container: "c".to_owned() };
        let amount = Amount { gpu, bytes: 1 };
        Status {
            schema: SCHEMA,
            scheduler,
            gpus: vec![shown, fixed],
            clients: vec![client],
            seats: vec![SeatStatus { name, seat, occupant: Some(occupant), clients: vec![1] }],
            unused_seats: vec![name],
            memory: MemoryStatus {
                kept: vec![amount],
                clients: vec![ClientMemory { client: 1, memory: MemoryMode::Swap }],
            },
            asleep: vec![AsleepStatus { client: 1, needs: vec![amount], wakes: true }],
        }
    }

    /// The names of all fields. Nothing is empty, which could hide some.
    fn fields(value: &Value, found: &mut BTreeSet<String>) {
        match value {
            Value::Object(fields_of_it) => {
                found.extend(fields_of_it.keys().cloned());
                fields_of_it.values().for_each(|value| fields(value, found));
            }
            Value::Array(values) => {
                assert!(!values.is_empty(), "after {found:?}");
                values.iter().for_each(|value| fields(value, found));
            }
            value => assert!(!value.is_null(), "after {found:?}"),
        }
    }

    #[test]
    fn every_field_of_the_json_is_documented() {
        let mut found = BTreeSet::new();
        fields(&serde_json::to_value(full()).unwrap(), &mut found);
        let page = include_str!("../../../docs/status.md");
        let missing: Vec<_> = found.iter().filter(|name| !page.contains(&format!("`{name}`"))).collect();
        assert!(missing.is_empty(), "docs/status.md does not say what these are: {missing:?}");
    }
}
