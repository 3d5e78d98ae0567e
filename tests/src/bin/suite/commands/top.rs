//! `ashlar top` shows sessions that work.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::process::{Child, Stdio};
use std::time::Duration;

use ashlar_tests::command::{ashlar, eventually, wait};
use ashlar_tests::harness::{Test, Verdict, passed};
use ashlar_tests::mount::{Front, Medium, TestArena, obstacle};
use ashlar_tests::{Outcome, ensure, tried};
use serde_json::Value;

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test {
        name: "life/top_shows_a_busy_session",
        run: || obstacle().map_or_else(busy, |why| Ok(Verdict::Skipped(why))),
    },
    Test {
        name: "life/operations_are_counted_one_by_one",
        run: || obstacle().map_or_else(counts, |why| Ok(Verdict::Skipped(why))),
    },
];

const SOON: Duration = Duration::from_secs(60);

/// A process that runs until the test is done with it.
struct Load(Child);

impl Drop for Load {
    fn drop(&mut self) {
        // It is not reaped yet, so its number is still its own.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn busy() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let mut script = Front::Run.command("bash");
    script.args(["-c", "while :; do echo content > file; done"]).current_dir(site.point(0));
    let load = Load(script.spawn().map_err(tried("starting a load"))?);
    // 'ashlar run' runs the program in its place, so the process is the same.
    let pid = load.0.id();
    let once = || -> Outcome<Value> {
        let text = site.ashlar(&["top", "--once", "--json", "--interval", "0.5"])?.success()?.output;
        serde_json::from_str(&text).map_err(tried(format!("it is no JSON:\n{text}")))
    };
    let mut last = Value::Null;
    let number = |value: &Value, what: &str| value[what].as_f64().unwrap_or(-1.0);
    eventually("top shows what the session does", SOON, || {
        last = once().unwrap_or_default();
        let session = &last["arenas"][0]["sessions"][0];
        session["pid"] == pid && number(session, "writes") > 20.0 && number(session, "digested_records") > 20.0
    })
    .map_err(|error| format!("{error}:\n{last:#}"))?;
    let (arena, session) = (&last["arenas"][0], &last["arenas"][0]["sessions"][0]);
    ensure!(session["command"] == "bash" && session["user"] == "root", "the session is {session:#}");
    ensure!(number(session, "names") >= number(session, "writes"), "each write had an open before it: {session:#}");
    ensure!(number(session, "reads") == 0.0 && number(session, "syncs") == 0.0, "nothing was read: {session:#}");
    let (p50, p99) = (number(session, "p50_ns"), number(session, "p99_ns"));
    ensure!(10.0 < p50 && p50 <= p99 && p99 < 10e9, "the latencies are {p50} and {p99} ns");
    ensure!(number(session, "digested_bytes") > number(session, "digested_records"), "{session:#}");
    let sum = number(session, "operations");
    ensure!(number(&arena["total"], "operations") >= sum && sum > 0.0, "the total is less than its part: {arena:#}");
    ensure!(number(arena, "blocks_total") > number(arena, "blocks_free"), "the fill is missing: {arena:#}");
    let text = site.ashlar(&["top", "--once", "--interval", "0.5"])?.success()?.output;
    for word in ["ops/s", "p50", "COMMAND", "DIGEST/S", "bash", "root"] {
        ensure!(text.contains(word), "top does not say '{word}':\n{text}");
    }
    ensure!(!text.contains('\x1b'), "there are escapes where no terminal is:\n{text}");
    // It runs until the reader is gone.
    let arena = site.arena().display().to_string();
    let mut command = ashlar(&["top", "--json", "--interval", "0.1", "--arena", &arena]);
    let mut top = command.stdout(Stdio::piped()).spawn().map_err(tried("starting top"))?;
    let output = top.stdout.take().ok_or("it has no output")?;
    let lines: Vec<_> = BufReader::new(output).lines().take(3).map_while(Result::ok).collect();
    ensure!(lines.len() == 3 && lines.iter().all(|line| line.starts_with('{')), "top says {lines:?}");
    ensure!(wait(&mut top, SOON)?.success(), "top fails where its reader has gone");
    drop(load);
    eventually("the session is gone", SOON, || once().is_ok_and(|now| now["arenas"][0]["sessions"][0]["pid"] != pid))?;
    site.check()?;
    site.umount(0)?;
    ashlar_tests::command::run(&mut ashlar(&["top", "--once", "--arena", &arena]))?.failure(1, &["ashlar mount"])?;
    passed()
}

/// Operations through a mount are counted exactly, also by the next SharedFS.
fn counts() -> Outcome<Verdict> {
    const WRITES: u64 = 100;
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let file = OpenOptions::new().write(true).create(true).truncate(true).open(site.point(0).join("file"));
    let file = file.map_err(tried("making a file"))?;
    let counted = || -> Outcome<u64> {
        let status = site.status()?;
        let writes = &status["daemon"]["sessions"][0]["operations"][1]["operations"];
        writes.as_u64().ok_or_else(|| format!("the status is {status:#}"))
    };
    let before = counted()?;
    for round in 1..=3 {
        for number in 0..WRITES {
            file.write_all_at(b"content", number * 7).map_err(tried("writing"))?;
        }
        let now = counted()?;
        ensure!(
            now == before + round * WRITES,
            "{before} writes were counted before, and {now} after {round} times {WRITES}"
        );
        site.kill_daemon()?;
    }
    drop(file);
    site.check()?;
    site.umount(0)?;
    passed()
}
