//! Looks that are made every few seconds: whether the scheduler answers, NVIDIA's CDI devices, and our own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nvshare_admin::Error;
use nvshare_proto::{SeatName, ThrottledLine, WatchFrom};
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tracing::{info, warn};

use crate::host::Host;
use crate::nvidia::{Found, KINDS};

const LOOK_EVERY: Duration = Duration::from_secs(2);
static NOT_WRITTEN: ThrottledLine = ThrottledLine::new(|text| warn!("{text}"));
static REFUSED: ThrottledLine = ThrottledLine::new(|text| warn!("{text}"));
static NO_NVIDIA: ThrottledLine = ThrottledLine::new(|text| warn!("{text}"));

/// Which seats the scheduler has.
#[derive(Debug, Default)]
struct Made {
    /// The run of the scheduler that was asked for all of them.
    run: Option<u64>,
    /// Seats that the scheduler refused. They are asked for again, because the cause may go away.
    refused: Vec<SeatName>,
}

/// Looks, for ever. Says which run of the scheduler answers, once it was asked for all seats; none: none does. `offer` is told of NVIDIA's
/// devices, and whether the scheduler counts as there.
pub async fn keep(host: Arc<Host>, offer: impl Fn(&Found, bool), boot: watch::Sender<Option<u64>>) {
    // Without seats, what is offered before the scheduler's first answer fails the pods that get it.
    let mut answered = host.has_seats().then(Instant::now);
    let (mut made, mut was_good) = (Made::default(), None);
    let grace = Duration::from_secs(host.options.grace);
    loop {
        let looks = Arc::clone(&host);
        if let Ok((run, nvidia)) = spawn_blocking(move || look(&looks)).await {
            let run = match run {
                Ok(run) => make_again(&host, run, &mut made).await.map(|()| run),
                Err(error) => Err(error),
            };
            if run.is_err() {
                made = Made::default();
            }
            if run.is_ok() {
                answered = Some(Instant::now());
            }
            let is_good = answered.is_some_and(|at| at.elapsed() < grace);
            match (was_good.replace(is_good), is_good, &run) {
                (None | Some(true), false, Err(error)) => warn!("{error}; until then no seat is given out"),
                (Some(false), true, _) => info!("the scheduler answers"),
                _ => {}
            }
            offer(&nvidia, is_good);
            if host.names_devices() && !nvidia.any {
                let kinds = host.options.nvidia_cdi_kind.clone().unwrap_or_else(|| KINDS.join(" nor of "));
                NO_NVIDIA.say(format_args!(
                    "no CDI device of kind {kinds} is in {} or {}, so no slot is offered: let NVIDIA's toolkit make \
                     them (nvidia-ctk cdi generate), or choose another --device-list-strategy",
                    host.options.etc_cdi.display(),
                    host.options.cdi_dir.display()
                ));
            }
            boot.send_if_modified(|old| std::mem::replace(old, run.as_ref().ok().copied()) != *old);
        }
        sleep(host.options.pause(LOOK_EVERY)).await;
    }
}

/// Asks a run of the scheduler for the seats that it has not.
async fn make_again(host: &Arc<Host>, run: u64, made: &mut Made) -> Result<(), Error> {
    let seats = if made.run == Some(run) { made.refused.clone() } else { host.seats().await };
    let (refused, why) = host.make_again(seats).await?;
    if !refused.is_empty() {
        REFUSED.say(format_args!(
            "the scheduler refuses {} seats that were given out, which are asked for again: {why}",
            refused.len()
        ));
    }
    if refused.is_empty() && (made.run != Some(run) || !made.refused.is_empty()) {
        host.note_made().await;
    }
    *made = Made { run: Some(run), refused };
    Ok(())
}

/// One look. It waits for the scheduler and the disk. Returns which run of the scheduler answers, and NVIDIA's devices.
fn look(host: &Host) -> (Result<u64, Error>, Found) {
    if host.has_lost_its_specification()
        && let Err(error) = host.publish()
    {
        NOT_WRITTEN.say(format_args!("{error}"));
    }
    let run = host.scheduler.watch(WatchFrom::Now, false).map(|watch| watch.boot());
    (run, host.nvidia())
}
