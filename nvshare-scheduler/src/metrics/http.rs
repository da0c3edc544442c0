//! Answers readers of metrics, on a thread of its own. However many read, the scheduler's own thread is asked for a
//! snapshot a few times a second at most, and waits for no reader. Connections that say nothing, and readers of metrics, take no place
//! from a question whether the scheduler is alive.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::{Arc, Mutex as StdMutex};
use std::time::{Duration, Instant};

use nvshare_proto::ThrottledLine;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::{Mutex, Semaphore, mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{interval, sleep, timeout};
use tracing::{error, info};

use super::shown::Shown;
use super::{Address, Counters, Snapshot};
use crate::lock::lock;
use crate::log;

/// A question to the scheduler's own thread.
#[derive(Debug)]
pub(crate) enum Question {
    /// Whether the thread answers.
    Alive(oneshot::Sender<()>),
    /// The present state.
    Snapshot(oneshot::Sender<Snapshot>),
}

/// Readers that ask within this time get the same text.
const FRESH: Duration = Duration::from_millis(250);
/// Time after which an address that was not available is tried again.
const RETRY: Duration = Duration::from_secs(10);
/// Connections that have not said yet what they ask for, at most. The oldest of them makes place for a new one.
const SILENT: usize = 64;
/// Readers of metrics at a time, at most.
const READERS: usize = 32;
/// Questions whether the scheduler is alive at a time, at most.
const PROBES: usize = 32;
/// Longest request, in bytes.
const MAX_REQUEST: usize = 8192;
/// Longest time for a request to arrive.
const REQUEST_PATIENCE: Duration = Duration::from_secs(5);
/// Longest time for an answer to be read.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often figures of tenants that have gone are looked for.
const FORGET_EVERY: Duration = Duration::from_secs(10);
/// A scheduler that does not answer for this long is not ready, or not healthy.
const READY: Duration = Duration::from_secs(1);
const HEALTHY: Duration = Duration::from_secs(5);

/// Makes the text.
struct Page {
    registry: Registry,
    shown: Shown,
    questions: mpsc::Sender<Question>,
    last: Mutex<Option<(Instant, Arc<String>)>>,
}

/// Starts the thread that serves metrics, and forgets old ones.
///
/// # Errors
/// The system cannot start a thread.
pub(crate) fn serve(
    address: Address,
    mut registry: Registry,
    counters: Arc<Counters>,
    questions: mpsc::Sender<Question>,
) -> io::Result<()> {
    let shown = Shown::new(Arc::clone(&counters));
    registry.register_collector(Box::new(shown.clone()));
    let page = Arc::new(Page { registry, shown, questions, last: Mutex::new(None) });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    let run = move || {
        runtime.spawn(forget_old(counters));
        runtime.block_on(listen(address, page));
    };
    std::thread::Builder::new().name("metrics".to_owned()).spawn(run).map(drop)
}

/// The time of events begins with the scheduler, as this does.
async fn forget_old(counters: Arc<Counters>) {
    let begin = Instant::now();
    let mut again = interval(FORGET_EVERY);
    loop {
        again.tick().await;
        counters.forget_old(begin.elapsed());
    }
}

async fn listen(address: Address, page: Arc<Page>) {
    let readers = Readers::default();
    let mut reported = None;
    loop {
        let error = match &address {
            Address::Tcp(socket) => match TcpListener::bind(socket).await {
                Ok(listener) => {
                    let socket = listener.local_addr().unwrap_or(*socket);
                    info!("metrics at {}", Address::Tcp(socket));
                    loop {
                        match listener.accept().await {
                            Ok((stream, _)) => readers.accept(stream, &page),
                            Err(error) => refused(&error).await,
                        }
                    }
                }
                Err(error) => error,
            },
            Address::Unix(path) => match bind(path).await {
                Ok(listener) => {
                    info!("metrics at {address}");
                    loop {
                        match listener.accept().await {
                            Ok((stream, _)) => readers.accept(stream, &page),
                            Err(error) => refused(&error).await,
                        }
                    }
                }
                Err(error) => error,
            },
        };
        if reported != Some(error.kind()) {
            error!(
                "no metrics at {address}: {}; it is tried again every {} s",
                why(&address, &error),
                RETRY.as_secs()
            );
            reported = Some(error.kind());
        }
        sleep(RETRY).await;
    }
}

/// Binds a socket, in place of one at which nobody listens any more.
async fn bind(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            match UnixStream::connect(path).await {
                Err(stale) if stale.kind() == ErrorKind::ConnectionRefused => std::fs::remove_file(path)?,
                _ => return Err(error),
            }
            UnixListener::bind(path)
        }
        bound => bound,
    }
}

fn why(address: &Address, error: &io::Error) -> String {
    match (error.kind(), address) {
        (ErrorKind::AddrInUse, _) => "another program listens there".to_owned(),
        (ErrorKind::AddrNotAvailable, _) => "this machine has no such address".to_owned(),
        (ErrorKind::PermissionDenied, Address::Tcp(socket)) if socket.port() < 1024 => {
            format!("port {} is privileged: choose one from 1024 on", socket.port())
        }
        _ => error.to_string(),
    }
}

async fn refused(error: &io::Error) {
    // The process may be out of descriptors: that passes, and must not become a busy loop.
    static NOT_ACCEPTED: ThrottledLine = ThrottledLine::new(log::warn);
    NOT_ACCEPTED.say(format_args!("a reader of metrics cannot be accepted: {error}"));
    sleep(Duration::from_millis(100)).await;
}

/// The connections, by what they wait for.
#[derive(Debug, Clone)]
struct Readers {
    /// Tasks of those that have not said what they ask for, in the order in which they came.
    silent: Arc<StdMutex<BTreeMap<u64, AbortHandle>>>,
    metrics: Arc<Semaphore>,
    probes: Arc<Semaphore>,
}

impl Default for Readers {
    fn default() -> Self {
        let [metrics, probes] = [READERS, PROBES].map(|places| Arc::new(Semaphore::new(places)));
        Self { silent: Arc::default(), metrics, probes }
    }
}

impl Readers {
    fn silent(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, AbortHandle>> {
        lock(&self.silent)
    }

    /// Serves a connection. The oldest silent one makes place for it.
    fn accept(&self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, page: &Arc<Page>) {
        let mut silent = self.silent();
        let number = silent.last_key_value().map_or(0, |(last, _)| last + 1);
        let (readers, page) = (self.clone(), Arc::clone(page));
        let task = tokio::spawn(async move { readers.serve(number, stream, &page).await });
        silent.insert(number, task.abort_handle());
        if silent.len() > SILENT
            && let Some((_, oldest)) = silent.pop_first()
        {
            oldest.abort();
        }
    }

    async fn serve(&self, number: u64, mut stream: impl AsyncRead + AsyncWrite + Unpin, page: &Page) {
        let asked = timeout(REQUEST_PATIENCE, request(&mut stream)).await;
        // From here on nobody ends it but itself.
        self.silent().remove(&number);
        let Ok(Some(asked)) = asked else { return };
        let places = if asked.path == "/metrics" { &self.metrics } else { &self.probes };
        // Without a place the connection is closed.
        let Ok(_place) = places.try_acquire() else { return };
        serve_one(stream, &asked, page).await;
    }
}

/// A request that was read.
#[derive(Debug, PartialEq, Eq)]
struct Asked {
    method: String,
    path: String,
}

/// Answers a request.
async fn serve_one(mut stream: impl AsyncWrite + Unpin, asked: &Asked, page: &Page) {
    let is_taken = matches!(asked.method.as_str(), "GET" | "HEAD");
    let (status, text) = if is_taken {
        page.answer(&asked.path).await
    } else {
        ("405 Method Not Allowed", Arc::new("the methods are GET and HEAD\n".to_owned()))
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {}\r\nContent-Length: {}\r\n{}Connection: close\r\n\r\n",
        if is_taken && asked.path == "/metrics" {
            "application/openmetrics-text; version=1.0.0; charset=utf-8"
        } else {
            "text/plain; charset=utf-8"
        },
        text.len(),
        if is_taken { "" } else { "Allow: GET, HEAD\r\n" }
    );
    let _ = timeout(PATIENCE, async {
        stream.write_all(head.as_bytes()).await?;
        if asked.method != "HEAD" {
            stream.write_all(text.as_bytes()).await?;
        }
        stream.shutdown().await
    })
    .await;
}

/// Reads a request; none: the bytes are none.
async fn request(stream: &mut (impl AsyncRead + Unpin)) -> Option<Asked> {
    let mut text = Vec::new();
    let mut chunk = [0; 1024];
    while !text.windows(4).any(|end| end == b"\r\n\r\n") {
        let read = stream.read(&mut chunk).await.ok().filter(|&read| read > 0)?;
        text.extend_from_slice(&chunk[..read]);
        if text.len() > MAX_REQUEST {
            return None;
        }
    }
    let text = String::from_utf8_lossy(&text);
    let mut words = text.lines().next()?.split(' ');
    let (method, target) = (words.next()?, words.next()?);
    let path = target.split('?').next().unwrap_or(target);
    let is_http = words.next()?.starts_with("HTTP/1.");
    is_http.then(|| Asked { method: method.to_owned(), path: path.to_owned() })
}

impl Page {
    async fn answer(&self, path: &str) -> (&'static str, Arc<String>) {
        let text = |text: &str| Arc::new(text.to_owned());
        match path {
            "/metrics" => match self.text().await {
                Some(text) => ("200 OK", text),
                None => ("503 Service Unavailable", text("the scheduler does not answer\n")),
            },
            "/healthz" | "/readyz" => {
                let patience = if path == "/readyz" { READY } else { HEALTHY };
                match self.ask(Question::Alive, patience).await {
                    Some(()) => ("200 OK", text("ok\n")),
                    None => ("503 Service Unavailable", text("the scheduler does not answer\n")),
                }
            }
            _ => ("404 Not Found", text("there are /metrics, /healthz and /readyz\n")),
        }
    }

    async fn ask<T>(&self, question: fn(oneshot::Sender<T>) -> Question, patience: Duration) -> Option<T> {
        let (answer, answered) = oneshot::channel();
        let asked = async {
            self.questions.send(question(answer)).await.ok()?;
            answered.await.ok()
        };
        timeout(patience, asked).await.ok().flatten()
    }

    /// The text, which may be as old as [`FRESH`].
    async fn text(&self) -> Option<Arc<String>> {
        let mut last = self.last.lock().await;
        if let Some((made, text)) = last.as_ref()
            && made.elapsed() < FRESH
        {
            return Some(Arc::clone(text));
        }
        self.shown.set(self.ask(Question::Snapshot, HEALTHY).await?);
        let mut text = String::new();
        encode(&mut text, &self.registry).ok()?;
        let text = Arc::new(text);
        *last = Some((Instant::now(), Arc::clone(&text)));
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_cannot_be_had_is_explained() {
        let port = |port: u16| Address::Tcp(([127, 0, 0, 1], port).into());
        let why = |address, kind: ErrorKind| why(&address, &kind.into());
        assert_eq!(
            why(port(80), ErrorKind::PermissionDenied),
            "port 80 is privileged: choose one from 1024 on"
        );
        assert_eq!(why(port(8000), ErrorKind::AddrInUse), "another program listens there");
        assert_eq!(why(Address::Unix("/a".into()), ErrorKind::PermissionDenied), "permission denied");
    }

    #[tokio::test]
    async fn bytes_that_are_no_request_are_told_apart() {
        for (bytes, asked) in [
            (&b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"[..], Some(("GET", "/metrics"))),
            (b"HEAD /metrics?name=x HTTP/1.0\r\n\r\n", Some(("HEAD", "/metrics"))),
            (b"POST /metrics HTTP/1.1\r\n\r\n", Some(("POST", "/metrics"))),
            (b"GET /metrics\r\n\r\n", None),
            (b"\r\n\r\n", None),
            (b"GET /metrics HTTP/1.1\r\n", None),
            (&[b'x'; MAX_REQUEST + 9], None),
        ] {
            let read = request(&mut &bytes[..]).await;
            let read = read.as_ref().map(|asked| (asked.method.as_str(), asked.path.as_str()));
            assert_eq!(read, asked, "{}", String::from_utf8_lossy(bytes));
        }
    }

    /// A page that is fresh for an hour, of a scheduler that answers nothing.
    fn page(text: String) -> Arc<Page> {
        let (questions, _) = mpsc::channel(1);
        let last = Mutex::new(Some((Instant::now() + Duration::from_secs(3600), Arc::new(text))));
        let shown = Shown::new(Counters::new(&mut Registry::default()).into());
        Arc::new(Page { registry: Registry::default(), shown, questions, last })
    }

    #[tokio::test]
    async fn the_oldest_silent_connection_makes_place_for_a_new_one() {
        let (page, readers) = (page(String::new()), Readers::default());
        let connect = |_| {
            let (ours, served) = tokio::io::duplex(MAX_REQUEST);
            readers.accept(served, &page);
            ours
        };
        let mut connections: Vec<_> = (0..=SILENT).map(connect).collect();
        let mut newest = connections.pop().unwrap();
        newest.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        newest.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 404 Not Found"), "{answer}");
        let mut oldest = connections.remove(0);
        assert_eq!(oldest.read(&mut [0]).await.unwrap(), 0, "the oldest is closed");
        assert_eq!(readers.silent().len(), SILENT - 1, "and no other one is");
    }

    #[tokio::test]
    async fn a_reader_that_reads_nothing_is_in_no_other_readers_way() {
        const ASKS: &[u8] = b"GET /metrics HTTP/1.1\r\n\r\n";
        // More than a connection takes.
        let page = page("x".repeat(1 << 16));
        let serve = |mut stream| {
            let page = Arc::clone(&page);
            tokio::spawn(async move {
                let path = request(&mut stream).await.expect("a request");
                serve_one(stream, &path, &page).await;
            })
        };
        let (mut silent, served) = tokio::io::duplex(64);
        let first = serve(served);
        silent.write_all(ASKS).await.unwrap();
        silent.read_exact(&mut [0; 8]).await.unwrap();
        let (mut other, served) = tokio::io::duplex(64);
        serve(served);
        other.write_all(ASKS).await.unwrap();
        let mut answer = String::new();
        other.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with('x'));
        assert!(!first.is_finished(), "the other one waited until the first was given up");
    }
}
