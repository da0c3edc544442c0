//! A folder of its own for each test: sockets, logs, and the simulated cards.

use std::ffi::OsString;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{Artifacts, Finished, Running, scratch};

/// The bytes that a simulated card has moved so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moved {
    /// Brought in because a kernel or a copy touched it.
    pub faulted: u64,
    /// First touched by a kernel or a copy.
    pub touched: u64,
    /// Pushed out because the card was full.
    pub pushed_out: u64,
    /// Prefetched to the card.
    pub restored: u64,
    /// Prefetched to the host.
    pub evicted: u64,
    /// The part of it that left while a kernel of the same process ran; and a block for each kernel that began meanwhile.
    pub evicted_in_use: u64,
    /// Calls that took memory back which the driver had kept for managed memory.
    pub taken_back: u64,
}

/// A kernel that ran on a simulated card.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Ran {
    /// The process of the kernel.
    pub process: u32,
    /// The card.
    pub gpu: u32,
    /// When it began, in nanoseconds of the monotonic clock.
    pub begin_ns: u64,
    /// When it ended.
    pub end_ns: u64,
}

impl Ran {
    /// How often a card changed from one process's kernels to another's after a moment.
    #[must_use]
    pub fn changes(all: &[Self], after_ns: u64) -> usize {
        let mut all: Vec<&Self> = all.iter().filter(|kernel| kernel.begin_ns > after_ns).collect();
        all.sort_by_key(|kernel| kernel.begin_ns);
        all.windows(2).filter(|pair| pair[0].process != pair[1].process).count()
    }
}

/// A folder with sockets and, unless the machine's own driver is used, simulated cards.
#[derive(Debug)]
pub struct World {
    dir: PathBuf,
    simulated: bool,
    settings: Vec<(OsString, OsString)>,
}

impl World {
    /// Simulated cards, with settings `NVSIM_…` of the simulator.
    ///
    /// # Panics
    /// When the folder cannot be made.
    #[must_use]
    pub fn simulated(settings: &[(&str, &str)]) -> Self {
        Self::new(Some(&Artifacts::get().simulator), settings)
    }

    /// The same, for programs that get device memory in this way: a value of `NVSHARE_MEMORY`.
    ///
    /// # Panics
    /// When the folder cannot be made.
    #[must_use]
    pub fn with_memory(memory: &str, settings: &[(&str, &str)]) -> Self {
        let mut settings = settings.to_vec();
        settings.push(("NVSHARE_MEMORY", memory));
        Self::simulated(&settings)
    }

    /// A driver that a test brings along.
    ///
    /// # Panics
    /// When the folder cannot be made.
    #[must_use]
    pub fn with_driver(driver: &Path) -> Self {
        Self::new(Some(driver), &[])
    }

    /// The machine's own driver.
    #[must_use]
    pub fn real() -> Self {
        Self::new(None, &[])
    }

    fn new(driver: Option<&Path>, settings: &[(&str, &str)]) -> Self {
        static LAST: AtomicU32 = AtomicU32::new(0);
        static SWEEP: Once = Once::new();
        SWEEP.call_once(|| scratch::sweep(&std::env::temp_dir()));
        let name = format!("nvshare-{}-{}", std::process::id(), LAST.fetch_add(1, Ordering::Relaxed));
        let dir = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).expect("a folder");
        if let Some(driver) = driver {
            let lib = dir.join("lib");
            std::fs::create_dir(&lib).expect("a folder");
            symlink(driver, lib.join("libcuda.so.1")).expect("a link");
        }
        let settings = settings.iter().map(|(name, value)| (name.into(), value.into())).collect();
        Self { dir, simulated: driver.is_some(), settings }
    }

    /// The folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Bytes of the disk that the folder takes: the cards have holes.
    #[must_use]
    pub fn disk_bytes(&self) -> u64 {
        let files = std::fs::read_dir(&self.dir).into_iter().flatten().flatten();
        files.filter_map(|file| file.metadata().ok()).map(|about| about.blocks() * 512).sum()
    }

    /// Clients' socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.dir.join("scheduler.sock")
    }

    /// Administrators' socket.
    #[must_use]
    pub fn admin_socket(&self) -> PathBuf {
        self.dir.join("admin.sock")
    }

    /// Tells programs that run until they are stopped to stop.
    ///
    /// # Panics
    /// When they cannot be told.
    pub fn stop(&self) {
        std::fs::write(self.dir.join("stop"), "").expect("a file");
    }

    /// Tells workloads that run until they are stopped to stop, and waits for them: the data of all is intact.
    ///
    /// # Panics
    /// When data is not intact, or a workload does not end.
    pub fn stop_intact<const N: usize>(&self, workloads: [Running; N]) -> [Finished; N] {
        self.stop();
        let finished = workloads.map(Running::finish);
        for workload in &finished {
            workload.intact();
        }
        finished
    }

    /// The same for a guest and a workload beside it: the guest ends well, and the workload's data is intact. Returns the
    /// guest.
    ///
    /// # Panics
    /// As [`World::stop_intact`], and when the guest fails.
    pub fn stop_guest(&self, guest: Running, beside: Running) -> Finished {
        self.stop();
        let guest = guest.finish();
        guest.passed();
        beside.finish().intact();
        guest
    }

    /// Looks at what moved on the card: nothing by page faults, and nothing because there was no room for it.
    ///
    /// # Panics
    /// When memory moved by itself.
    pub fn moved_when_told(&self) -> Moved {
        let (moved, _) = self.observe();
        assert_eq!((moved.faulted, moved.pushed_out), (0, 0), "{moved:?}");
        moved
    }

    /// Tells programs to change memory that they have left as it was.
    ///
    /// # Panics
    /// When they cannot be told.
    pub fn wake(&self) {
        std::fs::write(self.dir.join("wake"), "").expect("a file");
    }

    /// The environment of programs in this world.
    #[must_use]
    pub fn environment(&self) -> Vec<(OsString, OsString)> {
        let mut environment = vec![
            ("NVSHARE_SOCKET".into(), self.socket().into()),
            ("NVSHARE_ADMIN_SOCKET".into(), self.admin_socket().into()),
            // This machine may have a configuration of its own.
            ("NVSHARE_CONFIG".into(), "/dev/null".into()),
        ];
        if self.simulated {
            environment.push(("NVSIM_SPARSE".into(), "1".into()));
            environment.push(("NVSIM_DIR".into(), self.dir.clone().into()));
            environment.push(("LD_LIBRARY_PATH".into(), self.dir.join("lib").into()));
        }
        environment.extend(self.settings.iter().cloned());
        environment
    }

    /// Asks the simulator, in another process, what moved on a card, and which kernels ran.
    ///
    /// # Panics
    /// When the simulator cannot be loaded.
    #[must_use]
    pub fn observe(&self) -> (Moved, Vec<Ran>) {
        assert!(self.simulated, "a real card does not tell");
        // A program of its own asks: the simulator in one process shows one world.
        let mut command = std::process::Command::new(std::env::current_exe().expect("this program"));
        command.env_clear().envs(self.environment()).env(OBSERVER, &Artifacts::get().simulator);
        let output = command.output().expect("this program runs");
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("observed "))
            .unwrap_or_else(|| panic!("{output:?}"));
        let numbers: Vec<u64> = line.split(' ').map(|n| n.parse().expect("a number")).collect();
        let (moved, ran) = numbers.split_at(7);
        let moved = Moved {
            faulted: moved[0],
            touched: moved[1],
            pushed_out: moved[2],
            restored: moved[3],
            evicted: moved[4],
            evicted_in_use: moved[5],
            taken_back: moved[6],
        };
        let ran = ran
            .chunks_exact(4)
            .map(|r| Ran { process: r[0] as u32, gpu: r[1] as u32, begin_ns: r[2], end_ns: r[3] })
            .collect();
        (moved, ran)
    }
}

const OBSERVER: &str = "NVSHARE_HARNESS_OBSERVER";

/// Runs before `main` of every program with this harness: if the program is started to observe, it observes and ends.
#[used]
#[unsafe(link_section = ".init_array")]
static OBSERVE: extern "C" fn() = {
    extern "C" fn observe() {
        if let Some(simulator) = std::env::var_os(OBSERVER) {
            // SAFETY: the simulator that this build made; its functions have these signatures.
            unsafe {
                let library = libloading::Library::new(simulator).expect("the simulator");
                let init: libloading::Symbol<'_, unsafe extern "C" fn(u32) -> i32> =
                    library.get(b"cuInit").expect("cuInit");
                assert_eq!(init(0), 0);
                let moved: libloading::Symbol<'_, unsafe extern "C" fn(i32, *mut [u64; 7]) -> i32> =
                    library.get(b"nvsimMoved").expect("nvsimMoved");
                let trace: libloading::Symbol<'_, unsafe extern "C" fn(*mut Ran, usize, *mut usize) -> i32> =
                    library.get(b"nvsimTrace").expect("nvsimTrace");
                let mut numbers = [0u64; 7];
                assert_eq!(moved(0, &raw mut numbers), 0);
                let mut ran = vec![Ran { process: 0, gpu: 0, begin_ns: 0, end_ns: 0 }; 1 << 16];
                let mut count = 0;
                assert_eq!(trace(ran.as_mut_ptr(), ran.len(), &raw mut count), 0);
                let ran = ran[..count]
                    .iter()
                    .flat_map(|r| [u64::from(r.process), u64::from(r.gpu), r.begin_ns, r.end_ns]);
                let text: Vec<String> = numbers.into_iter().chain(ran).map(|n| n.to_string()).collect();
                println!("observed {}", text.join(" "));
                std::process::exit(0);
            }
        }
    }
    observe
};

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            scratch::shrink(&self.dir);
            eprintln!("logs are kept in {}", self.dir.display());
        } else {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }
}
