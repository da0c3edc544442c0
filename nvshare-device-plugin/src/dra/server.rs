//! The API server of Kubernetes, as far as the driver asks it.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{
    Api, DeleteParams, ListParams, ObjectList, PostParams, Preconditions, WatchEvent, WatchParams,
};
use kube::{Client, Config};
use tokio::time::timeout;
use tokio_stream::Stream;

use super::DRIVER;
use super::slices::{self, Step};

/// An API server that does not answer for this long is away. The kubelet waits 45 s for a claim.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why a request was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Somebody else has changed it, or made one of that name.
    #[error("somebody else has changed it: {0}")]
    Conflict(String),
    /// There is none.
    #[error("{0}")]
    Missing(String),
    /// The API server does not answer, or not as it should.
    #[error("{0}")]
    Away(String),
}

impl From<kube::Error> for Error {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => match status.code {
                404 => Self::Missing(status.message),
                409 => Self::Conflict(status.message),
                code => Self::Away(format!("the API server says {code}: {}", status.message)),
            },
            kube::Error::Service(error) => Self::Away(format!("the API server does not answer: {error}")),
            error => Self::Away(error.to_string()),
        }
    }
}

/// The API server, for one node.
#[derive(Clone)]
pub struct Server {
    client: Client,
    node: String,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("node", &self.node).finish_non_exhaustive()
    }
}

impl Server {
    /// The API server of the pod's service account, or of $KUBECONFIG. It need not answer yet.
    ///
    /// # Errors
    /// Neither says where it is.
    pub async fn of(node: String) -> Result<Self, String> {
        let no = |error: &dyn std::fmt::Display| format!("--api dra: no API server is known: {error}");
        let mut config = Config::infer().await.map_err(|error| no(&error))?;
        config.connect_timeout = Some(PATIENCE);
        let client = Client::try_from(config).map_err(|error| no(&error))?;
        Ok(Self { client, node })
    }

    /// The node.
    #[must_use]
    pub fn node(&self) -> &str {
        &self.node
    }

    fn slices(&self) -> Api<ResourceSlice> {
        Api::all(self.client.clone())
    }

    /// Slices of this driver and node alone.
    fn own(&self) -> String {
        format!("spec.driver={DRIVER},spec.nodeName={}", self.node)
    }

    /// The slices of this driver and node.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn list(&self) -> Result<ObjectList<ResourceSlice>, Error> {
        let own = ListParams::default().fields(&self.own());
        match soon(self.slices().list(&own)).await {
            Err(Error::Missing(_)) => Err(Error::Away(
                "the API server has no resource.k8s.io/v1, as Kubernetes 1.34 does".to_owned(),
            )),
            listed => listed,
        }
    }

    /// The changes of these slices after a version, for some seconds.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn watch(
        &self,
        version: &str,
        seconds: u32,
    ) -> Result<impl Stream<Item = kube::Result<WatchEvent<ResourceSlice>>> + use<>, Error> {
        let own = WatchParams::default().fields(&self.own()).timeout(seconds).disable_bookmarks();
        soon(self.slices().watch(&own, version)).await
    }

    /// Carries a step out. Returns the slice as it is stored, if one is.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn carry_out(&self, step: Step) -> Result<Option<ResourceSlice>, Error> {
        let slices = self.slices();
        match step {
            Step::Create(slice) => {
                let slice = self.owned(slice).await?;
                soon(slices.create(&PostParams::default(), &slice)).await.map(Some)
            }
            Step::Replace(slice) => {
                let slice = self.owned(slice).await?;
                let name = slice.metadata.name.clone().unwrap_or_default();
                soon(slices.replace(&name, &PostParams::default(), &slice)).await.map(Some)
            }
            Step::Delete(metadata) => {
                let preconditions =
                    Preconditions { resource_version: metadata.resource_version, uid: metadata.uid };
                let as_it_is = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
                let name = metadata.name.unwrap_or_default();
                match soon(slices.delete(&name, &as_it_is)).await {
                    Ok(_) | Err(Error::Missing(_)) => Ok(None),
                    Err(error) => Err(error),
                }
            }
        }
    }

    /// A slice with the node as its owner, as the node is now: one of the same name that was made anew is another.
    async fn owned(&self, slice: ResourceSlice) -> Result<ResourceSlice, Error> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let node = soon(nodes.get(&self.node)).await.map_err(|error| match error {
            Error::Missing(_) => {
                Error::Away(format!("there is no node {}; is --node-name right?", self.node))
            }
            error => error,
        })?;
        let owner_references = slices::owner(&node.metadata).map(|owner| vec![owner]);
        Ok(ResourceSlice { metadata: ObjectMeta { owner_references, ..slice.metadata }, ..slice })
    }

    /// A claim.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn claim(&self, namespace: &str, name: &str) -> Result<ResourceClaim, Error> {
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
        soon(claims.get(name)).await
    }

    /// A pod.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn pod(&self, namespace: &str, name: &str) -> Result<Pod, Error> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        soon(pods.get(name)).await
    }
}

async fn soon<T>(answer: impl Future<Output = kube::Result<T>>) -> Result<T, Error> {
    let no_answer = || Error::Away(format!("the API server does not answer within {} s", PATIENCE.as_secs()));
    timeout(PATIENCE, answer).await.map_err(|_| no_answer())?.map_err(Error::from)
}
