//! Segments: memory that this process makes and touches, so that it is charged to this process's control group, and that a
//! client maps and page-locks.
//!
//! The kernel tells when nobody uses a segment any more: it refuses to seal memory against writing while there is a mapping
//! that can write, or while pages are locked. So a segment counts as free when the kernel says so, and not when a client does. Then
//! it is emptied and closed, and never handed out again: the next one is new memory, all zero. The kernel refuses to cut
//! off what is sealed against shrinking, so a segment is sealed against growing alone. A client that shrinks its own segment
//! takes pages from itself: nobody else maps it. One that seals it against shrinking and writing keeps others from emptying it;
//! it counts until the scheduler ends.

#![allow(unsafe_code, reason = "memory that is touched before it is handed out")]

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;

use nvshare_proto::units::MIB;
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate,
    memfd_create,
};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// Threads that touch a segment, at most.
const MAX_THREADS: usize = 8;
/// The fewest bytes for which a thread is started.
const MIN_PER_THREAD: usize = 8 * MIB as usize;
const PAGE: usize = 4096;

/// Makes a segment. All of its pages are there, and it is mapped nowhere.
///
/// # Errors
/// The system has no memory or no descriptor for it.
pub(super) fn make(bytes: u64) -> io::Result<OwnedFd> {
    let length = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
    let file = memfd_create(c"nvshare-host", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, bytes)?;
    fcntl_add_seals(&file, SealFlags::GROW)?;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses the addresses, so no memory of ours is replaced.
    let begin = unsafe { mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, &file, 0)? };
    // SAFETY: the mapping just made. Where the kernel has no huge pages for shared memory, it uses small ones.
    let _ = unsafe { madvise(begin, length, Advice::LinuxHugepage) };
    let touched = touch(begin as usize, length);
    // SAFETY: the mapping just made, which nothing uses any more.
    unsafe { munmap(begin, length)? };
    touched.map(|()| file)
}

/// Has the kernel find all pages of a new mapping, by several threads.
fn touch(begin: usize, length: usize) -> io::Result<()> {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let threads = (processors / 2).min(MAX_THREADS).min(length / MIN_PER_THREAD).max(1);
    let share = length.div_ceil(threads).next_multiple_of(PAGE);
    thread::scope(|scope| {
        let begun: Vec<_> = (0..length)
            .step_by(share)
            .map(|from| {
                let populate = move || {
                    let bytes = share.min(length - from);
                    // SAFETY: a part of the new mapping, which nobody else has; its pages become zeros.
                    unsafe { madvise((begin + from) as *mut _, bytes, Advice::LinuxPopulateWrite) }
                };
                (
                    populate,
                    thread::Builder::new().name("nvshare-touch".to_owned()).spawn_scoped(scope, populate),
                )
            })
            .collect();
        for (populate, thread) in begun {
            match thread {
                Ok(thread) => thread.join().map_err(|_| io::ErrorKind::Other)??,
                // If a thread cannot be started, this one does the work.
                Err(_) => populate()?,
            }
        }
        Ok(())
    })
}

/// Empties a segment if nobody uses it. False: somebody does.
///
/// A client can add seals of its own, against this. Such a segment is emptied whoever uses it, while the kernel lets it be: what
/// the client maps then is not there any more, or memory that is charged to itself.
pub(super) fn empty_if_unused(segment: &OwnedFd) -> bool {
    let in_the_way = SealFlags::SEAL | SealFlags::SHRINK;
    if fcntl_get_seals(segment).is_ok_and(|seals| seals.intersects(in_the_way)) {
        return ftruncate(segment, 0).is_ok() || punch_out(segment);
    }
    fcntl_add_seals(segment.as_fd(), SealFlags::WRITE).is_ok() && ftruncate(segment.as_fd(), 0).is_ok()
}

fn punch_out(segment: &OwnedFd) -> bool {
    let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fstat(segment).is_ok_and(|stat| fallocate(segment, how, 0, stat.st_size as u64).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(bytes: u64) -> OwnedFd {
        make(bytes).unwrap()
    }

    #[test]
    fn a_segment_has_all_of_its_pages_and_they_are_zero() {
        let segment = made(2 * MIB);
        let stat = fstat(&segment).unwrap();
        assert_eq!((stat.st_size as u64, stat.st_blocks as u64 * 512), (2 * MIB, 2 * MIB));
        let mut bytes = vec![1; 2 * MIB as usize];
        assert_eq!(rustix::io::pread(&segment, &mut bytes, 0).unwrap(), bytes.len());
        assert!(bytes.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_segment_that_somebody_can_write_is_not_emptied() {
        let segment = made(2 * MIB);
        let length = 2 * MIB as usize;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping of the segment, unmapped below.
        let mapped =
            unsafe { mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, &segment, 0).unwrap() };
        assert!(!empty_if_unused(&segment), "it is mapped");
        // SAFETY: the mapping made above.
        unsafe {
            mapped.cast::<u8>().write_volatile(7);
            munmap(mapped, length).unwrap();
        }
        assert!(empty_if_unused(&segment));
        assert_eq!(fstat(&segment).unwrap().st_blocks, 0, "its pages are gone, whoever has a descriptor");
        assert!(rustix::io::pwrite(&segment, &[1], 0).is_err());
    }

    #[test]
    fn a_client_that_seals_a_segment_does_not_keep_its_pages() {
        for seals in [SealFlags::SEAL, SealFlags::SHRINK, SealFlags::SHRINK | SealFlags::SEAL] {
            let segment = made(2 * MIB);
            fcntl_add_seals(&segment, seals).unwrap();
            assert!(empty_if_unused(&segment), "{seals:?}");
            assert_eq!(fstat(&segment).unwrap().st_blocks, 0, "{seals:?}");
        }
        let segment = made(2 * MIB);
        fcntl_add_seals(&segment, SealFlags::SHRINK | SealFlags::WRITE).unwrap();
        assert!(!empty_if_unused(&segment), "nobody can empty it, so it counts");
    }
}
