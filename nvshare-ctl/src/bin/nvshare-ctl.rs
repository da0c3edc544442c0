//! The program. All its code is in the library beside it, so that manual pages can be made of its command line.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    nvshare_ctl::main()
}
