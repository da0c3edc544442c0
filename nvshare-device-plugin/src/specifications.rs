//! The specifications of CDI devices that others wrote.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nvshare_proto::ThrottledLine;
use tracing::warn;

use crate::nvidia::{self, Specification};

/// Files as they were when they were read: path, file, length, and time of the last change.
type GpuNews = Vec<(PathBuf, u64, u64, i64, i64)>;

static UNREADABLE: ThrottledLine = ThrottledLine::new(|text| warn!("{text}"));

/// The specifications in some folders.
#[derive(Debug)]
pub struct Specifications {
    folders: Vec<PathBuf>,
    /// The name of our own, which is left out.
    own: &'static str,
    seen: GpuNews,
    read: Vec<Specification>,
}

impl Specifications {
    /// Those in these folders, without the file of this name.
    #[must_use]
    pub const fn of(folders: Vec<PathBuf>, own: &'static str) -> Self {
        Self { folders, own, seen: Vec::new(), read: Vec::new() }
    }

    /// The specifications as they are now. They are read again only where a file has changed.
    pub fn now(&mut self) -> &[Specification] {
        let files = self.folders.iter().flat_map(|folder| fs::read_dir(folder).into_iter().flatten());
        let paths = files.filter_map(|entry| Some(entry.ok()?.path()));
        let is_other = |path: &PathBuf| path.file_name().is_some_and(|name| name != self.own);
        let mut seen: GpuNews =
            paths.filter(|path| is_specification(path) && is_other(path)).filter_map(look).collect();
        seen.sort();
        if seen != self.seen {
            self.read = seen.iter().filter_map(|(path, ..)| read(path)).collect();
            self.seen = seen;
        }
        &self.read
    }
}

/// Whether engines read a file of this name.
fn is_specification(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ["json", "yaml"].iter().any(|known| ending == *known))
}

fn look(path: PathBuf) -> Option<(PathBuf, u64, u64, i64, i64)> {
    let found = fs::metadata(&path).ok()?;
    Some((path, found.ino(), found.len(), found.mtime(), found.mtime_nsec()))
}

fn read(path: &Path) -> Option<Specification> {
    let text = fs::read_to_string(path).map_err(|error| error.to_string());
    let specification = text.and_then(|text| nvidia::parse(&text));
    specification
        .inspect_err(|error| {
            UNREADABLE.say(format_args!("{}: no specification of devices: {error}", path.display()))
        })
        .ok()
}
