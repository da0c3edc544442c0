//! Memory that the program creates itself (`cuMemCreate`), and the places at which it has mapped it.
//!
//! Such an object is an allocation of chunks like others, at addresses that the program does not know: all copies go there. The
//! program's own mappings are *views*. They are made anew whenever a chunk comes back, with the access that the program gave
//! them, and unmade before it leaves. So the state is the object's, however often it is mapped, and memory that is mapped
//! nowhere moves as well.
//!
//! Views change, and chunks gain and lose their memory, under the lock of the chunks: a chunk with memory has all views.

use std::sync::{Arc, Mutex};

use super::{Chunk, Mapped};
use crate::driver::types::{CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUmemHandle, CUresult};
use crate::driver::{self, Relaxed};
use crate::process::lock::lock;
use crate::process::log;
use crate::work::contexts::Context;

/// The properties and mappings that the program has given its memory.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) properties: CUmemAllocationProp,
    pub(super) views: Mutex<Vec<View>>,
    /// The context in which the memory moves: it belongs to none, and may outlive any.
    pub(super) place: Mutex<Arc<Context>>,
}

/// A mapping of the whole object by the program.
#[derive(Debug)]
pub(super) struct View {
    at: CUdeviceptr,
    /// The devices that may access it, and how; none at first.
    access: Vec<CUmemAccessDesc>,
}

impl View {
    fn show(&self, offset: u64, bytes: u64, physical: CUmemHandle) -> Result<(), CUresult> {
        let at = self.at + offset;
        driver::map(at, bytes, physical)?;
        if self.access.is_empty() {
            return Ok(());
        }
        driver::set_access(at, bytes, &self.access).inspect_err(|_| {
            let _ = driver::unmap(at, bytes);
        })
    }

    fn hide(&self, offset: u64, bytes: u64) -> Result<(), CUresult> {
        driver::unmap(self.at + offset, bytes).inspect_err(|error| {
            log::warn(format_args!("unmapping {bytes} bytes at {:#x}: {error:?}", self.at + offset));
        })
    }
}

/// Parts with memory, as long as they are contiguous: offset and bytes.
fn present(chunks: &[Chunk]) -> impl Iterator<Item = (u64, u64)> {
    chunks.chunk_by(|one, next| one.physical.is_some() == next.physical.is_some()).filter_map(|run| {
        let first = run.first().filter(|first| first.physical.is_some())?;
        Some((first.offset, run.iter().map(|chunk| chunk.bytes).sum()))
    })
}

impl Mapped {
    /// The place where the memory moves, if the program created it.
    pub(crate) fn context_to_move_in(&self) -> Option<&Mutex<Arc<Context>>> {
        self.program.as_ref().map(|program| &program.place)
    }

    /// Whether the program created the memory by `cuMemCreate`.
    pub(crate) fn is_programs(&self) -> bool {
        self.program.is_some()
    }

    /// The properties with which the program created the memory.
    pub(crate) fn properties(&self) -> Option<CUmemAllocationProp> {
        self.program.as_ref().map(|program| program.properties)
    }

    /// The driver's handles of the chunks with their offsets; `None`: not all of them are on the card.
    pub(crate) fn handles(&self) -> Option<Vec<(u64, u64, CUmemHandle)>> {
        self.lock().iter().map(|chunk| Some((chunk.offset, chunk.bytes, chunk.physical?))).collect()
    }

    /// Makes a chunk's memory visible in all views, or in none.
    pub(in crate::memory) fn show(
        &self,
        offset: u64,
        bytes: u64,
        physical: CUmemHandle,
    ) -> Result<(), CUresult> {
        let Some(program) = &self.program else { return Ok(()) };
        let _relaxed = Relaxed::begin();
        let views = lock(&program.views);
        for (index, view) in views.iter().enumerate() {
            if let Err(error) = view.show(offset, bytes, physical) {
                views.iter().take(index).for_each(|shown| _ = shown.hide(offset, bytes));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes a chunk's memory out of all views. False: a view cannot be unmapped, and the memory stays.
    pub(super) fn hide(&self, chunk: &Chunk) -> bool {
        let (Some(program), Some(physical)) = (&self.program, chunk.physical) else { return true };
        let views = lock(&program.views);
        for (index, view) in views.iter().enumerate() {
            if view.hide(chunk.offset, chunk.bytes).is_err() {
                for hidden in views.iter().take(index) {
                    let _ = hidden.show(chunk.offset, chunk.bytes, physical);
                }
                return false;
            }
        }
        true
    }

    /// Maps the object at reserved addresses of the program. The part on the card is mapped now, the rest when it comes.
    pub(crate) fn add_view(&self, at: CUdeviceptr) -> Result<(), CUresult> {
        let Some(program) = &self.program else { return Err(CUresult::INVALID_VALUE) };
        let _relaxed = Relaxed::begin();
        let chunks = self.lock();
        let view = View { at, access: Vec::new() };
        for (index, chunk) in chunks.iter().enumerate() {
            let Some(physical) = chunk.physical else { continue };
            if let Err(error) = view.show(chunk.offset, chunk.bytes, physical) {
                let shown = chunks.iter().take(index).filter(|chunk| chunk.physical.is_some());
                shown.for_each(|chunk| _ = view.hide(chunk.offset, chunk.bytes));
                return Err(error);
            }
        }
        lock(&program.views).push(view);
        Ok(())
    }

    /// Ends a mapping of the program.
    pub(crate) fn remove_view(&self, at: CUdeviceptr) -> Result<(), CUresult> {
        let Some(program) = &self.program else { return Err(CUresult::INVALID_VALUE) };
        let _relaxed = Relaxed::begin();
        let chunks = self.lock();
        let mut views = lock(&program.views);
        present(&chunks).try_for_each(|(offset, bytes)| driver::unmap(at + offset, bytes))?;
        views.retain(|view| view.at != at);
        Ok(())
    }

    /// Sets the access to a mapping of the program, by one entry for each of several locations.
    pub(crate) fn set_access(&self, at: CUdeviceptr, access: &[CUmemAccessDesc]) -> Result<(), CUresult> {
        let Some(program) = &self.program else { return Err(CUresult::INVALID_VALUE) };
        let _relaxed = Relaxed::begin();
        let chunks = self.lock();
        let mut views = lock(&program.views);
        let view = views.iter_mut().find(|view| view.at == at).ok_or(CUresult::INVALID_VALUE)?;
        present(&chunks).try_for_each(|(offset, bytes)| driver::set_access(at + offset, bytes, access))?;
        for new in access {
            view.access.retain(|old| old.location != new.location);
            view.access.extend((new.flags != 0).then_some(*new));
        }
        Ok(())
    }

    /// The access that the program gave to a mapping.
    pub(crate) fn access(&self, at: CUdeviceptr) -> Vec<CUmemAccessDesc> {
        let views = self.program.as_ref().map(|program| lock(&program.views));
        let access = views.and_then(|views| Some(views.iter().find(|view| view.at == at)?.access.clone()));
        access.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_with_memory_are_one_part() {
        let chunk = |(index, there): (usize, &bool)| Chunk {
            physical: there.then_some(CUmemHandle(1)),
            ..Chunk::absent(index as u64 * 10, 10)
        };
        let parts = |there: &[bool]| {
            present(&there.iter().enumerate().map(chunk).collect::<Vec<_>>()).collect::<Vec<_>>()
        };
        assert_eq!(parts(&[true, true, false, true]), [(0, 20), (30, 10)]);
        assert_eq!(parts(&[false, false]), []);
        assert_eq!(parts(&[false, true, true]), [(10, 20)]);
    }
}
