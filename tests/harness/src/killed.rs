//! Children that do not outlive a test that fails.

use std::ops::{Deref, DerefMut};
use std::process::Child;

/// A child that is killed when it is dropped: an assertion that fails leaves no process behind.
#[derive(Debug)]
pub struct Killed(Child);

impl From<Child> for Killed {
    fn from(child: Child) -> Self {
        Self(child)
    }
}

impl Deref for Killed {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Killed {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
