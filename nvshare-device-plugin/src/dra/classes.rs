//! Which priority the pods of a claim bring: that of their PriorityClass, where the administrator maps it.

use std::str::FromStr;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use nvshare_proto::{Priority, units};

/// A PriorityClass of Kubernetes and the priority that its pods have on a GPU: `NAME=PRIORITY`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapped {
    /// The name of the PriorityClass.
    pub class: String,
    /// The priority.
    pub priority: Priority,
}

impl FromStr for Mapped {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (class, priority) = text
            .split_once('=')
            .filter(|(class, _)| !class.is_empty())
            .ok_or("it names no PriorityClass or no priority; accepted: NAME=low, NAME=normal, NAME=high")?;
        let priority = units::parse_priority(priority).map_err(|error| error.to_string())?;
        Ok(Self { class: class.to_owned(), priority })
    }
}

/// Refuses a PriorityClass with two priorities.
///
/// # Errors
/// There is one.
pub fn check(table: &[Mapped]) -> Result<(), String> {
    let is_again =
        |(at, mapped): &(usize, &Mapped)| table.iter().take(*at).any(|one| one.class == mapped.class);
    match table.iter().enumerate().find(is_again) {
        Some((_, Mapped { class, .. })) => Err(format!("--priority-of-class: {class} is said twice")),
        None => Ok(()),
    }
}

/// Somebody that a claim is reserved for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Consumer {
    /// A pod of the claim's namespace.
    Pod {
        /// Its name.
        name: String,
        /// The number that tells it from a later pod of this name.
        uid: String,
    },
    /// Something else, of which no PriorityClass is known.
    Other,
}

/// Whom a claim is reserved for: those that may use it now.
#[must_use]
pub fn consumers(claim: &ResourceClaim) -> Vec<Consumer> {
    let reserved =
        claim.status.as_ref().and_then(|status| status.reserved_for.as_deref()).unwrap_or_default();
    let consumer = |one: &k8s_openapi::api::resource::v1::ResourceClaimConsumerReference| {
        let is_pod = one.resource == "pods" && one.api_group.as_deref().unwrap_or_default().is_empty();
        if is_pod { Consumer::Pod { name: one.name.clone(), uid: one.uid.clone() } } else { Consumer::Other }
    };
    reserved.iter().map(consumer).collect()
}

/// The priority of a pod's class. None: the class is not mapped, or the pod has none.
#[must_use]
pub fn priority(pod: &Pod, table: &[Mapped]) -> Option<Priority> {
    let class = pod.spec.as_ref()?.priority_class_name.as_ref()?;
    table.iter().find(|mapped| mapped.class == *class).map(|mapped| mapped.priority)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_class_has_the_priority_that_the_table_says() {
        let table: Vec<Mapped> = ["batch=low", "urgent=high"].map(|text| text.parse().unwrap()).to_vec();
        for (spec, expected) in [
            (json!({"priorityClassName": "batch"}), Some(Priority::Low)),
            (json!({"priorityClassName": "urgent"}), Some(Priority::High)),
            (json!({"priorityClassName": "system-node-critical"}), None),
            (json!({}), None),
        ] {
            let mut pod = json!({"metadata": {"name": "p"}, "spec": spec});
            pod["spec"]["containers"] = json!([]);
            assert_eq!(priority(&serde_json::from_value(pod).unwrap(), &table), expected);
        }
        assert_eq!(check(&table), Ok(()));
        let twice = [&table[..], &table[..1]].concat();
        assert_eq!(check(&twice), Err("--priority-of-class: batch is said twice".to_owned()));
    }

    #[test]
    fn a_claim_is_reserved_for_pods_and_for_others() {
        let claim: ResourceClaim = serde_json::from_value(json!({
            "metadata": {"name": "c"},
            "spec": {},
            "status": {"reservedFor": [
                {"resource": "pods", "name": "p", "uid": "1"},
                {"resource": "podgroups", "apiGroup": "scheduling.k8s.io", "name": "g", "uid": "2"},
                {"resource": "pods", "apiGroup": "example.com", "name": "q", "uid": "3"},
            ]},
        }))
        .unwrap();
        let pod = Consumer::Pod { name: "p".to_owned(), uid: "1".to_owned() };
        assert_eq!(consumers(&claim), [pod, Consumer::Other, Consumer::Other]);
        assert_eq!(consumers(&ResourceClaim::default()), []);
    }
}
