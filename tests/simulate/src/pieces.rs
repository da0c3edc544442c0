//! Memory that moves in pieces, both ways at once: what a library does that copies its memory itself.

use nvshare_proto::units::GIB;
use nvshare_proto::{Amount, ClientMessage, ROOM_PIECE};

use crate::client::{Client, State};
use crate::policies::uuid;
use crate::world::{Event, World};

/// Memory moves in pieces of [`ROOM_PIECE`], and in larger ones where there would be more than this many: that is enough for both ways at once.
const MAX_PIECES: u64 = 32;

/// The size of the pieces in which `bytes` bytes move.
fn piece_of(bytes: u64) -> u64 {
    ROOM_PIECE.max(bytes / MAX_PIECES)
}

/// A client's memory on one GPU, as far as it moves in pieces.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pieces {
    /// Bytes that still have to leave.
    leave: u64,
    /// Bytes of a piece.
    by: u64,
    /// A piece is on its way to the card.
    comes: bool,
    /// Bytes on the card that the host has as they were when they came. They leave first.
    known: u64,
    /// The client's time on the GPU when they came, in milliseconds.
    known_at: f64,
}

impl Client {
    /// The part of the known bytes that has changed since they came.
    fn changed_part(&self, at: usize) -> f64 {
        let Some(gib) = self.job.changes else { return 1.0 };
        let worked = (self.seen.done_ms - self.pieces[at].known_at) / 1000.0;
        (gib * worked * GIB as f64 / self.bytes as f64).min(1.0)
    }
}

impl World {
    /// A client evicts `moves` bytes of what it has on a GPU, and gives `unused` bytes of room back with them.
    pub(crate) fn leaves_in_pieces(&mut self, i: usize, at: usize, unused: u64, moves: u64) {
        if unused > 0 {
            self.gives_back(i, at, unused);
        }
        let pieces = &mut self.clients[i].pieces[at];
        (pieces.leave, pieces.by) = (moves, piece_of(moves));
        self.leaves_on(i, at);
    }

    fn leaves_on(&mut self, i: usize, at: usize) {
        let client = &mut self.clients[i];
        let changed = if self.link.by_content { client.changed_part(at) } else { 1.0 };
        let bytes = client.pieces[at].leave.min(client.pieces[at].by);
        let known = client.pieces[at].known.min(bytes);
        client.pieces[at].known -= known;
        client.resident[at] -= bytes;
        let unchanged = known as f64 * (1.0 - changed);
        let copied = bytes as f64 - unchanged;
        self.moved += copied as u64;
        let left = self.cards[client.job.gpus[at]].piece_leaves(copied, unchanged, self.now);
        self.at(left, Event::Left(i, at, bytes));
    }

    /// A piece has left.
    pub(crate) fn on_left(&mut self, i: usize, at: usize, bytes: u64) {
        self.gives_back(i, at, bytes);
        let client = &mut self.clients[i];
        let pieces = &mut client.pieces[at];
        pieces.leave -= bytes;
        if pieces.leave > 0 {
            self.leaves_on(i, at);
            return;
        }
        // Memory that stays goes on changing: it counts as unknown when it leaves.
        pieces.known = 0;
        let gpu = uuid(client.job.gpus[at]);
        self.says_what_it_has(i);
        self.say(i, ClientMessage::Evicted { gpu, short: 0 });
    }

    fn gives_back(&mut self, i: usize, at: usize, bytes: u64) {
        let gpu = uuid(self.clients[i].job.gpus[at]);
        self.say(i, ClientMessage::Room(Amount { gpu, bytes }));
    }

    /// The next piece of a client's absent memory comes to the card, if there is room for it.
    pub(crate) fn comes_on(&mut self, i: usize, at: usize) {
        let client = &mut self.clients[i];
        let absent = client.bytes - client.resident[at];
        let bytes = absent.min(client.room[at]).min(piece_of(absent));
        if bytes == 0 || std::mem::replace(&mut client.pieces[at].comes, true) {
            return;
        }
        client.room[at] -= bytes;
        client.resident[at] += bytes;
        if client.touched {
            // Memory that is on the card for the first time was not moved there from the host.
            self.moved += bytes;
            client.pieces[at].known += bytes;
            client.pieces[at].known_at = client.seen.done_ms;
        }
        let came = self.cards[client.job.gpus[at]].piece_comes(bytes, self.now);
        self.at(came, Event::Came(i, at));
    }

    /// A piece has come.
    pub(crate) fn on_come(&mut self, i: usize, at: usize) {
        self.clients[i].pieces[at].comes = false;
        self.comes_on(i, at);
        self.begin_if_complete(i);
    }

    /// A client that has the lock begins when nothing of its memory is on its way any more.
    pub(crate) fn begin_if_complete(&mut self, i: usize) {
        let now = self.now;
        let client = &mut self.clients[i];
        let State::Restoring(epoch) = client.state else { return };
        if client.pieces.iter().all(|pieces| !pieces.comes) {
            client.touched = true;
            self.at(now, Event::Restored(i, epoch));
        }
    }
}
