//! Processes whose connections end while they live, and come back: who sees to the end of such a process.
//!
//! A task waits for it, and has the place of the last connection, as long as no other connection does. One that comes back takes over,
//! so that each process has as many places as connections, or one. A process that runs another program by then is waited for still: the
//! memory of the program before is not its own.

use std::collections::BTreeMap;
use std::sync::Mutex;

use nvshare_core::ClientId;
use tokio::task::AbortHandle;

use crate::identity::processes::Image;
use crate::lock::lock;

/// All such processes, by the kernel's numbers that no two of them share.
#[derive(Debug, Default)]
pub(crate) struct Returns(Mutex<BTreeMap<u64, Process>>);

#[derive(Debug, Default)]
struct Process {
    connections: usize,
    /// The program that ran when the last of them registered.
    image: Option<Image>,
    /// The last client that left memory for which no task waits.
    left: Option<ClientId>,
    wait: Option<Wait>,
}

/// The task that waits for the end of a process, or of its program.
#[derive(Debug)]
struct Wait {
    client: ClientId,
    image: Option<Image>,
    task: AbortHandle,
}

impl Process {
    fn is_over(&self) -> bool {
        self.connections == 0 && self.wait.as_ref().is_none_or(|wait| wait.task.is_finished())
    }
}

impl Returns {
    /// A process registers.
    pub(super) fn come(&self, process: u64, image: Option<Image>) {
        let mut processes = lock(&self.0);
        let known = processes.entry(process).or_default();
        known.connections += 1;
        known.image = image;
        if let Some(wait) = known.wait.take_if(|wait| wait.image == image) {
            wait.task.abort();
            known.left = known.left.max(Some(wait.client));
        }
    }

    /// The connection of a client has ended, and its process lives. Unless another connection of its sees to the end, `wait` starts the
    /// task that does: for this client, and those before it.
    pub(super) fn leave(
        &self,
        process: u64,
        client: ClientId,
        image: Option<Image>,
        wait: impl FnOnce(ClientId) -> AbortHandle,
    ) {
        let mut processes = lock(&self.0);
        let known = processes.entry(process).or_default();
        known.connections = known.connections.saturating_sub(1);
        let last = known.left.take().map_or(client, |left| left.max(client));
        if known.connections > 0 && known.image == image {
            known.left = Some(last);
        } else {
            let last = known.wait.as_ref().map_or(last, |before| before.client.max(last));
            let before = known.wait.replace(Wait { client: last, image, task: wait(last) });
            before.into_iter().for_each(|before| before.task.abort());
        }
        processes.retain(|_, known| !known.is_over());
    }

    /// A process has ended, and with it the connection of a client. Returns the last client whose end is to be told, if others have left
    /// memory.
    pub(super) fn end(&self, process: u64, client: ClientId) -> Option<ClientId> {
        let mut processes = lock(&self.0);
        let known = processes.get_mut(&process)?;
        known.connections = known.connections.saturating_sub(1);
        let left = known.left.take();
        if known.is_over() {
            processes.remove(&process);
        }
        left.map(|left| left.max(client))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A task that waits, and the number that it waits for.
    fn waits(returns: &Returns, client: ClientId, image: Option<Image>) -> Option<(ClientId, AbortHandle)> {
        let mut started = None;
        returns.leave(1, client, image, |last| {
            let task = tokio::spawn(std::future::pending::<()>()).abort_handle();
            started = Some((last, task.clone()));
            task
        });
        started
    }

    #[tokio::test]
    async fn each_process_that_lives_is_waited_for_by_one() {
        let returns = Returns::default();
        let [one, other] = [1, 2].map(|n| Some(Image::for_test(n)));
        returns.come(1, one);
        let (last, task) = waits(&returns, 10, one).expect("it has no other connection");
        assert_eq!(last, 10);
        // It comes back.
        returns.come(1, one);
        tokio::task::yield_now().await;
        assert!(task.is_finished());
        assert_eq!(returns.end(1, 11), Some(11), "the first one's memory as well");
        assert!(lock(&returns.0).is_empty());
        // It comes back before the end of its last connection is known.
        returns.come(1, one);
        returns.come(1, one);
        assert!(waits(&returns, 13, one).is_none());
        assert_eq!(waits(&returns, 12, one).map(|(last, _)| last), Some(13));
        // Another program of the process comes.
        returns.come(1, other);
        let (_, task) = waits(&returns, 14, one).expect("the program before is waited for");
        assert_eq!(returns.end(1, 15), None, "the task tells it");
        assert!(!task.is_finished());
        returns.come(2, one);
        assert_eq!(returns.end(2, 16), None, "nothing was left");
    }
}
