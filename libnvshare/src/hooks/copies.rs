//! Copies that the driver refuses because the library maps the memory.
//!
//! The driver copies memory of `cuMemAlloc` from card to card, and between the host and a card whose context is not current, without
//! peer access. Of mapped memory it refuses each copy by a card without access, but for those that name both contexts: it answers
//! INVALID_VALUE before anything is done (measured on two H200s). So the card gains access, and the hook calls again. A card
//! keeps it, and its kernels reach the memory as well; natively they would have to be given access.

use std::sync::Mutex;

use nvshare_proto::MemoryMode;

use super::contexts::set_peers;
use crate::driver;
use crate::driver::types::CUstream;
use crate::memory::devices;
use crate::memory::mapping::peers;
use crate::process::lifecycle;
use crate::process::lock::lock;
use crate::work::{callbacks, contexts};

/// Held while a card gains access: a copy of another thread that needs it as well waits.
static ORDER: Mutex<()> = Mutex::new(());

/// The driver has refused a copy in a stream. Returns whether it may succeed now: the stream's card has access to what the
/// library maps on the program's other cards.
#[cold]
#[inline(never)]
pub(crate) fn have_access(stream: CUstream) -> bool {
    if devices::used().nth(1).is_none() || lifecycle::is_forked() || callbacks::are_running() {
        return false;
    }
    let Some(from) = driver::context_of(stream).ok().and_then(contexts::find) else { return false };
    let is_other = |device: &&devices::Device| {
        device.ordinal != from.device()
            && device.memory == MemoryMode::Swap
            && driver::can_access_peer(from.device(), device.ordinal)
    };
    let _order = lock(&ORDER);
    let mut have = false;
    for device in devices::used().filter(is_other) {
        if peers::enable_copies(from.device(), device.ordinal) {
            set_peers(device.ordinal, None);
        }
        have = true;
    }
    have
}
