//! How other processes get memory of this one, and return it.
//!
//! The thread that answers gives memory that has descriptors. Other memory has left the card since they were made. For that, another
//! thread passes the gate, as a call of the program does. When it is inside, all memory is on the card, and descriptors can be made.

use std::sync::Mutex;

use super::exports::{self, Given};
use super::handles::{Handle, Lost, Word};
use crate::driver::types::CUresult;
use crate::process::answering::{Asker, LATER, QUESTION, Tasks};
use crate::process::lock::lock;
use crate::process::{lifecycle, log, threads};
use crate::work::gate::{self, FrameMark};

/// The tasks of the thread that answers.
pub(super) const TASKS: Tasks =
    Tasks { answer, watched: exports::watched, look: exports::take_back_from_ended };

/// The largest number of processes that wait. Further ones ask again.
const MAX_WAITING: usize = 256;

/// A process that waits for memory.
#[derive(Debug)]
struct Waiter {
    handle: Handle,
    asker: Asker,
}

/// The processes that wait.
#[derive(Debug)]
struct Queue {
    waiters: Vec<Waiter>,
    /// A thread passes the gate for them.
    is_served: bool,
}

static QUEUE: Mutex<Queue> = Mutex::new(Queue { waiters: Vec::new(), is_served: false });

/// Hears a word of another process. On the thread that answers.
fn answer(word: &[u8; QUESTION], asker: Asker) {
    match Word::read(word) {
        Some(Word::Get(handle)) => match exports::give(&handle, &asker) {
            Given::NotYet if asker.send(&LATER, &[]).is_ok() => wait_at_gate(Waiter { handle, asker }),
            Given::NotYet | Given::Answered => {}
        },
        Some(Word::Return(handle)) => {
            asker.process().into_iter().for_each(|process| exports::take_back(&handle, process));
        }
        None => {}
    }
}

fn wait_at_gate(waiter: Waiter) {
    let mut queue = lock(&QUEUE);
    if queue.waiters.len() >= MAX_WAITING {
        return;
    }
    queue.waiters.push(waiter);
    if !std::mem::replace(&mut queue.is_served, true) && !threads::spawn("nvshare-lend", serve) {
        *queue = Queue { waiters: Vec::new(), is_served: false };
    }
}

/// The life of the thread that passes the gate, until nobody waits.
fn serve() {
    while !lifecycle::is_exiting() {
        let mark = FrameMark::new();
        let passed = gate::enter_for_addresses(&mark, || ());
        let waiters = std::mem::take(&mut lock(&QUEUE).waiters);
        match passed {
            Ok(pass) => {
                waiters.iter().for_each(lend);
                gate::leave(pass, &mark, CUresult::NOT_READY);
            }
            Err(error) => log::debug(format_args!("memory is not lent: {error:?}")),
        }
        // Outside the gate: those that got nothing ask again.
        drop(waiters);
        let mut queue = lock(&QUEUE);
        if queue.waiters.is_empty() {
            queue.is_served = false;
            return;
        }
    }
}

/// Gives memory to a process that waits, or says that it is lost. The thread is inside the gate.
fn lend(Waiter { handle, asker }: &Waiter) {
    let Err(error) = exports::renew(handle) else {
        exports::give(handle, asker);
        return;
    };
    log::debug(format_args!("memory is not lent: {error:?}"));
    // The card may be lost before anything was given up. An error of the program's own work says nothing to another one.
    let error = exports::failure(handle).unwrap_or(error);
    if error.is_of_card()
        && let Err(why) = asker.send(&Lost(error).bytes(), &[])
    {
        log::debug(format_args!("a process does not hear that memory is lost: {why}"));
    }
}
