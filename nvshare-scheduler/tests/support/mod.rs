//! A scheduler inside a test program, with sockets in a folder of its own.

use std::path::{Path, PathBuf};

use nvshare_core::Config;
use nvshare_proto::codec::Frames;
use nvshare_proto::{Register, Reply, Request};
use nvshare_scheduler::host_memory::Budget;
use nvshare_scheduler::seats::Opened;
use nvshare_scheduler::server::{self, Setup, Stopped};
use nvshare_scheduler::settings::Store;
use nvshare_scheduler::sockets::Sockets;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_util::codec::Framed;

pub(crate) type Stream = Framed<UnixStream, Frames<Reply, Request>>;

pub(crate) struct Server {
    folder: PathBuf,
    pub(crate) clients: PathBuf,
    #[allow(dead_code, reason = "not every test is an administrator")]
    pub(crate) admin: PathBuf,
    stop: oneshot::Sender<()>,
    serves: JoinHandle<Result<(), Stopped>>,
    /// While it is there, the configuration may change.
    _configurations: mpsc::Sender<Config>,
}

impl Server {
    /// Starts one; `test` names its folder.
    #[allow(dead_code, reason = "not every test starts one like this")]
    pub(crate) fn start(test: &str) -> Self {
        Self::start_with(test, Config::default(), None)
    }

    /// Starts one with memory of the host for its clients.
    pub(crate) fn start_with(test: &str, config: Config, host_memory: Option<Budget>) -> Self {
        let folder = std::env::temp_dir().join(format!("nvshare-{test}-{}", std::process::id()));
        let (clients, admin) = (folder.join("s"), folder.join("admin/a"));
        let sockets = Sockets::bind(&clients, &admin).unwrap();
        let (configurations, changes) = mpsc::channel(1);
        let setup = Setup {
            config,
            changes,
            store: Store::default(),
            seats: Opened::open(folder.join("seats"), None).0,
            descriptions: folder.join("none"),
            metrics: None,
            host_memory,
        };
        let (stop, stopped) = oneshot::channel::<()>();
        let serves = tokio::spawn(server::run(sockets, setup, async {
            let _ = stopped.await;
        }));
        Self { folder, clients, admin, stop, serves, _configurations: configurations }
    }

    /// Waits until it has ended by a defect. Whether the next scheduler knows that it replaces one.
    #[allow(dead_code, reason = "few tests have a defect")]
    pub(crate) async fn replaced_after_defect(self) -> bool {
        let ended = self.serves.await.unwrap();
        assert!(matches!(ended, Err(Stopped::Core)), "{ended:?}");
        let replaced = Sockets::bind(&self.clients, &self.admin).unwrap().replaced();
        let _ = std::fs::remove_dir_all(self.folder);
        replaced
    }

    /// Stops it, and looks whether it ended well.
    #[allow(dead_code, reason = "not every test stops it")]
    pub(crate) async fn end(self) {
        let _ = self.stop.send(());
        self.serves.await.unwrap().unwrap();
        let _ = std::fs::remove_dir_all(self.folder);
    }
}

#[allow(dead_code, reason = "not every test connects like this")]
pub(crate) async fn connect(socket: &Path) -> Stream {
    Framed::new(UnixStream::connect(socket).await.unwrap(), Frames::default())
}

/// How a client without memory introduces itself.
#[allow(dead_code, reason = "not every test has clients that register")]
pub(crate) fn newcomer() -> Register {
    Register::newcomer(1, "x")
}
