//! A writer whose journal is full: its replica is away, and an acknowledgement needs both copies.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use ashlar_tests::cluster::{ClusterOptions, PATIENCE, TestCluster};
use ashlar_tests::command::{ashlar, eventually, run, was_killed};
use ashlar_tests::harness::{Test, Verdict, when_mountable};
use ashlar_tests::{Outcome, ensure, tried};

/// The tests of this group.
pub const TESTS: &[Test] =
    &[Test { name: "mirror/full_journal_holds_up_writes_alone", run: || when_mountable(full_journal) }];

/// Bytes of long and short writes, and of the part of a file that is written again and again.
const LONG_BYTES: usize = 64 << 10;
const SHORT_BYTES: usize = 100;
const FILE_BYTES: u64 = 4 << 20;
/// Writes that have not gone on for this long are held up.
const HELD: Duration = Duration::from_secs(1);
/// Calls that need no room must return within this time.
const SOON: Duration = Duration::from_secs(5);
/// Bytes that the program writes.
const PROGRAM_BYTES: usize = 65536;
/// How long an fsync without a replica may take: 30 seconds, and some more on a busy machine.
const SYNC_ENDS: Duration = Duration::from_secs(50);

/// A thread that writes to a file through a mount, and counts.
#[derive(Debug, Default)]
struct Writing {
    writes: AtomicU64,
    is_over: AtomicBool,
}

impl Writing {
    fn run(&self, path: &Path, bytes: usize) -> io::Result<()> {
        let file = File::create(path)?;
        let mut number = 0;
        while !self.is_over.load(Ordering::Relaxed) {
            let at = number * bytes as u64 % FILE_BYTES;
            file.write_all_at(&vec![number as u8; bytes], at)?;
            number += 1;
            self.writes.store(number, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Waits until no write returns any more.
    fn wait_until_held(&self) -> Outcome {
        let (mut count, mut since) = (0, Instant::now());
        eventually("writes are held up", PATIENCE, || {
            let now = self.writes.load(Ordering::Relaxed);
            if now != count {
                (count, since) = (now, Instant::now());
            }
            now > 0 && since.elapsed() > HELD
        })
    }
}

/// A program under `ashlar run` that writes to a file without an end.
fn start_program(path: &Path) -> Outcome<Child> {
    let script = "f=open(__import__('sys').argv[1],'wb',0)\nwhile 1:\n f.seek(0)\n f.write(b'p'*65536)";
    let mut command = ashlar(&["run", "--", "python3", "-c", script]);
    command.arg(path).stdout(Stdio::null()).spawn().map_err(tried("starting a program"))
}

fn full_journal() -> Outcome<Verdict> {
    let cluster = TestCluster::up(ClusterOptions { size: "128M", ..ClusterOptions::default() })?;
    cluster.mount(0, 0)?;
    cluster.mount(0, 1)?;
    let (first, second) = (cluster.point(0), cluster.point(1));
    std::fs::write(first.join("before"), "before").map_err(tried("writing"))?;
    let mut program = start_program(&second.join("program"))?;
    // To open it later may wait: the session that writes has a full log by then.
    let before = File::open(first.join("before")).map_err(tried("opening"))?;
    cluster.kill(1)?;
    cluster.wait_for(0, "its replica is away", |state| state["is_linked"] == false)?;
    // The short ones take the room that long ones leave.
    let both = [(LONG_BYTES, "written"), (SHORT_BYTES, "written-in-pieces")];
    let writing = [Writing::default(), Writing::default()];
    let verdict = std::thread::scope(|scope| {
        let writers: Vec<_> = writing.iter().zip(both).collect();
        let writers = writers.into_iter().map(|(writing, (bytes, name))| {
            let path = first.join(name);
            scope.spawn(move || writing.run(&path, bytes))
        });
        let writers: Vec<_> = writers.collect();
        let held = writing.iter().try_for_each(Writing::wait_until_held);
        let shown = held.and_then(|()| show_what_goes_on(&cluster, &mut program, &before));
        // The writers go on in any case, so that the threads end.
        let back = cluster.start(1).and_then(|_| cluster.wait_in_sync(0));
        let counts = || writing.iter().map(|writing| writing.writes.load(Ordering::Relaxed)).collect::<Vec<_>>();
        let held = counts();
        let has_resumed = || counts().iter().zip(&held).all(|(now, held)| *now > held + 100);
        let resumed = eventually("writes go on", PATIENCE, has_resumed);
        writing.iter().for_each(|writing| writing.is_over.store(true, Ordering::Relaxed));
        for writer in writers {
            writer.join().map_err(|_| "a writer panicked")?.map_err(tried("writing"))?;
        }
        let verdict = shown?;
        back.and(resumed).map(|()| verdict)
    })?;
    File::open(first.join("written")).and_then(|file| file.sync_all()).map_err(tried("syncing"))?;
    cluster.expect_no_fence(0)?;
    drop(before);
    cluster.umount(0)?;
    cluster.compare_at_rest(0)?;
    Ok(Verdict::Passed(verdict))
}

/// Shows that calls which need no room in the journal are served, while writes wait. Unmounts the second mount.
fn show_what_goes_on(cluster: &TestCluster, program: &mut Child, before: &File) -> Outcome<String> {
    let second = cluster.point(1);
    let soon = |what: &str, since: Instant| match since.elapsed() {
        taken if taken < SOON => Ok(()),
        taken => Err(format!("{what} took {taken:?}")),
    };
    // A lease moves from the session that waits.
    let read = read_soon("reading what another session writes", second.join("written"))?;
    ensure!(read.len() >= LONG_BYTES, "{} bytes are there", read.len());
    let mut since = Instant::now();
    let shown = run(ashlar(&["run", "--", "cat"]).arg(second.join("before")))?.success()?;
    ensure!(shown.output == "before", "a program reads {:?}", shown.output);
    soon("a program", since)?;
    program.kill().map_err(tried("killing a program"))?;
    let status = program.wait().map_err(tried("ending a program"))?;
    ensure!(was_killed(status), "a program that writes has ended with {status}");
    let read = read_soon("reading what a killed program wrote", second.join("program"))?;
    ensure!(read.len() == PROGRAM_BYTES, "a killed program left {} bytes", read.len());
    since = Instant::now();
    // An unmount is a sync, too, but does not fail.
    let (synced, unmounted) = std::thread::scope(|scope| {
        let synced = scope.spawn(|| before.sync_all());
        let unmounted = cluster.umount(1);
        (synced.join(), unmounted)
    });
    let taken = since.elapsed();
    unmounted?;
    let synced = synced.map_err(|_| "the thread that syncs panicked")?;
    let errno = synced.err().and_then(|error| error.raw_os_error());
    ensure!(errno == Some(rustix::io::Errno::IO.raw_os_error()), "fsync without a replica gives {errno:?}");
    ensure!(taken < SYNC_ENDS, "fsync and unmount took {taken:?}");
    Ok(format!("fsync fails after {} s, all else is served", taken.as_secs()))
}

/// Reads a file, which must not wait. A read that does goes on when the replica is back.
fn read_soon(what: &str, path: PathBuf) -> Outcome<Vec<u8>> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || sender.send(std::fs::read(path)));
    let read = receiver.recv_timeout(SOON).map_err(|_| format!("{what} takes longer than {SOON:?}"))?;
    read.map_err(tried(what))
}
