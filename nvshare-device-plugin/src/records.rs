//! The seats that containers have, in a file: after a reboot `/var/run/cdi` is empty, but the kubelet still asks for the seats' devices.
//!
//! A line has the seat's name, its limits, its claim and its slots, each with the claim's request. The name is computed from the slots at the
//! end of the line, so a truncated line is detected. The first line may name a boot of the machine: the seats' folders, which a reboot
//! removes, are there in that one.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use nvshare_proto::units::{parse_enforcement, parse_priority};
use nvshare_proto::{Seat, SeatName, TenantSettings};

use crate::files;
use crate::options::Api;

/// A seat that was given out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The seat.
    pub seat: Seat,
    /// The claim that it was made for. `None` for a seat of the device plugin, or of a claim that has ended.
    pub claim: Option<Claim>,
}

/// A claim of Kubernetes, as far as it is known of a seat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The claim's namespace.
    pub namespace: String,
    /// The claim's name.
    pub name: String,
    /// The number that tells it from all other claims, also from an earlier one of the same name.
    pub uid: String,
    /// The claim's request that each slot of the seat is for.
    pub requests: Vec<String>,
    /// Whether the seat's processes are a gang.
    pub gang: bool,
}

/// Seats by their names.
pub type Seats = BTreeMap<SeatName, Record>;

/// The file's name in its folder. Each API has its own.
#[must_use]
pub const fn file(api: Api) -> &'static str {
    match api {
        Api::DevicePlugin => "device-plugin-seats",
        Api::Dra => "claim-seats",
    }
}

/// The word in front of a boot.
const BOOT: &str = "boot ";

/// The kernel's name of this boot of the machine (random(4)); empty: it has none.
#[must_use]
pub fn this_boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// The file.
#[derive(Debug)]
pub struct Records {
    path: PathBuf,
    seats: Seats,
    /// The boot of the machine in which the seats' folders are there.
    boot: Option<String>,
}

impl Records {
    /// Reads what is there. The lines that cannot be read are returned as well, each with what is wrong; the others are used.
    ///
    /// # Errors
    /// The file is there and cannot be read.
    pub fn open(folder: &Path, api: Api) -> Result<(Self, Vec<String>), String> {
        let path = folder.join(file(api));
        let text = match fs::read(&path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        let (boot, lines) = match text.strip_prefix(BOOT).and_then(|rest| rest.split_once('\n')) {
            Some((boot, lines)) => (Some(boot.to_owned()), lines),
            None => (None, text.as_str()),
        };
        let (seats, torn) = parse(lines);
        let wrong = torn
            .into_iter()
            .map(|number| number + usize::from(boot.is_some()))
            .map(|number| format!("{}: line {number} names no seat and is left out", path.display()));
        let wrong = wrong.collect();
        Ok((Self { path, seats, boot }, wrong))
    }

    /// The seats.
    #[must_use]
    pub const fn seats(&self) -> &Seats {
        &self.seats
    }

    /// Adds a seat, or changes its record. It is in the file when this returns.
    ///
    /// # Errors
    /// The file cannot be written; then nothing has changed.
    pub fn add(&mut self, record: Record) -> Result<(), String> {
        self.set(record.seat.name(), Some(record))
    }

    /// Removes a seat, if it is there. It is not in the file when this returns.
    ///
    /// # Errors
    /// As for [`Records::add`].
    pub fn remove(&mut self, name: SeatName) -> Result<(), String> {
        self.set(name, None)
    }

    /// Whether the folders of all seats are there in this boot of the machine.
    #[must_use]
    pub fn are_there(&self, boot: &str) -> bool {
        !boot.is_empty() && self.boot.as_deref() == Some(boot)
    }

    /// Notes that the folders of all seats are there in this boot of the machine. Seats that are added later have theirs.
    ///
    /// # Errors
    /// As for [`Records::add`].
    pub fn note_there(&mut self, boot: String) -> Result<(), String> {
        if boot.is_empty() || self.are_there(&boot) {
            return Ok(());
        }
        let old = self.boot.replace(boot);
        self.write().inspect_err(|_| self.boot = old)
    }

    fn set(&mut self, name: SeatName, record: Option<Record>) -> Result<(), String> {
        if self.seats.get(&name) == record.as_ref() {
            return Ok(());
        }
        let old = put(&mut self.seats, name, record);
        self.write().inspect_err(|_| drop(put(&mut self.seats, name, old)))
    }

    fn write(&self) -> Result<(), String> {
        let boot = self.boot.iter().map(|boot| format!("{BOOT}{boot}\n"));
        let text: String = boot.chain([format(&self.seats)]).collect();
        files::replace(&self.path, text.as_bytes()).map(drop)
    }
}

fn put(seats: &mut Seats, name: SeatName, record: Option<Record>) -> Option<Record> {
    match record {
        Some(record) => seats.insert(name, record),
        None => seats.remove(&name),
    }
}

fn format(seats: &Seats) -> String {
    let line = |(name, record): (&SeatName, &Record)| {
        let Record { seat, claim } = record;
        let TenantSettings { weight, priority, compute, enforcement, memory, paused: _ } = seat.given;
        let words = [
            memory.map(|bytes| format!("memory={bytes}")),
            compute.map(|percent| format!("compute={percent}")),
            weight.map(|weight| format!("weight={weight}")),
            priority.map(|priority| format!("priority={}", priority.name())),
            enforcement.map(|how| format!("policy={}", how.name())),
            claim.as_ref().map(|claim| format!("claim={}/{}/{}", claim.namespace, claim.name, claim.uid)),
            claim.as_ref().and_then(|claim| claim.gang.then(|| "gang=true".to_owned())),
        ];
        let requests = claim.iter().flat_map(|claim| &claim.requests).map(|request| format!("{request}@"));
        let slots = seat.slots.iter().zip(requests.chain(std::iter::repeat(String::new())));
        let slots = slots.map(|(slot, request)| format!("{request}{slot}"));
        let words: Vec<String> = words.into_iter().flatten().chain(slots).collect();
        format!("{name} {}\n", words.join(" "))
    };
    seats.iter().map(line).collect()
}

/// The seats of the lines, and the numbers of the lines that cannot be read.
fn parse(text: &str) -> (Seats, Vec<usize>) {
    let (mut seats, mut torn) = (Seats::new(), Vec::new());
    for (number, line) in (1..).zip(text.lines()) {
        match record(line) {
            Some(record) => drop(seats.insert(record.seat.name(), record)),
            None => torn.push(number),
        }
    }
    (seats, torn)
}

fn record(line: &str) -> Option<Record> {
    let mut words = line.split(' ');
    let name = words.next()?;
    let mut seat = Seat { slots: Vec::new(), given: TenantSettings::default() };
    let (mut claim, mut gang, mut requests) = (None, false, Vec::new());
    for word in words {
        match word.split_once('=') {
            Some(("memory", bytes)) => seat.given.memory = Some(bytes.parse().ok()?),
            Some(("compute", percent)) => seat.given.compute = Some(percent.parse().ok()?),
            Some(("weight", weight)) => seat.given.weight = Some(weight.parse().ok()?),
            Some(("priority", name)) => seat.given.priority = Some(parse_priority(name).ok()?),
            Some(("policy", name)) => seat.given.enforcement = Some(parse_enforcement(name).ok()?),
            Some(("claim", text)) => claim = Some(text),
            Some(("gang", text)) => gang = text.parse().ok()?,
            Some(_) => return None,
            None => {
                let (request, slot) = word.split_once('@').unzip();
                requests.extend(request.map(str::to_owned));
                seat.slots.push(slot.unwrap_or(word).parse().ok()?);
            }
        }
    }
    let claim = match claim.map(|text| text.split('/').map(str::to_owned).collect::<Vec<_>>()) {
        None if requests.is_empty() => None,
        Some(parts) if requests.len() == seat.slots.len() => {
            let [namespace, name, uid] = parts.try_into().ok()?;
            Some(Claim { namespace, name, uid, requests, gang })
        }
        _ => return None,
    };
    (!seat.slots.is_empty() && seat.name().to_string() == name).then_some(Record { seat, claim })
}

#[cfg(test)]
mod tests {
    use nvshare_proto::{Enforcement, GpuUuid, Priority, Slot};

    use super::*;

    #[test]
    fn a_torn_line_is_left_out_and_the_rest_is_used() {
        let slot = |gpu, number| Slot { gpu: GpuUuid([gpu; 16]), number };
        let given = TenantSettings { memory: Some(2 << 30), compute: Some(30), ..TenantSettings::default() };
        let all = TenantSettings {
            weight: Some(50),
            priority: Some(Priority::Low),
            enforcement: Some(Enforcement::Force),
            ..given
        };
        let claim = Claim {
            namespace: "n".to_owned(),
            name: "c".to_owned(),
            uid: "u-1".to_owned(),
            requests: ["a", "b/sub"].map(str::to_owned).to_vec(),
            gang: true,
        };
        let sets = [
            Record { seat: Seat { slots: vec![slot(1, 0)], given }, claim: None },
            Record {
                seat: Seat { slots: vec![slot(1, 3), slot(2, 10)], given: TenantSettings::default() },
                claim: None,
            },
            Record {
                seat: Seat { slots: vec![slot(3, 7), slot(4, 3_000_000_000)], given: all },
                claim: Some(claim),
            },
        ];
        let seats: Seats = sets.into_iter().map(|record| (record.seat.name(), record)).collect();
        let text = format(&seats);
        assert_eq!(parse(&text), (seats.clone(), vec![]));
        // Each beginning of the text that ends within a line.
        for end in
            (1..text.len()).filter(|&end| !matches!(text.as_bytes()[end - 1..=end], [b'\n', _] | [_, b'\n']))
        {
            let (read, torn) = parse(&text[..end]);
            let whole = text[..end].matches('\n').count();
            assert_eq!((read.len(), torn), (whole, vec![whole + 1]), "{:?}", &text[..end]);
        }
        let (read, torn) = parse(&format!("\u{fffd}\n\n{text}"));
        assert_eq!((read, torn), (seats, vec![1, 2]));
    }
}
