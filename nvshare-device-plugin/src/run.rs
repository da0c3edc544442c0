//! From the command line to a plugin that serves.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use nvshare_proto::Seldom;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tracing::info;

use crate::allocate::{LIBRARY, PRELOAD, preload_file};
use crate::devices::{self, Card};
use crate::options::{Options, Preload};
use crate::plugin::Plugin;
use crate::{cards, files, kubelet, pods, upkeep};

const LOOK_FOR_GPUS_EVERY: Duration = Duration::from_secs(5);

static NO_GPU: Seldom = Seldom::new(|text| info!("{text}"));

/// Serves for ever.
///
/// # Errors
/// What the command line asks for cannot be had.
pub async fn run(options: Options) -> Result<(), String> {
    let _entered = kubelet::enter(&options.kubelet).await;
    // No other plugin does the same now.
    install(&options)?;
    let cards = find_cards(&options).await?;
    let plugin = Arc::new(Plugin::open(options, cards)?);
    let (tell_boot, boot) = watch::channel(None);
    tokio::join!(
        kubelet::attend(Arc::clone(&plugin)),
        upkeep::keep(Arc::clone(&plugin), tell_boot),
        pods::tell(plugin, boot)
    );
    Ok(())
}

/// Puts the library where containers get it from. Programs that have the old one keep it.
fn install(options: &Options) -> Result<(), String> {
    let library = options.library_dir.join(LIBRARY);
    if let Some(from) = &options.library {
        let contents = fs::read(from).map_err(|error| format!("--library: {}: {error}", from.display()))?;
        if files::replace(&library, &contents)? {
            info!("installed {}", library.display());
        }
    } else if !library.is_file() {
        return Err(format!(
            "{}: there is no library to give out; --library installs one",
            library.display()
        ));
    }
    if options.preload == Preload::File {
        files::replace(&options.library_dir.join(PRELOAD), preload_file().as_bytes())?;
    }
    Ok(())
}

/// Waits until this machine has GPUs: the driver may be loaded later.
async fn find_cards(options: &Options) -> Result<Vec<Card>, String> {
    loop {
        let (descriptions, sysfs) = (options.gpu_descriptions.clone(), options.sysfs.clone());
        let found = spawn_blocking(move || cards::list(&descriptions, &sysfs)).await;
        let found = found.map_err(|error| error.to_string())?;
        if !found.is_empty() {
            return devices::choose(found, &options.gpus, options.slot_memory);
        }
        let descriptions = options.gpu_descriptions.display();
        NO_GPU.say(format_args!("no GPU is there yet, neither by NVML nor in {descriptions}"));
        sleep(LOOK_FOR_GPUS_EVERY).await;
    }
}
