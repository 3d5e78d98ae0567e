//! pjdfstest and fsx, at the versions that `scripts/tools.sh` builds.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ashlar_tests::command::run;
use ashlar_tests::harness::{Test, Verdict};
use ashlar_tests::mount::{Front, Medium, TestArena, obstacle};
use ashlar_tests::ranges::{self, RangeSupport};
use ashlar_tests::reference::Reference;
use ashlar_tests::{Outcome, ensure, number, tried};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "conformance/pjdfstest", run: || pjdfstest(Front::Mount) },
    Test { name: "conformance/fsx", run: || fsx(Front::Mount) },
    Test { name: "run/pjdfstest", run: || pjdfstest(Front::RunAtOnce) },
    Test { name: "run/fsx", run: || fsx(Front::RunAtOnce) },
    Test { name: "conformance/ranges", run: ranges },
];

/// The path at which `scripts/tools.sh` puts them: beside the directory of this program.
pub fn tool(name: &str) -> Option<PathBuf> {
    let this = std::env::current_exe().ok()?;
    let path = this.parent()?.parent()?.join("tools/bin").join(name);
    path.exists().then_some(path)
}

fn why_not(name: &str) -> Option<String> {
    obstacle().or_else(|| tool(name).is_none().then(|| format!("{name} is not built; 'scripts/tools.sh' builds it")))
}

/// Every test that passes on ext4 passes here, except those that `pjdfstest.toml` names with reasons.
fn pjdfstest(front: Front) -> Outcome<Verdict> {
    let name = "pjdfstest";
    let Some(program) = tool(name).filter(|_| obstacle().is_none()) else {
        return Ok(Verdict::Skipped(why_not(name).unwrap_or_default()));
    };
    let reference = Reference::new(256)?;
    let second = Reference::new(64)?;
    let expected = verdicts(&program, Front::Mount, &reference.path(), &second.path(), CONFIGURATION)?;
    let site = TestArena::mounted(Medium::Memory, "256M")?;
    let mut found = verdicts(&program, front, &site.point(0), &second.path(), CONFIGURATION)?;
    let ours: Vec<_> = exceptions();
    let worse = |found: &BTreeMap<String, bool>| -> Vec<String> {
        let passed = expected.iter().filter(|(_, passed)| **passed).map(|(test, _)| test);
        passed.filter(|test| found.get(*test) != Some(&true) && !ours.contains(test)).cloned().collect()
    };
    // Some tests compare times around a pause of their own, and fail now and then on a machine with much other work. A
    // real fault fails with longer pauses too.
    let hasty = worse(&found);
    if !hasty.is_empty() {
        let again = site.point(0).join("again");
        fs::create_dir(&again).map_err(tried("making a directory"))?;
        let patient = CONFIGURATION.replace(PAUSE, LONG_PAUSE);
        ensure!(patient != CONFIGURATION, "the configuration has another pause");
        for (test, passed) in verdicts(&program, front, &again, &second.path(), &patient)? {
            *found.entry(test).or_default() |= passed;
        }
    }
    site.check()?;
    site.umount(0)?;
    let worse = worse(&found);
    ensure!(
        worse.is_empty(),
        "{} tests pass on {} and not here:\n  {}",
        worse.len(),
        reference.name(),
        worse.join("\n  ")
    );
    let count = |verdicts: &BTreeMap<String, bool>| verdicts.values().filter(|passed| **passed).count();
    ensure!(count(&expected) > 300, "only {} tests pass on {}: nothing was tried", count(&expected), reference.name());
    let needless: Vec<_> = ours.iter().filter(|test| found.get(*test) == Some(&true)).collect();
    ensure!(needless.is_empty(), "these pass, and need no exception: {needless:?}");
    let late = if hasty.is_empty() { String::new() } else { format!("; at the second attempt: {}", hasty.join(", ")) };
    Ok(Verdict::Passed(format!("{} tests pass, {} on {}{late}", count(&found), count(&expected), reference.name())))
}

const CONFIGURATION: &str = include_str!("../../../../pjdfstest.toml");
const PAUSE: &str = "naptime = 0.02";
const LONG_PAUSE: &str = "naptime = 0.2";

/// Tests that are not expected to pass here: the comment lines `# except NAME: reason` of the configuration.
fn exceptions() -> Vec<String> {
    let lines = CONFIGURATION.lines().filter_map(|line| line.strip_prefix("# except "));
    lines.filter_map(|line| Some(line.split_once(": ")?.0.to_owned())).collect()
}

/// Runs all tests in a directory, and returns which pass. Tests that the program skips are left out.
fn verdicts(
    program: &Path,
    front: Front,
    directory: &Path,
    second: &Path,
    configuration: &str,
) -> Outcome<BTreeMap<String, bool>> {
    let work = directory.join("pjdfstest");
    fs::create_dir(&work).map_err(tried("making a directory"))?;
    run(Command::new("chmod").arg("755").arg(&work).arg(directory))?.success()?;
    let configured = tempfile::NamedTempFile::new().map_err(tried("making a file"))?;
    fs::write(configured.path(), configuration).map_err(tried("writing the configuration"))?;
    let done = run(front.command(program).arg("-c").arg(configured.path()).arg("-p").arg(&work).arg("-s").arg(second))?;
    let verdicts: BTreeMap<_, _> = done.output.lines().filter_map(verdict).collect();
    ensure!(!verdicts.is_empty(), "no verdicts: {}", done.describe());
    Ok(verdicts)
}

/// A line such as `chmod::errno::enotdir::open    ok`; details stand on lines that begin with a blank.
fn verdict(line: &str) -> Option<(String, bool)> {
    let mut words = line.strip_prefix(|first: char| !first.is_whitespace()).and(Some(line))?.split_whitespace();
    let name = words.next().filter(|name| name.contains("::"))?;
    match words.last()? {
        "ok" => Some((name.to_owned(), true)),
        "skipped" => None,
        _ => Some((name.to_owned(), false)),
    }
}

/// Random reads, writes, truncations, mappings, copies and reservations on one file, against a model in memory.
fn fsx(front: Front) -> Outcome<Verdict> {
    let name = "fsx";
    let Some(program) = tool(name).filter(|_| obstacle().is_none()) else {
        return Ok(Verdict::Skipped(why_not(name).unwrap_or_default()));
    };
    let (seeds, operations) = (number("ASHLAR_FSX_SEEDS", 2), number("ASHLAR_FSX_OPS", 20_000));
    let site = TestArena::mounted(Medium::Memory, "256M")?;
    let configuration = site.outside().join("fsx.toml");
    fs::write(&configuration, include_str!("../../../../fsx.toml")).map_err(tried("writing the configuration"))?;
    for seed in 1..=seeds {
        let file = site.point(0).join(format!("fsx{seed}"));
        let mut command = front.command(&program);
        command.args(["-q", "-N", &operations.to_string(), "-S", &seed.to_string(), "-f"]).arg(&configuration);
        run(command.arg("-P").arg(site.outside()).arg(&file))?
            .success()
            .map_err(|error| format!("seed {seed}: {error}"))?;
    }
    site.check()?;
    site.umount(0)?;
    Ok(Verdict::Passed(format!("{seeds} seeds of {operations} operations")))
}

/// The same for zeroing and holes, which fsx does not know. The written data must be there after another mount.
fn ranges() -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let (seeds, operations) = (number("ASHLAR_RANGES_SEEDS", 2), number("ASHLAR_RANGES_OPS", 20_000));
    let site = TestArena::mounted(Medium::Memory, "256M")?;
    refuses_shifts(&site)?;
    for seed in 1..=seeds {
        let file = site.point(0).join(format!("ranges{seed}"));
        let model = ranges::run(&file, seed, operations, RangeSupport::NoShifting, |_, _| ())
            .map_err(|error| format!("seed {seed}: {error}"))?;
        site.umount(0)?;
        site.check()?;
        site.mount(0)?;
        let found = fs::read(&file).map_err(tried("reading after another mount"))?;
        ensure!(found == model, "seed {seed}: the file is another one after another mount");
    }
    site.umount(0)?;
    Ok(Verdict::Passed(format!("{seeds} seeds of {operations} operations")))
}

/// The kernel passes no collapsing and inserting on to FUSE. When it learns to, tests shall include them.
fn refuses_shifts(site: &TestArena) -> Outcome {
    let file = fs::File::create(site.point(0).join("shifts")).map_err(tried("creating"))?;
    file.set_len(1 << 16).map_err(tried("truncating"))?;
    for flags in [FallocateFlags::COLLAPSE_RANGE, FallocateFlags::INSERT_RANGE] {
        let result = fallocate(&file, flags, 4096, 4096);
        ensure!(result == Err(Errno::OPNOTSUPP), "this kernel passes {flags:?} on ({result:?}): test it here too");
    }
    Ok(())
}
