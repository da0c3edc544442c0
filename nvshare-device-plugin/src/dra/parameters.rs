//! Settings of a seat in a claim or a DeviceClass beside its capacities: `SeatParameters`.

use k8s_openapi::api::resource::v1::DeviceAllocationConfiguration;
use nvshare_proto::{DEFAULT_WEIGHT, Enforcement, MAX_WEIGHT, Priority, TenantSettings};
use serde::Deserialize;
use serde_json::Value;

use super::DRIVER;

/// The version of the parameters.
const API_VERSION: &str = "nvshare.com/v1alpha1";
/// The kind of the parameters.
const KIND: &str = "SeatParameters";

/// The parameters.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct SeatParameters {
    /// Weight against others, 1 to 10000.
    weight: Option<u32>,
    /// When the compute limit holds.
    policy: Option<Enforcement>,
    /// Priority.
    priority: Option<Priority>,
    /// Whether the processes of the seat hold their GPUs together or not at all.
    gang: Option<bool>,
}

/// The settings of a seat beside its capacities.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Settings {
    /// The share of its processes. There are no limits in it.
    pub given: TenantSettings,
    /// Whether its processes are a gang.
    pub gang: bool,
}

impl SeatParameters {
    /// These, and where they say nothing, others.
    fn or(self, other: &Self) -> Self {
        Self {
            weight: self.weight.or(other.weight),
            policy: self.policy.or(other.policy),
            priority: self.priority.or(other.priority),
            gang: self.gang.or(other.gang),
        }
    }
}

/// Puts together what a class and a claim say for a request, and the priorities that pods bring. A class is written by an
/// administrator, and a claim by a user: a claim may ask for less than its class gives, and for no more. Where the class says nothing, that is what a program may ask for by itself: a gang is that, as it
/// is of one seat.
///
/// `pods`: for each pod of the claim the priority of its PriorityClass; none: it is not mapped, and the pod has what the DeviceClass gives. The
/// lowest of all that is said counts, since the claim is one seat. A user may lower a priority by a claim. Where the DeviceClass says none,
/// the PriorityClass allows more than the usual one.
///
/// # Errors
/// Something there is not known, or a claim asks for more.
pub fn for_request(
    config: &[DeviceAllocationConfiguration],
    request: &str,
    pods: &[Option<Priority>],
) -> Result<Settings, String> {
    let (mut class, mut claim) = (SeatParameters::default(), SeatParameters::default());
    for entry in config.iter().filter(|entry| is_for(entry, request)) {
        let Some(opaque) = entry.opaque.as_ref().filter(|opaque| opaque.driver == DRIVER) else { continue };
        let said = read(&opaque.parameters.0)?;
        let known = if entry.source == "FromClass" { &mut class } else { &mut claim };
        *known = said.or(known);
    }
    let of_pods = lowest(&class, pods);
    refuse_more(&class, of_pods, &claim)?;
    let priority = [class.priority, of_pods, claim.priority].into_iter().flatten().min();
    let SeatParameters { weight, policy, gang, priority: _ } = claim.or(&class);
    let given = TenantSettings { weight, enforcement: policy, priority, ..TenantSettings::default() };
    Ok(Settings { given, gang: gang.unwrap_or_default() })
}

/// Whether an entry is for this request: it may name none, the request, or the whole of which the request is one choice.
fn is_for(entry: &DeviceAllocationConfiguration, request: &str) -> bool {
    let named = entry.requests.as_deref().unwrap_or_default();
    let whole = request.split_once('/').map_or(request, |(whole, _)| whole);
    named.is_empty() || named.iter().any(|name| name == request || name == whole)
}

fn read(value: &Value) -> Result<SeatParameters, String> {
    let word = |field: &str| value.get(field).and_then(Value::as_str).unwrap_or_default();
    let (version, kind) = (word("apiVersion"), word("kind"));
    if (version, kind) != (API_VERSION, KIND) {
        return Err(format!(
            "parameters of apiVersion {version:?} and kind {kind:?} are not known; accepted: {API_VERSION}, {KIND}"
        ));
    }
    let mut fields = value.clone();
    if let Some(fields) = fields.as_object_mut() {
        fields.retain(|name, _| name != "apiVersion" && name != "kind");
    }
    if let Some(gang) = fields.get("gang").filter(|gang| !gang.is_boolean()) {
        return Err(format!(
            "{KIND}: gang: {gang}: a gang is the processes of one claim, and no other claim can join it; accepted: true, false"
        ));
    }
    let said: SeatParameters = serde_json::from_value(fields).map_err(|error| format!("{KIND}: {error}"))?;
    match said.weight {
        Some(weight) if !(1..=MAX_WEIGHT).contains(&weight) => {
            Err(format!("{KIND}: a weight of {weight} is out of range: 1 to {MAX_WEIGHT}"))
        }
        _ => Ok(said),
    }
}

/// The lowest of the priorities that pods bring, if they are asked for.
fn lowest(class: &SeatParameters, pods: &[Option<Priority>]) -> Option<Priority> {
    pods.iter().map(|mapped| mapped.or(class.priority).unwrap_or_default()).min()
}

/// Refuses a claim that asks for more than its class gives, or its pods where the class says nothing.
fn refuse_more(
    class: &SeatParameters,
    of_pods: Option<Priority>,
    claim: &SeatParameters,
) -> Result<(), String> {
    // A program may give itself no more than the usual weight.
    let most = class.weight.unwrap_or(DEFAULT_WEIGHT);
    if let Some(weight) = claim.weight.filter(|&weight| weight > most) {
        return Err(format!(
            "{KIND}: a weight of {weight} in a claim; its DeviceClass gives it {most} at most"
        ));
    }
    let most = class.priority.unwrap_or_else(|| of_pods.unwrap_or_default().max(Priority::default()));
    if claim.priority > Some(most) {
        return Err(format!("{KIND}: a priority in a claim that is higher than its DeviceClass gives it"));
    }
    // How hard a limit binds.
    let hardness = |policy| match policy {
        Enforcement::Disable => 0,
        Enforcement::Default => 1,
        Enforcement::Force => 2,
    };
    let least = hardness(class.policy.unwrap_or_default());
    if claim.policy.is_some_and(|policy| hardness(policy) < least) {
        return Err(format!("{KIND}: a policy in a claim that binds less than that of its DeviceClass"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::resource::v1::OpaqueDeviceConfiguration;
    use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
    use serde_json::json;

    use super::*;

    fn entry(source: &str, requests: &[&str], driver: &str, fields: &Value) -> DeviceAllocationConfiguration {
        let mut parameters = json!({"apiVersion": API_VERSION, "kind": KIND});
        parameters.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        DeviceAllocationConfiguration {
            opaque: Some(OpaqueDeviceConfiguration {
                driver: driver.to_owned(),
                parameters: RawExtension(parameters),
            }),
            requests: Some(requests.iter().map(|&name| name.to_owned()).collect()),
            source: source.to_owned(),
        }
    }

    #[test]
    fn a_class_and_then_a_claim_say_what_a_request_has() {
        let config = [
            entry("FromClass", &[], DRIVER, &json!({"weight": 500, "priority": "high", "gang": true})),
            entry("FromClaim", &["a"], DRIVER, &json!({"weight": 300, "priority": "low"})),
            entry("FromClaim", &["b/small"], DRIVER, &json!({"policy": "force", "gang": false})),
            entry("FromClaim", &[], "gpu.example.com", &json!({"anything": 1})),
        ];
        let given =
            TenantSettings { weight: Some(500), priority: Some(Priority::High), ..TenantSettings::default() };
        let class = Settings { given, gang: true };
        let a = TenantSettings { weight: Some(300), priority: Some(Priority::Low), ..given };
        let a = Settings { given: a, ..class };
        let b = Settings {
            given: TenantSettings { enforcement: Some(Enforcement::Force), ..given },
            gang: false,
        };
        for (request, expected) in [("a", a), ("a/any", a), ("b/small", b), ("b/large", class), ("c", class)]
        {
            assert_eq!(for_request(&config, request, &[]), Ok(expected), "{request}");
        }
        assert_eq!(for_request(&[], "a", &[]), Ok(Settings::default()));
    }

    #[test]
    fn what_is_not_known_is_refused_with_its_name() {
        for (source, fields, told) in [
            ("FromClaim", json!({"wieght": 50}), "SeatParameters: unknown field `wieght`, expected one of"),
            ("FromClass", json!({"gang": "g"}), "gang: \"g\": a gang is the processes of one claim"),
            (
                "FromClaim",
                json!({"gang": {"name": "g"}}),
                "no other claim can join it; accepted: true, false",
            ),
            ("FromClaim", json!({"priority": "urgent"}), "unknown variant `urgent`"),
            ("FromClaim", json!({"policy": 1}), "SeatParameters: invalid type"),
            ("FromClaim", json!({"weight": -1}), "SeatParameters: invalid value"),
            ("FromClass", json!({"weight": 0}), "a weight of 0 is out of range: 1 to 10000"),
            ("FromClass", json!({"weight": 10_001}), "a weight of 10001 is out of range"),
            ("FromClaim", json!({"kind": "SeatParameter"}), "kind \"SeatParameter\" are not known"),
            (
                "FromClaim",
                json!({"apiVersion": "nvshare.com/v2", "other": 1}),
                "apiVersion \"nvshare.com/v2\"",
            ),
        ] {
            let refused = for_request(&[entry(source, &[], DRIVER, &fields)], "a", &[]).unwrap_err();
            assert!(refused.contains(told), "{fields}: {refused}");
        }
        // The line of an array says nothing of its kind either.
        let bare = DeviceAllocationConfiguration {
            opaque: Some(OpaqueDeviceConfiguration {
                driver: DRIVER.to_owned(),
                parameters: RawExtension(json!([1])),
            }),
            ..entry("FromClaim", &[], DRIVER, &json!({}))
        };
        assert!(for_request(&[bare], "a", &[]).unwrap_err().contains("apiVersion \"\" and kind \"\""));
    }

    #[test]
    fn a_claim_asks_for_less_than_its_class_gives() {
        let with = |class: Value, claim: Value| {
            let said = [("FromClass", class), ("FromClaim", claim)];
            let config = said.map(|(source, fields)| entry(source, &[], DRIVER, &fields));
            for_request(&config, "a", &[])
        };
        for (class, claim, told) in [
            (json!({}), json!({"weight": 100}), None),
            (
                json!({}),
                json!({"weight": 101}),
                Some("a weight of 101 in a claim; its DeviceClass gives it 100 at most"),
            ),
            (json!({"weight": 50}), json!({"weight": 51}), Some("gives it 50 at most")),
            (json!({}), json!({"priority": "normal"}), None),
            (json!({}), json!({"priority": "high"}), Some("a priority in a claim that is higher")),
            (json!({"priority": "low"}), json!({"priority": "normal"}), Some("that is higher")),
            (json!({"priority": "high"}), json!({"priority": "high"}), None),
            (json!({}), json!({"policy": "disable"}), Some("a policy in a claim that binds less")),
            (json!({"policy": "disable"}), json!({"policy": "disable"}), None),
            (json!({"policy": "force"}), json!({"policy": "default"}), Some("binds less")),
        ] {
            let words = format!("{class} {claim}");
            match (with(class, claim), told) {
                (Ok(_), None) => {}
                (Err(refused), Some(told)) => assert!(refused.contains(told), "{words}: {refused}"),
                (got, _) => panic!("{words}: {got:?}"),
            }
        }
    }
    #[test]
    fn the_lowest_of_what_the_classes_and_the_claim_say_counts() {
        use Priority::{High, Low, Normal};
        let with = |class: Option<Priority>, claim: Option<Priority>, pods: &[Option<Priority>]| {
            let said = [("FromClass", class), ("FromClaim", claim)];
            let said = said.into_iter().filter_map(|(source, priority)| Some((source, priority?)));
            let config =
                said.map(|(source, priority)| entry(source, &[], DRIVER, &json!({"priority": priority})));
            let got = for_request(&config.collect::<Vec<_>>(), "a", pods);
            got.map(|settings| settings.given.priority).ok()
        };
        for (class, claim, pods, expected) in [
            // A pod's class says it, and a user lowers it or cannot raise it.
            (None, None, &[Some(High)][..], Some(Some(High))),
            (None, None, &[Some(Low)], Some(Some(Low))),
            (None, Some(Low), &[Some(High)], Some(Some(Low))),
            (None, Some(Normal), &[Some(Low)], Some(Some(Low))),
            (None, Some(High), &[Some(High)], Some(Some(High))),
            (None, Some(High), &[Some(Normal)], None),
            (None, Some(High), &[Some(Low)], None),
            // The classes are both an administrator's.
            (Some(High), None, &[Some(Low)], Some(Some(Low))),
            (Some(Low), None, &[Some(High)], Some(Some(Low))),
            (Some(Low), Some(High), &[Some(High)], None),
            (Some(High), Some(High), &[Some(Low)], Some(Some(Low))),
            // A class that is not mapped changes nothing.
            (None, None, &[None], Some(Some(Normal))),
            (None, Some(High), &[None], None),
            (Some(High), None, &[None], Some(Some(High))),
            // The pods share one seat.
            (None, None, &[Some(High), Some(Low)], Some(Some(Low))),
            (None, None, &[Some(High), None], Some(Some(Normal))),
            (None, Some(High), &[Some(High), None], None),
            (Some(High), None, &[Some(High), None], Some(Some(High))),
            // They are not asked.
            (None, None, &[], Some(None)),
        ] {
            assert_eq!(with(class, claim, pods), expected, "{class:?} {claim:?} {pods:?}");
        }
    }
}
