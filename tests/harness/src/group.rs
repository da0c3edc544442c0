//! A control group of the kernel with a limit of memory, for programs of a test.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// A control group, removed when it is dropped.
#[derive(Debug)]
pub struct MemoryGroup {
    path: PathBuf,
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
        let group = Self { path: Path::new(root).join(name), peak };
        let made = std::fs::create_dir(&group.path)
            .and_then(|()| std::fs::OpenOptions::new().write(true).open(group.path.join(limit)))
            .and_then(|mut file| std::io::Write::write_all(&mut file, bytes.to_string().as_bytes()));
        assert!(
            made.is_ok(),
            "no control group with a limit of memory at {}: {made:?}",
            group.path.display()
        );
        group
    }

    /// The file to which a process writes its number to be in the group.
    #[must_use]
    pub fn entrance(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// The most bytes that the group was charged for at a time.
    ///
    /// # Panics
    /// When the kernel does not say.
    #[must_use]
    pub fn peak(&self) -> u64 {
        let text = std::fs::read_to_string(self.path.join(self.peak)).expect("a peak");
        text.trim().parse().expect("a number")
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // A process that has just ended may be in it for a moment.
        for _ in 0..100 {
            if std::fs::remove_dir(&self.path).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
