//! Questions about the state as a whole. They change nothing: each takes the state as it is, and asks a
//! policy with the numbers.
//!
//! | question | file |
//! |---|---|
//! | who fits a GPU, alone or beside whom? | [`fit`] |
//! | does a limit or a pause bind a client? | [`limits`] |
//! | when are the turns over of those who would have to leave? | [`length`] |
//! | in which order do turns come? | [`order`] |
//! | for whom is room reserved, and who could give some back? | [`room`] |
//! | what is to become of a waiter? | [`waiter`] |
//! | is a process to go off the card, and may one come back? | [`sleep`] |
//! | may short work go ahead? | [`short`] |

pub(crate) mod fit;
pub(crate) mod length;
pub(crate) mod limits;
pub(crate) mod order;
pub(crate) mod room;
pub(crate) mod short;
pub(crate) mod sleep;
pub(crate) mod waiter;
