//! Settings that administrators make at run time: they survive a restart, and are in force until they are
//! reset.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use nvshare_proto::{DEFAULT_WEIGHT, GpuUuid, Priority, TenantSettings};

use super::values::Tq;
use super::{file, limits};
use crate::lock::lock;
use nvshare_core::{Config, Rule};

/// The small file with the settings made at run time, and its contents.
#[derive(Debug, Default)]
pub struct Store {
    path: Option<PathBuf>,
    state: State,
    /// How many changes there were.
    changes: u64,
    /// The last one that is in the file.
    kept: Arc<Mutex<u64>>,
}

/// A change that is in force, and is to be kept in the file. That takes as long as the disk does.
#[derive(Debug)]
#[must_use = "the change does not survive a restart"]
pub struct Change {
    path: Option<PathBuf>,
    /// The file's text; none: there is no file.
    text: Option<String>,
    number: u64,
    kept: Arc<Mutex<u64>>,
}

impl Change {
    /// Writes the file, unless a later change is there.
    ///
    /// # Errors
    /// The file cannot be written: the setting is in force, and does not survive a restart.
    pub fn keep(self) -> Result<(), String> {
        let path = self.path.ok_or("there is no place for a state file; name one by --state")?;
        let mut kept = lock(&self.kept);
        if *kept > self.number {
            return Ok(());
        }
        let written = match self.text {
            Some(text) => replace(&path, &text),
            None => fs::remove_file(&path)
                .or_else(|error| if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) }),
        };
        written.map_err(|error| format!("{}: {error}", path.display()))?;
        *kept = self.number;
        Ok(())
    }
}

#[derive(Debug, Default, PartialEq)]
struct State {
    tq: Option<Tq>,
    scheduling: Option<bool>,
    gpu: BTreeMap<GpuUuid, Own>,
    /// Limits of Slurm's jobs, by their numbers.
    job: BTreeMap<u32, TenantSettings>,
}

/// The largest number of jobs with settings: a machine runs fewer, and those of jobs that have ended are to be taken back.
const MAX_JOBS: usize = 4096;

#[derive(Debug, PartialEq)]
struct Own {
    tq: Tq,
}

impl Store {
    /// Reads the settings made before. A file that cannot be read stays as it is and does not count. Neither
    /// do settings of another version that this one does not know. The warning says what that is; the rest
    /// counts.
    #[must_use]
    pub fn open(path: Option<PathBuf>) -> (Self, Option<String>) {
        let (state, warning) = path.as_deref().map_or_else(Default::default, read);
        (Self { path, state, ..Self::default() }, warning)
    }

    /// Returns the configuration with the settings made at run time.
    #[must_use]
    pub fn over(&self, config: &Config) -> Config {
        let mut config = config.clone();
        if let Some(tq) = self.state.tq {
            config.set_rule(None, tq.0.into());
        }
        for (&gpu, own) in &self.state.gpu {
            config.set_rule(Some(gpu), own.tq.0.into());
        }
        config
    }

    /// Whether scheduling is on.
    #[must_use]
    pub fn scheduling(&self) -> bool {
        self.state.scheduling.unwrap_or(true)
    }

    /// Sets a quantum of one GPU, or of all.
    pub fn set_quantum(&mut self, gpu: Option<GpuUuid>, rule: Rule) -> Change {
        let tq = Tq(rule.said());
        if let Some(gpu) = gpu {
            self.state.gpu.insert(gpu, Own { tq });
        } else {
            self.state.gpu.clear();
            self.state.tq = Some(tq);
        }
        self.changed()
    }

    /// Sets whether scheduling is on.
    pub fn set_scheduling(&mut self, on: bool) -> Change {
        self.state.scheduling = (!on).then_some(false);
        self.changed()
    }

    /// The limits of one of Slurm's jobs.
    #[must_use]
    pub fn job(&self, job: u32) -> TenantSettings {
        self.state.job.get(&job).copied().unwrap_or_default()
    }

    /// Changes what one of Slurm's jobs may have. A limit of 0 is none. The usual weight and priority are what a job has without a word, so
    /// they are not kept; a job without any setting is forgotten.
    ///
    /// # Errors
    /// There are too many jobs.
    pub fn bound_job(&mut self, job: u32, given: TenantSettings) -> Result<Change, String> {
        let before = self.job(job);
        let takes_back = given.compute == Some(0);
        let now = TenantSettings {
            weight: given.weight.or(before.weight).filter(|&weight| weight != DEFAULT_WEIGHT),
            priority: given.priority.or(before.priority).filter(|&priority| priority != Priority::default()),
            compute: given.compute.or(before.compute).filter(|_| !takes_back),
            enforcement: given.enforcement.or(before.enforcement).filter(|_| !takes_back),
            memory: given.memory.or(before.memory).filter(|&bytes| bytes > 0),
            paused: None,
        };
        if now == TenantSettings::default() {
            self.state.job.remove(&job);
        } else if self.state.job.len() < MAX_JOBS || self.state.job.contains_key(&job) {
            self.state.job.insert(job, now);
        } else {
            return Err(format!(
                "too many jobs: {MAX_JOBS} have settings; an epilog takes them back when a job ends"
            ));
        }
        Ok(self.changed())
    }

    /// Forgets the settings made at run time, but for those of jobs.
    pub fn reset(&mut self) -> Change {
        let job = std::mem::take(&mut self.state.job);
        self.state = State { job, ..State::default() };
        self.changed()
    }

    fn changed(&mut self) -> Change {
        self.changes += 1;
        Change {
            path: self.path.clone(),
            text: (self.state != State::default()).then(|| self.state.text()),
            number: self.changes,
            kept: Arc::clone(&self.kept),
        }
    }
}

impl State {
    /// Returns the settings of a file that this version knows, and the names of the others.
    fn known(table: toml::Table) -> (Self, Vec<String>) {
        let (mut state, mut unknown) = (Self::default(), Vec::new());
        for (name, value) in table {
            let is_known = match (name.as_str(), value) {
                ("tq", value) => keep(&mut state.tq, value),
                ("scheduling", value) => keep(&mut state.scheduling, value),
                ("gpu", toml::Value::Table(gpus)) => {
                    for (gpu, settings) in gpus {
                        unknown.extend(state.add(&gpu, settings));
                    }
                    true
                }
                ("job", toml::Value::Table(jobs)) => {
                    for (job, given) in jobs {
                        match (job.parse(), given.try_into()) {
                            (Ok(number), Ok(given)) => _ = state.job.insert(number, given),
                            _ => unknown.push(format!("job.{job}")),
                        }
                    }
                    true
                }
                _ => false,
            };
            if !is_known {
                unknown.push(name);
            }
        }
        (state, unknown)
    }

    /// Adds what is known of a GPU's settings. Returns the names of the others.
    fn add(&mut self, gpu: &str, settings: toml::Value) -> Vec<String> {
        let (Ok(uuid), toml::Value::Table(settings)) = (gpu.parse(), settings) else {
            return vec![format!("gpu.{gpu}")];
        };
        let mut tq = None;
        let mut is_unknown = |name: &str, value| !(name == "tq" && keep(&mut tq, value));
        let unknown = settings
            .into_iter()
            .filter_map(|(name, value)| is_unknown(&name, value).then(|| format!("gpu.{gpu}.{name}")));
        let unknown = unknown.collect();
        self.gpu.extend(tq.map(|tq| (uuid, Own { tq })));
        unknown
    }

    fn text(&self) -> String {
        let mut text = "# Written by nvshare-scheduler: what administrators set at run time. `nvshare-ctl reset` forgets all but the jobs.\n"
            .to_owned();
        // Writing to a text cannot fail.
        if let Some(tq) = self.tq {
            let _ = writeln!(text, "tq = \"{}\"", tq.0);
        }
        if let Some(scheduling) = self.scheduling {
            let _ = writeln!(text, "scheduling = {scheduling}");
        }
        for (gpu, own) in &self.gpu {
            let _ = writeln!(text, "[gpu.{gpu}]\ntq = \"{}\"", own.tq.0);
        }
        for (job, &given) in &self.job {
            let _ = write!(text, "[job.{job}]\n{}", limits::lines(given));
        }
        text
    }
}

/// Keeps a value of which this version knows what it means. False: it does not.
fn keep<T: serde::de::DeserializeOwned>(place: &mut Option<T>, value: toml::Value) -> bool {
    *place = value.try_into().ok();
    place.is_some()
}

/// Reads the settings in the file. Returns them, and a warning about those that do not count.
fn read(path: &Path) -> (State, Option<String>) {
    let place = path.display();
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Default::default(),
        Err(error) => return (State::default(), Some(format!("{place}: {error}; {NOTHING_COUNTS}"))),
    };
    match file::parse(&text) {
        Ok(table) => {
            let (state, unknown) = State::known(table);
            let left_out = || format!("{place}: not known here and left out: {}", unknown.join(", "));
            (state, (!unknown.is_empty()).then(left_out))
        }
        Err(error) => (State::default(), Some(format!("{place}: {error}; {NOTHING_COUNTS}"))),
    }
}

/// Said of a file of which nothing can be read.
const NOTHING_COUNTS: &str = "what was set at run time is not in force";

/// Writes a file whole or not at all, even if the process ends meanwhile.
pub(crate) fn replace(path: &Path, text: &str) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder)?;
    let mut name = path.file_name().ok_or(ErrorKind::InvalidInput)?.to_owned();
    name.push(".new");
    let new = folder.join(name);
    let written = (|| {
        let mut file = File::create(&new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, path)?;
        File::open(folder)?.sync_all()
    })();
    written.inspect_err(|_| {
        let _ = fs::remove_file(&new);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvshare_core::{AutoTarget, GpuConfig};
    use std::time::Duration;

    const ONE: GpuUuid = GpuUuid([1; 16]);
    const OTHER: GpuUuid = GpuUuid([2; 16]);
    const fn seconds(seconds: u64) -> Rule {
        Rule::Fixed(Duration::from_secs(seconds))
    }

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("nvshare-store-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    #[test]
    fn settings_at_run_time_survive_and_come_first_until_they_are_reset() {
        let folder = folder("survives");
        let path = folder.join("deep/state.toml");
        let own = GpuConfig { quantum: Some(Duration::from_secs(3)), ..GpuConfig::default() };
        let config = Config { gpus: [(ONE, own)].into(), ..Config::default() };
        let open = || {
            let (store, error) = Store::open(Some(path.clone()));
            assert_eq!(error, None);
            store
        };
        let mut store = open();
        assert_eq!(store.over(&config).rule(ONE), seconds(3));
        store.set_quantum(Some(OTHER), seconds(4)).keep().unwrap();
        let auto = Rule::Auto(AutoTarget { overhead_ppm: 25_000, max_wait: Duration::from_millis(400) });
        store.set_quantum(None, auto).keep().unwrap();
        let early = store.set_quantum(Some(OTHER), seconds(9));
        store.set_scheduling(false).keep().unwrap();
        early.keep().expect("a later change is there, with this one");
        let mut store = open();
        let over = store.over(&config);
        assert_eq!((over.rule(ONE), over.rule(OTHER)), (auto, seconds(9)));
        assert!(!store.scheduling());
        store.reset().keep().unwrap();
        assert!(!path.exists() && store.scheduling());
        assert_eq!(open().over(&config).rule(ONE), seconds(3));
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0, "nothing is left behind");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn settings_of_jobs_survive_until_they_are_taken_back() {
        let folder = folder("jobs");
        let path = folder.join("state.toml");
        let open = || Store::open(Some(path.clone()));
        let mut store = open().0;
        let (memory, compute) = (Some(8 << 30), Some(25));
        let enforcement = Some(nvshare_proto::Enforcement::Force);
        let first = TenantSettings { memory, compute, enforcement, ..TenantSettings::default() };
        store.bound_job(7, first).unwrap().keep().unwrap();
        let later = TenantSettings { weight: Some(50), compute: Some(30), ..TenantSettings::default() };
        store.bound_job(7, later).unwrap().keep().unwrap();
        store.bound_job(8, later).unwrap().keep().unwrap();
        store.reset().keep().unwrap();
        let mut store = open().0;
        let all = TenantSettings { weight: Some(50), compute: Some(30), ..first };
        assert_eq!((store.job(7), store.job(8), store.job(9)), (all, later, TenantSettings::default()));
        let none = TenantSettings { memory: Some(0), compute: Some(0), ..TenantSettings::default() };
        store.bound_job(7, none).unwrap().keep().unwrap();
        assert_eq!(
            store.job(7),
            TenantSettings { weight: Some(50), ..TenantSettings::default() },
            "its policy went with its limit"
        );
        store.bound_job(5, first).unwrap().keep().unwrap();
        store.bound_job(5, none).unwrap().keep().unwrap();
        assert!(!fs::read_to_string(&path).unwrap().contains("job.5"), "nothing is kept for nothing");
        let share = |weight, priority| TenantSettings { weight, priority, ..TenantSettings::default() };
        store.bound_job(5, share(Some(50), Some(Priority::High))).unwrap().keep().unwrap();
        store.bound_job(5, share(None, Some(Priority::Normal))).unwrap().keep().unwrap();
        assert_eq!(store.job(5), share(Some(50), None));
        store.bound_job(5, share(Some(100), None)).unwrap().keep().unwrap();
        assert!(!fs::read_to_string(&path).unwrap().contains("job.5"), "nor for what is usual");
        fs::write(&path, "[job.7]\nmemory = 1073741824\n[job.x]\nmemory = 1\n[job.9]\nmemory = \"much\"\n")
            .unwrap();
        let (store, warning) = open();
        assert_eq!(store.job(7), TenantSettings { memory: Some(1 << 30), ..TenantSettings::default() });
        let warning = warning.unwrap();
        assert!(warning.contains("job.x") && warning.contains("job.9"), "{warning}");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn there_are_so_many_jobs_with_settings() {
        let mut store = Store::default();
        let given = TenantSettings { memory: Some(1 << 30), ..TenantSettings::default() };
        for job in 0..MAX_JOBS as u32 {
            let _ = store.bound_job(job, given).unwrap();
        }
        assert!(store.bound_job(MAX_JOBS as u32, given).unwrap_err().contains("epilog"));
        assert!(store.bound_job(0, TenantSettings { weight: Some(5), ..given }).is_ok(), "it is there");
    }

    #[test]
    fn a_damaged_file_is_reported_and_does_not_count() {
        let folder = folder("damaged");
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("state.toml");
        fs::write(&path, "tq = 4\nscheduling = maybe\n").unwrap();
        let (store, error) = Store::open(Some(path));
        assert!(error.unwrap().contains("state.toml: line 2: "));
        assert!(store.scheduling() && store.state == State::default());
        fs::remove_dir_all(folder).unwrap();
    }

    /// A newer version wrote it, and this one is back.
    #[test]
    fn what_this_version_does_not_know_takes_nothing_else_with_it() {
        let folder = folder("newer");
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("state.toml");
        let text = format!(
            "tq = 4\nscheduling = false\nfuture = [1]\n[gpu.{ONE}]\ntq = 5\nclock = 3\n[gpu.{OTHER}]\ntq = \"soon\"\n[gpu.x]\n[more]\na = 1\n"
        );
        fs::write(&path, text).unwrap();
        let (store, warning) = Store::open(Some(path.clone()));
        let over = store.over(&Config::default());
        assert_eq!((over.rule(ONE), over.rule(OTHER)), (seconds(5), seconds(4)));
        assert!(!store.scheduling());
        let warning = warning.unwrap();
        let (place, names) = warning.split_once(": not known here and left out: ").unwrap();
        assert_eq!(place, path.display().to_string());
        let mut names: Vec<&str> = names.split(", ").collect();
        names.sort_unstable();
        let mut expected = [
            "future".into(),
            format!("gpu.{ONE}.clock"),
            format!("gpu.{OTHER}.tq"),
            "gpu.x".into(),
            "more".into(),
        ];
        expected.sort_unstable();
        assert_eq!(names, expected);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_place_that_cannot_be_written_is_named() {
        let mut store = Store::open(Some("/proc/nvshare/state.toml".into())).0;
        assert!(
            store.set_quantum(None, seconds(4)).keep().unwrap_err().starts_with("/proc/nvshare/state.toml: ")
        );
        assert_eq!(store.over(&Config::default()).rule(ONE), seconds(4), "it is in force all the same");
    }
}
