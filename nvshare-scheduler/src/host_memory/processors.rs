//! The processors near a GPU, and threads that run on these alone.
//!
//! The kernel puts a page on the NUMA node of the processor that touches it first. Copies between a GPU and memory of another
//! node cross the link between the processors, so the threads that touch a segment run near the GPU. None of this has to
//! work: without it pages lie where they happen to.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Processors of this machine, by their numbers. There is at least one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Processors(BTreeSet<usize>);

impl Processors {
    /// The processors of the NUMA node of a device, by its place on the bus, as `sysfs` tells.
    ///
    /// # Errors
    /// Why they are not known.
    pub(super) fn near(sysfs: &Path, bus: &str) -> Result<Self, String> {
        let folder = sysfs.join("bus/pci/devices").join(bus.to_ascii_lowercase());
        let read = |name: &str| {
            let path = folder.join(name);
            fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))
        };
        if read("numa_node")?.trim() == "-1" {
            return Err(format!("{bus} belongs to no NUMA node"));
        }
        let list = read("local_cpulist")?;
        Self::parse(&list).ok_or_else(|| format!("{bus} has no processors nearby: {:?}", list.trim()))
    }

    /// Reads a list as the kernel writes it: `0-3,8,10-11`. None: the list is empty, or is none. Processors that no mask can
    /// name are left out.
    fn parse(list: &str) -> Option<Self> {
        let mut all = BTreeSet::new();
        for part in list.trim().split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let [first, last] = [first, last].map(|number| number.parse::<usize>().ok());
            let (first, last) = first.zip(last).filter(|(first, last)| first <= last)?;
            all.extend(first..last.saturating_add(1).min(CpuSet::MAX_CPU));
        }
        (!all.is_empty()).then_some(Self(all))
    }

    /// The processors that this thread may run on.
    ///
    /// # Errors
    /// The kernel does not say.
    pub(super) fn of_this_thread() -> io::Result<Self> {
        let mask = sched_getaffinity(None)?;
        Ok(Self((0..CpuSet::MAX_CPU).filter(|&number| mask.is_set(number)).collect()))
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// The last of them.
    #[cfg(test)]
    pub(super) fn last(&self) -> Self {
        Self(self.0.last().copied().into_iter().collect())
    }

    /// A processor that tests do not run on.
    #[cfg(test)]
    pub(super) fn none_of_this_machine() -> Self {
        Self([CpuSet::MAX_CPU - 1].into())
    }

    /// From now on, this thread runs on these alone, as far as it may run on them. Returns those that it has got.
    ///
    /// # Errors
    /// It may run on none of them. It runs where it did.
    pub(super) fn bind(&self) -> io::Result<Self> {
        let allowed = Self::of_this_thread()?;
        let mut mask = CpuSet::new();
        self.0.intersection(&allowed.0).for_each(|&number| mask.set(number));
        if mask.count() == 0 {
            let why = format!("of the processors {self}, the scheduler may use none");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        sched_setaffinity(None, &mask)?;
        Self::of_this_thread()
    }
}

impl fmt::Display for Processors {
    /// The form that the kernel writes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut left = self.0.iter().copied().peekable();
        let mut comma = "";
        while let Some(first) = left.next() {
            let mut last = first;
            while let Some(next) = left.next_if_eq(&(last + 1)) {
                last = next;
            }
            if first == last {
                write!(f, "{comma}{first}")?
            } else {
                write!(f, "{comma}{first}-{last}")?
            }
            comma = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_the_kernel_writes_them() {
        for (list, expected, shown) in [
            ("0\n", &[0][..], "0"),
            ("0-3,8,10-11\n", &[0, 1, 2, 3, 8, 10, 11], "0-3,8,10-11"),
            ("5-5", &[5], "5"),
            ("1,2,3", &[1, 2, 3], "1-3"),
            ("1022-18446744073709551615", &[1022, 1023], "1022-1023"),
        ] {
            let read = Processors::parse(list).unwrap();
            assert_eq!(read.0.iter().copied().collect::<Vec<_>>(), expected, "{list}");
            assert_eq!(read.to_string(), shown);
        }
        for list in ["", "\n", "a", "3-1", "1,", "0-3:1/2", "-1", "0 1", "18446744073709551616", "2000-2001"]
        {
            assert_eq!(Processors::parse(list), None, "{list}");
        }
    }

    #[test]
    fn what_the_machine_does_not_tell_is_not_known() {
        let sysfs = std::env::temp_dir().join(format!("nvshare-sysfs-{}", std::process::id()));
        for (bus, node, list) in [
            ("0000:65:00.0", Some("1\n"), Some("2-3\n")),
            ("0000:66:00.0", Some("-1\n"), Some("0-3\n")),
            ("0000:67:00.0", Some("0\n"), Some("\n")),
            ("0000:68:00.0", Some("0\n"), None),
            ("0000:69:00.0", None, Some("0-3\n")),
            ("0000:af:00.0", Some("0\n"), Some("7\n")),
        ] {
            let folder = sysfs.join("bus/pci/devices").join(bus);
            fs::create_dir_all(&folder).unwrap();
            for (name, text) in [("numa_node", node), ("local_cpulist", list)] {
                text.iter().for_each(|text| fs::write(folder.join(name), text).unwrap());
            }
        }
        let near = |bus| Processors::near(&sysfs, bus).map(|found| found.to_string());
        assert_eq!(near("0000:65:00.0"), Ok("2-3".to_owned()));
        assert_eq!(near("0000:AF:00.0"), Ok("7".to_owned()), "the kernel names devices in lower case");
        for bus in ["0000:66:00.0", "0000:67:00.0", "0000:68:00.0", "0000:69:00.0", "0000:70:00.0"] {
            assert!(near(bus).is_err(), "{bus}");
        }
        fs::remove_dir_all(&sysfs).unwrap();
    }

    #[test]
    fn a_thread_is_bound_to_what_it_may_use_and_no_other_thread_is() {
        let before = Processors::of_this_thread().unwrap();
        let bound = |list: Processors| {
            std::thread::spawn(move || (list.bind(), Processors::of_this_thread().unwrap())).join().unwrap()
        };
        let one = before.last();
        let with_more = Processors(one.0.union(&Processors::none_of_this_machine().0).copied().collect());
        assert_eq!(bound(with_more).1, one, "beyond what it may use there is nothing");
        let (refused, then) = bound(Processors::none_of_this_machine());
        assert!(refused.is_err());
        assert_eq!(then, before, "it runs where it did");
        assert_eq!(Processors::of_this_thread().unwrap(), before);
    }
}
