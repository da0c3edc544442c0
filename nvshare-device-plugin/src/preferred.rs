//! Which slots a container had best get: slots of the GPUs that have the most free ones, each of another GPU.

use std::collections::BTreeMap;

use nvshare_proto::{GpuUuid, Slot};

/// Names of `size` of the devices that are available, those that must be among them first. Names of other devices come last.
#[must_use]
pub fn choose(available: &[String], must: &[String], size: usize) -> Vec<String> {
    let mut chosen: Vec<String> = must.to_vec();
    let parse = |id: &String| id.parse::<Slot>().ok();
    let mut taken: BTreeMap<GpuUuid, usize> = BTreeMap::new();
    let mut free: BTreeMap<GpuUuid, Vec<Slot>> = BTreeMap::new();
    for slot in must.iter().filter_map(parse) {
        *taken.entry(slot.gpu).or_default() += 1;
    }
    for slot in available.iter().filter(|id| !must.contains(id)).filter_map(parse) {
        free.entry(slot.gpu).or_default().push(slot);
    }
    // The lowest number is given out first.
    for slots in free.values_mut() {
        slots.sort_unstable_by(|one, other| other.cmp(one));
    }
    while chosen.len() < size {
        let taken_of = |gpu| taken.get(gpu).copied().unwrap_or_default();
        let best = free
            .iter_mut()
            .filter(|(_, slots)| !slots.is_empty())
            .min_by_key(|(gpu, slots)| (taken_of(gpu), std::cmp::Reverse(slots.len())));
        let Some((gpu, slot)) = best.and_then(|(gpu, slots)| Some((*gpu, slots.pop()?))) else { break };
        *taken.entry(gpu).or_default() += 1;
        chosen.push(slot.to_string());
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gpu_with_the_most_free_slots_and_each_slot_on_another() {
        let name = |short: &str| {
            let (gpu, number) = short.split_at(1);
            let gpu = GpuUuid([gpu.as_bytes()[0] - b'a'; 16]);
            Slot { gpu, number: number.parse().unwrap() }.to_string()
        };
        let names = |text: &str| text.split_whitespace().map(name).collect::<Vec<_>>();
        for (available, must, size, expected) in [
            ("a0 a1 b0 b1 b2", "", 1, "b0"),
            ("b2 b10 b1", "", 1, "b1"),
            ("a0 a1 b0 b1", "", 1, "a0"),
            ("a0 a1 b0 b1 b2 c5", "", 2, "b0 a0"),
            ("a0 a1 b0 b1 b2 c5", "", 3, "b0 a0 c5"),
            ("a0 a1 b0 b1 b2 c5", "b2", 2, "b2 a0"),
            ("a0 a1 b0", "", 3, "a0 b0 a1"),
            ("a0", "", 2, "a0"),
            ("", "", 1, ""),
            ("a0 a1", "a0 a1", 1, "a0 a1"),
        ] {
            let got = choose(&names(available), &names(must), size);
            assert_eq!(got, names(expected), "{available}: {must} and more, {size} in all");
        }
    }
}
