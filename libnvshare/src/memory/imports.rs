//! Memory of other processes that the program has opened by a handle of the library (CUDA IPC). It is charged to the process that it
//! is of, and stays on the card while it is open here. That process is told when it is closed.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nvshare_proto::ThrottledLine;

use super::handles::{Extent, Handle, Lost, Word};
use super::mapping::peers;
use super::sharers::Sharing;
use crate::driver::types::{CUcontext, CUdevice, CUdeviceptr, CUipcMemHandle, CUresult};
use crate::driver::{self, Relaxed};
use crate::process::lock::{Counted, lock};
use crate::process::{answering, lifecycle, log, threads};
use crate::work::contexts::Context;
use crate::work::drain::{Drain, SharedDrain};

/// The only flag of `cuIpcOpenMemHandle`, which the driver wants (`CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`).
const LAZY_ENABLE_PEER_ACCESS: u32 = 1;
/// For how long a close waits for work. Beside a capture, or where work waits for the thread that closes, it would never end.
const PATIENCE: Duration = Duration::from_millis(50);

/// The pause between two tries to tell a process that does not hear. A try may take as long as a hand-over may wait for it.
const BEFORE_AGAIN: Duration = Duration::from_millis(200);

/// Memory that a process has given this one, which is returned when this is dropped.
#[derive(Debug)]
struct Borrowed {
    handle: Handle,
    _sharing: Sharing,
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        // With this process all that it has is returned.
        if !lifecycle::is_exiting() && !lifecycle::is_forked() {
            give_back(self.handle);
        }
    }
}

/// Memory that is unmapped, and whose process could not be told so: it had too many to hear, or this one had no descriptor left.
static UNTOLD: Counted<Vec<Handle>> = Counted::new(Vec::new(), Vec::len);

fn tell(handle: &Handle) -> bool {
    answering::tell(&handle.exporter, &Word::Return(*handle).bytes())
}

fn give_back(handle: Handle) {
    // A process that did not hear the last word does not hear this one.
    let is_deaf = UNTOLD.read(|all| all.iter().any(|untold| untold.exporter == handle.exporter));
    if is_deaf || !tell(&handle) {
        UNTOLD.change(|all| all.push(handle));
    }
}

/// Tells the processes that could not be told, up to the first that does not hear. Its words are behind all others at the next try.
fn tell_untold() {
    static NEXT: Mutex<Option<Instant>> = Mutex::new(None);
    if UNTOLD.count() == 0 {
        return;
    }
    let now = Instant::now();
    {
        let mut next = lock(&NEXT);
        if next.is_some_and(|next| now < next) {
            return;
        }
        *next = Some(now + BEFORE_AGAIN);
    }
    let mut all = UNTOLD.change(std::mem::take);
    let told = all.iter().take_while(|handle| tell(handle)).count();
    let mut left = all.split_off(told);
    if let Some(&Handle { exporter: deaf, .. }) = left.first() {
        left.sort_by_key(|handle| handle.exporter == deaf);
        UNTOLD.change(|all| all.append(&mut left));
    }
}

/// Memory that is mapped at addresses of the library.
#[derive(Debug)]
struct Mapping {
    at: CUdeviceptr,
    parts: Vec<u64>,
    /// Returned after the memory is unmapped.
    _memory: Borrowed,
}

/// Memory that was opened.
#[derive(Debug)]
struct Import {
    handle: Handle,
    mapping: Mapping,
    /// The address that the program knows, and bytes.
    pointer: CUdeviceptr,
    asked: u64,
    context: Arc<Context>,
    /// How often it has to be closed.
    times: u32,
}

static IMPORTS: Mutex<Vec<Import>> = Mutex::new(Vec::new());
/// A mapping that was closed while work may have used it, and the work before that.
#[derive(Debug)]
struct Closed {
    mapping: Mapping,
    before: SharedDrain,
}

static CLOSED: Counted<Vec<Arc<Closed>>> = Counted::new(Vec::new(), Vec::len);

impl Mapping {
    fn span(&self) -> u64 {
        self.parts.iter().sum()
    }

    /// Maps what a process has given, for a device and its peers.
    fn make(
        given: &Extent,
        descriptors: Vec<OwnedFd>,
        memory: Borrowed,
        device: CUdevice,
    ) -> Result<Self, CUresult> {
        let _running = lifecycle::hold_off_exit().ok_or(CUresult::DEINITIALIZED)?;
        let _relaxed = Relaxed::begin();
        let span = given.parts.iter().sum();
        let at = driver::reserve_addresses(span)?;
        let mut mapping = Self { at, parts: Vec::new(), _memory: memory };
        let mapped = given.parts.iter().zip(descriptors).try_for_each(|(&bytes, descriptor)| {
            let physical = driver::import_physical(&descriptor)?;
            let mapped = driver::map(at + mapping.span(), bytes, physical);
            // The memory lives as long as it is mapped.
            let _ = driver::release_physical(physical);
            mapped.map(|()| mapping.parts.push(bytes))
        });
        let made = mapped.and_then(|()| peers::allow_all(at, span, device));
        if let Err(error) = made {
            mapping.unmap();
            // Some parts may be missing, and the addresses are the whole range's.
            if mapping.span() != span {
                let _ = driver::free_addresses(at, span);
            }
            return Err(error);
        }
        Ok(mapping)
    }

    /// Unmaps memory that no work uses.
    fn unmap(&self) {
        let Some(_running) = lifecycle::hold_off_exit() else { return };
        let _relaxed = Relaxed::begin();
        let mut at = self.at;
        for &bytes in &self.parts {
            if let Err(error) = driver::unmap(at, bytes) {
                log::warn(format_args!("unmapping {bytes} bytes at {at:#x}: {error:?}"));
            }
            at += bytes;
        }
        // Not where a part is still mapped: the driver refuses it.
        let _ = driver::free_addresses(self.at, self.span());
    }

    /// Unmaps it once the work that may use it is complete, which may be later.
    fn unmap_behind(self, device: CUdevice) {
        let _whole = threads::Uncancelled::begin();
        let (mut before, begin) = (Drain::of(device), Instant::now());
        while before.poll() > 0 && !lifecycle::is_exiting() {
            if begin.elapsed() >= PATIENCE {
                let closed = Closed { mapping: self, before: SharedDrain::new(before) };
                CLOSED.change(|all| all.push(Arc::new(closed)));
                return;
            }
            threads::pause();
        }
        self.unmap();
    }
}

/// Whether this process has memory of others.
pub(crate) fn has_any() -> bool {
    !lock(&IMPORTS).is_empty() || are_any_closed()
}

/// Whether mappings wait to be unmapped, or processes to be told of those that were.
pub(super) fn are_any_closed() -> bool {
    CLOSED.count() + UNTOLD.count() > 0 && !lifecycle::is_forked()
}

/// Unmaps what was closed earlier, as far as no work uses it any more. Only contexts that may be `asked` are looked at.
pub(super) fn unmap_closed(asked: &dyn Fn(&Context) -> bool) {
    if !are_any_closed() {
        return;
    }
    // It is unmapped before its process hears that it was returned.
    let _whole = threads::Uncancelled::begin();
    tell_untold();
    // The driver is asked without the lock: it may not answer before another thread of the program goes on.
    let all = CLOSED.read(Vec::clone);
    for over in all.iter().filter(|closed| closed.before.poll_in(asked)) {
        let taken = CLOSED.change(|all| {
            let at = all.iter().position(|closed| Arc::ptr_eq(closed, over));
            at.map(|at| all.swap_remove(at))
        });
        taken.iter().for_each(|closed| closed.mapping.unmap());
    }
}

/// The processes whose memory is being opened, each by one thread.
static OPENING: Mutex<Vec<answering::Name>> = Mutex::new(Vec::new());
static OPENED: Condvar = Condvar::new();

/// The calling thread opens memory of a process, and no other thread does: what two of them want is opened once. A process that does not
/// answer keeps nobody from another one's memory.
#[derive(Debug)]
struct Opening(answering::Name);

impl Opening {
    fn begin(exporter: answering::Name) -> Self {
        let mut all = lock(&OPENING);
        while all.contains(&exporter) {
            all = OPENED.wait(all).unwrap_or_else(PoisonError::into_inner);
        }
        all.push(exporter);
        Self(exporter)
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        lock(&OPENING).retain(|exporter| *exporter != self.0);
        OPENED.notify_all();
    }
}

/// Opens memory of another process in a context, by a handle of the library; opened again, it is at the same address. `None`: the
/// handle is not the library's.
///
/// # Errors
/// As the driver's function (measured): INVALID_VALUE for other flags, INVALID_CONTEXT in the process that the memory is of; where the
/// memory cannot be had, see [`fetch`].
pub(crate) fn open(
    handle: &CUipcMemHandle,
    flags: u32,
    context: impl FnOnce() -> Option<Arc<Context>>,
) -> Option<Result<CUdeviceptr, CUresult>> {
    let handle = Handle::read(handle)?;
    Some(open_ours(handle, flags, context()))
}

fn open_ours(handle: Handle, flags: u32, context: Option<Arc<Context>>) -> Result<CUdeviceptr, CUresult> {
    // Memory that has come is entered, and so returned one day.
    let _whole = threads::Uncancelled::begin();
    if flags != LAZY_ENABLE_PEER_ACCESS {
        return Err(CUresult::INVALID_VALUE);
    }
    let context = context.ok_or(CUresult::INVALID_CONTEXT)?;
    if answering::own_name() == Some(handle.exporter) {
        return Err(CUresult::INVALID_CONTEXT);
    }
    let _one = Opening::begin(handle.exporter);
    let device = context.device();
    let is_it = |known: &&mut Import| known.handle == handle && known.context.device() == device;
    if let Some(known) = lock(&IMPORTS).iter_mut().find(is_it) {
        known.times += 1;
        return Ok(known.pointer);
    }
    let (given, descriptors, memory) = fetch(handle).map_err(|(error, why)| {
        static FAILS: ThrottledLine = ThrottledLine::new(log::warn);
        FAILS.say(format_args!("memory of another process cannot be opened: {why}"));
        error
    })?;
    let mapping = Mapping::make(&given, descriptors, memory, device)?;
    let (pointer, asked) = (mapping.at + given.offset, given.asked);
    lock(&IMPORTS).push(Import { handle, mapping, pointer, asked, context, times: 1 });
    // Peers that were enabled meanwhile did not find it on the list.
    if peers::are_any() {
        set_peers(device, None);
    }
    Ok(pointer)
}

/// Sets the access to memory that was opened on a device, as peers have it now.
pub(crate) fn set_peers(device: CUdevice, may_no_more: Option<CUdevice>) {
    let Some(_running) = lifecycle::hold_off_exit() else { return };
    let _relaxed = Relaxed::begin();
    // With the lock, since memory that is closed meanwhile is unmapped.
    for Import { mapping, .. } in lock(&IMPORTS).iter().filter(|import| import.context.device() == device) {
        peers::set(mapping.at, mapping.span(), device, may_no_more);
    }
}

/// Whether memory was opened on a device.
pub(crate) fn are_any_on(device: CUdevice) -> bool {
    lock(&IMPORTS).iter().any(|import| import.context.device() == device)
}

/// Asks the process that the memory is of. The driver answers INVALID_VALUE where that process is there and has no such memory, and
/// INVALID_HANDLE where it is gone (measured on an H200). Where the memory is lost, the error is that of the other process.
fn fetch(handle: Handle) -> Result<(Extent, Vec<OwnedFd>, Borrowed), (CUresult, String)> {
    let unknown = |why: &str| (CUresult::INVALID_HANDLE, why.to_owned());
    let (answer, descriptors) =
        answering::ask(&handle.exporter, &Word::Get(handle).bytes()).map_err(|why| unknown(&why))?;
    if answer.is_empty() {
        return Err((CUresult::INVALID_VALUE, "it is freed, or the handle is forged".to_owned()));
    }
    if let Some(Lost(error)) = Lost::read(&answer) {
        return Err((error, format!("it is lost: {error:?}")));
    }
    let memory = Borrowed { handle, _sharing: Sharing::begin(&handle.exporter) };
    let given = Extent::read(&answer).ok_or_else(|| unknown("its answer makes no sense"))?;
    if given.parts.len() != descriptors.len() {
        return Err(unknown("not all of its descriptors have come: this process may have too many open"));
    }
    Ok((given, descriptors, memory))
}

/// Closes opened memory once. `None`: the library has not opened it.
pub(crate) fn close(pointer: CUdeviceptr) -> Option<()> {
    let mut imports = lock(&IMPORTS);
    let at = imports.iter().position(|import| import.pointer == pointer)?;
    let import = imports.get_mut(at)?;
    import.times -= 1;
    if import.times > 0 {
        return Some(());
    }
    let Import { mapping, context, .. } = imports.swap_remove(at);
    drop(imports);
    mapping.unmap_behind(context.device());
    Some(())
}

/// Looks at the opened memory that a pointer leads to.
fn look<T>(pointer: CUdeviceptr, look: impl FnOnce(&Import) -> T) -> Option<T> {
    let imports = lock(&IMPORTS);
    let is_in = |import: &&Import| pointer.checked_sub(import.pointer).is_some_and(|at| at < import.asked);
    imports.iter().find(is_in).map(look)
}

/// The opened memory that a pointer leads to: its begin and bytes.
pub(crate) fn range_of(pointer: CUdeviceptr) -> Option<(CUdeviceptr, u64)> {
    look(pointer, |import| (import.pointer, import.asked))
}

/// The context in which the memory was opened that a pointer leads to.
pub(crate) fn context_of(pointer: CUdeviceptr) -> Option<CUcontext> {
    look(pointer, |import| import.context.handle())
}

/// A context has ended, and with it all that was opened there.
pub(super) fn forget_context(context: &Arc<Context>) {
    let _whole = threads::Uncancelled::begin();
    let mut imports = lock(&IMPORTS);
    let (gone, stays): (Vec<Import>, Vec<Import>) =
        std::mem::take(&mut *imports).into_iter().partition(|import| Arc::ptr_eq(&import.context, context));
    *imports = stays;
    drop(imports);
    gone.iter().for_each(|import| import.mapping.unmap());
    unmap_closed(&|asked| std::ptr::eq(asked, &raw const **context));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_hears_nothing_costs_no_more_time_for_each_word() {
        let exporter = answering::random().unwrap();
        let deaf = answering::tests::deaf(&exporter);
        let begin = Instant::now();
        for allocation in 0..200 {
            give_back(Handle { exporter, allocation, secret: [0; 16] });
            tell_untold();
        }
        assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
        assert!(UNTOLD.count() > 100, "it hears nothing");
        // It has ended.
        drop(deaf);
        while UNTOLD.count() > 0 {
            assert!(begin.elapsed() < Duration::from_secs(20));
            tell_untold();
            threads::pause();
        }
    }
}
