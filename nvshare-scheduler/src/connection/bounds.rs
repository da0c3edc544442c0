//! Bounds for one user, one container or one seat: connections, registrations a second, and GPUs named.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nvshare_proto::GpuUuid;

use crate::bucket::{Bucket, Rate};
use crate::gpus;
use crate::identity::Whom;
use crate::lock::lock;

/// Registrations of one user or container.
const REGISTRATIONS: Rate = Rate { burst: 512, each_second: 64 };
/// Questions of one user or container on the clients' socket, on all its connections together: an answer may tell of every
/// client.
const QUESTIONS: Rate = Rate { burst: 16, each_second: 8 };
/// One user or container may have one of this many parts of all places.
const PART: usize = 2;
/// The same for a seat: several together leave places for others.
const PART_OF_SEAT: usize = 8;

/// One of this many parts of all places is for users, containers and seats that have few: no others can take them, however many they are.
const PART_FOR_FEW: usize = 4;
/// Fewer places than this are few.
const MIN_PLACES: usize = 4;

/// Places for clients.
#[derive(Debug)]
pub(crate) struct Bounds {
    most: usize,
    /// Folder in which the machine describes its GPUs.
    descriptions: PathBuf,
    taken: Mutex<BTreeMap<Whom, Taken>>,
}

#[derive(Debug)]
struct Taken {
    places: usize,
    /// GPUs that processes of this user or container have named.
    gpus: BTreeSet<GpuUuid>,
    registrations: Bucket,
    questions: Bucket,
}

/// A place that is taken; dropping this frees it.
#[derive(Debug)]
pub(crate) struct Place {
    bounds: Arc<Bounds>,
    whom: Whom,
}

impl Bounds {
    pub(crate) fn new(most: usize, descriptions: PathBuf) -> Arc<Self> {
        Arc::new(Self { most, descriptions, taken: Mutex::default() })
    }

    /// A place for one more connection; none: the user or container has too many, or all together have.
    pub(crate) fn take(self: &Arc<Self>, whom: Whom) -> Option<Place> {
        let now = Instant::now();
        let mut taken = lock(&self.taken);
        let all: usize = taken.values().map(|taken| taken.places).sum();
        let fresh = || Taken {
            places: 0,
            gpus: BTreeSet::new(),
            registrations: Bucket::new(REGISTRATIONS, now),
            questions: Bucket::new(QUESTIONS, now),
        };
        let own = taken.entry(whom.clone()).or_insert_with(fresh);
        let part = if matches!(whom, Whom::Seat(_)) { PART_OF_SEAT } else { PART };
        let left_for_few = if own.places < MIN_PLACES { 0 } else { self.most / PART_FOR_FEW };
        if all + left_for_few >= self.most || own.places >= (self.most / part).max(1) {
            return None;
        }
        own.places += 1;
        drop(taken);
        Some(Place { bounds: Arc::clone(self), whom })
    }

    /// Whether anybody is connected.
    pub(crate) fn has_any_taken(&self) -> bool {
        lock(&self.taken).values().any(|taken| taken.places > 0)
    }
}

impl Place {
    /// Whether a registration may go on; else how long the process has to wait.
    pub(crate) fn register(&self, now: Instant) -> Result<(), Duration> {
        let mut taken = lock(&self.bounds.taken);
        taken.get_mut(&self.whom).map_or(Ok(()), |own| own.registrations.take(now))
    }

    /// Whether a question may be asked; else how long the process has to wait.
    pub(crate) fn ask(&self, now: Instant) -> Result<(), Duration> {
        let mut taken = lock(&self.bounds.taken);
        taken.get_mut(&self.whom).map_or(Ok(()), |own| own.questions.take(now))
    }

    /// Whether a process may name these GPUs: processes of one user or container may not name more than the machine can have.
    pub(crate) fn names(&self, named: impl Iterator<Item = GpuUuid>) -> bool {
        let mut taken = lock(&self.bounds.taken);
        let Some(own) = taken.get_mut(&self.whom) else { return true };
        // GPUs may have come since the last time.
        let mut most = None;
        for gpu in named {
            if own.gpus.contains(&gpu) {
                continue;
            }
            let most = *most.get_or_insert_with(|| gpus::most_named(&self.bounds.descriptions));
            if own.gpus.len() >= most {
                return false;
            }
            own.gpus.insert(gpu);
        }
        true
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let now = Instant::now();
        let mut taken = lock(&self.bounds.taken);
        if let Some(own) = taken.get_mut(&self.whom) {
            own.places -= 1;
            if own.places == 0 {
                own.gpus.clear();
            }
        }
        // A user or container without connections and with full buckets is forgotten.
        let asks_little = |own: &Taken| own.registrations.is_full(now) && own.questions.is_full(now);
        taken.retain(|_, own| own.places > 0 || !asks_little(own));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_leaves_places_for_the_others() {
        let bounds = Bounds::new(8, PathBuf::new());
        let user = |user| Whom::User(Some(user));
        let mut places: Vec<Place> = (0..4).map(|_| bounds.take(user(1)).expect("a place")).collect();
        assert!(bounds.take(user(1)).is_none(), "half of them");
        assert!(bounds.take(user(2)).is_some());
        places.pop();
        assert!(bounds.take(user(1)).is_some(), "one is free again");
    }

    #[test]
    fn two_seats_leave_places_for_the_others() {
        let bounds = Bounds::new(32, PathBuf::new());
        let seat = |name: &str| Whom::Seat(name.parse().unwrap());
        let take_all = |name| std::iter::from_fn(|| bounds.take(seat(name))).take(32).collect::<Vec<_>>();
        let places = ["00000000000000aa", "00000000000000ab"].map(take_all);
        assert_eq!(places.each_ref().map(Vec::len), [4, 4]);
        assert!(bounds.take(Whom::User(Some(1))).is_some());
    }

    #[test]
    fn many_full_seats_leave_places_for_those_that_have_few() {
        let bounds = Bounds::new(128, PathBuf::new());
        let seat = |n: u64| Whom::Seat(format!("{n:016x}").parse().unwrap());
        let take_all = |n| std::iter::from_fn(|| bounds.take(seat(n))).take(128).collect::<Vec<_>>();
        let full: Vec<_> = (0..6).map(take_all).collect();
        assert!(full.iter().all(|places| places.len() == 16), "{full:?}");
        // A quarter is left. All that come later have their least.
        let few: Vec<_> = (6..14).map(take_all).collect();
        assert!(few.iter().all(|places| places.len() == MIN_PLACES), "{few:?}");
        assert!(bounds.take(Whom::User(Some(1))).is_none(), "all are taken");
    }

    #[test]
    fn one_user_names_as_many_gpus_as_the_machine_can_have() {
        let folder = std::env::temp_dir().join(format!("nvshare-bounds-{}", std::process::id()));
        let there = |n: usize| std::fs::create_dir_all(folder.join(n.to_string())).unwrap();
        there(1);
        let bounds = Bounds::new(8, folder.clone());
        let [one, again, other] = [1, 1, 2].map(|user| bounds.take(Whom::User(Some(user))).expect("a place"));
        let gpus = |from: u8, to: u8| (from..to).map(|n| GpuUuid([n; 16]));
        assert!(one.names(gpus(0, 10)));
        assert!(again.names(gpus(5, 16)), "16 together");
        assert!(!again.names(gpus(16, 17)) && again.names(gpus(3, 4)) && other.names(gpus(16, 17)));
        there(2);
        assert!(again.names(gpus(16, 32)) && !again.names(gpus(32, 33)), "another one has come");
        drop((one, again));
        assert!(bounds.take(Whom::User(Some(1))).is_some_and(|place| place.names(gpus(100, 132))));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_user_who_registers_often_is_slowed_down() {
        let bounds = Bounds::new(8, PathBuf::new());
        let (many, other) =
            (bounds.take(Whom::User(Some(1))).unwrap(), bounds.take(Whom::User(Some(2))).unwrap());
        let now = Instant::now();
        assert!((0..REGISTRATIONS.burst).all(|_| many.register(now).is_ok()));
        assert!(many.register(now).is_err());
        assert!(other.register(now).is_ok());
        // A new connection does not make the bucket forgotten.
        drop(many);
        assert!(bounds.take(Whom::User(Some(1))).unwrap().register(now).is_err());
    }

    #[test]
    fn questions_are_counted_for_all_connections_of_a_user() {
        let bounds = Bounds::new(8, PathBuf::new());
        let [one, again, other] = [1, 1, 2].map(|user| bounds.take(Whom::User(Some(user))).expect("a place"));
        let now = Instant::now();
        assert!((0..QUESTIONS.burst).all(|n| if n % 2 == 0 { &one } else { &again }.ask(now).is_ok()));
        assert!(one.ask(now).is_err() && again.ask(now).is_err());
        assert!(other.ask(now).is_ok() && one.register(now).is_ok());
        // New connections have no more.
        drop((one, again));
        assert!(bounds.take(Whom::User(Some(1))).is_some_and(|place| place.ask(now).is_err()));
    }
}
