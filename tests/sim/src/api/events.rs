//! Events.

use std::ffi::c_uint;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{api, give, give_new, looked_at, status, twins, with_place};
use crate::objects::{Event, Mark};
use crate::process::{self, Failure, INVALID_HANDLE, NOT_READY};
use crate::stream::Point;

/// How many events this process has created.
static CREATED: AtomicU64 = AtomicU64::new(0);

api! {
    fn cuEventCreate(place: *mut usize, _flags: c_uint) {
        unsafe { give_new(place, || {
            let p = process::get()?;
            drop(p.creation());
            let mut tables = p.tables();
            let context = tables.current()?;
            let door = Arc::clone(&context.door);
            let event = Event { door, context: context.id, family: context.family, mark: Mark::Nothing };
            CREATED.fetch_add(1, Ordering::Relaxed);
            Ok(tables.events.add(event))
        }) }
    }
    fn nvsimEvents(place: *mut u64) { unsafe { give(place, process::get().map(|_| CREATED.load(Ordering::Relaxed))) } }
    fn cuEventDestroy_v2(event: usize) { status(process::get().and_then(|p| p.tables().events.end(event).map(|_| ()))) }
    fn cuEventQuery(event: usize) {
        status(points_of(event).and_then(|(_, points)| if points.iter().all(Point::is_reached) { Ok(()) } else { Err(NOT_READY) }))
    }
    fn cuEventSynchronize(event: usize) {
        status(points_of(event).and_then(|(is_of_context, points)| {
            let p = process::get()?;
            points.iter().for_each(Point::wait);
            if !is_of_context { p.see_frees(&points) }
            p.sticky()
        }))
    }
}

twins! { per_thread:
    fn cuEventRecord / cuEventRecord_ptsz (event: usize, stream: usize) { status(record(event, stream, per_thread)) }
    fn cuEventRecordWithFlags / cuEventRecordWithFlags_ptsz (event: usize, stream: usize, _flags: c_uint) { status(record(event, stream, per_thread)) }
}

/// The points that an event was recorded behind, and whether it is an event of a whole context.
fn points_of(event: usize) -> Result<(bool, Vec<Point>), Failure> {
    let p = process::get()?;
    let door = Arc::clone(&p.tables().events.get(event)?.door);
    door.pass();
    let mut tables = p.tables();
    let mark = tables.events.get(event)?.mark.clone();
    Ok((matches!(mark, Mark::Context(_)), tables.look_at_event(&mark)?))
}

fn record(event: usize, stream: usize, per_thread: bool) -> Result<(), Failure> {
    with_place(looked_at(stream), per_thread, |p, stream| {
        let mut tables = p.tables();
        if tables.events.get(event)?.family != stream.family {
            return Err(INVALID_HANDLE);
        }
        let mark = tables.record(&stream)?;
        tables.events.get_mut(event)?.mark = mark;
        Ok(())
    })
}
