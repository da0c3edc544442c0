//! The kubelet: the driver's socket, which the kubelet finds by itself, and the answers there.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nvshare_proto::ThrottledLine;
use tokio::time::sleep;
use tracing::{info, warn};

use super::messages::{
    ClaimsRequest, GET_INFO, KIND, NOTIFY, PREPARE, PluginInfo, RegistrationStatus, UNPREPARE, VERSION,
};
use super::{DRIVER, Driver};
use crate::api::Empty;
use crate::grpc::{self, Answer, Call};
use crate::kubelet::Bound;

/// The socket's name. The kubelet says the path as the name of the host that it calls, with its slashes written as `%2F`; HTTP allows these
/// before an `@` alone.
const SOCKET: &str = "gpu.nvshare.com@localhost.sock";
/// How often the socket is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

static FAILING: ThrottledLine = ThrottledLine::new(|text| warn!("{text}"));

/// The path of the driver's socket. The kubelet watches its folder.
#[must_use]
pub fn socket(kubelet: &Path) -> PathBuf {
    kubelet.join("plugins_registry").join(SOCKET)
}

/// Serves, for ever. A kubelet that starts finds the socket.
pub async fn attend(driver: Arc<Driver>) {
    let own = socket(&driver.host.options.kubelet);
    let mut bound: Option<Bound> = None;
    loop {
        if bound.as_ref().is_none_or(|bound| !bound.is_at(&own)) {
            // From then on the kubelet may start containers, whose devices have to be there.
            bound = match driver.host.publish_soon().await {
                Ok(()) => {
                    let answers = Arc::clone(&driver);
                    Bound::at(&own, move |call| answer(Arc::clone(&answers), call))
                        .map_err(|error| format!("{}: {error}", own.display()))
                }
                Err(status) => Err(status.message().to_owned()),
            }
            .inspect_err(|error| FAILING.say(format_args!("the kubelet does not find the driver: {error}")))
            .ok();
        }
        sleep(driver.host.options.pause(LOOK_EVERY)).await;
    }
}

/// Answers a call of the kubelet.
async fn answer(driver: Arc<Driver>, call: Call) -> Answer {
    match call.uri().path() {
        GET_INFO => {
            let info = PluginInfo {
                kind: KIND.to_owned(),
                name: DRIVER.to_owned(),
                endpoint: socket(&driver.host.options.kubelet).display().to_string(),
                supported_versions: vec![VERSION.to_owned()],
            };
            let act = move |_: Empty| {
                let info = info.clone();
                async { Ok(info) }
            };
            grpc::unary(call, act).await
        }
        NOTIFY => {
            let act = move |status: RegistrationStatus| {
                let driver = Arc::clone(&driver);
                async move {
                    if status.plugin_registered {
                        info!("registered {DRIVER} at the kubelet");
                        driver.registered.notify_one();
                    } else {
                        warn!("the kubelet does not register {DRIVER}: {}", status.error);
                    }
                    Ok(Empty {})
                }
            };
            grpc::unary(call, act).await
        }
        PREPARE => {
            let act = move |request: ClaimsRequest| {
                let driver = Arc::clone(&driver);
                async move { Ok(driver.prepare(request).await) }
            };
            grpc::unary(call, act).await
        }
        UNPREPARE => {
            let act = move |request: ClaimsRequest| {
                let driver = Arc::clone(&driver);
                async move { Ok(driver.unprepare(request).await) }
            };
            grpc::unary(call, act).await
        }
        _ => grpc::unknown(&call),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sockets_path_is_a_host_that_http_knows() {
        let path = socket(Path::new("/var/lib/kubelet")).display().to_string();
        let host = path.replace('/', "%2F");
        assert!(host.parse::<http::uri::Authority>().is_ok(), "{host}");
        assert!(host.replace('@', "-").parse::<http::uri::Authority>().is_err(), "that is why");
    }
}
