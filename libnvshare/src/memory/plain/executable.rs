//! Finds out from the program's executable whether the program needs plain memory.
//!
//! The executable may import a function of the driver or of CUDA's runtime; its dynamic symbols show this. Or the runtime is
//! linked into it, which is what `nvcc` does by default. Then the executable contains every function of the runtime, so its
//! code is searched for calls of the function. Libraries are not searched: most libraries that can share memory never do.

use std::fs::File;
use std::os::fd::AsRawFd;

use memchr::memmem;
use object::read::elf::ElfFile64;
use object::{Endianness, Object, ObjectSection, ObjectSymbol, SectionKind};

use crate::process::threads::Uncancelled;

/// Functions that need plain memory, or memory that the library maps. Names with `_v2`, `_ptsz` and so on count too.
const SHARING: [&str; 3] = ["cudaIpcGetMemHandle", "cuIpcGetMemHandle", "cuMemGetHandleForAddressRange"];
/// Functions that need plain memory.
const CALLS: [&str; 4] =
    ["cuPointerSetAttribute", "cuStreamBatchMemOp", "cuStreamWaitValue", "cuStreamWriteValue"];
/// The one of these functions that the runtime has.
const BUILT_IN: &str = SHARING[0];
/// Larger code sections are not searched, in bytes: the first allocation would take noticeably longer.
const MAX_CODE: u64 = 32 << 20;

/// The function that the program calls and that refuses its memory, if the executable shows one. `shares`: the library maps
/// the memory, and shares it by itself.
pub(super) fn find_refusing_call(shares: bool) -> Option<String> {
    // It opens and closes a file, on a thread of the program.
    let _whole = Uncancelled::begin();
    // The process's own folder names none where the first thread has ended, as by `pthread_exit` in `main`.
    let file = File::open("/proc/thread-self/exe").ok()?;
    let mapped = MappedFile::new(&file)?;
    let elf = ElfFile64::<Endianness>::parse(mapped.bytes()).ok()?;
    imported(&elf, shares).or_else(|| if shares { None } else { built_in(&elf) })
}

fn imported(elf: &ElfFile64<'_>, shares: bool) -> Option<String> {
    let names: &[&str] = if shares { &[] } else { &SHARING };
    elf.dynamic_symbols()
        .filter(ObjectSymbol::is_undefined)
        .filter_map(|symbol| symbol.name().ok())
        .find(|name| CALLS.iter().chain(names).any(|call| name.starts_with(call)))
        .map(str::to_owned)
}

fn built_in(elf: &ElfFile64<'_>) -> Option<String> {
    // Most executables do not contain the name, and the search ends here.
    memmem::find(elf.section_by_name(".strtab")?.data().ok()?, BUILT_IN.as_bytes())?;
    let function = elf.symbols().find(|symbol| symbol.is_definition() && symbol.name() == Ok(BUILT_IN))?;
    let mut code = elf.sections().filter(|s| s.kind() == SectionKind::Text && s.size() <= MAX_CODE);
    let called = code.any(|s| s.data().is_ok_and(|code| calls(code, s.address(), function.address())));
    called.then(|| BUILT_IN.to_owned())
}

/// Whether code that is loaded at `start` calls `function` directly or jumps to it. Such code is an opcode, and the distance
/// from the next instruction. The code is not disassembled; other bytes look like this once in many billions.
#[cfg(target_arch = "x86_64")]
fn calls(code: &[u8], start: u64, function: u64) -> bool {
    const CALL: u8 = 0xe8;
    const JUMP: u8 = 0xe9;
    memchr::memchr2_iter(CALL, JUMP, code).any(|at| {
        let distance =
            code.get(at + 1..at + 5).and_then(|bytes| bytes.try_into().ok()).map(i32::from_le_bytes);
        distance.is_some_and(|d| (start + at as u64 + 5).wrapping_add_signed(d.into()) == function)
    })
}

/// The same. `BL` and `B` have the distance from their own address in their lower 26 bits, in words.
#[cfg(target_arch = "aarch64")]
fn calls(code: &[u8], start: u64, function: u64) -> bool {
    code.chunks_exact(4).zip((start..).step_by(4)).any(|(bytes, at)| {
        let word = bytes.try_into().map_or(0, u32::from_le_bytes);
        let distance = i64::from((word << 6).cast_signed() >> 4);
        word & 0x7c00_0000 == 0x1400_0000 && at.wrapping_add_signed(distance) == function
    })
}

/// A mapped file. Only a small part of a large executable is read.
struct MappedFile {
    at: *mut libc::c_void,
    length: usize,
}

impl MappedFile {
    fn new(file: &File) -> Option<Self> {
        let length = usize::try_from(file.metadata().ok()?.len()).ok()?;
        // SAFETY: a new mapping of a file, read only.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0)
        };
        (at != libc::MAP_FAILED).then_some(Self { at, length })
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: mapped for as long as `self` lives. Nobody writes to it or cuts it short: the kernel refuses that for
        // the file of a running program (ETXTBSY).
        unsafe { std::slice::from_raw_parts(self.at.cast(), self.length) }
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: what `new` mapped.
        unsafe { libc::munmap(self.at, self.length) };
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::{calls, find_refusing_call};

    /// The C library's functions in it are cancellation points, from which Rust does not unwind.
    #[test]
    fn a_thread_that_is_cancelled_while_it_reads_the_executable_has_read_it() {
        static HAS_READ: AtomicBool = AtomicBool::new(false);
        extern "C" fn read_cancelled(_: *mut std::ffi::c_void) -> *mut std::ffi::c_void {
            // SAFETY: the calling thread; it is cancelled at its next cancellation point.
            unsafe { libc::pthread_cancel(libc::pthread_self()) };
            assert_eq!(find_refusing_call(true), None);
            HAS_READ.store(true, Ordering::SeqCst);
            std::ptr::null_mut()
        }
        // SAFETY: a place for the thread, which is waited for.
        unsafe {
            let mut thread = std::mem::zeroed();
            let made =
                libc::pthread_create(&raw mut thread, std::ptr::null(), read_cancelled, std::ptr::null_mut());
            assert_eq!(made, 0);
            assert_eq!(libc::pthread_join(thread, std::ptr::null_mut()), 0);
        }
        assert!(HAS_READ.load(Ordering::SeqCst));
    }

    #[test]
    fn calls_and_jumps_are_found_where_they_lead() {
        // At 0x1003 a call of 0x1003 + 5 + 0x10, at 0x1008 a jump back to 0x1000, and the beginning of a call.
        let code = [0x90, 0xe8, 0x90, 0xe8, 0x10, 0, 0, 0, 0xe9, 0xf3, 0xff, 0xff, 0xff, 0xe8, 0];
        for (function, expected) in [(0x1018, true), (0x1000, true), (0x1019, false), (0, false)] {
            assert_eq!(calls(&code, 0x1000, function), expected, "{function:#x}");
        }
    }
}
