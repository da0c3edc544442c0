//! The program's work: where it is submitted, and when it is complete.
//!
//! Every submission passes the [`gate`]. [`contexts`] and [`streams`] list the handles that live, and [`captures`] the open
//! captures. A [`drain`] waits until all submitted work is complete. The [`launch_window`] bounds the work in flight while
//! another client waits.

pub(crate) mod callbacks;
pub(crate) mod captures;
pub(crate) mod contexts;
pub(crate) mod drain;
pub(crate) mod event;
pub(crate) mod gate;
pub(crate) mod known;
pub(crate) mod launch_window;
pub(crate) mod life;
pub(crate) mod standstill;
pub(crate) mod stream_key;
pub(crate) mod streams;
pub(crate) mod submitted;
pub(crate) mod used_devices;
