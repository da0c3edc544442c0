//! Memory that processes share: by handles (CUDA IPC), and by descriptors of physical memory. The answers were measured
//! (`tests/gpu/probes/ipc_probe.py`).
//!
//! A descriptor is a file that names the memory, and keeps it alive.

use std::collections::HashMap;
use std::ffi::c_int;
use std::os::fd::IntoRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::memory::{Allocation, Attributes};
use crate::process::{Failure, INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, Process};
use crate::world::{BLOCK, is_alive};

/// Handles and descriptors begin with this.
const MAGIC: u64 = 0x6e76_7369_6d5f_6970;

/// The content of a handle or a descriptor: a magic number, the card, the number of the memory, and the process that has made it.
type Name = [u64; 4];

/// Memory of other processes that this one has.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// By number: the address, and how often it has to be closed.
    opened: HashMap<u64, (u64, u32)>,
    /// By number: the handle of physical memory.
    imported: HashMap<u64, u64>,
    /// The process has made or opened a handle of CUDA IPC.
    has_ipc: bool,
}

impl Shared {
    /// Whether an address, or a handle of physical memory, is of another process.
    pub(crate) fn is_of_another(&self, base: u64) -> bool {
        self.opened.values().any(|(at, _)| *at == base) || self.imported.values().any(|at| *at == base)
    }

    /// Whether the process has made or opened a handle of CUDA IPC.
    pub(crate) fn has_ipc(&self) -> bool {
        self.has_ipc
    }

    /// Physical memory has ended here.
    pub(crate) fn forget(&mut self, handle: u64) {
        self.imported.retain(|_, known| *known != handle);
    }
}

fn words(bytes: &[u8]) -> Option<Name> {
    let (words, []) = bytes.get(..32)?.as_chunks::<8>() else { return None };
    let name: Name =
        words.iter().map(|word| u64::from_ne_bytes(*word)).collect::<Vec<_>>().try_into().ok()?;
    (name[0] == MAGIC).then_some(name)
}

fn bytes(name: Name) -> impl Iterator<Item = u8> {
    name.into_iter().flat_map(u64::to_ne_bytes)
}

impl Process {
    fn name_of(&self, allocation: &Allocation) -> Name {
        let number = self.world.share(allocation.gpu, &allocation.blocks.all());
        [MAGIC, self.world.card(allocation.gpu) as u64, number, std::process::id().into()]
    }

    /// A handle of memory of `cuMemAlloc`: not of managed memory or of a pool, nor of what is mapped or of another process.
    pub(crate) fn ipc_handle(&self, address: u64) -> Result<[u8; 64], Failure> {
        let found = self.find(address, 1)?;
        let base = found.allocation.base;
        let is_mapped = base + found.offset != address;
        let tables = self.tables();
        let is_others = tables.pool.is_handed_out(base) || tables.shared.is_of_another(base);
        drop(tables);
        if found.allocation.managed || is_mapped || is_others {
            return Err(INVALID_VALUE);
        }
        self.tables().shared.has_ipc = true;
        let mut handle = [0; 64];
        handle.iter_mut().zip(bytes(self.name_of(&found.allocation))).for_each(|(place, byte)| *place = byte);
        Ok(handle)
    }

    /// Brings memory of another process here. Returns its address, at which nothing is but this.
    fn take_in(&self, gpu: u64, number: u64) -> Result<u64, Failure> {
        let gpu =
            usize::try_from(gpu).ok().and_then(|card| self.world.own_number(card)).ok_or(INVALID_HANDLE)?;
        let blocks = self.world.join(gpu, number).ok_or(INVALID_HANDLE)?;
        let base = self.reserve(blocks.len() as u64 * BLOCK);
        let (managed, context, attributes) = (false, None, Attributes::default());
        let allocation = Allocation { base, gpu, blocks: blocks.into(), managed, context, attributes };
        self.tables().memory.insert(base, Arc::new(allocation));
        Ok(base)
    }

    pub(crate) fn open_ipc(&self, handle: &[u8; 64], flags: u32) -> Result<u64, Failure> {
        self.tables().current()?;
        let [_, gpu, number, maker] = words(handle).filter(|_| flags == 1).ok_or(INVALID_VALUE)?;
        if maker == u64::from(std::process::id()) {
            return Err(INVALID_CONTEXT);
        }
        if let Some((base, times)) = self.tables().shared.opened.get_mut(&number) {
            *times += 1;
            return Ok(*base);
        }
        // A handle of memory that is freed, and one of a process that is gone, are refused differently (measured on an H200).
        let is_there = u32::try_from(maker).is_ok_and(is_alive);
        let base = self.take_in(gpu, number).map_err(|error| if is_there { INVALID_VALUE } else { error })?;
        let shared = &mut self.tables().shared;
        shared.opened.insert(number, (base, 1));
        shared.has_ipc = true;
        Ok(base)
    }

    pub(crate) fn close_ipc(&self, base: u64) -> Result<(), Failure> {
        let mut tables = self.tables();
        let of = tables.shared.opened.iter().find(|(_, (at, _))| *at == base).map(|(&number, _)| number);
        let number = of.ok_or(INVALID_VALUE)?;
        if let Some((_, times @ 2..)) = tables.shared.opened.get_mut(&number) {
            *times -= 1;
            return Ok(());
        }
        tables.shared.opened.remove(&number);
        drop(tables);
        self.free(base)
    }

    /// A descriptor of physical memory that was made for it.
    pub(crate) fn export_physical(&self, handle: u64, kind: c_int) -> Result<c_int, Failure> {
        let (_, shared_as) = self.physical_properties(handle)?;
        if shared_as & kind == 0 {
            return Err(INVALID_VALUE);
        }
        let allocation = self.tables().memory.get(&handle).cloned().ok_or(INVALID_VALUE)?;
        let name = self.name_of(&allocation);
        let described = || {
            let file = self.world.describe(name[2])?;
            file.write_all_at(&bytes(name).collect::<Vec<u8>>(), 0)?;
            Ok::<_, std::io::Error>(file.into_raw_fd())
        };
        described().map_err(|_| INVALID_VALUE)
    }

    /// A handle of the physical memory that a descriptor names. In its own process that is the handle which is known, if it lives.
    pub(crate) fn import_physical(&self, descriptor: c_int) -> Result<u64, Failure> {
        let mut name = [0u8; 32];
        // SAFETY: writable bytes of the given length.
        let read = unsafe { libc::pread(descriptor, name.as_mut_ptr().cast(), name.len(), 0) };
        let [_, gpu, number, maker] =
            words(&name).filter(|_| read == name.len() as isize).ok_or(INVALID_VALUE)?;
        let known = if maker == u64::from(std::process::id()) {
            let all: Vec<Arc<Allocation>> = self.tables().memory.values().cloned().collect();
            let is_it = |of: &&Arc<Allocation>| {
                self.world.card(of.gpu) as u64 == gpu
                    && self.world.number_of(of.gpu, &of.blocks.all()) == number
            };
            all.iter().find(is_it).map(|of| of.base)
        } else {
            None
        };
        let known = known.or_else(|| self.tables().shared.imported.get(&number).copied());
        if let Some(handle) = known {
            self.tables().vmm.hold(handle);
            return Ok(handle);
        }
        let handle = self.take_in(gpu, number)?;
        let mut tables = self.tables();
        tables.shared.imported.insert(number, handle);
        tables.vmm.hold(handle);
        Ok(handle)
    }
}
