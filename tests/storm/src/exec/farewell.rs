//! An exit handler of the program, which lingers and then reads the card's memory.

use std::sync::OnceLock;
use std::time::Duration;

use super::{Fault, Run};
use nvshare_test_cuda::cu;

static RUN: OnceLock<&'static Run> = OnceLock::new();

/// Registers the handler, if the program has one: behind the driver's own, and before the first allocation.
pub(super) fn prepare(run: &'static Run) {
    extern "C" fn at_exit() {
        if let Some(run) = RUN.get()
            && let Err(fault) = run.part()
        {
            println!("storm: seed {} step {} at its exit: {fault}", run.plan.seed, run.plan.steps.len());
            // SAFETY: ends the process; other threads may be in the driver.
            unsafe { libc::_exit(1) }
        }
    }
    if run.plan.farewell.is_some() && RUN.set(run).is_ok() {
        // SAFETY: a function that is never unmapped.
        unsafe { libc::atexit(at_exit) };
    }
}

impl Run {
    fn part(&self) -> Result<(), Fault> {
        let Some(farewell) = &self.plan.farewell else { return Ok(()) };
        std::thread::sleep(Duration::from_millis(farewell.linger_ms));
        let Some((context, region, value)) = farewell.reads else { return Ok(()) };
        self.make_current(context)?;
        let mut words = vec![0x5ca1_ab1e_u32; region.bytes as usize / 4];
        cu!(self.driver, "cuMemcpyDtoH_v2", words.as_mut_ptr() => *mut u32, self.address(region) => u64,
            region.bytes as usize => usize)?;
        self.compare(&words, value, 0)
    }
}
