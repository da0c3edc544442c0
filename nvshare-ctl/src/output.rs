//! What is printed, and how a command ends.

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use serde::Serialize;

/// Why a command failed, and the exit code that says so.
#[derive(Debug)]
pub(crate) struct Failure {
    text: String,
    code: u8,
}

impl Failure {
    /// With an exit code of its own.
    pub(crate) fn with_code(code: u8, text: String) -> Self {
        Self { text, code }
    }

    /// Says so on standard error, where that is still open.
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
        error.to_string().into()
    }
}

/// How commands end.
pub(crate) type Done = Result<(), Failure>;

/// A line on standard error.
pub(crate) fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "nvshare-ctl: {text}");
}

/// Prints a text. A reader that has seen enough and gone (`nvshare-ctl status | head -1`) is no failure.
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

/// Prints a line.
pub(crate) fn print_line(text: &str) -> Done {
    print(&format!("{text}\n"))
}

/// Prints as JSON.
pub(crate) fn print_json(value: &impl Serialize) -> Done {
    print_line(&serde_json::to_string_pretty(value).map_err(|error| error.to_string())?)
}
