//! Clients, cards and a scheduler, in virtual time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use nvshare_core::Time;
use nvshare_proto::{Amount, ClientMessage, Epoch, GpuUuid, InitialState, SchedulerMessage, Usage};

use crate::card::{Card, Link};
use crate::client::{Client, State};
use crate::policies::{Newcomer, Scheduler, number, uuid};
use crate::trace::Job;

/// Time that a message takes.
const MESSAGE: Duration = Duration::from_micros(50);

/// An event at some time.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Event {
    Start(usize),
    /// A client's pause is over.
    Wake(usize),
    Said(usize, ClientMessage),
    Told(usize, SchedulerMessage),
    /// A client's work stops, if this is still the number of the announced end.
    Stops(usize, u64),
    Restored(usize, Epoch),
    Evicted(usize, Amount),
    /// A piece of a client's memory on its GPU of this number has left, or has come.
    Left(usize, usize, u64),
    Came(usize, usize),
    /// A client has been idle for long enough to report it, if it still is.
    Idles(usize),
}

#[derive(Debug, PartialEq)]
struct Later(Time, u64, Event);

impl Eq for Later {}

impl Ord for Later {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.0, self.1).cmp(&(other.0, other.1))
    }
}

impl PartialOrd for Later {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// The result of a trace.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) clients: Vec<Client>,
    /// Time in which any client had work for a GPU, for each GPU, in seconds.
    pub(crate) wanted_s: Vec<f64>,
    /// Bytes that left the cards, and that came back to them.
    pub(crate) moved: u64,
    /// Events that were handled.
    pub(crate) events: u64,
}

/// See the module's documentation.
pub(crate) struct World {
    scheduler: Box<dyn Scheduler>,
    pub(crate) clients: Vec<Client>,
    pub(crate) cards: Vec<Card>,
    pub(crate) link: Link,
    card_bytes: u64,
    pub(crate) now: Time,
    agenda: BinaryHeap<Reverse<Later>>,
    sequence: u64,
    pub(crate) moved: u64,
    events: u64,
}

impl World {
    pub(crate) fn new(
        trace: &[Job],
        scheduler: Box<dyn Scheduler>,
        gpus: usize,
        card: u64,
        link: Link,
        seed: u64,
    ) -> Self {
        let clients = trace.iter().cloned().enumerate();
        let mut world = Self {
            scheduler,
            clients: clients.map(|(i, job)| Client::new(job, i, card, seed)).collect(),
            cards: (0..gpus).map(|_| Card::new(link)).collect(),
            link,
            card_bytes: card,
            now: Time::ZERO,
            agenda: BinaryHeap::new(),
            sequence: 0,
            moved: 0,
            events: 0,
        };
        for (i, job) in trace.iter().enumerate() {
            world.at(Duration::from_secs_f64(job.arrives_s), Event::Start(i));
        }
        world
    }

    /// Runs the simulation up to this time.
    pub(crate) fn run(mut self, until: Time) -> Outcome {
        loop {
            let next = self.agenda.peek().map(|Reverse(later)| later.0);
            let deadline = self.scheduler.deadline();
            let Some(time) = next.into_iter().chain(deadline).min().filter(|&time| time <= until) else {
                break;
            };
            self.now = self.now.max(time);
            self.events += 1;
            if next.is_none_or(|next| deadline.is_some_and(|deadline| deadline < next)) {
                self.scheduler.due(self.now);
            } else if let Some(Reverse(Later(_, _, event))) = self.agenda.pop() {
                self.happens(event);
            }
            while let Some((client, message)) = self.scheduler.told() {
                self.at(self.now + MESSAGE, Event::Told(client, message));
            }
        }
        self.now = until;
        for client in &mut self.clients {
            client.settle(until);
            // A client that still waits has waited up to now.
            client.seen.waits.extend(client.waits_since.map(|since| (until - since).as_secs_f32() * 1000.0));
        }
        self.cards.iter_mut().for_each(|card| card.close(until));
        Outcome {
            clients: self.clients,
            wanted_s: self.cards.iter().map(|card| card.wanted.as_secs_f64()).collect(),
            moved: self.moved,
            events: self.events,
        }
    }

    pub(crate) fn at(&mut self, time: Time, event: Event) {
        self.sequence += 1;
        self.agenda.push(Reverse(Later(time, self.sequence, event)));
    }

    pub(crate) fn say(&mut self, i: usize, message: ClientMessage) {
        self.at(self.now + MESSAGE, Event::Said(i, message));
    }

    fn happens(&mut self, event: Event) {
        let now = self.now;
        match event {
            Event::Start(i) => {
                let client = &mut self.clients[i];
                client.state = State::Parked;
                client.settle(now);
                let (gpus, bytes, weight) = (client.job.gpus.clone(), client.bytes, client.job.weight);
                self.scheduler.comes(&Newcomer { client: i, gpus, bytes, weight }, now);
                self.wakes(i);
            }
            Event::Wake(i) => self.wakes(i),
            Event::Said(i, message) => {
                if self.clients[i].state != State::Gone {
                    self.scheduler.says(i, message, now);
                }
            }
            Event::Told(i, message) => {
                if self.clients[i].state != State::Gone {
                    self.obeys(i, message);
                }
            }
            Event::Stops(i, version) => {
                if self.clients[i].version == version && self.clients[i].active {
                    self.stops(i);
                }
            }
            Event::Restored(i, epoch) => {
                if self.clients[i].state == State::Restoring(epoch) {
                    self.begins(i, epoch);
                }
            }
            Event::Evicted(i, room) => {
                if self.clients[i].state != State::Gone {
                    self.on_evicted(i, room);
                }
            }
            Event::Left(i, at, bytes) => {
                if self.clients[i].state != State::Gone {
                    self.on_left(i, at, bytes);
                }
            }
            Event::Came(i, at) => {
                if self.clients[i].state != State::Gone {
                    self.on_come(i, at);
                }
            }
            Event::Idles(i) => self.idles(i),
        }
    }

    /// New work.
    fn wakes(&mut self, i: usize) {
        let now = self.now;
        let client = &mut self.clients[i];
        client.settle(now);
        client.remaining = client.next_busy_ms(now);
        client.began = now;
        for gpu in client.job.gpus.clone() {
            self.cards[gpu].wanted_by_one_more(now);
        }
        let client = &mut self.clients[i];
        match client.state {
            State::Running(_) => {
                if client.contested {
                    client.pauses.note(now - client.idle_since);
                }
                self.works(i);
            }
            State::Parked | State::Idle(_) => {
                client.pauses.resume(now);
                self.asks(i);
            }
            _ => client.waits_since = client.waits_since.or(Some(now)),
        }
    }

    fn asks(&mut self, i: usize) {
        let now = self.now;
        self.clients[i].waits_since.get_or_insert(now);
        self.says_what_it_has(i);
        self.say(i, ClientMessage::ReqLock);
    }

    pub(crate) fn says_what_it_has(&mut self, i: usize) {
        let client = &self.clients[i];
        let usages = client.job.gpus.iter().zip(&client.resident).map(|(&gpu, &resident)| Usage {
            gpu: uuid(gpu),
            total: self.card_bytes,
            limit: 0,
            allocated: client.bytes,
            absent: client.bytes - resident,
            immovable: 0,
        });
        for usage in usages.collect::<Vec<_>>() {
            self.say(i, ClientMessage::Usage(usage));
        }
    }

    fn says_its_counters(&mut self, i: usize) {
        self.clients[i].settle(self.now);
        let counters = self.clients[i].counters();
        self.say(i, ClientMessage::Counters(counters));
    }

    /// A client's work is on the cards from now on, or no longer: other clients there go on faster or slower.
    fn works(&mut self, i: usize) {
        let now = self.now;
        let client = &mut self.clients[i];
        let active = client.runs() && client.has_work();
        if client.active == active {
            if active {
                self.goes_on(i);
            }
            return;
        }
        client.settle(now);
        client.active = active;
        client.version += 1;
        let gpus = client.job.gpus.clone();
        let mut others = vec![i];
        for &gpu in &gpus {
            let card = &mut self.cards[gpu];
            if active {
                card.active.push(i);
            } else {
                card.active.retain(|&other| other != i);
            }
            others.extend(&card.active);
        }
        others.sort_unstable();
        others.dedup();
        for other in others {
            if self.clients[other].active {
                self.goes_on(other);
            }
        }
    }

    fn goes_on(&mut self, i: usize) {
        let now = self.now;
        let client = &mut self.clients[i];
        client.settle(now);
        let rates = client.job.gpus.iter().map(|&gpu| self.cards[gpu].rate());
        let stops = client.goes_on(rates.fold(1.0, f64::min), now);
        let version = client.version;
        self.at(stops, Event::Stops(i, version));
    }

    /// A client's work is done, or the work in flight is complete.
    fn stops(&mut self, i: usize) {
        let now = self.now;
        self.clients[i].settle(now);
        if !self.clients[i].has_work() {
            self.finishes_a_cycle(i);
            if self.clients[i].state == State::Gone {
                return;
            }
        }
        if let State::Draining(epoch) = self.clients[i].state
            && self.clients[i].is_drained()
        {
            self.on_drained(i, epoch);
        }
        self.works(i);
    }

    fn finishes_a_cycle(&mut self, i: usize) {
        let now = self.now;
        let client = &mut self.clients[i];
        client.remaining = 0.0;
        client.idle_since = now;
        client.seen.cycles.push((now - client.began).as_secs_f32() * 1000.0);
        let gpus = client.job.gpus.clone();
        for gpu in gpus {
            self.cards[gpu].wanted_by_one_less(now);
        }
        let client = &mut self.clients[i];
        if let Some(left) = &mut client.cycles_left {
            *left -= 1;
            if *left == 0 {
                client.state = State::Gone;
                self.works(i);
                self.scheduler.goes(i, now);
                return;
            }
        }
        let gap = client.next_gap(now);
        self.at(now + gap, Event::Wake(i));
        self.idles_later(i);
    }

    fn idles_later(&mut self, i: usize) {
        let client = &self.clients[i];
        if client.contested && matches!(client.state, State::Running(_)) && !client.has_work() {
            let at = client.idle_since + self.idle_after(i);
            self.at(self.now.max(at), Event::Idles(i));
        }
    }

    /// How long a client does nothing before it counts as idle.
    fn idle_after(&self, i: usize) -> Duration {
        self.scheduler.idle_after().unwrap_or_else(|| self.clients[i].pauses.idle_after())
    }

    fn idles(&mut self, i: usize) {
        let after = self.idle_after(i);
        let client = &mut self.clients[i];
        let State::Running(epoch) = client.state else { return };
        if client.contested && !client.has_work() && self.now >= client.idle_since + after {
            client.state = State::Idle(epoch);
            client.pauses.end(self.now);
            self.say(i, ClientMessage::Idle { epoch });
        }
    }

    fn on_drained(&mut self, i: usize, epoch: Epoch) {
        self.clients[i].state = State::Parked;
        self.leaves(i, epoch);
    }

    /// The client gives the lock back, with the room that it has not used.
    fn leaves(&mut self, i: usize, epoch: Epoch) {
        self.says_what_it_has(i);
        self.says_its_counters(i);
        for at in 0..self.clients[i].room.len() {
            let client = &mut self.clients[i];
            let bytes = std::mem::take(&mut client.room[at]);
            let gpu = uuid(client.job.gpus[at]);
            if bytes > 0 {
                self.say(i, ClientMessage::Room(Amount { gpu, bytes }));
            }
        }
        self.say(i, ClientMessage::LockReleased { epoch });
        if self.clients[i].has_work() {
            self.asks(i);
        }
    }

    fn obeys(&mut self, i: usize, message: SchedulerMessage) {
        match message {
            SchedulerMessage::Registered { hold, .. } => debug_assert_eq!(hold, InitialState::Parked),
            SchedulerMessage::LockOk { epoch, room, .. } => self.restores(i, epoch, &room),
            SchedulerMessage::DropLock { epoch, .. } => match self.clients[i].state {
                State::Running(current) if current == epoch => self.drains(i, epoch),
                // The kernels whose pages come by faults are under way.
                State::Restoring(current) if current == epoch && self.clients[i].by_faults => {
                    self.clients[i].dropped = true;
                }
                State::Restoring(current) if current == epoch => self.on_drained(i, epoch),
                _ => {}
            },
            SchedulerMessage::Evict(room) => self.evicts(i, room),
            SchedulerMessage::Room(Amount { gpu, bytes }) => {
                self.add_room(i, gpu, bytes);
            }
            SchedulerMessage::Restore(Amount { gpu, bytes }) => {
                if let Some(at) = self.add_room(i, gpu, bytes) {
                    self.comes_on(i, at);
                }
            }
            SchedulerMessage::AskCounters => self.says_its_counters(i),
            SchedulerMessage::Waiters { waiting } => {
                self.clients[i].contested = waiting;
                self.idles_later(i);
            }
            _ => {}
        }
    }

    /// A client has more room on a GPU, whose number among its own is returned.
    fn add_room(&mut self, i: usize, gpu: GpuUuid, bytes: u64) -> Option<usize> {
        let client = &mut self.clients[i];
        let at = client.job.gpus.iter().position(|&n| n == number(gpu))?;
        client.room[at] += bytes;
        Some(at)
    }

    fn drains(&mut self, i: usize, epoch: Epoch) {
        let now = self.now;
        self.clients[i].settle(now);
        if self.clients[i].active {
            self.clients[i].drain(epoch);
            self.goes_on(i);
        } else {
            self.on_drained(i, epoch);
        }
    }

    fn restores(&mut self, i: usize, epoch: Epoch, room: &[Amount]) {
        let now = self.now;
        let by_faults = self.scheduler.faults(i);
        let client = &mut self.clients[i];
        client.state = State::Restoring(epoch);
        client.by_faults = by_faults.is_some();
        if self.link.both.is_some() {
            for room in room {
                self.add_room(i, room.gpu, room.bytes);
            }
            (0..self.clients[i].room.len()).for_each(|at| self.comes_on(i, at));
            self.begin_if_complete(i);
            return;
        }
        let mut ready = now;
        let mut moved = 0;
        for &Amount { gpu, bytes } in room {
            let Some(at) = client.job.gpus.iter().position(|&n| n == number(gpu)) else { continue };
            client.room[at] += bytes;
            let absent = (client.bytes - client.resident[at]).min(client.room[at]);
            client.room[at] -= absent;
            client.resident[at] += absent;
            moved += absent;
            ready = ready.max(self.cards[number(gpu)].restore(absent, now));
        }
        for faults in by_faults.into_iter().flatten() {
            let card = &mut self.cards[faults.gpu];
            let evicted = card.evict(faults.leave, now);
            ready = ready.max(card.restore(faults.come, evicted));
            self.moved += faults.leave;
            moved += faults.come;
        }
        // Memory that is on the card for the first time was not moved there from the host.
        if std::mem::replace(&mut client.touched, true) {
            self.moved += moved;
        }
        self.at(ready, Event::Restored(i, epoch));
    }

    fn begins(&mut self, i: usize, epoch: Epoch) {
        let now = self.now;
        let client = &mut self.clients[i];
        client.settle(now);
        client.state = State::Running(epoch);
        client.idle_since = now;
        client.pauses.begin(now);
        if let Some(since) = client.waits_since.take() {
            client.seen.waits.push((now - since).as_secs_f32() * 1000.0);
        }
        self.say(i, ClientMessage::Running { epoch });
        self.works(i);
        self.idles_later(i);
        if std::mem::take(&mut self.clients[i].dropped) {
            self.drains(i, epoch);
        }
    }

    fn evicts(&mut self, i: usize, Amount { gpu, bytes }: Amount) {
        let now = self.now;
        let client = &mut self.clients[i];
        if let State::Idle(_) = client.state {
            client.state = State::Parked;
        }
        let Some(at) = client.job.gpus.iter().position(|&n| n == number(gpu)) else { return };
        let unused = bytes.min(client.room[at]);
        client.room[at] -= unused;
        let parked = client.state == State::Parked;
        let moves = if parked { (bytes - unused).min(client.resident[at]) } else { 0 };
        if self.link.both.is_some() && moves > 0 {
            self.leaves_in_pieces(i, at, unused, moves);
            return;
        }
        client.resident[at] -= moves;
        self.moved += moves;
        let done = self.cards[number(gpu)].evict(moves, now);
        self.at(done, Event::Evicted(i, Amount { gpu, bytes: unused + moves }));
    }

    fn on_evicted(&mut self, i: usize, room: Amount) {
        self.says_what_it_has(i);
        self.say(i, ClientMessage::Room(room));
        self.say(i, ClientMessage::Evicted { gpu: room.gpu, short: 0 });
    }
}
