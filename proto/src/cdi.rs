//! The Container Device Interface: specifications of devices by which containers get folders and variables.
//!
//! The types have the fields that version 0.3.0 of the interface has, as far as nvshare uses them. An nvshare device says nothing of GPUs:
//! NVIDIA's own device beside it does.

use std::path::{Path, PathBuf};

use serde::Serialize;

/// The oldest version of the interface that engines read.
pub const VERSION: &str = "0.3.0";
/// The kind of nvshare's devices. The resource of Kubernetes has the same name.
pub const KIND: &str = "nvshare.com/gpu";
/// The folder in which a container finds the library.
pub const LIBRARY_IN_CONTAINER: &str = "/usr/lib/nvshare";

/// A specification: a file in `/etc/cdi` or `/var/run/cdi`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Specification {
    /// See [`VERSION`].
    pub cdi_version: &'static str,
    /// See [`KIND`].
    pub kind: &'static str,
    /// The devices.
    pub devices: Vec<Device>,
}

/// A device of a specification.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// The name, which stands behind the kind and `=`.
    pub name: String,
    /// The changes of a container that gets the device.
    pub container_edits: Edits,
}

/// Changes of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Edits {
    /// Variables, as `NAME=VALUE`.
    pub env: Vec<String>,
    /// Files and folders of the host.
    pub mounts: Vec<Mount>,
}

/// A file or folder of the host in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    /// Its path on the host.
    pub host_path: PathBuf,
    /// Its path in the container.
    pub container_path: PathBuf,
    /// Options of the mount.
    pub options: Vec<&'static str>,
}

impl Specification {
    /// The specification of some devices of nvshare.
    #[must_use]
    pub fn of(devices: Vec<Device>) -> Self {
        Self { cdi_version: VERSION, kind: KIND, devices }
    }
}

impl Mount {
    /// A file or folder that a container may only read.
    #[must_use]
    pub fn read_only(host_path: &Path, container_path: &Path) -> Self {
        let (host_path, container_path) = (host_path.to_owned(), container_path.to_owned());
        Self { host_path, container_path, options: vec!["ro", "nosuid", "nodev", "bind"] }
    }
}
