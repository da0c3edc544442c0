//! The program's work: where it is submitted, and what is known of it.
//!
//! [`contexts`] and [`streams`] keep what lives; [`captures`] says what may be looked at; a [`drain`] waits until submitted
//! work is complete; the [`launch_window`] bounds how much of it is in flight while another client waits.

pub(crate) mod callbacks;
pub(crate) mod captures;
pub(crate) mod contexts;
pub(crate) mod drain;
pub(crate) mod event;
pub(crate) mod gate;
pub(crate) mod known;
pub(crate) mod launch_window;
pub(crate) mod life;
pub(crate) mod stream_key;
pub(crate) mod streams;
pub(crate) mod used_devices;
