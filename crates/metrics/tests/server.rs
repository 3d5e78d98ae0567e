//! The server, as HTTP clients meet it.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ashlar_metrics::{MetricsAddress, MetricsServer, StatusSlot};
use ashlar_wire::{SpaceReply, StatusReply};

const SOON: Duration = Duration::from_secs(20);

/// A server on a port of its own, which counts how often it reads the status.
struct TestServer {
    address: String,
    status: StatusSlot,
    reads: Arc<AtomicU64>,
    server: Option<MetricsServer>,
}

fn status() -> StatusReply {
    StatusReply {
        version: "0.1.0".into(),
        pid: 1,
        uptime_seconds: 1,
        arena: "/arena".into(),
        medium: "memory".into(),
        arena_bytes: 1 << 30,
        space: SpaceReply::default(),
        sessions: vec![],
        counters: vec![],
        cluster: None,
    }
}

impl TestServer {
    fn start() -> Self {
        // The port was free a moment ago; the server tries again if it is not.
        let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").to_string();
        Self::start_at(free)
    }

    fn start_at(address: String) -> Self {
        let status = StatusSlot::default();
        let parsed: MetricsAddress = address.parse().expect("an address");
        let server = Some(MetricsServer::start(parsed, status.clone()).expect("a server"));
        Self { address, status, reads: Arc::default(), server }
    }

    fn fill(&self) -> ashlar_metrics::FilledStatus {
        let reads = Arc::clone(&self.reads);
        self.status.fill(Arc::new(move || {
            reads.fetch_add(1, Ordering::Relaxed);
            status()
        }))
    }

    /// Connects, once the server listens.
    fn connect(&self) -> TcpStream {
        let deadline = Instant::now() + SOON;
        loop {
            match TcpStream::connect(&self.address) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(SOON)).expect("a limit");
                    return stream;
                }
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn ask(&self, request: &str) -> String {
        let mut stream = self.connect();
        stream.write_all(request.as_bytes()).expect("sent");
        read_answer(&mut stream)
    }
}

fn read_answer(stream: &mut TcpStream) -> String {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

const REQUEST: &str = "GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n";

#[test]
fn request_for_metrics_gets_them_in_full() {
    let server = TestServer::start();
    let _filled = server.fill();
    let answer = server.ask(REQUEST);
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("application/openmetrics-text"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
    assert!(body.contains("\nashlar_arena_bytes 1073741824\n") && body.ends_with("# EOF\n"), "{body}");
}

#[test]
fn other_requests_are_refused() {
    let server = TestServer::start();
    let _filled = server.fill();
    for (request, code) in [
        ("GET / HTTP/1.1\r\n\r\n".to_owned(), "404"),
        ("HEAD /metrics HTTP/1.1\r\n\r\n".to_owned(), "405"),
        ("POST /metrics HTTP/1.1\r\nContent-Length: 70000\r\n\r\n".to_owned() + &"x".repeat(70_000), "405"),
        ("nonsense\r\n\r\n".to_owned(), "400"),
        (format!("GET /metrics HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(9000)), "431"),
    ] {
        let answer = server.ask(&request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {code} ")), "{code} expected, got {answer}");
    }
    assert_eq!(server.reads.load(Ordering::Relaxed), 0, "a refused request cost a status");
}

#[test]
fn node_without_status_is_unavailable() {
    let server = TestServer::start();
    assert!(server.ask(REQUEST).starts_with("HTTP/1.1 503 "));
    drop(server.fill());
    assert!(server.ask(REQUEST).starts_with("HTTP/1.1 503 "));
}

#[test]
fn silent_clients_delay_no_other() {
    let server = TestServer::start();
    let _filled = server.fill();
    // More than the server serves at a time: each further one ends the oldest.
    let mut silent: Vec<_> = (0..40).map(|_| server.connect()).collect();
    silent.iter_mut().for_each(|stream| _ = stream.write_all(b"GET /met"));
    let begun = Instant::now();
    for _ in 0..5 {
        assert!(server.ask(REQUEST).starts_with("HTTP/1.1 200 "));
    }
    assert!(begun.elapsed() < SOON / 2, "{:?}", begun.elapsed());
    for mut stream in silent {
        // The server has closed it, or closes it when its time is over.
        let mut rest = Vec::new();
        match stream.read_to_end(&mut rest) {
            Ok(count) => assert_eq!(count, 0),
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
    }
}

#[test]
fn request_in_pieces_is_answered() {
    let server = TestServer::start();
    let _filled = server.fill();
    let mut stream = server.connect();
    for byte in REQUEST.as_bytes() {
        stream.write_all(&[*byte]).expect("sent");
    }
    stream.shutdown(Shutdown::Write).expect("closed");
    assert!(read_answer(&mut stream).starts_with("HTTP/1.1 200 "));
}

#[test]
fn requests_in_a_row_share_one_status() {
    let server = TestServer::start();
    let _filled = server.fill();
    let begun = Instant::now();
    (0..50).for_each(|_| assert!(server.ask(REQUEST).starts_with("HTTP/1.1 200 ")));
    let most = 1 + begun.elapsed().as_millis() as u64 / 100;
    let reads = server.reads.load(Ordering::Relaxed);
    assert!((1..=most).contains(&reads), "{reads} in {:?}", begun.elapsed());
}

#[test]
fn dropped_server_frees_its_port() {
    let mut server = TestServer::start();
    assert!(server.ask(REQUEST).starts_with("HTTP/1.1 503 "));
    drop(server.server.take());
    let again = TestServer::start_at(server.address.clone());
    assert!(again.ask(REQUEST).starts_with("HTTP/1.1 503 "));
}
