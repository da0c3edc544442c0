//! A scheduler that is told to stop does so, whatever a thread of it waits for.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use futures_util::{SinkExt, StreamExt};
use nvshare_proto::codec::Frames;
use nvshare_proto::{AdminRequest, Reply, Request};
use rustix::process::{Pid, Signal, kill_process};
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
    // It has listed the GPUs for the first time before it answers.
    let mut stream = Framed::new(stream, Frames::<Reply, Request>::default());
    stream.send(Request::Admin(AdminRequest::Status)).await.unwrap();
    stream.next().await.unwrap().unwrap();
    let pipe = gpus.join("0000:17:00.0/information");
    fs::create_dir(pipe.parent().unwrap()).unwrap();
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    // The pipe can be opened when the scheduler reads it, in one of the looks to come; that waits for as long as this is there.
    let unanswered = loop {
        stream.send(Request::Admin(AdminRequest::Status)).await.unwrap();
        stream.next().await.unwrap().unwrap();
        match OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(&pipe) {
            Ok(pipe) => break pipe,
            Err(error) => assert!(begin.elapsed() < PATIENCE, "{error}"),
        }
        sleep(Duration::from_millis(10)).await;
    };
    kill_process(Pid::from_child(&scheduler), Signal::TERM).unwrap();
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
