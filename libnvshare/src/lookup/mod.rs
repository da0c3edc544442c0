//! How the program looks the driver's functions up.

pub(crate) mod get_proc_address;
