//! Whose a connection is, as the kernel and the listener tell: the process at its other end, that process's control groups, the
//! tenant with whom it shares limits, and the user, container or seat for which it counts.

mod caller;
mod control_groups;
mod hidden;
mod peer;
pub(crate) mod processes;
mod tenants;
mod whom;

pub(crate) use caller::{Caller, Viewer};
pub(crate) use hidden::see_others;
pub(crate) use peer::Peer;
pub(crate) use processes::Described;
pub(crate) use tenants::{Row, Tenant, Tenants};
pub(crate) use whom::Whom;
