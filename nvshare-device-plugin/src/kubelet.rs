//! The kubelet: a socket of each resource beside the kubelet's, and the registration there.
//!
//! A kubelet that starts removes all sockets of plugins and makes its own anew. Both are looked at once a second: there is
//! nothing to run out of, as with inotify, and a missed look costs a second.
//!
//! A lock on the folder keeps it to one plugin: a second one waits. Two at once would help nobody: since 1.26 a kubelet whose connection to either
//! ends has no slots (`PluginDisconnected` in `pkg/kubelet/cm/devicemanager/manager.go` goes by the resource's name).

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nvshare_proto::ThrottledLine;
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use crate::api::{self, Empty, REGISTER, RegisterRequest};
use crate::grpc::{self, Answer, Call, Client};
use crate::plugin::{self, Offer, Plugin, WANTED};
use crate::resources::Resource;

/// The socket of the main resource, in the folder of the kubelet's. Each further one has its own beside it.
const SOCKET: &str = "nvshare.sock";
/// How the names of the others begin and end.
const OTHERS: (&str, &str) = ("nvshare-", ".sock");

/// How often the sockets are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often a plugin looks whether the one before it has ended: meanwhile the kubelet has no slots.
const FOLLOW_EVERY: Duration = Duration::from_millis(50);
/// A registration that failed is tried again after the first of these, and each time after twice as long, up to the second.
const AGAIN: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));
/// A kubelet is tried again after this long without an answer, or without a question for the list.
const PATIENCE: Duration = Duration::from_secs(10);

static WAITING: ThrottledLine = ThrottledLine::new(|text| info!("{text}"));
static FAILING: ThrottledLine = ThrottledLine::new(|text| warn!("{text}"));

/// A file, and no later one at its path.
pub(crate) type Identity = (u64, u64, i64, i64);

/// The file at a path, if there is one.
pub(crate) fn identity(path: &Path) -> Option<Identity> {
    let found = fs::symlink_metadata(path).ok()?;
    // The number of a file that is removed is given to the next one.
    Some((found.dev(), found.ino(), found.ctime(), found.ctime_nsec()))
}

/// The folder of the sockets of plugins.
fn folder(kubelet: &Path) -> PathBuf {
    kubelet.join("device-plugins")
}

/// Waits until the folder of the sockets is there, and no other plugin has it. The plugin has it as long as the returned file is open.
pub async fn enter(kubelet: &Path) -> File {
    let folder = folder(kubelet);
    loop {
        let mut pause = LOOK_EVERY;
        match File::open(&folder).map_err(TryLockError::Error).and_then(|file| file.try_lock().map(|()| file))
        {
            Ok(file) => return file,
            Err(TryLockError::WouldBlock) => {
                pause = FOLLOW_EVERY;
                WAITING.say(format_args!(
                    "waiting for another nvshare-device-plugin at {} to end",
                    folder.display()
                ));
            }
            Err(TryLockError::Error(error)) => {
                WAITING.say(format_args!("waiting for a kubelet at {}: {error}", folder.display()));
            }
        }
        sleep(pause).await;
    }
}

/// The path of the main resource's socket.
#[must_use]
pub fn socket(kubelet: &Path) -> PathBuf {
    folder(kubelet).join(SOCKET)
}

/// The name of a resource's socket.
fn socket_name(resource: &Resource) -> String {
    let (begin, end) = OTHERS;
    resource.also.as_ref().map_or_else(|| SOCKET.to_owned(), |name| format!("{begin}{name}{end}"))
}

/// The plugin's sockets that are there, also those of resources that are offered no more.
pub(crate) fn sockets(kubelet: &Path) -> Vec<PathBuf> {
    let is_ours = |name: &str| name == SOCKET || name.starts_with(OTHERS.0) && name.ends_with(OTHERS.1);
    let entries = fs::read_dir(folder(kubelet)).into_iter().flatten().filter_map(Result::ok);
    entries
        .filter(|entry| entry.file_name().to_str().is_some_and(is_ours))
        .map(|entry| entry.path())
        .collect()
}

/// The same as [`enter`] without waiting.
///
/// # Errors
/// Another plugin has the folder, or there is none.
pub fn enter_now(kubelet: &Path) -> Result<File, String> {
    let folder = folder(kubelet);
    let file = File::open(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            Err(format!("an nvshare-device-plugin runs at {}: remove it first", folder.display()))
        }
        Err(TryLockError::Error(error)) => Err(format!("{}: {error}", folder.display())),
    }
}

/// A socket of ours.
#[derive(Debug)]
pub(crate) struct Bound {
    identity: Identity,
    task: JoinHandle<()>,
}

impl Bound {
    /// Binds it, and answers the calls of all who connect.
    pub(crate) fn at<F, A>(path: &Path, answer: F) -> io::Result<Self>
    where
        F: Fn(Call) -> A + Clone + Send + 'static,
        A: Future<Output = Answer> + Send + 'static,
    {
        // Of a plugin that was killed.
        let _ = fs::remove_file(path);
        let listener = UnixListener::bind(path)?;
        let identity = identity(path).ok_or(io::ErrorKind::NotFound)?;
        let task = tokio::spawn(grpc::serve(listener, answer));
        Ok(Self { identity, task })
    }

    /// Whether the socket at this path is this one.
    pub(crate) fn is_at(&self, path: &Path) -> bool {
        identity(path) == Some(self.identity)
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        // Calls that are under way go on.
        self.task.abort();
    }
}

/// Serves a resource, and has it registered at the kubelet, for ever.
pub async fn attend(plugin: Arc<Plugin>, offer: Arc<Offer>) {
    let folder = folder(&plugin.host.options.kubelet);
    let (own, kubelet) = (folder.join(socket_name(&offer.resource)), folder.join("kubelet.sock"));
    let mut bound: Option<Bound> = None;
    let mut registered: Option<(Identity, Instant)> = None;
    let mut again = AGAIN.0;
    loop {
        if bound.as_ref().is_none_or(|bound| !bound.is_at(&own)) {
            registered = None;
            let (answers, offers) = (Arc::clone(&plugin), Arc::clone(&offer));
            bound =
                Bound::at(&own, move |call| plugin::answer(Arc::clone(&answers), Arc::clone(&offers), call))
                    .inspect_err(|error| FAILING.say(format_args!("{}: {error}", own.display())))
                    .ok();
        }
        let there = identity(&kubelet);
        // A kubelet that follows the list no more has forgotten the resource.
        let is_registered = registered.is_some_and(|(at, since)| {
            Some(at) == there && (offer.is_followed() || since.elapsed() < PATIENCE)
        });
        let mut pause = plugin.host.options.pause(LOOK_EVERY);
        match there {
            Some(there) if !is_registered && bound.is_some() => {
                match register(&kubelet, &plugin, &offer.resource).await {
                    Ok(()) => {
                        info!("registered {} at {}", offer.resource.name, kubelet.display());
                        (registered, again) = (Some((there, Instant::now())), AGAIN.0);
                    }
                    Err(error) => {
                        FAILING.say(format_args!("not registered at {}: {error}", kubelet.display()));
                        registered = None;
                        (pause, again) = (again, (2 * again).min(AGAIN.1));
                    }
                }
            }
            Some(_) => {}
            None => WAITING.say(format_args!("waiting for a kubelet at {}", kubelet.display())),
        }
        sleep(pause).await;
    }
}

/// The kubelet dials back before it answers. From then on it may start containers, whose devices have to be there.
async fn register(kubelet: &Path, plugin: &Arc<Plugin>, resource: &Resource) -> Result<(), String> {
    plugin.host.publish_soon().await.map_err(|status| status.message().to_owned())?;
    let request = RegisterRequest {
        version: api::VERSION.to_owned(),
        endpoint: socket_name(resource),
        resource_name: resource.name.clone(),
        options: Some(WANTED),
    };
    let call = async {
        let client = Client::connect(kubelet).await.map_err(|error| error.to_string())?;
        let done: Result<Empty, _> = client.ask(REGISTER, request).await;
        done.map(drop).map_err(|status| status.message().to_owned())
    };
    timeout(PATIENCE, call).await.map_err(|_| "it does not answer".to_owned())?
}
