//! A place for each of the driver's own functions, with its signature. They are made from the list of
//! [entry points](crate::entry_points).

use std::cell::Cell;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use super::symbols::{self, Symbols};
use crate::entry_points::entry_points;

/// The place of one of the driver's own functions. It is null until the driver is opened, and stays null if this driver has
/// no such function.
#[derive(Debug)]
pub(crate) struct Real<F> {
    address: AtomicPtr<()>,
    signature: PhantomData<F>,
}

impl<F: Copy> Real<F> {
    const fn new() -> Self {
        const { assert!(size_of::<F>() == size_of::<*mut ()>()) }
        Self { address: AtomicPtr::new(ptr::null_mut()), signature: PhantomData }
    }

    /// The function, if this driver has it. Opens the driver if necessary.
    #[inline(always)]
    pub(crate) fn get(&self) -> Option<F> {
        let mut address = self.address.load(Ordering::Relaxed);
        if address.is_null() {
            address = self.after_opening();
        }
        if address.is_null() {
            return None;
        }
        // SAFETY: `F` is a function pointer: its size is checked above, and only the list below names it. The driver exports
        // this address under the name of a function with the signature `F`.
        Some(unsafe { std::mem::transmute_copy::<*mut (), F>(&address) })
    }

    #[cold]
    fn after_opening(&self) -> *mut () {
        open();
        self.address.load(Ordering::Acquire)
    }

    /// Where the address is stored.
    pub(crate) const fn slot(&self) -> &AtomicPtr<()> {
        &self.address
    }
}

/// One of the functions, whatever its signature.
#[derive(Debug)]
pub(crate) struct Function {
    /// The exported name.
    pub(crate) name: &'static str,
    /// Its address.
    pub(crate) address: &'static AtomicPtr<()>,
}

static OPEN: AtomicBool = AtomicBool::new(false);
static SYMBOLS: OnceLock<Symbols> = OnceLock::new();

/// The address of any function that the driver exports; null if there is none, or the driver is not open.
pub(crate) fn exported(name: &str) -> *mut c_void {
    SYMBOLS.get().map_or(ptr::null_mut(), |symbols| symbols.address(name))
}

/// Whether the driver is open. It stays so.
pub(crate) fn is_open() -> bool {
    OPEN.load(Ordering::Acquire)
}

/// Opens the driver and stores the addresses of its functions. Returns false if the calling thread is already inside this
/// function: the driver's initialisers may look up symbols while it is being loaded.
///
/// No thread waits here: another thread may be opening the driver and wait for the loader's lock, and this thread may hold
/// that lock. Two threads that open the driver at the same time store the same addresses.
pub(crate) fn open() -> bool {
    thread_local! {
        static OPENING: Cell<bool> = const { Cell::new(false) };
    }
    if is_open() {
        return true;
    }
    if OPENING.replace(true) {
        return false;
    }
    if let Some(symbols) = symbols::load() {
        for function in FUNCTIONS {
            let address = symbols.address(function.name);
            if !address.is_null() {
                function.address.store(address.cast(), Ordering::Release);
            }
        }
        let _ = SYMBOLS.set(symbols);
    }
    OPEN.store(true, Ordering::Release);
    OPENING.set(false);
    true
}

/// The place of one function.
macro_rules! function {
    ($name:ident, $args:tt) => {
        pub(crate) static $name: Real<super::signatures::$name> = Real::new();
    };
}

/// The signature of one function.
macro_rules! signature {
    ($name:ident, ($($arg:ident : $ty:ty),*)) => {
        pub(crate) type $name = unsafe extern "C-unwind" fn($($ty),*) -> CUresult;
    };
}

macro_rules! functions {
    (
        hooked { $( $class:ident $gate:tt $name:ident $args:tt $(and $per_thread:ident)? = $kind:ident $deed:tt; )* }
        called { $( $cname:ident $cargs:tt $(and $cper_thread:ident)?; )* }
        forwarded { $( $fname:ident )* }
    ) => {
        functions! {
            $( $name $args; $( $per_thread $args; )? )*
            $( $cname $cargs; $( $cper_thread $cargs; )? )*
        }
    };
    ( $( $name:ident $args:tt; )* ) => {
        #[allow(non_upper_case_globals, reason = "the driver's own names")]
        mod all {
            use super::Real;

            $( function!($name, $args); )*
        }

        pub(crate) use all::*;

        /// The type of each, under its name.
        #[allow(non_camel_case_types, dead_code, reason = "the driver's own names, and not all are asked for")]
        pub(crate) mod signatures {
            use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};

            use super::super::types::*;

            $( signature!($name, $args); )*
        }

        /// All functions.
        static FUNCTIONS: &[Function] = &[$( entry!($name), )*];
    };
}

macro_rules! entry {
    ($name:ident) => {
        Function { name: stringify!($name), address: all::$name.slot() }
    };
}

entry_points!(functions);
