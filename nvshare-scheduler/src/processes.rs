//! The kernel's facts about a client's process, shown to administrators and to the client's own user.

use std::fs;

use nvshare_proto::ProcessInfo;

use crate::tenants::{container_id, container_of};

/// Longest command that is shown, in characters.
const LONGEST_COMMAND: usize = 160;

/// A process, as the kernel describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Described {
    /// The part that is shown.
    pub info: ProcessInfo,
    /// The control group of the process's container: the whole path, since anybody can make one with the same ending.
    pub container: Option<String>,
}

/// Whether a character is shown: not if it controls a terminal or the direction of text.
pub(crate) fn is_harmless(c: char) -> bool {
    c.is_ascii_graphic() || c == ' ' || c.is_alphanumeric()
}

/// Describes a process by its number from the kernel; none if the process is gone already.
#[must_use]
pub fn describe(pid: u32, user: u32) -> Option<Described> {
    let arguments = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let container = container_of(&groups).map(str::to_owned);
    let info = ProcessInfo {
        user,
        command: command(&arguments, &name),
        container: container.as_deref().map(|path| container_id(path).to_owned()),
        pod: pod_of(&groups),
        job: job_of(&groups).map(str::to_owned),
    };
    Some(Described { info, container })
}

/// The program and its arguments as `ps` shows them, shortened; a process without arguments is shown by its name in brackets.
fn command(arguments: &[u8], name: &str) -> String {
    let text = String::from_utf8_lossy(arguments);
    let words: Vec<&str> = text.split('\0').filter(|word| !word.is_empty()).collect();
    let line = if words.is_empty() { format!("[{}]", name.trim()) } else { words.join(" ") };
    // A process chooses its arguments itself, and a terminal obeys control characters.
    let line: String = line.chars().map(|c| if is_shown(c) { c } else { ' ' }).collect();
    match line.char_indices().nth(LONGEST_COMMAND) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

/// Arguments may be in any script: only characters that are known to do harm are left out.
fn is_shown(c: char) -> bool {
    let turns_round =
        matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}');
    !c.is_control() && !turns_round
}

/// The UID of the Kubernetes pod that `/proc/PID/cgroup` names: cgroupfs writes `podUID`, systemd
/// `kubepods-burstable-podUID.slice` with underscores.
fn pod_of(groups: &str) -> Option<String> {
    parts(groups).filter(|part| part.contains("pod")).find_map(|part| {
        let name = part.strip_suffix(".slice").unwrap_or(part);
        let uid = name.rsplit_once("pod").map(|(_, uid)| uid.replace('_', "-"))?;
        let is_uid = uid.len() >= 32 && uid.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
        is_uid.then_some(uid)
    })
}

/// Slurm's job: `…/slurm…/job_123/…`.
fn job_of(groups: &str) -> Option<&str> {
    groups.lines().filter(|line| line.contains("slurm")).find_map(|line| {
        let job = line.split('/').find_map(|part| part.strip_prefix("job_"))?;
        (!job.is_empty() && job.bytes().all(|byte| byte.is_ascii_digit())).then_some(job)
    })
}

fn parts(groups: &str) -> impl Iterator<Item = &str> {
    groups.lines().filter_map(|line| line.splitn(3, ':').nth(2)).flat_map(|path| path.split('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_one_harmless_line() {
        for (arguments, name, expected) in [
            (&b"python3\0train.py\0--lr=1\0"[..], "python3", "python3 train.py --lr=1".to_owned()),
            (b"", "kworker", "[kworker]".to_owned()),
            (b"a\x1b[31m\0b\nc\0", "a", "a [31m b c".to_owned()),
            ("x\u{202e}fdp.sh\0\u{e4}\u{2066}".as_bytes(), "x", "x fdp.sh \u{e4} ".to_owned()),
            (&[b'x'; 500], "x", "x".repeat(LONGEST_COMMAND) + "…"),
        ] {
            assert_eq!(command(arguments, name), expected);
        }
    }

    #[test]
    fn pods_and_jobs_by_their_control_groups() {
        const UID: &str = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0";
        let flat = UID.replace('-', "_");
        for (groups, pod, job) in [
            (
                format!("0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{flat}.slice/x"),
                Some(UID),
                None,
            ),
            (format!("11:memory:/kubepods/besteffort/pod{UID}/abc"), Some(UID), None),
            ("0::/machine.slice/libpod-payload.scope".to_owned(), None, None),
            ("0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0".to_owned(), None, Some("42")),
            ("9:cpuset:/slurm/uid_1000/job_7/step_batch".to_owned(), None, Some("7")),
            ("0::/user.slice/job_x".to_owned(), None, None),
        ] {
            assert_eq!(pod_of(&groups).as_deref(), pod, "{groups}");
            assert_eq!(job_of(&groups), job, "{groups}");
        }
    }

    #[test]
    fn this_process_is_described() {
        let own = describe(std::process::id(), 7).expect("this process");
        assert!(own.info.user == 7 && !own.info.command.is_empty(), "{own:?}");
        assert_eq!(describe(u32::MAX, 7), None);
    }
}
