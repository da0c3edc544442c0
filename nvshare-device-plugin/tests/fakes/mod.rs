//! A machine in a folder: a kubelet, a scheduler, GPUs, NVIDIA's CDI devices, and the plugin itself.

mod api_server;
mod claims;
mod kubelet;
mod scheduler;

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nvshare_device_plugin::api::Device;
use nvshare_proto::{GpuUuid, Occupant, Slot};
use serde_json::{Value, json};

pub(crate) use api_server::ApiServer;
pub(crate) use claims::{Claims, allocated, claim, reserved};
pub(crate) use kubelet::Kubelet;
pub(crate) use scheduler::Scheduler;

pub(crate) const A: GpuUuid = GpuUuid([1; 16]);
pub(crate) const B: GpuUuid = GpuUuid([2; 16]);

/// The machine. The plugin ends with it.
pub(crate) struct Machine {
    pub(crate) root: PathBuf,
    gpus: [GpuUuid; 2],
    plugins: Vec<Child>,
}

static MACHINES: AtomicU32 = AtomicU32::new(0);

impl Machine {
    /// A machine with GPUs A and B, the latter near NUMA node 1, and CDI devices of NVIDIA: A by its UUID, B by a number.
    pub(crate) fn new() -> Self {
        Self::with([A, B])
    }

    /// The same with other GPUs.
    pub(crate) fn with(gpus: [GpuUuid; 2]) -> Self {
        let number = MACHINES.fetch_add(1, Ordering::Relaxed);
        let root = std::env::temp_dir().join(format!("nvshare-plugin-{}-{number}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let places = [("0000:01:00.0", 0, -1), ("0000:02:00.0", 4, 1)];
        for (gpu, (bus, minor, node)) in gpus.into_iter().zip(places) {
            let text = format!("Model: \t\t GPU\nGPU UUID: \t {gpu}\nDevice Minor: \t {minor}\n");
            write(&root.join("gpus").join(bus).join("information"), &text);
            write(&root.join("sys/bus/pci/devices").join(bus).join("numa_node"), &format!("{node}\n"));
        }
        write(&root.join("build/libnvshare.so"), "the library");
        fs::create_dir_all(root.join("kubelet/device-plugins")).unwrap();
        fs::create_dir_all(root.join("kubelet/pod-resources")).unwrap();
        fs::create_dir_all(root.join("kubelet/plugins_registry")).unwrap();
        let machine = Self { root, gpus, plugins: Vec::new() };
        machine.generate_nvidia();
        machine
    }

    /// NVIDIA's toolkit writes its specification.
    pub(crate) fn generate_nvidia(&self) {
        let text = format!(
            "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: {}\n  containerEdits:\n    deviceNodes:\n    \
             - path: /dev/nvidia0\n- name: \"1\"\n  containerEdits:\n    deviceNodes:\n    - path: /dev/nvidia4\n",
            self.gpus[0]
        );
        write(&self.nvidia(), &text);
    }

    pub(crate) fn nvidia(&self) -> PathBuf {
        self.root.join("etc-cdi/nvidia.yaml")
    }

    pub(crate) fn specification(&self) -> PathBuf {
        self.root.join("cdi/nvshare.com-gpu.json")
    }

    /// The devices that engines read, by their names. There is a file where there are some.
    pub(crate) fn devices(&self) -> Vec<(String, Value)> {
        let text = match fs::read_to_string(self.specification()) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Vec::new(),
            text => text.unwrap(),
        };
        let whole: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&whole["cdiVersion"], &whole["kind"]), (&json!("0.3.0"), &json!("nvshare.com/gpu")));
        let devices = whole["devices"].as_array().unwrap().iter();
        assert!(devices.len() > 0, "engines warn of a specification without devices");
        devices.map(|device| (device["name"].as_str().unwrap().to_owned(), device.clone())).collect()
    }

    /// Starts a plugin that does not let tests wait for long; its number.
    pub(crate) fn start(&mut self, options: &str) -> usize {
        self.start_usual(&format!("--hurry 5 {options}"))
    }

    /// Starts a plugin with its usual pauses; its number.
    pub(crate) fn start_usual(&mut self, options: &str) -> usize {
        let number = self.plugins.len();
        let at = |name: &str| self.root.join(name);
        let plugin = Command::new(env!("CARGO_BIN_EXE_nvshare-device-plugin"))
            .args(["--kubelet".into(), at("kubelet"), "--cdi-dir".into(), at("cdi")])
            .args(["--library".into(), at("build/libnvshare.so"), "--library-dir".into(), at("lib")])
            .args(["--admin-socket".into(), at("admin.sock"), "--state".into(), at("state")])
            .args(["--etc-cdi".into(), at("etc-cdi"), "--gpu-descriptions".into(), at("gpus")])
            .args(["--sysfs".into(), at("sys")])
            .args(options.split_whitespace())
            .env("KUBECONFIG", at("kubeconfig"))
            .stderr(File::create(self.log_file(number)).unwrap())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        self.plugins.push(plugin);
        number
    }

    /// A plugin's process.
    pub(crate) fn pid(&self, plugin: usize) -> u32 {
        self.plugins[plugin].id()
    }

    fn log_file(&self, plugin: usize) -> PathBuf {
        self.root.join(format!("plugin-{plugin}.log"))
    }

    /// The log of a plugin.
    pub(crate) fn log(&self, plugin: usize) -> String {
        fs::read_to_string(self.log_file(plugin)).unwrap()
    }

    /// Kills a plugin, at once.
    pub(crate) fn kill(&mut self, plugin: usize) {
        self.plugins[plugin].kill().unwrap();
        self.plugins[plugin].wait().unwrap();
    }

    /// Waits until a plugin ends by itself; its status.
    pub(crate) async fn ended(&mut self, plugin: usize) -> i32 {
        let child = &mut self.plugins[plugin];
        until("the plugin ends", || child.try_wait().unwrap()).await.code().unwrap()
    }

    /// Waits until a plugin has written this.
    pub(crate) async fn says(&self, plugin: usize, text: &str) {
        until(text, || self.log(plugin).contains(text).then_some(())).await;
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        for (number, plugin) in self.plugins.iter_mut().enumerate() {
            let _ = plugin.kill();
            let _ = plugin.wait();
            if std::thread::panicking() {
                let log = fs::read_to_string(self.root.join(format!("plugin-{number}.log")));
                println!("plugin {number}:\n{}", log.unwrap_or_default());
            }
        }
        let _ = fs::remove_dir_all(&self.root);
    }
}

pub(crate) fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

pub(crate) const fn slot(gpu: GpuUuid, number: u32) -> Slot {
    Slot { gpu, number }
}

/// The container of a pod.
pub(crate) fn holder(pod: &str) -> Occupant {
    Occupant { namespace: "default".to_owned(), pod: pod.to_owned(), container: "main".to_owned() }
}

/// Whether there are devices, and each has this health.
pub(crate) fn are_all(health: &str) -> impl Fn(&[Device]) -> bool {
    move |devices| !devices.is_empty() && devices.iter().all(|device| device.health == health)
}

/// Waits until the seats of `count` single slots are made ahead.
pub(crate) async fn ahead(scheduler: &Scheduler, count: usize) {
    until("seats are made ahead", || (scheduler.seats().len() >= count).then_some(())).await;
}

/// Waits until there is something.
pub(crate) async fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let patience = std::env::var("NVSHARE_TEST_PATIENCE").ok().and_then(|seconds| seconds.parse().ok());
    let end = Instant::now() + Duration::from_secs(patience.unwrap_or(30));
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "this does not happen: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
