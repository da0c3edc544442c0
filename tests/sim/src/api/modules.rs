//! Modules, their functions, and launches of those.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{api, give_new, status, twins, with_place};
use crate::capture::Kind;
use crate::content;
use crate::host_functions;
use crate::memory::Piece;
use crate::objects::{Function, Module};
use crate::process::{self, Failure, INVALID_HANDLE, INVALID_VALUE, JIT_DISABLED, NOT_FOUND};
use crate::stream::{Work, unique};
use crate::world::BLOCK;

/// The members of `CUlaunchConfig` that are read.
#[repr(C)]
#[derive(Debug)]
pub(super) struct LaunchConfig {
    extents: [c_uint; 7],
    stream: usize,
}

api! {
    fn cuModuleLoadData(place: *mut usize, image: *const c_char) { unsafe { give_new(place, || load(image)) } }
    fn cuModuleLoadDataEx(place: *mut usize, image: *const c_char, _count: c_uint, _options: *mut c_int, _values: *mut *mut c_void) { unsafe { give_new(place, || load(image)) } }
    fn cuModuleUnload(module: usize) { status(process::get().and_then(|p| {
        let mut tables = p.tables();
        let module = tables.modules.end(module)?;
        tables.functions.end_those(|function| function.module == module.id);
        let memory = module.memory.and_then(|base| tables.memory.remove(&base));
        drop(tables);
        memory.iter().for_each(|allocation| p.give_back(allocation));
        Ok(())
    })) }
    fn cuModuleGetFunction(place: *mut usize, module: usize, name: *const c_char) {
        if name.is_null() { return INVALID_VALUE }
        // SAFETY: a C string.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        unsafe { give_new(place, || {
            let p = process::get()?;
            let mut tables = p.tables();
            let of = tables.modules.get(module)?;
            let (module, context, family) = (of.id, of.context, of.family);
            if !of.entries.contains(&name) { return Err(NOT_FOUND) }
            // A function has one handle, however often the program asks for it.
            if let Some(known) = tables.functions.find(|f| f.module == module && f.name == name) { return Ok(known) }
            Ok(tables.functions.add(Function { module, context, family, name, is_loaded: Arc::default() }))
        }) }
    }
}

twins! { per_thread:
    fn cuLaunchKernel / cuLaunchKernel_ptsz (function: usize, gx: c_uint, _gy: c_uint, _gz: c_uint, _bx: c_uint, _by: c_uint, _bz: c_uint, _shared: c_uint, stream: usize, params: *mut *mut c_void, _extra: *mut *mut c_void) {
        status(unsafe { launch(function, gx, stream, per_thread, params) })
    }
    fn cuLaunchCooperativeKernel / cuLaunchCooperativeKernel_ptsz (function: usize, _gx: c_uint, _gy: c_uint, _gz: c_uint, _bx: c_uint, _by: c_uint, _bz: c_uint, _shared: c_uint, stream: usize, params: *mut *mut c_void) {
        status(unsafe { launch(function, 1, stream, per_thread, params) })
    }
    fn cuLaunchKernelEx / cuLaunchKernelEx_ptsz (config: *const LaunchConfig, function: usize, params: *mut *mut c_void, _extra: *mut *mut c_void) {
        // SAFETY: null, or readable.
        let Some(config) = (unsafe { config.as_ref() }) else { return INVALID_VALUE };
        status(unsafe { launch(function, config.extents[0], config.stream, per_thread, params) })
    }
}

/// Loads a module. Only the names of its entries are read from the PTX.
fn load(image: *const c_char) -> Result<usize, Failure> {
    if image.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: PTX is a C string.
    let text = unsafe { CStr::from_ptr(image) }.to_string_lossy();
    let name = |rest: &str| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().map(str::to_owned);
    let entries: Vec<String> = text.split(".entry ").skip(1).filter_map(name).collect();
    let p = process::get()?;
    if p.world.config().refused_ptx.as_ref().is_some_and(|refused| entries.contains(refused)) {
        return Err(JIT_DISABLED);
    }
    drop(p.creation());
    let tables = p.tables();
    let context = tables.current()?;
    let (gpu, context, family) = (context.gpu, context.id, context.family);
    drop(tables);
    let memory = p.occupy(gpu, p.world.config().module, context)?;
    let module = Module { id: unique(), context, family, entries, memory };
    Ok(p.tables().modules.add(module))
}

/// # Safety
/// `params` is null or what the function takes.
unsafe fn launch(
    function: usize,
    blocks: u32,
    stream: usize,
    per_thread: bool,
    params: *mut *mut c_void,
) -> Result<(), Failure> {
    let p = process::get()?;
    let mut tables = p.tables();
    let Function { family, ref is_loaded, .. } = *tables.functions.get(function)?;
    let is_loaded = Arc::clone(is_loaded);
    let on = tables.stream(stream, per_thread)?;
    if on.family != family {
        return Err(INVALID_HANDLE);
    }
    // A graph's kernel runs on the card of its stream.
    let name = &tables.functions.get(function)?.name;
    let is_look = name == content::NAME;
    let work = if is_look {
        unsafe { content::work(blocks, params) }
    } else {
        unsafe { kernel_work(name, on.gpu, on.context, params) }
    }?;
    drop(tables);
    wait_for_loading(&is_loaded);
    if is_look {
        content::begins(blocks);
    }
    with_place(stream, per_thread, |p, stream| {
        p.sticky()?;
        let mut tables = p.tables();
        let after = tables.before_new_stacks(&stream);
        tables.submit(&stream, Kind::Kernel, work, after).map(|_| ())
    })
}

/// A function is loaded at its first launch, and loading waits for functions of the host.
fn wait_for_loading(is_loaded: &AtomicBool) {
    if !is_loaded.load(Ordering::Acquire) {
        if process::get().is_ok_and(|p| p.world.config().lazy_loading) {
            host_functions::wait();
        }
        is_loaded.store(true, Ordering::Release);
    }
}

/// The kernels that programs of the test suites launch; on a real card their PTX runs.
///
/// # Safety
/// As for [`launch`].
unsafe fn kernel_work(
    name: &str,
    gpu: usize,
    context: u64,
    params: *mut *mut c_void,
) -> Result<Work, Failure> {
    let p = process::get()?;
    if params.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: each kernel below takes an address, a number of words, a value and a time.
    let (address, words, value, micros) = unsafe {
        (
            *(*params).cast::<u64>(),
            *(*params.add(1)).cast::<u64>(),
            *(*params.add(2)).cast::<u32>(),
            *(*params.add(3)).cast::<u32>(),
        )
    };
    let body: fn(&mut [u8], Piece, u32) = match name {
        "step" => step,
        "fill" => fill,
        _ => return Err(NOT_FOUND),
    };
    let reads_memory = words > 0;
    Ok(Arc::new(move || {
        p.world.run_kernel(gpu, || {
            if reads_memory {
                p.stop_if_out_of_reach(gpu, context, address, words * 4);
                p.touch(address, words * 4, |store, piece| body(store, piece, value));
            }
            std::thread::sleep(Duration::from_micros(u64::from(micros)));
        });
    }))
}

/// The words of the store that a part of a range names, each once, with its index in the block.
fn words(store: &mut [u8], piece: Piece) -> impl Iterator<Item = (u64, &mut [u8; 4])> {
    let real = store.len() as u64;
    let (begin, bytes) = (piece.in_block % real, piece.bytes.min(real));
    let end = begin + bytes;
    let within = move |at: u64| (begin..end).contains(&at) || at + real < end;
    let chunks = store.as_chunks_mut::<4>().0.iter_mut().enumerate();
    chunks.map(|(i, word)| (i as u64, word)).filter(move |(i, _)| within(i * 4))
}

fn step(store: &mut [u8], piece: Piece, value: u32) {
    for (_, word) in words(store, piece) {
        *word = u32::from_ne_bytes(*word).wrapping_add(value).to_ne_bytes();
    }
}

/// The values that the workload client's PTX writes: each word tells its place in the range.
fn fill(store: &mut [u8], piece: Piece, seed: u32) {
    let real = store.len() as u64 / 4;
    let begin = piece.in_block / 4 % real;
    for (word, place) in words(store, piece) {
        let index = piece.in_range / 4 + (word + real - begin) % real;
        let value = seed
            .wrapping_add(((index * 4 / BLOCK) as u32).wrapping_mul(0x9e37_79b1))
            .wrapping_add((index % 1024) as u32 * 2_654_435);
        *place = value.to_ne_bytes();
    }
}
