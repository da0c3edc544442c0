//! Output of commands, and their ends.

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

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
        error.to_string().into()
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

/// Prints a line.
pub(crate) fn print_line(text: &str) -> Done {
    print(&format!("{text}\n"))
}

/// Prints a value as JSON.
pub(crate) fn print_json(value: &impl Serialize) -> Done {
    print_line(&serde_json::to_string_pretty(value).map_err(|error| error.to_string())?)
}
