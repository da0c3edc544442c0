//! Kinds of steps that must not happen at the same time as others, though any number of one kind may.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::plan::flag::{CONFLICTS, COUNT};

#[derive(Debug, Default)]
struct State {
    held: [usize; COUNT],
    /// Steps that wait for the first flag of a conflict: meanwhile no step takes the second, or they would wait for ever.
    waiting: [usize; COUNT],
}

/// The flags that steps hold.
#[derive(Debug, Default)]
pub(crate) struct Exclusion {
    state: Mutex<State>,
    changed: Condvar,
}

/// Flags held until this is dropped.
#[derive(Debug)]
pub(crate) struct Held<'a>(&'a Exclusion, &'a [usize]);

impl Exclusion {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes all flags at once, when no step holds a conflicting one.
    pub(crate) fn hold<'a>(&'a self, flags: &'a [usize]) -> Held<'a> {
        let mut state = self.lock();
        if !flags.is_empty() {
            flags.iter().for_each(|&flag| state.waiting[flag] += 1);
            while !may(&state, flags) {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            flags.iter().for_each(|&flag| {
                state.waiting[flag] -= 1;
                state.held[flag] += 1;
            });
        }
        Held(self, flags)
    }
}

fn may(state: &State, flags: &[usize]) -> bool {
    CONFLICTS.iter().all(|&(rare, common)| {
        let takes_rare = flags.contains(&rare);
        let takes_common = flags.contains(&common);
        // A step that takes the rare flag goes first; a second one that also takes the common flag does not wait for itself.
        !(takes_rare && state.held[common] > 0)
            && !(takes_common && (state.held[rare] > 0 || (state.waiting[rare] > 0 && !takes_rare)))
    })
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if !self.1.is_empty() {
            let mut state = self.0.lock();
            self.1.iter().for_each(|&flag| state.held[flag] -= 1);
            drop(state);
            self.0.changed.notify_all();
        }
    }
}
