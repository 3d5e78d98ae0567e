//! One thread's wait for all sockets.

use std::io::{self, ErrorKind};
use std::net::TcpListener;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::driver::LinkDriver;
use super::epoll::Epoll;
use crate::event::{Event, LinkId};
use crate::reason_filter::ReasonFilter;

/// The number by which the epoll knows the waker. Links count from 1.
pub(super) const WAKE_TOKEN: u64 = u64::MAX;
/// The number of the first listener; the bits below count them.
const LISTENER_TOKEN: u64 = 1 << 63;
/// Connections that are accepted before links have their turn.
const ACCEPTS_MAX: usize = 64;
/// After an error, such as too many open files, no connection is accepted for so long.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);
/// Bytes of one read.
const READ_BYTES: usize = 256 << 10;

/// The addresses on which connections are accepted.
#[derive(Default)]
pub(super) struct Listeners(Mutex<Vec<TcpListener>>);

impl Listeners {
    pub(super) fn add(&self, epoll: &Epoll, address: &str) -> io::Result<String> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let (mut listeners, bound) = (self.0.lock(), listener.local_addr()?);
        epoll.add(&listener, LISTENER_TOKEN | listeners.len() as u64, false)?;
        listeners.push(listener);
        // The name stays: peers may see another address than this machine does.
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        Ok(format!("{host}:{}", bound.port()))
    }

    fn pause(&self, epoll: &Epoll) {
        self.0.lock().iter().for_each(|listener| drop(epoll.remove(listener)));
    }

    fn resume(&self, epoll: &Epoll) {
        for (at, listener) in self.0.lock().iter().enumerate() {
            // One that was added meanwhile is in the list.
            let _ = epoll.add(listener, LISTENER_TOKEN | at as u64, false);
        }
    }
}

/// One thread's wait for all sockets.
pub(super) struct Poller {
    buffer: Box<[u8]>,
    /// Links that may have more to read, though the kernel does not say so.
    unread: Vec<LinkId>,
    accepts_again: Option<Instant>,
    accept_failures: ReasonFilter,
}

impl Poller {
    pub(super) fn new() -> Self {
        let accept_failures = ReasonFilter::default();
        Self { buffer: vec![0; READ_BYTES].into(), unread: Vec::new(), accepts_again: None, accept_failures }
    }

    /// Waits until there are events, the waker is used, or the time is over.
    pub(super) fn run(
        &mut self,
        driver: &LinkDriver,
        listeners: &Listeners,
        wait: Option<Duration>,
        events: &mut Vec<Event>,
    ) {
        let end = wait.and_then(|wait| Instant::now().checked_add(wait));
        let before = events.len();
        loop {
            let timer = [end, driver.table.next_deadline(), self.accepts_again].into_iter().flatten().min();
            let timeout = match self.unread.is_empty() && driver.events.is_empty() {
                true => timer.map(|timer| timer.saturating_duration_since(Instant::now())),
                false => Some(Duration::ZERO),
            };
            self.handle_sockets(driver, listeners, timeout);
            for (link, addresses) in driver.waker.take_found() {
                driver.table.link(link).inspect(|link| driver.connect(link, addresses));
            }
            let now = Instant::now();
            driver.expire(now);
            if self.accepts_again.is_some_and(|again| again <= now) {
                self.accepts_again = None;
                listeners.resume(&driver.epoll);
            }
            driver.events.take(events);
            if driver.waker.take_woken() || events.len() > before || end.is_some_and(|end| end <= now) {
                return;
            }
        }
    }

    fn handle_sockets(&mut self, driver: &LinkDriver, listeners: &Listeners, timeout: Option<Duration>) {
        let unread = std::mem::take(&mut self.unread);
        let ready = driver.epoll.wait(timeout);
        for socket in &ready {
            match socket.token {
                WAKE_TOKEN => driver.waker.clear(),
                token if token & LISTENER_TOKEN != 0 => self.accept(driver, listeners, token ^ LISTENER_TOKEN),
                token => self.handle_link(driver, LinkId(token), socket.is_writable),
            }
        }
        for link in unread.into_iter().filter(|link| ready.iter().all(|socket| socket.token != link.0)) {
            self.handle_link(driver, link, false);
        }
    }

    fn handle_link(&mut self, driver: &LinkDriver, id: LinkId, is_writable: bool) {
        if let Some(link) = driver.table.link(id)
            && driver.handle_ready(&link, is_writable, &mut self.buffer)
        {
            self.unread.push(id);
        }
    }

    fn accept(&mut self, driver: &LinkDriver, listeners: &Listeners, at: u64) {
        for _ in 0..ACCEPTS_MAX {
            let accepted = listeners.0.lock().get(at as usize).map(TcpListener::accept);
            match accepted {
                Some(Ok((stream, address))) => driver.accept(stream, address),
                Some(Err(error)) if error.kind() == ErrorKind::WouldBlock => return,
                Some(Err(error)) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Some(Err(error)) => {
                    if self.accept_failures.admit(&error.to_string(), Instant::now()) {
                        tracing::warn!("no connections are accepted; this is tried again each second: {error}");
                    }
                    listeners.pause(&driver.epoll);
                    self.accepts_again = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
                None => return,
            }
        }
    }
}
