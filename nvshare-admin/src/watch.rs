//! Watching: the events of a scheduler as they happen.

use nvshare_proto::{AdminReply, AdminRequest, PhaseTime, WatchEvent, WatchFrom};

use crate::connection::Connection;
use crate::{Error, Scheduler, places};

/// News for a watcher.
#[derive(Debug)]
pub enum Told {
    /// An event, with the phases that are parts of its time, in their order. A scheduler or a client of an earlier version tells none.
    Event(Box<WatchEvent>, Vec<PhaseTime>),
    /// This many events are lost: they were read too slowly, or asked for too late.
    Missed(u64),
    /// Nothing happened for a while, and the scheduler lives.
    Alive,
}

/// Events of one run of a scheduler.
#[derive(Debug)]
pub struct Watch {
    connection: Connection,
    boot: u64,
    seen: u64,
}

impl Scheduler {
    /// Begins to watch. With `follow` there is no end; else the answer ends behind the last event that is kept.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn watch(&self, from: WatchFrom, follow: bool) -> Result<Watch, Error> {
        let mut found = places::find(&self.places)?;
        if let Some(denied) = found.denied.take() {
            return Err(Error::NotAnAdministrator { what: "events", tried: denied });
        }
        let mut connection = found.connection;
        connection.send(AdminRequest::Watch { from, follow })?;
        match connection.receive()? {
            AdminReply::Watching { boot, first } => {
                Ok(Watch { connection, boot, seen: first.saturating_sub(1) })
            }
            other => Err(connection.broken(format!("an answer of another kind: {other:?}"))),
        }
    }
}

impl Watch {
    /// Waits for the next news; none: there is no more.
    ///
    /// # Errors
    /// See [`Error`]; the scheduler may be gone.
    pub fn wait(&mut self) -> Result<Option<Told>, Error> {
        let (reply, phases) = match self.connection.receive()? {
            AdminReply::Phases(phases) => (self.connection.receive()?, phases),
            reply => (reply, Vec::new()),
        };
        Ok(Some(match reply {
            AdminReply::Event(event) => {
                self.seen = event.seq;
                Told::Event(event, phases)
            }
            AdminReply::Missed { count } => Told::Missed(count),
            AdminReply::Alive => Told::Alive,
            AdminReply::End => return Ok(None),
            other => return Err(self.connection.broken(format!("an answer of another kind: {other:?}"))),
        }))
    }

    /// The run of the scheduler.
    #[must_use]
    pub const fn boot(&self) -> u64 {
        self.boot
    }

    /// The event from which another connection goes on after this one is lost.
    #[must_use]
    pub fn place(&self) -> WatchFrom {
        WatchFrom::After { boot: self.boot, seq: self.seen }
    }
}
