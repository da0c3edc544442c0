//! Tells systemd the scheduler's state (`sd_notify`), if systemd started the scheduler that way.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Sends the state, if there is a socket to send it to.
///
/// # Errors
/// There is a socket, and it does not take the text.
pub fn tell(state: &str) -> io::Result<()> {
    std::env::var_os("NOTIFY_SOCKET").map_or(Ok(()), |socket: OsString| tell_at(&socket, state))
}

/// `socket`: a path, or `@` and the name of an abstract socket.
fn tell_at(socket: &OsStr, state: &str) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(listener: &UnixDatagram) -> String {
        let mut text = [0; 64];
        let length = listener.recv(&mut text).unwrap();
        String::from_utf8_lossy(&text[..length]).into_owned()
    }

    #[test]
    fn by_path_and_by_name() {
        let path = std::env::temp_dir().join(format!("nvshare-notify-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixDatagram::bind(&path).unwrap();
        tell_at(path.as_os_str(), "READY=1").unwrap();
        assert_eq!(heard(&listener), "READY=1");
        std::fs::remove_file(&path).unwrap();
        assert!(tell_at(path.as_os_str(), "READY=1").is_err(), "nobody is there any more");

        let name = format!("nvshare-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let listener = UnixDatagram::bind_addr(&address).unwrap();
        tell_at(OsStr::new(&format!("@{name}")), "STOPPING=1").unwrap();
        assert_eq!(heard(&listener), "STOPPING=1");
    }
}
