//! The log: lines go to a thread of their own, so that nothing waits when nobody reads standard error. Lines for which there is
//! no place are counted and left out.

use std::fmt;
use std::io::{self, Write};
use std::sync::mpsc::{self, SyncSender, TrySendError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tracing_subscriber::fmt::MakeWriter;

use crate::bucket::{Bucket, Rate};
use crate::lock::lock;

/// Lines that wait to be written.
const WAITING: usize = 1024;
/// The largest rate at which lines are written.
const RATE: Rate = Rate { burst: 1000, each_second: 100 };

/// Writes a warning that a [`ThrottledLine`](nvshare_proto::ThrottledLine) lets through.
pub(crate) fn warn(text: fmt::Arguments<'_>) {
    tracing::warn!("{text}");
}

/// Takes lines and never waits.
#[derive(Debug, Clone)]
pub struct Log {
    lines: SyncSender<Part>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
enum Part {
    Line(Vec<u8>),
    /// Answered when all lines before this are written.
    Flush(SyncSender<()>),
}

#[derive(Debug)]
struct State {
    bucket: Bucket,
    left_out: u64,
}

impl Log {
    /// Starts the thread, which writes to `sink`.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(sink: impl Write + Send + 'static) -> io::Result<Self> {
        Self::with_rate(sink, RATE)
    }

    fn with_rate(mut sink: impl Write + Send + 'static, rate: Rate) -> io::Result<Self> {
        let (lines, received) = mpsc::sync_channel(WAITING);
        let write = move || {
            for part in received {
                match part {
                    Part::Line(line) => drop(sink.write_all(&line)),
                    Part::Flush(done) => {
                        let _ = sink.flush();
                        let _ = done.try_send(());
                    }
                }
            }
        };
        std::thread::Builder::new().name("log".to_owned()).spawn(write)?;
        let bucket = Bucket::new(rate, Instant::now());
        Ok(Self { lines, state: Arc::new(Mutex::new(State { bucket, left_out: 0 })) })
    }

    /// Waits until all lines are written, for `patience` at most.
    pub fn finish(&self, patience: Duration) {
        let until = Instant::now() + patience;
        let (done, written) = mpsc::sync_channel(1);
        while let Err(TrySendError::Full(_)) = self.lines.try_send(Part::Flush(done.clone())) {
            if Instant::now() >= until {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = written.recv_timeout(until.saturating_duration_since(Instant::now()));
    }

    fn put(&self, line: Vec<u8>) {
        let mut state = lock(&self.state);
        if state.bucket.take(Instant::now()).is_err() {
            state.left_out += 1;
            return;
        }
        let line = match state.left_out {
            0 => line,
            left_out => [format!("{left_out} lines were left out\n").into_bytes(), line].concat(),
        };
        state.left_out = match self.lines.try_send(Part::Line(line)) {
            Err(TrySendError::Full(_)) => state.left_out + 1,
            _ => 0,
        };
    }
}

/// One line, sent to the thread when it is whole.
#[derive(Debug)]
pub struct Line {
    log: Log,
    text: Vec<u8>,
}

impl Write for Line {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.text.extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.log.put(std::mem::take(&mut self.text));
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Line;

    fn make_writer(&self) -> Line {
        Line { log: self.clone(), text: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text that was written, and a lock that stops the writer.
    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(text);
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    const MANY: Rate = Rate { burst: 1_000_000, each_second: 1_000_000 };

    #[test]
    fn a_log_that_nobody_reads_delays_no_thread() {
        let sink = Sink::default();
        let log = Log::with_rate(sink.clone(), MANY).unwrap();
        let full = sink.0.lock().unwrap();
        for i in 0..3 * WAITING {
            writeln!(log.make_writer(), "line {i}").unwrap();
        }
        drop(full);
        log.finish(Duration::from_secs(60));
        writeln!(log.make_writer(), "the last").unwrap();
        log.finish(Duration::from_secs(60));
        let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
        assert!(text.starts_with("line 0\nline 1\n"), "{text}");
        assert!(text.ends_with(" lines were left out\nthe last\n"), "{text}");
    }

    #[test]
    fn lines_beyond_the_rate_are_counted() {
        let sink = Sink::default();
        let log = Log::with_rate(sink.clone(), Rate { burst: 2, each_second: 1 }).unwrap();
        // Time that passes on a busy machine fills nothing: the bucket is full as of an hour ahead.
        let ahead = Instant::now() + Duration::from_secs(3600);
        log.state.lock().unwrap().bucket = Bucket::new(Rate { burst: 2, each_second: 1 }, ahead);
        for i in 0..5 {
            writeln!(log.make_writer(), "line {i}").unwrap();
        }
        log.finish(Duration::from_secs(60));
        assert_eq!(*sink.0.lock().unwrap(), b"line 0\nline 1\n");
        assert_eq!(log.state.lock().unwrap().left_out, 3);
    }
}
