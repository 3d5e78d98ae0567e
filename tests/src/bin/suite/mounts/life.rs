//! The life of a mount: from nothing to nothing.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::time::Duration;

use ashlar_tests::command::{ashlar, eventually, finish, is_alive, kill, parent, run, shell, signal, wait};
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::mount::{Medium, TestArena};
use ashlar_tests::{Outcome, ensure, tried};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::process::Signal;

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "life/mount_and_umount_leave_nothing_running", run: || when_mountable(nothing_left) },
    Test { name: "life/files_outlive_the_mount_on_every_medium", run: || when_mountable(files_outlive) },
    Test { name: "life/mount_over_files_says_that_it_hides_them", run: || when_mountable(hides) },
    Test { name: "life/two_mounts_share_a_daemon", run: || when_mountable(two_mounts) },
    Test { name: "life/status_informs_people_and_machines", run: || when_mountable(status) },
    Test { name: "life/fsck_is_clean_in_use_and_at_rest", run: || when_mountable(fsck) },
    Test { name: "life/fsck_finds_damaged_block", run: || when_mountable(damage) },
    Test { name: "life/flipped_log_bytes_are_never_data", run: || when_mountable(flipped) },
    Test { name: "life/arena_in_use_grows_and_shrinks", run: || when_mountable(resize) },
    Test { name: "life/regrown_arena_shows_no_old_data", run: || when_mountable(regrow) },
    Test { name: "life/full_arena_gives_enospc_and_recovers", run: || when_mountable(full) },
    Test { name: "life/emptied_arena_has_room_for_all_writers", run: || when_mountable(full_and_emptied) },
    Test { name: "life/arena_emptied_by_one_mount_serves_another", run: || when_mountable(full_and_shared) },
    Test { name: "life/full_arena_waits_for_no_stopped_mount", run: || when_mountable(full_and_stopped) },
    Test { name: "life/full_arena_allows_overwrites", run: || when_mountable(full_and_written_over) },
    Test { name: "life/full_arena_fails_syncs_of_mappings", run: || when_mountable(full_and_mapped) },
    Test { name: "life/read_only_mounts_refuse_changes", run: || when_mountable(read_only) },
    Test { name: "life/foreground_mount_ends_with_signal", run: || when_mountable(foreground) },
    Test { name: "life/standalone_daemon_stays", run: || when_mountable(own_daemon) },
    Test { name: "life/asked_daemon_lingers", run: || when_mountable(lingering) },
    Test { name: "life/daemon_of_removed_arena_ends", run: || when_mountable(removed) },
    Test { name: "life/dead_mount_is_mounted_anew", run: || when_mountable(died) },
    Test { name: "life/umount_succeeds_as_sharedfs_is_killed", run: || when_mountable(killed_before_umount) },
    Test { name: "life/lazy_umount_lets_programs_finish", run: || when_mountable(lazy) },
    Test { name: "life/idle_mount_takes_little_memory", run: || when_mountable(memory) },
    Test { name: "life/stopped_program_delays_no_other", run: || when_mountable(stopped) },
    Test { name: "life/used_arena_memory_lies_in_huge_pages", run: || when_mountable(huge_pages) },
];

const SOON: Duration = Duration::from_secs(30);

fn write(path: &Path, content: &str) -> Outcome {
    fs::write(path, content).map_err(tried(format!("writing {}", path.display())))
}

fn read(path: &Path) -> Outcome<String> {
    fs::read_to_string(path).map_err(tried(format!("reading {}", path.display())))
}

fn huge_pages() -> Outcome<Verdict> {
    let said = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if said.is_empty() || said.contains("[never]") {
        return Ok(Verdict::Skipped("this machine gives programs no huge pages".into()));
    }
    let site = TestArena::mounted(Medium::Memory, "256M")?;
    let path = site.point(0).join("file");
    let content: Vec<u8> = (0..16 << 20).map(|at: u32| (at / 5) as u8).collect();
    fs::write(&path, &content).map_err(tried("writing a file"))?;
    eventually("what was written lies in huge pages", SOON, || {
        let count = |name| site.counter(name).unwrap_or_default();
        count("huge_pages") > 0 && count("huge_pages_waiting") == 0
    })?;
    let found = || fs::read(&path).map_err(tried("reading a file"));
    ensure!(found()? == content, "it holds something else");
    let made = site.counter("huge_pages")?;
    site.kill_daemon()?;
    ensure!(found()? == content, "it holds something else after the daemon's death");
    site.umount(0)?;
    site.check()?;
    site.mount(0)?;
    ensure!(found()? == content, "it holds something else after another mount");
    site.umount(0)?;
    Ok(Verdict::Passed(format!("{made} huge pages")))
}

fn nothing_left() -> Outcome<Verdict> {
    let site = TestArena::new(Medium::Disk, "64M")?;
    let said = site.mount(0)?.output;
    for word in ["mounted", "arena", "64.0 MiB", "made now", "disk", "power loss", "daemon.log", "ashlar umount"] {
        ensure!(said.contains(word), "mount does not say '{word}':\n{said}");
    }
    let mut processes = site.mount_processes()?;
    processes.push(site.daemon()?);
    ensure!(processes.len() == 2, "one mount process expected: {processes:?}");
    write(&site.point(0).join("file"), "content")?;
    // It must count as this machine's: programs take a source with a colon for that of another machine.
    shell(&site.point(0), "df -l .")?.success()?;
    let said = site.umount(0)?.output;
    ensure!(said.contains("nothing is left running"), "umount says: {said}");
    ensure!(!processes.iter().any(|&pid| is_alive(pid)), "processes are left: {processes:?}");
    ensure!(!site.point(0).join("file").exists(), "the file is in the directory below");
    let status = site.status()?;
    ensure!(
        status["daemon"].is_null() && status["mounts"].as_array().is_some_and(Vec::is_empty),
        "status says {status}"
    );
    passed()
}

fn files_outlive() -> Outcome<Verdict> {
    for medium in [Medium::Disk, Medium::Memory] {
        let site = TestArena::mounted(medium, "64M")?;
        let kind = if medium == Medium::Disk { "disk" } else { "memory" };
        ensure!(site.status()?["medium"] == kind, "{medium:?} was found to be {}", site.status()?["medium"]);
        let root = fs::metadata(site.point(0)).map_err(tried("looking at the root directory"))?;
        let born = root.modified().map_err(tried("its time"))?;
        let age = born.elapsed().map_err(tried("its age"))?;
        ensure!(age < Duration::from_secs(60), "a new file system's root directory is {age:?} old");
        fs::create_dir(site.point(0).join("d")).map_err(tried("mkdir"))?;
        write(&site.point(0).join("d/f"), "content")?;
        site.umount(0)?;
        site.mount(0)?;
        ensure!(read(&site.point(0).join("d/f"))? == "content", "the content changed");
        site.umount(0)?;
    }
    let site = TestArena::new(Medium::Memory, "64M")?;
    fs::create_dir(site.point(0)).map_err(tried("mkdir"))?;
    let point = site.point(0).display().to_string();
    site.ashlar(&["mount", "--size", "64M", "--emulate-pmem", &point])?.success()?;
    write(&site.point(0).join("f"), "flushed")?;
    site.umount(0)?;
    site.check()?;
    passed()
}

fn hides() -> Outcome<Verdict> {
    let site = TestArena::new(Medium::Memory, "64M")?;
    let said = site.mount(0)?.output;
    ensure!(!said.contains("not empty"), "mount says of an empty directory:\n{said}");
    site.umount(0)?;
    write(&site.point(0).join("hidden"), "content")?;
    let said = site.mount(0)?.output;
    ensure!(said.contains("was not empty"), "mount does not say that it hides files:\n{said}");
    ensure!(!site.point(0).join("hidden").exists(), "the file shows through the mount");
    site.umount(0)?;
    ensure!(read(&site.point(0).join("hidden"))? == "content", "the file is not there after umount");
    passed()
}

fn two_mounts() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let said = site.mount(1)?.output;
    ensure!(said.contains("was running") && !said.contains("made now"), "the second mount says: {said}");
    let (one, two) = (site.point(0).join("f"), site.point(1).join("f"));
    write(&one, "first")?;
    ensure!(read(&two)? == "first", "the second mount does not see the file");
    write(&two, "second")?;
    ensure!(read(&one)? == "second", "the first mount does not see the change");
    fs::remove_file(&one).map_err(tried("unlink"))?;
    ensure!(!two.exists(), "the second mount still has the name");
    let daemon = site.daemon()?;
    let said = site.umount(0)?.output;
    ensure!(!said.contains("nothing is left"), "umount says: {said}");
    ensure!(is_alive(daemon), "the daemon ended under the second mount");
    write(&two, "third")?;
    site.umount(1)?;
    ensure!(!is_alive(daemon), "the daemon is left");
    passed()
}

fn status() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    write(&site.point(0).join("f"), &"x".repeat(1 << 20))?;
    let text = site.ashlar(&["status"])?.success()?.output;
    let point = site.point(0).display().to_string();
    for word in
        ["arena", "medium    memory", "size      64.0 MiB", "daemon    process", "SESSION", "mount", &point, "COUNTER"]
    {
        ensure!(text.contains(word), "status does not say '{word}':\n{text}");
    }
    let report = site.status()?;
    let arena = site.arena().display().to_string();
    ensure!(report["arena"] == arena.as_str(), "the arena is {}", report["arena"]);
    ensure!(report["mounts"][0] == point.as_str(), "the mounts are {}", report["mounts"]);
    let session = &report["daemon"]["sessions"][0];
    ensure!(session["label"] == point.as_str() && session["kind"] == "Mount", "the session is {session}");
    let everything = ashlar_tests::command::run(&mut ashlar(&["status"]))?.success()?.output;
    ensure!(everything.contains(&arena), "status without --arena leaves out a mounted arena:\n{everything}");
    site.umount(0)?;
    let text = site.ashlar(&["status"])?.success()?.output;
    ensure!(text.contains("not running") && text.contains("ashlar mount"), "status at rest:\n{text}");
    passed()
}

fn fsck() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    shell(
        &site.point(0),
        "mkdir -p a/b; for n in $(seq 50); do head -c $((n * 999)) /dev/urandom > a/b/$n; done; ln a/b/1 a/l",
    )?
    .success()?;
    let text = site.ashlar(&["fsck"])?.success()?.output;
    ensure!(text.contains("(in use)") && text.contains("clean"), "fsck says:\n{text}");
    site.ashlar(&["fsck", "--repair"])?.failure(1, &["is in use", "ashlar umount"])?;
    site.umount(0)?;
    let text = site.ashlar(&["fsck"])?.success()?.output;
    ensure!(text.contains("(not in use)") && text.contains("clean"), "fsck says:\n{text}");
    let counts = site.check()?;
    ensure!(counts["inodes"].as_u64() >= Some(53), "fsck counts {counts}");
    site.ashlar(&["fsck", "--repair"])?.success()?;
    passed()
}

/// One byte of a block is flipped in the segment: the check reports it, a read fails, and no read returns wrong bytes.
fn damage() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let marked = "the marked block of this very file ".repeat(4096);
    write(&site.point(0).join("victim"), &marked)?;
    write(&site.point(0).join("other"), "sound")?;
    site.umount(0)?;
    site.expect_damage();
    let segments = site.arena().join("segments");
    let mut flipped = 0;
    for file in fs::read_dir(&segments).map_err(tried("listing segments"))?.flatten() {
        let mut bytes = fs::read(file.path()).map_err(tried("reading a segment"))?;
        let needle = b"the marked block of this very file";
        if let Some(at) = bytes.windows(needle.len()).position(|window| window == needle) {
            bytes[at + 4] ^= 0x20;
            fs::write(file.path(), bytes).map_err(tried("writing a segment"))?;
            flipped += 1;
        }
    }
    ensure!(flipped > 0, "the file's blocks were not found in the segments");
    let done = site.ashlar(&["fsck"])?;
    ensure!(done.status.code() == Some(4), "fsck does not see the damage: {}", done.describe());
    ensure!(done.output.contains("problem:") && done.output.contains("--repair"), "fsck says: {}", done.describe());
    site.mount(0)?;
    let answer = fs::read(site.point(0).join("victim"));
    ensure!(
        answer.as_ref().is_err_and(|error| error.raw_os_error() == Some(5)),
        "EIO expected, the damaged file reads as {:?}",
        answer.map(|it| it.len())
    );
    ensure!(read(&site.point(0).join("other"))? == "sound", "another file suffers");
    site.umount(0)?;
    passed()
}

/// One byte of an undigested record is flipped in the session's log: under a living mount, and in the log of a dead
/// one. No read ever shows it, and everything digested before is whole.
fn flipped() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    for is_dead in [false, true] {
        let (victim, other) = (site.point(0).join("victim"), site.point(0).join("other"));
        write(&other, "sound")?;
        write(&victim, "digested")?;
        site.check()?;
        // A handle that only writes leaves no pages in the kernel. The daemon is stopped, so nothing is digested.
        let file = fs::OpenOptions::new().write(true).open(&victim).map_err(tried("opening"))?;
        FileExt::write_all_at(&file, b"digested", 0).map_err(tried("writing"))?;
        let (daemon, mounts) = (site.daemon()?, site.mount_processes()?);
        signal(daemon, Signal::STOP)?;
        let marked = "the marked record of this very log ".repeat(100);
        let written = FileExt::write_all_at(&file, marked.as_bytes(), 0).map_err(tried("writing"));
        let flipped = written.and_then(|()| flip_bytes(&site, b"the marked record of this very log"));
        if is_dead {
            mounts.iter().try_for_each(|pid| signal(*pid, Signal::KILL))?;
        }
        signal(daemon, Signal::CONT)?;
        ensure!(flipped? > 0, "the record was not found in the log");
        if !is_dead {
            // LibFS finds the damage and asks SharedFS, or SharedFS has found it already.
            let answer = fs::read(&victim);
            let is_refused = answer.as_ref().is_err_and(|error| error.raw_os_error() == Some(5));
            ensure!(is_refused, "EIO expected, the file reads as {:?}", answer.map(|found| found.len()));
            eventually("the session is fenced", SOON, || {
                site.status().is_ok_and(|status| status["daemon"]["sessions"][0]["fenced"].is_string())
            })?;
        }
        drop(file);
        site.kill_everything()?;
        let done = site.ashlar(&["fsck"])?;
        ensure!(done.status.code() == Some(4), "fsck says nothing of the log: {}", done.describe());
        site.mount(0)?;
        ensure!(read(&other)? == "sound", "another file suffers");
        ensure!(read(&victim)? == "digested", "a damaged record was digested");
        site.umount(0)?;
        let done = site.ashlar(&["fsck"])?;
        ensure!(done.output.contains("kept aside"), "fsck does not say where the log is: {}", done.describe());
        let aside = fs::read_dir(site.arena().join("sessions")).map_err(tried("listing"))?;
        aside.flatten().try_for_each(|file| fs::remove_file(file.path())).map_err(tried("removing the log"))?;
        site.check()?;
        site.mount(0)?;
    }
    site.umount(0)?;
    passed()
}

/// Flips a byte wherever `needle` stands in a log; returns how often it did.
fn flip_bytes(site: &TestArena, needle: &[u8]) -> Outcome<usize> {
    let mut flipped = 0;
    for file in fs::read_dir(site.arena().join("sessions")).map_err(tried("listing logs"))?.flatten() {
        let path = file.path();
        if path.extension().is_none_or(|extension| extension != "log") {
            continue;
        }
        let bytes = fs::read(&path).map_err(tried("reading a log"))?;
        if let Some(at) = bytes.windows(needle.len()).position(|window| window == needle) {
            let log = fs::OpenOptions::new().write(true).open(&path).map_err(tried("opening a log"))?;
            FileExt::write_all_at(&log, &[bytes[at + 4] ^ 0x20], at as u64 + 4).map_err(tried("writing a log"))?;
            flipped += 1;
        }
    }
    Ok(flipped)
}

fn resize() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let point = site.point(0);
    let content = "y".repeat(1 << 20);
    for number in 0..40 {
        write(&point.join(format!("{number}")), &content)?;
    }
    let size = || Ok::<_, String>(rustix::fs::statvfs(&point).map_err(tried("statvfs"))?.f_blocks);
    let before = size()?;
    site.ashlar(&["arena", "resize", "128M"])?.success()?;
    ensure!(size()? > before, "the file system did not grow: {} blocks before, {} now", before, size()?);
    for number in 40..90 {
        write(&point.join(format!("{number}")), &content)?;
    }
    site.ashlar(&["arena", "resize", "64M"])?.failure(1, &["need more", "remove some"])?;
    for number in 30..90 {
        fs::remove_file(point.join(format!("{number}"))).map_err(tried("unlink"))?;
    }
    site.ashlar(&["arena", "resize", "64M"])?.success()?;
    ensure!(size()? <= before, "the file system did not shrink: {} blocks before, {} now", before, size()?);
    for number in 0..30 {
        ensure!(read(&point.join(format!("{number}")))? == content, "file {number} suffered");
    }
    site.check()?;
    site.umount(0)?;
    site.check()?;
    passed()
}

/// A removed segment is read no more by extents that were sent before. Nor do such extents read a later segment with
/// the same number.
fn regrow() -> Outcome<Verdict> {
    const MIB: usize = 1 << 20;
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let name = |number: u32| site.point(0).join(format!("{number}"));
    let kept = 60..70;
    for letter in *b"ONP" {
        let mut content = vec![letter; MIB];
        let same = |number: u32, content: &[u8]| {
            let found = fs::read(name(number)).map_err(tried(format!("reading file {number}")))?;
            ensure!(found == content, "file {number} is not what was written");
            Ok::<(), String>(())
        };
        site.ashlar(&["arena", "resize", "128M"])?.success()?;
        for number in 0..100 {
            fs::write(name(number), &content).map_err(tried("writing"))?;
        }
        // By then everything is in its segment, and the mount no longer knows it as its own write.
        std::thread::sleep(Duration::from_millis(1500));
        (0..100).try_for_each(|number| same(number, &content))?;
        for number in (0..100).filter(|number| !kept.contains(number)) {
            fs::remove_file(name(number)).map_err(tried("unlink"))?;
        }
        for number in kept.clone() {
            let file = fs::OpenOptions::new().write(true).open(name(number)).map_err(tried("opening"))?;
            for at in (100..MIB).step_by(4096) {
                file.write_all_at(&[b'x'; 1000], at as u64).map_err(tried("writing"))?;
            }
        }
        (100..MIB).step_by(4096).for_each(|at| content[at..at + 1000].fill(b'x'));
        site.ashlar(&["arena", "resize", "64M"])?.success()?;
        kept.clone().try_for_each(|number| same(number, &content))?;
        for number in kept.clone() {
            fs::remove_file(name(number)).map_err(tried("unlink"))?;
        }
    }
    site.umount(0)?;
    site.check()?;
    passed()
}

fn full() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "32M")?;
    let point = site.point(0);
    let daemon = site.daemon()?;
    for round in 0..3 {
        let mut written = 0;
        let error = loop {
            match fs::write(point.join(format!("f{written}")), vec![b'z'; 1 << 20]) {
                Ok(()) => written += 1,
                Err(error) => break error,
            }
            ensure!(written < 64, "a file system of 32 MiB took {written} MiB");
        };
        ensure!(error.raw_os_error() == Some(28), "round {round}: ENOSPC expected, got {error}");
        ensure!(written >= 16, "round {round}: a file system of 32 MiB took only {written} MiB");
        ensure!(site.daemon()? == daemon, "the daemon died of a full arena");
        for number in 0..written {
            let content = fs::read(point.join(format!("f{number}"))).map_err(tried("reading back"))?;
            ensure!(content == vec![b'z'; 1 << 20], "round {round}: file {number} is not what was written");
        }
        let free = shell(&point, "rm -f f* && df -B1M --output=avail . | tail -n 1")?.success()?.output;
        let free_mib: u64 = free.trim().parse().map_err(|_| format!("df said {free}"))?;
        ensure!(free_mib >= written, "round {round}: after the deletion of {written} MiB, {free_mib} MiB are free");
    }
    write(&point.join("after"), "room again")?;
    site.check()?;
    site.umount(0)?;
    passed()
}

/// Several writers can use the space of a deletion at once: the first one that asks leaves no refusal for the others.
fn full_and_emptied() -> Outcome<Verdict> {
    const WRITERS: usize = 8;
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let point = site.point(0);
    let file = |writer: usize, number: usize| point.join(format!("of{writer}/f{number}"));
    fs::write(point.join("room"), vec![b'r'; 2 << 20]).map_err(tried("writing"))?;
    shell(&point, "dd if=/dev/zero of=rest bs=64K status=none || rm room")?.success()?;
    for round in 0..3 {
        for writer in 0..WRITERS {
            fs::create_dir(point.join(format!("of{writer}"))).map_err(tried("mkdir"))?;
        }
        let start = Barrier::new(WRITERS);
        let fill = |writer: usize| {
            start.wait();
            let first = fs::write(file(writer, 0), [b'w'; 1024]);
            start.wait();
            first.map_err(tried(format!("round {round}: the first file of writer {writer}")))?;
            let refused = (1..).find_map(|number| fs::write(file(writer, number), [b'w'; 1024]).err());
            let code = refused.and_then(|error| error.raw_os_error());
            ensure!(code == Some(28), "round {round}: ENOSPC expected, got {code:?}");
            Ok(())
        };
        std::thread::scope(|scope| {
            let fill = &fill;
            let writers: Vec<_> = (0..WRITERS).map(|writer| scope.spawn(move || fill(writer))).collect();
            writers.into_iter().try_for_each(|writer| writer.join().map_err(|_| "a writer panicked")?)
        })?;
        shell(&point, "rm -r of*")?.success()?;
    }
    site.umount(0)?;
    site.check()?;
    passed()
}

/// Another mount can use the space of a mount's deletion at once.
fn full_and_shared() -> Outcome<Verdict> {
    const SCRIPT: &str = "
        said=$(dd if=/dev/zero of=big bs=64K status=none 2>&1) || [[ $said == *'No space left'* ]]
        rm big
        dd if=/dev/zero of=../mount1/new bs=64K count=100 status=none
        rm ../mount1/new";
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    site.mount(1)?;
    for _ in 0..5 {
        shell(&site.point(0), SCRIPT)?.success()?;
    }
    site.umount(1)?;
    site.umount(0)?;
    site.check()?;
    passed()
}

/// Others can use the blocks of which a mount has replaced a part, though that mount is stopped and might read the
/// rest.
fn full_and_stopped() -> Outcome<Verdict> {
    const BLOCKS: u64 = 1000;
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let stopped = site.mount_processes()?;
    site.mount(1)?;
    let (ours, theirs) = (site.point(0).join("ours"), site.point(1).join("theirs"));
    let mut content = vec![b'o'; BLOCKS as usize * 4096];
    fs::write(&ours, &content).map_err(tried("writing"))?;
    let file = fs::OpenOptions::new().write(true).open(&ours).map_err(tried("opening"))?;
    // By then it is committed, so that the next writes need other blocks.
    std::thread::sleep(Duration::from_millis(1500));
    for block in 0..BLOCKS {
        file.write_all_at(&[b'x'; 1000], block * 4096).map_err(tried("writing"))?;
        content[block as usize * 4096..][..1000].fill(b'x');
    }
    let other = fs::File::create(&theirs).map_err(tried("creating"))?;
    stopped.iter().try_for_each(|&pid| signal(pid, Signal::STOP))?;
    let filled = (0..).find_map(|block| other.write_all_at(&[b't'; 4096], block * 4096).err());
    let left = rustix::fs::fstatvfs(&other).map_err(tried("statvfs"))?.f_bavail;
    stopped.iter().try_for_each(|&pid| signal(pid, Signal::CONT))?;
    let code = filled.and_then(|error| error.raw_os_error());
    ensure!(code == Some(28) && left < 10, "refused with {code:?}, though {left} blocks are free");
    let found = fs::read(&ours).map_err(tried("reading"))?;
    ensure!(found == content, "what the stopped mount had written is not there");
    drop((file, other));
    site.umount(1)?;
    site.umount(0)?;
    site.check()?;
    passed()
}

/// Without a free block, existing data can be overwritten and cut off, and reserved space can be written.
fn full_and_written_over() -> Outcome<Verdict> {
    const RESERVED: u64 = 4 << 20;
    for medium in [Medium::Memory, Medium::Disk] {
        let site = TestArena::mounted(medium, "48M")?;
        let point = site.point(0);
        let open = |name: &str| {
            let file =
                fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).open(point.join(name));
            file.map_err(tried(format!("opening {name}")))
        };
        let (base, reserved, rest) = (open("base")?, open("reserved")?, open("rest")?);
        base.write_all_at(&[b'a'; 4 << 20], 0).map_err(tried("writing"))?;
        fallocate(&reserved, FallocateFlags::KEEP_SIZE, 0, RESERVED).map_err(tried("reserving"))?;
        let mut end = 0;
        let block = [b'r'; 4096];
        let error = loop {
            match rest.write_at(&[b'r'; 1 << 20], end) {
                Ok(bytes) => end += bytes as u64,
                Err(error) => break error,
            }
        };
        ensure!(error.raw_os_error() == Some(28), "ENOSPC expected, got {error}");
        ensure!(rest.write_at(&block, end).is_err(), "a block more is there than a large write took");
        // Everything twice, in large pieces and in small ones; far less is kept back for it.
        base.write_all_at(&[b'b'; 4 << 20], 0).map_err(tried("writing over in large pieces"))?;
        for number in 0..1024 {
            base.write_all_at(&[b'c'; 4096], number * 4096).map_err(tried(format!("writing over block {number}")))?;
        }
        // First every other 64 KiB, then those in between.
        for first in [1, 0] {
            for at in (first..RESERVED >> 16).step_by(2) {
                reserved.write_all_at(&[b'd'; 1 << 16], at << 16).map_err(tried("writing where it is reserved"))?;
            }
        }
        base.set_len((2 << 20) + 100).map_err(tried("cutting off"))?;
        let punched = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&base, punched, 100, 8192).map_err(tried("punching"))?;
        let mut expected = vec![b'c'; (2 << 20) + 100];
        expected[100..8292].fill(0);
        let same = |name: &str, expected: &[u8]| {
            let found = fs::read(point.join(name)).map_err(tried(format!("reading {name}")))?;
            ensure!(found == expected, "{medium:?}: {name} is not what was written");
            Ok::<(), String>(())
        };
        same("base", &expected)?;
        same("reserved", &[b'd'; RESERVED as usize])?;
        same("rest", &vec![b'r'; end as usize])?;
        drop((base, reserved, rest));
        site.check()?;
        site.umount(0)?;
        site.check()?;
        site.mount(0)?;
        same("base", &expected)?;
        same("reserved", &[b'd'; RESERVED as usize])?;
        site.umount(0)?;
    }
    passed()
}

/// There is room for only a part of a mapping's changes: the process that syncs it gets the error.
fn full_and_mapped() -> Outcome<Verdict> {
    const SCRIPT: &str = "
import mmap, os
os.system('dd if=/dev/zero of=rest bs=64K status=none 2>/dev/null')
os.truncate('rest', os.path.getsize('rest') - (300 << 10))
os.sync()
file = os.open('mapped', os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 1 << 20)
errors = 0
with mmap.mmap(file, 0) as mapping:
    mapping[:] = b'm' * (1 << 20)
    for sync in (mapping.flush, lambda: os.fsync(file)):
        try:
            sync()
        except OSError:
            errors += 1
print('reported' if errors else 'not reported')";
    let site = TestArena::mounted(Medium::Memory, "48M")?;
    let done = ashlar_tests::command::run(Command::new("python3").args(["-c", SCRIPT]).current_dir(site.point(0)))?;
    ensure!(done.output.trim() == "reported", "it says: {}", done.describe());
    site.umount(0)?;
    site.check()?;
    passed()
}

fn read_only() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    write(&site.point(0).join("f"), "kept")?;
    site.umount(0)?;
    let point = site.point(0).display().to_string();
    site.ashlar(&["mount", "--read-only", &point])?.success()?;
    ensure!(read(&site.point(0).join("f"))? == "kept", "the file can't be read");
    let error = fs::write(site.point(0).join("g"), "x").map_err(|error| error.raw_os_error());
    ensure!(error == Err(Some(30)), "EROFS expected, got {error:?}");
    site.umount(0)?;
    passed()
}

fn foreground() -> Outcome<Verdict> {
    let site = TestArena::new(Medium::Memory, "64M")?;
    fs::create_dir(site.point(0)).map_err(tried("mkdir"))?;
    let mut daemon = 0;
    for stop in [Signal::INT, Signal::TERM] {
        let mut command = ashlar(&["mount", "--foreground", "--size", "64M", "--arena"]);
        command.arg(site.arena()).arg(site.point(0)).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().map_err(tried("starting"))?;
        eventually("it is mounted", SOON, || {
            fs::write(site.point(0).join("f"), "x").is_ok() && site.mount_processes().is_ok_and(|it| !it.is_empty())
        })?;
        daemon = site.daemon()?;
        signal(child.id(), stop)?;
        let done = finish(child, "ashlar mount --foreground".into())?.success()?;
        ensure!(done.output.contains("mounted"), "it says: {}", done.describe());
    }
    // No process asks it meanwhile: a daemon that is asked stays.
    eventually("the daemon ends by itself", SOON, || !is_alive(daemon))?;
    ensure!(site.status()?["daemon"].is_null(), "status still shows the daemon");
    passed()
}

/// Starts a daemon without a mount: its supervisor, and the number of SharedFS.
fn start_daemon(site: &TestArena, options: &[&str]) -> Outcome<(Child, u32)> {
    let mut command = ashlar(&["daemon", "--size", "64M", "--arena"]);
    command.arg(site.arena()).args(options).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn().map_err(tried("starting"))?;
    eventually("the daemon answers", SOON, || site.daemon().is_ok())?;
    Ok((child, site.daemon()?))
}

fn own_daemon() -> Outcome<Verdict> {
    let site = TestArena::new(Medium::Memory, "64M")?;
    let (mut child, daemon) = start_daemon(&site, &[])?;
    site.mount(0)?;
    write(&site.point(0).join("f"), "x")?;
    site.umount(0)?;
    ensure!(site.daemon()? == daemon, "the daemon ended without an order");
    signal(child.id(), Signal::TERM)?;
    ensure!(wait(&mut child, SOON)?.success(), "the supervisor did not end well");
    ensure!(!is_alive(daemon), "SharedFS is left");
    site.check()?;
    passed()
}

/// A mount asks for the daemon before it opens its session: a daemon that has answered must not be gone by then.
fn lingering() -> Outcome<Verdict> {
    let site = TestArena::new(Medium::Memory, "64M")?;
    let (mut child, daemon) = start_daemon(&site, &["--linger-seconds", "2"])?;
    let start = std::time::Instant::now();
    while start.elapsed() < std::time::Duration::from_secs(4) {
        ensure!(site.daemon()? == daemon, "the daemon ended while it was being asked");
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    ensure!(wait(&mut child, SOON)?.success(), "the supervisor did not end well");
    ensure!(!is_alive(daemon), "SharedFS is left");
    passed()
}

/// The arena is removed, and the mount later: the sessions' files can't be removed any more.
fn removed() -> Outcome<Verdict> {
    let site = TestArena::new(Medium::Memory, "64M")?;
    let (mut child, daemon) = start_daemon(&site, &["--linger-seconds", "2"])?;
    site.mount(0)?;
    write(&site.point(0).join("f"), "x")?;
    fs::remove_dir_all(site.arena()).map_err(tried("removing the arena"))?;
    ensure!(read(&site.point(0).join("f"))? == "x", "what is mounted is not served to the end");
    run(Command::new("umount").arg(site.point(0)))?.success()?;
    ensure!(wait(&mut child, SOON)?.success(), "the supervisor did not end well");
    ensure!(!is_alive(daemon), "SharedFS is left");
    passed()
}

fn died() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    write(&site.point(0).join("f"), "acknowledged")?;
    site.kill_mounts()?;
    let error = fs::read(site.point(0).join("f")).map_err(|error| error.raw_os_error());
    ensure!(matches!(error, Err(Some(103 | 107 | 125))), "ECONNABORTED, ENOTCONN or ECANCELED expected, got {error:?}");
    let said = site.mount(0)?;
    ensure!(said.errors.contains("mounting anew"), "mount says: {}", said.describe());
    ensure!(read(&site.point(0).join("f"))? == "acknowledged", "the file is not what was written");
    // The leftovers of the dead mount, whose device number this one may have, do this one no harm.
    let mut used = File::open(site.point(0).join("f")).map_err(tried("opening the file"))?;
    ensure!(site.umount(0).is_err(), "a mount in use was unmounted");
    let mut text = String::new();
    used.read_to_string(&mut text).map_err(tried("reading a file that was open"))?;
    ensure!(text == "acknowledged", "an open file holds {text}");
    drop(used);
    site.kill_everything()?;
    site.mount(0)?;
    ensure!(read(&site.point(0).join("f"))? == "acknowledged", "the file is not what was written");
    site.umount(0)?;
    site.check()?;
    passed()
}

/// SharedFS is killed, and its supervisor is about to start it again when `umount` searches for a daemon. Both may
/// start one, and only one can succeed.
fn killed_before_umount() -> Outcome<Verdict> {
    const ROUNDS: u64 = 16;
    let site = TestArena::mounted(Medium::Memory, "512M")?;
    for round in 0..ROUNDS {
        let content = format!("acknowledged {round}");
        write(&site.point(0).join("f"), &content)?;
        let daemon = site.daemon()?;
        // A log that takes a moment to digest.
        fs::write(site.point(0).join("big"), vec![1; 48 << 20]).map_err(tried("writing a big file"))?;
        let supervisor = parent(daemon).ok_or("SharedFS has no supervisor")?;
        signal(supervisor, Signal::STOP)?;
        kill(daemon)?;
        std::thread::scope(|scope| {
            let umount = scope.spawn(|| site.umount(0));
            std::thread::sleep(Duration::from_millis(round));
            signal(supervisor, Signal::CONT)?;
            umount.join().map_err(|_| "a thread panicked".to_owned())?
        })
        .map_err(|error| format!("{round} ms: {error}"))?;
        site.check()?;
        site.mount(0)?;
        ensure!(read(&site.point(0).join("f"))? == content, "the file is not what was written");
    }
    site.umount(0)?;
    passed()
}

fn lazy() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let mut file = fs::File::create(site.point(0).join("f")).map_err(tried("creating"))?;
    site.ashlar(&["status"])?.success()?;
    let processes = site.mount_processes()?;
    ashlar_tests::command::run(ashlar(&["umount", "--lazy"]).arg(site.point(0)))?.success()?;
    std::io::Write::write_all(&mut file, b"written after it was gone").map_err(tried("writing"))?;
    drop(file);
    eventually("the mount process ends", SOON, || !processes.iter().any(|&pid| is_alive(pid)))?;
    site.mount(0)?;
    ensure!(read(&site.point(0).join("f"))? == "written after it was gone", "the late write is lost");
    site.umount(0)?;
    passed()
}

/// Private memory of the daemon and the mount process together, at rest, after work.
fn memory() -> Outcome<Verdict> {
    const LIMIT_KIB: u64 = 64 << 10;
    let site = TestArena::mounted(Medium::Memory, "512M")?;
    shell(
        &site.point(0),
        "for n in $(seq 2000); do echo $n > f$n; done; dd if=/dev/zero of=big bs=1M count=64 status=none; rm -f f*",
    )?
    .success()?;
    let private = || -> Outcome<u64> {
        let mut total = 0;
        for pid in site.mount_processes()?.into_iter().chain([site.daemon()?]) {
            let rollup = read(Path::new(&format!("/proc/{pid}/smaps_rollup")))?;
            let anonymous = rollup.lines().find(|line| line.starts_with("Anonymous:"));
            total += anonymous.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).unwrap_or(0);
        }
        Ok(total)
    };
    // Digest and commit of the script's updates end by themselves.
    eventually("private memory is below its limit", SOON, || private().is_ok_and(|kib| kib < LIMIT_KIB))
        .map_err(|error| format!("{error}: {} KiB", private().unwrap_or(0)))?;
    let kib = private()?;
    site.umount(0)?;
    Ok(Verdict::Passed(format!("{kib} KiB")))
}

/// A program on one mount is stopped in the middle of its work; programs on another mount continue with the same files.
fn stopped() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "128M")?;
    site.mount(1)?;
    let script = "while :; do for n in 1 2 3 4 5 6 7 8; do echo $n > shared$n; done; done";
    let mut child =
        Command::new("sh").args(["-c", script]).current_dir(site.point(0)).spawn().map_err(tried("starting"))?;
    eventually("it works", SOON, || site.point(0).join("shared8").exists())?;
    let processes = site.mount_processes()?;
    signal(child.id(), Signal::STOP)?;
    let (first, rest) = processes.split_first().ok_or("no mount process")?;
    ensure!(rest.len() == 1, "two mount processes expected: {processes:?}");
    // The first session's whole process, in the middle of its work.
    signal(*first, Signal::STOP)?;
    let other =
        if site.status()?["daemon"]["sessions"][0]["label"] == site.point(0).display().to_string() { 1 } else { 0 };
    let start = std::time::Instant::now();
    let result = shell(&site.point(other), "for n in 1 2 3 4 5 6 7 8; do echo other > shared$n; cat shared$n; done");
    let elapsed = start.elapsed();
    signal(*first, Signal::CONT)?;
    signal(child.id(), Signal::CONT)?;
    ensure!(result?.success()?.output == "other\n".repeat(8), "the other program saw something else");
    ensure!(elapsed < Duration::from_secs(10), "the other program took {} s", elapsed.as_secs());
    std::thread::sleep(Duration::from_millis(200));
    ensure!(child.try_wait().map_err(tried("waiting"))?.is_none(), "the stopped program did not continue");
    child.kill().map_err(tried("ending the program"))?;
    child.wait().map_err(tried("ending the program"))?;
    site.umount(0)?;
    site.umount(1)?;
    Ok(Verdict::Passed(format!("{} ms", elapsed.as_millis())))
}
