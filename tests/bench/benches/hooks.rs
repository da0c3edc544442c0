//! The time that the hooks add to a call, over a driver that does nothing: `cargo bench -p nvshare-bench`.
//!
//! The program starts itself again with the library preloaded and the stub as its driver. Each row `…/direct`
//! calls the stub, `…/hooked` the same through the library, in the same process. The gate is open: there is no
//! scheduler, but for the program that says what its first calls take with one.

#![allow(clippy::undocumented_unsafe_blocks, reason = "every call is one of the stub's functions")]
#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::hint::black_box;
use std::mem::transmute_copy;
use std::process::Command;
use std::ptr;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
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

/// Says what this program is to be when it is started again.
const INSIDE: &str = "NVSHARE_BENCH_INSIDE";
const ALONE: &str = "alone";
const CONTENDED: &str = "contended";
const WAITER: &str = "waiter";
/// Says where `nvshare-ctl` is.
const CTL: &str = "NVSHARE_BENCH_CTL";
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
    launch_on(function, 0x3000)
}

fn launch_on(function: Launch, stream: usize) -> c_int {
    unsafe { function(1, 1, 1, 1, 1, 1, 1, 0, stream, ptr::null_mut(), ptr::null_mut()) }
}

/// The handles of streams, spread over memory as an allocator would.
fn streams(first: usize, count: usize) -> Vec<usize> {
    (0..count).map(|i| 0x55_5555_0000 + (first + i) * 0x2d0).collect()
}

/// How long it takes until each of several threads has made `count` launches, on streams of its own in turn.
fn together(threads: usize, streams_each: usize, count: u64, function: Launch) -> Duration {
    let barrier = &Barrier::new(threads + 1);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let streams = streams(thread * streams_each, streams_each);
                streams.iter().for_each(|&stream| assert_eq!(launch_on(function, stream), 0));
                barrier.wait();
                streams.iter().cycle().take(count as usize).for_each(|&stream| {
                    launch_on(black_box(function), stream);
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

/// Launches on one stream and on several, from one thread and from several. `when` says what else is so.
fn launches(driver: &Driver, criterion: &mut Criterion, when: &str) {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    for (what, threads, streams_each) in [
        ("1 thread, 1 stream", 1, 1),
        ("1 thread, 8 streams", 1, 8),
        ("1 thread, 32 streams", 1, 32),
        // Time per launch of each thread.
        ("a thread on each processor", processors, 1),
        ("8 threads with 4 streams each", 8, 4),
    ] {
        for (way, function) in [
            ("direct", driver.direct::<Launch>(c"cuLaunchKernel")),
            ("hooked", driver.hooked(c"cuLaunchKernel")),
        ] {
            let name = format!("launch{when}, {what}/{way}");
            criterion.bench_function(&name, |b| {
                b.iter_custom(|count| together(threads, streams_each, count, function))
            });
        }
    }
}

/// The same while another client waits: this process holds the lock, and memory for both there is not.
fn benches_contended(criterion: &mut Criterion) {
    let driver = Driver::open();
    unsafe { driver.hooked::<unsafe extern "C" fn(c_uint) -> c_int>(c"cuInit")(0) };
    let alloc = driver.hooked::<Alloc>(c"cuMemAlloc_v2");
    let mut address = 0;
    assert_eq!(unsafe { alloc(&raw mut address, 6 << 30) }, 0);
    assert_eq!(launch(driver.hooked(c"cuLaunchKernel")), 0);
    let mut waiter = Command::new(std::env::current_exe().expect("this program"))
        .env(INSIDE, WAITER)
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("it runs");
    let ctl = std::env::var_os(CTL).expect("this program says where it is");
    let done = AtomicBool::new(false);
    let keep = driver.hooked::<Launch>(c"cuLaunchKernel");
    let done_too = &done;
    std::thread::scope(|scope| {
        // An idle process would lose the lock.
        scope.spawn(move || {
            while !done_too.load(Ordering::Relaxed) {
                launch(keep);
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        let pid = waiter.id().to_string();
        let waits = |line: &str| {
            [pid.as_str(), "waiting"].iter().all(|word| line.split_whitespace().any(|w| w == *word))
        };
        nvshare_harness::wait_until("the other client waits", || {
            let output = Command::new(&ctl).arg("clients").output().expect("it runs");
            String::from_utf8_lossy(&output.stdout).lines().any(waits)
        });
        // The news reach this process a moment later.
        std::thread::sleep(Duration::from_millis(100));
        launches(&driver, criterion, " while another client waits");
        done.store(true, Ordering::Relaxed);
    });
    waiter.kill().expect("a child");
    waiter.wait().expect("a child");
}

/// A client that wants the lock.
fn wait_for_the_lock() -> ! {
    let driver = Driver::open();
    unsafe { driver.hooked::<unsafe extern "C" fn(c_uint) -> c_int>(c"cuInit")(0) };
    let mut address = 0;
    assert_eq!(unsafe { driver.hooked::<Alloc>(c"cuMemAlloc_v2")(&raw mut address, 6 << 30) }, 0);
    loop {
        launch(driver.hooked(c"cuLaunchKernel"));
        // Should it ever get the lock, it is idle and gives it away.
        std::thread::sleep(Duration::from_millis(100));
    }
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
    launches(&driver, criterion, "");
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
    match std::env::var(INSIDE).as_deref() {
        Err(_) => outside(),
        Ok(WAITER) => wait_for_the_lock(),
        Ok(how) => {
            let mut criterion = Criterion::default().configure_from_args();
            if how == CONTENDED {
                benches_contended(&mut criterion)
            } else {
                benches(&mut criterion)
            }
            criterion.final_summary();
        }
    }
}

/// Starts this program again, under nvshare.
fn outside() {
    let world = World::with_driver(&Artifacts::stub());
    let inside = |how: &str| {
        let status = Command::new(std::env::current_exe().expect("this program"))
            .args(std::env::args_os().skip(1))
            .env(INSIDE, how)
            .env(CTL, &Artifacts::build(true).ctl)
            .env("LD_PRELOAD", &Artifacts::build(true).library)
            .env("LD_LIBRARY_PATH", world.dir().join("lib"))
            .env("NVSHARE_SOCKET", world.socket())
            .env("NVSHARE_ADMIN_SOCKET", world.admin_socket())
            .env("NVSHARE_LOG", "off")
            .status()
            .expect("it runs");
        assert!(status.success(), "{how}: {status}");
    };
    inside(ALONE);
    let _scheduler = Scheduler::start(&world, &["--gpu-memory", "8GiB", "--tq", "3600"]);
    inside(CONTENDED);
}
