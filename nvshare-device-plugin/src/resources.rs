//! The resources that are offered: a table, whose first row is the main one.
//!
//! Each row has slots of its own on each GPU, and a seat takes its limits from the row that its slots are of. The kubelet counts `GPU-…::N` of each
//! resource from 0. A seat is known by its slots alone, so there the slots of a further row have other numbers. These follow from the row's name:
//! they stay when rows come, go, or change places.

use std::str::FromStr;

use nvshare_proto::{GpuUuid, Seat, Slot, TenantSettings, stable_hash, units};

use crate::options::{Api, Options};
use crate::records::Record;

/// Most slots of a resource on a GPU.
pub const MAX_SLOTS: u32 = 1000;
/// Longest name of a further row, in bytes. The path of its socket, and Kubernetes' name of the resource, are longer.
const MAX_NAME: usize = 30;
/// The keys of a further row.
const KEYS: &str = "slots, memory, compute, weight, priority";

/// A further row, as the command line has it: `NAME=KEY=VALUE,…`. It has the main one's value of what it does not say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Also {
    name: String,
    slots: Option<u32>,
    given: TenantSettings,
}

impl FromStr for Also {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, values) = text.split_once('=').ok_or("it says nothing; accepted: NAME=KEY=VALUE,…")?;
        if !is_name(name) {
            return Err(format!(
                "{name:?} is no name of a resource; accepted: 1 to {MAX_NAME} small letters, digits and hyphens, \
                 with a letter or digit at both ends"
            ));
        }
        let mut also = Self { name: name.to_owned(), slots: None, given: TenantSettings::default() };
        let mut said: Vec<&str> = Vec::new();
        for word in values.split(',') {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            if said.contains(&key) {
                return Err(format!("{key} is said twice"));
            }
            said.push(key);
            also.set(key, value)?;
        }
        Ok(also)
    }
}

impl Also {
    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let given = &mut self.given;
        match key {
            "slots" => self.slots = Some(slots(value)?),
            "memory" => given.memory = Some(units::parse_limit(value)?),
            "compute" => {
                given.compute = Some(units::parse_percent(value).map_err(|error| error.to_string())?)
            }
            "weight" => given.weight = Some(units::parse_weight(value).map_err(|error| error.to_string())?),
            "priority" => {
                given.priority = Some(units::parse_priority(value).map_err(|error| error.to_string())?);
            }
            _ => return Err(format!("{key:?} is no key; accepted: {KEYS}")),
        }
        Ok(())
    }
}

/// Reads a number of slots.
///
/// # Errors
/// It is none from 1 to [`MAX_SLOTS`].
pub fn slots(text: &str) -> Result<u32, String> {
    let slots = text.parse().ok().filter(|slots| (1..=MAX_SLOTS).contains(slots));
    slots.ok_or_else(|| format!("{text:?} is no number of slots; accepted: 1 to {MAX_SLOTS}"))
}

fn is_name(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    (1..=MAX_NAME).contains(&text.len())
        && text.bytes().all(|byte| is_inner(byte) || byte == b'-')
        && [text.bytes().next(), text.bytes().last()].into_iter().flatten().all(is_inner)
}

/// A resource that is offered: a row of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resource {
    /// Its name, as pods have it.
    pub name: String,
    /// The name of its row. None: it is the main one.
    pub also: Option<String>,
    /// How many slots each GPU has.
    pub slots: u32,
    given: TenantSettings,
    numbers: Numbers,
}

impl Resource {
    /// All resources of a command line.
    ///
    /// # Errors
    /// Rows that cannot stand beside each other, or rows where claims are served.
    pub fn all(options: &Options) -> Result<Vec<Self>, String> {
        if options.api == Api::Dra && !options.also.is_empty() {
            return Err(
                "--also: with --api dra there are no slots; a DeviceClass says sizes and priority".to_owned()
            );
        }
        if options.api == Api::DevicePlugin && !options.priority_of_class.is_empty() {
            return Err(
                "--priority-of-class: a device plugin sees no pods; --also offers resources with a priority"
                    .to_owned(),
            );
        }
        let usual = options.given();
        let mut table = vec![Self {
            name: options.resource.clone(),
            also: None,
            slots: options.slots,
            given: usual,
            numbers: Numbers::MAIN,
        }];
        for Also { name, slots, given } in &options.also {
            let numbers = Numbers::of(name);
            if let Some(other) = table.iter().find(|row| row.numbers == numbers) {
                let other = other.also.as_deref().unwrap_or_default();
                return Err(if other == name {
                    format!("--also {name}: there are two rows of this name")
                } else {
                    format!(
                        "--also {name}: its seats would have the names of those of {other}; choose another name"
                    )
                });
            }
            table.push(Self {
                name: format!("{}.{name}", options.resource),
                also: Some(name.clone()),
                slots: slots.unwrap_or(options.slots),
                given: TenantSettings {
                    memory: given.memory.or(usual.memory),
                    compute: given.compute.or(usual.compute),
                    ..*given
                },
                numbers,
            });
        }
        Ok(table)
    }

    /// The memory limit of a slot, in bytes.
    #[must_use]
    pub const fn memory(&self) -> Option<u64> {
        self.given.memory
    }

    /// The options that say the limits of its slots.
    #[must_use]
    pub fn option(&self) -> String {
        self.also.as_ref().map_or_else(|| "--slot-memory".to_owned(), |name| format!("--also {name}"))
    }

    /// The kubelet's names of its slots on a GPU.
    pub fn ids(&self, gpu: GpuUuid) -> impl Iterator<Item = String> {
        (0..self.slots).map(move |number| Slot { gpu, number }.to_string())
    }

    /// The slots that seats have of a GPU.
    pub fn slots_of(&self, gpu: GpuUuid) -> impl Iterator<Item = Slot> {
        let numbers = self.numbers;
        (0..self.slots).map(move |number| Slot { gpu, number: numbers.0 + number })
    }

    /// The slot that the kubelet calls so, if it is offered.
    #[must_use]
    pub fn slot(&self, id: &str) -> Option<Slot> {
        let slot = self.numbers.slot(id).ok()?;
        (slot.number - self.numbers.0 < self.slots).then_some(slot)
    }

    /// Whether these are slots of this row, offered or not.
    #[must_use]
    pub fn has(&self, slots: &[Slot]) -> bool {
        slots.iter().all(|slot| slot.number / MAX_SLOTS * MAX_SLOTS == self.numbers.0)
    }

    /// The record of a seat that has slots of this row.
    #[must_use]
    pub const fn record(&self, slots: Vec<Slot>) -> Record {
        Record { seat: Seat { slots, given: self.given }, claim: None }
    }
}

/// The first of the numbers that the slots of a resource have in seats. It is a multiple of [`MAX_SLOTS`], so the kubelet's number stands in
/// the last three digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Numbers(u32);

impl Numbers {
    /// Of the main resource: they are the kubelet's.
    const MAIN: Self = Self(0);

    /// Of a further row.
    fn of(name: &str) -> Self {
        let others = u64::from(u32::MAX / MAX_SLOTS - 1);
        let place = u32::try_from(stable_hash(name) % others).unwrap_or_default();
        Self((1 + place) * MAX_SLOTS)
    }

    /// Of a resource that is called so. None: it is not ours. A row that is offered no more is: pods may have slots of it still.
    #[must_use]
    pub fn of_resource(resource: &str, main: &str) -> Option<Self> {
        match resource.strip_prefix(main)? {
            "" => Some(Self::MAIN),
            further => further.strip_prefix('.').map(Self::of),
        }
    }

    /// The slot of a seat that the kubelet calls so.
    ///
    /// # Errors
    /// It is no name of a slot.
    pub fn slot(self, id: &str) -> Result<Slot, String> {
        let Slot { gpu, number } =
            id.parse().map_err(|error: nvshare_proto::ParseSlotError| error.to_string())?;
        let number = self.0.checked_add(number).ok_or_else(|| format!("{id}: there is no such slot"))?;
        Ok(Slot { gpu, number })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use clap::Parser;
    use nvshare_proto::{Priority, SeatName};

    use super::*;

    fn resources(options: &str) -> Result<Vec<Resource>, String> {
        let words = std::iter::once("plugin").chain(options.split_whitespace());
        Resource::all(&Options::parse_from(words))
    }

    #[test]
    fn a_row_has_its_own_limits_and_else_the_usual_ones() {
        let usual = "--slot-memory 4g --slot-compute 30 --slots 5";
        let rows =
            "--also high=memory=24g,compute=50,priority=high,weight=200,slots=2 --also low=priority=low";
        let table = resources(&format!("{usual} {rows}")).unwrap();
        let short: Vec<_> = table.iter().map(|row| (row.name.as_str(), row.slots, row.given)).collect();
        let given = TenantSettings { memory: Some(4 << 30), compute: Some(30), ..TenantSettings::default() };
        let low = TenantSettings { priority: Some(Priority::Low), ..given };
        let high = TenantSettings {
            memory: Some(24 << 30),
            compute: Some(50),
            weight: Some(200),
            priority: Some(Priority::High),
            ..TenantSettings::default()
        };
        let expected = [
            ("nvshare.com/gpu", 5, given),
            ("nvshare.com/gpu.high", 2, high),
            ("nvshare.com/gpu.low", 5, low),
        ];
        assert_eq!(short, expected);
        for row in &table {
            let slots: Vec<Slot> = row.slots_of(GpuUuid([1; 16])).collect();
            assert_eq!(slots.len(), row.slots as usize);
            assert_eq!(row.record(slots).seat.given, row.given);
        }
    }

    #[test]
    fn the_kubelets_names_are_slots_that_no_other_row_has() {
        let gpu = GpuUuid([1; 16]);
        let all = resources("--slots 1000 --also small=memory=8g --also low=priority=low,slots=3").unwrap();
        // With any words beside it.
        let alone = resources("--also low=priority=low,slots=3").unwrap();
        assert_eq!(alone[1], all[2]);
        let mut seats = BTreeSet::new();
        for row in &all {
            let slots: Vec<Slot> = row.slots_of(gpu).collect();
            let by_id: Vec<Slot> = row.ids(gpu).map(|id| row.slot(&id).unwrap()).collect();
            assert_eq!(by_id, slots);
            assert_eq!(row.slot(&format!("{gpu}::{}", row.slots)), None);
            let owners: Vec<&Resource> = all.iter().filter(|other| other.has(&slots)).collect();
            assert_eq!(owners, [row]);
            seats.extend(slots.iter().map(|&slot| SeatName::of(&[slot])));
        }
        assert_eq!(seats.len(), 2003);
        // Seats keep their names: those of the main resource those that they had without rows.
        let first = |row: &Resource| row.slots_of(gpu).next().unwrap().to_string();
        let expected = ["0", "763019000", "620284000"].map(|number| format!("{gpu}::{number}"));
        assert_eq!(all.iter().map(first).collect::<Vec<_>>(), expected);
        assert!(all[1].slot(&format!("{gpu}::4294967295")).is_none() && all[1].slot("GPU-1::0").is_none());
    }

    #[test]
    fn rows_that_cannot_stand_beside_each_other_are_refused() {
        assert_eq!(
            resources("--also a=slots=1 --also a=slots=2").unwrap_err(),
            "--also a: there are two rows of this name"
        );
        let claims = resources("--api dra --also a=slots=1").unwrap_err();
        assert_eq!(
            claims,
            "--also: with --api dra there are no slots; a DeviceClass says sizes and priority"
        );
        let mut known = BTreeMap::new();
        let clash = (0..).find_map(|number: u32| {
            let name = format!("r{number}");
            known.insert(Numbers::of(&name), name.clone()).map(|other| (other, name))
        });
        let (one, other) = clash.unwrap();
        let refused = resources(&format!("--also {one}=slots=1 --also {other}=slots=1")).unwrap_err();
        let why =
            format!("--also {other}: its seats would have the names of those of {one}; choose another name");
        assert_eq!(refused, why);
    }
}
