//! The cost of reading metrics beside 1,000 clients with long names: a scrape, and a client's wait for its grant meanwhile. Prints
//! a table: `cargo bench -p nvshare-scheduler`.

mod daemon;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use daemon::{columns, grants, join, row, runtime, say};
use nvshare_core::Config;
use nvshare_proto::ClientMessage;
use nvshare_scheduler::metrics::Address;
use nvshare_scheduler::seats::Opened;
use nvshare_scheduler::server::{self, Setup};
use nvshare_scheduler::settings::Store;
use nvshare_scheduler::sockets::Sockets;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::mpsc;

/// A scheduler on a thread of its own.
fn start(folder: &Path) -> [PathBuf; 2] {
    let [clients, metrics] = ["s", "metrics"].map(|name| folder.join(name));
    let (place, admin) = (clients.clone(), folder.join("admin/a"));
    let seats = folder.join("seats");
    let descriptions = folder.join("none");
    let address = Some(Address::Unix(metrics.clone()));
    std::thread::spawn(move || {
        runtime().block_on(async {
            let sockets = Sockets::bind(&place, &admin).expect("sockets");
            let (_configurations, changes) = mpsc::channel(1);
            let config = Config { gpu_memory: Some(16 << 30), ..Config::default() };
            let store = Store::default();
            let seats = Opened::open(seats, None).0;
            let setup =
                Setup { config, changes, store, seats, descriptions, metrics: address, host_memory: None };
            server::run(sockets, setup, std::future::pending()).await.expect("it goes on");
        });
    });
    [clients, metrics]
}

async fn ask(metrics: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(metrics).await.expect("metrics");
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").await.expect("a request");
    stream
}

async fn scrape(metrics: &Path) -> String {
    let mut text = String::new();
    ask(metrics).await.read_to_string(&mut text).await.expect("an answer");
    text
}

/// Scrapes ten times a second for as long as it may; how often that was.
fn read_on(metrics: &Path, length: Duration) -> u32 {
    runtime().block_on(async {
        let (begin, mut count) = (Instant::now(), 0);
        while begin.elapsed() < length {
            scrape(metrics).await;
            count += 1;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        count
    })
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let quick = std::env::args().any(|argument| argument == "--test");
    let (clients, times, length) = if quick { (20, 20, 50) } else { (1000, 5000, 12_000) };
    let folder = std::env::temp_dir().join(format!("nvshare-scrape-{}", std::process::id()));
    let [socket, metrics] = start(&folder);
    while UnixStream::connect(&metrics).await.is_err() || UnixStream::connect(&socket).await.is_err() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let mut others = Vec::new();
    for i in 0..clients {
        let name = format!("{i:04}-a-program-with-a-name-that-is-as-long-as-a-name-may-be-here");
        others.push(join(&socket, name, (i % 8) as u8).await);
    }
    for client in &mut others {
        say(client, ClientMessage::ReqLock).await;
    }
    let mut client = join(&socket, "grants".to_owned(), 200).await;
    columns(&format!("{clients} clients, 8 GPUs; ms"));
    let (mut took, mut text) = (Vec::new(), String::new());
    for _ in 0..if quick { 2 } else { 40 } {
        // The text that is kept is too old by then.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let begin = Instant::now();
        text = scrape(&metrics).await;
        took.push(begin.elapsed());
    }
    took.sort_unstable();
    row("a scrape", &took);
    println!("    {} lines, {:.1} MB", text.lines().count(), text.len() as f64 / 1e6);
    row("a grant, nobody reads", &grants(&mut client, times).await);
    let readers: Vec<_> = (0..10)
        .map(|_| {
            let metrics = metrics.clone();
            std::thread::spawn(move || read_on(&metrics, Duration::from_millis(length)))
        })
        .collect();
    row("a grant, ten scrape", &grants(&mut client, times).await);
    let count: u32 = readers.into_iter().map(|reader| reader.join().expect("a reader")).sum();
    println!("    {count} scrapes in {:.1} s", length as f64 / 1e3);
    let mut silent = Vec::new();
    for _ in 0..10 {
        silent.push(ask(&metrics).await);
    }
    row("a grant, ten ask and do not read", &grants(&mut client, times).await);
    let _ = std::fs::remove_dir_all(folder);
}
