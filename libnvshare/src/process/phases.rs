//! Times of the phases of hand-overs, for those who look at one (`nvshare-ctl timeline`).
//!
//! Nothing is measured while the program runs. The clock is read at most three times for each chunk that moves, when a move pauses, and a
//! few times for each hand-over. The scheduler is told with the message that ends the phases, and keeps the times with its events.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use nvshare_proto::units::saturate;
use nvshare_proto::{GpuUuid, HandOverPhase, PhaseTime};

use super::lock::lock;

/// A phase of a GPU, or of the process.
type Key = (Option<GpuUuid>, HandOverPhase);

/// The scheduler reads no frame of a client that is longer than 4 KiB. These fit, and each GPU has five phases.
const MAX_TOLD: usize = 128;

/// Times that the scheduler has not been told.
static UNTOLD: Mutex<Vec<(Key, Duration)>> = Mutex::new(Vec::new());

fn add(times: &mut Vec<(Key, Duration)>, key: Key, time: Duration) {
    match times.iter_mut().find(|(known, _)| *known == key) {
        Some((_, sum)) => *sum += time,
        None => times.push((key, time)),
    }
}

/// A phase of the process is over.
pub(crate) fn note(phase: HandOverPhase, time: Duration) {
    add(&mut lock(&UNTOLD), (None, phase), time);
}

/// Takes the times that the scheduler has not been told: of this GPU, or all. A phase of less than a microsecond has none.
pub(crate) fn take(gpu: Option<GpuUuid>) -> Vec<PhaseTime> {
    let is_taken = |((of, _), _): &mut (Key, Duration)| gpu.is_none() || *of == gpu;
    let mut taken: Vec<_> = lock(&UNTOLD).extract_if(.., is_taken).collect();
    taken.sort_unstable_by_key(|((gpu, phase), _)| (*phase, *gpu));
    let told =
        |((gpu, phase), time): (Key, Duration)| PhaseTime { gpu, phase, micros: saturate(time.as_micros()) };
    taken.into_iter().map(told).filter(|told| told.micros > 0).take(MAX_TOLD).collect()
}

/// Divides the time of a move among its phases.
#[derive(Debug)]
pub(crate) struct Laps {
    gpu: GpuUuid,
    last: Instant,
    times: Vec<(Key, Duration)>,
}

impl Laps {
    /// The first lap begins.
    pub(crate) fn begin(gpu: GpuUuid) -> Self {
        Self { gpu, last: Instant::now(), times: Vec::new() }
    }

    /// A lap ends, and the next one begins. Returns the time of the lap.
    fn lap(&mut self) -> Duration {
        let now = Instant::now();
        now.saturating_duration_since(std::mem::replace(&mut self.last, now))
    }

    /// The lap that ends was a part of this phase.
    pub(crate) fn end(&mut self, phase: HandOverPhase) {
        let time = self.lap();
        add(&mut self.times, (Some(self.gpu), phase), time);
    }

    /// The lap that ends was no part of a phase.
    pub(crate) fn skip(&mut self) {
        self.lap();
    }
}

impl Drop for Laps {
    /// The move is over.
    fn drop(&mut self) {
        if self.times.is_empty() {
            return;
        }
        let mut untold = lock(&UNTOLD);
        self.times.drain(..).for_each(|(key, time)| add(&mut untold, key, time));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::threads;

    #[test]
    fn laps_are_parts_of_the_whole_and_are_told_once() {
        const LAP: Duration = Duration::from_millis(2);
        let [gpu, other] = [GpuUuid([1; 16]), GpuUuid([2; 16])];
        let begin = Instant::now();
        let mut laps = Laps::begin(gpu);
        for phase in
            [Some(HandOverPhase::CopyOut), Some(HandOverPhase::Look), None, Some(HandOverPhase::CopyOut)]
        {
            threads::sleep(LAP);
            match phase {
                Some(phase) => laps.end(phase),
                None => laps.skip(),
            }
        }
        drop(laps);
        let whole = begin.elapsed();
        assert_eq!(take(Some(other)), []);
        let told = take(Some(gpu));
        let names: Vec<_> = told.iter().map(|told| (told.gpu, told.phase)).collect();
        assert_eq!(names, [(Some(gpu), HandOverPhase::Look), (Some(gpu), HandOverPhase::CopyOut)]);
        let times: Vec<_> = told.iter().map(|told| Duration::from_micros(told.micros)).collect();
        assert!(times[0] >= LAP && times[1] >= 2 * LAP, "{times:?}");
        assert!(times.iter().sum::<Duration>() + LAP <= whole, "{times:?} of {whole:?}");
        assert_eq!(take(Some(gpu)), []);
    }
}
