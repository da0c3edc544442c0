//! Manual pages and completions for shells, made from the command lines themselves.

use std::fs;
use std::path::Path;

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;
use nvshare_scheduler::settings::Options as Scheduler;

/// Files of the scheduler, for its page.
const FILES: &str = r".SH FILES
.TP
.I /etc/nvshare/config.toml
Settings, for root and for the service. An unknown name in it is an error.
.TP
.I /var/run/nvshare/scheduler.sock
Clients' socket. Containers mount its folder.
.TP
.I /var/run/nvshare-admin/admin.sock
Administrators' socket: changes are accepted there only.
.TP
.I /var/lib/nvshare/state.toml
Quanta and the switch that administrators set at run time (set-tq, on, off).
.TP
.I /var/run/nvshare-seats/
A folder for each seat of a container, with a socket.
.TP
.I /var/lib/nvshare/state.seats/
A record of each seat.
.PP
Without root these are
.IR $XDG_CONFIG_HOME/nvshare/config.toml ,
.IR $XDG_RUNTIME_DIR/nvshare/scheduler.sock ,
.I admin.sock
beside it,
.I $XDG_RUNTIME_DIR/nvshare-seats/
and
.IR $XDG_STATE_HOME/nvshare/state.toml .
.SH SIGNALS
.TP
.B SIGHUP
Read the configuration again. A mistake in it is logged and changes nothing.
.TP
.B SIGTERM, SIGINT
Stop. Programs go on as if alone, and join the next scheduler.
.SH EXIT STATUS
0 after SIGTERM or SIGINT, 1 when the scheduler cannot start, 2 for a wrong option.
.SH SEE ALSO
.BR nvshare-ctl (1)
";

/// Ends of programs, for the page of the command line.
const STATUS: &str = r".SH EXIT STATUS
0: done. 1: refused or failed; a line says why. 2: a wrong option.
.B nvshare-ctl run
ends as its program does, or with 125 (the library is missing or wrong), 126 (the program cannot be run), 127 (there is no
such program).
.SH SEE ALSO
.BR nvshare-scheduler (8)
";

/// Writes the pages and completions into `share` of a distribution.
pub(crate) fn write(dist: &Path) -> Result<(), String> {
    let mut ctl = nvshare_ctl::command();
    ctl.build();
    page(dist, &Man::new(ctl.clone()).section("1"), "man1/nvshare-ctl.1", STATUS)?;
    for command in
        ctl.get_subcommands().filter(|command| !command.is_hide_set() && command.get_name() != "help")
    {
        let name = format!("nvshare-ctl-{}", command.get_name());
        let man = Man::new(command.clone()).title(name.clone()).section("1");
        page(dist, &man, &format!("man1/{name}.1"), ".SH SEE ALSO\n.BR nvshare-ctl (1)\n")?;
    }
    let scheduler = Scheduler::command();
    page(dist, &Man::new(scheduler.clone()).section("8"), "man8/nvshare-scheduler.8", FILES)?;
    for (mut command, name) in [(nvshare_ctl::command(), "nvshare-ctl"), (scheduler, "nvshare-scheduler")] {
        complete(dist, &mut command, name)?;
    }
    match nvshare_ctl::papers().iter().find(|paper| !dist.join(paper).is_file()) {
        Some(missing) => Err(format!("{missing} is listed and was not made")),
        None => Ok(()),
    }
}

fn page(dist: &Path, man: &Man, name: &str, more: &str) -> Result<(), String> {
    let mut text = Vec::new();
    man.render(&mut text).map_err(|error| format!("{name}: {error}"))?;
    text.extend_from_slice(more.as_bytes());
    put(&dist.join("share/man").join(name), &text)
}

fn complete(dist: &Path, command: &mut Command, name: &str) -> Result<(), String> {
    for (shell, place) in [
        (Shell::Bash, format!("bash-completion/completions/{name}")),
        (Shell::Zsh, format!("zsh/site-functions/_{name}")),
        (Shell::Fish, format!("fish/vendor_completions.d/{name}.fish")),
    ] {
        let mut text = Vec::new();
        clap_complete::generate(shell, command, name, &mut text);
        put(&dist.join("share").join(place), &text)?;
    }
    Ok(())
}

fn put(path: &Path, text: &[u8]) -> Result<(), String> {
    let describe = |error: std::io::Error| format!("{}: {error}", path.display());
    fs::create_dir_all(path.parent().unwrap_or(path)).map_err(describe)?;
    fs::write(path, text).map_err(describe)
}
