//! The kernel by which nvshare looks at pieces of memory (`libnvshare/src/memory/backing/swap/content/kernel.cu`): what that
//! computes on a card is computed here by the function in [`nvshare_client::content`], which is written in another way.
//!
//! A block of the store stands for the whole piece, so it is what is looked at, however many words the launch names.

use std::ffi::c_void;
use std::sync::Arc;

use nvshare_client::content::{self, ContentCheck, Hash, Keys};

use crate::config::{Held, Lie};
use crate::memory::Piece;
use crate::process::{self, Failure, INVALID_VALUE, Process};
use crate::stream::Work;
use crate::world::BLOCK;

/// The kernel's name.
pub(crate) const NAME: &str = "nvshare_content";

/// Pieces of the launch by which nvshare tries the kernel. No look is as small where a program has three granules or more.
const TRIED: u32 = 2;

/// The kernel is about to look at `pieces` pieces.
pub(crate) fn begins(pieces: u32) {
    let Ok(p) = process::get() else { return };
    if pieces != TRIED {
        p.world.config().wait_while_held(Held::Look);
    }
}

/// The kernel's result for a piece.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Written {
    hash: [u64; 2],
    state: u32,
    unused: u32,
}

/// The parameters of a launch.
#[derive(Debug, Clone, Copy)]
struct Launch {
    pieces: *const u64,
    seen: *mut Written,
    words: u32,
    hashes: bool,
    keys: Keys,
    blocks: usize,
}

// SAFETY: page-locked memory of the program, which lives until the work is complete.
unsafe impl Send for Launch {}
// SAFETY: as above.
unsafe impl Sync for Launch {}

/// The work of a launch of `blocks` blocks.
///
/// # Safety
/// `params` is null or what the kernel takes.
pub(crate) unsafe fn work(blocks: u32, params: *mut *mut c_void) -> Result<Work, Failure> {
    let p = process::get()?;
    if params.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: promised by the caller.
    let launch = unsafe {
        Launch {
            pieces: *(*params).cast(),
            seen: *(*params.add(1)).cast(),
            words: *(*params.add(2)).cast(),
            hashes: *(*params.add(3)).cast::<u32>() != 0,
            keys: *(*params.add(4)).cast(),
            blocks: blocks as usize,
        }
    };
    Ok(Arc::new(move || run(p, launch)))
}

fn run(p: &Process, launch: Launch) {
    for i in 0..launch.blocks {
        // SAFETY: the list and the answers are as long as the launch has blocks.
        let (address, place) = unsafe { (*launch.pieces.add(i), launch.seen.add(i)) };
        let seen = see(p, address, launch.words as usize * 16, &launch.keys);
        let seen = seen.map(|seen| lie(p, address, launch.words, seen));
        let (hash, state) = match seen {
            Some(ContentCheck::Zero) => ([0; 2], 1),
            Some(ContentCheck::Data(hash)) => {
                (hash.filter(|_| launch.hashes).map_or([0; 2], |Hash(hash)| hash), 2)
            }
            None => return,
        };
        // SAFETY: as above.
        unsafe { place.write(Written { hash, state, unused: 0 }) };
    }
}

/// Looks at a piece of a card's memory, or of the host's.
fn see(p: &Process, address: u64, bytes: usize, keys: &Keys) -> Option<ContentCheck> {
    let is_host = p.tables().is_host(address as usize, bytes);
    if is_host {
        // SAFETY: page-locked memory of the program, as a card reaches it.
        return Some(content::look(unsafe { std::slice::from_raw_parts(address as *const u8, bytes) }, keys));
    }
    let mut seen = None;
    p.touch(address, bytes as u64, |store, _: Piece| seen = Some(content::look(store, keys)));
    seen
}

/// A card that does not see what is there, if the tests ask for one. The kernel's first launch, for few words, is true.
fn lie(p: &Process, address: u64, words: u32, seen: ContentCheck) -> ContentCheck {
    if u64::from(words) * 16 < BLOCK {
        return seen;
    }
    match p.world.config().lie {
        Some(Lie::Zeros) if (address / BLOCK).is_multiple_of(2) => ContentCheck::Zero,
        Some(Lie::Unchanged) if seen != ContentCheck::Zero => ContentCheck::Data(Some(Hash([7, 7]))),
        _ => seen,
    }
}
