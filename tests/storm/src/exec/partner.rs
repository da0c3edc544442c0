//! Another process, which opens memory that the program shares (CUDA IPC), checks it, and writes to it.
//!
//! It begins when the program first shares memory, and ends with the program. It is a program of its own for the driver and the
//! scheduler, and takes its turns.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::PoisonError;

use super::{Fault, Run};
use crate::plan::{Region, Value};
use nvshare_test_cuda::{CudaError, Driver, cu};

/// Bytes of a request: the handle, then six words.
const REQUEST: usize = 64 + 6 * 8;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`
const LAZY: u32 = 1;

/// `CUipcMemHandle`, which is passed by value.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Handle([u8; 64]);

/// The process, and the program's ends of the two pipes.
#[derive(Debug)]
pub(super) struct Partner {
    child: Child,
    asks: ChildStdin,
    hears: BufReader<ChildStdout>,
}

impl Partner {
    fn begin() -> std::io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        let mut child = command.arg("partner").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let ends = child.stdin.take().zip(child.stdout.take());
        let (asks, hears) = ends.ok_or_else(|| std::io::Error::other("no pipes"))?;
        Ok(Self { child, asks, hears: BufReader::new(hears) })
    }

    /// Returns the partner's line: the words that it has seen, or what is wrong.
    fn ask(&mut self, request: &[u8]) -> std::io::Result<String> {
        self.asks.write_all(request)?;
        let mut line = String::new();
        self.hears.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }
}

impl Run {
    /// Shares the memory of a region of which no work is under way: the partner finds the value, and writes another one. `keeps`: it
    /// keeps the memory open.
    pub(super) fn share(
        &self,
        region: Region,
        device: i32,
        value: Value,
        new: Value,
        keeps: bool,
    ) -> Result<(), Fault> {
        let base = self.buffers.get(region.buffer);
        let mut handle = Handle([0; 64]);
        cu!(self.driver, "cuIpcGetMemHandle", &raw mut handle => *mut Handle, base => u64)?;
        let mut request = handle.0.to_vec();
        let places = [self.address(region) - base, region.bytes, device as u64, u64::from(keeps)];
        let numbers = |value: Value| u64::from(value.base) | u64::from(value.pattern) << 32;
        for word in places.into_iter().chain([numbers(value), numbers(new)]) {
            request.extend(word.to_ne_bytes());
        }
        let mut partner = self.partner.lock().unwrap_or_else(PoisonError::into_inner);
        let told = |error: std::io::Error| Fault::Other(format!("the partner: {error}"));
        if partner.is_none() {
            *partner = Some(Partner::begin().map_err(told)?);
        }
        let said =
            partner.as_mut().map_or(Ok(String::new()), |partner| partner.ask(&request)).map_err(told)?;
        let Ok(words) = said.parse() else { return Err(Fault::Other(format!("the partner: {said}"))) };
        self.saw(words);
        Ok(())
    }

    /// Another program follows in this process.
    pub(super) fn end_partner(&self) -> Result<(), Fault> {
        let partner = self.partner.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Partner { mut child, asks, .. }) = partner else { return Ok(()) };
        drop(asks);
        match child.wait() {
            Ok(status) if status.success() => Ok(()),
            ended => Err(Fault::Other(format!("the partner ended with {ended:?}"))),
        }
    }
}

/// The partner's life: until the program has ended.
pub(crate) fn serve() -> Result<(), String> {
    let driver = Driver::open()?;
    // The address of what is open, by its handle. Memory may be opened again while it is open.
    let mut open = BTreeMap::new();
    let mut request = [0; REQUEST];
    let mut asked = std::io::stdin().lock();
    while asked.read_exact(&mut request).is_ok() {
        match answer(&driver, &request, &mut open) {
            Ok(words) => println!("{words}"),
            Err(error) => println!("{error}"),
        }
    }
    Ok(())
}

/// Does what is asked. Returns the words that it has seen.
fn answer(d: &Driver, request: &[u8; REQUEST], open: &mut BTreeMap<Handle, u64>) -> Result<usize, String> {
    let said = |error: CudaError| Fault::Call(error).to_string();
    let (handle, words) = request.split_first_chunk().ok_or("a short request")?;
    let (words, []) = words.as_chunks::<8>() else { return Err("a short request".to_owned()) };
    let words: Vec<u64> = words.iter().map(|word| u64::from_ne_bytes(*word)).collect();
    let [offset, bytes, device, keeps, value, new] = words[..] else {
        return Err("a short request".to_owned());
    };
    let of = |word: u64| Value { base: word as u32, pattern: word >> 32 != 0 };
    let (handle, value, new) = (Handle(*handle), of(value), of(new));
    let mut context = 0u64;
    cu!(d, "cuDevicePrimaryCtxRetain", &raw mut context => *mut u64, device as i32 => i32).map_err(said)?;
    cu!(d, "cuCtxSetCurrent", context => u64).map_err(said)?;
    let mut at = 0u64;
    cu!(d, "cuIpcOpenMemHandle_v2", &raw mut at => *mut u64, handle => Handle, LAZY => u32).map_err(said)?;
    if open.get(&handle).is_some_and(|known| *known != at) {
        return Err("memory that is open came to another address".to_owned());
    }
    let mut seen = vec![0x5ca1_ab1e_u32; bytes as usize / 4];
    let region = at + offset;
    cu!(d, "cuMemcpyDtoH_v2", seen.as_mut_ptr() => *mut u32, region => u64, bytes as usize => usize)
        .map_err(said)?;
    let wrong = |(index, word): &(usize, &u32)| **word != value.word(*index as u64);
    if let Some((index, word)) = seen.iter().enumerate().find(wrong) {
        return Err(format!("word {index} is {word:#010x}, expected {:#010x}", value.word(index as u64)));
    }
    let written: Vec<u32> = (0..bytes / 4).map(|index| new.word(index)).collect();
    cu!(d, "cuMemcpyHtoD_v2", region => u64, written.as_ptr() => *const u32, bytes as usize => usize)
        .map_err(said)?;
    cu!(d, "cuCtxSynchronize").map_err(said)?;
    // This opening is closed, or kept; and the one that was kept is closed with the next that is not.
    let was_kept = if keeps == 0 { open.remove(&handle) } else { open.insert(handle, at) };
    let closings = usize::from(keeps == 0) + usize::from(was_kept.is_some());
    for _ in 0..closings {
        cu!(d, "cuIpcCloseMemHandle", at => u64).map_err(said)?;
    }
    Ok(seen.len())
}
