//! Metrics for Prometheus: figures of the scheduler, of each GPU and of each tenant. `table.rs` has all of them.
//!
//! Events are counted as they happen (`counted.rs`), for as many tenants as may have figures of their own (`tenants.rs`). The
//! present state is taken from a snapshot of the core when a reader asks (`shown.rs`). A thread of its own makes the text (`http.rs`),
//! from a snapshot that several readers share.

mod counted;
mod gpus;
mod http;
mod shown;
mod table;
mod tenants;

use std::collections::BTreeSet;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use nvshare_proto::{ClientStatus, GpuStatus, GpuUuid, ProcessInfo, SchedulerStatus, SeatName, SeatStatus};
use prometheus_client::encoding::{EncodeLabelSet, LabelSetEncoder};

pub(crate) use counted::{Counted, Counters};
pub(crate) use http::{Question, serve};

/// The address at which metrics are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A TCP port.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

/// Forms that [`Address`] accepts, for error messages.
const ACCEPTED: &str = "127.0.0.1:9464, [::1]:9464, or a Unix socket's path that begins with /";

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with('/') {
            return Ok(Self::Unix(text.into()));
        }
        let no_address = || format!("{text:?} is no address; accepted: {ACCEPTED}");
        text.parse().map(Self::Tcp).map_err(|_| no_address())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "http://{address}/metrics"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// The state of the scheduler at one moment.
#[derive(Debug, Clone)]
pub(crate) struct Snapshot {
    pub(crate) scheduler: SchedulerStatus,
    pub(crate) gpus: Vec<GpuStatus>,
    pub(crate) clients: Vec<ClientStatus>,
    pub(crate) seats: Vec<SeatStatus>,
    /// Those that a container has, and to which no client came since.
    pub(crate) unused: BTreeSet<SeatName>,
    pub(crate) memory: nvshare_proto::MemoryStatus,
}

/// The GPU of a figure, as labels.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord, EncodeLabelSet)]
pub(crate) struct OfGpu {
    pub(crate) gpu_uuid: String,
}

impl OfGpu {
    pub(crate) fn new(gpu: GpuUuid) -> Self {
        Self { gpu_uuid: gpu.to_string() }
    }
}

/// The tenant and the GPU of a figure, as labels. Parts that are not known are empty, and readers do not get them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct OfTenant {
    pub(crate) gpu_uuid: String,
    pub(crate) user: String,
    pub(crate) pod_uid: String,
    pub(crate) container_id: String,
    pub(crate) job: String,
    pub(crate) seat: String,
    pub(crate) program: String,
}

impl EncodeLabelSet for OfTenant {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        let labels = [
            ("gpu_uuid", &self.gpu_uuid),
            ("user", &self.user),
            ("pod_uid", &self.pod_uid),
            ("container_id", &self.container_id),
            ("job", &self.job),
            ("seat", &self.seat),
            ("program", &self.program),
        ];
        Vec::from_iter(
            labels
                .into_iter()
                .filter(|(_, value)| !value.is_empty())
                .map(|(label, value)| (label, value.as_str())),
        )
        .encode(encoder)
    }
}

impl OfTenant {
    /// The labels of a client, without a GPU yet.
    pub(crate) fn of(process: Option<&ProcessInfo>, program: &str) -> Self {
        let part = |part: fn(&ProcessInfo) -> Option<String>| process.and_then(part).unwrap_or_default();
        Self {
            gpu_uuid: String::new(),
            user: part(|process| Some(process.user.to_string())),
            pod_uid: part(|process| process.pod.clone()),
            container_id: part(|process| process.container.clone()),
            job: part(|process| process.job.clone()),
            seat: String::new(),
            program: program.to_owned(),
        }
    }

    /// The labels of a seat's clients, without a GPU yet. None that a program chose is among them.
    pub(crate) fn of_seat(seat: SeatName) -> Self {
        Self { seat: seat.to_string(), ..Self::default() }
    }

    pub(crate) fn on(&self, gpu: &OfGpu) -> Self {
        Self { gpu_uuid: gpu.gpu_uuid.clone(), ..self.clone() }
    }

    /// The tenant, on whatever GPU.
    pub(crate) fn on_all(&self) -> Self {
        Self { gpu_uuid: String::new(), ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use nvshare_proto::{Occupant, Seat, Slot, TenantSettings};
    use prometheus_client::metrics::MetricType;

    use super::table::{METRICS, Metric};
    use super::*;

    #[test]
    fn addresses_in_every_accepted_form() {
        let tcp = |text: &str| Address::Tcp(text.parse().expect("an address"));
        for (text, address) in [
            ("127.0.0.1:9464", tcp("127.0.0.1:9464")),
            ("[::]:80", tcp("[::]:80")),
            ("/run/nvshare/metrics.sock", Address::Unix("/run/nvshare/metrics.sock".into())),
        ] {
            assert_eq!(text.parse(), Ok(address));
        }
        for text in [
            "",
            "9464",
            ":9464",
            "localhost:9464",
            "127.0.0.1",
            "127.0.0.1:99999",
            "http://[::1]:1",
            "a.sock",
        ] {
            let error = text.parse::<Address>().unwrap_err();
            assert_eq!(error, format!("{text:?} is no address; accepted: {ACCEPTED}"));
        }
    }

    /// A seat that a container has, with client 2.
    fn held_seat(gpu: GpuUuid) -> SeatStatus {
        let seat = Seat { slots: vec![Slot { gpu, number: 0 }], given: TenantSettings::default() };
        let holder = Occupant { namespace: "lab".into(), pod: "train-0".into(), container: "main".into() };
        SeatStatus { name: seat.name(), seat, occupant: Some(holder), clients: vec![2] }
    }

    /// A process of which all is known.
    fn described() -> ProcessInfo {
        ProcessInfo {
            pod: Some("7d0c5a3e".into()),
            container: Some("c0ffee".into()),
            job: Some("42".into()),
            user: 1000,
            ..ProcessInfo::default()
        }
    }

    /// A text that contains each metric.
    fn sample() -> String {
        use nvshare_core::{Incident, Time};
        use nvshare_proto::EventKind::{self, Deferred, Evicted, Granted, Refused, Restored};
        use nvshare_proto::Usage;
        use prometheus_client::registry::Registry;

        let gpu = GpuUuid([7; 16]);
        let mut registry = Registry::with_prefix("nvshare");
        let counters = std::sync::Arc::new(Counters::new(&mut registry));
        let mut counted = Counted::new(counters.clone());
        let known = described();
        counted.expect(1, OfTenant::of(Some(&known), "a \"quoted\" name"));
        counted.expect(2, OfTenant::of_seat(held_seat(gpu).name));
        let happens = |counted: &mut Counted, kind, client| {
            let gpus = vec![gpu];
            let incident =
                Incident { kind, client: Some(client), gpus, bytes: Some(1), took: Some(Time::ZERO) };
            counted.record(&incident, Time::ZERO);
        };
        happens(&mut counted, EventKind::Awake, 2);
        happens(&mut counted, EventKind::Waiting, 2);
        for kind in [Granted, Evicted, Restored, Refused, Deferred] {
            happens(&mut counted, kind, 2);
        }
        happens(&mut counted, EventKind::Registered, 1);
        [1, 2].into_iter().for_each(|client| counted.said(client, &nvshare_proto::Counters::default()));
        EventKind::ALL.into_iter().for_each(|kind| happens(&mut counted, kind, 1));
        happens(&mut counted, EventKind::Running, 2);
        let usage = Usage { gpu, total: 9, limit: 8, allocated: 7, absent: 1, immovable: 0 };
        let client = |id, name: &str| ClientStatus {
            name: name.to_owned(),
            state: nvshare_proto::ClientState::Running,
            usage: vec![usage],
            ..ClientStatus::parked(id)
        };
        let mut clients = vec![client(1, "a \"quoted\" name"), client(2, "chosen by its program")];
        clients[0].process = Some(known);
        let scheduler = SchedulerStatus {
            version: "1".to_owned(),
            pid: 1,
            uptime_s: 2,
            scheduling: true,
            quantum_ms: 30_000,
            restricted: false,
            host_memory: Some(nvshare_proto::HostStatus { budget: 3, each: 2, used: 1 }),
        };
        let shown = shown::Shown::new(counters);
        shown.set(Snapshot {
            scheduler,
            gpus: vec![GpuStatus {
                index: Some(0),
                name: Some("Tesla T4".to_owned()),
                ..GpuStatus::idle(gpu)
            }],
            clients,
            seats: vec![held_seat(gpu)],
            unused: BTreeSet::from([held_seat(gpu).name]),
            memory: Default::default(),
        });
        registry.register_collector(Box::new(shown));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("a text");
        text
    }

    /// The text with the series of each metric in the order of their labels; readers get them in any order.
    fn in_order(text: &str) -> String {
        let (mut sorted, mut series) = (String::new(), Vec::new());
        for line in text.split_inclusive('\n') {
            if line.starts_with('#') {
                series.sort_unstable();
                sorted.extend(series.drain(..));
                sorted.push_str(line);
            } else {
                series.push(line);
            }
        }
        sorted
    }

    #[test]
    fn readers_get_the_text_that_they_know() {
        compare("nvshare-scheduler/src/metrics/sample.txt", &in_order(&sample()));
    }

    /// Compares a file of the tree with its text as it should be; `NVSHARE_GOLDEN=write` writes it first.
    fn compare(file: &str, expected: &str) {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file);
        if std::env::var_os("NVSHARE_GOLDEN").is_some_and(|what| what == "write") {
            std::fs::write(&path, expected).unwrap();
        }
        let there = std::fs::read_to_string(&path).unwrap();
        let differs = there.lines().zip(expected.lines()).find(|(there, expected)| there != expected);
        assert!(there == expected, "{file}: {differs:?}; if that is meant: NVSHARE_GOLDEN=write");
    }

    /// Whether a metric with these labels belongs to a section.
    type Belongs = fn(&[&str]) -> bool;

    /// The sections of the page, by their headings, and the labels by which a metric belongs to one.
    const SECTIONS: [(&str, Belongs); 4] = [
        ("## Of the scheduler", |labels| !labels.contains(&"gpu_uuid") && !labels.contains(&"user")),
        ("## Of a GPU", |labels| labels.contains(&"gpu_uuid") && !labels.contains(&"user")),
        ("## Of a tenant on a GPU", |labels| labels.contains(&"gpu_uuid") && labels.contains(&"user")),
        ("## Of a tenant as a whole", |labels| !labels.contains(&"gpu_uuid") && labels.contains(&"user")),
    ];

    /// A metric's name and type, as Prometheus knows them.
    fn shown_as(metric: &Metric) -> (String, &'static str) {
        match metric.source.kind() {
            MetricType::Counter => (format!("nvshare_{}_total", metric.name), "counter"),
            MetricType::Histogram => (format!("nvshare_{}", metric.name), "histogram"),
            _ => (format!("nvshare_{}", metric.name), "gauge"),
        }
    }

    /// The table of a section of the page. A tenant's labels are named above it.
    fn page_table(belongs: Belongs) -> String {
        let rows: Vec<&Metric> = METRICS.iter().filter(|metric| belongs(metric.source.labels())).collect();
        let is_of_tenants = rows.iter().all(|metric| metric.source.labels().ends_with(&["program"]));
        let head = if is_of_tenants { ["", ""] } else { [" labels |", "---|"] };
        let mut table = format!("| name | type |{} meaning |\n|---|---|{}---|\n", head[0], head[1]);
        for metric in rows {
            let (name, kind) = shown_as(metric);
            let labels = metric.source.labels().iter().map(|label| format!("`{label}`"));
            let labels = labels.collect::<Vec<_>>().join(", ");
            let labels =
                if is_of_tenants { String::new() } else { format!(" {labels} |").replace("  ", " ") };
            let (first, rest) = metric.help.split_at(1);
            let meaning = format!("{}{rest}{}", first.to_lowercase(), metric.more);
            table += &format!("| `{name}` | {kind} |{labels} {meaning} |\n");
        }
        table
    }

    #[test]
    fn the_page_has_all_metrics() {
        const PAGE: &str = "docs/metrics.md";
        let mut page = include_str!("../../../docs/metrics.md").to_owned();
        for (heading, belongs) in SECTIONS {
            let section = page.find(heading).unwrap_or_else(|| panic!("no {heading}"));
            let begin = section + page[section..].find("| name |").expect("a table");
            let end = page[begin..].find("\n\n").map_or(page.len(), |length| begin + length + 1);
            page.replace_range(begin..end, &page_table(belongs));
        }
        compare(PAGE, &page);
    }

    #[test]
    fn series_have_the_labels_of_the_table() {
        let text = sample();
        assert!(text.ends_with("# EOF\n"), "{text}");
        assert!(text.contains("program=\"a \\\"quoted\\\" name\""), "names are escaped: {text}");
        let page = include_str!("../../../docs/metrics.md");
        for metric in METRICS {
            let labels = metric.source.labels();
            for label in labels {
                assert!(page.contains(&format!("`{label}`")), "{label} is not documented");
            }
            let name = format!("nvshare_{}", metric.name);
            let ends = ["", "_total", "_sum"].map(|end| format!("{name}{end}"));
            let of = |line: &&str| ends.iter().any(|name| line.split(['{', ' ']).next() == Some(name));
            let series: Vec<&str> = text.lines().filter(of).collect();
            assert!(!series.is_empty(), "the sample has no {name}");
            let mut shown = BTreeSet::new();
            for line in series {
                let keys = line.split_once('{').and_then(|(_, rest)| Some(keys(rest.rsplit_once('}')?.0)));
                let keys = keys.unwrap_or_default();
                assert!(!line.contains("=\"\""), "an empty label: {line}");
                // A tenant has the labels that are known of it.
                let mut known = labels.to_vec();
                known.retain(|label| !labels.contains(&"program") || keys.iter().any(|key| key == label));
                shown.extend(known.iter().copied());
                assert_eq!(keys, known, "{line}");
            }
            let missing: Vec<_> = labels.iter().filter(|label| !shown.contains(*label)).collect();
            assert!(missing.is_empty(), "{name}: the sample has no {missing:?}");
        }
    }

    /// The names of labels, in `a="x",b="y"`.
    fn keys(labels: &str) -> Vec<String> {
        let parts = labels.split("=\"").map(|part| part.rsplit(',').next().unwrap_or(part));
        let mut keys: Vec<String> = parts.map(str::to_owned).collect();
        keys.pop();
        keys
    }

    #[test]
    fn dashboard_and_alerts_ask_for_metrics_that_exist() {
        let names: Vec<String> = METRICS
            .iter()
            .map(shown_as)
            .flat_map(|(name, kind)| {
                let ends: &[&str] = if kind == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
                ends.iter().map(|end| format!("{name}{end}")).collect::<Vec<_>>()
            })
            .collect();
        for (file, text) in [
            ("grafana-dashboard.json", include_str!("../../../docs/monitoring/grafana-dashboard.json")),
            ("prometheus-rules.yaml", include_str!("../../../docs/monitoring/prometheus-rules.yaml")),
        ] {
            let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let asked: Vec<&str> = words.filter(|word| word.starts_with("nvshare_")).collect();
            assert!(asked.len() > 5, "{file}: {asked:?}");
            let unknown: Vec<_> =
                asked.iter().filter(|asked| !names.iter().any(|name| name == **asked)).collect();
            assert!(unknown.is_empty(), "{file}: {unknown:?}");
            // A seat's name says nothing to people: its pod does.
            let of_seats = text.split("by (").skip(1).filter(|rest| {
                rest.split(')').next().is_some_and(|labels| labels.split(", ").any(|label| label == "seat"))
            });
            for sum in of_seats {
                assert!(sum.contains("unless on (instance, seat) nvshare_seat_info"), "{file}: {sum}");
            }
            assert!(
                text.contains(
                    "* on (instance, seat) group_left (namespace, pod, container) nvshare_seat_info"
                ),
                "{file}"
            );
            // Sums are made by labels that exist.
            for labels in text.split("by (").skip(1).filter_map(|rest| rest.split(')').next()) {
                for label in labels.split(',').map(str::trim) {
                    let known = ["le", "instance"].contains(&label)
                        || METRICS.iter().any(|metric| metric.source.labels().contains(&label));
                    assert!(known, "{file}: {label}");
                }
            }
        }
    }
}
