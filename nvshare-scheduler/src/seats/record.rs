//! The records of seats: a file for each, so that all are there again after a restart. A record that cannot be read takes no
//! other with it.

use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use nvshare_proto::{Occupant, Seat, SeatName, Slot, TenantSettings};

use crate::settings::{limits, parse, replace};

/// A seat, and who has it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Record {
    pub(super) seat: Seat,
    pub(super) occupant: Option<Occupant>,
    /// Whether a client came since the occupant has it.
    pub(super) came: bool,
}

/// The contents of a record. Words that a newer version wrote beside this are left out.
#[derive(serde::Deserialize)]
struct Written {
    slots: Vec<String>,
    #[serde(default)]
    given: TenantSettings,
    #[serde(rename = "holder")]
    occupant: Option<Occupant>,
    #[serde(default)]
    came: bool,
}

impl Record {
    fn text(&self) -> String {
        let mut text = "# Written by nvshare-scheduler: a seat that a container got.\nslots = [".to_owned();
        let slots: Vec<String> = self.seat.slots.iter().map(|slot| format!("\"{slot}\"")).collect();
        text += &slots.join(", ");
        text += "]\n";
        text += if self.came { "came = true\n" } else { "" };
        text += "[given]\n";
        text += &limits::lines(self.seat.given);
        // Writing to a text cannot fail.
        if let Some(Occupant { namespace, pod, container }) = &self.occupant {
            let _ = write!(
                text,
                "[holder]\nnamespace = \"{namespace}\"\npod = \"{pod}\"\ncontainer = \"{container}\"\n"
            );
        }
        text
    }

    fn read(text: &str) -> Result<Self, String> {
        let written: Written = parse(text)?;
        let slots = written.slots.iter().map(|slot| slot.parse::<Slot>().map_err(|error| error.to_string()));
        let seat = Seat { slots: slots.collect::<Result<_, _>>()?, given: written.given };
        super::check(&seat)?;
        Ok(Self { seat, occupant: written.occupant, came: written.came })
    }
}

/// The folder of the records; none: there is no place for them.
#[derive(Debug)]
pub(super) struct Records(pub(super) Option<PathBuf>);

impl Records {
    /// Beside the file for settings made at run time.
    pub(super) fn beside(state: Option<&Path>) -> Self {
        Self(state.map(|state| state.with_extension("seats")))
    }

    fn at(&self, name: SeatName) -> Result<PathBuf, String> {
        let folder = self.0.as_ref().ok_or("there is no place for a record of it; name one by --state")?;
        Ok(folder.join(name.to_string()))
    }

    /// Writes a record whole or not at all.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn keep(&self, record: &Record) -> Result<(), String> {
        let path = self.at(record.seat.name())?;
        replace(&path, &record.text()).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Removes a record, if there is one.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub(super) fn forget(&self, name: SeatName) -> Result<(), String> {
        // Nothing is recorded where there is no place for it.
        let Ok(path) = self.at(name) else { return Ok(()) };
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(format!("{}: {error}", path.display())),
            _ => Ok(()),
        }
    }

    /// All records, and a line about each that does not count. Files stay as they are.
    pub(super) fn read(&self) -> (Vec<Record>, Vec<String>) {
        let Some(folder) = &self.0 else { return Default::default() };
        let found = match fs::read_dir(folder) {
            Ok(found) => found,
            Err(error) if error.kind() == ErrorKind::NotFound => return Default::default(),
            Err(error) => return (Vec::new(), vec![format!("{}: {error}; {NO_SEATS}", folder.display())]),
        };
        let (mut records, mut warnings) = (Vec::new(), Vec::new());
        for path in found.flatten().map(|entry| entry.path()) {
            // A file that `replace` had begun when the process ended is no record.
            let name = path.file_name().and_then(|name| name.to_str()?.parse::<SeatName>().ok());
            let Some(name) = name else { continue };
            let record = fs::read_to_string(&path).map_err(|error| error.to_string());
            let record = record.and_then(|text| Record::read(&text)).and_then(|record| {
                let own = record.seat.name();
                if own == name { Ok(record) } else { Err(format!("its slots are those of seat {own}")) }
            });
            match record {
                Ok(record) => records.push(record),
                Err(why) => warnings.push(format!("{}: {why}; {NO_SEAT}", path.display())),
            }
        }
        (records, warnings)
    }
}

/// Said of a folder of which nothing can be read, and of a file.
const NO_SEATS: &str = "seats are not there until they are asked for again";
const NO_SEAT: &str = "this seat is not there until it is asked for again";

#[cfg(test)]
mod tests {
    use super::*;
    use nvshare_proto::{Enforcement, GpuUuid, Priority};

    fn record(number: u32) -> Record {
        let given = TenantSettings {
            weight: Some(50),
            priority: Some(Priority::Low),
            compute: Some(25),
            enforcement: Some(Enforcement::Force),
            memory: Some(8 << 30),
            paused: None,
        };
        let occupant = Occupant { namespace: "a".into(), pod: "b-0".into(), container: "c".into() };
        let slots = [1, 2].map(|gpu| Slot { gpu: GpuUuid([gpu; 16]), number });
        Record { seat: Seat { slots: slots.into(), given }, occupant: Some(occupant), came: number == 0 }
    }

    #[test]
    fn a_record_is_read_as_it_was_written_and_a_torn_one_takes_no_other_with_it() {
        let folder = std::env::temp_dir().join(format!("nvshare-records-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        let records = Records::beside(Some(&folder.join("state.toml")));
        assert_eq!(records.read(), (vec![], vec![]));
        let [one, two, torn, moved] = [0, 1, 2, 3].map(record);
        let bare = Record {
            seat: Seat { given: TenantSettings::default(), ..two.seat },
            occupant: None,
            came: false,
        };
        for record in [&one, &bare, &torn, &moved] {
            records.keep(record).unwrap();
        }
        let at = |record: &Record| records.at(record.seat.name()).unwrap();
        let text = fs::read_to_string(at(&torn)).unwrap();
        fs::write(at(&torn), &text[..text.len() / 2]).unwrap();
        fs::write(at(&moved), one.text()).unwrap();
        // A newer version wrote it.
        fs::write(at(&one), one.text().replace("[given]", "[more]\na = 1\n[given]\nb = 2")).unwrap();
        fs::write(at(&one).with_extension("new"), "slots").unwrap();
        let (mut read, mut warnings) = records.read();
        let mut expected = vec![one.clone(), bare];
        read.sort_by_key(|record| record.seat.name());
        expected.sort_by_key(|record| record.seat.name());
        assert_eq!(read, expected);
        warnings.sort_by_key(|line| !line.contains("its slots"));
        let [moved_line, torn_line] = &warnings[..] else { panic!("{warnings:?}") };
        assert!(moved_line.contains(&format!("those of seat {}", one.seat.name())), "{moved_line}");
        let begins = format!("{}: line ", at(&torn).display());
        assert!(torn_line.starts_with(&begins) && torn_line.ends_with(NO_SEAT), "{torn_line}");
        records.forget(one.seat.name()).unwrap();
        records.forget(one.seat.name()).unwrap();
        assert_eq!(records.read().0.len(), 1);
        assert!(Records(None).keep(&one).unwrap_err().contains("--state"));
        fs::remove_dir_all(&folder).unwrap();
    }
}
