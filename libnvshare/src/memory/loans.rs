//! The processes that have memory of this one, as far as this one knows.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, Weak};

use crate::process::answering;
use crate::process::lock::lock;
use crate::process::other::OtherProcess;

/// The processes that have some memory of this one, with the name at which this one listened when they came. Each needs one descriptor,
/// however much it has. A program that has closed the socket may have closed the descriptor as well.
static BORROWERS: Mutex<Vec<(Option<answering::Name>, Weak<OtherProcess>)>> = Mutex::new(Vec::new());

/// The process that has a number now. `None`: there is none, or no descriptor is left by which its end would be seen.
fn borrower(process: libc::pid_t) -> Option<Arc<OtherProcess>> {
    let (name, mut all) = (answering::own_name(), lock(&BORROWERS));
    all.retain(|(_, known)| known.strong_count() > 0);
    let is_it = |known: &Arc<OtherProcess>| {
        known.number == process && known.watched().is_some() && !known.has_ended()
    };
    let mut of_now = all.iter().filter(|(then, _)| *then == name).filter_map(|(_, known)| known.upgrade());
    if let Some(known) = of_now.find(is_it) {
        return Some(known);
    }
    let new = Arc::new(OtherProcess::find(process).filter(|new| !new.lacks_descriptor)?);
    all.push((name, Arc::downgrade(&new)));
    Some(new)
}

/// The number of descriptors for the processes that have some memory.
pub(super) fn descriptors() -> usize {
    let all = lock(&BORROWERS);
    let known = all.iter().filter_map(|(_, known)| known.upgrade());
    known.filter(|known| known.watched().is_some()).count()
}

/// A process that has the memory.
#[derive(Debug)]
struct Loan {
    borrower: Arc<OtherProcess>,
    /// How often it got the memory and has not returned it.
    times: u32,
}

/// The processes that have some memory. A process has it until it returns it, or ends.
#[derive(Debug, Default)]
pub(super) struct Loans(Vec<Loan>);

impl Loans {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A process gets the memory. Returns whether there is such a process, and its end will be seen as far as the system says it.
    pub(super) fn add(&mut self, process: libc::pid_t) -> bool {
        // One that has ended may have had the same number.
        self.end_of_ended();
        if let Some(known) = self.0.iter_mut().find(|loan| loan.borrower.number == process) {
            known.times += 1;
            return true;
        }
        let found = borrower(process);
        let is_there = found.is_some();
        self.0.extend(found.map(|borrower| Loan { borrower, times: 1 }));
        is_there
    }

    /// A process returns the memory.
    pub(super) fn end(&mut self, process: libc::pid_t) {
        if let Some(known) = self.0.iter_mut().find(|loan| loan.borrower.number == process) {
            known.times -= 1;
        }
        self.0.retain(|loan| loan.times > 0);
    }

    /// Takes the memory back from processes that have ended.
    pub(super) fn end_of_ended(&mut self) {
        self.0.retain(|loan| !loan.borrower.has_ended());
    }

    /// Descriptors that can be read when a process has ended.
    pub(super) fn watched(&self) -> impl Iterator<Item = c_int> {
        self.0.iter().filter_map(|loan| loan.borrower.watched())
    }

    /// The numbers of descriptors may be other files' now: they are neither used nor closed.
    pub(super) fn forget_descriptors(&self) {
        self.0.iter().for_each(|loan| loan.borrower.forget());
    }

    /// Closes the descriptors, in a forked child.
    pub(super) fn close_after_fork(&self) {
        self.0.iter().for_each(|loan| loan.borrower.close());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_back_when_it_is_returned_as_often_as_it_was_lent() {
        let (me, mut loans) = (std::process::id() as libc::pid_t, Loans::default());
        assert!(loans.add(me) && loans.add(me) && loans.add(0));
        assert_eq!(loans.watched().count(), 1, "the system does not tell when the other one ends");
        loans.end(me);
        loans.end(0);
        loans.end(7);
        assert!(!loans.is_empty());
        loans.end(me);
        assert!(loans.is_empty());
        loans.end(me);
        assert!(loans.is_empty());
    }

    #[test]
    fn a_process_needs_one_descriptor_for_all_that_it_has() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let (it, mut one, mut other) = (child.id() as libc::pid_t, Loans::default(), Loans::default());
        assert!(one.add(it) && other.add(it));
        assert_eq!(one.watched().collect::<Vec<_>>(), other.watched().collect::<Vec<_>>());
        one.end(it);
        assert_eq!(other.watched().count(), 1, "the other memory is still lent");
        // The program has closed it.
        other.forget_descriptors();
        assert!(one.add(it));
        assert_eq!((one.watched().count(), other.watched().count()), (1, 0));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn memory_of_a_process_that_has_ended_is_back() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let (number, mut loans) = (child.id() as libc::pid_t, Loans::default());
        assert!(loans.add(number) && loans.add(number));
        loans.end_of_ended();
        assert!(!loans.is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
        loans.end_of_ended();
        assert!(loans.is_empty() && !loans.add(number));
    }
}
