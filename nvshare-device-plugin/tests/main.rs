//! The tests of the plugin as a process, each file a module. They are one program, so that those that wait do so side by side.

mod away;
mod claims;
mod dra;
mod fakes;
mod figures;
mod hosts;
mod kubelet;
mod resources;
mod restarts;
