//! Segments of the host's memory that come from the scheduler: they are charged to it, not to this process.
//!
//! A thread that needs one asks here and waits; the session's thread asks the scheduler, and brings the answer. Where no
//! scheduler answers, or it has no more for this process, or the driver does not page-lock it, a process makes its own.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nvshare_proto::{ClientMessage, HostSegment, MAX_SEGMENTS_HELD};

use crate::process::lock::lock;
use crate::process::{bell, lifecycle, log};

/// Longest wait for an answer: memory leaves the card when the scheduler says so, which then is there, and may have much to touch.
const PATIENCE: Duration = Duration::from_secs(30);

/// The answer to a process that asks.
#[derive(Debug)]
pub(super) enum Supplied {
    /// A segment.
    Segment(HostSegment, OwnedFd),
    /// The scheduler has no more for this process.
    Refused,
    /// No scheduler hands out segments.
    Unavailable,
}

#[derive(Debug, Default)]
struct Supply {
    /// A scheduler is there, and has not said that it hands out nothing.
    offers: bool,
    /// The driver does not page-lock such memory.
    driver_refuses: bool,
    wanted: Option<u64>,
    /// When the question was asked that is not answered.
    asked: Option<Instant>,
    refused: bool,
    arrived: Vec<(HostSegment, OwnedFd)>,
    /// Segments that are mapped.
    held: BTreeMap<u64, u64>,
    /// Segments that are not used any more, of which the scheduler is still to be told.
    to_return: Vec<u64>,
}

static SUPPLY: Mutex<Option<Supply>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();
/// One thread asks at a time.
static ASKING: Mutex<()> = Mutex::new(());

fn supply() -> MutexGuard<'static, Option<Supply>> {
    lock(&SUPPLY)
}

/// Asks for `bytes`. The segment may be shorter. All threads that ask together wait no longer than one of them for an answer
/// that does not come.
pub(super) fn ask(bytes: u64) -> Supplied {
    if lifecycle::is_forked() {
        return Supplied::Unavailable;
    }
    let _asking = lock(&ASKING);
    let mut guard = supply();
    let supply = guard.get_or_insert_default();
    supply.refused = false;
    let deadline = supply.asked.unwrap_or_else(Instant::now) + PATIENCE;
    loop {
        let supply = guard.get_or_insert_default();
        if let Some((segment, descriptor)) = supply.arrived.pop() {
            return Supplied::Segment(segment, descriptor);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if !supply.offers || left.is_zero() || lifecycle::is_exiting() {
            return Supplied::Unavailable;
        }
        if supply.refused {
            return Supplied::Refused;
        }
        // Again, if another thread has given back what came, or the process has registered anew.
        if supply.asked.is_none() {
            (supply.wanted, supply.asked) = (Some(bytes), Some(Instant::now()));
            bell::ring();
        }
        let wait = CHANGED.wait_timeout(guard, left.min(Duration::from_millis(50)));
        (guard, _) = wait.unwrap_or_else(PoisonError::into_inner);
    }
}

/// The driver does not page-lock a segment: the process asks for no more, of any scheduler.
pub(super) fn give_up() {
    let mut guard = supply();
    let supply = guard.get_or_insert_default();
    (supply.driver_refuses, supply.offers) = (true, false);
}

/// Notes that a segment is mapped.
pub(super) fn note_mapped(segment: HostSegment) {
    supply().get_or_insert_default().held.insert(segment.number, segment.bytes);
}

/// Queues a segment that is not used any more for its return to the scheduler.
pub(super) fn queue_return(number: u64) {
    if lifecycle::is_forked() {
        return;
    }
    let mut guard = supply();
    let supply = guard.get_or_insert_default();
    supply.held.remove(&number);
    supply.to_return.push(number);
    drop(guard);
    bell::ring();
}

/// Whether the scheduler is to be told that the segment is not used any more.
#[cfg(test)]
pub(super) fn is_given_back(number: u64) -> bool {
    supply().get_or_insert_default().to_return.contains(&number)
}

/// Gives back what came and is not wanted any more.
pub(super) fn give_back_unused() {
    let unused = std::mem::take(&mut supply().get_or_insert_default().arrived);
    for (segment, descriptor) in unused {
        drop(descriptor);
        queue_return(segment.number);
    }
}

/// Turns asking on, after the process has registered with a scheduler. Returns the message about segments that are mapped.
pub(crate) fn on_registered() -> Option<ClientMessage> {
    let mut guard = supply();
    let supply = guard.get_or_insert_default();
    supply.offers = !supply.driver_refuses;
    (supply.asked, supply.wanted) = (None, None);
    supply.to_return.clear();
    let held = supply.held.iter().take(MAX_SEGMENTS_HELD);
    let segments: Vec<HostSegment> = held.map(|(&number, &bytes)| HostSegment { number, bytes }).collect();
    (!segments.is_empty()).then_some(ClientMessage::HostHeld { segments })
}

/// Turns asking off, after the connection has ended. Threads that wait for an answer go on.
pub(crate) fn on_connection_lost() {
    let mut guard = supply();
    let supply = guard.get_or_insert_default();
    supply.offers = false;
    supply.asked = None;
    // The scheduler takes back what was not mapped.
    let unused = std::mem::take(&mut supply.arrived);
    drop(guard);
    drop(unused);
    CHANGED.notify_all();
}

/// Takes the messages that the session's thread is to send to the scheduler.
pub(crate) fn take_messages() -> Vec<ClientMessage> {
    let mut guard = supply();
    let Some(supply) = guard.as_mut() else { return Vec::new() };
    let returned =
        std::mem::take(&mut supply.to_return).into_iter().map(|segment| ClientMessage::HostBack { segment });
    let wanted = supply.wanted.take().map(|bytes| ClientMessage::HostWanted { bytes });
    returned.chain(wanted).collect()
}

/// Takes the scheduler's answer, with its descriptors. Threads that wait for it go on.
pub(crate) fn on_answer(offered: bool, segments: Vec<HostSegment>, descriptors: Vec<OwnedFd>) {
    if segments.len() != descriptors.len() {
        log::warn(format_args!(
            "{} of {} segments of the scheduler's memory did not come: too many files are open",
            segments.len() - descriptors.len().min(segments.len()),
            segments.len()
        ));
    }
    let mut guard = supply();
    let supply = guard.get_or_insert_default();
    supply.asked = None;
    let lost = segments.iter().skip(descriptors.len()).map(|segment| segment.number);
    supply.to_return.extend(lost);
    // Without descriptors there is no way but memory of the process's own.
    supply.offers &= offered && (segments.is_empty() || !descriptors.is_empty());
    let came = segments.into_iter().zip(descriptors);
    let (whole, others): (Vec<_>, Vec<_>) = came.partition(|(segment, file)| is_whole(*segment, file));
    supply.to_return.extend(others.iter().map(|(segment, _)| segment.number));
    supply.arrived.extend(whole);
    supply.refused = supply.arrived.is_empty();
    drop(guard);
    if !others.is_empty() {
        log::warn(format_args!("{} segments of the scheduler's memory are not what it says", others.len()));
    }
    CHANGED.notify_all();
}

/// Whether the file is memory, as long as the scheduler says, that cannot grow.
fn is_whole(segment: HostSegment, file: &OwnedFd) -> bool {
    // SAFETY: plain memory, filled by the call; an open descriptor.
    let (found, seals) = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        let found = libc::fstat(file.as_raw_fd(), &raw mut stat) == 0 && stat.st_size as u64 == segment.bytes;
        (found, libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS))
    };
    found && seals >= 0 && seals & libc::F_SEAL_GROW != 0 && segment.bytes.is_multiple_of(super::GRANULE)
}

#[cfg(test)]
mod tests {
    use std::os::fd::FromRawFd;

    use super::*;

    /// A segment of the scheduler's.
    fn segment(number: u64) -> (HostSegment, OwnedFd) {
        let bytes = crate::memory::mapping::GRANULE;
        // SAFETY: a name that lives through the call; the descriptor is this test's own.
        let file = unsafe {
            let file = libc::memfd_create(c"segment".as_ptr(), libc::MFD_ALLOW_SEALING);
            assert!(libc::ftruncate(file, bytes as libc::off_t) == 0);
            assert!(libc::fcntl(file, libc::F_ADD_SEALS, libc::F_SEAL_GROW) == 0);
            OwnedFd::from_raw_fd(file)
        };
        (HostSegment { number, bytes }, file)
    }

    #[test]
    fn what_was_given_back_before_the_asker_saw_it_is_asked_for_again() {
        supply().get_or_insert_default().offers = true;
        let asker = std::thread::spawn(|| ask(1));
        let (begin, mut questions) = (Instant::now(), 0);
        while !asker.is_finished() && begin.elapsed() < PATIENCE / 2 {
            let is_asked = supply().as_ref().is_some_and(|supply| supply.asked.is_some());
            questions += u32::from(is_asked);
            match (is_asked, questions) {
                // The answer came, and another thread gave it back.
                (true, 1) => supply().get_or_insert_default().asked = None,
                (true, _) => {
                    let (segment, file) = segment(7_000_101);
                    on_answer(true, vec![segment], vec![file]);
                }
                (false, _) => {}
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        on_connection_lost();
        assert!(matches!(asker.join().unwrap(), Supplied::Segment(HostSegment { number: 7_000_101, .. }, _)));
    }
}
