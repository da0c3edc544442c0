//! What is done about the driver's functions, by topic: the handlers that rows of the [table](crate::table) name.

pub(crate) mod captures;
pub(crate) mod contexts;
pub(crate) mod streams;
