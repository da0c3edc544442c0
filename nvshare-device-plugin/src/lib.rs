//! The device plugin of Kubernetes for `nvshare.com/gpu`: each GPU has slots, and a container that asks for one gets a seat at the scheduler.
//!
//! What is decided is in modules without IO: [`devices`], [`troubles`], [`allocate`], [`preferred`], [`cdi`], [`nvidia`], [`checkpoint`], [`unused`]. Around them: the kubelet
//! ([`kubelet`], [`grpc`]), the scheduler and the pods ([`upkeep`], [`pods`]), and files ([`files`], [`records`], [`specifications`],
//! [`cards`], [`features`]). [`plugin`] holds them together, and [`clean_up`] removes what they leave.

#![forbid(unsafe_code)]

pub mod allocate;
pub mod api;
pub mod cards;
pub mod cdi;
pub mod checkpoint;
pub mod clean_up;
pub mod devices;
pub mod features;
pub mod files;
pub mod grpc;
pub mod kubelet;
pub mod nvidia;
pub mod options;
pub mod plugin;
pub mod pods;
pub mod preferred;
pub mod records;
pub mod run;
pub mod specifications;
pub mod troubles;
pub mod unused;
pub mod upkeep;
