//! Output of commands, and their ends.

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;

/// The reason why a command failed, and its exit code.
#[derive(Debug)]
pub(crate) struct Failure {
    text: String,
    code: u8,
}

impl Failure {
    /// A failure with an exit code of its own.
    pub(crate) fn with_code(code: u8, text: String) -> Self {
        Self { text, code }
    }

    /// The same failure with another exit code.
    pub(crate) fn coded(self, code: u8) -> Self {
        Self { code, ..self }
    }

    /// Prints the reason on standard error, if that is still open.
    pub(crate) fn report(&self) -> ExitCode {
        complain(&self.text);
        ExitCode::from(self.code)
    }
}

impl From<String> for Failure {
    fn from(text: String) -> Self {
        Self { text, code: 1 }
    }
}

impl From<nvshare_admin::Error> for Failure {
    fn from(error: nvshare_admin::Error) -> Self {
        match error {
            nvshare_admin::Error::NotFound(_) => format!("{error}; `nvshare-ctl doctor` says what to do"),
            _ => error.to_string(),
        }
        .into()
    }
}

/// The end of a command.
pub(crate) type Done = Result<(), Failure>;

/// Prints a line on standard error.
pub(crate) fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "nvshare-ctl: {text}");
}

/// Prints a text. A reader that has read enough and gone (`nvshare-ctl status | head -1`) is no failure.
pub(crate) fn print(text: &str) -> Done {
    print_to_reader(text).map(|_| ())
}

/// Prints a text; false: the reader has gone.
pub(crate) fn print_to_reader(text: &str) -> Result<bool, Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(format!("standard output: {error}").into()),
    }
}

/// Whether standard output still has a reader, as far as that is known without a write.
pub(crate) fn has_reader() -> bool {
    let out = io::stdout();
    // The kernel tells of the end of a pipe, or of a socket, unasked.
    let mut watched = [PollFd::new(&out, PollFlags::empty())];
    let _ = poll(&mut watched, Some(&Timespec::default()));
    !watched[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
}

/// Prints a line.
pub(crate) fn print_line(text: &str) -> Done {
    print(&format!("{text}\n"))
}

/// Prints a value as JSON.
pub(crate) fn print_json(value: &impl Serialize) -> Done {
    print_line(&serde_json::to_string_pretty(value).map_err(|error| error.to_string())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvshare_admin::Error;

    #[test]
    fn without_a_scheduler_doctor_is_named() {
        let nobody = Failure::from(Error::NotFound(Vec::new())).coded(125);
        assert!(nobody.text.ends_with("; `nvshare-ctl doctor` says what to do"), "{nobody:?}");
        assert_eq!(nobody.code, 125);
        assert_eq!(Failure::from(Error::Refused("no".to_owned())).text, "no");
    }
}
