//! `nvshare-ctl cdi generate`
//!
//! The Container Device Interface names what a container gets: `podman run --device nvshare.com/gpu=all` instead of two folders and a variable. The
//! device says nothing of GPUs: NVIDIA's own device beside it does.

use std::path::{self, Path};

use clap::{Args, ValueEnum};
use nvshare_proto::cdi::{Device, Edits, LIBRARY_IN_CONTAINER, Mount, Specification};
use nvshare_proto::env::SOCKET;
use nvshare_proto::paths::{self, SYSTEM_SOCKET};

use crate::commands::install::is_root;
use crate::library::{self, Library};
use crate::output::{Done, complain, print};

/// The use of the description.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Action {
    /// It is printed, for /etc/cdi/nvshare.json
    Generate,
}

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Print the description, for /etc/cdi/nvshare.json
    #[arg(value_name = "generate", hide_possible_values = true)]
    action: Action,

    #[command(flatten)]
    library: Library,
}

pub(crate) fn run(options: &Options, socket: Option<&Path>) -> Done {
    let Action::Generate = options.action;
    let library = options.library.find()?;
    // A link may lead out of the folder that is mounted.
    let library = library.canonicalize().map_err(|error| format!("{}: {error}", library.display()))?;
    let socket = match socket {
        Some(named) => named.to_owned(),
        None => {
            // Root's scheduler may not run yet.
            let usual = paths::clients_socket(is_root()? || Path::new(SYSTEM_SOCKET).exists());
            if let Some(note) = own_note(&usual, paths::own_directory().as_deref()) {
                complain(&note);
            }
            usual
        }
    };
    let socket = path::absolute(&socket).map_err(|error| format!("{}: {error}", socket.display()))?;
    let specification = specification(&library, &socket)?;
    let text = serde_json::to_string_pretty(&specification).map_err(|error| error.to_string())?;
    print(&format!("{text}\n"))
}

/// A line for the user whose own scheduler containers will join: often root's is meant.
fn own_note(socket: &Path, own: Option<&Path>) -> Option<String> {
    let own = own.filter(|own| socket.starts_with(own))?;
    Some(format!(
        "containers will join your own scheduler, in {}; --socket {SYSTEM_SOCKET} names root's",
        own.display()
    ))
}

/// Folders are mounted, not files: a new library is renamed into its folder, and a new scheduler's socket is another file.
fn specification(library: &Path, socket: &Path) -> Result<Specification, String> {
    let (library_folder, library_name) = split(library)?;
    let (socket_folder, socket_name) = split(socket)?;
    let preloaded = Path::new(LIBRARY_IN_CONTAINER).join(library_name);
    if let Some(why) = library::unnameable(&preloaded) {
        return Err(why);
    }
    let usual = Path::new(SYSTEM_SOCKET);
    let usual_folder = usual.parent().unwrap_or(usual);
    let inside = usual_folder.join(socket_name);
    let mut env = vec![format!("LD_PRELOAD={}", preloaded.display())];
    if inside != usual {
        env.push(format!("{SOCKET}={}", inside.display()));
    }
    let mounts = vec![
        Mount::read_only(library_folder, Path::new(LIBRARY_IN_CONTAINER)),
        Mount::read_only(socket_folder, usual_folder),
    ];
    let device = Device { name: "all".to_owned(), container_edits: Edits { env, mounts } };
    Ok(Specification::of(vec![device]))
}

/// A path's folder and name, which both are text.
fn split(path: &Path) -> Result<(&Path, &str), String> {
    let name = path.file_name().and_then(|name| name.to_str());
    match (path.parent(), name) {
        (Some(folder), Some(name)) if folder.to_str().is_some() => Ok((folder, name)),
        _ => Err(format!("{}: a description for containers cannot name this", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(library: &str, socket: &str) -> String {
        let made = specification(Path::new(library), Path::new(socket)).unwrap();
        serde_json::to_string(&made).unwrap()
    }

    #[test]
    fn a_container_gets_the_folders_and_the_preload() {
        assert_eq!(
            of("/usr/local/lib/nvshare/libnvshare.so", "/var/run/nvshare/scheduler.sock"),
            concat!(
                r#"{"cdiVersion":"0.3.0","kind":"nvshare.com/gpu","devices":[{"name":"all","containerEdits":{"#,
                r#""env":["LD_PRELOAD=/usr/lib/nvshare/libnvshare.so"],"mounts":["#,
                r#"{"hostPath":"/usr/local/lib/nvshare","containerPath":"/usr/lib/nvshare","options":["ro","nosuid","nodev","bind"]},"#,
                r#"{"hostPath":"/var/run/nvshare","containerPath":"/var/run/nvshare","options":["ro","nosuid","nodev","bind"]}]}}]}"#
            )
        );
    }

    #[test]
    fn a_socket_of_another_name_is_named() {
        let made = of("/lib/libnvshare.so", "/run/user/1000/nvshare/other.sock");
        assert!(made.contains(r#""NVSHARE_SOCKET=/var/run/nvshare/other.sock""#), "{made}");
        assert!(made.contains(r#""hostPath":"/run/user/1000/nvshare""#), "{made}");
    }

    #[test]
    fn a_folder_of_the_users_own_is_said() {
        let own = Path::new("/run/user/1000/nvshare");
        let said = own_note(&own.join("scheduler.sock"), Some(own)).unwrap();
        assert!(said.starts_with("containers will join your own scheduler, in /run/user/1000/nvshare; "));
        assert_eq!(own_note(Path::new(SYSTEM_SOCKET), Some(own)), None);
        assert_eq!(own_note(&own.join("scheduler.sock"), None), None);
    }

    #[test]
    fn a_library_that_no_preload_can_name_is_refused() {
        let refused = specification(Path::new("/lib/lib nvshare.so"), Path::new(SYSTEM_SOCKET)).unwrap_err();
        assert!(refused.contains("a blank"), "{refused}");
        assert!(specification(Path::new("/"), Path::new(SYSTEM_SOCKET)).is_err());
    }
}
