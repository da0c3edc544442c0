//! A scheduler's administrators' socket: it notes what it is asked, and does nothing.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use nvshare_proto::{AdminReply, AdminRequest, Occupant, Reply, Request, Seat, SeatName, codec};

#[derive(Default)]
struct State {
    asked: Mutex<Vec<AdminRequest>>,
    refuses: Mutex<Option<String>>,
    is_stopped: AtomicBool,
    boot: u64,
}

/// The scheduler.
pub(crate) struct Scheduler {
    socket: PathBuf,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

impl Scheduler {
    /// Starts one; `boot` is its run.
    pub(crate) fn start(root: &Path, boot: u64) -> Self {
        Self::start_refusing(root, boot, None)
    }

    /// Starts one that refuses seats.
    pub(crate) fn start_refusing(root: &Path, boot: u64, why: Option<&str>) -> Self {
        let socket = root.join("admin.sock");
        let _ = fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        let state = Arc::new(State { boot, refuses: Mutex::new(why.map(str::to_owned)), ..State::default() });
        let serves = Arc::clone(&state);
        let thread = thread::spawn(move || {
            for stream in listener.incoming() {
                if serves.is_stopped.load(Ordering::Relaxed) {
                    return;
                }
                serve(&serves, &mut stream.unwrap());
            }
        });
        Self { socket, state, thread: Some(thread) }
    }

    /// Refuses seats from now on.
    pub(crate) fn refuse(&self, why: Option<&str>) {
        *self.state.refuses.lock().unwrap() = why.map(str::to_owned);
    }

    /// The seats that were asked for.
    pub(crate) fn seats(&self) -> Vec<Seat> {
        let asked = self.state.asked.lock().unwrap();
        let seats = asked.iter().filter_map(|request| match request {
            AdminRequest::Seat(seat) => Some(seat.clone()),
            _ => None,
        });
        seats.collect()
    }

    /// The seats that were to be removed.
    pub(crate) fn removed(&self) -> Vec<SeatName> {
        let asked = self.state.asked.lock().unwrap();
        let removed = asked.iter().filter_map(|request| match request {
            AdminRequest::RemoveSeat(seat) => Some(*seat),
            _ => None,
        });
        removed.collect()
    }

    /// The seats with their containers, one entry for each message.
    pub(crate) fn held(&self) -> Vec<Vec<(SeatName, Option<Occupant>)>> {
        let asked = self.state.asked.lock().unwrap();
        let held = asked.iter().filter_map(|request| match request {
            AdminRequest::OccupySeats(held) => Some(held.clone()),
            _ => None,
        });
        held.collect()
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.state.is_stopped.store(true, Ordering::Relaxed);
        let _ = UnixStream::connect(&self.socket);
        self.thread.take().map(JoinHandle::join);
        // A scheduler that was killed leaves its socket's file.
    }
}

fn serve(state: &State, stream: &mut UnixStream) {
    let mut bytes = Vec::new();
    let request = loop {
        let mut chunk = [0; 4096];
        match stream.read(&mut chunk).unwrap_or_default() {
            0 => return,
            read => bytes.extend_from_slice(&chunk[..read]),
        }
        if let Some((_, request)) = codec::decode::<Request>(&bytes).unwrap() {
            break request;
        }
    };
    let Request::Admin(request) = request else { panic!("no administrator: {request:?}") };
    let done = || Reply::Admin(AdminReply::Done { text: "done".to_owned() });
    let replies = match &request {
        AdminRequest::Watch { .. } => {
            vec![
                Reply::Admin(AdminReply::Watching { boot: state.boot, first: 1 }),
                Reply::Admin(AdminReply::End),
            ]
        }
        AdminRequest::Seat(_) | AdminRequest::RemoveSeat(_) => match state.refuses.lock().unwrap().clone() {
            Some(reason) => vec![Reply::Refused { reason }],
            None => vec![done()],
        },
        AdminRequest::OccupySeats(_) => vec![done()],
        AdminRequest::Status => vec![Reply::Refused { reason: "it knows no seats".to_owned() }],
        other => panic!("the plugin asks for {other:?}"),
    };
    state.asked.lock().unwrap().push(request);
    for reply in replies {
        // Nobody has to listen to the end.
        let _ = stream.write_all(&codec::encode(&reply).unwrap());
    }
}
