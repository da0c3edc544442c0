//! Metrics: the figures that Prometheus reads about real programs, and readers that misbehave.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;

use nvshare_harness::{Program, Running, Scheduler, World, wait_until};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];
const JOB: &str = "--memory 768MiB --block 64MiB --kernel-us 1000";

/// The answer for a path: the status line, and the rest.
fn ask(mut stream: impl Read + Write, path: &str) -> (String, String) {
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").expect("a request");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text}"));
    let length = format!("Content-Length: {}", body.len());
    assert!(head.lines().any(|line| line == length), "{head}");
    (head.lines().next().unwrap_or_default().to_owned(), body.to_owned())
}

/// The value of the only series with this name, or of a program's.
fn value(text: &str, name: &str, program: &str) -> f64 {
    let program = format!("program=\"{program}");
    let mut lines = text.lines().filter(|line| {
        line.split(['{', ' ']).next() == Some(name) && (!line.contains("program=") || line.contains(&program))
    });
    let line = lines.next().unwrap_or_else(|| panic!("no {name} in {text}"));
    line.rsplit(' ').next().and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{line}"))
}

#[test]
fn metrics_count_the_work_of_two_programs() {
    let world = World::simulated(CARD);
    let socket = world.dir().join("metrics.sock");
    let arguments = ["--gpu-memory", "1GiB", "--tq", "0.2", "--metrics", &socket.to_string_lossy()];
    let _scheduler = Scheduler::start(&world, &arguments);
    wait_until("metrics are served", || UnixStream::connect(&socket).is_ok());
    let get = |path| ask(UnixStream::connect(&socket).expect("a socket"), path);
    for path in ["/healthz", "/readyz"] {
        assert_eq!(get(path), ("HTTP/1.1 200 OK".to_owned(), "ok\n".to_owned()));
    }
    assert_eq!(get("/").0, "HTTP/1.1 404 Not Found");
    let jobs =
        ["a", "b"].map(|name| Program::workload(&world, name, JOB).until_told().waits_for_go().start());
    Running::go(&[&jobs[0], &jobs[1]]);
    Scheduler::until_turns(&world, &[&jobs[0], &jobs[1]], 4);
    let mut text = String::new();
    // Counters may be told some turns later.
    wait_until("what has moved is counted", || {
        text = get("/metrics").1;
        let moved = |name: &str| value(&text, name, "nvshare") > f64::from(1 << 29);
        moved("nvshare_tenant_evicted_bytes_total")
            && moved("nvshare_tenant_restored_bytes_total")
            // Managed memory is copied whole.
            && moved("nvshare_tenant_copied_out_bytes_total")
            && moved("nvshare_tenant_copied_in_bytes_total")
            // A program that looks idle gives the lock back without a drain.
            && value(&text, "nvshare_gpu_drain_seconds_count", "") >= 1.0
    });
    // Both are one tenant: they have the same user and the same name.
    assert_eq!(value(&text, "nvshare_tenant_clients", "nvshare"), 2.0);
    assert_eq!(value(&text, "nvshare_tenant_allocated_bytes", "nvshare"), f64::from(2 * (768 << 20)));
    assert_eq!(value(&text, "nvshare_gpu_capacity_bytes", ""), f64::from(1 << 30));
    assert!(value(&text, "nvshare_tenant_grants_total", "nvshare") >= 4.0);
    assert!(value(&text, "nvshare_gpu_hand_over_seconds_count", "") >= 1.0);
    assert!(value(&text, "nvshare_scheduler_loop_seconds_count", "") >= 10.0);
    let held = value(&text, "nvshare_tenant_held_seconds_total", "nvshare");
    // The held time grows while a client holds the GPU.
    wait_until("held time grows", || {
        value(&get("/metrics").1, "nvshare_tenant_held_seconds_total", "nvshare") > held
    });
    world.stop_intact(jobs);
}

#[test]
fn readers_that_do_not_read_are_in_nobodys_way() {
    let world = World::simulated(CARD);
    let scheduler = Scheduler::start(&world, &["--metrics", "127.0.0.1:0"]);
    let mut address = String::new();
    wait_until("metrics are served", || {
        let log = scheduler.log();
        let place = log.split("metrics at http://").nth(1).and_then(|rest| rest.split('/').next());
        address = place.unwrap_or_default().to_owned();
        !address.is_empty()
    });
    let connect = || TcpStream::connect(&address).expect("a connection");
    let silent: Vec<TcpStream> = (0..20).map(|_| connect()).collect();
    for mut stream in &silent[..10] {
        write!(stream, "GET /metrics HTTP/1.1\r\n\r\n").expect("a request");
    }
    let (status, text) = ask(connect(), "/metrics");
    assert_eq!((status.as_str(), text.ends_with("# EOF\n")), ("HTTP/1.1 200 OK", true));
    let job = Program::workload(&world, "job", &format!("{JOB} --steps 3")).start().finish();
    job.intact();
    drop(silent);
}

/// Anybody who can reach the address can connect to it and say nothing, or ask for metrics and read nothing. A probe that is not
/// answered ends the scheduler.
#[test]
fn connections_that_say_or_read_nothing_close_no_probe() {
    let world = World::simulated(CARD);
    let socket = world.dir().join("metrics.sock");
    let _scheduler = Scheduler::start(&world, &["--metrics", &socket.to_string_lossy()]);
    wait_until("metrics are served", || UnixStream::connect(&socket).is_ok());
    let connect = || UnixStream::connect(&socket).expect("a connection");
    let reader = |_| {
        let mut stream = connect();
        write!(stream, "GET /metrics HTTP/1.1\r\n\r\n").expect("a request");
        stream
    };
    let readers: Vec<UnixStream> = (0..100).map(reader).collect();
    let silent: Vec<UnixStream> = (0..100).map(|_| connect()).collect();
    for path in ["/healthz", "/readyz"] {
        assert_eq!(ask(connect(), path), ("HTTP/1.1 200 OK".to_owned(), "ok\n".to_owned()));
    }
    let has_ended = |mut stream: &UnixStream| {
        stream.set_nonblocking(true).expect("a stream");
        matches!(stream.read(&mut [0]), Ok(0))
    };
    let ended = || silent.iter().map(has_ended).collect::<Vec<_>>();
    wait_until("36 made place", || ended().iter().filter(|has_ended| **has_ended).count() >= 36);
    assert!(ended()[..36].iter().all(|has_ended| *has_ended), "the oldest: {:?}", ended());
    drop(readers);
    wait_until("metrics are read again", || {
        let mut stream = connect();
        let mut text = String::new();
        write!(stream, "GET /metrics HTTP/1.1\r\n\r\n").is_ok()
            && stream.read_to_string(&mut text).is_ok()
            && text.ends_with("# EOF\n")
    });
}

#[test]
fn an_address_that_is_taken_is_said_and_stops_nothing() {
    let world = World::simulated(CARD);
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("its address").to_string();
    let scheduler = Scheduler::start(&world, &["--metrics", &address]);
    wait_until("it is said", || {
        scheduler.log().contains(&format!(
            "no metrics at http://{address}/metrics: another program listens there; it is tried again every 10 s"
        ))
    });
    let job = Program::workload(&world, "job", &format!("{JOB} --steps 3")).start().finish();
    job.intact();
    let refused = Scheduler::command(&world, &["--metrics", "9464"]).output().expect("it runs");
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && error.contains("\"9464\" is no address; accepted: 127.0.0.1:9464"),
        "{error}"
    );
}
