//! A scheduler that is told to stop does so, whatever a thread of it waits for.

use std::fs::{self, OpenOptions};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use futures_util::SinkExt;
use nvshare_proto::codec::Frames;
use nvshare_proto::{AdminRequest, Reply, Request};
use tokio::net::UnixStream;
use tokio::time::sleep;
use tokio_util::codec::Framed;

/// How long something may take that has to happen.
const PATIENCE: Duration = Duration::from_secs(30);

/// The kernel module keeps who reads waiting, here a pipe to which nobody writes.
#[tokio::test]
async fn a_scheduler_stops_though_the_kernel_module_does_not_answer() {
    let folder = std::env::temp_dir().join(format!("nvshare-stop-{}", std::process::id()));
    let (socket, gpus) = (folder.join("s"), folder.join("gpus"));
    fs::create_dir_all(&gpus).unwrap();
    let config = folder.join("config.toml");
    fs::write(&config, "").unwrap();
    let mut scheduler = Command::new(env!("CARGO_BIN_EXE_nvshare-scheduler"))
        .args(["--gpu-memory", "1GiB"])
        .arg("--socket")
        .arg(&socket)
        .arg("--admin-socket")
        .arg(folder.join("admin/a"))
        .arg("--config")
        .arg(&config)
        .arg("--gpu-descriptions")
        .arg(&gpus)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let begin = Instant::now();
    let stream = loop {
        match UnixStream::connect(&socket).await {
            Ok(stream) => break stream,
            Err(error) => assert!(begin.elapsed() < PATIENCE, "{error}"),
        }
        sleep(Duration::from_millis(10)).await;
    };
    let pipe = gpus.join("0000:17:00.0/information");
    fs::create_dir(pipe.parent().unwrap()).unwrap();
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut stream = Framed::new(stream, Frames::<Reply, Request>::default());
    stream.send(Request::Admin(AdminRequest::Status)).await.unwrap();
    // The pipe opens when the scheduler reads it; now that waits for as long as this is there.
    let unanswered = OpenOptions::new().write(true).open(&pipe).unwrap();
    assert!(Command::new("kill").arg(scheduler.id().to_string()).status().unwrap().success());
    let begin = Instant::now();
    let ended = loop {
        match scheduler.try_wait().unwrap() {
            Some(ended) => break Some(ended),
            None if begin.elapsed() > PATIENCE => break None,
            None => sleep(Duration::from_millis(10)).await,
        }
    };
    if ended.is_none() {
        scheduler.kill().unwrap();
        scheduler.wait().unwrap();
    }
    drop(unanswered);
    fs::remove_dir_all(&folder).unwrap();
    assert!(ended.is_some_and(|status| status.success()), "{ended:?}");
}
