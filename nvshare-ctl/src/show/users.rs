//! Names of users.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};

/// Names of users by their numbers, as far as they were looked up.
#[derive(Debug, Default)]
pub(crate) struct Users {
    known: BTreeMap<u32, String>,
}

impl Users {
    /// The name of a user, or the number where there is no name.
    pub(crate) fn name(&mut self, user: u32) -> String {
        self.known.entry(user).or_insert_with(|| look_up(user)).clone()
    }
}

fn look_up(user: u32) -> String {
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    // `getent` also asks a directory, if there is one.
    let asked = || {
        let output =
            Command::new("getent").args(["passwd", &user.to_string()]).stdin(Stdio::null()).output().ok()?;
        find(&String::from_utf8_lossy(&output.stdout), user)
    };
    find(&passwd, user).or_else(asked).unwrap_or_else(|| user.to_string())
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
    use super::*;

    #[test]
    fn names_by_numbers() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\n# a line that is none\nada:x:1000:100::/home/ada:\n";
        assert_eq!(find(passwd, 0).as_deref(), Some("root"));
        assert_eq!(find(passwd, 1000).as_deref(), Some("ada"));
        assert_eq!(find(passwd, 100), None);
        assert_eq!(Users::default().name(u32::MAX - 7), (u32::MAX - 7).to_string());
    }
}
