//! Steps: each changes the state through the [`books`], and says what follows for clients.
//!
//! | step | file |
//! |---|---|
//! | a client changes, and what follows from that in the books | [`books`] |
//! | members of a gang act together | [`gangs`] |
//! | clients are asked to leave, drain, and give up their places | [`leaving`] |
//! | terms of jobs take effect | [`terms`] |
//! | a GPU's size becomes known | [`sizes`] |
//! | processes live on after their connection | [`departed`] |
//! | answers do not come | [`overdue`] |
//! | a limit is used up, a client is paused | [`enforce`] |
//! | clients go off the card and come back | [`sleep`] |
//! | it is looked whether clients have rested for long enough | [`rest`] |
//! | clients that fitted together do so no more | [`outgrown`] |
//! | an allocation waits for room | [`room`] |
//! | GPUs are looked at in rounds | [`reconcile`], [`round`] |
//! | a waiter is next, the turn passes | [`turns`] |
//! | a client that is next is granted the lock | [`grants`] |

pub(crate) mod books;
pub(crate) mod departed;
pub(crate) mod enforce;
pub(crate) mod gangs;
pub(crate) mod grants;
pub(crate) mod leaving;
pub(crate) mod outgrown;
pub(crate) mod overdue;
pub(crate) mod reconcile;
pub(crate) mod rest;
pub(crate) mod room;
pub(crate) mod round;
pub(crate) mod sharing;
pub(crate) mod sizes;
pub(crate) mod sleep;
pub(crate) mod terms;
pub(crate) mod turns;
