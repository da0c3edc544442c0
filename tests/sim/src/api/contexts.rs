//! Contexts, and which is current.

use std::ffi::{c_int, c_uint};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::{api, give, give_new, status};
use crate::config::is_each;
use crate::handles;
use crate::objects::{Event, Mark};
use crate::process::{
    self, Failure, INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY,
    PEER_ALREADY_ENABLED, PEER_NOT_ENABLED, PEER_UNSUPPORTED, SUCCESS,
};
use crate::stacks;

api! {
    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) {
        unsafe { give_new(context, || process::get()?.retain_primary(device)) }
    }
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) { status(process::get().and_then(|p| p.release_primary(device))) }
    fn cuDevicePrimaryCtxReset_v2(device: c_int) { status(process::get().and_then(|p| p.reset_primary(device))) }
    fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) {
        let state = process::get().and_then(|p| p.primary_is_active(device)).map(c_int::from);
        unsafe { give(flags, Ok(0)); give(active, state) }
    }
    fn cuCtxCreate_v2(context: *mut usize, _flags: c_uint, device: c_int) {
        unsafe { give_new(context, || process::get()?.create_context(device)) }
    }
    fn cuCtxDestroy_v2(context: usize) { status(process::get().and_then(|p| p.destroy_context(context))) }
    fn cuCtxAttach(context: *mut usize, flags: c_uint) {
        if flags != 0 { return INVALID_VALUE }
        unsafe { give_new(context, || process::get()?.attach()) }
    }
    fn cuCtxDetach(context: usize) { status(process::get().and_then(|p| p.detach(context))) }
    fn cuCtxSetCurrent(context: usize) {
        handles::before_looking();
        status(process::get().and_then(|p| p.set_current(context)))
    }
    fn cuCtxPushCurrent_v2(context: usize) {
        handles::before_looking();
        status(process::get().and_then(|p| { let bound = p.tables().bind(context)?; process::push(bound); Ok(()) }))
    }
    fn cuCtxPopCurrent_v2(context: *mut usize) {
        let popped = process::get().and_then(|_| process::pop().ok_or(INVALID_CONTEXT)).map(|bound| bound.handle);
        match popped {
            // SAFETY: it may be null.
            Ok(handle) => unsafe { context.as_mut().into_iter().for_each(|place| *place = handle); SUCCESS },
            Err(failure) => failure,
        }
    }
    fn cuCtxGetCurrent(context: *mut usize) { unsafe { give(context, process::get().map(|p| p.current_handle())) } }
    fn cuCtxGetDevice(device: *mut c_int) { unsafe { give(device, process::get().and_then(|p| Ok(p.ordinal_of(p.current_gpu()?)))) } }
    fn cuCtxSynchronize() { status(process::get().and_then(|p| p.synchronize_context())) }
    fn cuCtxGetLimit(value: *mut usize, limit: c_int) {
        unsafe { give(value, stacks::check(limit).and_then(|()| process::get()?.stack_limit())) }
    }
    fn cuCtxSetLimit(limit: c_int, value: usize) {
        status(stacks::check(limit).and_then(|()| process::get()?.set_stack_limit(value)))
    }
    fn cuCtxRecordEvent(context: usize, event: usize) {
        handles::before_looking();
        status(record_all(context, event))
    }
    fn cuCtxEnablePeerAccess(context: usize, flags: c_uint) {
        if flags != 0 { return INVALID_VALUE }
        status(process::get().and_then(|p| {
            let mut tables = p.tables();
            let (from, to) = (tables.current()?, tables.context(context)?);
            let pair = (from.id, to.id);
            if from.gpu == to.gpu || p.world.config().refuses_peers() { return Err(PEER_UNSUPPORTED) }
            if tables.peers.insert(pair) { Ok(()) } else { Err(PEER_ALREADY_ENABLED) }
        }))
    }
    fn cuCtxDisablePeerAccess(context: usize) {
        status(process::get().and_then(|p| {
            let mut tables = p.tables();
            let pair = (tables.current()?.id, tables.context(context)?.id);
            if tables.peers.remove(&pair) { Ok(()) } else { Err(PEER_NOT_ENABLED) }
        }))
    }
}

/// An event behind everything in a context.
pub(super) fn record_all(context: usize, event: usize) -> Result<(), Failure> {
    let p = process::get()?;
    let config = p.world.config();
    if !config.context_record {
        return Err(NOT_SUPPORTED);
    }
    static ASKED: AtomicU64 = AtomicU64::new(0);
    if is_each(config.context_events_fail, &ASKED) {
        return Err(OUT_OF_MEMORY);
    }
    let door = Arc::clone(&p.tables().context(context)?.door);
    door.pass();
    let mut tables = p.tables();
    let context = tables.context(context)?;
    let (id, family) = (context.id, context.family);
    let Event { family: of_event, .. } = *tables.events.get(event)?;
    if of_event != family {
        return Err(INVALID_HANDLE);
    }
    tables.look_at_context(id, family)?;
    let points = tables.ends(|stream| stream.context == id || stream.family == id);
    tables.events.get_mut(event)?.mark = Mark::Context(points);
    Ok(())
}
