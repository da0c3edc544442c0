//! Runs a program: its threads, each with its steps, on the driver of this process.

mod calls;
mod farewell;
pub(crate) use calls::KERNELS;
pub(crate) mod exclude;
mod graphs;
mod memory;
mod nodes;
pub(crate) mod partner;
mod sweep;
pub(crate) use memory::{map, unmap};
pub(crate) use sweep::KeptContext;
mod waits;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::plan::{Id, Op, Plan, StreamKind};
use crate::watch;
use exclude::Exclusion;
use nvshare_test_cuda::{CudaError, Driver, cu};

/// A thread that is in one step for this long is held up: its kernels take less.
const HELD_UP: Duration = Duration::from_millis(25);

/// Handles of one kind of thing, by its index.
#[derive(Debug)]
pub(crate) struct Handles(Vec<AtomicU64>);

impl Handles {
    fn new(count: usize) -> Self {
        Self((0..count).map(|_| AtomicU64::new(0)).collect())
    }

    pub(crate) fn get(&self, id: Id) -> u64 {
        self.0[id].load(Ordering::SeqCst)
    }

    pub(crate) fn set(&self, id: Id, handle: u64) {
        self.0[id].store(handle, Ordering::SeqCst);
    }
}

/// A program that runs.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) driver: &'static Driver,
    pub(crate) plan: Plan,
    /// Bytes that the program may have, if a limit is set.
    pub(crate) limit: Option<u64>,
    pub(crate) verbose: bool,
    /// No kernel may be the first to touch memory.
    populated: bool,
    pub(crate) contexts: Handles,
    /// Green contexts' own handles, beside those of the contexts made from them.
    pub(crate) greens: Handles,
    pub(crate) streams: Handles,
    pub(crate) events: Handles,
    pub(crate) modules: Handles,
    pub(crate) steps_of: Handles,
    pub(crate) fills_of: Handles,
    pub(crate) buffers: Handles,
    /// Handles of the memory that is mapped in mapped buffers.
    pub(crate) physical: Handles,
    pub(crate) hosts: Handles,
    pub(crate) host_bytes: Handles,
    /// Recorded, and not yet executable.
    pub(crate) graphs: Handles,
    pub(crate) execs: Handles,
    over: Mutex<Vec<bool>>,
    changed: Condvar,
    exclusion: Exclusion,
    pub(crate) windows: waits::Windows,
    pub(crate) callbacks: AtomicUsize,
    pub(crate) words: AtomicU64,
    partner: Mutex<Option<partner::Partner>>,
    /// The position of each thread: the index of its step plus one, or 0.
    pub(crate) at: Vec<AtomicUsize>,
}

/// The reason why a step failed.
#[derive(Debug)]
pub(crate) enum Fault {
    Call(CudaError),
    Other(String),
}

impl From<CudaError> for Fault {
    fn from(error: CudaError) -> Self {
        Self::Call(error)
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Call(CudaError(code, name)) => write!(f, "{name} returned {code}, expected 0"),
            Self::Other(text) => f.write_str(text),
        }
    }
}

/// The state of a thread.
#[derive(Debug, Default)]
pub(crate) struct Me {
    pub(crate) thread: usize,
    /// The context that the thread has made current.
    pub(crate) current: Option<Id>,
}

impl Run {
    pub(crate) fn new(
        driver: &'static Driver,
        plan: Plan,
        limit: Option<u64>,
        verbose: bool,
        populated: bool,
    ) -> Self {
        let counts = plan.counts.clone();
        let steps = plan.steps.len();
        let threads = plan.threads;
        Self {
            driver,
            limit,
            verbose,
            populated,
            contexts: Handles::new(counts.contexts),
            greens: Handles::new(counts.contexts),
            streams: Handles::new(counts.streams),
            events: Handles::new(counts.events),
            modules: Handles::new(counts.modules),
            steps_of: Handles::new(counts.modules),
            fills_of: Handles::new(counts.modules),
            buffers: Handles::new(counts.buffers),
            physical: Handles::new(counts.buffers),
            hosts: Handles::new(counts.hosts),
            host_bytes: Handles::new(counts.hosts),
            graphs: Handles::new(counts.graphs),
            execs: Handles::new(counts.graphs),
            over: Mutex::new(vec![false; steps]),
            changed: Condvar::new(),
            exclusion: Exclusion::default(),
            windows: waits::Windows::default(),
            callbacks: AtomicUsize::new(0),
            words: AtomicU64::new(0),
            partner: Mutex::default(),
            at: (0..threads).map(|_| AtomicUsize::new(0)).collect(),
            plan,
        }
    }

    /// Runs the whole program and ends the process.
    pub(crate) fn run(&'static self) -> ! {
        watch::begins(self);
        farewell::prepare(self);
        for thread in 1..self.plan.threads {
            std::thread::Builder::new()
                .name(format!("storm-{thread}"))
                .spawn(move || self.work_of(thread))
                .expect("a thread");
        }
        self.work_of(0);
        loop {
            std::thread::sleep(Duration::from_secs(3600));
        }
    }

    /// Runs the whole program, and ends the things that it has left.
    pub(crate) fn run_and_sweep(&'static self) {
        watch::begins(self);
        let others: Vec<_> = (1..self.plan.threads)
            .map(|thread| {
                let named = std::thread::Builder::new().name(format!("storm-{thread}"));
                named.spawn(move || self.steps_of_thread(thread)).expect("a thread")
            })
            .collect();
        self.steps_of_thread(0);
        others.into_iter().for_each(|other| other.join().expect("no panic"));
        if !self.conclude() {
            std::process::exit(1);
        }
        if let Err(fault) = self.sweep() {
            println!("storm: seed {} step {} at its end: {fault}", self.plan.seed, self.plan.steps.len());
            std::process::exit(1);
        }
    }

    fn work_of(&'static self, thread: usize) {
        self.steps_of_thread(thread);
        if thread == self.plan.leaver {
            std::process::exit(i32::from(!self.conclude()));
        }
    }

    fn steps_of_thread(&'static self, thread: usize) {
        let mut me = Me { thread, current: None };
        for (index, step) in self.plan.steps.iter().enumerate() {
            if step.thread != thread {
                continue;
            }
            self.wait_for(&step.after);
            self.at[thread].store(index + 1, Ordering::SeqCst);
            if let Err(fault) = self.step(&mut me, index) {
                self.fail(index, &fault);
            }
            self.finish(index);
        }
        self.at[thread].store(0, Ordering::SeqCst);
        // No thread ends while others work: there the driver can wait for itself, natively too (`docs/internals/testing.md`).
        let all: Vec<usize> = (0..self.plan.steps.len()).collect();
        self.wait_for(&all);
    }

    fn wait_for(&self, steps: &[usize]) {
        if steps.is_empty() {
            return;
        }
        let mut over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
        while !steps.iter().all(|&step| over[step]) {
            over = self.changed.wait(over).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until a thread has been in one step for a while, or its step `last` is over.
    fn until_held_up(&self, thread: usize, last: usize) {
        let (mut at, mut since) = (0, Instant::now());
        while since.elapsed() < HELD_UP {
            let now = self.at[thread].load(Ordering::SeqCst);
            if now != std::mem::replace(&mut at, now) {
                since = Instant::now();
            }
            if self.over.lock().unwrap_or_else(PoisonError::into_inner)[last] {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn finish(&self, step: usize) {
        self.over.lock().unwrap_or_else(PoisonError::into_inner)[step] = true;
        self.changed.notify_all();
    }

    fn step(&'static self, me: &mut Me, index: usize) -> Result<(), Fault> {
        let step = &self.plan.steps[index];
        if let Op::Window { .. } = step.op {
            self.windows.meet(index);
        }
        let _held = self.exclusion.hold(&step.excludes);
        if let Some(context) = step.context
            && me.current != Some(context)
        {
            self.make_current(context)?;
            me.current = Some(context);
        }
        if self.verbose {
            eprintln!("{index} thread {}: {:?}", me.thread, step.op);
        }
        self.operate(me, index, &step.op)
    }

    /// A fault ends the process: the printed line says where it happened.
    fn fail(&self, index: usize, fault: &Fault) -> ! {
        let step = &self.plan.steps[index];
        println!(
            "storm: seed {} step {index} (pick {}) thread {}: {:?}: {fault}",
            self.plan.seed, step.pick, step.thread, step.op
        );
        self.whereabouts();
        // SAFETY: ends the process; other threads may be in the driver.
        unsafe { libc::_exit(1) }
    }

    /// The number of steps that are over.
    pub(crate) fn steps_over(&self) -> usize {
        self.over.lock().unwrap_or_else(PoisonError::into_inner).iter().filter(|&&over| over).count()
    }

    /// Prints the position of each thread.
    pub(crate) fn whereabouts(&self) {
        for (thread, at) in self.at.iter().enumerate() {
            if let Some(step) = at.load(Ordering::SeqCst).checked_sub(1) {
                println!("storm: thread {thread} is at step {step}: {:?}", self.plan.steps[step].op);
            }
        }
    }

    /// Prints the result when all contents have been checked but those of work left in flight. False: a host function
    /// did not run, or a kernel was the first to touch memory.
    fn conclude(&self) -> bool {
        let all: Vec<usize> = (0..self.plan.steps.len()).collect();
        self.wait_for(&all);
        let expected = self.plan.counts.callbacks;
        // A storm loses patience sooner.
        let begin = Instant::now();
        while self.callbacks.load(Ordering::SeqCst) < expected && begin.elapsed() < waits::PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
        let ran = self.callbacks.load(Ordering::SeqCst);
        let words = self.words.load(Ordering::SeqCst);
        let mut touched = 0u64;
        if self.populated
            && cu!(self.driver, "nvsimTouched", &raw mut touched => *mut u64).is_ok()
            && touched > 0
        {
            println!(
                "storm: seed {} step {}: kernels were the first to touch {} KiB, expected none",
                self.plan.seed,
                self.plan.steps.len(),
                touched >> 10
            );
            return false;
        }
        println!(
            "storm: seed {}: {} steps, {words} words as expected, host functions expected {expected} and ran {ran}",
            self.plan.seed,
            self.plan.steps.len()
        );
        ran == expected
    }

    /// The handle of a stream, as the driver takes it.
    pub(crate) fn stream(&self, stream: Id) -> usize {
        match self.plan.streams[stream].kind {
            StreamKind::Legacy => stream % 2,
            StreamKind::PerThread(_) => 2,
            _ => self.streams.get(stream) as usize,
        }
    }
}
