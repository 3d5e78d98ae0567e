//! `ashlar fsck --compare` and `--dump`: copies of an arena are equal until a mount changes one of them.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use ashlar_tests::command::{Done, ashlar, kill, parent, run, shell, signal};
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::mount::{Medium, TestArena};
use ashlar_tests::{Outcome, ensure, tried};
use rustix::process::Signal;
use serde_json::Value;

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "compare/copy_is_equal_until_a_mount_changes_it", run: || when_mountable(copied) },
    Test { name: "compare/arena_in_use_is_refused", run: || when_mountable(in_use) },
    Test { name: "compare/updates_that_only_logs_hold_are_said", run: || when_mountable(undigested) },
];

/// Copies an arena that no process serves to a place beside it.
fn copy(site: &TestArena) -> Outcome<PathBuf> {
    let copy = site.arena().with_file_name("copy");
    let (from, to) = (site.arena().display(), copy.display());
    shell(Path::new("/"), &format!("rm -rf '{to}' && cp -a --sparse=always '{from}' '{to}'"))?.success()?;
    Ok(copy)
}

fn compare(a: &Path, b: &Path, options: &[&str]) -> Outcome<Done> {
    run(ashlar(&["fsck", "--compare"]).arg(a).arg(b).args(options))
}

/// The hashes of an arena's files, without the locks that each opening takes.
fn hashes(arena: &Path) -> Outcome<String> {
    let script = "find . -type f ! -name 'lock*' -print0 | sort -z | xargs -0 sha256sum";
    Ok(shell(arena, script)?.success()?.output)
}

fn inode_number(path: &Path) -> Outcome<u64> {
    Ok(std::fs::metadata(path).map_err(tried("looking at a file"))?.ino())
}

fn copied() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let point = site.point(0);
    shell(
        &point,
        "mkdir -p a/b; for n in $(seq 30); do head -c $((n * 999)) /dev/urandom > a/b/$n; done; ln a/b/1 a/l; \
         ln -s b/2 'a/a link'; truncate -s 1G a/sparse; chown 5:6 a/b/3",
    )?
    .success()?;
    let (file, other) = (inode_number(&point.join("a/b/9"))?, inode_number(&point.join("a/b/10"))?);
    site.umount(0)?;
    let copy = copy(&site)?;
    let before = (hashes(site.arena())?, hashes(&copy)?);
    let text = compare(site.arena(), &copy, &[])?.success()?.output;
    ensure!(
        text.contains("\nsha256 ") && text.ends_with("equal: no difference found\n"),
        "copies are not equal:\n{text}"
    );
    ensure!(before == (hashes(site.arena())?, hashes(&copy)?), "the comparison has changed an arena");

    // The dump's last line has the hash of all lines before it, as other tools find it.
    let dump = run(ashlar(&["fsck", "--dump"]).arg(&copy))?.success()?.output;
    let (lines, end) = dump.trim_end().rsplit_once('\n').ok_or("the dump has one line")?;
    std::fs::write(site.outside().join("lines"), format!("{lines}\n")).map_err(tried("writing"))?;
    let hash = shell(site.outside(), "sha256sum lines")?.success()?.output;
    let hash = hash.split(' ').next().unwrap_or_default();
    ensure!(end.ends_with(&format!("sha256={hash}")) && text.contains(hash), "the hash is not {hash}: {end}\n{text}");

    site.mount(0)?;
    shell(&point, "printf X | dd of=a/b/9 bs=1 seek=5 conv=notrunc status=none; chmod 751 a/b/10; mv a/l a/m")?
        .success()?;
    site.umount(0)?;
    let done = compare(site.arena(), &copy, &[])?;
    ensure!(done.status.code() == Some(1), "exit status 1 expected: {}", done.describe());
    for words in [
        format!("difference: inode {file}, bytes from 0 on: the contents differ\n"),
        format!("difference: inode {file}: the time of last modification is "),
        format!("difference: inode {other}: the mode is 0751 in A and 0644 in B\n"),
        "entry 'l': in B only\n".to_owned(),
        "entry 'm': in A only\n".to_owned(),
    ] {
        ensure!(done.output.contains(&words), "the comparison does not say '{words}': {}", done.describe());
    }
    let report = compare(&copy, site.arena(), &["--json"])?;
    ensure!(report.status.code() == Some(1), "exit status 1 expected: {}", report.describe());
    let report: Value = serde_json::from_str(&report.output).map_err(tried("reading the JSON of a comparison"))?;
    let differences = report["differences"].as_array().ok_or("no list of differences")?;
    ensure!(report["equal"] == false && report["differences_count"] == differences.len(), "the report is {report:#}");
    let mode = differences.iter().find(|found| found["attribute"] == "mode").ok_or("the mode is missing")?;
    ensure!(mode["a"] == "0644" && mode["b"] == "0751", "the mode is {mode}");
    site.check()?;
    passed()
}

fn in_use() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    site.umount(0)?;
    let copy = copy(&site)?;
    compare(site.arena(), site.arena(), &[])?.failure(2, &["is one arena"])?;
    compare(site.arena(), &site.outside().join("none"), &[])?.failure(2, &["there is no arena"])?;
    site.mount(0)?;
    for (a, b) in [(site.arena(), &*copy), (&copy, site.arena())] {
        compare(a, b, &[])?.failure(2, &["is in use", "ashlar umount"])?;
    }
    run(ashlar(&["fsck", "--dump"]).arg(site.arena()))?.failure(1, &["is in use", "ashlar umount"])?;
    site.umount(0)?;
    passed()
}

/// The daemon is stopped before the last writes, and killed with all else, so only the mount's log has them.
fn undigested() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let file = std::fs::File::create(site.point(0).join("file")).map_err(tried("making a file"))?;
    // The first write gets the lease and the credit that the second one takes.
    FileExt::write_all_at(&file, b"digested", 0).map_err(tried("writing"))?;
    let (daemon, mounts) = (site.daemon()?, site.mount_processes()?);
    signal(daemon, Signal::STOP)?;
    let written = FileExt::write_all_at(&file, b"in the log alone", 0).map_err(tried("writing"));
    let supervisor = parent(daemon);
    supervisor.into_iter().chain([daemon]).chain(mounts).try_for_each(kill)?;
    drop(file);
    written?;
    site.clear_mounts();
    let copy = copy(&site)?;
    let text = compare(site.arena(), &copy, &[])?.success()?.output;
    for name in ["A", "B"] {
        let note = format!("note: the logs of {name} hold ");
        ensure!(text.contains(&note) && text.contains("equal:"), "nothing is said of the logs of {name}:\n{text}");
    }
    site.mount(0)?;
    site.umount(0)?;
    let done = compare(site.arena(), &copy, &[])?;
    ensure!(done.status.code() == Some(1), "the digested update is no difference: {}", done.describe());
    ensure!(
        done.output.contains("the logs of B hold ") && !done.output.contains("the logs of A hold "),
        "{}",
        done.output
    );
    passed()
}
