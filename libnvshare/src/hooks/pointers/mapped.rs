//! Answers about memory that the library maps. They are those of the driver about memory of `cuMemAlloc`: mapped
//! memory may be away, and otherwise the driver calls its chunks allocations. The answers were measured
//! (`tests/gpu/probes/mapped_probe.cpp`).

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use crate::driver::types::{CUdeviceptr, CUmemAccessDesc, CUmemLocation, CUresult};
use crate::memory::allocations::{self, Allocation};
use crate::memory::physical::{self, View};
use crate::memory::sharing;

/// `CU_POINTER_ATTRIBUTE_…`
mod attribute {
    use std::ffi::c_int;

    pub(in super::super) const CONTEXT: c_int = 1;
    pub(super) const MEMORY_TYPE: c_int = 2;
    pub(super) const DEVICE_POINTER: c_int = 3;
    pub(super) const HOST_POINTER: c_int = 4;
    pub(super) const SYNC_MEMOPS: c_int = 6;
    pub(super) const BUFFER_ID: c_int = 7;
    pub(super) const IS_MANAGED: c_int = 8;
    pub(super) const DEVICE_ORDINAL: c_int = 9;
    pub(super) const IS_LEGACY_CUDA_IPC_CAPABLE: c_int = 10;
    pub(in super::super) const RANGE_START_ADDR: c_int = 11;
    pub(in super::super) const RANGE_SIZE: c_int = 12;
    pub(super) const MAPPED: c_int = 13;
    pub(super) const ALLOWED_HANDLE_TYPES: c_int = 14;
    pub(super) const IS_GPU_DIRECT_RDMA_CAPABLE: c_int = 15;
    pub(super) const ACCESS_FLAGS: c_int = 16;
    pub(super) const MEMPOOL_HANDLE: c_int = 17;
    pub(super) const MAPPING_SIZE: c_int = 18;
    pub(super) const MAPPING_BASE_ADDR: c_int = 19;
    pub(super) const MEMORY_BLOCK_ID: c_int = 20;
    pub(super) const IS_HW_DECOMPRESS_CAPABLE: c_int = 21;
}

pub(super) use attribute::{CONTEXT, RANGE_SIZE, RANGE_START_ADDR};

const DEVICE_MEMORY: c_uint = 2;
const READ_AND_WRITE: c_int = 3;

/// An answer, with its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Value {
    Byte(u8),
    Word(u32),
    Long(u64),
    /// The driver refuses, and writes nothing.
    Refused,
}

/// A pointer into memory that the library maps.
#[derive(Debug)]
pub(super) struct Attributes {
    pointer: CUdeviceptr,
    memory: Memory,
}

/// The memory, as the program knows it.
#[derive(Debug)]
enum Memory {
    /// Memory of `cuMemAlloc`, and the bytes that the program asked for.
    Allocated(Arc<Allocation>, u64),
    /// A mapping of memory of `cuMemCreate`.
    Mapped(View),
}

/// The attributes of a pointer; `None`: the pointer leads elsewhere, and the driver answers.
pub(super) fn attributes_of(pointer: CUdeviceptr) -> Option<Attributes> {
    let memory = match allocations::mapped_at(pointer) {
        Some(allocation) => {
            let asked = allocation.asked()?;
            Memory::Allocated(allocation, asked)
        }
        None => Memory::Mapped(physical::view_at(pointer)?),
    };
    Some(Attributes { pointer, memory })
}

/// Answers that differ for a mapping of the program's (measured): its range is that of the reserved addresses, and it belongs
/// to no context.
fn value_of_view(view: &View, of: c_int) -> Option<Value> {
    let (begin, length) = view.reserved;
    let here = |access: &&CUmemAccessDesc| access.location.is_device(view.allocation.device);
    Some(match of {
        attribute::CONTEXT => Value::Long(0),
        attribute::RANGE_START_ADDR => Value::Long(begin),
        attribute::RANGE_SIZE => Value::Long(length),
        attribute::ALLOWED_HANDLE_TYPES => Value::Long(view.properties.handle_types().cast_unsigned().into()),
        attribute::IS_GPU_DIRECT_RDMA_CAPABLE => Value::Byte(view.properties.is_for_rdma().into()),
        attribute::ACCESS_FLAGS => {
            let given = view.access.iter().find(here);
            Value::Word(given.map_or(0, |access| access.flags.cast_unsigned()))
        }
        _ => return None,
    })
}

impl Attributes {
    pub(super) fn base(&self) -> CUdeviceptr {
        match &self.memory {
            Memory::Allocated(allocation, _) => allocation.base,
            Memory::Mapped(view) => view.at,
        }
    }

    pub(super) fn asked(&self) -> u64 {
        match &self.memory {
            Memory::Allocated(_, asked) => *asked,
            Memory::Mapped(view) => view.allocation.size,
        }
    }

    /// The access from a location. For memory of `cuMemAlloc`, the driver says that none was given to it (measured).
    pub(super) fn access_of(&self, location: CUmemLocation) -> u64 {
        let Memory::Mapped(view) = &self.memory else { return 0 };
        let given = view.access.iter().find(|access| access.location == location);
        given.map_or(0, |access| access.flags.cast_unsigned().into())
    }

    fn allocation(&self) -> &Allocation {
        match &self.memory {
            Memory::Allocated(allocation, _) => allocation,
            Memory::Mapped(view) => &view.allocation,
        }
    }

    /// The value of an attribute; `None`: the driver has to answer.
    fn value(&self, of: c_int) -> Option<Value> {
        let allocation = self.allocation();
        if let Memory::Mapped(view) = &self.memory
            && let Some(value) = value_of_view(view, of)
        {
            return Some(value);
        }
        Some(match of {
            attribute::CONTEXT => Value::Long(allocation.context.handle().0 as u64),
            attribute::MEMORY_TYPE => Value::Word(DEVICE_MEMORY),
            attribute::DEVICE_POINTER => Value::Long(self.pointer),
            attribute::HOST_POINTER => Value::Refused,
            attribute::SYNC_MEMOPS => match &self.memory {
                // The program has set it: the memory stays where the driver knows it.
                Memory::Allocated(allocation, _) if allocation.is_attributed() => return None,
                Memory::Allocated(..) => Value::Word(0),
                Memory::Mapped(_) => Value::Word(1),
            },
            // A number that no other allocation ever has.
            attribute::BUFFER_ID | attribute::MEMORY_BLOCK_ID => Value::Long(allocation.id),
            attribute::IS_MANAGED => Value::Word(0),
            attribute::DEVICE_ORDINAL => Value::Word(allocation.device.cast_unsigned()),
            attribute::IS_LEGACY_CUDA_IPC_CAPABLE => match &self.memory {
                Memory::Allocated(allocation, _) => Value::Byte(sharing::is_possible(allocation).into()),
                Memory::Mapped(_) => Value::Byte(0),
            },
            // Devices that are no GPUs cannot reach the memory, and a program that asks can do without.
            attribute::IS_GPU_DIRECT_RDMA_CAPABLE => Value::Byte(0),
            attribute::RANGE_START_ADDR => Value::Long(self.base()),
            attribute::MAPPING_BASE_ADDR => match &self.memory {
                Memory::Allocated(allocation, _) => Value::Long(allocation.holder().base),
                Memory::Mapped(view) => Value::Long(view.at),
            },
            attribute::RANGE_SIZE => Value::Long(self.asked()),
            attribute::MAPPED => Value::Byte(1),
            attribute::ALLOWED_HANDLE_TYPES => Value::Long(0),
            attribute::ACCESS_FLAGS => Value::Word(READ_AND_WRITE.cast_unsigned()),
            attribute::MEMPOOL_HANDLE => Value::Long(0),
            attribute::MAPPING_SIZE => Value::Long(allocation.holder().size),
            attribute::IS_HW_DECOMPRESS_CAPABLE => Value::Byte(0),
            _ => return None,
        })
    }

    /// Answers as `cuPointerGetAttribute`; `None`: the driver has to answer.
    ///
    /// # Safety
    /// `data` is null, or where the driver would write an answer of the attribute's size.
    pub(super) unsafe fn get(&self, data: *mut c_void, attribute: c_int) -> Option<CUresult> {
        if data.is_null() {
            return Some(CUresult::INVALID_VALUE);
        }
        // SAFETY: promised by the caller; places need not be aligned.
        unsafe {
            match self.value(attribute)? {
                Value::Byte(value) => data.cast::<u8>().write_unaligned(value),
                Value::Word(value) => data.cast::<u32>().write_unaligned(value),
                Value::Long(value) => data.cast::<u64>().write_unaligned(value),
                Value::Refused => return Some(CUresult::INVALID_VALUE),
            }
        }
        Some(CUresult::SUCCESS)
    }

    /// Answers as `cuPointerGetAttributes`, which writes null for attributes that are refused. The driver has
    /// answered `before`: its answers stay for attributes that the library does not know.
    ///
    /// # Safety
    /// This many of both, and places where the driver would write answers of the attributes' sizes.
    pub(super) unsafe fn overwrite(
        &self,
        count: usize,
        attributes: *const c_int,
        data: *const *mut c_void,
        before: CUresult,
    ) -> CUresult {
        for i in 0..count {
            // SAFETY: promised by the caller.
            let answered = unsafe {
                let (attribute, place) = (*attributes.add(i), *data.add(i));
                if place.is_null() {
                    return before;
                }
                if self.value(attribute) == Some(Value::Refused) {
                    place.cast::<u64>().write_unaligned(0);
                    Some(CUresult::SUCCESS)
                } else {
                    self.get(place, attribute)
                }
            };
            if answered.is_none() && before != CUresult::SUCCESS {
                return before;
            }
        }
        CUresult::SUCCESS
    }
}
