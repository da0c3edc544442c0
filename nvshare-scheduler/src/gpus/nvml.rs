//! NVML's knowledge of GPUs. Without NVML, clients say how much memory a GPU has.
//!
//! NVML is asked on a thread of its own: a call may take seconds, or never return when a GPU has fallen off its bus,
//! and the scheduler does not wait for it.

use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvshare_core::Time;
use nvshare_proto::GpuUuid;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use tracing::{debug, info};

/// A GPU as NVML sees it, in bytes.
#[derive(Debug)]
pub(crate) struct NvmlReading {
    /// The GPU's memory.
    pub(crate) total: u64,
    /// Memory of each process: contexts, modules and plain memory. NVML does not see managed memory.
    pub(crate) used: BTreeMap<u32, u64>,
    /// Memory in use that belongs to no process that NVML lists: managed memory, and what that has given up and the driver keeps.
    pub(crate) unowned: u64,
}

/// NVML, on its thread.
#[derive(Debug)]
pub(crate) struct NvmlThread {
    questions: mpsc::Sender<GpuUuid>,
    /// The open question about each GPU.
    asked: BTreeMap<GpuUuid, Question>,
    /// When the last answer came.
    answered_at: Time,
    /// Whether the log says that the next one is overdue.
    is_stuck: bool,
}

/// A question that is not answered yet.
#[derive(Debug)]
struct Question {
    asked_at: Time,
    /// Somebody wants to know what is so later than that.
    is_asked_again: bool,
}

/// A question whose turn it has been for longer may never be answered.
const STUCK_AFTER: Duration = Duration::from_secs(30);

impl NvmlThread {
    /// Starts the thread, which opens NVML when it is first asked, and calls `answer`, with none where NVML is not there or does
    /// not know the GPU. Opening NVML wakes a sleeping GPU, which takes a second, and programs that start wait during
    /// that time: with `--gpu-memory`, NVML is not needed and not opened.
    pub(crate) fn start(answer: impl Fn(GpuUuid, Option<NvmlReading>) + Send + 'static) -> Self {
        let (questions, received) = mpsc::channel::<GpuUuid>();
        let work = move || {
            let (mut nvml, mut tried, mut silent) = (None, None::<Instant>, BTreeSet::new());
            for gpu in received {
                // The driver may be loaded after the scheduler has started.
                if nvml.is_none() && tried.is_none_or(|at| at.elapsed() > TRY_AGAIN_AFTER) {
                    nvml = open(tried.is_none());
                    tried = Some(Instant::now());
                }
                let seen = nvml.as_ref().map(|nvml| look(nvml, gpu));
                if let Some(Err(error)) = &seen
                    && silent.len() < MAX_SILENT
                    && silent.insert(gpu)
                {
                    info!("NVML says nothing of {gpu} ({error}): it is as large as was known before");
                }
                answer(gpu, seen.and_then(Result::ok));
            }
        };
        if let Err(error) = std::thread::Builder::new().name("nvml".to_owned()).spawn(work) {
            info!("no thread for NVML ({error}): GPUs are as large as their clients say");
        }
        Self { questions, asked: BTreeMap::new(), answered_at: Time::ZERO, is_stuck: false }
    }

    /// Asks about a GPU, unless the last question about it is still open.
    pub(crate) fn ask(&mut self, gpu: GpuUuid, now: Time) {
        if let Entry::Vacant(vacant) = self.asked.entry(gpu) {
            vacant.insert(Question { asked_at: now, is_asked_again: false });
            if self.questions.send(gpu).is_err() {
                debug!("NVML is not there to be asked about {gpu}");
            }
        }
    }

    /// Asks about a GPU as it is from now on: the answer to an open question is followed by another.
    pub(crate) fn ask_anew(&mut self, gpu: GpuUuid, now: Time) {
        match self.asked.get_mut(&gpu) {
            Some(open) => open.is_asked_again = true,
            None => self.ask(gpu, now),
        }
    }

    /// Notes that the answer about a GPU has come. Returns when it was asked for. Each answer is of use: one client that has the GPU
    /// looked at over and over would otherwise keep all answers from the others.
    pub(crate) fn answered(&mut self, gpu: GpuUuid, now: Time) -> Option<Time> {
        let Question { asked_at, is_asked_again } = self.asked.remove(&gpu)?;
        (self.answered_at, self.is_stuck) = (now, false);
        if is_asked_again {
            self.ask(gpu, now);
        }
        Some(asked_at)
    }
}

impl NvmlThread {
    /// The GPU that NVML does not answer about, if that is news: it is asked about one after the other, so the oldest question keeps
    /// all others waiting.
    pub(crate) fn newly_stuck(&mut self, now: Time) -> Option<GpuUuid> {
        let (&gpu, oldest) = self.asked.iter().min_by_key(|(_, question)| question.asked_at)?;
        let is_overdue = now.saturating_sub(oldest.asked_at.max(self.answered_at)) > STUCK_AFTER;
        (is_overdue && !std::mem::replace(&mut self.is_stuck, true)).then_some(gpu)
    }
}

/// Where NVML cannot be opened, it is tried again at a question that comes later than this.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(30);

/// Opens NVML. Says why it cannot be opened, if that is to be said.
fn open(is_said: bool) -> Option<Nvml> {
    match Nvml::init() {
        Ok(nvml) => {
            debug!("NVML {:?}, driver {:?}", nvml.sys_nvml_version(), nvml.sys_driver_version());
            Some(nvml)
        }
        Err(error) => {
            if is_said {
                info!("no NVML ({}): GPUs are as large as their clients say", why(&error));
            }
            None
        }
    }
}

/// Why NVML cannot be opened. The loader's message names the library already, so the wrapper's text is left out.
fn why(error: &NvmlError) -> String {
    match error {
        NvmlError::LibloadingError(error) => error.to_string(),
        error => error.to_string(),
    }
}

/// Most GPUs that are logged, once each, as unknown to NVML.
const MAX_SILENT: usize = 64;

/// Asks NVML about a GPU.
fn look(nvml: &Nvml, gpu: GpuUuid) -> Result<NvmlReading, NvmlError> {
    let device = nvml.device_by_uuid(gpu.to_string())?;
    let memory = device.memory_info()?;
    let (mut used, mut listed) = (BTreeMap::new(), BTreeMap::new());
    let graphics = match device.running_graphics_processes() {
        Err(NvmlError::NotSupported | NvmlError::NoPermission) => Vec::new(),
        known => known?,
    };
    for process in device.running_compute_processes()?.into_iter().chain(graphics) {
        // Each process is counted once, however it uses the GPU. A number that this pid namespace does not have may
        // belong to a client under another number.
        if let UsedGpuMemory::Used(bytes) = process.used_gpu_memory {
            listed.insert(process.pid, bytes);
            if is_there(process.pid) {
                used.insert(process.pid, bytes);
            }
        }
    }
    let listed = listed.into_values().fold(0, u64::saturating_add);
    Ok(NvmlReading { total: memory.total, used, unowned: memory.used.saturating_sub(listed) })
}

/// Whether this pid namespace has a process of this number. `/proc` does not say: it may hide processes of other users (`hidepid`).
fn is_there(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| test_kill_process(pid) != Err(Errno::SRCH))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn processes_of_any_user_are_there_until_they_end() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        assert!([std::process::id(), 1, child.id()].into_iter().all(is_there));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(![child.id(), 0, u32::MAX].into_iter().any(is_there));
    }

    #[test]
    fn each_answer_says_when_it_was_asked_for_and_is_followed_by_another_for_one_who_has_asked_since() {
        let (questions, asked) = mpsc::channel();
        let mut nvml =
            NvmlThread { questions, asked: BTreeMap::new(), answered_at: Time::ZERO, is_stuck: false };
        let (gpu, at) = (GpuUuid([1; 16]), Time::from_secs);
        let open = || asked.try_iter().count();
        nvml.ask_anew(gpu, at(1));
        nvml.ask(gpu, at(2));
        assert_eq!((open(), nvml.answered(gpu, at(3)), open()), (1, Some(at(1)), 0));
        nvml.ask(gpu, at(4));
        for second in 5..1000 {
            nvml.ask_anew(gpu, at(second));
            nvml.ask_anew(gpu, at(second));
            assert_eq!((open(), nvml.answered(gpu, at(second))), (1, Some(at(second - 1))));
        }
        assert_eq!((nvml.answered(gpu, at(1000)), nvml.answered(gpu, at(1000))), (Some(at(999)), None));
    }

    #[test]
    fn a_question_that_is_not_answered_is_told_of_once_until_an_answer_comes() {
        let (questions, _asked) = mpsc::channel();
        let mut nvml =
            NvmlThread { questions, asked: BTreeMap::new(), answered_at: Time::ZERO, is_stuck: false };
        let (stuck, other, at) = (GpuUuid([2; 16]), GpuUuid([1; 16]), Time::from_secs);
        nvml.ask(stuck, at(1));
        nvml.ask(other, at(2));
        let told = [31, 32, 33, 90].map(|second| nvml.newly_stuck(at(second)));
        assert_eq!(told, [None, Some(stuck), None, None]);
        nvml.answered(stuck, at(91));
        let told = [92, 121, 122, 123].map(|second| nvml.newly_stuck(at(second)));
        assert_eq!(told, [None, None, Some(other), None]);
        nvml.answered(other, at(124));
        assert_eq!(nvml.newly_stuck(at(200)), None);
    }

    #[test]
    fn a_library_that_is_missing_is_one_error() {
        let path = std::ffi::OsStr::new("/no/such/libnvidia-ml.so.1");
        let error = Nvml::builder().lib_path(path).init().expect_err("there is none");
        assert!(why(&error).starts_with("/no/such/libnvidia-ml.so.1: "), "{}", why(&error));
    }
}
