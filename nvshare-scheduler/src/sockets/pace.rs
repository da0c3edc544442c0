//! The rate at which a socket's connections are accepted.

use std::io;
use std::time::Instant;

use tokio::net::{UnixListener, UnixStream};
use tokio::time::sleep;

use crate::bucket::{Bucket, Rate};

/// Bounds the connections that are accepted: a process that connects without end waits in the kernel, where
/// it takes no time from others.
pub(crate) struct Pace {
    connections: Bucket,
    holds_from: Instant,
}

impl Pace {
    /// Limits connections to a rate. Connections before `holds_from` are accepted at once.
    pub(crate) fn new(rate: Rate, holds_from: Instant) -> Self {
        Self { connections: Bucket::new(rate, Instant::now()), holds_from }
    }

    /// Accepts a connection when there may be one more. Dropped before it is done, it has accepted none.
    ///
    /// # Errors
    /// Those of `accept`, of which being out of descriptors passes.
    pub(crate) async fn accept(&mut self, listener: &UnixListener) -> io::Result<UnixStream> {
        let wait = self.connections.wait(Instant::now());
        if !wait.is_zero() && Instant::now() >= self.holds_from {
            sleep(wait).await;
        }
        let (stream, _) = listener.accept().await?;
        let _ = self.connections.take(Instant::now());
        Ok(stream)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn a_connection_over_the_rate_waits_in_the_kernel() {
        const HOUR: Duration = Duration::from_secs(3600);
        let folder = std::env::temp_dir().join(format!("nvshare-pace-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let listener = UnixListener::bind(folder.join("s")).unwrap();
        let _waiting: Vec<_> =
            (0..3).map(|_| std::os::unix::net::UnixStream::connect(folder.join("s")).unwrap()).collect();
        let now = Instant::now();
        let mut pace = Pace::new(Rate { burst: 1, each_second: 1 }, now + HOUR);
        // No token comes within the hour, however slow the machine is.
        pace.connections = Bucket::new(Rate { burst: 1, each_second: 1 }, now + HOUR);
        pace.accept(&listener).await.unwrap();
        pace.accept(&listener).now_or_never().expect("the rate does not hold yet").unwrap();
        pace.holds_from = now;
        assert!(pace.accept(&listener).now_or_never().is_none(), "it is over the rate");
        pace.accept(&listener).await.expect("its turn comes");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
