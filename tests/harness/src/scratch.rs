//! Folders of tests whose process was killed, or in which a test failed: simulated cards take up to a gigabyte there.

use std::path::Path;
use std::time::Duration;

/// The file of a world's simulated cards.
const CARDS: &str = "world";
/// Logs of tests that failed are kept for this long.
const KEPT: Duration = Duration::from_secs(24 * 3600);

/// Removes what tests of processes that are gone have left: the cards at once, logs after a day.
pub(crate) fn sweep(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let Some(owner) = entry.file_name().to_str().and_then(owner) else { continue };
        if Path::new("/proc").join(owner.to_string()).exists() {
            continue;
        }
        let age = entry.metadata().and_then(|about| about.modified()).ok().and_then(|at| at.elapsed().ok());
        if age.is_some_and(|age| age > KEPT) {
            let _ = std::fs::remove_dir_all(entry.path());
        } else {
            shrink(&entry.path());
        }
    }
}

/// Removes the cards of a world, and keeps its logs.
pub(crate) fn shrink(folder: &Path) {
    let _ = std::fs::remove_file(folder.join(CARDS));
}

/// The process whose test made a folder of this name, if one did.
fn owner(name: &str) -> Option<u32> {
    let (process, number) = name.strip_prefix("nvshare-")?.split_once('-')?;
    number.parse::<u32>().ok().and(process.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_processes_that_are_gone_shrink_and_others_stay() {
        let scratch = std::env::temp_dir().join(format!("nvshare-sweep-{}", std::process::id()));
        let living = format!("nvshare-{}-0", std::process::id());
        // No process has this number: it is above the most that the kernel gives.
        for name in ["nvshare-4194305-3", living.as_str(), "nvshare-x-1", "other-4194305-3"] {
            let folder = scratch.join(name);
            std::fs::create_dir_all(&folder).expect("a folder");
            for file in [CARDS, "job.log"] {
                std::fs::write(folder.join(file), "").expect("a file");
            }
        }
        let day_old = scratch.join("nvshare-4194305-4");
        std::fs::create_dir(&day_old).expect("a folder");
        let long_ago = std::time::SystemTime::now() - KEPT * 2;
        std::fs::File::open(&day_old).and_then(|folder| folder.set_modified(long_ago)).expect("a time");
        sweep(&scratch);
        let there = |name: &str| scratch.join(name).exists();
        assert!(!there("nvshare-4194305-3/world") && there("nvshare-4194305-3/job.log"));
        assert!(!there("nvshare-4194305-4"));
        for kept in [living.as_str(), "nvshare-x-1", "other-4194305-3"] {
            assert!(there(&format!("{kept}/world")), "{kept}");
        }
        std::fs::remove_dir_all(&scratch).expect("a folder");
    }
}
