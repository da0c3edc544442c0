//! What is looked at every few seconds: whether the scheduler answers, NVIDIA's CDI devices, and our own.

use std::sync::Arc;
use std::time::Duration;

use nvshare_admin::Error;
use nvshare_proto::{Seldom, WatchFrom};
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tracing::{info, warn};

use crate::nvidia::{Found, KINDS};
use crate::plugin::Plugin;

const LOOK_EVERY: Duration = Duration::from_secs(2);
/// So many looks in a row without an answer, and no seat is given out until there is one.
const MOST_MISSES: u32 = 2;

static NOT_WRITTEN: Seldom = Seldom::new(|text| warn!("{text}"));
static NO_NVIDIA: Seldom = Seldom::new(|text| warn!("{text}"));

/// Whether the scheduler counts as there.
#[derive(Debug, Default)]
struct Health {
    misses: u32,
}

impl Health {
    /// Takes one look into account.
    fn look(&mut self, answers: bool) {
        self.misses = if answers { 0 } else { self.misses.saturating_add(1) };
    }

    fn is_good(&self) -> bool {
        self.misses < MOST_MISSES
    }
}

/// Looks, for ever. Says which run of the scheduler answers, once it has all seats; none: none does.
pub async fn keep(plugin: Arc<Plugin>, boot: watch::Sender<Option<u64>>) {
    let mut health = Health::default();
    loop {
        let (looks, known) = (Arc::clone(&plugin), *boot.borrow());
        if let Ok((run, nvidia)) = spawn_blocking(move || look(&looks, known)).await {
            let was_good = health.is_good();
            health.look(run.is_ok());
            match (was_good, health.is_good(), &run) {
                (true, false, Err(error)) => warn!("{error}; until then no seat is given out"),
                (false, true, _) => info!("the scheduler answers again"),
                _ => {}
            }
            plugin.offer(&nvidia, health.is_good());
            if plugin.names_devices() && !nvidia.any {
                let kinds = plugin.options.nvidia_cdi_kind.clone().unwrap_or_else(|| KINDS.join(" nor of "));
                NO_NVIDIA.say(format_args!(
                    "no CDI device of kind {kinds} is in {} or {}, so no slot is offered: let NVIDIA's toolkit make \
                     them (nvidia-ctk cdi generate), or choose another --device-list-strategy",
                    plugin.options.etc_cdi.display(),
                    plugin.options.cdi_dir.display()
                ));
            }
            boot.send_if_modified(|old| std::mem::replace(old, run.as_ref().ok().copied()) != *old);
        }
        sleep(LOOK_EVERY).await;
    }
}

/// One look. It waits for the scheduler and the disk. `known`: the run of the scheduler that has all seats.
fn look(plugin: &Plugin, known: Option<u64>) -> (Result<u64, Error>, Found) {
    if plugin.has_lost_its_specification()
        && let Err(error) = plugin.publish()
    {
        NOT_WRITTEN.say(format_args!("{error}"));
    }
    let run = plugin.scheduler.watch(WatchFrom::Now, false).map(|watch| watch.boot());
    let run = run.and_then(|run| {
        if known != Some(run) {
            plugin.make_all_again()?;
        }
        Ok(run)
    });
    (run, plugin.nvidia())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_miss_is_none() {
        for (looks, good) in [
            ("", true),
            ("-", true),
            ("--", false),
            ("-+-", true),
            ("---+", true),
            ("--+-", true),
            ("+--", false),
        ] {
            let mut health = Health::default();
            looks.chars().for_each(|look| health.look(look == '+'));
            assert_eq!(health.is_good(), good, "{looks}");
        }
    }
}
