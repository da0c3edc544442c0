//! From the command line to a plugin that serves.

use std::fs;
use std::future::pending;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nvshare_proto::{GpuUuid, ThrottledLine};
use tokio::sync::watch;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::sleep;
use tracing::{info, warn};

use crate::allocate::{LIBRARY, PRELOAD, preload_file};
use crate::devices::{self, GpuChoice, NodeGpu};
use crate::host::Host;
use crate::node_gpus::{self, GpuNews, GpuSources, Versions};
use crate::options::{Api, Options, Preload};
use crate::plugin::Plugin;
use crate::resources::Resource;
use crate::{clean_up, dra, features, files, kubelet, pods, rivals, upkeep};

const LOOK_FOR_GPUS_EVERY: Duration = Duration::from_secs(5);
/// Once there is a GPU, the plugin waits this long for others whose UUIDs cannot be read. Some never can be: a GPU may be broken or invisible.
const OTHERS_PATIENCE: Duration = Duration::from_secs(60);

static NO_GPU: ThrottledLine = ThrottledLine::new(|text| info!("{text}"));
static NOT_ALL: ThrottledLine = ThrottledLine::new(|text| info!("{text}"));

/// Serves for ever, or cleans up.
///
/// # Errors
/// The command line asks for something that cannot be had.
pub async fn run(options: Options) -> Result<(), String> {
    if options.clean_up {
        return clean_up::run(&options).await;
    }
    let resources = Resource::all(&options)?;
    let server = match options.api {
        Api::DevicePlugin => None,
        Api::Dra => Some(dra::server(&options).await?),
    };
    rivals::refuse_server(&options).await?;
    // A rollout starts this plugin beside the one that serves, and ends that one when this one has stayed. So whatever may fail without a
    // change of the machine does so here, and the node keeps its slots.
    let choice = read_choice(&options)?;
    let library = read_library(&options)?;
    let sources = GpuSources {
        descriptions: options.gpu_descriptions.clone(),
        sysfs: options.sysfs.clone(),
        pause: options.pause(node_gpus::LOOK_EVERY),
    };
    let gpus = find_gpus(&options, &choice, &resources, &sources).await?;
    if options.api == Api::DevicePlugin {
        devices::refuse_too_many(&gpus, &resources)?;
    }
    let _entered = kubelet::enter(&options.kubelet).await;
    // No other plugin writes the records or the host's files now.
    rivals::refuse_seats(&options).await?;
    install(&options, library)?;
    if let Some(folder) = &options.features_dir {
        features::write(folder, &gpus, options.slots)?;
    }
    // NVML is asked only where it is of use.
    let versions = if server.is_some() { sources.versions() } else { Versions::default() };
    let host = Arc::new(Host::open(options, resources, gpus)?);
    let observer = Arc::clone(&host);
    let offers_all = choice.gpus.is_empty();
    let (tell, mut newcomers) = watch::channel(None);
    let see = move |news: GpuNews| {
        if let GpuNews::All(found) = &news
            && offers_all
            && let Some(gpu) = found.iter().find(|gpu| observer.gpu(gpu.uuid).is_none())
        {
            tell.send_replace(Some(gpu.uuid));
        }
        observer.see(news);
    };
    // NVML waits.
    let spawned = thread::Builder::new().name("gpus".to_owned()).spawn(move || sources.follow(see));
    spawned.map_err(|error| error.to_string())?;
    let serves = async {
        match server {
            Some(server) => dra::serve(host, server, versions).await,
            None => serve_slots(host).await,
        }
    };
    // The kubelet starts this program again.
    let comes = async {
        match newcomers.wait_for(Option::is_some).await.ok().and_then(|gpu| *gpu) {
            Some(gpu) => gpu,
            None => pending().await,
        }
    };
    tokio::select! {
        () = serves => Ok(()),
        gpu = comes => Err(format!("{gpu} was not there at the start: a new start offers it, too")),
    }
}

/// Serves the device plugin API, for ever.
async fn serve_slots(host: Arc<Host>) {
    let plugin = Arc::new(Plugin::of(Arc::clone(&host)));
    let mut attended = JoinSet::new();
    for offer in &plugin.offers {
        attended.spawn(kubelet::attend(Arc::clone(&plugin), Arc::clone(offer)));
    }
    let (tell_boot, boot) = watch::channel(None);
    let mut kept = pods::Kept::default();
    tokio::join!(
        attended.join_all(),
        upkeep::keep(Arc::clone(&host), |nvidia, answers| plugin.offer(nvidia, answers), tell_boot),
        pods::tell(host, boot, &plugin.allocated, async |listed| {
            pods::keep_in_step(&plugin, &mut kept, listed).await;
        })
    );
}

/// The library that is to be installed, if the command line names one.
fn read_library(options: &Options) -> Result<Option<Vec<u8>>, String> {
    let Some(from) = &options.library else { return Ok(None) };
    fs::read(from).map(Some).map_err(|error| format!("--library: {}: {error}", from.display()))
}

/// Puts the library where containers get it from. Programs that have the old one keep it.
fn install(options: &Options, contents: Option<Vec<u8>>) -> Result<(), String> {
    let library = options.library_dir.join(LIBRARY);
    if let Some(contents) = contents {
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

/// The GPUs that the command line, or the file that it names, is for.
fn read_choice(options: &Options) -> Result<GpuChoice, String> {
    let Some(path) = &options.gpus_of else {
        return Ok(GpuChoice { gpus: options.gpus.clone(), by: "--gpus".to_owned() });
    };
    let by = format!("--gpus-of: {}", path.display());
    match fs::read_to_string(path) {
        Ok(text) => GpuChoice::read(&text, by),
        // A folder that is not there is a mistake, not a node without GPUs of its own.
        Err(error) if error.kind() == ErrorKind::NotFound && path.parent().is_some_and(Path::is_dir) => {
            info!("{by} is not there, so all GPUs are given out");
            Ok(GpuChoice::default())
        }
        Err(error) => Err(format!("{by}: {error}")),
    }
}

/// Waits until this machine has GPUs: the driver may be loaded later, and a GPU may tell its UUID later than others.
async fn find_gpus(
    options: &Options,
    choice: &GpuChoice,
    resources: &[Resource],
    sources: &GpuSources,
) -> Result<Vec<NodeGpu>, String> {
    let mut first: Option<Instant> = None;
    loop {
        let sources = sources.clone();
        let look = move || (sources.list(), sources.count());
        let (found, count) = spawn_blocking(look).await.map_err(|error| error.to_string())?;
        if found.is_empty() {
            let descriptions = options.gpu_descriptions.display();
            if count == 0 {
                NO_GPU.say(format_args!("no GPU is there yet, neither by NVML nor in {descriptions}"));
            } else {
                NO_GPU.say(format_args!(
                    "no GPU of {count} in {descriptions} tells its UUID yet: run nvidia-smi on the node, or nvidia-persistenced, to wake it"
                ));
            }
        } else {
            let is_there = |gpu: &GpuUuid| found.iter().any(|there| there.uuid == *gpu);
            let needs_no_other = !choice.gpus.is_empty() && choice.gpus.iter().all(is_there);
            let waited = first.get_or_insert_with(Instant::now).elapsed();
            let patience = options.pause(OTHERS_PATIENCE);
            let is_late = waited >= patience;
            if found.len() >= count || needs_no_other || is_late {
                if is_late {
                    warn!(
                        "{} of {count} GPUs are offered: the UUIDs of the others cannot be read",
                        found.len()
                    );
                }
                return devices::choose(found, choice, resources);
            }
            let (found, longest) = (found.len(), patience.as_secs());
            NOT_ALL.say(format_args!(
                "the UUIDs of {found} of {count} GPUs can be read; waiting for the others, {longest} s at most"
            ));
        }
        sleep(options.pause(LOOK_FOR_GPUS_EVERY)).await;
    }
}
