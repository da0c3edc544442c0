//! Removes what nvshare has left on a machine: CDI devices, the library, seats, sockets, records. The plugin itself never does that, since containers
//! that start again need all of it.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use nvshare_admin::Scheduler;
use nvshare_proto::WatchFrom;
use tracing::info;

use crate::dra::registration;
use crate::options::Options;
use crate::{cdi, features, files, kubelet, pods, rivals};

/// Removes all of it, and nvshare's own folders, unless they are mounted. Folders of others stay though they are empty: somebody may have them
/// mounted. The kubelet removes the slices of a driver whose socket is gone.
///
/// # Errors
/// The scheduler or the plugin runs, a container has a seat, the kubelet does not say whether one does, the folder of features is not there, or
/// something cannot be removed.
pub async fn run(options: &Options) -> Result<(), String> {
    // One that was not mounted would look like one in which nothing is left.
    if let Some(folder) = options.features_dir.as_ref().filter(|folder| !folder.is_dir()) {
        return Err(format!("--features-dir: {} is no folder", folder.display()));
    }
    let _entered = kubelet::enter_now(&options.kubelet)?;
    let socket = options.admin_socket();
    if Scheduler::at(socket.clone()).watch(WatchFrom::Now, false).is_ok() {
        return Err(format!("a scheduler answers at {}: remove it first", socket.display()));
    }
    let holders = pods::holders_now(options).await?;
    if let Some((seat, holder)) = holders.iter().find_map(|(seat, of_seat)| Some((seat, of_seat.first()?))) {
        let count: usize = holders.values().map(Vec::len).sum();
        return Err(format!(
            "containers that have seats: {count}, such as {holder} ({seat}): remove their pods first"
        ));
    }
    // The list leaves out init containers, and a kubelet that starts again lists nothing for a moment.
    if let Some(given) = pods::given(options).await?
        && !given.is_empty()
    {
        return Err(format!("the kubelet's record names seats: {}; remove their pods first", given.len()));
    }
    if let Some((count, claim)) = rivals::claimed(options)? {
        return Err(format!("claims are prepared: {count}, such as {claim}; remove their pods first"));
    }
    let sockets =
        kubelet::sockets(&options.kubelet).into_iter().chain([registration::socket(&options.kubelet)]);
    let features = options.features_dir.as_ref().map(|folder| folder.join(features::FILE));
    let written = [options.cdi_dir.join(cdi::FILE)].into_iter().chain(features);
    for file in sockets.chain(written.flat_map(|file| [files::unfinished(&file), file])) {
        gone(&file, fs::remove_file(&file))?;
    }
    let run = ["nvshare-seats", "nvshare", "nvshare-admin"].map(|name| options.run_dir.join(name));
    for folder in [options.library_dir.clone(), options.state.clone()].into_iter().chain(run) {
        empty(&folder)?;
    }
    Ok(())
}

/// Removes all that is in a folder, and the folder unless it is mounted.
fn empty(folder: &Path) -> Result<(), String> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(|error| format!("{}: {error}", folder.display()))?,
    };
    let paths: Vec<PathBuf> = entries.filter_map(Result::ok).map(|entry| entry.path()).collect();
    for path in paths {
        let is_folder = path.symlink_metadata().is_ok_and(|found| found.is_dir());
        if is_folder {
            empty(&path)?;
        } else {
            gone(&path, fs::remove_file(&path))?;
        }
    }
    match fs::remove_dir(folder) {
        // A mounted one, beside which nothing may be written where the container's own files are read-only: the kernel looks at that first.
        Err(error) if matches!(error.kind(), ErrorKind::ResourceBusy | ErrorKind::ReadOnlyFilesystem) => {
            Ok(())
        }
        removed => gone(folder, removed),
    }
}

fn gone(path: &Path, removed: io::Result<()>) -> Result<(), String> {
    match removed {
        Ok(()) => info!("removed {}", path.display()),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(format!("{}: {error}", path.display())),
    }
    Ok(())
}
