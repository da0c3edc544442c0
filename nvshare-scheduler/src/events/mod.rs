//! Events: the recorder adds time and name to each change that the core tells of, and counts it for the metrics. The journal keeps
//! the last ones for those who watch.

pub(crate) mod journal;
mod recorder;

pub(crate) use journal::{Entry, Journal};
pub(crate) use recorder::Recorder;
