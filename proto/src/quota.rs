//! The page through which the processes of a tenant share one quota.
//!
//! The scheduler hands each process of a tenant the same page and a row of its own in it. The bytes that a process
//! allocates are added to the tenant's sum by compare and exchange, so two processes cannot both take the last byte,
//! and to the process's own row, so that the scheduler can take back the bytes of a process that was killed.
//!
//! Nothing in the page is trusted: a tenant that scribbles over it harms its own quota.

mod sums;

use std::sync::atomic::AtomicU32;

use atomics::{AtomicU64, Ordering};

use crate::GpuUuid;

/// The atomics of the sums.
mod atomics {
    pub(super) use std::sync::atomic::{AtomicU64, Ordering};
}

/// GPUs that a tenant can use.
pub const GPUS: usize = 64;
/// Processes that a tenant can have at a time.
pub const ROWS: usize = 512;
/// The row of a process that looks without registering: nothing is counted there.
pub const NO_ROW: u32 = u32::MAX;

/// See the module's documentation. All zeroes is an empty page.
#[repr(C)]
#[derive(Debug)]
pub struct Page {
    /// The GPU of each column; 0: none yet.
    gpus: [AtomicU64; GPUS],
    /// Bytes of all processes, by column.
    used: [AtomicU64; GPUS],
    /// Bytes of each process, by column.
    rows: [[AtomicU64; GPUS]; ROWS],
    /// The process of each row, by its own number; 0: nobody.
    pids: [AtomicU32; ROWS],
}

impl Page {
    /// The column of a GPU. The first call takes a new one; `None` when there are too many.
    #[must_use]
    pub fn column(&self, gpu: GpuUuid) -> Option<usize> {
        let (halves, _) = gpu.0.as_chunks::<8>();
        // A machine has few GPUs: eight bytes tell them apart, if all sixteen of the UUID were mixed into them.
        let mixed =
            |name: u64, half: &[u8; 8]| name.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from_le_bytes(*half);
        let name = halves.iter().fold(1, mixed).max(1);
        sums::column(&self.gpus, name)
    }

    /// Bytes that the tenant's processes have on a GPU together.
    #[must_use]
    pub fn used(&self, column: usize) -> u64 {
        self.used.get(column).map_or(0, |used| used.load(Ordering::SeqCst))
    }

    /// A process takes its row.
    pub fn enter(&self, row: usize, pid: u32) {
        if let Some(place) = self.pids.get(row) {
            place.store(pid, Ordering::SeqCst);
        }
    }

    /// Processes that have memory on a GPU, and how many bytes.
    pub fn processes(&self, column: usize) -> impl Iterator<Item = (u32, u64)> {
        self.pids.iter().enumerate().filter_map(move |(row, pid)| {
            let (pid, bytes) = (pid.load(Ordering::SeqCst), self.cell(row, column)?.load(Ordering::SeqCst));
            (pid != 0 && bytes != 0).then_some((pid, bytes))
        })
    }

    /// Adds bytes to the process's row and the tenant's sum, unless the sum would exceed `limit`.
    ///
    /// # Errors
    /// The tenant's sum, if it would exceed the limit; nothing is changed.
    pub fn charge(&self, row: usize, column: usize, bytes: u64, limit: u64) -> Result<(), u64> {
        let (Some(used), Some(own)) = (self.used.get(column), self.cell(row, column)) else { return Ok(()) };
        sums::charge(used, own, bytes, limit)
    }

    /// Takes bytes from the process's row and the tenant's sum.
    pub fn discharge(&self, row: usize, column: usize, bytes: u64) {
        let (Some(used), Some(own)) = (self.used.get(column), self.cell(row, column)) else { return };
        sums::discharge(used, own, bytes);
    }

    /// A process is gone: its bytes are free.
    pub fn reclaim(&self, row: usize) {
        self.enter(row, 0);
        for (column, used) in self.used.iter().enumerate() {
            if let Some(own) = self.cell(row, column) {
                sums::reclaim(used, own);
            }
        }
    }

    /// The last process is gone: all sums are zero.
    pub fn clear(&self) {
        self.used.iter().for_each(|used| used.store(0, Ordering::SeqCst));
    }

    fn cell(&self, row: usize, column: usize) -> Option<&AtomicU64> {
        self.rows.get(row)?.get(column)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> Box<Page> {
        let zeroes = || std::array::from_fn(|_| AtomicU64::new(0));
        let rows = std::array::from_fn(|_| zeroes());
        let pids = std::array::from_fn(|_| AtomicU32::new(0));
        Box::new(Page { gpus: zeroes(), used: zeroes(), rows, pids })
    }

    #[test]
    fn columns_are_found_again() {
        let page = page();
        let gpu = |n: usize| GpuUuid(std::array::from_fn(|i| if i == 0 { n as u8 } else { 7 }));
        for round in 0..2 {
            for n in 0..GPUS {
                assert_eq!(page.column(gpu(n)), Some(n), "round {round}");
            }
        }
        assert_eq!(page.column(gpu(GPUS)), None);
    }

    #[test]
    fn the_last_byte_goes_to_one() {
        let page = page();
        assert_eq!(page.charge(0, 0, 60, 100), Ok(()));
        assert_eq!(page.charge(1, 0, 40, 100), Ok(()));
        assert_eq!(page.charge(1, 0, 1, 100), Err(100));
        assert_eq!(page.charge(1, 1, 100, 100), Ok(()), "another GPU");
        page.enter(1, 4711);
        assert_eq!(
            page.processes(0).collect::<Vec<_>>(),
            [(4711, 40)],
            "a process without a number is not shown"
        );
        page.discharge(0, 0, 10);
        assert_eq!(page.charge(1, 0, 11, 100), Err(90));
        page.reclaim(0);
        assert_eq!(page.used(0), 40);
        assert_eq!(page.charge(1, 0, u64::MAX, u64::MAX), Err(40), "no overflow");
        page.discharge(1, 0, 1000);
        assert_eq!(page.used(0), 0, "no underflow");
        assert_eq!(page.processes(0).count(), 0);
        assert_eq!(page.charge(0, 0, 50, 100), Ok(()));
        page.discharge(1, 0, 1000);
        assert_eq!(page.used(0), 50, "bytes that are free already are not taken from others");
        assert_eq!(page.charge(ROWS, 0, 1000, 100), Ok(()), "no such row: not counted");
    }

    #[test]
    fn many_threads_never_pass_the_limit() {
        const LIMIT: u64 = 1000;
        let page = &*page();
        std::thread::scope(|scope| {
            for row in 0..8 {
                scope.spawn(move || {
                    for i in 0..50_000u64 {
                        let bytes = (i * 7 + row as u64) % 300 + 1;
                        if page.charge(row, 0, bytes, LIMIT).is_ok() {
                            assert!(page.used(0) <= LIMIT);
                            page.discharge(row, 0, bytes);
                        }
                    }
                });
            }
        });
        assert_eq!(page.used(0), 0);
    }
}
