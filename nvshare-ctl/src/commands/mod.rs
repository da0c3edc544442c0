//! One command, one file.

pub(crate) mod cdi;
pub(crate) mod clients;
pub(crate) mod doctor;
pub(crate) mod give;
pub(crate) mod install;
pub(crate) mod run;
pub(crate) mod set_tq;
pub(crate) mod sleep;
pub(crate) mod status;
pub(crate) mod switch;
pub(crate) mod timeline;
pub(crate) mod top;
pub(crate) mod watch;
