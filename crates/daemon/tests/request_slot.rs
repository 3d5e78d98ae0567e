//! Requests in request slots.
//!
//! SharedFS answers them while it is awake anyway; otherwise they are sent as messages.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use ashlar_libfs::{LibFs, WriteAt};
use ashlar_pmem::Persistent;
use ashlar_tests::random::Random;
use ashlar_types::{Errno, FileKind, InodeId};
use ashlar_wire::{CONTROL_BYTES, Credit, Question, QuestionProgress, Reply, Request};
use common::libfs::{ROOT, connect, make};
use common::{Client, Site};

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

/// On one core no thread polls while another one could work.
fn has_cores() -> bool {
    let has = std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1);
    if !has {
        println!("skipped: there is one core only, and no thread polls the request slots");
    }
    has
}

/// Sends a message, after which SharedFS polls for a moment.
fn wake(client: &mut Client) {
    client.call(&Request::Credit { want: Credit::default(), replaces: false }).expect("answered");
}

/// A request in the slot that SharedFS has handled.
struct HandledRequest {
    question: Question,
    progress: QuestionProgress,
    reply: Option<Reply>,
}

fn ask_slot(
    client: &mut Client,
    request: &Request,
    wake: &mut dyn FnMut(&mut Client),
) -> (QuestionProgress, Option<Reply>) {
    let asked = ask_slot_fully(client, request, wake);
    (asked.progress, asked.reply)
}

/// Asks in the request slot until SharedFS handles the request.
///
/// Returns the outcome; `wake` makes a thread poll.
fn ask_slot_fully(client: &mut Client, request: &Request, wake: &mut dyn FnMut(&mut Client)) -> HandledRequest {
    let (mut buffer, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(20));
    while Instant::now() < deadline {
        wake(client);
        let request_slot = client.control.request_slot();
        let question = request_slot.ask_question(request, &mut buffer).expect("it's free");
        let asked = Instant::now();
        loop {
            match request_slot.progress(question) {
                QuestionProgress::Asked if asked.elapsed() > Duration::from_micros(100) => {
                    if request_slot.take_back(question) {
                        break;
                    }
                }
                QuestionProgress::Asked | QuestionProgress::Taken => assert!(asked.elapsed() < Duration::from_secs(20)),
                progress => {
                    let reply = (progress == QuestionProgress::Answered)
                        .then(|| request_slot.read_answer(&mut buffer).expect("a reply"));
                    request_slot.end_question(question);
                    return HandledRequest { question, progress, reply };
                }
            }
        }
    }
    panic!("no thread polls");
}

fn read_request(inode: InodeId) -> Request {
    Request::Acquire(vec![Client::want(inode, false)])
}

fn is_granted(reply: Option<&Reply>, client: &Client) -> bool {
    matches!(reply, Some(Reply::Granted { grants, .. }) if client.holds(&grants[0]))
}

#[test]
fn thread_that_served_polls_slots_of_all_sessions() {
    if !has_cores() {
        return;
    }
    let mut site = Site::new(64 << 20);
    let (mut one, mut two) = (Client::open(&site.socket()), Client::open(&site.socket()));
    for _ in 0..50 {
        let (progress, reply) = ask_slot(&mut one, &read_request(InodeId::ROOT), &mut wake);
        assert!(is_granted(reply.as_ref(), &one), "{progress:?}: {reply:?}");
    }
    // The other session has asked lately; a message of the first is enough.
    let (progress, reply) = ask_slot(&mut two, &read_request(InodeId::ROOT), &mut |_| wake(&mut one));
    assert!(is_granted(reply.as_ref(), &two), "{progress:?}: {reply:?}");
    let counters = site.check();
    assert!(counters["questions"] >= 51 && counters["requests"] > counters["questions"]);
}

#[test]
fn long_answer_is_kept_and_slow_request_declined() {
    if !has_cores() {
        return;
    }
    let site = Site::new(64 << 20);
    let fs = connect(&site);
    let directory = fs.make(&ROOT, InodeId::ROOT, b"many", &make(FileKind::Directory)).expect("made").id;
    for number in 0..2000 {
        let name = format!("a-name-of-a-file-that-is-not-short-{number}");
        fs.make(&ROOT, directory, name.as_bytes(), &make(FileKind::Regular)).expect("made");
    }
    fs.close_session();
    let mut client = Client::open(&site.socket());
    let kept = |client: &mut Client| {
        let HandledRequest { question, progress, .. } = ask_slot_fully(client, &read_request(directory), &mut wake);
        assert_eq!(progress, QuestionProgress::Kept);
        question
    };
    let question = kept(&mut client);
    match client.call(&Request::Kept(question)).expect("it is there") {
        Reply::Granted { grants, .. } => {
            assert!(client.holds(&grants[0]));
            assert_eq!(grants[0].state.entries.as_ref().map(Vec::len), Some(2000));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(client.call(&Request::Kept(question)).err(), Some(Errno::EPROTO), "there is nothing else");
    kept(&mut client);
    assert_eq!(client.call(&Request::Kept(question)).err(), Some(Errno::EPROTO), "that is another's");
    for other in [Request::Digest, Request::Segment(0), read_request(InodeId(1 << 40))] {
        assert_eq!(ask_slot(&mut client, &other, &mut wake).0, QuestionProgress::Declined, "{other:?}");
    }
}

#[test]
fn nonsense_in_request_slot_harms_no_session() {
    let mut site = Site::new(64 << 20);
    let (hostile, mut honest) = (Client::open(&site.socket()), Client::open(&site.socket()));
    let (over, base) = (AtomicBool::new(false), CONTROL_BYTES - 32_768);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random::new(7);
            while !over.load(Ordering::Relaxed) {
                let memory = hostile.control.memory();
                for _ in 0..16 {
                    let at = base + 64 + random.below(64) * 8;
                    memory.store_u64(at, random.draw() >> random.below(64)).expect("stored");
                }
                memory.store_u64(base + 64, random.draw() & !7 | 1).expect("stored");
            }
        });
        let end = Instant::now() + Duration::from_millis(500);
        while Instant::now() < end {
            wake(&mut honest);
            honest.acquire(&[(InodeId::ROOT, false)]).expect("granted");
        }
        over.store(true, Ordering::Relaxed);
    });
    site.check();
}

/// Long answers of two threads of a session reach their own threads.
///
/// They do not fit into the request slot.
#[test]
fn long_answers_reach_their_own_threads() {
    const FILES: u64 = 700;
    let site = Site::new(64 << 20);
    let fs = connect(&site);
    let directories = [b"one", b"two"].map(|name| {
        let directory = fs.make(&ROOT, InodeId::ROOT, name, &make(FileKind::Directory)).expect("made").id;
        for number in 0..FILES {
            let name = format!("{}-a-name-of-a-file-that-is-not-short-{number}", String::from_utf8_lossy(name));
            fs.make(&ROOT, directory, name.as_bytes(), &make(FileKind::Regular)).expect("made");
        }
        (directory, name)
    });
    fs.close_session();
    for _ in 0..20 {
        let fs = connect(&site);
        std::thread::scope(|scope| {
            for (directory, begins) in directories {
                let fs = &fs;
                scope.spawn(move || {
                    for number in 0..FILES {
                        let name =
                            format!("{}-a-name-of-a-file-that-is-not-short-{number}", String::from_utf8_lossy(begins));
                        let found = fs.lookup(&ROOT, directory, name.as_bytes()).expect("it is there");
                        assert_eq!(found.inode.parent, directory);
                    }
                    assert_eq!(fs.attributes(directory).expect("read").inode.entries, FILES);
                });
            }
        });
        fs.close_session();
    }
}

fn letter(at: u64) -> u8 {
    b'a' + (at % 26) as u8
}

/// Appends a byte each time that it's this session's turn.
fn append_in_turn(fs: &LibFs, file: InodeId, turns: Receiver<u64>, others: Sender<u64>, over: &AtomicBool) {
    while let Ok(at) = turns.recv() {
        if over.load(Ordering::Relaxed) {
            return;
        }
        fs.write(&ROOT, file, WriteAt::End, &[letter(at)], false).expect("appended");
        // The other thread may have ended.
        let _ = others.send(at + 1);
    }
}

/// Lets two sessions append in turn while `meanwhile` runs.
///
/// Returns how often they did.
fn run_two_appenders(sessions: [Arc<LibFs>; 2], meanwhile: impl FnOnce()) -> u64 {
    let file = sessions[0].make(&ROOT, InodeId::ROOT, b"file", &make(FileKind::Regular)).expect("made").id;
    let ([to_one, to_two], [one, two]) = {
        let ((a, b), (c, d)) = (channel(), channel());
        ([a, c], [b, d])
    };
    to_one.send(0).expect("sent");
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let [first, second] = &sessions;
        scope.spawn(|| append_in_turn(first, file, one, to_two, &over));
        scope.spawn(|| append_in_turn(second, file, two, to_one, &over));
        meanwhile();
        over.store(true, Ordering::Relaxed);
    });
    let length = sessions[0].attributes(file).expect("read").inode.size;
    let expected: Vec<u8> = (0..length).map(letter).collect();
    let mut room = vec![0; expected.len() + 1];
    assert_eq!(sessions[1].read(file, 0, &mut room), Ok(expected.len()));
    assert!(room.starts_with(&expected));
    length
}

#[test]
fn alternating_lease_moves_by_request_slots() {
    if !has_cores() {
        return;
    }
    let mut site = Site::new(64 << 20);
    let questions = || site.status().counters.iter().find(|(name, _)| name == "questions").map_or(0, |found| found.1);
    // How often a thread is awake depends on the machine's other work.
    run_two_appenders([connect(&site), connect(&site)], || {
        let deadline = Instant::now() + Duration::from_secs(30);
        while questions() < 200 {
            assert!(Instant::now() < deadline, "no session asks in its request slot");
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    site.check();
}

#[test]
fn requests_taken_by_killed_daemon_are_repeated() {
    let mut site = Site::new(64 << 20);
    let mut pauses = Random::new(3);
    let turns = run_two_appenders([connect(&site), connect(&site)], || {
        for _ in 0..25 {
            std::thread::sleep(Duration::from_micros(pauses.below(50_000)));
            site.kill();
            site.start();
        }
    });
    assert!(turns > 100, "{turns}");
    site.check();
}
