//! Calls that name memory to the driver while that memory is away, alone and beside captures of each mode: they answer as they do of
//! memory that is there, and what graphs took finds the memory.

use nvshare_harness::{Finished, PlayedScheduler, Program, World, wait_until};
use nvshare_proto::{Amount, ClientMessage, Epoch, SchedulerMessage};

const CARD: &[(&str, &str)] = &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64")];

/// Memory of the guest, in bytes.
const BYTES: u64 = 16 << 20;

/// The lines that say what calls came to.
fn said(finished: &Finished) -> Vec<&str> {
    assert!(
        finished.status.success() && finished.out.ends_with("over\n"),
        "{} {}",
        finished.out,
        finished.log
    );
    finished.out.lines().filter(|line| line.starts_with("said")).collect()
}

/// Whether a call asks about memory, and takes it nowhere.
fn is_question(line: &str) -> bool {
    ["cuPointerGetAttribute", "cuMemGetAddressRange", "cuMemGetAccess"].iter().any(|call| line.contains(call))
}

/// The guest's last line.
fn last(out: &str) -> &str {
    out.lines().last().unwrap_or_default()
}

#[test]
fn calls_that_name_memory_which_is_away_answer_as_if_it_were_there() {
    let native = Program::guest(&World::simulated(CARD), "names_parked", &[]).alone().start().finish();
    let native = said(&native);
    // With the memory on the card all the time. Of a pointer's attributes the simulated driver knows few.
    let there = Program::guest(&World::with_memory("swap", CARD), "names_parked", &[]).start().finish();
    let there = said(&there);
    for (native, there) in native.iter().zip(&there).filter(|(native, _)| !is_question(native)) {
        assert_eq!(native, there);
    }
    // 3 that ask, 15 that build graphs, and 3 that captures take; instantiating breaks a capture that is not relaxed.
    assert_eq!(native.len(), 18 + 20 + 20 + 21, "{native:?}");

    let world = World::with_memory("swap", CARD);
    let listener = PlayedScheduler::listen(&world);
    let parked = world.dir().join("parked");
    let guest = Program::guest(&world, "names_parked", &[]);
    let guest = guest.env("PARKED", &parked.to_string_lossy()).start();
    let (mut client, usage) = PlayedScheduler::accept(&listener);
    let (mut gpu, mut waits) = (usage.first().map(|usage| usage.gpu), false);
    let gpu = client.until(|message| {
        match message {
            ClientMessage::Usage(usage) => gpu = Some(usage.gpu),
            ClientMessage::ReqLock => waits = true,
            _ => {}
        }
        gpu.filter(|_| waits)
    });
    let room = Amount { gpu, bytes: BYTES };
    client.say(&[SchedulerMessage::Capacity(Amount { gpu, bytes: 1 << 30 })]);
    let epoch = |counter| Epoch { boot: 1, counter };
    let grant = |client: &mut PlayedScheduler, counter| {
        client.say(&[SchedulerMessage::LockOk {
            epoch: epoch(counter),
            quantum_ms: 60_000,
            room: vec![room],
        }]);
        client.until_running();
    };
    grant(&mut client, 0);
    for number in 0..native.len() as u64 {
        wait_until("the guest is about to ask", || {
            assert!(guest.lives(), "{} {}", guest.out(), guest.log());
            last(&guest.out()) == format!("ask {number}")
        });
        client.say(&[SchedulerMessage::DropLock { epoch: epoch(number), patience_ms: 60_000 }]);
        client.until(|m| {
            matches!(m, ClientMessage::LockReleased { .. } | ClientMessage::Idle { .. }).then_some(())
        });
        client.say(&[SchedulerMessage::Evict(room)]);
        let mut left = 0;
        client.until(|m| match m {
            ClientMessage::Room(room) => {
                left += room.bytes;
                None
            }
            ClientMessage::Evicted { .. } => Some(()),
            _ => None,
        });
        assert_eq!(left, BYTES, "all of it is away");
        std::fs::write(world.dir().join(format!("parked.{number}")), "").expect("a file");
        client.until(|m| matches!(m, ClientMessage::ReqLock).then_some(()));
        // Questions are answered from the library's list; all else waits until the memory is there.
        let answered = last(&guest.out()).starts_with("said");
        assert_eq!(answered, is_question(native[number as usize]), "{}", native[number as usize]);
        grant(&mut client, number + 1);
    }
    let guest = guest.finish();
    assert_eq!(said(&guest), there);
}
