//! The seats that were given out, in a file: `/var/run/cdi` is empty after a start of the machine, and the kubelet still names their devices.
//!
//! A line has the seat's name, its limits and its slots. Since the name follows from the slots, which stand at the end, a line that is torn is
//! seen.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use nvshare_proto::{Given, Seat, SeatName, Slot};

use crate::files;

/// The file's name in its folder.
pub const FILE: &str = "device-plugin-seats";

/// Seats by their names.
pub type Seats = BTreeMap<SeatName, Seat>;

/// The file.
#[derive(Debug)]
pub struct Records {
    path: PathBuf,
    seats: Seats,
}

impl Records {
    /// Reads what is there. The lines that cannot be read are returned as well, each with what is wrong; the others are used.
    ///
    /// # Errors
    /// The file is there and cannot be read.
    pub fn open(folder: &Path) -> Result<(Self, Vec<String>), String> {
        let path = folder.join(FILE);
        let text = match fs::read(&path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        let (seats, torn) = parse(&text);
        let wrong = torn
            .into_iter()
            .map(|number| format!("{}: line {number} names no seat and is left out", path.display()));
        let wrong = wrong.collect();
        Ok((Self { path, seats }, wrong))
    }

    /// The seats.
    #[must_use]
    pub const fn seats(&self) -> &Seats {
        &self.seats
    }

    /// Adds a seat, or gives one other limits. It is in the file when this returns.
    ///
    /// # Errors
    /// The file cannot be written; then nothing has changed.
    pub fn add(&mut self, seat: Seat) -> Result<(), String> {
        self.set(seat.name(), Some(seat))
    }

    /// Removes a seat, if it is there. It is not in the file when this returns.
    ///
    /// # Errors
    /// As for [`Records::add`].
    pub fn remove(&mut self, name: SeatName) -> Result<(), String> {
        self.set(name, None)
    }

    fn set(&mut self, name: SeatName, seat: Option<Seat>) -> Result<(), String> {
        if self.seats.get(&name) == seat.as_ref() {
            return Ok(());
        }
        let old = put(&mut self.seats, name, seat);
        files::replace(&self.path, format(&self.seats).as_bytes())
            .map(drop)
            .inspect_err(|_| drop(put(&mut self.seats, name, old)))
    }
}

fn put(seats: &mut Seats, name: SeatName, seat: Option<Seat>) -> Option<Seat> {
    match seat {
        Some(seat) => seats.insert(name, seat),
        None => seats.remove(&name),
    }
}

fn format(seats: &Seats) -> String {
    let line = |(name, seat): (&SeatName, &Seat)| {
        let memory = seat.given.memory.map(|bytes| format!("memory={bytes} ")).unwrap_or_default();
        let compute = seat.given.compute.map(|percent| format!("compute={percent} ")).unwrap_or_default();
        let slots: Vec<String> = seat.slots.iter().map(Slot::to_string).collect();
        format!("{name} {memory}{compute}{}\n", slots.join(" "))
    };
    seats.iter().map(line).collect()
}

/// The seats of the lines, and the numbers of the lines that cannot be read.
fn parse(text: &str) -> (Seats, Vec<usize>) {
    let (mut seats, mut torn) = (Seats::new(), Vec::new());
    for (number, line) in (1..).zip(text.lines()) {
        match seat(line) {
            Some(seat) => drop(seats.insert(seat.name(), seat)),
            None => torn.push(number),
        }
    }
    (seats, torn)
}

fn seat(line: &str) -> Option<Seat> {
    let mut words = line.split(' ');
    let name = words.next()?;
    let mut seat = Seat { slots: Vec::new(), given: Given::default() };
    for word in words {
        match word.split_once('=') {
            Some(("memory", bytes)) => seat.given.memory = Some(bytes.parse().ok()?),
            Some(("compute", percent)) => seat.given.compute = Some(percent.parse().ok()?),
            Some(_) => return None,
            None => seat.slots.push(word.parse().ok()?),
        }
    }
    (!seat.slots.is_empty() && seat.name().to_string() == name).then_some(seat)
}

#[cfg(test)]
mod tests {
    use nvshare_proto::GpuUuid;

    use super::*;

    #[test]
    fn a_torn_line_is_left_out_and_the_rest_is_used() {
        let slot = |gpu, number| Slot { gpu: GpuUuid([gpu; 16]), number };
        let given = Given { memory: Some(2 << 30), compute: Some(30), ..Given::default() };
        let sets = [
            Seat { slots: vec![slot(1, 0)], given },
            Seat { slots: vec![slot(1, 3), slot(2, 10)], given: Given::default() },
        ];
        let seats: Seats = sets.into_iter().map(|seat| (seat.name(), seat)).collect();
        let text = format(&seats);
        assert_eq!(parse(&text), (seats.clone(), vec![]));
        // Each beginning of the text that ends within a line.
        let first = text.find('\n').unwrap();
        for end in (1..first).chain(first + 2..text.len() - 1) {
            let (read, torn) = parse(&text[..end]);
            let whole = usize::from(end > first);
            assert_eq!((read.len(), torn), (whole, vec![whole + 1]), "{:?}", &text[..end]);
        }
        let (read, torn) = parse(&format!("\u{fffd}\n\n{text}"));
        assert_eq!((read, torn), (seats, vec![1, 2]));
    }
}
