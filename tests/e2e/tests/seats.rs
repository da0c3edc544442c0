//! Seats: what containers get. Each has a folder with a socket, which says whose a process is, and limits.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use nvshare_harness::{Program, Running, Scheduler, World, patience, wait_until};
use nvshare_proto::{
    AdminReply, AdminRequest, ClientMessage, ComputeLimit, GpuUuid, Occupant, Register, Reply, Request,
    SchedulerMessage, Seat, SeatName, SeatStatus, Slot, TenantSettings, Usage, Wishes, codec,
};

pub(crate) const CARDS: &[(&str, &str)] =
    &[("NVSIM_MEMORY", "1GiB"), ("NVSIM_SCALE", "64"), ("NVSIM_GPUS", "2")];
pub(crate) const MIB: u64 = 1 << 20;

/// A simulated card.
pub(crate) fn card(number: u8) -> GpuUuid {
    format!("GPU-51600000-0000-4000-8000-0000000000{number:02x}").parse().expect("the simulated card")
}

/// Places of a scheduler in a world: the folder of seats must not be in that of the clients' socket.
pub(crate) struct Places {
    pub(crate) common: String,
    seats: PathBuf,
}

impl Places {
    pub(crate) fn of(world: &World) -> Self {
        Self { common: text(&world.dir().join("common/scheduler.sock")), seats: world.dir().join("seats") }
    }

    pub(crate) fn start(&self, world: &World) -> Scheduler {
        self.start_with(world, &[])
    }

    pub(crate) fn start_with(&self, world: &World, options: &[&str]) -> Scheduler {
        Scheduler::start(world, &[&self.options()[..], options].concat())
    }

    /// The options of a scheduler that has these places.
    pub(crate) fn options(&self) -> [&str; 8] {
        let seats = self.seats.to_str().expect("a path");
        ["--socket", &self.common, "--seats", seats, "--gpu-memory", "1GiB", "--tq", "0.1"]
    }

    fn folder(&self, name: SeatName) -> PathBuf {
        self.seats.join(name.to_string())
    }

    pub(crate) fn socket(&self, name: SeatName) -> PathBuf {
        self.folder(name).join("scheduler.sock")
    }

    fn limits(&self, name: SeatName) -> String {
        std::fs::read_to_string(self.folder(name).join("limits")).expect("limits")
    }

    /// A program of a seat, which has the variables in the seat's file.
    pub(crate) fn program(&self, program: Program, name: SeatName) -> Program {
        let program = program.env("NVSHARE_SOCKET", &text(&self.socket(name)));
        self.limits(name).lines().fold(program, |program, line| {
            let (variable, value) = line.split_once('=').expect("a variable");
            program.env(variable, value)
        })
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

pub(crate) fn seat(number: u32, gpu: u8, given: TenantSettings) -> Seat {
    Seat { slots: vec![Slot { gpu: card(gpu), number }], given }
}

fn memory(bytes: u64) -> TenantSettings {
    TenantSettings { memory: Some(bytes), ..TenantSettings::default() }
}

/// A scheduler's answers to frames, until it says nothing more or a whole answer is there.
fn say(stream: &mut UnixStream, requests: &[Request]) -> Vec<Reply> {
    stream.set_read_timeout(Some(patience())).expect("a time");
    for request in requests {
        stream.write_all(&codec::encode(request).expect("a frame")).expect("sent");
    }
    let (mut bytes, mut chunk, mut replies) = (Vec::new(), [0; 8192], Vec::new());
    loop {
        while let Some((used, reply)) = codec::decode::<Reply>(&bytes).expect("a frame") {
            bytes.drain(..used);
            let is_last = matches!(
                reply,
                Reply::Refused { .. } | Reply::Admin(AdminReply::End | AdminReply::Done { .. })
            );
            replies.push(reply);
            if is_last {
                return replies;
            }
        }
        match stream.read(&mut chunk).expect("an answer") {
            0 => return replies,
            read => bytes.extend_from_slice(&chunk[..read]),
        }
    }
}

pub(crate) fn ask(socket: &Path, request: AdminRequest) -> Vec<Reply> {
    say(&mut UnixStream::connect(socket).expect("it serves"), &[Request::Admin(request)])
}

/// The answer to an administrator's request that was obeyed.
pub(crate) fn done(world: &World, request: AdminRequest) -> String {
    match ask(&world.admin_socket(), request).pop() {
        Some(Reply::Admin(AdminReply::Done { text })) => text,
        other => panic!("{other:?}"),
    }
}

fn refused(replies: Vec<Reply>) -> String {
    match replies.into_iter().last() {
        Some(Reply::Refused { reason }) => reason,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn make(world: &World, seat: &Seat) -> SeatName {
    let said = done(world, AdminRequest::Seat(seat.clone()));
    assert!(said.starts_with(&format!("seat {} ", seat.name())), "{said}");
    seat.name()
}

fn row(world: &World, name: SeatName) -> SeatStatus {
    Scheduler::status(world).seats.into_iter().find(|row| row.name == name).expect("a row of the seat")
}

const HOLDING: &str = "--memory 192MiB --block 64MiB --kernel-us 1000 --full-check";

#[test]
fn a_seats_processes_share_one_limit_and_their_socket_says_whose_they_are() {
    let world = World::simulated(CARDS);
    let places = Places::of(&world);
    let _scheduler = places.start(&world);
    assert!(!places.seats.exists(), "nobody has asked for a seat");
    let limited = make(&world, &seat(0, 0, memory(100 * MIB)));
    let mode = |path: &Path| std::fs::metadata(path).expect("a file").permissions().mode() & 0o777;
    let folder = places.folder(limited);
    let modes =
        [folder.clone(), folder.join("scheduler.sock"), folder.join("limits")].map(|path| mode(&path));
    assert_eq!(modes, [0o755, 0o666, 0o444]);
    // Without a container's control group, and without a run that they name: the listener alone says that they are one tenant.
    let program = Program::guest(&world, "tenant", &[]);
    places.program(program, limited).start().finish().passed();
}

#[test]
fn seats_are_jobs_of_their_own_and_take_turns() {
    let world = World::simulated(CARDS);
    let places = Places::of(&world);
    let _scheduler = places.start(&world);
    let wide = "--memory 640MiB --block 64MiB --kernel-us 1000 --full-check";
    let start = |job: &str, number| {
        let name = make(&world, &seat(number, 0, TenantSettings::default()));
        assert_eq!(places.limits(name), "");
        let program = Program::workload(&world, job, wide).until_told().waits_for_go();
        (places.program(program, name).start(), name)
    };
    let ((a, one), (b, other)) = (start("a", 0), start("b", 1));
    let beside = Program::workload(&world, "beside", "--memory 64MiB --block 64MiB --kernel-us 1000");
    let beside = places.program(beside.until_told().waits_for_go(), one).start();
    Running::go(&[&a, &b, &beside]);
    Scheduler::until_turns(&world, &[&a, &b], 3);
    let holder = Occupant { namespace: "lab".into(), pod: "train-0".into(), container: "main".into() };
    let said = done(&world, AdminRequest::OccupySeats(vec![(one, Some(holder.clone()))]));
    assert_eq!(said, "seats with other holders: 1");

    let status = Scheduler::status(&world);
    let processes = [&a, &b, &beside].map(|job| status.client(job.pid()).share.processes);
    assert_eq!(processes, [2, 1, 2]);
    // Either may have come first.
    let mut clients = [&a, &beside].map(|job| status.client(job.pid()).client);
    clients.sort_unstable();
    let shown = row(&world, one);
    assert_eq!((shown.occupant.as_ref(), &shown.clients[..]), (Some(&holder), &clients[..]));
    let Output { stdout, .. } = Scheduler::ctl(&world, &["status"]);
    let shown = String::from_utf8_lossy(&stdout).into_owned();
    assert_eq!(shown.matches("lab/train-0/main").count(), 2, "{shown}");
    assert!(shown.contains("seats that containers have: 1\n"), "{shown}");

    // At a seat's socket, its own clients are shown, and sums of others.
    let replies = ask(&places.socket(one), AdminRequest::Status);
    let clients: BTreeSet<u32> = replies
        .iter()
        .filter_map(|reply| match reply {
            Reply::Admin(AdminReply::Client(client)) => Some(client.pid),
            _ => None,
        })
        .collect();
    assert_eq!(clients, BTreeSet::from([a.pid(), beside.pid()]));
    assert!(!format!("{replies:?}").contains(&format!("{other:?}")), "{replies:?}");
    let others = replies.iter().find_map(|reply| match reply {
        Reply::Admin(AdminReply::Gpu(gpu)) if gpu.gpu == card(0) => gpu.others,
        _ => None,
    });
    assert_eq!(others.map(|others| (others.clients, others.allocated)), Some((1, 640 * MIB)));
    // The same user sees nothing of seats at the common socket.
    let common = ask(Path::new(&places.common), AdminRequest::Status);
    let is_hidden =
        |reply: &Reply| !matches!(reply, Reply::Admin(AdminReply::Client(_) | AdminReply::Seat(_)));
    assert!(common.iter().all(is_hidden), "{common:?}");
    world.stop_intact([a, b, beside]);
}

#[test]
fn a_seats_processes_have_the_seats_gpus_alone() {
    let world = World::simulated(CARDS);
    let places = Places::of(&world);
    let _scheduler = places.start(&world);
    let name = make(&world, &seat(0, 1, TenantSettings::default()));
    let usage = |number| Usage {
        gpu: card(number),
        total: 1024 * MIB,
        limit: 0,
        allocated: 0,
        absent: 0,
        immovable: 0,
    };
    let register = |usage| Request::Register(Register { usage, ..Register::newcomer(1, "x") });
    let reason = format!("{} is no GPU of this seat, which has {}", card(0), card(1));
    for requests in [
        vec![register(vec![usage(1), usage(0)])],
        vec![register(vec![usage(1)]), Request::Client(ClientMessage::Usage(usage(0)))],
    ] {
        let mut stream = UnixStream::connect(places.socket(name)).expect("it serves");
        assert_eq!(refused(say(&mut stream, &requests)), reason);
    }
    // A program whose only card is that of the seat runs.
    let job = Program::workload(&world, "job", "--memory 128MiB --block 64MiB --steps 3");
    places.program(job.env("CUDA_VISIBLE_DEVICES", "1"), name).start().finish().intact();
}

#[test]
fn limits_of_a_seat_change_while_its_programs_run_and_cut_nothing() {
    let world = World::simulated(CARDS);
    let places = Places::of(&world);
    let scheduler = places.start(&world);
    let given = TenantSettings { weight: Some(50), compute: Some(40), ..memory(512 * MIB) };
    let name = make(&world, &seat(0, 0, given));
    let job = Program::workload(&world, "job", HOLDING).until_told().waits_for_go();
    let job = job.env("NVSHARE_SOCKET", &text(&places.socket(name))).start();
    let frugal = Program::workload(&world, "frugal", "--memory 64MiB --block 64MiB --kernel-us 1000");
    let frugal = places.program(frugal.until_told().waits_for_go(), name);
    let frugal = frugal.env("NVSHARE_MEM_LIMIT", "256MiB").env("NVSHARE_WEIGHT", "200").start();
    Running::go(&[&job, &frugal]);
    let has = |job: &Running, bytes, weight, percent: Option<u8>| {
        let what = format!("{bytes} bytes, weight {weight}, {percent:?} %");
        Scheduler::until(&world, &what, |status| {
            status.find(job.pid()).is_some_and(|client| {
                let limits: Vec<u64> = client.usage.iter().map(|usage| usage.limit).collect();
                let compute = client.share.compute.first().map(|limit| limit.percent);
                limits == [bytes] && (client.share.weight, compute) == (weight, percent)
            })
        });
    };
    has(&job, 512 * MIB, 50, Some(40));
    // A program asks for less, and not for more.
    has(&frugal, 256 * MIB, 50, Some(40));
    let clients = row(&world, name).clients;
    assert_eq!(done(&world, AdminRequest::Seat(seat(0, 0, given))), format!("seat {name} is there"));
    let more = TenantSettings { weight: Some(70), ..memory(768 * MIB) };
    make(&world, &seat(0, 0, more));
    assert_eq!(places.limits(name), "NVSHARE_MEM_LIMIT=805306368\nNVSHARE_WEIGHT=70\n");
    has(&job, 768 * MIB, 70, None);
    has(&frugal, 256 * MIB, 70, None);
    make(&world, &seat(0, 0, TenantSettings::default()));
    has(&job, 0, 100, None);
    // An administrator's limit of a client stands above its seat.
    make(&world, &seat(0, 0, given));
    let client = Scheduler::status(&world).client(job.pid()).client;
    let given = TenantSettings { weight: Some(300), ..memory(896 * MIB) };
    done(&world, AdminRequest::SetTerms { client, gpu: None, given });
    has(&job, 896 * MIB, 300, Some(40));
    assert_eq!(row(&world, name).clients, clients, "nobody was cut off");
    assert!(!scheduler.log().contains("client 3"), "{}", scheduler.log());
    world.stop_intact([job, frugal]);
}

#[test]
fn seats_are_there_again_after_a_restart_with_their_limits_and_clients() {
    let world = World::simulated(CARDS);
    let places = Places::of(&world);
    let scheduler = places.start(&world);
    let given = TenantSettings { weight: Some(50), ..memory(512 * MIB) };
    let [one, torn, gone] = [0, 1, 2].map(|number| make(&world, &seat(number, 0, given)));
    let holder = Occupant { namespace: "lab".into(), pod: "train-0".into(), container: "main".into() };
    done(&world, AdminRequest::OccupySeats(vec![(one, Some(holder.clone()))]));
    assert_eq!(done(&world, AdminRequest::RemoveSeat(gone)), format!("seat {gone} is removed"));
    assert!(!places.folder(gone).exists());
    let job = Program::workload(&world, "job", HOLDING).until_told().waits_for_go();
    let job = job.env("NVSHARE_SOCKET", &text(&places.socket(one))).start();
    Running::go(&[&job]);
    Scheduler::until(&world, "it has its limit", |status| {
        status.find(job.pid()).is_some_and(|client| client.usage.iter().all(|usage| usage.limit == 512 * MIB))
    });
    scheduler.kill();
    let records = world.dir().join("nvshare-state.seats");
    let record = records.join(torn.to_string());
    let whole = std::fs::read_to_string(&record).expect("a record");
    std::fs::write(&record, &whole[..whole.len() / 2]).expect("a file");

    let scheduler = places.start(&world);
    // The log is written by a thread of its own.
    wait_until("the log names the torn record", || {
        let of_record = |line: &str| line.contains(&text(&record));
        let why = "this seat is not there until it is asked for again";
        scheduler.log().lines().any(|line| of_record(line) && line.contains(why))
    });
    let names: Vec<SeatName> = Scheduler::status(&world).seats.iter().map(|row| row.name).collect();
    assert_eq!(names, [one]);
    Scheduler::until(&world, "its client is back", |status| {
        status.find(job.pid()).is_some_and(|client| client.usage.iter().all(|usage| usage.limit == 512 * MIB))
    });
    let back = row(&world, one);
    assert_eq!((back.occupant, back.clients.len(), back.seat.given), (Some(holder), 1, given));
    // A newcomer has what the seat sets: the memory limit by its file, and the weight, which is no wish of its own, by the scheduler.
    let late = Program::workload(&world, "late", "--memory 64MiB --block 64MiB").until_told();
    let late = late.env("NVSHARE_SOCKET", &text(&places.socket(one))).start();
    Scheduler::until(&world, "it has its limit", |status| {
        let has = |client: &nvshare_proto::ClientStatus| {
            client.share.weight == 50 && client.usage.first().is_some_and(|usage| usage.limit == 512 * MIB)
        };
        status.find(late.pid()).is_some_and(has)
    });
    assert_eq!(make(&world, &seat(1, 0, given)), torn, "it is asked for again");
    assert_eq!(std::fs::read_to_string(&record).expect("a record"), whole);
    world.stop_intact([job, late]);
}

#[test]
fn a_client_that_returns_after_its_seat_has_changed_has_the_new_limits() {
    let world = World::simulated(CARDS);
    let places = Places::of(&world);
    let scheduler = places.start(&world);
    let given = TenantSettings { weight: Some(50), compute: Some(40), ..memory(512 * MIB) };
    let name = make(&world, &seat(0, 0, given));
    let job = Program::workload(&world, "job", HOLDING).until_told().waits_for_go();
    let job = job.env("NVSHARE_SOCKET", &text(&places.socket(name))).start();
    let frugal = Program::workload(&world, "frugal", "--memory 64MiB --block 64MiB --kernel-us 1000");
    let frugal = frugal.env("NVSHARE_SOCKET", &text(&places.socket(name))).env("NVSHARE_MEM_LIMIT", "256MiB");
    let frugal = frugal.until_told().waits_for_go().start();
    Running::go(&[&job, &frugal]);
    let has = |job: &Running, bytes, weight, percent: Option<u8>| {
        let what = format!("{bytes} bytes, weight {weight}, {percent:?} %");
        Scheduler::until(&world, &what, |status| {
            status.find(job.pid()).is_some_and(|client| {
                let limits: Vec<u64> = client.usage.iter().map(|usage| usage.limit).collect();
                let compute = client.share.compute.first().map(|limit| limit.percent);
                limits == [bytes] && (client.share.weight, compute) == (weight, percent)
            })
        });
    };
    has(&job, 512 * MIB, 50, Some(40));
    // A change while they run, and one that they meet when they are back: raised, and lowered.
    let mut scheduler = scheduler;
    for (live, at_rest) in [((640, 60), (768, 70)), ((832, 80), (320, 30))] {
        make(&world, &seat(0, 0, TenantSettings { weight: Some(live.1), ..memory(live.0 * MIB) }));
        has(&job, live.0 * MIB, live.1, None);
        scheduler.kill();
        let record = world.dir().join("nvshare-state.seats").join(name.to_string());
        let old = std::fs::read_to_string(&record).expect("a record");
        let new = old
            .replace(&format!("memory = {}", live.0 * MIB), &format!("memory = {}", at_rest.0 * MIB))
            .replace(&format!("weight = {}", live.1), &format!("weight = {}", at_rest.1));
        assert_ne!(old, new);
        std::fs::write(&record, new).expect("a file");
        scheduler = places.start(&world);
        has(&job, at_rest.0 * MIB, at_rest.1, None);
        has(&frugal, 256 * MIB, at_rest.1, None);
    }
    world.stop_intact([job, frugal]);
}

#[test]
fn a_client_that_registers_while_its_seat_changes_has_the_new_limits() {
    let world = World::simulated(CARDS);
    let places = Places::of(&world);
    let _scheduler = places.start(&world);
    let old = TenantSettings { weight: Some(50), compute: Some(40), ..memory(512 * MIB) };
    let name = make(&world, &seat(0, 0, old));
    make(&world, &seat(0, 0, TenantSettings { weight: Some(70), compute: Some(60), ..memory(768 * MIB) }));
    // Both read the file before the change. The second one asks for less than the seat had.
    let register = |weight, percent, limit| {
        let usage = Usage { gpu: card(0), total: 1024 * MIB, limit, allocated: 0, absent: 0, immovable: 0 };
        let compute = vec![ComputeLimit { gpu: card(0), percent }];
        let asked = Wishes { weight: Some(weight), compute, ..Wishes::default() };
        let register = Register { usage: vec![usage], asked, ..Register::newcomer(1, "late") };
        let mut stream = UnixStream::connect(places.socket(name)).expect("it serves");
        stream.write_all(&codec::encode(&Request::Register(register)).expect("a frame")).expect("sent");
        stream
    };
    let told = |stream: &mut UnixStream| {
        stream.set_read_timeout(Some(Duration::from_secs(2))).expect("a time");
        let (mut bytes, mut chunk, mut limits) = (Vec::new(), [0; 8192], Vec::new());
        while let Ok(read @ 1..) = stream.read(&mut chunk) {
            bytes.extend_from_slice(&chunk[..read]);
            while let Some((used, reply)) = codec::decode::<Reply>(&bytes).expect("a frame") {
                bytes.drain(..used);
                if let Reply::Client(SchedulerMessage::Limit(limit)) = reply {
                    limits.push(limit.bytes);
                }
            }
        }
        limits
    };
    let shares = || {
        let status = Scheduler::status(&world);
        let share = &status.clients.last().expect("a client").share;
        (share.weight, share.compute.first().map(|limit| limit.percent))
    };
    let mut stream = register(50, 40, 512 * MIB);
    assert_eq!((told(&mut stream), shares()), (vec![768 * MIB], (70, Some(60))));
    let mut frugal = register(30, 20, 256 * MIB);
    assert_eq!((told(&mut frugal), shares()), (vec![], (30, Some(20))));
}

#[test]
fn an_administrators_limit_outlives_the_scheduler_in_a_seat() {
    let world = World::simulated(CARDS);
    let places = Places::of(&world);
    let scheduler = places.start(&world);
    let name = make(&world, &seat(0, 0, memory(768 * MIB)));
    let job = Program::workload(&world, "job", "--memory 64MiB --block 64MiB --kernel-us 1000").until_told();
    let job = job.env("NVSHARE_SOCKET", &text(&places.socket(name))).start();
    let has = |bytes| {
        Scheduler::until(&world, &format!("a limit of {bytes} bytes"), |status| {
            status
                .find(job.pid())
                .is_some_and(|client| client.usage.iter().map(|usage| usage.limit).eq([bytes]))
        });
    };
    has(768 * MIB);
    let client = Scheduler::status(&world).client(job.pid()).client;
    done(&world, AdminRequest::SetTerms { client, gpu: None, given: memory(128 * MIB) });
    has(128 * MIB);
    scheduler.kill();
    let _scheduler = places.start(&world);
    has(128 * MIB);
    world.stop_intact([job]);
}

#[test]
fn words_of_an_administrator_about_a_pod_do_not_stay_for_the_next_one() {
    let world = World::simulated(CARDS);
    let places = Places::of(&world);
    let _scheduler = places.start(&world);
    let name = make(&world, &seat(0, 0, memory(512 * MIB)));
    let hold = |pod: &str| {
        let holder = Occupant { namespace: "lab".into(), pod: pod.into(), container: "main".into() };
        done(&world, AdminRequest::OccupySeats(vec![(name, Some(holder))]))
    };
    let start = |job: &str| {
        let job = Program::workload(&world, job, "--memory 64MiB --block 64MiB --kernel-us 1000");
        places.program(job.until_told(), name).start()
    };
    let has = |job: &Running, bytes: u64, paused: bool| {
        Scheduler::until(&world, &format!("a limit of {bytes} bytes, paused: {paused}"), |status| {
            status.find(job.pid()).is_some_and(|client| {
                client.usage.iter().map(|usage| usage.limit).eq([bytes]) && client.share.paused == paused
            })
        });
    };
    hold("train-0");
    let first = start("first");
    has(&first, 512 * MIB, false);
    let client = Scheduler::status(&world).client(first.pid()).client;
    let given = TenantSettings { paused: Some(true), ..memory(0) };
    done(&world, AdminRequest::SetTerms { client, gpu: None, given });
    has(&first, 0, true);
    // The container starts again in its pod.
    drop(first);
    hold("train-0");
    let again = start("again");
    Scheduler::until(&world, "it is paused, too", |status| {
        status.find(again.pid()).is_some_and(|client| client.share.paused)
    });
    drop(again);
    hold("train-1");
    let next = start("next");
    has(&next, 512 * MIB, false);
    world.stop_intact([next]);
}

#[test]
fn a_folder_that_is_removed_comes_back() {
    let world = World::simulated(CARDS);
    let places = Places::of(&world);
    let _scheduler = places.start(&world);
    let name = make(&world, &seat(0, 0, memory(512 * MIB)));
    let limits = places.limits(name);
    for what in
        [places.seats.clone(), places.folder(name), places.socket(name), places.folder(name).join("limits")]
    {
        if what.is_dir() { std::fs::remove_dir_all(&what) } else { std::fs::remove_file(&what) }
            .expect("gone");
        wait_until("it is back", || {
            UnixStream::connect(places.socket(name)).is_ok() && places.folder(name).join("limits").exists()
        });
        assert_eq!(places.limits(name), limits);
    }
    // A plugin that asks for it again does not wait for the next look.
    std::fs::remove_dir_all(&places.seats).expect("gone");
    make(&world, &seat(0, 0, memory(512 * MIB)));
    assert_eq!(places.limits(name), limits);
    let job = Program::workload(&world, "job", "--memory 128MiB --block 64MiB --steps 3");
    places.program(job, name).start().finish().intact();
}

#[test]
fn what_is_no_seat_is_refused_and_so_are_changes_at_a_seats_socket() {
    let world = World::simulated(CARDS);
    let places = Places::of(&world);
    let _scheduler = places.start(&world);
    let fine = seat(0, 0, TenantSettings::default());
    let [one, same, other] = [(0, 0), (1, 0), (0, 1)].map(|(number, gpu)| Slot { gpu: card(gpu), number });
    let paused = TenantSettings { paused: Some(true), ..TenantSettings::default() };
    for (slots, given, why) in [
        (vec![], TenantSettings::default(), "without a slot"),
        (vec![one, same], TenantSettings::default(), "on the same GPU"),
        (vec![one], paused, "neither paused nor resumed"),
        (vec![one, other], memory(1), "the least is 64.0 MiB"),
    ] {
        let reason = refused(ask(&world.admin_socket(), AdminRequest::Seat(Seat { slots, given })));
        assert!(reason.contains(why), "{reason}");
    }
    assert!(!places.seats.exists(), "nothing was made");
    let name = make(&world, &fine);
    let requests = [
        AdminRequest::Seat(seat(7, 0, TenantSettings::default())),
        AdminRequest::OccupySeats(vec![(name, None)]),
        AdminRequest::RemoveSeat(name),
        AdminRequest::Off { force: true },
    ];
    for socket in [places.socket(name), PathBuf::from(&places.common)] {
        for request in &requests {
            let reason = refused(ask(&socket, request.clone()));
            assert!(reason.contains("on the administrators' socket only"), "{reason}");
        }
    }
    let odd = Occupant { namespace: "a\nb".into(), pod: "p".into(), container: "c".into() };
    let reason = refused(ask(&world.admin_socket(), AdminRequest::OccupySeats(vec![(name, Some(odd))])));
    assert!(reason.contains("is no name of a namespace"), "{reason}");
    // While a process is there, its seat stays.
    let job = Program::workload(&world, "job", "--memory 64MiB --block 64MiB").until_told().waits_for_go();
    let job = places.program(job, name).start();
    Running::go(&[&job]);
    let reason = refused(ask(&world.admin_socket(), AdminRequest::RemoveSeat(name)));
    assert!(reason.contains(&format!("seat {name} is in use")), "{reason}");
    world.stop_intact([job]);
    wait_until("nobody uses it", || {
        let last = ask(&world.admin_socket(), AdminRequest::RemoveSeat(name)).pop();
        matches!(last, Some(Reply::Admin(AdminReply::Done { .. })))
    });
    assert!(!places.folder(name).exists());
    assert_eq!(done(&world, AdminRequest::RemoveSeat(name)), format!("there is no seat {name}"));
}

#[test]
fn seats_are_not_in_the_folder_that_every_container_has() {
    let world = World::simulated(CARDS);
    let seats = text(&world.dir().join("seats"));
    let Output { status, stderr, .. } =
        Scheduler::command(&world, &["--seats", &seats]).output().expect("it runs");
    let log = String::from_utf8_lossy(&stderr);
    assert!(!status.success() && log.contains("must not be inside the folder of --socket"), "{log}");
    // Where there is no place for records, no seat is promised.
    let places = Places::of(&world);
    let arguments = ["--socket", &places.common, "--seats", &seats, "--state", "/proc/nvshare/state.toml"];
    let _scheduler = Scheduler::start(&world, &arguments);
    let reason =
        refused(ask(&world.admin_socket(), AdminRequest::Seat(seat(0, 0, TenantSettings::default()))));
    assert!(reason.starts_with("/proc/nvshare/state.seats/") && !places.seats.exists(), "{reason}");
}
