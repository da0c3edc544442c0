//! Memory that stays on the card, for good or while other processes have it by a handle (CUDA IPC), and how that enters the account.

use nvshare_proto::units::MIB;

use super::allocations::Allocation;
use super::devices;
use super::mapping::Pin;
use crate::process::{bell, log};

/// From now on an allocation or slab stays on the card.
pub(super) fn pin(holder: &Allocation, why: &str) {
    if pin_for(holder, Pin::ForGood) {
        log::info(format_args!("{} MiB stay on the card: {why}", holder.size / MIB));
    }
}

/// Other processes have the memory of an allocation or slab: it stays on the card until it is [taken back](take_back).
pub(super) fn lend(holder: &Allocation) {
    if pin_for(holder, Pin::Lent) {
        bell::ring();
        log::debug(format_args!(
            "{} MiB stay on the card while other processes have them",
            holder.size / MIB
        ));
    }
}

/// No other process has the memory of an allocation or slab any more.
pub(super) fn take_back(holder: &Allocation) {
    let residency = holder.residency();
    let moves = !residency.is_freed() && holder.mapped.as_ref().is_some_and(|of| of.unpin(Pin::Lent));
    if let Some(device) = devices::get(holder.device).filter(|_| moves) {
        device.update(|account| account.unpin(residency.size()));
        drop(residency);
        bell::ring();
    }
}

/// Notes why an allocation or slab stays on the card. Returns whether it could have left before.
pub(super) fn pin_for(holder: &Allocation, why: Pin) -> bool {
    // Another thread that frees it undoes the pin, if it finds one.
    let residency = holder.residency();
    let is_news = !residency.is_freed() && holder.mapped.as_ref().is_some_and(|of| of.pin(why));
    if let Some(device) = devices::get(holder.device).filter(|_| is_news) {
        device.update(|account| account.pin(residency.size()));
    }
    is_news
}
