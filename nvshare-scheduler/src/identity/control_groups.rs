//! A process's control groups, as `/proc/PID/cgroup` names them: its container, pod and job, and for whom the container counts.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::whom::Whom;

/// The control groups of a process: a line for each hierarchy, "number:controllers:path".
#[derive(Debug, Clone, Default)]
pub(crate) struct Groups(String);

impl Groups {
    /// Those of the process that has this number now.
    pub(crate) fn of(pid: u32) -> Self {
        Self(fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default())
    }

    /// The controllers and the path of the group in each hierarchy.
    fn each(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.lines().filter_map(|line| {
            let (_, rest) = line.split_once(':')?;
            rest.split_once(':')
        })
    }

    fn parts(&self) -> impl Iterator<Item = &str> {
        self.each().flat_map(|(_, path)| path.split('/'))
    }

    /// The paths that end with a part that a container runtime made, the innermost first, and the controllers of their hierarchy.
    fn containers(&self) -> Vec<(&str, &str)> {
        let mut of_each = self.each().map(|(controllers, path)| {
            groups(path)
                .filter(|path| id_of(path).is_some())
                .map(|path| (controllers, path))
                .collect::<Vec<_>>()
        });
        of_each.find(|found| !found.is_empty()).unwrap_or_default()
    }

    /// The path of the process's container: up to the innermost part that a runtime made.
    pub(crate) fn container(&self) -> Option<&str> {
        self.containers().first().map(|(_, path)| *path)
    }

    /// The identifier that the runtime gave the container; to show, not to compare.
    pub(crate) fn container_id(&self) -> Option<&str> {
        id_of(self.container()?)
    }

    /// For whom the process's connections count: a container, unless a user made its group, as with containers without root: then
    /// that user, who can make as many as he likes. Containers within a container count for that. Outside of containers, it is the user whose
    /// session the process is in: within it, a user can have as many numbers as `/etc/subuid` gives him.
    pub(crate) fn whom(&self, user: Option<u32>) -> Whom {
        self.whom_by(user, maker)
    }

    fn whom_by(&self, user: Option<u32>, maker: impl Fn(&str, &str) -> Option<u32>) -> Whom {
        let containers = self.containers();
        let Some((controllers, path)) = containers.last() else {
            let of_session = self.session_user(maker).filter(|_| user != Some(0));
            return Whom::User(of_session.or(user));
        };
        match maker(controllers, path) {
            Some(maker @ 1..) => Whom::User(Some(maker)),
            _ => Whom::Container((*path).to_owned()),
        }
    }

    /// The user in whose slice of systemd the process is, if root made that.
    fn session_user(&self, maker: impl Fn(&str, &str) -> Option<u32>) -> Option<u32> {
        self.each().find_map(|(controllers, path)| {
            let (slice, user) = groups(path).find_map(|group| Some((group, slice_user(group)?)))?;
            (maker(controllers, slice) == Some(0)).then_some(user)
        })
    }

    /// The UID of the process's Kubernetes pod: cgroupfs writes `podUID`, systemd `kubepods-burstable-podUID.slice` with underscores.
    pub(crate) fn pod(&self) -> Option<String> {
        self.parts().filter(|part| part.contains("pod")).find_map(|part| {
            let name = part.strip_suffix(".slice").unwrap_or(part);
            let uid = name.rsplit_once("pod").map(|(_, uid)| uid.replace('_', "-"))?;
            let is_uid = uid.len() >= 32 && uid.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
            is_uid.then_some(uid)
        })
    }

    /// Slurm's job, if root made its control group and all above it. In a container it counts for nothing: root of the container can
    /// make such a group.
    pub(crate) fn job(&self) -> Option<u32> {
        self.job_by(maker)
    }

    fn job_by(&self, maker: impl Fn(&str, &str) -> Option<u32>) -> Option<u32> {
        self.each().find_map(|(controllers, path)| {
            // The outermost one, though nobody but root makes a group within it.
            let (group, job) = groups(path).filter_map(|group| Some((group, job_of(group)?))).last()?;
            // A group of version 1 gets another name by whoever may write to the one above.
            let is_roots = |group| id_of(group).is_none() && maker(controllers, group) == Some(0);
            groups(group).all(is_roots).then_some(job)
        })
    }
}

/// A group and those above it, without the root of the hierarchy.
fn groups(path: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(path), |&path| above(path)).filter(|path| !path.is_empty())
}

/// The job, if a path is that of a job's group as Slurm's plugins make it. Version 2: `…/slurmstepd.scope/job_123`, with the node's name and
/// an underscore before the scope's where a machine plays several nodes. Version 1: `/slurm/uid_1000/job_123`, or `/slurm_NODE/…`.
/// (Slurm, `cgroup_v2.c` and `xcgroup.c`.)
fn job_of(path: &str) -> Option<u32> {
    let (place, part) = path.rsplit_once('/')?;
    let job = number(part.strip_prefix("job_")?)?;
    let (upper, name) = place.rsplit_once('/')?;
    let is_scope = name == "slurmstepd.scope" || name.ends_with("_slurmstepd.scope");
    let is_users = name.strip_prefix("uid_").and_then(number).is_some()
        && upper.rsplit_once('/').is_some_and(|(_, name)| name == "slurm" || name.starts_with("slurm_"));
    (is_scope || is_users).then_some(job)
}

/// The user, if a path is that of a user's slice: `/user.slice/user-1000.slice` (systemd, `systemd.special(7)`).
fn slice_user(path: &str) -> Option<u32> {
    number(path.strip_prefix("/user.slice/user-")?.strip_suffix(".slice")?)
}

/// A number of digits alone.
fn number(text: &str) -> Option<u32> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// The path of the group above.
fn above(path: &str) -> Option<&str> {
    path.rsplit_once('/').map(|(above, _)| above)
}

/// The identifier in the last part of a path, if a container runtime made that part: systemd's form is `docker-ID.scope`, cgroupfs's the
/// bare identifier.
fn id_of(path: &str) -> Option<&str> {
    let (_, part) = path.rsplit_once('/')?;
    let name = part.strip_suffix(".scope").unwrap_or(part);
    let id = name.rsplit_once('-').map_or(name, |(_, id)| id);
    (id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(id)
}

/// The user who made a control group, where this process sees the hierarchy.
fn maker(controllers: &str, path: &str) -> Option<u32> {
    static HIERARCHIES: OnceLock<Vec<Hierarchy>> = OnceLock::new();
    let hierarchies = HIERARCHIES.get_or_init(|| {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        mounts.lines().filter_map(Hierarchy::mounted).collect()
    });
    // Outside of this process's own part of the hierarchy nothing can be looked up.
    if path.split('/').any(|part| part == "..") {
        return None;
    }
    let hierarchy = hierarchies.iter().find(|hierarchy| hierarchy.is_of(controllers))?;
    let group = hierarchy.at.join(path.trim_start_matches('/'));
    fs::metadata(group).ok().map(|group| group.uid())
}

/// A hierarchy of control groups that is mounted as a whole.
#[derive(Debug)]
struct Hierarchy {
    at: PathBuf,
    /// The controllers, or the name, of a hierarchy of version 1; none: version 2.
    controllers: Option<Vec<String>>,
}

impl Hierarchy {
    /// The one that a line of `/proc/PID/mountinfo` tells of: "… root at options … - type source options".
    fn mounted(line: &str) -> Option<Self> {
        let (mount, filesystem) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(3);
        let (root, at) = (mount.next()?, mount.next()?);
        let mut filesystem = filesystem.split(' ');
        let (kind, options) = (filesystem.next()?, filesystem.nth(1)?);
        let controllers = match kind {
            "cgroup2" => None,
            "cgroup" => Some(options.split(',').map(str::to_owned).collect()),
            _ => return None,
        };
        (root == "/").then(|| Self { at: Path::new(at).to_owned(), controllers })
    }

    fn is_of(&self, controllers: &str) -> bool {
        match &self.controllers {
            None => controllers.is_empty(),
            Some(own) => {
                !controllers.is_empty()
                    && controllers.split(',').all(|name| own.iter().any(|own| own == name))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_by_their_control_groups() {
        let id = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
        for (groups, expected) in [
            (format!("0::/system.slice/docker-{id}.scope\n"), format!("/system.slice/docker-{id}.scope")),
            (format!("12:devices:/docker/{id}\n0::/\n"), format!("/docker/{id}")),
            (
                format!("0::/kubepods.slice/cri-containerd-{id}.scope\n"),
                format!("/kubepods.slice/cri-containerd-{id}.scope"),
            ),
            (format!("0::/kubepods/besteffort/pod1/{id}/inner\n"), format!("/kubepods/besteffort/pod1/{id}")),
            (
                format!("0::/machine.slice/libpod-{id}.scope/container\n"),
                format!("/machine.slice/libpod-{id}.scope"),
            ),
        ] {
            assert_eq!(Groups(groups.clone()).container(), Some(expected.as_str()), "{groups}");
        }
        for groups in ["0::/user.slice/user-1000.slice/session-3.scope\n", "0::/\n", ""] {
            assert_eq!(Groups(groups.to_owned()).container(), None, "{groups}");
        }
    }

    #[test]
    fn a_group_of_ones_own_with_anothers_digits_is_another_tenant() {
        let id = "0123456789abcdef".repeat(4);
        let real = format!("0::/system.slice/docker-{id}.scope\n");
        let made = format!("0::/user.slice/user-1000.slice/user@1000.service/docker-{id}.scope\n");
        let (real, made) = (Groups(real), Groups(made));
        assert_ne!(real.container(), made.container());
        assert!(made.container().is_some());
    }

    #[test]
    fn pods_by_their_control_groups() {
        const UID: &str = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0";
        let flat = UID.replace('-', "_");
        for (groups, pod) in [
            (
                format!("0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{flat}.slice/x"),
                Some(UID),
            ),
            (format!("11:memory:/kubepods/besteffort/pod{UID}/abc"), Some(UID)),
            ("0::/machine.slice/libpod-payload.scope".to_owned(), None),
        ] {
            assert_eq!(Groups(groups.clone()).pod().as_deref(), pod, "{groups}");
        }
    }

    #[test]
    fn jobs_by_their_control_groups() {
        let roots = |_: &str, _: &str| Some(0);
        let id = "0123456789abcdef".repeat(4);
        for (groups, job) in [
            // Version 2: tasks, and the steps that Slurm makes by itself.
            ("0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0", Some(42)),
            ("0::/system.slice/slurmstepd.scope/job_42/step_batch/user/task_0", Some(42)),
            ("0::/system.slice/slurmstepd.scope/job_42/step_extern/user/task_special", Some(42)),
            ("0::/system.slice/slurmstepd.scope/job_42/step_interactive/user/task_0", Some(42)),
            ("0::/system.slice/slurmstepd.scope/job_42/step_1/user/task_3/mine/deeper", Some(42)),
            ("0::/system.slice/node7_slurmstepd.scope/job_42/step_0/user/task_0", Some(42)),
            (&format!("0::/system.slice/slurmstepd.scope/job_42/step_0/user/docker-{id}.scope"), Some(42)),
            // Version 1, with the other hierarchies elsewhere.
            ("9:cpuset:/slurm/uid_1000/job_7/step_batch", Some(7)),
            (
                "9:cpuset:/slurm/uid_1000/job_7/step_extern/task_0\n1:name=systemd:/system.slice/slurmd.service",
                Some(7),
            ),
            (
                "4:pids:/system.slice\n2:freezer:/slurm_node7/uid_0/job_4294967295/step_interactive/task_0",
                Some(u32::MAX),
            ),
            // The outermost job counts.
            ("0::/system.slice/slurmstepd.scope/job_1/slurmstepd.scope/job_2", Some(1)),
            // Slurm's own processes, and names that it does not make.
            ("0::/system.slice/slurmstepd.scope/system", None),
            ("0::/system.slice/slurmd.service", None),
            ("0::/user.slice/job_42", None),
            ("0::/user.slice/slurm/job_42", None),
            ("0::/user.slice/xslurmstepd.scope/job_42", None),
            ("9:cpuset:/slurm/job_42", None),
            ("9:cpuset:/slurmy/uid_1000/job_42", None),
            ("9:cpuset:/slurm/uid_x/job_42", None),
            ("0::/system.slice/slurmstepd.scope/job_", None),
            ("0::/system.slice/slurmstepd.scope/job_+42", None),
            ("0::/system.slice/slurmstepd.scope/job_4294967296", None),
            ("0::/system.slice/slurmstepd.scope/job_42x/step_0", None),
            // Root of a container makes what it likes.
            (&format!("0::/docker/{id}/system.slice/slurmstepd.scope/job_42/step_0/user/task_0"), None),
            ("0::/", None),
            ("", None),
        ] {
            assert_eq!(Groups(groups.to_owned()).job_by(roots), job, "{groups}");
        }
    }

    #[test]
    fn a_job_that_a_user_made_up_counts_for_nothing() {
        let users = |_: &str, path: &str| {
            Some(if path.starts_with("/user.slice/user-1000.slice/") { 1000 } else { 0 })
        };
        let of = |groups: &str, maker: fn(&str, &str) -> Option<u32>| Groups(groups.to_owned()).job_by(maker);
        let forged = "1:name=systemd:/user.slice/user-1000.slice/slurm/uid_1000/job_9";
        assert_eq!(of(forged, users), None);
        let both = "1:name=systemd:/user.slice/user-1000.slice/slurm/uid_1000/job_9\n2:freezer:/slurm/uid_1000/job_5/step_0";
        assert_eq!(of(both, users), Some(5), "the real one counts beside it");
        // A user who owns the group above gives it another name.
        let renamed = |_: &str, path: &str| Some(if path.ends_with("uid_1000") { 1000 } else { 0 });
        assert_eq!(of("2:freezer:/slurm/uid_1000/job_5/step_0", renamed), None);
        // The groups below a job may be its user's.
        let delegated = |_: &str, path: &str| Some(if path.contains("step_0") { 1000 } else { 0 });
        assert_eq!(of("2:freezer:/slurm/uid_1000/job_5/step_0", delegated), Some(5));
        assert_eq!(
            of("0::/system.slice/slurmstepd.scope/job_5", |_, _| None),
            None,
            "nothing can be looked up"
        );
        assert_eq!(of("0::/../system.slice/slurmstepd.scope/job_5", maker), None);
    }

    #[test]
    fn a_container_that_a_user_made_counts_for_that_user() {
        let id = "0123456789abcdef".repeat(4);
        let groups = |path: String| Groups(format!("1:name=systemd:/\n0::{path}\n"));
        let user_made = |_: &str, path: &str| Some(if path.starts_with("/user.slice") { 1001 } else { 0 });
        let unknown = |_: &str, _: &str| None;
        let of = |path: String, maker: fn(&str, &str) -> Option<u32>| groups(path).whom_by(Some(7), maker);
        let container = |path: &str| Whom::Container(path.to_owned());
        let docker = format!("/system.slice/docker-{id}.scope");
        assert_eq!(of("/user.slice/session.scope".to_owned(), user_made), Whom::User(Some(7)));
        assert_eq!(of(docker.clone(), user_made), container(&docker));
        assert_eq!(
            of(format!("{docker}/kubepods/{id}"), user_made),
            container(&docker),
            "a node in a container"
        );
        let made = format!("/user.slice/user-1001.slice/{id}");
        assert_eq!(of(made.clone(), user_made), Whom::User(Some(1001)));
        assert_eq!(of(format!("{made}/{id}"), user_made), Whom::User(Some(1001)));
        assert_eq!(of(made.clone(), unknown), container(&made), "nothing can be looked up");
    }

    #[test]
    fn a_user_counts_once_whatever_numbers_his_processes_have() {
        let session =
            Groups("0::/user.slice/user-1000.slice/user@1000.service/app.slice/a.scope\n".to_owned());
        let made = |_: &str, path: &str| Some(if path.contains("user@1000") { 1000 } else { 0 });
        let of = |user, maker: fn(&str, &str) -> Option<u32>| session.whom_by(Some(user), maker);
        assert_eq!(of(100_005, made), Whom::User(Some(1000)));
        assert_eq!(of(0, made), Whom::User(Some(0)), "root is nobody else");
        assert_eq!(of(100_005, |_, _| Some(100_005)), Whom::User(Some(100_005)), "root did not make it");
        let elsewhere = Groups("0::/a/user.slice/user-1000.slice\n".to_owned());
        assert_eq!(elsewhere.whom_by(Some(7), made), Whom::User(Some(7)));
    }

    #[test]
    fn hierarchies_are_found_among_the_mounts() {
        let mounts = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
            32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
            40 31 0:37 /part /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n\
            41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate\n";
        let hierarchies: Vec<Hierarchy> = mounts.lines().filter_map(Hierarchy::mounted).collect();
        let at = |controllers: &str| {
            hierarchies
                .iter()
                .find(|hierarchy| hierarchy.is_of(controllers))
                .map(|hierarchy| hierarchy.at.to_str())
        };
        assert_eq!(at(""), Some(Some("/sys/fs/cgroup/unified")));
        assert_eq!(at("cpu,cpuacct"), Some(Some("/sys/fs/cgroup/cpu,cpuacct")));
        assert_eq!((at("pids"), at("memory")), (None, None), "a part alone is mounted, or nothing");
        assert_eq!(maker("", "/../elsewhere"), None);
    }
}
