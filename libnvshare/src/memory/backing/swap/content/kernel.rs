//! The kernel that looks at pieces of memory, in each context that has memory which the library maps.
//!
//! `kernel.cu` is its source, and `kernel.ptx` what the driver compiles. It is loaded in the background as soon as a context
//! has such memory, since compiling takes a tenth of a second the first time. It is launched once there: the driver loads a
//! kernel at its first launch, and that can wait for functions of the host (measured). This first launch looks at known memory,
//! and if it does not see there what it must, the kernel is not used.
//!
//! The list of pieces and the kernel's answers are in page-locked memory, which the kernel reaches by itself.

use std::ffi::{CStr, c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use nvshare_client::content::{self, ContentCheck, Hash, KEY_BYTES, Keys};

use super::mode;
use crate::driver;
use crate::driver::types::{
    CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, CUdeviceptr, CUfunction,
};
use crate::memory::backing::swap::chunks::{begin, quiesce, wait};
use crate::memory::mapping::GRANULE;
use crate::memory::mapping::host_pool::{self, HostPool, Slot};
use crate::process::config::Content;
use crate::process::lock::lock;
use crate::process::{lifecycle, log, threads};
use crate::work::contexts::Context;

const PTX: &CStr = match CStr::from_bytes_with_nul(concat!(include_str!("kernel.ptx"), "\0").as_bytes()) {
    Ok(ptx) => ptx,
    Err(_) => c"",
};
const NAME: &CStr = c"nvshare_content";
/// Threads of a block; a block looks at a piece.
const THREADS: c_uint = 512;
/// Bytes of a word of the hash.
const WORD: u64 = 16;

/// The kernel's answer about a piece.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Written {
    hash: [u64; 2],
    /// 0: the piece was not looked at; 1: it is all zero; 2: it is not.
    state: u32,
    unused: u32,
}

/// Pieces of a launch, at most: the list and what is written fill a granule.
const MAX_PIECES: usize = GRANULE as usize / (size_of::<CUdeviceptr>() + size_of::<Written>());
/// Bytes of the memory that the first launch looks at: it is behind a list of two.
const TRIAL: usize = 16 * 1024;

/// The kernel in one context.
#[derive(Debug)]
struct Kernel {
    context: Arc<Context>,
    function: CUfunction,
    buffer: Buffer,
}

/// The memory of the list and the answers, used by one look at a time.
#[derive(Debug)]
struct Buffer {
    slot: Slot,
    /// Keeps the memory.
    _pool: Arc<HostPool>,
    using: Mutex<()>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        host_pool::give_back(vec![self.slot]);
    }
}

#[derive(Debug)]
enum State {
    Loading,
    Ready(Arc<Kernel>),
    Refused,
}

static KERNELS: Mutex<Vec<(Arc<Context>, State)>> = Mutex::new(Vec::new());

/// The secret of this process.
fn keys() -> Option<&'static Keys> {
    static KEYS: OnceLock<Option<Keys>> = OnceLock::new();
    let make = || {
        let mut random = [0u8; KEY_BYTES];
        // SAFETY: a buffer of this length.
        let got = unsafe { libc::getrandom(random.as_mut_ptr().cast(), KEY_BYTES, libc::GRND_NONBLOCK) };
        (got == KEY_BYTES as isize).then(|| Keys::new(&random))
    };
    KEYS.get_or_init(make).as_ref()
}

/// A context has memory that will have to be looked at: loads the kernel there, in the background.
pub(in super::super) fn prepare(context: &Arc<Context>) {
    if mode() == Content::Off {
        return;
    }
    {
        let mut kernels = lock(&KERNELS);
        if kernels.iter().any(|(known, _)| Arc::ptr_eq(known, context)) {
            return;
        }
        kernels.retain(|(known, _)| !known.life().is_over());
        kernels.push((Arc::clone(context), State::Loading));
    }
    let of = Arc::clone(context);
    let begun = threads::spawn_worker("nvshare-content", move || {
        let loaded = Kernel::load(&of);
        set(&of, loaded.map(Arc::new));
    });
    if !begun {
        set(context, Err("no thread can be started".to_owned()));
    }
}

fn set(context: &Arc<Context>, loaded: Result<Arc<Kernel>, String>) {
    let state = match loaded {
        Ok(kernel) => State::Ready(kernel),
        Err(why) => {
            // A program that ends a moment after its first allocation has no use for the line.
            if context.life().is_alive() && !lifecycle::is_exiting() {
                log_refused(&why);
            }
            State::Refused
        }
    };
    let is_ready = matches!(state, State::Ready(_));
    if let Some((_, known)) = lock(&KERNELS).iter_mut().find(|(known, _)| Arc::ptr_eq(known, context)) {
        *known = state;
    }
    if is_ready {
        log::debug(format_args!("the kernel that looks at memory is loaded"));
    }
}

fn log_refused(why: &str) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        log::warn(format_args!("memory is copied whole, zeros and what has not changed too: {why}"));
    }
}

/// A context has ended, and its kernel with it.
pub(in super::super) fn forget_context(context: &Arc<Context>) {
    lock(&KERNELS).retain(|(known, _)| !Arc::ptr_eq(known, context));
}

/// Whether it is not known yet if the kernel can be used in a context.
pub(in super::super) fn is_loading(context: &Arc<Context>) -> bool {
    let is_it = |(known, state): &(Arc<Context>, State)| {
        Arc::ptr_eq(known, context) && matches!(state, State::Loading)
    };
    lock(&KERNELS).iter().any(is_it)
}

/// The kernel in a context. `None`: it is not there, or not so far.
fn find(context: &Arc<Context>) -> Option<Arc<Kernel>> {
    let find = |(known, state): &(Arc<Context>, State)| match state {
        State::Ready(kernel) if Arc::ptr_eq(known, context) => Some(Arc::clone(kernel)),
        _ => None,
    };
    lock(&KERNELS).iter().find_map(find)
}

/// Whether [`launch_kernel`] can launch the kernel in a context.
pub(in crate::memory) fn has_kernel(context: &Arc<Context>) -> bool {
    find(context).is_some()
}

/// Launches the kernel in a context, for nothing but the launch, and waits for it.
///
/// # Errors
/// It is not there, or the context ends or is broken.
pub(in crate::memory) fn launch_kernel(context: &Arc<Context>) -> Result<(), String> {
    let kernel = find(context).ok_or("the kernel is not there")?;
    let list = kernel.buffer.slot.memory() as CUdeviceptr;
    kernel.look(&[list], 1, false).map(|_| ())
}

/// Looks at pieces of a context's memory, each a granule. The memory must stay mapped until this returns. `None`: the kernel is
/// not there, or the context ends or is broken.
pub(super) fn look(context: &Arc<Context>, pieces: &[CUdeviceptr]) -> Option<Vec<Option<ContentCheck>>> {
    let kernel = find(context)?;
    let mut seen = Vec::with_capacity(pieces.len());
    for part in pieces.chunks(MAX_PIECES) {
        seen.extend(kernel.look(part, GRANULE / WORD, mode() != Content::Zeros).ok()?);
    }
    Some(seen)
}

impl Kernel {
    fn load(context: &Arc<Context>) -> Result<Self, String> {
        let attribute = CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM;
        if driver::device_attribute(context.device(), attribute) != Ok(1) {
            return Err("the card cannot reach memory of the host".to_owned());
        }
        keys().ok_or("the system has no random numbers yet")?;
        let load = || driver::load_kernel(PTX, NAME);
        let function = match context.with(load) {
            Ok(loaded) => {
                loaded.map_err(|error| format!("the driver does not compile the kernel: {error:?}"))?
            }
            Err(_) => return Err("the context ends".to_owned()),
        };
        let pool = host_pool::of(context);
        let slots = pool.take(GRANULE).map_err(|why| format!("no memory of the host: {why:?}"))?;
        let slot = *slots.first().ok_or("no memory of the host")?;
        let buffer = Buffer { slot, _pool: pool, using: Mutex::new(()) };
        let kernel = Self { context: Arc::clone(context), function, buffer };
        kernel.tried().map(|()| kernel)
    }

    /// Launches the kernel for memory whose contents are known.
    fn tried(&self) -> Result<(), String> {
        let behind = self.buffer.slot.memory().cast::<u8>();
        // SAFETY: the end of the buffer, which a list of two does not reach, and which nobody else has yet.
        let trial = unsafe { std::slice::from_raw_parts_mut(behind.add(GRANULE as usize - TRIAL), TRIAL) };
        let half = TRIAL / 2;
        trial
            .iter_mut()
            .zip(0u32..)
            .for_each(|(byte, i)| *byte = (i.wrapping_mul(2_654_435_761) >> 13) as u8);
        trial.iter_mut().skip(half).for_each(|byte| *byte = 0);
        let expected = keys().and_then(|keys| trial.get(..half).map(|data| content::look(data, keys)));
        let at = trial.as_ptr() as CUdeviceptr;
        let seen = self.look(&[at, at + half as u64], half as u64 / WORD, true);
        match seen.as_deref() {
            Ok([data, zeros]) if *data == expected && *zeros == Some(ContentCheck::Zero) => Ok(()),
            Ok(_) => Err("the kernel does not see what is there".to_owned()),
            Err(why) => Err(why.clone()),
        }
    }

    /// Looks at pieces of `words` words each; there are at most [`MAX_PIECES`].
    fn look(
        &self,
        pieces: &[CUdeviceptr],
        words: u64,
        hashes: bool,
    ) -> Result<Vec<Option<ContentCheck>>, String> {
        let _using = lock(&self.buffer.using);
        let list = self.buffer.slot.memory().cast::<CUdeviceptr>();
        let count = pieces.len().min(MAX_PIECES);
        // SAFETY: the buffer has room for this many of both, aligned, as a granule is a multiple of all sizes.
        let answers = unsafe {
            let answers = list.add(count).cast::<Written>();
            std::ptr::copy_nonoverlapping(pieces.as_ptr(), list, count);
            (0..count).for_each(|i| answers.add(i).write(Written::default()));
            answers
        };
        let mut keys = *keys().ok_or("no keys")?;
        let (mut words, mut hashes) = (words as u32, u32::from(hashes));
        let (mut from, mut to) = (list, answers);
        let mut parameters: [*mut c_void; 5] = [
            (&raw mut from).cast(),
            (&raw mut to).cast(),
            (&raw mut words).cast(),
            (&raw mut hashes).cast(),
            (&raw mut keys).cast(),
        ];
        let launch = || {
            begin(&self.context, |stream| {
                // SAFETY: the kernel takes these five. The list and the answers live as long as this, and this function waits
                // for the kernel. The pieces are mapped until it returns.
                unsafe { driver::launch(self.function, count as c_uint, THREADS, &mut parameters, stream) }
            })
        };
        let behind = match self.context.with(launch) {
            Ok(Ok(behind)) => behind,
            // The kernel may have been launched, and the event refused.
            Ok(Err(error)) => {
                quiesce(&self.context);
                return Err(format!("the kernel is not launched: {error:?}"));
            }
            Err(_) => return Err("the context ends".to_owned()),
        };
        wait(Some(&behind)).map_err(|error| format!("the kernel fails: {error:?}"))?;
        // SAFETY: the answers, which the kernel has written by now.
        let answers = (0..count).map(|i| unsafe { answers.add(i).read_volatile() });
        let seen = |written: Written| match written.state {
            1 => Some(ContentCheck::Zero),
            2 => Some(ContentCheck::Data((hashes != 0).then_some(Hash(written.hash)))),
            _ => None,
        };
        Ok(answers.map(seen).collect())
    }
}
