//! A node has one API: the kubelet would count the same GPU twice.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use tokio::task::spawn_blocking;

use crate::dra::registration;
use crate::options::{Api, Options};
use crate::records::Records;
use crate::{kubelet, pods};

/// Returns an error if a plugin with the other API already runs on this node.
///
/// # Errors
/// Such a plugin runs.
pub async fn refuse_server(options: &Options) -> Result<(), String> {
    let (socket, other): (PathBuf, _) = match options.api {
        Api::DevicePlugin => (registration::socket(&options.kubelet), "dra"),
        Api::Dra => (kubelet::socket(&options.kubelet), "device-plugin"),
    };
    let connect = {
        let socket = socket.clone();
        move || UnixStream::connect(socket).is_ok()
    };
    if spawn_blocking(connect).await.unwrap_or_default() {
        let socket = socket.display();
        return Err(format!(
            "a program with --api {other} serves at {socket}, and a node has one API: remove it first"
        ));
    }
    Ok(())
}

/// Returns an error if containers on this node have GPUs by the other API.
///
/// # Errors
/// There are such containers, or the record of their seats cannot be read.
pub async fn refuse_seats(options: &Options) -> Result<(), String> {
    let used = match options.api {
        Api::DevicePlugin => {
            claimed(options)?.map(|(count, name)| format!("claims: {count}, such as {name}"))
        }
        Api::Dra => {
            let given = pods::given(options).await?.unwrap_or_default();
            let resource = &options.resource;
            given
                .first_key_value()
                .map(|(name, _)| format!("slots of {resource}: {}, such as that of seat {name}", given.len()))
        }
    };
    match used {
        Some(used) => Err(format!(
            "containers on this node have {used}, and a node has one API: remove their pods first"
        )),
        None => Ok(()),
    }
}

/// How many seats claims have, and the claim of one.
///
/// # Errors
/// The record cannot be read.
pub fn claimed(options: &Options) -> Result<Option<(usize, String)>, String> {
    let (records, _) = Records::open(&options.state, Api::Dra)?;
    let claims = || records.seats().values().filter_map(|record| record.claim.as_ref());
    let first = claims().next().map(|claim| format!("{}/{}", claim.namespace, claim.name));
    Ok(first.map(|name| (claims().count(), name)))
}
