//! Thunks: a few instructions in front of each function of the driver that has no hook.
//!
//! A thunk looks at the [door] and jumps to the driver's function, with all arguments where they are. It knows
//! none of their types. If the door is closed, it saves all registers that may have arguments, waits, and then jumps. The first call of
//! a function that was never looked up goes the same way, and finds it.
//!
//! Thunks are exported under their functions' names, so a program that is linked to the driver gets them. One that looks a function up
//! gets its thunk where its process may go off the card ([`config::sleeps`](crate::process::config::sleeps)). Otherwise it gets the driver's
//! own.

use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::driver::functions;
use crate::driver::types::CUresult;
use crate::entry_points::entry_points;
use crate::lookup::{Hook, HookAddress};
use crate::process::c_library;
use crate::work::gate::door;

/// Functions whose look-ups give the driver's own. Linked programs get their thunks, too. Those of the checkpoint are for a process that is off the card.
/// The driver's private tables are read asleep as well (measured), and lead to exported functions.
const WITHOUT: [&str; 8] = [
    "cuCheckpointOperationComplete",
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessGetRestoreThreadId",
    "cuCheckpointProcessGetState",
    "cuCheckpointProcessLock",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
    "cuGetExportTable",
];

/// Whether look-ups of a function give its thunk, of those that have no hook. Where another library stands before the driver's function,
/// the thunk goes there. That library has to find the driver's own, so the process stays on the card.
pub(crate) fn is_for(name: &str) -> bool {
    if WITHOUT.contains(&name) {
        return false;
    }
    let (next, own) = (next(name), functions::exported(name));
    let is_taken = !next.is_null() && !own.is_null() && next != own;
    if is_taken {
        door::pass_by(name.as_bytes());
    }
    !is_taken
}

/// The function that comes next for programs that are linked to one; null if there is none.
fn next(name: &str) -> *mut c_void {
    CString::new(name).map_or(ptr::null_mut(), |name| {
        // SAFETY: a pseudo-handle.
        unsafe { c_library::dlsym_quietly(libc::RTLD_NEXT, &name) }
    })
}

/// Returns where a thunk jumps to, and waits while the door is closed. That comes last: a thread that is blocked in a look-up has not
/// looked at the door.
extern "C" fn find_and_wait(slot: &AtomicPtr<()>) -> *const () {
    let known = slot.load(Ordering::Acquire);
    let function = if known.is_null() { find(slot) } else { known };
    door::wait_while_closed();
    if door::is_closed_for_good() && is_fatal_away(slot) { refuse_in_child as *const () } else { function }
}

/// Whether a slot is that of a function which ends a process that is off the card. One of them ends its child, too (measured).
fn is_fatal_away(slot: &AtomicPtr<()>) -> bool {
    const FATAL: [&str; 4] = ["cuCtxSynchronize", "cuStreamSynchronize", "cuStreamQuery", "cuEventQuery"];
    let is_fatal = |name: &str| FATAL.contains(&name.trim_end_matches("_ptsz").trim_end_matches("_v2"));
    THUNKS.iter().any(|thunk| ptr::eq(thunk.real, slot) && is_fatal(thunk.name))
}

/// The driver's answer in a forked child.
extern "C" fn refuse_in_child() -> CUresult {
    CUresult::NOT_INITIALIZED
}

/// The function of a slot: the next one that the program would be linked to. That is the driver's, or that of another library which stands
/// before it. Where there is none, the call is refused, as those of hooks are.
#[cold]
fn find(slot: &AtomicPtr<()>) -> *const () {
    extern "C" fn refuse() -> CUresult {
        CUresult::NOT_SUPPORTED
    }
    // SAFETY: the thread's own place.
    let errno = unsafe { *libc::__errno_location() };
    let Some(thunk) = THUNKS.iter().find(|thunk| ptr::eq(thunk.real, slot)) else {
        return refuse as *const ();
    };
    let next = next(thunk.name);
    // A driver that was opened for one object alone has no next symbol.
    let function = if next.is_null() && functions::open() { functions::exported(thunk.name) } else { next };
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    if function.is_null() {
        return refuse as *const ();
    }
    slot.store(function.cast(), Ordering::Release);
    function.cast_const().cast()
}

/// The way of a call while the door is closed, or its function's slot is empty. The slot is in `r11`, or `x17`. Integers and floats are
/// the only arguments of the driver's functions, so the low halves of vector registers are enough.
#[unsafe(naked)]
unsafe extern "C" fn wait_and_jump() {
    std::arch::naked_asm!(
        #[cfg(target_arch = "x86_64")]
        concat!(
            "push r11\n",
            "push rax\n",
            "push rdi\n",
            "push rsi\n",
            "push rdx\n",
            "push rcx\n",
            "push r8\n",
            "push r9\n",
            "sub rsp, 136\n",
            "movups [rsp], xmm0\n",
            "movups [rsp + 16], xmm1\n",
            "movups [rsp + 32], xmm2\n",
            "movups [rsp + 48], xmm3\n",
            "movups [rsp + 64], xmm4\n",
            "movups [rsp + 80], xmm5\n",
            "movups [rsp + 96], xmm6\n",
            "movups [rsp + 112], xmm7\n",
            "mov rdi, r11\n",
            "call {find_and_wait}\n",
            "mov [rsp + 192], rax\n",
            "movups xmm0, [rsp]\n",
            "movups xmm1, [rsp + 16]\n",
            "movups xmm2, [rsp + 32]\n",
            "movups xmm3, [rsp + 48]\n",
            "movups xmm4, [rsp + 64]\n",
            "movups xmm5, [rsp + 80]\n",
            "movups xmm6, [rsp + 96]\n",
            "movups xmm7, [rsp + 112]\n",
            "add rsp, 136\n",
            "pop r9\n",
            "pop r8\n",
            "pop rcx\n",
            "pop rdx\n",
            "pop rsi\n",
            "pop rdi\n",
            "pop rax\n",
            "pop r11\n",
            "jmp r11\n",
        ),
        #[cfg(target_arch = "aarch64")]
        concat!(
            "stp x29, x30, [sp, #-224]!\n",
            "mov x29, sp\n",
            "stp x0, x1, [sp, #16]\n",
            "stp x2, x3, [sp, #32]\n",
            "stp x4, x5, [sp, #48]\n",
            "stp x6, x7, [sp, #64]\n",
            "str x8, [sp, #80]\n",
            "stp q0, q1, [sp, #96]\n",
            "stp q2, q3, [sp, #128]\n",
            "stp q4, q5, [sp, #160]\n",
            "stp q6, q7, [sp, #192]\n",
            "mov x0, x17\n",
            "bl {find_and_wait}\n",
            "mov x16, x0\n",
            "ldp x0, x1, [sp, #16]\n",
            "ldp x2, x3, [sp, #32]\n",
            "ldp x4, x5, [sp, #48]\n",
            "ldp x6, x7, [sp, #64]\n",
            "ldr x8, [sp, #80]\n",
            "ldp q0, q1, [sp, #96]\n",
            "ldp q2, q3, [sp, #128]\n",
            "ldp q4, q5, [sp, #160]\n",
            "ldp q6, q7, [sp, #192]\n",
            "ldp x29, x30, [sp], #224\n",
            "br x16\n",
        ),
        find_and_wait = sym find_and_wait,
    )
}

/// The thunk of one function.
macro_rules! thunk {
    ($name:ident) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[unsafe(naked)]
        pub(super) unsafe extern "C" fn $name() {
            std::arch::naked_asm!(
                #[cfg(target_arch = "x86_64")]
                concat!(
                    "cmp dword ptr [rip + {word}], {closed}\n",
                    "je 2f\n",
                    "mov r11, qword ptr [rip + {slot}]\n",
                    "test r11, r11\n",
                    "je 2f\n",
                    "jmp r11\n",
                    "2: lea r11, [rip + {slot}]\n",
                    "jmp {wait_and_jump}\n",
                ),
                #[cfg(target_arch = "aarch64")]
                concat!(
                    "adrp x16, {word}\n",
                    "ldr w16, [x16, #:lo12:{word}]\n",
                    "adrp x17, {slot}\n",
                    "add x17, x17, #:lo12:{slot}\n",
                    "cmp w16, #{closed}\n",
                    "b.eq 2f\n",
                    "ldr x16, [x17]\n",
                    "cbz x16, 2f\n",
                    "br x16\n",
                    "2: b {wait_and_jump}\n",
                ),
                word = sym door::WORD,
                closed = const door::CLOSED,
                slot = sym super::slots::$name,
                wait_and_jump = sym super::wait_and_jump,
            )
        }
    };
}

macro_rules! slot {
    ($name:ident) => {
        pub(super) static $name: AtomicPtr<()> = AtomicPtr::new(std::ptr::null_mut());
    };
}

macro_rules! entry {
    ($name:ident) => {
        Hook { name: stringify!($name), address: HookAddress(code::$name as *const ()), real: &slots::$name }
    };
}

macro_rules! thunks {
    (
        hooked { $( $class:ident $gate:tt $name:ident $args:tt $(and $per_thread:ident)? = $kind:ident $deed:tt; )* }
        called { $( $cname:ident $cargs:tt $(and $cper_thread:ident)?; )* }
        forwarded { $( $fname:ident )* }
    ) => {
        /// Where a thunk finds its function.
        #[allow(non_upper_case_globals, reason = "the driver's own names")]
        mod slots {
            use super::*;

            $( slot!($cname); $( slot!($cper_thread); )? )*
            $( slot!($fname); )*
        }

        #[allow(non_snake_case, reason = "the driver's own names")]
        mod code {
            use super::*;

            $( thunk!($cname); $( thunk!($cper_thread); )? )*
            $( thunk!($fname); )*
        }

        /// The thunks, under the names of the functions that they stand before.
        pub(super) static THUNKS: &[Hook] = &[
            $( entry!($cname), $( entry!($cper_thread), )? )*
            $( entry!($fname), )*
        ];
    };
}

entry_points!(thunks);

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::process::threads;

    /// Ten arguments of each kind: some are on the stack.
    #[allow(clippy::too_many_arguments, reason = "that is the test")]
    extern "C" fn sum(
        a: u64,
        b: u64,
        c: u64,
        d: u64,
        e: u64,
        f: u64,
        g: u64,
        h: u64,
        i: u64,
        j: u64,
        k: f32,
        l: f32,
        m: f32,
        n: f32,
        o: f32,
        p: f32,
        q: f32,
        r: f32,
        s: f32,
        t: f32,
    ) -> u64 {
        let whole = [a, b, c, d, e, f, g, h, i, j].iter().fold(0, |sum, &x| sum * 10 + x);
        let floats = [k, l, m, n, o, p, q, r, s, t].iter().fold(0, |sum, &x| sum * 10 + x as u64);
        whole * 10_000_000_000 + floats
    }
    type Sum = extern "C" fn(
        u64,
        u64,
        u64,
        u64,
        u64,
        u64,
        u64,
        u64,
        u64,
        u64,
        f32,
        f32,
        f32,
        f32,
        f32,
        f32,
        f32,
        f32,
        f32,
        f32,
    ) -> u64;

    const EXPECTED: u64 = 12_345_678_900_987_654_321;

    /// All in one test, as the door is the process's.
    #[test]
    fn arguments_are_kept_and_a_closed_door_is_waited_for() {
        // No driver is there.
        let absent = THUNKS.iter().find(|thunk| thunk.name == "cuParamSeti").unwrap();
        // SAFETY: the thunk jumps to a function without arguments.
        let absent =
            unsafe { std::mem::transmute::<*const (), extern "C" fn() -> CUresult>(absent.address.0) };
        assert_eq!([absent(), absent()], [CUresult::NOT_SUPPORTED; 2]);
        assert!(slots::cuParamSeti.load(Ordering::SeqCst).is_null());
        let thunk = THUNKS.iter().find(|thunk| thunk.name == "cuParamSetf").unwrap();
        slots::cuParamSetf.store(sum as *mut (), Ordering::SeqCst);
        // SAFETY: the thunk jumps to a function of this type.
        let through = unsafe { std::mem::transmute::<*const (), Sum>(thunk.address.0) };
        let call = || {
            // SAFETY: the thread's own place.
            unsafe { *libc::__errno_location() = 77 };
            let sum = through(1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0);
            // SAFETY: as above.
            assert_eq!(unsafe { *libc::__errno_location() }, 77);
            sum
        };
        assert_eq!(call(), EXPECTED);
        door::close();
        assert_eq!(call(), EXPECTED, "there is no door yet, so it does not close");
        door::hang();
        assert_eq!(call(), EXPECTED);
        door::close();
        std::thread::scope(|scope| {
            let waits = scope.spawn(call);
            // A hook's call waits as well, and one that is under way is counted.
            let hook = scope.spawn(|| {
                let outer = door::enter();
                assert!(!door::has_nobody_inside());
                door::leave(outer);
            });
            while !door::has_waiters() {
                threads::pause();
            }
            threads::sleep(std::time::Duration::from_millis(20));
            assert!(!waits.is_finished() && !hook.is_finished() && door::has_nobody_inside());
            door::open();
            assert_eq!(waits.join().unwrap(), EXPECTED);
            hook.join().unwrap();
        });
        assert!(!door::has_waiters() && door::has_nobody_inside());
        // A call from inside another one does not wait.
        let outer = door::enter();
        door::close();
        let inner = door::enter();
        door::leave(inner);
        assert!(!door::has_nobody_inside());
        door::leave(outer);
        door::open();
    }
}
