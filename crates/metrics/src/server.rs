//! The HTTP server: one thread, a few connections at a time, a bounded time for each.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::address::MetricsAddress;
use crate::exposition::{CONTENT_TYPE, render_metrics};
use crate::http::{HEAD_BYTES_MAX, HttpAnswer, encode_answer, route_request};
use crate::status_slot::StatusSlot;

/// Connections at a time. One more ends the oldest, so silent clients keep none out.
const EXCHANGES_MAX: usize = 16;
/// The time in which a client must send its request and take the answer.
const EXCHANGE_TIME: Duration = Duration::from_secs(1);
/// How long a text is sent again before the status is read anew. Reading it takes the node's lock.
const TEXT_AGE_MAX: Duration = Duration::from_millis(100);
/// How long the server waits before it tries a port again that it can't have.
const LISTEN_PAUSE: Duration = Duration::from_secs(5);
/// The pause after a failed accept, most likely for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves the metrics of a node at an address, until it is dropped.
pub struct MetricsServer {
    end: Arc<EndSignal>,
    thread: Option<JoinHandle<()>>,
}

struct EndSignal {
    is_ending: AtomicBool,
    /// Wakes the thread.
    event: OwnedFd,
}

impl MetricsServer {
    /// Starts a server. If the address can't be had, the server logs that and tries again.
    ///
    /// # Errors
    /// Those of the system: no thread, or no descriptor.
    pub fn start(address: MetricsAddress, status: StatusSlot) -> io::Result<Self> {
        let end = EndSignal {
            is_ending: AtomicBool::new(false),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        };
        let end = Arc::new(end);
        let mut serving = Serving {
            end: Arc::clone(&end),
            status,
            listener: None,
            may_accept_at: Instant::now(),
            exchanges: Vec::new(),
            text: None,
        };
        let thread = std::thread::Builder::new().name("metrics".into()).spawn(move || serving.run(&address))?;
        Ok(Self { end, thread: Some(thread) })
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.end.is_ending.store(true, Ordering::Release);
        // An event that can't be written is there already.
        let _ = rustix::io::write(&self.end.event, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has logged that.
            let _ = thread.join();
        }
    }
}

/// The state of the server's thread.
struct Serving {
    end: Arc<EndSignal>,
    status: StatusSlot,
    listener: Option<TcpListener>,
    /// When the thread accepts, or listens, at the earliest.
    may_accept_at: Instant,
    /// The oldest first.
    exchanges: Vec<Exchange>,
    /// The last text, and when it was made.
    text: Option<(Instant, String)>,
}

impl Serving {
    fn run(&mut self, address: &MetricsAddress) {
        let mut is_failing = false;
        while !self.end.is_ending.load(Ordering::Acquire) {
            if self.listener.is_none() && Instant::now() >= self.may_accept_at {
                match address.listen().and_then(|listener| listener.set_nonblocking(true).map(|()| listener)) {
                    Ok(listener) => {
                        tracing::info!(%address, "metrics are served");
                        self.listener = Some(listener);
                    }
                    Err(error) => {
                        if !std::mem::replace(&mut is_failing, true) {
                            tracing::warn!(%address, %error, "metrics can't be served yet; give another --metrics");
                        }
                        self.may_accept_at = Instant::now() + LISTEN_PAUSE;
                    }
                }
            }
            self.wait();
            self.accept();
            self.advance();
        }
    }

    /// Waits until a client does something, or time has passed that matters.
    fn wait(&self) {
        let now = Instant::now();
        let accepts = now >= self.may_accept_at;
        let pause = (!accepts).then_some(self.may_accept_at);
        let until = self.exchanges.iter().map(|exchange| exchange.until).chain(pause).min();
        let timeout = until.map(|until| timespec(until.saturating_duration_since(now)));
        let mut fds = vec![PollFd::new(&self.end.event, PollFlags::IN)];
        fds.extend(self.listener.iter().filter(|_| accepts).map(|listener| PollFd::new(listener, PollFlags::IN)));
        fds.extend(self.exchanges.iter().map(|exchange| PollFd::new(&exchange.stream, exchange.awaited())));
        // An interrupted wait is repeated.
        let _ = poll(&mut fds, timeout.as_ref());
    }

    fn accept(&mut self) {
        let Some(listener) = self.listener.as_ref().filter(|_| Instant::now() >= self.may_accept_at) else { return };
        for _ in 0..EXCHANGES_MAX {
            match listener.accept().and_then(|(stream, _)| Exchange::begin(stream)) {
                Ok(exchange) => {
                    if self.exchanges.len() == EXCHANGES_MAX {
                        self.exchanges.remove(0);
                    }
                    self.exchanges.push(exchange);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    tracing::debug!(%error, "a connection for metrics can't be accepted");
                    self.may_accept_at = Instant::now() + ACCEPT_PAUSE;
                    return;
                }
            }
        }
    }

    /// Lets each connection go on as far as its client lets it, and drops those that are over.
    fn advance(&mut self) {
        let mut exchanges = std::mem::take(&mut self.exchanges);
        exchanges.retain_mut(|exchange| {
            let is_open = exchange.advance(&mut |answer| self.answer(answer)).unwrap_or(false);
            is_open && Instant::now() < exchange.until
        });
        self.exchanges = exchanges;
    }

    fn answer(&mut self, answer: HttpAnswer) -> Vec<u8> {
        if answer != HttpAnswer::Metrics {
            return encode_answer(answer, Default::default());
        }
        if self.text.as_ref().is_none_or(|(made, _)| made.elapsed() >= TEXT_AGE_MAX) {
            self.text = self.status.status().map(|status| (Instant::now(), render_metrics(status)));
        }
        match &self.text {
            Some((_, text)) => encode_answer(HttpAnswer::Metrics, (CONTENT_TYPE, text)),
            None => encode_answer(HttpAnswer::Unavailable, Default::default()),
        }
    }
}

/// One request and its answer.
struct Exchange {
    stream: TcpStream,
    until: Instant,
    stage: ExchangeStage,
}

enum ExchangeStage {
    /// The request arrives.
    Reading(Vec<u8>),
    /// The answer leaves, from this byte on.
    Writing(Vec<u8>, usize),
    /// The answer has left. If the client's last bytes stayed unread, the kernel would reset the connection, and the
    /// client might lose the answer.
    Draining,
}

impl Exchange {
    fn begin(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let until = Instant::now() + EXCHANGE_TIME;
        Ok(Self { stream, until, stage: ExchangeStage::Reading(Vec::new()) })
    }

    /// Returns the events for which the connection waits.
    const fn awaited(&self) -> PollFlags {
        match self.stage {
            ExchangeStage::Reading(_) | ExchangeStage::Draining => PollFlags::IN,
            ExchangeStage::Writing(..) => PollFlags::OUT,
        }
    }

    /// Goes on as far as possible; returns whether the connection is still of use.
    ///
    /// # Errors
    /// Those of the connection, which is over then.
    fn advance(&mut self, answer: &mut dyn FnMut(HttpAnswer) -> Vec<u8>) -> io::Result<bool> {
        let mut buffer = [0; HEAD_BYTES_MAX];
        loop {
            match &mut self.stage {
                ExchangeStage::Reading(request) => {
                    let Some(count) = unless_blocked(self.stream.read(&mut buffer))? else { return Ok(true) };
                    request.extend_from_slice(&buffer[..count]);
                    match route_request(request) {
                        Some(route) => self.stage = ExchangeStage::Writing(answer(route), 0),
                        None if count == 0 => return Ok(false),
                        None => {}
                    }
                }
                ExchangeStage::Writing(bytes, sent) if *sent == bytes.len() => {
                    self.stream.shutdown(Shutdown::Write)?;
                    self.stage = ExchangeStage::Draining;
                }
                ExchangeStage::Writing(bytes, sent) => {
                    let Some(count) = unless_blocked(self.stream.write(&bytes[*sent..]))? else { return Ok(true) };
                    *sent += count;
                }
                ExchangeStage::Draining => {
                    // A client that sends without end is read once a turn, and only until its time is over.
                    return Ok(unless_blocked(self.stream.read(&mut buffer))?.is_none_or(|count| count > 0));
                }
            }
        }
    }
}

/// Returns the result of a call that did not have to wait; `None` if it would have.
fn unless_blocked(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
        result => result.map(Some),
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) }
}
