//! Control groups of the kernel, for programs of a test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::{Artifacts, Program, World};

/// A control group, and those above it that were made for it. They are removed when it is dropped.
#[derive(Debug)]
pub struct ControlGroup {
    path: PathBuf,
    /// How many folders of the path were made.
    made: usize,
}

impl ControlGroup {
    /// The root of the hierarchy of version 2, if there is one.
    #[must_use]
    pub fn second() -> Option<PathBuf> {
        let roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
        roots.into_iter().find(|root| root.join("cgroup.controllers").exists()).map(Path::to_owned)
    }

    /// The root of the hierarchy of a controller of version 1, if there is one.
    #[must_use]
    pub fn first(controller: &str) -> Option<PathBuf> {
        let root = Path::new("/sys/fs/cgroup").join(controller);
        root.join("cgroup.procs").exists().then_some(root)
    }

    /// The group at this path.
    ///
    /// # Panics
    /// When the system does not let us make one: the test needs root.
    #[must_use]
    pub fn at(path: &Path) -> Self {
        let made = path.ancestors().take_while(|path| !path.exists()).count();
        if let Err(error) = std::fs::create_dir_all(path) {
            panic!("no control group at {}: {error}", path.display());
        }
        Self { path: path.to_owned(), made }
    }

    /// The file to which a process writes its number to be in the group.
    #[must_use]
    pub fn entrance(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// A workload that begins within the group.
    #[must_use]
    pub fn workload(&self, world: &World, name: &str, arguments: &str) -> Program {
        let workload = Artifacts::get().workload.display();
        let line = format!("echo $$ > {} && exec {workload} {name} {arguments}", self.entrance().display());
        let mut command = Command::new("sh");
        command.args(["-c", &line]);
        Program::of(world, name, command).preloaded()
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        for path in self.path.ancestors().take(self.made) {
            // A process that has just ended may be in it for a moment; another group may still be below.
            for _ in 0..100 {
                let below = std::fs::read_dir(path).into_iter().flatten().flatten();
                if below.map(|entry| entry.path()).any(|path| path.is_dir())
                    || std::fs::remove_dir(path).is_ok()
                {
                    break;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// A control group with a limit of memory.
#[derive(Debug)]
pub struct MemoryGroup {
    group: ControlGroup,
    peak: &'static str,
}

impl MemoryGroup {
    /// A group whose processes are killed when they are charged for more than `bytes`.
    ///
    /// # Panics
    /// When the system does not let us make one: the test needs root, and a controller of memory for groups of its own.
    #[must_use]
    pub fn with_limit(bytes: u64) -> Self {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let second = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
        let (root, limit, peak) = if second {
            ("/sys/fs/cgroup", "memory.max", "memory.peak")
        } else {
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes")
        };
        let name = format!("nvshare-test-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let group = ControlGroup::at(&Path::new(root).join(name));
        let limited = std::fs::OpenOptions::new()
            .write(true)
            .open(group.path.join(limit))
            .and_then(|mut file| std::io::Write::write_all(&mut file, bytes.to_string().as_bytes()));
        assert!(
            limited.is_ok(),
            "no control group with a limit of memory at {}: {limited:?}",
            group.path.display()
        );
        Self { group, peak }
    }

    /// A workload that begins within the group.
    #[must_use]
    pub fn workload(&self, world: &World, name: &str, arguments: &str) -> Program {
        self.group.workload(world, name, arguments)
    }

    /// The most bytes that the group was charged for at a time.
    ///
    /// # Panics
    /// When the kernel does not say.
    #[must_use]
    pub fn peak(&self) -> u64 {
        let text = std::fs::read_to_string(self.group.path.join(self.peak)).expect("a peak");
        text.trim().parse().expect("a number")
    }
}
