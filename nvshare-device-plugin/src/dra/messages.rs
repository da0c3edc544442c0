//! The messages of the kubelet for drivers of Dynamic Resource Allocation: its plugin registration API `v1`, and its DRA API `v1`.
//!
//! The numbers are those of Kubernetes' `api.proto` files. A field that is not here is skipped when it is read.

use std::collections::BTreeMap;

use prost::Message;

/// The kind of plugin that registers.
pub const KIND: &str = "DRAPlugin";
/// The version of the DRA API, as a plugin names it.
pub const VERSION: &str = "v1.DRAPlugin";

/// Asks whose socket it is: [`Empty`](crate::api::Empty) to [`PluginInfo`].
pub const GET_INFO: &str = "/pluginregistration.Registration/GetInfo";
/// Says whether the plugin is registered: [`RegistrationStatus`] to [`Empty`](crate::api::Empty).
pub const NOTIFY: &str = "/pluginregistration.Registration/NotifyRegistrationStatus";
/// [`ClaimsRequest`] to [`PrepareResponse`].
pub const PREPARE: &str = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources";
/// [`ClaimsRequest`] to [`UnprepareResponse`].
pub const UNPREPARE: &str = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources";

/// A plugin says what it is.
#[derive(Clone, PartialEq, Message)]
pub struct PluginInfo {
    /// [`KIND`].
    #[prost(string, tag = "1")]
    pub kind: String,
    /// The driver.
    #[prost(string, tag = "2")]
    pub name: String,
    /// The path of the socket that answers.
    #[prost(string, tag = "3")]
    pub endpoint: String,
    /// [`VERSION`].
    #[prost(string, repeated, tag = "4")]
    pub supported_versions: Vec<String>,
}

/// Whether a plugin is registered.
#[derive(Clone, PartialEq, Message)]
pub struct RegistrationStatus {
    /// Whether it is.
    #[prost(bool, tag = "1")]
    pub plugin_registered: bool,
    /// Why it is not.
    #[prost(string, tag = "2")]
    pub error: String,
}

/// Names the claims that are to be prepared, or are not used any more.
#[derive(Clone, PartialEq, Message)]
pub struct ClaimsRequest {
    /// The claims.
    #[prost(message, repeated, tag = "1")]
    pub claims: Vec<Claim>,
}

/// A claim.
#[derive(Clone, PartialEq, Message)]
pub struct Claim {
    /// Its namespace.
    #[prost(string, tag = "1")]
    pub namespace: String,
    /// The number that tells it from all others.
    #[prost(string, tag = "2")]
    pub uid: String,
    /// Its name.
    #[prost(string, tag = "3")]
    pub name: String,
}

/// The answer for each claim, by the claims' UIDs.
#[derive(Clone, PartialEq, Message)]
pub struct PrepareResponse {
    /// One for each claim that was named.
    #[prost(btree_map = "string, message", tag = "1")]
    pub claims: BTreeMap<String, Prepared>,
}

/// The answer for one claim.
#[derive(Clone, PartialEq, Message)]
pub struct Prepared {
    /// The devices.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
    /// Why it gets none; empty: it does.
    #[prost(string, tag = "2")]
    pub error: String,
}

/// A device that a claim gets.
#[derive(Clone, PartialEq, Message)]
pub struct Device {
    /// The claim's requests that it is for.
    #[prost(string, repeated, tag = "1")]
    pub request_names: Vec<String>,
    /// The pool that has it.
    #[prost(string, tag = "2")]
    pub pool_name: String,
    /// Its name in the pool.
    #[prost(string, tag = "3")]
    pub device_name: String,
    /// Names of devices of the Container Device Interface.
    #[prost(string, repeated, tag = "4")]
    pub cdi_device_ids: Vec<String>,
}

/// The outcome for each claim, by the claims' UIDs.
#[derive(Clone, PartialEq, Message)]
pub struct UnprepareResponse {
    /// One for each claim that was named.
    #[prost(btree_map = "string, message", tag = "1")]
    pub claims: BTreeMap<String, Unprepared>,
}

/// The outcome for one claim.
#[derive(Clone, PartialEq, Message)]
pub struct Unprepared {
    /// Why it is still prepared; empty: it is not.
    #[prost(string, tag = "1")]
    pub error: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes that Kubernetes' own definitions give: tag and type of each field, its length, its contents.
    #[test]
    fn the_bytes_are_those_of_kubernetes() {
        let one = |text: &str| vec![text.to_owned()];
        let info = PluginInfo {
            kind: "k".to_owned(),
            name: "n".to_owned(),
            endpoint: "e".to_owned(),
            supported_versions: one("v"),
        };
        assert_eq!(info.encode_to_vec(), b"\x0a\x01k\x12\x01n\x1a\x01e\x22\x01v");
        let status = RegistrationStatus { plugin_registered: true, error: "e".to_owned() };
        assert_eq!(status.encode_to_vec(), b"\x08\x01\x12\x01e");
        let claim = Claim { namespace: "s".to_owned(), uid: "u".to_owned(), name: "n".to_owned() };
        let request = ClaimsRequest { claims: vec![claim] };
        assert_eq!(request.encode_to_vec(), b"\x0a\x09\x0a\x01s\x12\x01u\x1a\x01n");
        let device = Device {
            request_names: one("r"),
            pool_name: "p".to_owned(),
            device_name: "d".to_owned(),
            cdi_device_ids: one("c"),
        };
        let prepared = Prepared { devices: vec![device], error: "e".to_owned() };
        let response = PrepareResponse { claims: BTreeMap::from([("u".to_owned(), prepared)]) };
        let bytes =
            b"\x0a\x16\x0a\x01u\x12\x11\x0a\x0c\x0a\x01r\x12\x01p\x1a\x01d\x22\x01c\x12\x01e".as_slice();
        assert_eq!(response.encode_to_vec(), bytes);
        // Fields that newer kubelets add are skipped.
        let newer = [bytes, b"\x3a\x01x"].concat();
        assert_eq!(PrepareResponse::decode(newer.as_slice()).unwrap(), response);
        let unprepared = Unprepared { error: "e".to_owned() };
        let response = UnprepareResponse { claims: BTreeMap::from([("u".to_owned(), unprepared)]) };
        assert_eq!(response.encode_to_vec(), b"\x0a\x08\x0a\x01u\x12\x03\x0a\x01e");
    }
}
