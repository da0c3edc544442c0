//! A separate process calls the driver as a program does, once alone and once with the library preloaded: a driver
//! that hangs or crashes stops that process and not this one.

#![allow(unsafe_code, reason = "the driver's functions are called")]

use std::env;
use std::ffi::{CStr, OsStr, OsString, c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::io::Read;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nvshare_proto::units::Bytes;
use serde::{Deserialize, Serialize};

use super::report::Finding;
use crate::output::{Done, print_line};

/// A GPU as the driver describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Gpu {
    pub(super) name: String,
    pub(super) bytes: u64,
    concurrent_managed_access: bool,
}

/// The answer of the process, on one line.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Answer {
    /// Whether the library is mapped into the process, so that it was preloaded.
    preloaded: bool,
    /// The driver's library that the loader has found.
    driver: Option<PathBuf>,
    nvml: bool,
    gpus: Result<Vec<Gpu>, String>,
}

/// A driver that does not answer in this time is stuck: opening a GPU that sleeps takes a few seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// `nvshare-ctl probe`
pub(crate) fn probe() -> Done {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    // SAFETY: loading it runs NVIDIA's initialisers, as every program that uses NVML does.
    let nvml = unsafe { libloading::Library::new("libnvidia-ml.so.1") }.is_ok();
    // SAFETY: loading it runs the driver's initialisers, as every CUDA program does.
    let driver = unsafe { libloading::Library::new("libcuda.so.1") };
    let answer = Answer {
        preloaded: maps.contains("libnvshare"),
        driver: driver.as_ref().ok().and_then(place),
        nvml,
        gpus: driver.map_err(|error| error.to_string()).and_then(|driver| ask(&driver)),
    };
    print_line(&serde_json::to_string(&answer).map_err(|error| error.to_string())?)
}

/// The path by which the loader found a library: it alone knows its configuration, its cache, and what a program names beside them.
fn place(library: &libloading::Library) -> Option<PathBuf> {
    // SAFETY: only the address is looked at.
    let function = unsafe { library.get::<*const c_void>(b"cuInit") }.ok()?;
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the loader knows the address, and fills the place; its text is there as long as the library is.
    let name = unsafe {
        if libc::dladdr(*function, found.as_mut_ptr()) == 0 {
            return None;
        }
        CStr::from_ptr(found.assume_init().dli_fname)
    };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

/// Asks the driver for its GPUs.
fn ask(driver: &libloading::Library) -> Result<Vec<Gpu>, String> {
    const CONCURRENT_MANAGED_ACCESS: c_int = 89;
    let name = |error: libloading::Error| error.to_string();
    // SAFETY: the driver's functions of these names have these signatures.
    let (init, count, get, label, total, attribute) = unsafe {
        (
            driver.get::<unsafe extern "C" fn(c_uint) -> c_int>(b"cuInit").map_err(name)?,
            driver.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"cuDeviceGetCount").map_err(name)?,
            driver.get::<unsafe extern "C" fn(*mut c_int, c_int) -> c_int>(b"cuDeviceGet").map_err(name)?,
            driver
                .get::<unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int>(b"cuDeviceGetName")
                .map_err(name)?,
            driver
                .get::<unsafe extern "C" fn(*mut usize, c_int) -> c_int>(b"cuDeviceTotalMem_v2")
                .map_err(name)?,
            driver
                .get::<unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int>(b"cuDeviceGetAttribute")
                .map_err(name)?,
        )
    };
    let check =
        |what: &str, result| if result == 0 { Ok(()) } else { Err(format!("{what}: CUDA error {result}")) };
    // SAFETY: the calls take a flag, then places for the answers.
    unsafe {
        check("cuInit", init(0))?;
        let mut gpus = 0;
        check("cuDeviceGetCount", count(&raw mut gpus))?;
        let one = |index| {
            let (mut device, mut bytes, mut concurrent, mut text) = (0, 0, 0, [0 as c_char; 128]);
            check("cuDeviceGet", get(&raw mut device, index))?;
            check("cuDeviceTotalMem", total(&raw mut bytes, device))?;
            let asked = attribute(&raw mut concurrent, CONCURRENT_MANAGED_ACCESS, device);
            check("cuDeviceGetAttribute", asked)?;
            // The last byte stays zero, whatever the driver writes.
            check("cuDeviceGetName", label(text.as_mut_ptr(), text.len() as c_int - 1, device))?;
            let name = CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned();
            Ok(Gpu { name, bytes: bytes as u64, concurrent_managed_access: concurrent != 0 })
        };
        (0..gpus).map(one).collect()
    }
}

/// The answer of a process without the library.
pub(super) fn unloaded() -> Result<Answer, String> {
    start(None).map(|(answer, _)| answer)
}

impl Answer {
    /// The driver's library that the loader has found.
    pub(super) fn driver(&self) -> Option<&Path> {
        self.driver.as_deref()
    }
}

/// The GPUs that the driver shows without the library.
pub(super) fn alone(answer: Result<Answer, String>, findings: &mut Vec<Finding>) -> Option<Vec<Gpu>> {
    let answer = answer.and_then(|answer| answer.gpus.map(|gpus| (gpus, answer.nvml)));
    let (gpus, nvml) = match answer {
        Ok(answer) => answer,
        Err(error) => {
            let advice = "nvidia-smi and the kernel's log (dmesg) may say more; CUDA error 100 is no GPU, 999 a module that does not match";
            // If no GPU is visible, a driver answers with an error or with no GPU.
            let advice = visible_devices().unwrap_or_else(|| advice.to_owned());
            findings.push(Finding::error("gpus", format!("the driver does not answer: {error}"), advice));
            return None;
        }
    };
    if gpus.is_empty() {
        let advice = visible_devices().unwrap_or_else(|| "nvidia-smi -L names the machine's GPUs".to_owned());
        findings.push(Finding::error("gpus", "the driver shows no GPU", advice));
    }
    for (index, gpu) in gpus.iter().enumerate() {
        let seen = format!("GPU {index}: {}, {}", gpu.name, Bytes(gpu.bytes));
        findings.push(if gpu.concurrent_managed_access {
            Finding::ok("gpus", seen)
        } else {
            let what = "concurrentManagedAccess is 0, as on WSL and some vGPUs";
            Finding::warning(
                "gpus",
                format!("{seen}; {what}"),
                "programs take turns here, and their memory is not moved: all of it has to fit",
            )
        });
        if gpu.name.contains("MIG") {
            findings.push(Finding::ok(
                "mig",
                format!("GPU {index} is a MIG instance and counts as a GPU of its own"),
            ));
        }
    }
    findings.push(if nvml {
        Finding::ok("nvml", "libnvidia-ml.so.1 loads")
    } else {
        let advice = "what contexts take is not measured then: leave enough by --reserve";
        Finding::warning("nvml", "libnvidia-ml.so.1 does not load", advice)
    });
    Some(gpus)
}

/// The variable that hides GPUs from programs of this environment, if there is one.
fn visible_devices() -> Option<String> {
    let visible = env::var("CUDA_VISIBLE_DEVICES").ok()?;
    Some(format!("CUDA_VISIBLE_DEVICES is {visible:?}, and hides GPUs; unset it to see all"))
}

/// Compares the driver's answer with the library to that without it.
pub(super) fn preloaded(library: &Path, expected: &[Gpu], findings: &mut Vec<Finding>) {
    const ADVICE: &str = "the library needs a glibc as new as the one it was built with; the distribution's build runs with any since 2.17";
    findings.push(match start(Some(library)) {
        Err(error) => {
            Finding::error("preload", format!("with the library preloaded, a program fails: {error}"), ADVICE)
        }
        Ok((Answer { preloaded: false, .. }, said)) => {
            Finding::error("preload", format!("the loader does not preload the library: {said}"), ADVICE)
        }
        Ok((Answer { gpus: Err(error), .. }, said)) => {
            let advice = "look at NVSHARE_… variables: a limit that cannot be read lets cuInit fail";
            Finding::error(
                "preload",
                format!("with the library preloaded, the driver fails: {error}; {said}"),
                advice,
            )
        }
        Ok((Answer { gpus: Ok(gpus), .. }, said)) if gpus.len() != expected.len() => Finding::error(
            "preload",
            format!("{} GPUs with the library and {} without; {said}", gpus.len(), expected.len()),
            "report this",
        ),
        Ok(_) => Finding::ok("preload", "a program starts with the library and finds its GPUs"),
    });
}

/// Starts the process; returns its answer, and its lines on standard error.
fn start(library: Option<&Path>) -> Result<(Answer, String), String> {
    let mut command = Command::new(env::current_exe().map_err(|error| error.to_string())?);
    command.arg("probe").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    match library {
        Some(library) => command.env("LD_PRELOAD", OsString::from(library)),
        None => command.env_remove("LD_PRELOAD"),
    };
    let mut child = command.spawn().map_err(|error| error.to_string())?;
    let said = child.stderr.take().map(|mut stderr| {
        thread::spawn(move || {
            let mut text = String::new();
            let _ = stderr.read_to_string(&mut text);
            text
        })
    });
    let out = child.stdout.take().map(|stdout| File::from(std::os::fd::OwnedFd::from(stdout)));
    let status = wait(&mut child)?;
    let said = said.and_then(|said| said.join().ok()).unwrap_or_default();
    let said = said.lines().last().unwrap_or("it says nothing").to_owned();
    let mut text = String::new();
    if let Some(mut out) = out {
        let _ = out.read_to_string(&mut text);
    }
    match serde_json::from_str(&text) {
        Ok(answer) => Ok((answer, said)),
        Err(_) => Err(format!("it ended with {status}: {said}")),
    }
}

fn wait(child: &mut Child) -> Result<std::process::ExitStatus, String> {
    let begin = Instant::now();
    loop {
        if let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
            return Ok(status);
        }
        if begin.elapsed() > PATIENCE {
            let _ = child.kill();
            return Err(format!("no answer within {} s", PATIENCE.as_secs()));
        }
        thread::sleep(Duration::from_millis(5));
    }
}
