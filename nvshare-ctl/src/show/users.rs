//! Names of users.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// For how long a directory of users, which may be down, is waited for in all.
const PATIENCE: Duration = Duration::from_secs(1);

/// How often it is looked whether the answer is there.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Names of users by their numbers, as far as they were looked up.
#[derive(Debug)]
pub(crate) struct Users {
    known: BTreeMap<u32, String>,
    /// The time for which a directory may still be waited for.
    patience: Duration,
    /// The program that asks it.
    getent: PathBuf,
}

impl Default for Users {
    fn default() -> Self {
        Self { known: BTreeMap::new(), patience: PATIENCE, getent: "getent".into() }
    }
}

impl Users {
    /// The name of a user, or the number where there is no name.
    pub(crate) fn name(&mut self, user: u32) -> String {
        if let Some(name) = self.known.get(&user) {
            return name.clone();
        }
        let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
        let name = find(&passwd, user).or_else(|| find(&self.ask(user)?, user));
        let name = name.unwrap_or_else(|| user.to_string());
        self.known.insert(user, name.clone());
        name
    }

    /// The line of a user from `getent`, which also asks a directory, if there is one; none, when all patience is used up.
    fn ask(&mut self, user: u32) -> Option<String> {
        if self.patience.is_zero() {
            return None;
        }
        let begin = Instant::now();
        let mut command = Command::new(&self.getent);
        command.args(["passwd", &user.to_string()]).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::null()).spawn().ok()?;
        // One line fits the pipe.
        while begin.elapsed() < self.patience && matches!(child.try_wait(), Ok(None)) {
            thread::sleep(LOOK_EVERY);
        }
        self.patience = self.patience.saturating_sub(begin.elapsed());
        if !matches!(child.try_wait(), Ok(Some(_))) {
            // Its output is not read: another process may keep it open.
            let _ = child.kill();
            return None;
        }
        let output = child.wait_with_output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

fn find(passwd: &str, user: u32) -> Option<String> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(user)).then(|| name.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_directory_that_does_not_answer_is_waited_for_once() {
        let getent = std::env::temp_dir().join(format!("nvshare-getent-{}", std::process::id()));
        fs::write(&getent, "#!/bin/sh\nexec sleep 20\n").unwrap();
        fs::set_permissions(&getent, fs::Permissions::from_mode(0o755)).unwrap();
        let patience = Duration::from_millis(100);
        let mut users = Users { patience, getent: getent.clone(), ..Users::default() };
        let begin = Instant::now();
        let names: Vec<String> = (1..=9).map(|n| users.name(u32::MAX - 9 - n)).collect();
        let took = begin.elapsed();
        fs::remove_file(getent).unwrap();
        assert_eq!((names[0].clone(), users.patience), ((u32::MAX - 10).to_string(), Duration::ZERO));
        assert!(took < Duration::from_secs(10), "{took:?}");
    }

    #[test]
    fn names_by_numbers() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\n# a line that is none\nada:x:1000:100::/home/ada:\n";
        assert_eq!(find(passwd, 0).as_deref(), Some("root"));
        assert_eq!(find(passwd, 1000).as_deref(), Some("ada"));
        assert_eq!(find(passwd, 100), None);
        assert_eq!(Users::default().name(u32::MAX - 7), (u32::MAX - 7).to_string());
    }
}
