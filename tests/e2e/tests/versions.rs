//! Parts of different versions meet: a scheduler that was downgraded, or not yet upgraded, under newer libraries.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use nvshare_harness::{Program, Scheduler, World, wait_until};
use nvshare_proto::{Reply, VERSION, codec};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];

/// The answer of a scheduler of another version to any message.
fn refusal(version: u16) -> Vec<u8> {
    let reason = format!("protocol version {VERSION}; this is version {version}");
    let mut frame = codec::encode(&Reply::Refused { reason }).expect("a frame");
    frame[4..6].copy_from_slice(&version.to_le_bytes());
    frame
}

#[test]
fn a_program_goes_on_under_a_scheduler_of_another_version_and_joins_the_next_one() {
    for version in [VERSION - 1, VERSION + 1] {
        let world = World::simulated(CARD);
        let listener = UnixListener::bind(world.socket()).expect("a socket");
        listener.set_nonblocking(true).expect("a socket");
        let (met, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let other = std::thread::spawn({
            let (met, stop) = (Arc::clone(&met), Arc::clone(&stop));
            move || {
                while !stop.load(Ordering::Relaxed) {
                    if let Ok((mut stream, _)) = listener.accept() {
                        stream.set_nonblocking(false).expect("a stream");
                        let _ = stream.read(&mut [0; 4096]);
                        let _ = stream.write_all(&refusal(version));
                        met.fetch_add(1, Ordering::Relaxed);
                    }
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
            }
        });
        let job = Program::workload(&world, "job", "--memory 128MiB --block 64MiB --full-check")
            .env("NVSHARE_LOG", "warn")
            .until_told()
            .start();
        wait_until("they have met, and met again", || met.load(Ordering::Relaxed) >= 3);
        let line = format!("protocol version {version}; this is version {VERSION}");
        wait_until("it says so", || job.log().contains(&line));
        assert_eq!(job.log().matches(&line).count(), 1, "once: {}", job.log());
        stop.store(true, Ordering::Relaxed);
        other.join().expect("the other scheduler");
        std::fs::remove_file(world.socket()).expect("a socket");
        // The client joins a scheduler of its own version.
        let _scheduler = Scheduler::start(&world, &[]);
        Scheduler::until(&world, "it joins", |status| status.find(job.pid()).is_some());
        world.stop();
        job.finish().intact();
    }
}
