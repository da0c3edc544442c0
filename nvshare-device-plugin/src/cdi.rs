//! The specification of nvshare's own CDI devices: one for each seat.

use std::collections::BTreeMap;

use nvshare_proto::SeatName;
use nvshare_proto::cdi::{Device, Edits, KIND, Mount, Specification};
use nvshare_proto::env::GANG;

use crate::allocate::{mounts, variables};
use crate::options::Options;

/// The specification's name in its folder.
pub const FILE: &str = "nvshare.com-gpu.json";

/// The beginning of a device's name, a letter: version 0.3.0 of the interface refuses a file with any name that begins with a digit.
const PREFIX: &str = "seat-";

/// The name of a seat's device.
#[must_use]
pub fn device_name(seat: SeatName) -> String {
    format!("{PREFIX}{seat}")
}

/// The seat whose device has this name, kind and all.
#[must_use]
pub fn seat_of_qualified(name: &str) -> Option<SeatName> {
    name.strip_prefix(KIND)?.strip_prefix('=')?.strip_prefix(PREFIX)?.parse().ok()
}

/// The name of the gang that a claim's processes are. The scheduler keeps gangs of one name in different seats apart.
const OF_CLAIM: &str = "claim";

/// The specification of these seats, and whether the processes of each are a gang.
#[must_use]
pub fn specification(seats: BTreeMap<SeatName, bool>, options: &Options) -> Specification {
    let usual = variables(options);
    let device = |(seat, is_gang): (SeatName, bool)| Device {
        name: device_name(seat),
        container_edits: Edits {
            env: usual
                .iter()
                .map(|(name, value)| (*name, value.as_str()))
                .chain(is_gang.then_some((GANG, OF_CLAIM)))
                .map(|(name, value)| format!("{name}={value}"))
                .collect(),
            mounts: mounts(seat, options)
                .iter()
                .map(|(host, inside)| Mount::read_only(host, inside))
                .collect(),
        },
    };
    Specification::of(seats.into_iter().map(device).collect())
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use nvshare_proto::{GpuUuid, Slot};

    use super::*;

    #[test]
    fn a_seat_is_a_device_with_its_folder_and_the_library() {
        let seat = SeatName::of(&[Slot { gpu: GpuUuid([1; 16]), number: 0 }]);
        let options = Options::parse_from(["plugin", "--memory", "swap"]);
        let text = serde_json::to_string(&specification([(seat, false)].into(), &options)).unwrap();
        assert_eq!(
            text,
            concat!(
                r#"{"cdiVersion":"0.3.0","kind":"nvshare.com/gpu","devices":[{"name":"seat-dabc7573cefc8f50","containerEdits":{"#,
                r#""env":["LD_PRELOAD=/usr/lib/nvshare/libnvshare.so","NVSHARE_MEMORY=swap"],"mounts":["#,
                r#"{"hostPath":"/var/lib/nvshare/lib","containerPath":"/usr/lib/nvshare","options":["ro","nosuid","nodev","bind"]},"#,
                r#"{"hostPath":"/var/run/nvshare-seats/dabc7573cefc8f50","containerPath":"/var/run/nvshare","#,
                r#""options":["ro","nosuid","nodev","bind"]},"#,
                r#"{"hostPath":"/var/run/nvshare-seats/dabc7573cefc8f50","containerPath":"/var/run/nvshare-seats/dabc7573cefc8f50","#,
                r#""options":["ro","nosuid","nodev","bind"]}]}}]}"#
            )
        );
    }

    /// `ValidateDeviceName` of the interface's own library, as it was for version 0.3.0.
    fn is_valid(name: &str) -> bool {
        let is_inner = |letter: char| letter.is_ascii_alphanumeric() || "_-.:".contains(letter);
        name.starts_with(|letter: char| letter.is_ascii_alphabetic())
            && name.ends_with(|letter: char| letter.is_ascii_alphanumeric())
            && name.chars().all(is_inner)
    }

    #[test]
    fn engines_accept_the_name_of_each_device() {
        let seats: Vec<SeatName> =
            (0..=u8::MAX).map(|gpu| SeatName::of(&[Slot { gpu: GpuUuid([gpu; 16]), number: 0 }])).collect();
        let is_digit = |seat: &SeatName| seat.to_string().starts_with(|letter: char| letter.is_ascii_digit());
        assert!(seats.iter().any(is_digit), "the rule is tried");
        let options = Options::parse_from(["plugin"]);
        for device in specification(seats.into_iter().map(|seat| (seat, false)).collect(), &options).devices {
            assert!(is_valid(&device.name), "{}", device.name);
        }
    }

    #[test]
    fn the_processes_of_a_seat_are_a_gang_where_its_claim_says_so() {
        let [one, other] = [1, 2].map(|gpu| SeatName::of(&[Slot { gpu: GpuUuid([gpu; 16]), number: 0 }]));
        let options = Options::parse_from(["plugin", "--preload", "file"]);
        let devices = specification([(one, true), (other, false)].into(), &options).devices;
        let env = |seat| {
            let device = devices.iter().find(|device| device.name == device_name(seat)).unwrap();
            device.container_edits.env.concat()
        };
        assert_eq!([one, other].map(env), ["NVSHARE_GANG=claim", ""]);
    }
}
