//! Random operations of several processes on two mounts fit some order.
//!
//! A model says which answers fit.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use ashlar_tests::command::signal;
use ashlar_tests::harness::{Test, Verdict};
use ashlar_tests::linear::checker::{History, check};
use ashlar_tests::linear::model::{Model, Picture, Seen, is_stale, text_of};
use ashlar_tests::linear::operation::{DIRECTORIES, Event, NAMES};
use ashlar_tests::mount::{Medium, TestArena, obstacle};
use ashlar_tests::random::Random;
use ashlar_tests::{Outcome, ensure, number, tried};
use rustix::process::Signal;
use rustix::time::{ClockId, clock_gettime};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "two_mounts/random_operations_are_linearizable", run: || linearizable(false) },
    Test { name: "two_mounts/random_operations_while_sharedfs_is_killed", run: || linearizable(true) },
];

const MOUNTS: usize = 2;
const WORKERS: usize = 4;
/// Operations of each worker in a round: so few that the search for their order stays short.
const OPERATIONS: usize = 12;
/// The limit for a round; a longer one hangs.
const ROUND_LIMIT: Duration = Duration::from_secs(60);
/// The longest time of an operation if neither its process nor its mount is stopped. A call waits one second for a
/// stopped kernel's cache; the rest is for machines with much other work.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// With `kills`, SharedFS dies about once a second, at any moment.
fn linearizable(kills: bool) -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let site = TestArena::mounted(Medium::Memory, "256M")?;
    site.mount(1)?;
    let seed = number("ASHLAR_SEED", 1);
    let deadline = Instant::now() + Duration::from_secs(number("ASHLAR_HAMMER_SECONDS", 10));
    let mut workers: Vec<_> = (0..WORKERS).map(|worker| Worker::start(&site, worker)).collect::<Outcome<_>>()?;
    let mounts = mount_processes(&site)?;
    let (mut rounds, mut stops, mut states, mut stale, mut pause) = (0, 0, 0, 0, Duration::ZERO);
    let is_over = AtomicBool::new(false);
    let killed = std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            let mut killed = 0;
            while kills && !is_over.load(Ordering::SeqCst) {
                site.kill_daemon()?;
                killed += 1;
            }
            Ok::<u64, String>(killed)
        });
        let mut result = Ok(());
        while result.is_ok() && Instant::now() < deadline {
            let seed = seed + rounds;
            result = round(&site, &mut workers, mounts, seed).map(|done| {
                stops += done.stops;
                states += done.states;
                stale += done.stale;
                pause = pause.max(done.pause);
                rounds += 1;
            });
            result = result.map_err(|error| format!("ASHLAR_SEED={seed}: {error}\n{}", complaints(&site)));
        }
        is_over.store(true, Ordering::SeqCst);
        let killed = killer.join().map_err(|_| "the killer panicked".to_owned())?;
        result.and(killed)
    })?;
    drop(workers);
    ensure!(rounds > 10 && stops > 10, "only {rounds} rounds and {stops} stops: nothing was tried");
    site.check()?;
    site.umount(0)?;
    site.umount(1)?;
    site.check()?;
    let operations = rounds * (WORKERS * OPERATIONS) as u64;
    Ok(Verdict::Passed(format!(
        "{rounds} rounds, {operations} operations, {stops} stops, {killed} kills, {states} states, {stale} stale moves, longest \
         pause {} ms",
        pause.as_millis()
    )))
}

/// The warnings of the daemon and the mounts.
fn complaints(site: &TestArena) -> String {
    let logs = ["daemon.log", "mount.log"].map(|name| fs::read_to_string(site.arena().join(name)).unwrap_or_default());
    let lines = logs.iter().flat_map(|log| log.lines()).filter(|line| line.contains("ERROR") || line.contains("WARN"));
    lines.collect::<Vec<_>>().join("\n")
}

/// The processes behind the mounts, by the mounts' numbers.
fn mount_processes(site: &TestArena) -> Outcome<[u32; MOUNTS]> {
    let status = site.status()?;
    let sessions = status["daemon"]["sessions"].as_array().cloned().unwrap_or_default();
    let process = |mount: usize| {
        let label = site.point(mount).display().to_string();
        let session = sessions.iter().find(|session| session["label"] == label.as_str());
        session
            .and_then(|session| u32::try_from(session["pid"].as_u64()?).ok())
            .ok_or(format!("mount {mount} has no process"))
    };
    Ok([process(0)?, process(1)?])
}

/// A worker's process.
struct Worker {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Worker {
    fn start(site: &TestArena, number: usize) -> Outcome<Self> {
        let program = std::env::current_exe().map_err(tried("finding this program"))?.with_file_name("ashlar-worker");
        let mut command = Command::new(program);
        command.arg(site.point(number % MOUNTS)).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(tried("starting a worker"))?;
        let (input, output) = (child.stdin.take().ok_or("no input")?, child.stdout.take().ok_or("no output")?);
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            // Ends with the worker, or with the receiver.
            BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Ok(Self { child, input, lines })
    }

    fn send(&mut self, words: &str) -> Outcome {
        writeln!(self.input, "{words}").map_err(tried("a worker does not listen"))
    }

    fn receive(&self) -> Outcome<String> {
        self.lines.recv_timeout(ROUND_LIMIT).map_err(|_| "a worker hangs or has ended".to_owned())
    }

    fn events(&self) -> Outcome<History> {
        let mut events = History::new();
        loop {
            match self.receive()?.as_str() {
                "done" => return Ok(events),
                line => events.push(serde_json::from_str::<Event>(line).map_err(tried(format!("reading '{line}'")))?),
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // A worker that hangs on a mount ends when the mount does, so that is not waited for; any other end is.
        let _ = self.child.kill();
        let _ = ashlar_tests::command::wait_for(&mut self.child, Duration::from_secs(1));
    }
}

/// The results of a round.
struct RoundResult {
    stops: u64,
    states: usize,
    stale: usize,
    pause: Duration,
}

/// A process that was stopped, with the times of its stop and its continuation.
struct Stop {
    process: u32,
    from: u64,
    to: u64,
}

fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn round(site: &TestArena, workers: &mut [Worker], mounts: [u32; MOUNTS], seed: u64) -> Outcome<RoundResult> {
    let name = format!("round{seed}");
    let root = site.point((seed % 2) as usize).join(&name);
    let mut paths = vec![root.clone()];
    for (above, name) in DIRECTORIES {
        paths.push(paths[above].join(NAMES[name]));
    }
    paths.iter().try_for_each(fs::create_dir).map_err(tried("making the round's directories"))?;
    for (number, worker) in workers.iter_mut().enumerate() {
        worker.send(&format!("{name} {} {OPERATIONS}", seed * WORKERS as u64 + number as u64))?;
    }
    for worker in workers.iter() {
        let word = worker.receive()?;
        ensure!(word == "ready", "a worker says '{word}'");
    }
    let processes: Vec<u32> = workers.iter().map(|worker| worker.child.id()).collect();
    // In turn: no process is stopped, workers are, mounts are, both are.
    let victims = match seed % 4 {
        0 => Vec::new(),
        1 => processes.clone(),
        2 => mounts.to_vec(),
        _ => [&processes[..], &mounts[..]].concat(),
    };
    let is_over = AtomicBool::new(false);
    let (histories, stops) = std::thread::scope(|scope| {
        let stopper = scope.spawn(|| stop_at_random(&victims, seed, &is_over));
        let histories = (workers.iter_mut().try_for_each(|worker| worker.send("go")))
            .and_then(|()| workers.iter().map(Worker::events).collect::<Outcome<Vec<History>>>());
        is_over.store(true, Ordering::SeqCst);
        let stops = stopper.join().map_err(|_| "the stopper panicked".to_owned())??;
        Ok::<_, String>((histories?, stops))
    })?;
    let pause = longest_pause(&histories, &stops, &processes, mounts);
    ensure!(pause < PAUSE_MAX, "an operation of a running process took {} ms", pause.as_millis());
    let ends = [picture(&site.point(0).join(&name))?, picture(&site.point(1).join(&name))?];
    let states = check(&histories, &ends[0]).map_err(|error| {
        // Shows which mount is right, and whether the fault stays.
        let again = [0, 1].map(|mount| picture(&site.point(mount).join(&name)));
        format!("{error}the mounts showed {ends:?}\nand now {again:?}")
    })?;
    if ends[0] != ends[1] {
        let explanation = check(&histories, &ends[1]).err().unwrap_or_default();
        return Err(format!("the other mount shows another tree at the end: {ends:?}\n{explanation}"));
    }
    fs::remove_dir_all(site.point((seed / 2 % 2) as usize).join(&name)).map_err(tried("removing the round"))?;
    let stale = histories.iter().flatten().filter(|event| is_stale(&event.answer)).count();
    Ok(RoundResult { stops: stops.len() as u64, states, stale, pause })
}

/// Stops and continues one of the victims after the other, until the round is over.
fn stop_at_random(victims: &[u32], seed: u64, is_over: &AtomicBool) -> Outcome<Vec<Stop>> {
    let (mut random, mut stops) = (Random::new(seed ^ 0x5709), Vec::new());
    while !is_over.load(Ordering::SeqCst) {
        let Some(&process) = random.pick(victims) else { break };
        std::thread::sleep(Duration::from_micros(random.below(3000)));
        // Now and then for longer than any kernel may believe an answer.
        let length = if random.below(40) == 0 { 1200 } else { 1 + random.below(30) };
        let from = now();
        signal(process, Signal::STOP)?;
        std::thread::sleep(Duration::from_millis(length));
        signal(process, Signal::CONT)?;
        stops.push(Stop { process, from, to: now() });
    }
    Ok(stops)
}

/// The longest operation among those during which neither its worker nor its mount was stopped.
fn longest_pause(histories: &[History], stops: &[Stop], workers: &[u32], mounts: [u32; MOUNTS]) -> Duration {
    let is_free = |worker: usize, event: &Event| {
        let own = [workers[worker], mounts[worker % MOUNTS]];
        !stops.iter().any(|stop| own.contains(&stop.process) && stop.from < event.returned && event.called < stop.to)
    };
    let pauses = histories.iter().enumerate().flat_map(|(worker, history)| {
        history.iter().filter(move |event| is_free(worker, event)).map(|event| event.returned - event.called)
    });
    Duration::from_nanos(pauses.max().unwrap_or(0))
}

/// A directory's content, as a mount shows it.
fn picture(root: &Path) -> Outcome<Picture> {
    let mut picture = Picture::new();
    let mut below = vec![String::new()];
    while let Some(path) = below.pop() {
        let directory = root.join(&path);
        for entry in fs::read_dir(&directory).map_err(tried(format!("listing {}", directory.display())))? {
            let entry = entry.map_err(tried("listing"))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let name = if path.is_empty() { name } else { format!("{path}/{name}") };
            let metadata = fs::symlink_metadata(entry.path()).map_err(tried(format!("stat {name}")))?;
            let seen = if metadata.is_dir() {
                below.push(name.clone());
                Seen::Directory
            } else {
                let content = fs::read(entry.path()).map_err(tried(format!("reading {name}")))?;
                ensure!(
                    content.len() as u64 == metadata.len(),
                    "{name} has {} bytes of {}",
                    content.len(),
                    metadata.len()
                );
                Seen::File(metadata.ino(), metadata.nlink() as u32, text_of(&content))
            };
            picture.insert(name, seen);
        }
    }
    ensure!(picture.len() <= Model::default().picture().len() + WORKERS * OPERATIONS, "more names than were made");
    Ok(picture)
}
