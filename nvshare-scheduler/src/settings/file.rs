//! The configuration file.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use nvshare_proto::env as names;
use serde::de;

use super::options::Shared;

/// The configuration cannot be followed.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {reason}")]
pub struct Error {
    /// The file.
    pub(super) path: PathBuf,
    /// The line and the error there, or the reason why the file cannot be read.
    pub(super) reason: String,
}

/// Reads the file that is named, or else the usual one if it exists: what it says, and its path.
///
/// # Errors
/// The file cannot be read, was named and is not there, or contains values that cannot be followed.
pub(super) fn read(named: Option<&Path>, root: bool) -> Result<(Shared, Option<PathBuf>), Error> {
    let Some(path) = named.map(Path::to_owned).or_else(|| default_path(root)) else {
        return Ok(Default::default());
    };
    let error = |reason: String| Error { path: path.clone(), reason };
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(missing) if missing.kind() == ErrorKind::NotFound && named.is_none() => {
            return Ok(Default::default());
        }
        Err(why) => return Err(error(why.to_string())),
    };
    let file: Shared = parse(&text).map_err(error)?;
    let both = |memory: bool, reserve: bool| memory && reserve;
    if both(file.gpu_memory.is_some(), file.reserve.is_some())
        || file.gpu.values().any(|gpu| both(gpu.gpu_memory.is_some(), gpu.reserve.is_some()))
    {
        return Err(error(
            "gpu-memory and reserve exclude each other: there is no reserve with gpu-memory".to_owned(),
        ));
    }
    Ok((file, Some(path)))
}

/// Parses a file's text; an error names the line.
pub(crate) fn parse<T: de::DeserializeOwned>(text: &str) -> Result<T, String> {
    toml::from_str(text).map_err(|error| {
        let line = error
            .span()
            .and_then(|span| text.get(..span.start))
            .map(|before| before.matches('\n').count() + 1);
        let message = error.message().trim().replace('\n', " ");
        line.map_or_else(|| message.clone(), |line| format!("line {line}: {message}"))
    })
}

/// Returns the path of the file where none is named.
fn default_path(root: bool) -> Option<PathBuf> {
    if root {
        Some("/etc/nvshare/config.toml".into())
    } else {
        own_folder("XDG_CONFIG_HOME", ".config", "config.toml")
    }
}

/// Returns a path in the user's own folder: that of a variable, or else the usual one.
pub(super) fn own_folder(variable: &str, usual: &str, name: &str) -> Option<PathBuf> {
    let folder = names::path(variable).or_else(|| Some(names::path("HOME")?.join(usual)))?;
    Some(folder.join("nvshare").join(name))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nvshare_proto::QuantumRule;
    use nvshare_proto::units::{GIB, MIB};

    use super::super::values::{Grace, Level, Memory, Size, Tq};
    use super::*;

    #[test]
    fn everything_that_a_file_may_say() {
        let file: Shared = parse(
            "tq = 0.5\ngpu-memory = \"40GiB\"\nreserve = 0\nexclusive = true\ngrace = \"20\"\nlog = \"warn\"\n\
             socket = \"/a\"\nadmin-socket = \"/b\"\n\
             [gpu.GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0]\ntq = 5\nreserve = \"512m\"\n",
        )
        .unwrap();
        assert_eq!(file.tq, Some(Tq(QuantumRule::Fixed { millis: 500 })));
        assert_eq!(file.gpu_memory, Some(Memory(40 * GIB)));
        assert_eq!((file.reserve, file.exclusive), (Some(Size(0)), true));
        assert_eq!(file.grace, Some(Grace(Duration::from_secs(20))));
        assert_eq!(file.log, Some(Level(tracing::Level::WARN)));
        assert_eq!((file.socket, file.admin_socket), (Some("/a".into()), Some("/b".into())));
        let (_, gpu) = file.gpu.first_key_value().unwrap();
        assert_eq!(
            (gpu.tq, gpu.reserve),
            (Some(Tq(QuantumRule::Fixed { millis: 5000 })), Some(Size(512 * MIB)))
        );
    }

    #[test]
    fn an_error_says_which_line_and_why() {
        for (text, line, why) in [
            ("tq = 1\ntqq = 4\n", 2, "unknown field `tqq`"),
            ("\n\ntq = 0\n", 3, "is not a quantum; accepted: seconds"),
            ("gpu-memory = 4\n", 1, "the least is 64.0 MiB"),
            ("reserve = -1\n", 1, "is not a size"),
            ("exclusive = 1\n", 1, "invalid type"),
            ("tq = [1]\n", 1, "expected seconds"),
            ("log = \"loud\"\n", 1, "is not a level"),
            ("socket = \"\"\n", 1, "the path is empty"),
            ("tq = \n", 1, ""),
            ("tq = 1\ntq = 2\n", 2, "duplicate key"),
            ("[gpu.0]\ntq = 1\n", 1, "is not a GPU UUID"),
            ("[gpu.GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0]\nlog = 1\n", 2, "unknown field `log`"),
        ] {
            let error = parse::<Shared>(text).unwrap_err();
            assert!(error.starts_with(&format!("line {line}: ")) && error.contains(why), "{text}: {error}");
        }
    }
}
