//! Gives GPUs to containers of Kubernetes: each that gets a share of one gets a seat at the scheduler. By the device plugin API a GPU has slots that
//! are counted (`nvshare.com/gpu`, and further [`resources`]); by Dynamic Resource Allocation it is a device that many claims may have ([`dra`]).
//!
//! Decisions are in modules without IO: [`resources`], [`devices`], [`troubles`], [`allocate`], [`preferred`], [`cdi`], [`nvidia`], [`checkpoint`], [`unused`]. Around them: the kubelet
//! ([`kubelet`], [`grpc`]), the scheduler and the pods ([`upkeep`], [`pods`]), and files ([`files`], [`records`], [`specifications`],
//! [`node_gpus`], [`features`]). [`host`] holds together what both APIs have, [`plugin`] is the device plugin API, [`rivals`] keeps a node to one of the
//! two, and [`clean_up`] removes what they leave.

#![forbid(unsafe_code)]

pub mod allocate;
pub mod api;
pub mod cdi;
pub mod checkpoint;
pub mod clean_up;
pub mod devices;
pub mod dra;
pub mod features;
pub mod files;
pub mod grpc;
pub mod host;
pub mod kubelet;
pub mod node_gpus;
pub mod nvidia;
pub mod options;
pub mod plugin;
pub mod pods;
pub mod preferred;
pub mod records;
pub mod resources;
pub mod rivals;
pub mod run;
pub mod specifications;
pub mod troubles;
pub mod unused;
pub mod upkeep;
