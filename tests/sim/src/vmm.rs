//! Physical memory, reserved addresses, and the mappings between them.
//!
//! A mapping is made and unmade as a whole, and is of whole physical memory. Mapped memory can be reached only after access was given to it. Work that
//! reaches a reserved address without both stops the process with a line: on a card it would end the context, and the cause
//! would be hard to find.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::memory::Allocation;
use crate::process::{Failure, INVALID_VALUE, NOT_SUPPORTED, Process};
use crate::tables::Tables;
use crate::world::{BLOCK, Sort};

/// Addresses for physical memory begin at multiples of this, and it comes in multiples of it.
pub(crate) const GRANULARITY: u64 = BLOCK;
/// How often this process has mapped memory.
pub(crate) static MAPPED: AtomicU64 = AtomicU64::new(0);
const READ_AND_WRITE: u64 = 3;

/// Physical memory at an address.
#[derive(Debug)]
struct Mapping {
    bytes: u64,
    handle: u64,
    /// How each card may access the memory, by card. Access of peers does not reach here.
    access: BTreeMap<usize, u64>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Vmm {
    /// Reserved addresses: begin and length.
    reserved: BTreeMap<u64, u64>,
    mappings: BTreeMap<u64, Mapping>,
    /// How often each physical memory has to be released. It lives while it is mapped, too.
    handles: HashMap<u64, u32>,
    /// Physical memory without a handle.
    released: HashSet<u64>,
    /// The kinds of handles by which others may get physical memory.
    shared_as: HashMap<u64, i32>,
}

/// The driver's answer about a mapped address.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Around {
    pub(crate) at: u64,
    pub(crate) bytes: u64,
    pub(crate) reserved: (u64, u64),
    pub(crate) shared_as: i32,
}

/// Why an address in a reserved range cannot be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lack {
    Mapping,
    Access,
}

impl Vmm {
    fn reservation(&self, address: u64) -> Option<(u64, u64)> {
        let (&base, &bytes) = self.reserved.range(..=address).next_back()?;
        (address - base < bytes).then_some((base, bytes))
    }

    /// The mapping, its length, and the reserved range around it, in which an address is.
    pub(crate) fn around(&self, address: u64) -> Option<Around> {
        let (at, mapping) = self.mapping(address)?;
        let reserved = self.reservation(address)?;
        let shared_as = self.shared_as.get(&mapping.handle).copied().unwrap_or(0);
        Some(Around { at, bytes: mapping.bytes, reserved, shared_as })
    }

    fn mapping(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (&at, mapping) = self.mappings.range(..=address).next_back()?;
        (address - at < mapping.bytes).then_some((at, mapping))
    }

    /// The mappings that a range consists of. An error: the range has gaps, or ends within a mapping.
    fn whole(&self, address: u64, bytes: u64) -> Result<Vec<u64>, Failure> {
        let end = address.checked_add(bytes).filter(|_| bytes > 0).ok_or(INVALID_VALUE)?;
        let mut found = Vec::new();
        let mut at = address;
        while at < end {
            found.push(at);
            at += self.mappings.get(&at).ok_or(INVALID_VALUE)?.bytes;
        }
        if at == end { Ok(found) } else { Err(INVALID_VALUE) }
    }

    /// The physical memory behind an address, and where it begins; an error: the address cannot be reached. `None`: it is
    /// not reserved.
    pub(crate) fn look(&self, address: u64) -> Option<Result<(u64, u64), Lack>> {
        let Some((at, mapping)) = self.mapping(address) else {
            return self.reservation(address).map(|_| Err(Lack::Mapping));
        };
        let is_reached = mapping.access.values().any(|&access| access == READ_AND_WRITE);
        Some(if is_reached { Ok((mapping.handle, at)) } else { Err(Lack::Access) })
    }

    /// The first address of a range at which other cards may reach what is mapped there, and this one may not.
    pub(crate) fn closed_to(&self, card: usize, address: u64, bytes: u64) -> Option<u64> {
        let is_closed = |at: u64| {
            let reaches = |card| self.mapping(at).and_then(|(_, mapping)| mapping.access.get(card).copied());
            matches!(self.look(at), Some(Ok(_))) && reaches(&card) != Some(READ_AND_WRITE)
        };
        let blocks = address / BLOCK..(address + bytes).div_ceil(BLOCK);
        blocks.map(|block| address.max(block * BLOCK)).find(|&at| is_closed(at))
    }

    /// Physical memory has one more handle: the same value, to be released once more.
    pub(crate) fn hold(&mut self, handle: u64) {
        self.released.remove(&handle);
        *self.handles.entry(handle).or_insert(0) += 1;
    }

    fn is_mapped(&self, handle: u64) -> bool {
        self.mappings.values().any(|mapping| mapping.handle == handle)
    }

    /// Forgets physical memory that has neither a handle nor a mapping. Returns whether it did.
    fn end(&mut self, handle: u64) -> bool {
        !self.is_mapped(handle) && self.released.remove(&handle)
    }
}

impl Process {
    pub(crate) fn reserve_addresses(&self, bytes: u64, alignment: u64) -> Result<u64, Failure> {
        if bytes == 0
            || !bytes.is_multiple_of(GRANULARITY)
            || !(alignment == 0 || alignment.is_power_of_two())
        {
            return Err(INVALID_VALUE);
        }
        let alignment = alignment.max(GRANULARITY);
        let base = self.new_addresses(bytes + alignment).next_multiple_of(alignment);
        self.tables().vmm.reserved.insert(base, bytes);
        Ok(base)
    }

    pub(crate) fn free_addresses(&self, base: u64, bytes: u64) -> Result<(), Failure> {
        let vmm = &mut self.tables().vmm;
        if vmm.reserved.get(&base) != Some(&bytes) || vmm.mappings.range(base..base + bytes).next().is_some()
        {
            return Err(INVALID_VALUE);
        }
        vmm.reserved.remove(&base);
        Ok(())
    }

    pub(crate) fn create_physical(&self, gpu: usize, bytes: u64, shared_as: i32) -> Result<u64, Failure> {
        if !bytes.is_multiple_of(GRANULARITY) {
            return Err(INVALID_VALUE);
        }
        self.lives(gpu, "cuMemCreate")?;
        // Several allocations of a program may share one block, side by side.
        let sort = if bytes == BLOCK { Sort::Whole } else { Sort::Plain };
        // The memory belongs to no context.
        let handle = self.allocate_on(gpu, bytes, sort, None)?;
        let vmm = &mut self.tables().vmm;
        vmm.handles.insert(handle, 1);
        vmm.shared_as.insert(handle, shared_as);
        Ok(handle)
    }

    /// The card of physical memory, and the kinds of handles by which others may get it.
    pub(crate) fn physical_properties(&self, handle: u64) -> Result<(usize, i32), Failure> {
        let tables = self.tables();
        let gpu = tables.physical(handle)?.gpu;
        Ok((gpu, tables.vmm.shared_as.get(&handle).copied().unwrap_or(0)))
    }

    pub(crate) fn map(&self, address: u64, bytes: u64, offset: u64, handle: u64) -> Result<(), Failure> {
        MAPPED.fetch_add(1, Ordering::Relaxed);
        let tables = &mut *self.tables();
        let physical = tables.physical(handle)?;
        let is_whole = offset == 0 && bytes == physical.bytes();
        let end = address.checked_add(bytes).ok_or(INVALID_VALUE)?;
        let vmm = &mut tables.vmm;
        let is_reserved = vmm.reservation(address).is_some_and(|(base, length)| end <= base + length);
        let before = vmm.mappings.range(..end).next_back();
        let is_free = before.is_none_or(|(&at, mapping)| at + mapping.bytes <= address);
        if !is_reserved || !is_free || !address.is_multiple_of(GRANULARITY) {
            return Err(INVALID_VALUE);
        }
        if !is_whole {
            return Err(NOT_SUPPORTED);
        }
        vmm.mappings.insert(address, Mapping { bytes, handle, access: BTreeMap::new() });
        Ok(())
    }

    /// Sets how cards may access mapped memory; other cards keep what they have.
    pub(crate) fn set_access(&self, address: u64, bytes: u64, cards: &[(usize, u64)]) -> Result<(), Failure> {
        let vmm = &mut self.tables().vmm;
        for at in vmm.whole(address, bytes)? {
            vmm.mappings.entry(at).and_modify(|mapping| mapping.access.extend(cards.iter().copied()));
        }
        Ok(())
    }

    pub(crate) fn access(&self, address: u64, card: usize) -> Result<u64, Failure> {
        let tables = self.tables();
        let Some((_, mapping)) = tables.vmm.mapping(address) else {
            drop(tables);
            // None was given to memory of `cuMemAlloc`, also of another process (measured on an H200).
            return self
                .find(address, 1)
                .and_then(|found| if found.allocation.managed { Err(INVALID_VALUE) } else { Ok(0) });
        };
        Ok(mapping.access.get(&card).copied().unwrap_or(0))
    }

    pub(crate) fn unmap(&self, address: u64, bytes: u64) -> Result<(), Failure> {
        let mut tables = self.tables();
        let vmm = &mut tables.vmm;
        let whole = vmm.whole(address, bytes)?;
        let handles: Vec<u64> = whole
            .into_iter()
            .filter_map(|at| vmm.mappings.remove(&at))
            .map(|mapping| mapping.handle)
            .collect();
        drop(tables);
        handles.into_iter().for_each(|handle| self.end_physical(handle));
        Ok(())
    }

    pub(crate) fn release_physical(&self, handle: u64) -> Result<(), Failure> {
        let vmm = &mut self.tables().vmm;
        let count = vmm.handles.get_mut(&handle).ok_or(INVALID_VALUE)?;
        *count -= 1;
        if *count > 0 {
            return Ok(());
        }
        vmm.handles.remove(&handle);
        vmm.released.insert(handle);
        Ok(())
    }

    /// Another handle for the memory that is mapped at an address: the same value, to be released once more.
    pub(crate) fn retain_physical(&self, address: u64) -> Result<u64, Failure> {
        let vmm = &mut self.tables().vmm;
        let handle = vmm.mapping(address).map(|(_, mapping)| mapping.handle).ok_or(INVALID_VALUE)?;
        vmm.hold(handle);
        Ok(handle)
    }

    /// Frees physical memory that has neither a handle nor a mapping.
    pub(crate) fn end_physical(&self, handle: u64) {
        let mut tables = self.tables();
        if !tables.vmm.end(handle) {
            return;
        }
        tables.vmm.shared_as.remove(&handle);
        tables.shared.forget(handle);
        let allocation = tables.memory.remove(&handle);
        drop(tables);
        if let Some(allocation) = allocation {
            self.give_back(&allocation);
        }
    }
}

impl Tables {
    /// Physical memory that can be mapped.
    fn physical(&self, handle: u64) -> Result<&Arc<Allocation>, Failure> {
        let known = self.vmm.handles.contains_key(&handle);
        self.memory.get(&handle).filter(|_| known).ok_or(INVALID_VALUE)
    }
}
