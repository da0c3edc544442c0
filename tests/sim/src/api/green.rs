//! Green contexts: parts of a device.

use std::ffi::{c_int, c_uint};

use super::contexts::record_all;
use super::{api, give, give_new, status};
use crate::handles;
use crate::process::{self, INVALID_VALUE, SUCCESS};

const SM: c_uint = 1;
const SMS: c_uint = 40;
const NON_BLOCKING: c_uint = 1;

/// `CUdevResource`, of which the kind and the number of multiprocessors are looked at.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Resource {
    kind: c_uint,
    padding: [u8; 92],
    count: c_uint,
    rest: [u8; 44],
}

fn multiprocessors(count: c_uint) -> Resource {
    Resource { kind: SM, padding: [0; 92], count, rest: [0; 44] }
}

api! {
    fn cuDeviceGetDevResource(device: c_int, resource: *mut Resource, kind: c_uint) {
        unsafe { give(resource, process::get().and_then(|p| { p.gpu_of(device)?; if kind == SM { Ok(multiprocessors(SMS)) } else { Err(INVALID_VALUE) } })) }
    }
    fn cuDevSmResourceSplitByCount(groups: *mut Resource, count: *mut c_uint, input: *const Resource, rest: *mut Resource, _flags: c_uint, least: c_uint) {
        // SAFETY: null, or readable, and writable the second.
        let (Some(input), Some(count)) = (unsafe { input.as_ref() }, unsafe { count.as_mut() }) else { return INVALID_VALUE };
        // As many multiprocessors as the caller asks for, in twos.
        let each = least.max(2).next_multiple_of(2);
        if input.kind != SM || each > input.count { return INVALID_VALUE }
        let most = input.count / each;
        let made = if groups.is_null() { most } else { most.min(*count) };
        // SAFETY: room for as many groups as the caller said.
        unsafe {
            if !groups.is_null() { (0..made).for_each(|i| *groups.add(i as usize) = multiprocessors(each)) }
            if let Some(rest) = rest.as_mut() { *rest = multiprocessors(input.count - made * each) }
        }
        *count = made;
        SUCCESS
    }
    fn cuDevResourceGenerateDesc(description: *mut usize, resources: *const Resource, count: c_uint) {
        // SAFETY: null, or readable.
        match unsafe { resources.as_ref() } {
            // The resource stands for itself: nothing here depends on its size.
            Some(first) if count >= 1 && first.kind == SM && first.count > 0 => unsafe { give(description, Ok(first.count as usize)) },
            _ => INVALID_VALUE,
        }
    }
    fn cuGreenCtxCreate(green: *mut usize, description: usize, device: c_int, _flags: c_uint) {
        if description == 0 { return INVALID_VALUE }
        unsafe { give_new(green, || process::get()?.create_green(device)) }
    }
    fn cuGreenCtxDestroy(green: usize) { status(process::get().and_then(|p| p.destroy_green(green))) }
    fn cuCtxFromGreenCtx(context: *mut usize, green: usize) { unsafe { give(context, process::get().and_then(|p| p.of_green(green))) } }
    fn cuGreenCtxStreamCreate(stream: *mut usize, green: usize, flags: c_uint, _priority: c_int) {
        if flags != NON_BLOCKING { return INVALID_VALUE }
        unsafe { give_new(stream, || {
            let p = process::get()?;
            let context = p.of_green(green)?;
            p.tables().new_stream_in(context, true)
        }) }
    }
    fn cuGreenCtxRecordEvent(green: usize, event: usize) {
        handles::before_looking();
        status(process::get().and_then(|p| record_all(p.of_green(green)?, event)))
    }
}

const _: () = assert!(size_of::<Resource>() == 144);
