//! `ashlar bench`, and whole programs by `ashlar-bench`.
//!
//! Both have figures for all that they compare, and leave nothing behind.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use ashlar_tests::command::{Done, ashlar, eventually, finish, run, signal};
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::mount::{Medium, TestArena};
use ashlar_tests::{Outcome, ensure, tried};
use rustix::process::Signal;
use serde_json::Value;

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "bench/all_contenders_have_figures", run: || when_mountable(side_by_side) },
    Test { name: "bench/own_mount_is_removed_at_the_end", run: || when_mountable(own_mount) },
    Test { name: "bench/interrupted_run_leaves_nothing", run: || when_mountable(interrupted) },
    Test { name: "bench/fabric_has_figures_and_ends_its_processes", run: fabric },
    Test { name: "bench/refusals_name_the_missing_part", run: || when_mountable(refusals) },
    Test { name: "bench/applications_find_the_same_in_all_places", run: || when_mountable(applications) },
    Test { name: "bench/applications_leave_out_jobs_without_their_program", run: || when_mountable(left_out) },
];

const SOON: Duration = Duration::from_secs(30);
/// The contenders that have figures in every case; some have a floor besides.
const ALL: [&str; 3] = ["run", "fuse", "compared"];

fn list_names(directory: &Path) -> Outcome<Vec<String>> {
    let entries = fs::read_dir(directory).map_err(tried(format!("listing {}", directory.display())))?;
    let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

fn parse_json(done: &Done) -> Outcome<Value> {
    serde_json::from_str(&done.output).map_err(tried("reading the JSON of bench"))
}

/// Whether a line has sound numbers of a contender.
fn check_numbers(line: &Value, contender: &str) -> Outcome {
    let numbers = &line["contenders"][contender];
    let of = |name: &str| numbers[name].as_f64().filter(|number| *number > 0.0);
    let ordered = of("p50_ns") <= of("p99_ns") && of("p99_ns") <= of("max_ns");
    let is_sound = ["value", "p50_ns", "p99_ns", "max_ns", "mean_ns"].iter().all(|name| of(name).is_some()) && ordered;
    ensure!(is_sound, "{} has no sound figures of {contender}: {line}", line["what"]);
    ensure!(numbers["rounds"].as_array().map(Vec::len) == Some(1), "not one round: {numbers}");
    Ok(())
}

fn side_by_side() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "512M")?;
    let directory = site.point(0).join("directory");
    fs::create_dir(&directory).map_err(tried("mkdir"))?;
    fs::write(directory.join("file"), "content").map_err(tried("writing"))?;
    let compared = site.outside().join("compared");
    fs::create_dir(&compared).map_err(tried("mkdir"))?;
    let mut command = ashlar(&["bench", "--json", "--rounds", "1", "--cases", "append", "stat", "breakdown"]);
    let done = run(command.arg("--compare").arg(&compared).arg("--").arg(&directory))?.success()?;
    let report = parse_json(&done)?;
    let lines = report["lines"].as_array().cloned().unwrap_or_default();
    let names: Vec<_> = lines.iter().filter_map(|line| line["what"].as_str()).collect();
    ensure!(names == ["append 128 B", "append 4 KB", "append 64 KB", "stat"], "what was measured: {names:?}");
    for line in &lines {
        ALL.iter().try_for_each(|contender| check_numbers(line, contender))?;
        let has_floor = line["case"] == "append";
        if has_floor {
            check_numbers(line, "floor")?;
        }
        ensure!(line["run_to_floor"].is_f64() == has_floor, "a ratio to no floor, or none: {line}");
        ensure!(line["fuse_to_run"].is_f64() && line["compared_to_run"].is_f64(), "a ratio is missing: {line}");
    }
    let shares = report["breakdown"].as_array().cloned().unwrap_or_default();
    for operation in ["append 4 KB", "stat", "create, write 4 KB, close, rename"] {
        let of_run = |share: &&Value| share["operation"] == operation && share["ns"]["run"].is_f64();
        ensure!(shares.iter().filter(of_run).count() >= 4, "too few parts of '{operation}': {shares:?}");
    }
    // Nothing is faster than a copy of memory. A copy of 64 KB takes a microsecond at the very least.
    let fastest = ALL.iter().filter_map(|contender| lines[2]["contenders"][contender]["p50_ns"].as_f64());
    ensure!(fastest.fold(f64::MAX, f64::min) > 1000.0, "64 KB were appended in no time: {}", lines[2]);
    ensure!(list_names(&directory)? == ["file"], "it has left something: {:?}", list_names(&directory)?);
    ensure!(fs::read_to_string(directory.join("file")).is_ok_and(|it| it == "content"), "the file changed");
    ensure!(list_names(&compared)?.is_empty(), "it has left something: {:?}", list_names(&compared)?);
    site.check()?;
    passed()
}

/// The leftovers of a benchmark with this process number.
fn leftovers(pid: u32) -> Vec<String> {
    let places = [std::env::temp_dir(), "/dev/shm".into()].into_iter();
    let names = places.flat_map(|place| fs::read_dir(place).into_iter().flatten().flatten());
    let names = names.map(|entry| entry.path().display().to_string());
    let is_ours = |name: &String| name.contains("ashlar-bench-") && name.ends_with(&format!("-{pid}"));
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mounts = table.lines().filter(|line| line.contains(&format!("ashlar-bench-mount-{pid}"))).map(str::to_owned);
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|process| {
        let words = fs::read(process.path().join("cmdline")).ok()?;
        let words = String::from_utf8_lossy(&words).replace('\0', " ");
        words.contains(&format!("ashlar-bench-arena-{pid}")).then_some(words)
    });
    names.filter(is_ours).chain(mounts).chain(processes).collect()
}

fn own_mount() -> Outcome<Verdict> {
    let mut command = ashlar(&["bench", "--rounds", "1", "--cases", "open"]);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.map_err(tried("starting"))?;
    let pid = child.id();
    let done = finish(child, "ashlar bench".to_owned())?.success()?;
    for word in ["open + close", "FLOOR", "RUN", "FUSE", "TMPFS", "p99", "/dev/shm"] {
        ensure!(done.output.contains(word), "the table lacks '{word}': {}", done.describe());
    }
    ensure!(leftovers(pid).is_empty(), "it has left something: {:?}", leftovers(pid));
    passed()
}

fn interrupted() -> Outcome<Verdict> {
    let mut command = ashlar(&["bench", "--cases", "sustained"]);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.map_err(tried("starting"))?;
    let pid = child.id();
    // A worker has written something: it's in the middle of a turn.
    let turn = std::env::temp_dir().join(format!("ashlar-bench-mount-{pid}/ashlar-bench-files-{pid}/turn"));
    let has_begun = || list_names(&turn).is_ok_and(|names| !names.is_empty());
    let begun = eventually("it measures", SOON, has_begun);
    signal(pid, Signal::INT)?;
    let done = finish(child, "ashlar bench".to_owned())?.failure(1, &["interrupted"])?;
    begun?;
    ensure!(done.output.is_empty(), "half of the figures are printed: {}", done.describe());
    ensure!(leftovers(pid).is_empty(), "it has left something: {:?}", leftovers(pid));
    passed()
}

/// The processes that a benchmark of links has started, by their parent.
fn bench_peers(parent: u32) -> Vec<u32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|process| {
        let status = fs::read_to_string(process.path().join("status")).ok()?;
        let is_child = status.lines().any(|line| line == format!("PPid:\t{parent}"));
        let words = fs::read(process.path().join("cmdline")).ok()?;
        let is_peer = String::from_utf8_lossy(&words).contains("bench-peer");
        process.file_name().to_str().filter(|_| is_child && is_peer)?.parse().ok()
    });
    processes.collect()
}

/// `ashlar bench fabric`, to its end, interrupted and killed. The other end of a killed one ends by itself.
fn fabric() -> Outcome<Verdict> {
    let report = parse_json(&run(&mut ashlar(&["bench", "fabric", "--rounds", "1", "--json"]))?.success()?)?;
    let cases = report["cases"].as_array().cloned().unwrap_or_default();
    ensure!(cases.len() == 7, "not all cases: {report}");
    for case in &cases {
        let contenders = case["contenders"].as_object().cloned().unwrap_or_default();
        let of = |numbers: &Value, name: &str| numbers[name].as_f64().filter(|number| *number > 0.0);
        let is_sound = |numbers: &Value| {
            let [p50, p99, max] = ["p50_ns", "p99_ns", "max_ns"].map(|name| of(numbers, name));
            p50.is_some() && p50 <= p99 && p99 <= max
        };
        ensure!(contenders.len() >= 2 && contenders.values().all(is_sound), "figures that are not sound: {case}");
        let is_compared = contenders.get("fabric-tls").is_none_or(|numbers| of(numbers, "to_socket").is_some());
        ensure!(is_compared, "a ratio is missing: {case}");
    }
    for (end, is_killed) in [(Signal::INT, false), (Signal::KILL, true)] {
        let mut command = ashlar(&["bench", "fabric", "--rounds", "99"]);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let child = child.map_err(tried("starting"))?;
        let pid = child.id();
        let begun = eventually("it has started its processes", SOON, || bench_peers(pid).len() == 2);
        let peers = bench_peers(pid);
        signal(pid, end)?;
        let done = finish(child, "ashlar bench fabric".to_owned())?;
        begun?;
        ensure!(done.output.is_empty(), "half of the figures are printed: {}", done.describe());
        let is_gone = |peer: &u32| !Path::new(&format!("/proc/{peer}")).exists();
        eventually("its processes have ended", SOON, || peers.iter().all(is_gone))?;
        if is_killed {
            fs::remove_dir_all(format!("/dev/shm/ashlar-bench-fabric-{pid}")).map_err(tried("removing its files"))?;
        }
        ensure!(leftovers(pid).is_empty(), "it has left something: {:?}", leftovers(pid));
    }
    passed()
}

fn refusals() -> Outcome<Verdict> {
    let bench = |words: &[&str]| run(ashlar(&["bench", "--rounds", "1"]).args(words));
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let point = site.point(0).display().to_string();
    bench(&[&point])?.failure(1, &["MiB", "free", "another directory"])?;
    bench(&[&point, "--cases", "nothing"])?.failure(1, &["'nothing'", "append", "readdir"])?;
    bench(&[&point, "--compare", "/proc/version"])?.failure(1, &["not a directory"])?;
    let file = site.point(0).join("file");
    fs::write(&file, "x").map_err(tried("writing"))?;
    bench(&[&file.display().to_string()])?.failure(1, &["not a directory"])?;
    let program = ashlar_tests::command::program().display().to_string();
    let under = run(ashlar(&["run", "--"]).args([&program, "bench", &point]))?;
    under.failure(1, &["without 'ashlar run'"])?;
    ensure!(list_names(&site.point(0))? == ["file"], "it has left something: {:?}", list_names(&site.point(0))?);
    site.umount(0)?;
    bench(&[&point])?.failure(1, &["not in an Ashlar", "ashlar status"])?;
    bench(&[&site.outside().join("none").display().to_string()])?.failure(1, &["no directory"])?;
    passed()
}

/// `ashlar-bench applications` at its smallest, beside the suite. It clones this repository, where the tests are
/// started.
fn smallest_applications(words: &[&str]) -> Outcome<Command> {
    let beside = std::env::current_exe().map_err(tried("looking where the suite is"))?.with_file_name("ashlar-bench");
    let mut command = Command::new(beside);
    command.args(["applications", "--smallest", "--repeat", "1", "--json"]).args(words);
    Ok(command)
}

fn applications() -> Outcome<Verdict> {
    const JOBS: [&str; 6] = ["untar", "copy", "sqlite", "rocksdb", "varmail", "fileserver"];
    const LINES: usize = 4 + 12 + 3 + 5 + 1 + 1;
    let report = parse_json(&run(&mut smallest_applications(&JOBS)?)?.success()?)?;
    // The programs that a job needs come with `scripts/setup.sh test`.
    let left_out = report["left_out"].as_object().is_some_and(|jobs| !jobs.is_empty());
    ensure!(!left_out, "jobs were left out: {}", report["left_out"]);
    let lines = report["lines"].as_array().cloned().unwrap_or_default();
    ensure!(lines.len() == LINES, "{} things were measured: {lines:?}", lines.len());
    for line in &lines {
        for place in ["disk", "tmpfs", "FUSE", "run"] {
            let median = line["places"][place]["median"].as_f64();
            ensure!(median.is_some_and(|median| median > 0.0), "{} has no figure of {place}: {line}", line["what"]);
        }
        // The ratio says how many times as fast `run` is, whether the figure is a time or a speed.
        let [disk, ours] = ["disk", "run"].map(|place| line["places"][place]["median"].as_f64().unwrap_or(f64::NAN));
        let expected = if line["more_is_better"] == true { ours / disk } else { disk / ours };
        let ratio = line["disk_to_run"].as_f64().unwrap_or(f64::NAN);
        ensure!((ratio / expected - 1.0).abs() < 1e-6, "the ratio is {ratio}, not {expected}: {line}");
    }
    let found = |what: &str| lines.iter().find(|line| line["what"] == what).map(|line| line["found"].clone());
    ensure!(found("untar") == Some("200 files".into()), "untar found {:?}", found("untar"));
    passed()
}

/// Without a program that a job needs, the others are measured, and the table says why it is missing.
fn left_out() -> Outcome<Verdict> {
    let programs = ashlar_tests::open_directory("ashlar-few-programs-")?;
    // An abandoned mount must be unmounted.
    let directories = std::env::var_os("PATH").unwrap_or_default();
    let umount = std::env::split_paths(&directories).map(|at| at.join("umount")).find(|path| path.exists());
    let umount = umount.ok_or("there is no umount")?;
    std::os::unix::fs::symlink(umount, programs.path().join("umount")).map_err(tried("making a link"))?;
    let mut command = smallest_applications(&["sqlite", "varmail"])?;
    let report = parse_json(&run(command.env("PATH", programs.path()))?.success()?)?;
    let reason = report["left_out"]["sqlite"].as_str().unwrap_or_default();
    ensure!(reason.contains("sqlite3") && reason.contains("setup.sh"), "why SQLite is left out: '{reason}'");
    ensure!(report["lines"][0]["what"] == "varmail", "the other job was not measured: {report}");
    run(&mut smallest_applications(&["nothing"])?)?.failure(1, &["'nothing'", "varmail"])?;
    passed()
}
