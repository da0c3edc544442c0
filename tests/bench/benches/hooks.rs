//! What the hooks add to a call, over a driver that does nothing: `cargo bench -p nvshare-bench`.
//!
//! The program starts itself again with the library preloaded and the stub as its driver. Each row `…/direct`
//! calls the stub, `…/hooked` the same through the library, in the same process. The gate is open: there is no
//! scheduler, but for the program that says what its first calls take with one.

#![allow(clippy::undocumented_unsafe_blocks, reason = "every call is one of the stub's functions")]
#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::hint::black_box;
use std::mem::transmute_copy;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use criterion::Criterion;
use nvshare_harness::{Artifacts, Scheduler, World, guest};

type Launch = unsafe extern "C" fn(
    usize,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    usize,
    *mut c_void,
    *mut c_void,
) -> c_int;
type Alloc = unsafe extern "C" fn(*mut u64, usize) -> c_int;
type Free = unsafe extern "C" fn(u64) -> c_int;
type GetProcAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

const INSIDE: &str = "NVSHARE_BENCH_INSIDE";
/// Live allocations beside the one that is measured.
const LIVE: usize = 32_768;

struct Driver {
    library: *mut c_void,
    direct: unsafe extern "C" fn(*const c_char) -> *mut c_void,
}

impl Driver {
    fn open() -> Self {
        unsafe {
            let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
            assert!(!library.is_null(), "the stub is found");
            let direct = libc::dlsym(library, c"stubAddress".as_ptr());
            Self { library, direct: transmute_copy(&direct) }
        }
    }

    fn direct<F>(&self, name: &CStr) -> F {
        let address = unsafe { (self.direct)(name.as_ptr()) };
        assert!(!address.is_null());
        unsafe { transmute_copy(&address) }
    }

    fn hooked<F>(&self, name: &CStr) -> F {
        let address = unsafe { libc::dlsym(self.library, name.as_ptr()) };
        let direct: *mut c_void = self.direct(name);
        assert!(!address.is_null() && address != direct, "{name:?} is hooked");
        unsafe { transmute_copy(&address) }
    }
}

fn launch(function: Launch) -> c_int {
    unsafe { function(1, 1, 1, 1, 1, 1, 1, 0, 0x3000, ptr::null_mut(), ptr::null_mut()) }
}

/// How long it takes until each of several threads has made so many launches.
fn together(threads: usize, count: u64, function: Launch) -> Duration {
    let barrier = &Barrier::new(threads + 1);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(move || {
                launch(function);
                barrier.wait();
                (0..count).for_each(|_| {
                    launch(black_box(function));
                });
                barrier.wait();
            });
        }
        barrier.wait();
        let begin = Instant::now();
        barrier.wait();
        begin.elapsed()
    })
}

fn benches(criterion: &mut Criterion) {
    let driver = Driver::open();
    unsafe { driver.hooked::<unsafe extern "C" fn(c_uint) -> c_int>(c"cuInit")(0) };
    for (name, function) in [
        ("launch/direct", driver.direct::<Launch>(c"cuLaunchKernel")),
        ("launch/hooked", driver.hooked(c"cuLaunchKernel")),
    ] {
        // The first one starts the session.
        assert_eq!(launch(function), 0);
        criterion.bench_function(name, |b| b.iter(|| launch(black_box(function))));
    }
    // As many threads as there are processors: time per launch of each.
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    for (name, function) in [
        ("launch, a thread on each processor/direct", driver.direct::<Launch>(c"cuLaunchKernel")),
        ("launch, a thread on each processor/hooked", driver.hooked(c"cuLaunchKernel")),
    ] {
        criterion.bench_function(name, |b| b.iter_custom(|count| together(threads, count, function)));
    }
    for (name, alloc, free) in [
        (
            "alloc and free/direct",
            driver.direct::<Alloc>(c"cuMemAlloc_v2"),
            driver.direct::<Free>(c"cuMemFree_v2"),
        ),
        ("alloc and free/hooked", driver.hooked(c"cuMemAlloc_v2"), driver.hooked(c"cuMemFree_v2")),
    ] {
        let mut live = vec![0u64; LIVE];
        live.iter_mut().for_each(|address| assert_eq!(unsafe { alloc(address, 2 << 20) }, 0));
        criterion.bench_function(name, |b| {
            b.iter(|| unsafe {
                let mut address = 0;
                alloc(&raw mut address, 2 << 20);
                free(address)
            });
        });
        live.into_iter().for_each(|address| assert_eq!(unsafe { free(address) }, 0));
    }
    for (name, function) in [
        ("cuGetProcAddress/direct", driver.direct::<GetProcAddress>(c"cuGetProcAddress_v2")),
        ("cuGetProcAddress/hooked", driver.hooked(c"cuGetProcAddress_v2")),
    ] {
        criterion.bench_function(name, |b| {
            b.iter(|| unsafe {
                let mut address = ptr::null_mut();
                function(black_box(c"cuLaunchKernel").as_ptr(), &raw mut address, 12_000, 0, ptr::null_mut());
                address
            });
        });
    }
    for (name, symbol) in [
        ("dlsym/not ours", c"cuEventQueryNot"),
        ("dlsym/other", c"malloc"),
        ("dlsym/hooked", c"cuLaunchKernel"),
    ] {
        criterion.bench_function(name, |b| {
            b.iter(|| unsafe { libc::dlsym(driver.library, black_box(symbol).as_ptr()) })
        });
    }
    // A program that never comes near CUDA.
    let library = std::env::var_os("LD_PRELOAD").expect("preloaded");
    for (name, preload) in
        [("start-up of true/plain", "".as_ref()), ("start-up of true/preloaded", library.as_os_str())]
    {
        criterion.bench_function(name, |b| {
            b.iter(|| Command::new("true").env("LD_PRELOAD", preload).status().expect("it runs"))
        });
    }
    // The least that uses a GPU, from its start to its end.
    let world = World::with_driver(&Artifacts::stub());
    let first = guest("first", false);
    let first_calls = |preload: &OsStr| {
        let mut command = Command::new(&first);
        command.env("LD_PRELOAD", preload).env("NVSHARE_SOCKET", world.socket());
        assert!(command.status().expect("it runs").success());
    };
    let mut bench = |name, preload: &OsStr| {
        criterion.bench_function(name, |b| b.iter(|| first_calls(preload)));
    };
    bench("first calls/plain", "".as_ref());
    bench("first calls/no scheduler", library.as_os_str());
    let scheduler = Scheduler::start(&world, &[]);
    bench("first calls/with a scheduler", library.as_os_str());
    drop(scheduler);
}

fn main() {
    if std::env::var_os(INSIDE).is_none() {
        let stub = Artifacts::stub();
        let dir = std::env::temp_dir().join(format!("nvshare-bench-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder");
        std::os::unix::fs::symlink(stub, dir.join("libcuda.so.1")).expect("a link");
        let error = Command::new(std::env::current_exe().expect("this program"))
            .args(std::env::args_os().skip(1))
            .env(INSIDE, "1")
            .env("LD_PRELOAD", &Artifacts::build(true).library)
            .env("LD_LIBRARY_PATH", &dir)
            .env("NVSHARE_SOCKET", dir.join("nobody.sock"))
            .env("NVSHARE_LOG", "off")
            .exec();
        panic!("{error}");
    }
    let mut criterion = Criterion::default().configure_from_args();
    benches(&mut criterion);
    criterion.final_summary();
}
