//! Tenants: the processes that share one quota.
//!
//! A tenant is a seat, as the listener tells, one of Slurm's jobs or a container, as the kernel's control groups tell, or the processes of
//! one `nvshare-ctl run`, which name it themselves and have one user; else a process is by itself. Each tenant has a [`Page`] in memory that
//! its processes map.

#![allow(unsafe_code, reason = "shared memory")]

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use nvshare_proto::quota::{NO_ROW, Page, ROWS};
use nvshare_proto::{Reply, SchedulerMessage, SeatName};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::control_groups::Groups;
use crate::lock::lock;
use crate::sockets::frames::{self, Stream};

/// A tenant: a container, a seat, one of Slurm's jobs, or one run.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Tenant {
    /// A container, by the whole path of its control group: anybody can make one with the same ending below a group
    /// of their own.
    Container(String),
    /// A seat, by the listener that accepted the connections of its processes.
    Seat(SeatName),
    /// One of Slurm's jobs, with the containers that it has.
    Job(u32),
    /// The processes that a user's `nvshare-ctl run` started.
    Run {
        /// The user.
        user: u32,
        /// The run's number, as the processes say.
        run: u64,
    },
}

impl Tenant {
    /// The tenant of a process: its job or its container as the kernel says, or else the run that the process names.
    #[must_use]
    pub(crate) fn of(groups: &Groups, user: Option<u32>, run: Option<u64>) -> Option<Self> {
        let container = || groups.container().map(|path| Self::Container(path.to_owned()));
        let named = || Some(Self::Run { user: user?, run: run? });
        groups.job().map(Self::Job).or_else(container).or_else(named)
    }

    /// Whether the tenant is no choice of its processes: users within it are its own, and all its processes share the time as one.
    pub(crate) fn is_given(&self) -> bool {
        matches!(self, Self::Container(_) | Self::Seat(_) | Self::Job(_))
    }

    /// Slurm's job, if the tenant is one.
    pub(crate) fn job(&self) -> Option<u32> {
        match self {
            Self::Job(job) => Some(*job),
            _ => None,
        }
    }

    /// The number of the gang of this name, in a container, seat or job, or else of a user: processes of others cannot join it.
    #[must_use]
    pub(crate) fn gang(tenant: Option<&Self>, user: Option<u32>, name: &str) -> u64 {
        let given = tenant.filter(|tenant| tenant.is_given());
        let mut hasher = DefaultHasher::new();
        (given, given.is_none().then_some(user), name).hash(&mut hasher);
        hasher.finish()
    }

    /// A number that stands for the tenant.
    #[must_use]
    pub(crate) fn number(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }
}

/// All tenants with processes.
#[derive(Debug, Default)]
pub(crate) struct Tenants {
    pages: Mutex<BTreeMap<Tenant, Arc<TenantPage>>>,
}

/// A tenant's page, and its rows that are taken.
#[derive(Debug)]
struct TenantPage {
    descriptor: OwnedFd,
    page: NonNull<Page>,
    taken: Mutex<Vec<bool>>,
}

// SAFETY: the page is atomics alone, and stays mapped for as long as this lives.
unsafe impl Send for TenantPage {}
// SAFETY: as above.
unsafe impl Sync for TenantPage {}

impl TenantPage {
    fn new() -> io::Result<Self> {
        let size = size_of::<Page>();
        let descriptor = memfd_create(c"nvshare-quota", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&descriptor, size as u64)?;
        // Sealed, so that nobody can take pages away.
        fcntl_add_seals(&descriptor, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the addresses, so no memory of ours is replaced.
        let page = unsafe { mmap(std::ptr::null_mut(), size, protection, MapFlags::SHARED, &descriptor, 0)? };
        let page = NonNull::new(page.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { descriptor, page, taken: Mutex::default() })
    }

    fn page(&self) -> &Page {
        // SAFETY: mapped for as long as this lives, zeroed by the kernel, which is a valid page, and atomics alone.
        unsafe { self.page.as_ref() }
    }
}

impl Drop for TenantPage {
    fn drop(&mut self) {
        // SAFETY: mapped by us with this size, and used by nobody any more.
        let _ = unsafe { munmap(self.page.as_ptr().cast(), size_of::<Page>()) };
    }
}

/// A process's place in its tenant. Dropping it frees the process's bytes.
#[derive(Debug)]
pub(crate) struct Row {
    shared: Arc<TenantPage>,
    row: usize,
}

impl Tenants {
    /// A place for one more process of a tenant.
    ///
    /// # Errors
    /// There is no memory for the tenant's page, or the tenant has too many processes.
    pub(crate) fn join(&self, tenant: Tenant) -> io::Result<Row> {
        let mut pages = lock(&self.pages);
        pages.retain(|_, shared| Arc::strong_count(shared) > 1);
        let shared = match pages.get(&tenant) {
            Some(shared) => Arc::clone(shared),
            None => {
                let shared = Arc::new(TenantPage::new()?);
                pages.insert(tenant, Arc::clone(&shared));
                shared
            }
        };
        let mut taken = lock(&shared.taken);
        taken.resize(ROWS, false);
        let row = taken.iter().position(|taken| !taken).ok_or(io::ErrorKind::QuotaExceeded)?;
        if let Some(taken) = taken.get_mut(row) {
            *taken = true;
        }
        drop(taken);
        // The row's last owner may have added to it after its bytes were taken back.
        shared.page().reclaim(row);
        Ok(Row { shared, row })
    }

    /// Sends the page of a tenant that has processes to a process that only looks.
    ///
    /// # Errors
    /// The socket's errors, or that there is no such tenant.
    pub(crate) async fn show(&self, tenant: &Tenant, stream: &Stream) -> io::Result<()> {
        let shared = lock(&self.pages).get(tenant).cloned().ok_or(io::ErrorKind::NotFound)?;
        tell(&shared, NO_ROW, stream).await
    }
}

async fn tell(shared: &TenantPage, row: u32, stream: &Stream) -> io::Result<()> {
    let quota = Reply::Client(SchedulerMessage::Quota { row });
    frames::tell_with(stream, &quota, &[shared.descriptor.as_fd()]).await
}

impl Row {
    /// Tells the process: sends a frame, with the page's descriptor.
    ///
    /// # Errors
    /// The socket's errors.
    pub(crate) async fn tell(&self, stream: &Stream) -> io::Result<()> {
        tell(&self.shared, self.row as u32, stream).await
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        let mut taken = lock(&self.shared.taken);
        let page = self.shared.page();
        page.reclaim(self.row);
        if let Some(taken) = taken.get_mut(self.row) {
            *taken = false;
        }
        if !taken.contains(&true) {
            // Bytes that a process lost between two steps, because it was killed, are found again here.
            page.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gangs_are_of_one_user_or_container() {
        let run = |run| Tenant::Run { user: 1, run };
        let container = |path: &str| Tenant::Container(path.to_owned());
        let of = |tenant: Tenant, user| Tenant::gang(Some(&tenant), Some(user), "ranks");
        assert_eq!(of(run(1), 7), of(run(2), 7), "two runs of one user");
        assert_eq!(of(run(1), 7), Tenant::gang(None, Some(7), "ranks"));
        assert_ne!(of(run(1), 7), of(run(1), 8));
        assert_ne!(of(run(1), 7), Tenant::gang(None, Some(7), "others"));
        assert_eq!(of(container("/a"), 0), of(container("/a"), 7), "users of a container are its own");
        assert_ne!(of(container("/a"), 0), of(container("/b"), 0));
        assert_ne!(of(container("/a"), 0), Tenant::gang(None, Some(0), "ranks"));
        let [one, other] =
            ["00000000000000aa", "00000000000000ab"].map(|name| Tenant::Seat(name.parse().unwrap()));
        assert_eq!(of(one.clone(), 0), of(one.clone(), 7), "those of a seat too");
        assert_ne!(of(one, 0), of(other, 0));
        assert_ne!(of(Tenant::Job(1), 7), of(Tenant::Job(2), 7), "two jobs of one user");
    }

    #[test]
    fn a_row_that_is_left_is_free_again() {
        let tenants = Tenants::default();
        let run = || Tenant::Run { user: 1, run: 2 };
        let (a, b) = (tenants.join(run()).unwrap(), tenants.join(run()).unwrap());
        assert_eq!((a.row, b.row), (0, 1));
        assert_eq!(a.shared.page().charge(a.row, 0, 70, 100), Ok(()));
        assert_eq!(b.shared.page().charge(b.row, 0, 70, 100), Err(70));
        drop(a);
        assert_eq!(b.shared.page().charge(b.row, 0, 70, 100), Ok(()));
        assert_eq!(tenants.join(run()).unwrap().row, 0);
        let other = tenants.join(Tenant::Container("x".into())).unwrap();
        assert_eq!(other.shared.page().used(0), 0);
        assert!((0..ROWS - 1).map(|_| tenants.join(run())).collect::<io::Result<Vec<_>>>().is_ok());
    }
}
