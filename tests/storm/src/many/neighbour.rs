//! A steady neighbour: it works on its memory without a break, and knows the expected contents.

use std::ffi::{CString, c_char};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::exec::KERNELS;
use crate::plan::Value;
use nvshare_test_cuda::{CudaError, Driver, Words, cu};

static STOP: AtomicBool = AtomicBool::new(false);

extern "C" fn stop(_: i32) {
    STOP.store(true, Ordering::SeqCst);
}

const BLOCK: u64 = 32 << 20;
/// Words that are read back at once.
const SAMPLE: usize = 4096;

/// Works until SIGTERM comes; then all memory is checked.
pub(crate) fn work(memory: u64) -> Result<(), String> {
    // SAFETY: a handler that stores a flag.
    unsafe { libc::signal(libc::SIGTERM, stop as extern "C" fn(i32) as libc::sighandler_t) };
    let d = Driver::open()?;
    let text = |error: CudaError| error.to_string();
    let (mut context, mut module, mut step, mut stream) = (0u64, 0u64, 0u64, 0u64);
    cu!(d, "cuDevicePrimaryCtxRetain", &raw mut context => *mut u64, 0 => i32).map_err(text)?;
    cu!(d, "cuCtxSetCurrent", context => u64).map_err(text)?;
    let kernels = CString::new(KERNELS).expect("PTX is text");
    cu!(d, "cuModuleLoadData", &raw mut module => *mut u64, kernels.as_ptr() => *const c_char)
        .map_err(text)?;
    cu!(d, "cuModuleGetFunction", &raw mut step => *mut u64, module => u64, c"step".as_ptr() => *const c_char)
        .map_err(text)?;
    cu!(d, "cuStreamCreate", &raw mut stream => *mut u64, 1 => u32).map_err(text)?;
    let mut blocks = Vec::new();
    for number in 0..(memory / BLOCK).max(1) {
        let mut address = 0u64;
        let value = Value::plain(number as u32);
        cu!(d, "cuMemAlloc_v2", &raw mut address => *mut u64, BLOCK as usize => usize).map_err(text)?;
        cu!(d, "cuMemsetD32Async", address => u64, value.base => u32, BLOCK as usize / 4 => usize, stream => u64)
            .map_err(text)?;
        blocks.push((address, value));
    }
    let mut words = 0;
    for round in 1u32.. {
        let last = STOP.load(Ordering::SeqCst);
        for (address, value) in &mut blocks {
            let words = Words { address: *address, words: BLOCK / 4, value: round, micros: 500 };
            d.launch(step, [64, 256], words, stream as usize).map_err(text)?;
            *value = value.plus(round);
        }
        cu!(d, "cuStreamSynchronize", stream => u64).map_err(text)?;
        for (number, (address, value)) in blocks.iter().enumerate() {
            if last || number == round as usize % blocks.len() {
                words += check(&d, *address, *value)?;
            }
        }
        if last {
            println!("storm: the neighbour's {words} words as expected in {round} rounds");
            return Ok(());
        }
    }
    Ok(())
}

fn check(d: &Driver, address: u64, value: Value) -> Result<usize, String> {
    let mut words = vec![0u32; SAMPLE];
    for at in (0..BLOCK).step_by(2 << 20) {
        let from = address + at;
        cu!(d, "cuMemcpyDtoH_v2", words.as_mut_ptr() => *mut u32, from => u64, SAMPLE * 4 => usize)
            .map_err(|error| error.to_string())?;
        if let Some(wrong) = words.iter().find(|&&word| word != value.word(0)) {
            return Err(format!("at {from:#x} is {wrong:#010x}, expected {:#010x}", value.word(0)));
        }
    }
    Ok(SAMPLE * (BLOCK >> 21) as usize)
}

/// Prints the bytes that the simulated cards moved by themselves, by faults and pushed out, and those that left in use.
pub(crate) fn observe() -> Result<(), String> {
    let d = Driver::open()?;
    let mut sum = [0u64; 7];
    let mut count = 0i32;
    cu!(d, "cuDeviceGetCount", &raw mut count => *mut i32).map_err(|error| error.to_string())?;
    for card in 0..count {
        let mut moved = [0u64; 7];
        cu!(d, "nvsimMoved", card => i32, &raw mut moved => *mut [u64; 7])
            .map_err(|error| error.to_string())?;
        sum.iter_mut().zip(moved).for_each(|(sum, moved)| *sum += moved);
    }
    println!("{} {} {}", sum[0], sum[2], sum[5]);
    Ok(())
}
