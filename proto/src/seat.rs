//! Seats: what one container got. A seat has slots, which are places on GPUs, a folder of its own with a socket, and limits.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::{GpuUuid, TenantSettings};

/// The largest number of seats of a scheduler.
pub const MAX_SEATS: usize = 4096;

/// A place on a GPU that one seat has: `GPU-…::N`, the form that NVIDIA's device plugin gives to the devices of a shared GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Slot {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The slot's number among those of the GPU, from 0.
    pub number: u32,
}

/// The text names no slot.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no slot; expected GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx::N")]
pub struct ParseSlotError {
    text: String,
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}::{}", self.gpu, self.number)
    }
}

impl FromStr for Slot {
    type Err = ParseSlotError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let slot = text.split_once("::").and_then(|(gpu, number)| {
            let slot = Self { gpu: gpu.parse().ok()?, number: number.parse().ok()? };
            // One slot has one name.
            (slot.to_string() == text).then_some(slot)
        });
        slot.ok_or_else(|| ParseSlotError { text: text.to_owned() })
    }
}

/// A seat's name: 16 hexadecimal digits that follow from its slots. So a container that is started again finds the folder that it had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeatName(u64);

/// The text names no seat.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no seat's name; expected 16 hexadecimal digits")]
pub struct ParseSeatNameError {
    text: String,
}

impl SeatName {
    /// The name of the seat that has these slots, in whatever order they stand.
    #[must_use]
    pub fn of(slots: &[Slot]) -> Self {
        let mut sorted: Vec<String> = slots.iter().map(Slot::to_string).collect();
        sorted.sort();
        sorted.dedup();
        // The name must stay the same in every version, and no client chooses slots.
        Self(stable_hash(&sorted.join(",")))
    }
}

/// FNV-1a of 64 bits (<http://www.isthe.com/chongo/tech/comp/fnv/>): the same in every version, and easy to collide on purpose.
#[must_use]
pub fn stable_hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

impl fmt::Display for SeatName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl FromStr for SeatName {
    type Err = ParseSeatNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let name = u64::from_str_radix(text, 16).ok().map(Self);
        // One seat has one name.
        name.filter(|name| name.to_string() == text)
            .ok_or_else(|| ParseSeatNameError { text: text.to_owned() })
    }
}

/// A number on the wire, text for people.
impl Serialize for SeatName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(self)
        } else {
            self.0.serialize(serializer)
        }
    }
}

impl<'de> Deserialize<'de> for SeatName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
        } else {
            u64::deserialize(deserializer).map(Self)
        }
    }
}

/// A seat, as the device plugin asks for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seat {
    /// Its slots, each on another GPU.
    pub slots: Vec<Slot>,
    /// The limits of all its processes together, on each of its GPUs, and their share. A program can lower them for itself.
    pub given: TenantSettings,
}

impl Seat {
    /// The seat's name.
    #[must_use]
    pub fn name(&self) -> SeatName {
        SeatName::of(&self.slots)
    }
}

/// A seat, as `status` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeatStatus {
    /// Its name.
    pub name: SeatName,
    /// The seat.
    pub seat: Seat,
    /// The container that has it, if one does.
    #[serde(rename = "holder")]
    pub occupant: Option<Occupant>,
    /// The clients that came to its socket, by their numbers; of those that are gone, the last few of this container.
    pub clients: Vec<u64>,
}

/// The container that has a seat, as the kubelet says.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Occupant {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name within the pod.
    pub container: String,
}

impl fmt::Display for Occupant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.namespace, self.pod, self.container)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0::7";

    #[test]
    fn a_slot_has_one_name() {
        let slot: Slot = TEXT.parse().unwrap();
        assert_eq!((slot.number, slot.to_string().as_str()), (7, TEXT));
        let gpu = "GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0";
        let upper = TEXT.replace("f1", "F1");
        for text in [
            "",
            gpu,
            &upper,
            &format!("{gpu}::"),
            &format!("{gpu}::07"),
            &format!("{gpu}::-1"),
            &format!("{gpu}:7"),
        ] {
            assert!(text.parse::<Slot>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_seat_keeps_its_name_for_ever() {
        let slot = |number| Slot { gpu: GpuUuid([1; 16]), number };
        let name = SeatName::of(&[slot(0)]);
        assert_eq!(name.to_string(), "dabc7573cefc8f50");
        assert_eq!(SeatName::of(&[slot(2), slot(10)]), SeatName::of(&[slot(10), slot(2)]));
        assert_ne!(SeatName::of(&[slot(2), slot(1)]), SeatName::of(&[slot(2)]));
        let name = SeatName(0xf00);
        assert_eq!(name.to_string().parse(), Ok(name));
        for text in ["", "f00", "0000000000000F00", "+000000000000f00", "00000000000000f00"] {
            assert!(text.parse::<SeatName>().is_err(), "{text}");
        }
    }
}
