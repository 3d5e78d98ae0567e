//! Random system calls: their answers and effects are those of ext4 on the same kernel.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use ashlar_tests::command::run;
use ashlar_tests::differ::{Comparison, DifferPlace, Drawn, DrawnCalls, ServedBy, count_kinds};
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::mount::{Medium, TestArena};
use ashlar_tests::reference::{Reference, unmount};
use ashlar_tests::{Outcome, ensure, number, tried};
use tempfile::TempDir;

use crate::capi::Installed;

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "differ/planted_fault_is_found_and_reduced", run: || when_mountable(planted) },
    Test { name: "run/random_calls_answer_as_on_ext4", run: || when_mountable(|| compare(ServedBy::Run)) },
    Test { name: "mount/random_calls_answer_as_on_ext4", run: || when_mountable(|| compare(ServedBy::Mount)) },
    Test { name: "capi/random_calls_answer_as_on_ext4", run: || when_mountable(|| compare(ServedBy::Library)) },
];

/// Calls of a sequence, before the whole tree is compared.
const STEPS: u64 = 60;
/// The super-user, and an ordinary user.
const USERS: [u32; 2] = [0, 65534];
/// Calls that are compared in all places together.
const CALLS: u64 = 100_000;
/// At least this part of the calls is served in the process; for the rest, the program hands files over to the kernel.
const ACCELERATED_MIN: f64 = 0.5;
/// Kinds of differences of which each run shows one.
const KINDS_SHOWN_MAX: usize = 20;
const SOURCES: [&str; 5] = ["main.c", "draw.c", "calls.c", "world.c", "library.c"];

/// A file system in memory, which has no limit on offsets of its own.
struct InMemory(TempDir);

impl InMemory {
    fn new() -> Outcome<Self> {
        let directory = ashlar_tests::open_directory("ashlar-differ-")?;
        run(Command::new("mount").args(["-t", "tmpfs", "-o", "mode=755", "differ"]).arg(directory.path()))?
            .success()?;
        Ok(Self(directory))
    }
}

impl Drop for InMemory {
    fn drop(&mut self) {
        unmount(self.0.path());
    }
}

/// All places.
struct Ground {
    site: TestArena,
    ext4: Reference,
    memory: InMemory,
    plain: PathBuf,
    linked: PathBuf,
}

impl Ground {
    fn new() -> Outcome<Self> {
        let site = TestArena::mounted(Medium::Memory, "512M")?;
        fs::set_permissions(site.arena(), Permissions::from_mode(0o711)).map_err(tried("opening the arena"))?;
        let installed = Installed::new(&site)?;
        let sources = SOURCES.map(|name| format!("tests/differ/{name}"));
        let sources: Vec<_> = sources.iter().map(String::as_str).collect();
        let plain = installed.compile_as("differ", &sources, false)?;
        let linked = installed.compile_as("differ-with-library", &sources, true)?;
        Ok(Self { site, ext4: Reference::new(512)?, memory: InMemory::new()?, plain, linked })
    }

    fn reference(&self, calls: DrawnCalls) -> DifferPlace {
        match calls {
            DrawnCalls::HugeOffsets => DifferPlace::new(ServedBy::Reference, self.memory.0.path(), &self.plain),
            _ => DifferPlace::new(ServedBy::Reference, &self.ext4.path(), &self.plain),
        }
    }

    fn place(&self, served_by: ServedBy) -> DifferPlace {
        let program = if served_by == ServedBy::Library { &self.linked } else { &self.plain };
        DifferPlace::new(served_by, &self.site.point(0), program)
    }

    /// A directory for output, which all users may write.
    fn scratch(&self) -> Outcome<PathBuf> {
        let path = self.site.outside().join("answers");
        fs::create_dir_all(&path).map_err(tried("making a directory"))?;
        fs::set_permissions(&path, Permissions::from_mode(0o777)).map_err(tried("chmod"))?;
        Ok(path)
    }

    fn end(self) -> Outcome {
        self.site.check()?;
        self.site.umount(0)?;
        Ok(())
    }
}

/// The calls that a place is tested with, and the part of all that each has.
fn draws(served_by: ServedBy) -> Vec<(DrawnCalls, u64)> {
    match served_by {
        ServedBy::Library => vec![(DrawnCalls::OfLibrary, 30)],
        ServedBy::Mount => vec![(DrawnCalls::All, 21), (DrawnCalls::HugeOffsets, 4)],
        _ => vec![(DrawnCalls::All, 38), (DrawnCalls::HugeOffsets, 7)],
    }
}

fn compare(served_by: ServedBy) -> Outcome<Verdict> {
    let ground = Ground::new()?;
    if ground.ext4.name() != "ext4" {
        return Ok(Verdict::Skipped("no loop device to be had for an ext4".to_owned()));
    }
    let scratch = ground.scratch()?;
    let all = number("ASHLAR_DIFFER_CALLS", CALLS);
    let first = number("ASHLAR_DIFFER_SEED", 1);
    let (mut calls, mut reports, mut shares) = (0, Vec::new(), Vec::new());
    for (drawn_calls, part) in draws(served_by) {
        for user in USERS {
            let sequences = (all * part / 100 / USERS.len() as u64).div_ceil(STEPS).max(1);
            let drawn = Drawn { calls: drawn_calls, user, first, sequences, steps: STEPS };
            let (reference, other) = (ground.reference(drawn_calls), ground.place(served_by));
            let comparison =
                Comparison { reference: &reference, other: &other, scratch: &scratch, options: Vec::new() };
            let compared = comparison.run(&drawn)?;
            calls += compared.calls;
            shares.extend(compared.accelerated_share);
            let kinds = count_kinds(&compared.differences);
            for sequences in kinds.values().take(KINDS_SHOWN_MAX) {
                let difference = compared.differences.iter().find(|difference| difference.sequence == sequences[0]);
                reports.push(comparison.tell(&drawn, difference.ok_or("a kind without a difference")?)?);
            }
            if !kinds.is_empty() {
                reports.push(format!("kinds of differences, with their sequences: {kinds:?}"));
            }
        }
    }
    ensure!(reports.is_empty(), "{}", reports.join("\n"));
    if served_by == ServedBy::Run {
        let least = shares.iter().copied().fold(f64::INFINITY, f64::min);
        ensure!(least >= ACCELERATED_MIN, "of the calls, only {shares:?} were served in the process");
    }
    ground.end()?;
    let shares: Vec<_> = shares.iter().map(|share| format!("{:.0} %", share * 100.0)).collect();
    let served =
        if shares.is_empty() { String::new() } else { format!(", served in the process {}", shares.join(", ")) };
    Ok(Verdict::Passed(format!("{calls} calls{served}")))
}

/// A program says EEXIST where it should say ENOTEMPTY. The test must find it, and show it with few calls.
fn planted() -> Outcome<Verdict> {
    let ground = Ground::new()?;
    let scratch = ground.scratch()?;
    let drawn = Drawn { calls: DrawnCalls::All, user: 0, first: 1, sequences: 60, steps: STEPS };
    let reference = ground.reference(drawn.calls);
    // The same file system twice: the fault is the only difference.
    let other = reference.clone();
    let comparison = |options: &[&str]| Comparison {
        reference: &reference,
        other: &other,
        scratch: Path::new(&scratch),
        options: options.iter().map(|&option| option.to_owned()).collect(),
    };
    let same = comparison(&[]).run(&drawn)?;
    ensure!(same.differences.is_empty(), "the same program differs from itself: {:?}", same.differences);
    let faulty = comparison(&["plant=1"]);
    let found = faulty.run(&drawn)?.differences;
    let difference = found.first().ok_or("the planted fault is not found")?;
    let steps = faulty.shrink(&drawn, difference)?;
    ensure!(steps.len() <= 2, "it is not made small: {steps:?}");
    let report = faulty.tell(&drawn, difference)?;
    ensure!(report.contains("= -ENOTEMPTY") && report.contains("= -EEXIST"), "it is reported as\n{report}");
    ground.end()?;
    passed()
}
