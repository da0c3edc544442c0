use super::*;

/// A process at a name that hears nothing: one asker is in its queue, and others wait for a place there.
pub(crate) fn deaf(name: &Name) -> Held {
    let silent = socket(0).unwrap();
    let (address, length) = address_of(name);
    let number = silent.get().unwrap();
    // SAFETY: an address of the given length.
    unsafe {
        assert_eq!(libc::bind(number, (&raw const address).cast(), length), 0);
        assert_eq!(libc::listen(number, 0), 0);
    }
    silent
}

#[test]
fn signals_do_not_prolong_a_wait() {
    extern "C" fn handle(_signal: c_int) {}
    let _deaf = deaf(&[3; 16]);
    // SAFETY: a handler that does nothing; the calling thread.
    let asker = unsafe {
        libc::signal(libc::SIGUSR2, handle as extern "C" fn(c_int) as usize);
        libc::pthread_self()
    };
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                // SAFETY: the thread waits for this one to end.
                unsafe { libc::pthread_kill(asker, libc::SIGUSR2) };
                threads::sleep(Duration::from_millis(2));
            }
        });
        // The first waits for an answer, and the others for a place in the queue, too.
        for _ in 0..3 {
            let begin = Instant::now();
            let asked = ask_within(Duration::from_millis(200), &[3; 16], &[7; QUESTION]);
            assert!(asked.is_err() && begin.elapsed() >= Duration::from_millis(190), "{asked:?}");
            assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
        }
        over.store(true, Ordering::SeqCst);
    });
}

#[test]
fn the_kernel_says_whose_the_other_end_is() {
    let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let socket = std::os::fd::AsRawFd::as_raw_fd(&ours);
    // SAFETY: it only asks.
    let me = unsafe { libc::geteuid() };
    assert!(is_own_users(socket) && is_of(socket, me));
    assert!(!is_of(socket, me + 1) && !is_of(-1, me));
}

/// Those that ask with a 9 get a late answer from another thread; with a 5 or 6, none behind it.
fn echo(question: &[u8; QUESTION], asker: Asker) {
    assert_eq!(asker.process(), Some(std::process::id() as libc::pid_t));
    let number = asker.0.0.get().unwrap();
    match question[0] {
        0 => {}
        9 => {
            asker.send(&LATER, &[]).unwrap();
            let answer = question[..4].to_vec();
            std::thread::spawn(move || {
                threads::sleep(Duration::from_millis(50));
                let _ = asker.send(&answer, &[number]);
            });
        }
        6 => asker.send(&LATER, &[]).unwrap(),
        // A child has the connection for longer.
        5 => {
            asker.send(&LATER, &[]).unwrap();
            // SAFETY: the child makes calls of the system alone, and ends.
            unsafe {
                if libc::fork() == 0 {
                    libc::sleep(1);
                    libc::_exit(0);
                }
            }
        }
        _ => _ = asker.send(&question[..4], &[number]),
    }
}

const ECHO: Tasks = Tasks { answer: echo, watched: || Vec::new(), look: || () };

#[test]
fn questions_are_answered_and_others_keep_nobody() {
    let name = listen(ECHO).unwrap();
    assert_eq!(listen(ECHO).unwrap(), name);
    let (address, length) = address_of(&name);
    let connect = || {
        let socket = socket(0).unwrap();
        // SAFETY: an address of the given length.
        let connected = unsafe { libc::connect(socket.get().unwrap(), (&raw const address).cast(), length) };
        assert_eq!(connected, 0);
        socket
    };
    // They say nothing, and others are heard beside them.
    let silent: Vec<Held> = (0..MAX_ASKERS - 1).map(|_| connect()).collect();
    let begin = Instant::now();
    for _ in 0..10 {
        let (answer, came) = ask(&name, &[7; QUESTION]).unwrap();
        assert_eq!((&answer[..], came.len()), (&[7; 4][..], 1));
    }
    assert!(ask(&name, &[0; QUESTION]).unwrap().0.is_empty());
    let (late, came) = ask(&name, &[9; QUESTION]).unwrap();
    assert_eq!((&late[..], came.len()), (&[9; 4][..], 1));
    assert!(ask(&name, &[6; QUESTION]).unwrap_err().contains("put off"));
    let late = Instant::now();
    assert!(ask(&name, &[5; QUESTION]).unwrap_err().contains("put off"));
    assert!(late.elapsed() < Duration::from_secs(4), "{:?}", late.elapsed());
    // Where there is no more room, they are heard no more after a while.
    let more: Vec<Held> = (0..4).map(|_| connect()).collect();
    assert!(ask(&name, &[7; QUESTION]).is_ok());
    for wrong in [1, QUESTION + 1, 4 * QUESTION] {
        let socket = connect();
        passing::send(socket.get().unwrap(), &vec![7; wrong], &[]).unwrap();
        let mut bytes = [0; 8];
        assert_eq!(passing::receive(socket.get().unwrap(), &mut bytes).unwrap().0, 0, "{wrong}");
    }
    assert!(begin.elapsed() < ASKER_PATIENCE);
    drop((silent, more));
    assert!(ask(&[9; 16], &[7; QUESTION]).unwrap_err().contains("not there"));
    // The program closes the socket: the next call listens again, elsewhere.
    // SAFETY: the test's own.
    unsafe { libc::close(LISTENER.get().unwrap()) };
    let other = listen(ECHO).unwrap();
    assert!(other != name && ask(&other, &[7; QUESTION]).is_ok());
    // SAFETY: it only asks.
    if unsafe { libc::geteuid() } == 0 {
        let refused = refusals_of_another_user(&other, Duration::from_millis(500));
        // The kernel's queue has 128 places.
        assert!(refused > 0 && refused < 128 + 60 * MAX_ASKERS as u32, "{refused}");
    }
}

/// How often a process of another user can connect within a time.
fn refusals_of_another_user(name: &Name, time: Duration) -> u32 {
    let (address, length) = address_of(name);
    let mut count = 0u32;
    let (from, to) = std::io::pipe().unwrap();
    // SAFETY: the child makes calls of the system alone, and ends.
    match unsafe { libc::fork() } {
        0 => {
            let until = Instant::now() + time;
            // SAFETY: an address of the given length, a number of the given size, and descriptors of the child.
            unsafe {
                libc::setuid(65534);
                while Instant::now() < until {
                    let socket = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK, 0);
                    count += u32::from(libc::connect(socket, (&raw const address).cast(), length) == 0);
                    libc::close(socket);
                }
                libc::write(
                    std::os::fd::AsRawFd::as_raw_fd(&to),
                    (&raw const count).cast(),
                    size_of_val(&count),
                );
                libc::_exit(0)
            }
        }
        child => {
            drop(to);
            // Those who may ask get their answers meanwhile.
            assert!(ask(name, &[7; QUESTION]).is_ok());
            let mut bytes = [0; 4];
            std::io::Read::read_exact(&mut { from }, &mut bytes).unwrap();
            // SAFETY: a child of this process.
            unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
            u32::from_ne_bytes(bytes)
        }
    }
}

#[test]
fn other_users_are_looked_at_less_and_less_often() {
    let begin = Instant::now();
    let mut pause = Pause::none(begin);
    assert!(pause.is_over(begin));
    for millis in [1, 2, 4, 8, 10, 10] {
        pause = pause.after(true, begin);
        assert_eq!(pause.length.as_millis(), millis);
        assert!(!pause.is_over(begin) && pause.is_over(begin + pause.length));
    }
    pause = pause.after(false, begin);
    assert!(pause.is_over(begin));
    assert_eq!(pause.after(true, begin).length, MIN_PAUSE);
}

/// The C library's functions in it are cancellation points, from which Rust does not unwind.
#[test]
fn a_thread_that_is_cancelled_while_it_asks_has_asked() {
    static HAS_ASKED: AtomicU64 = AtomicU64::new(0);
    extern "C" fn ask_cancelled(_: *mut std::ffi::c_void) -> *mut std::ffi::c_void {
        // SAFETY: the calling thread; it is cancelled at its next cancellation point.
        unsafe { libc::pthread_cancel(libc::pthread_self()) };
        assert!(ask(&[4; 16], &[7; QUESTION]).is_err());
        assert!(tell(&[4; 16], &[7; QUESTION]));
        HAS_ASKED.store(1, Ordering::SeqCst);
        std::ptr::null_mut()
    }
    // SAFETY: a place for the thread, which is waited for.
    unsafe {
        let mut thread = std::mem::zeroed();
        let made =
            libc::pthread_create(&raw mut thread, std::ptr::null(), ask_cancelled, std::ptr::null_mut());
        assert_eq!(made, 0);
        assert_eq!(libc::pthread_join(thread, std::ptr::null_mut()), 0);
    }
    assert_eq!(HAS_ASKED.load(Ordering::SeqCst), 1);
}
