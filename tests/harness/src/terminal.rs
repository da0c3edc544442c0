//! A terminal of a given size, for programs that behave differently on one.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::FromRawFd;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// A program on a terminal of its own.
#[derive(Debug)]
pub struct Terminal {
    child: Child,
    said: Arc<Mutex<Vec<u8>>>,
    reader: Option<JoinHandle<()>>,
}

impl Terminal {
    /// Starts a program whose standard streams are a terminal of `lines` and `columns`. Other variables about colours
    /// in the environment of the tests are not passed on: some libraries assume colours on any terminal under `CI`.
    ///
    /// # Panics
    /// When there is no terminal to be had, or the program does not start.
    #[must_use]
    pub fn start(mut command: Command, lines: u16, columns: u16) -> Self {
        for variable in ["CI", "CLICOLOR", "CLICOLOR_FORCE"] {
            command.env_remove(variable);
        }
        let (mut ours, mut theirs) = (-1, -1);
        let size = libc::winsize { ws_row: lines, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: places for two descriptors; no name and no settings are asked for.
        let opened = unsafe {
            libc::openpty(
                &raw mut ours,
                &raw mut theirs,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                (&raw const size).cast_mut(),
            )
        };
        assert_eq!(opened, 0, "no terminal: {}", io::Error::last_os_error());
        // SAFETY: both were just opened, and nobody else has them.
        let (mut ours, theirs) = unsafe { (File::from_raw_fd(ours), File::from_raw_fd(theirs)) };
        let end = || theirs.try_clone().expect("a descriptor");
        command.stdin(end()).stdout(end()).stderr(end());
        let child = command.spawn().expect("the program runs");
        // The reader sees the end when nobody has the other side open any more.
        drop((theirs, command));
        let said = Arc::new(Mutex::new(Vec::new()));
        let reader = std::thread::spawn({
            let said = Arc::clone(&said);
            move || {
                let mut chunk = [0; 4096];
                while let Ok(read @ 1..) = ours.read(&mut chunk) {
                    said.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(&chunk[..read]);
                }
            }
        });
        Self { child, said, reader: Some(reader) }
    }

    /// The text shown so far, with the line ends of a file.
    #[must_use]
    pub fn text(&self) -> String {
        let said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&said).replace("\r\n", "\n")
    }

    /// Waits for the program's end. Returns how it ended, and all that it has shown.
    ///
    /// # Panics
    /// When the system does not say how it ended.
    #[must_use]
    pub fn finish(mut self) -> (ExitStatus, String) {
        let status = self.child.wait().expect("a child");
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        (status, self.text())
    }
}

/// A test leaves no process behind.
impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
