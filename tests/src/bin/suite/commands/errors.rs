//! Every refusal of a command, with words that help.

use std::fs;
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};
use std::thread;

use ashlar_tests::command::{ashlar, program, run, shell};
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::mount::{Medium, TestArena};
use ashlar_tests::{Outcome, ensure, tried};
use ashlar_wire::socket_of;
use rustix::fs::{FlockOperation, flock};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "errors/bad_flag_is_named_with_nearest_one", run: bad_flag },
    Test { name: "errors/ordinary_user_is_refused", run: || when_mountable(not_root) },
    Test { name: "errors/missing_fuse_device_is_named", run: || when_mountable(no_device) },
    Test { name: "errors/missing_directory_and_plain_file_are_refused", run: || when_mountable(no_directory) },
    Test { name: "errors/mounted_and_unmounted_directories_are_refused", run: || when_mountable(mounted_already) },
    Test { name: "errors/busy_mount_names_its_users", run: || when_mountable(busy) },
    Test { name: "errors/arena_in_use_is_refused", run: || when_mountable(in_use) },
    Test { name: "errors/arena_of_other_version_is_refused", run: || when_mountable(wrong_version) },
    Test { name: "errors/arena_without_space_is_refused", run: || when_mountable(no_space) },
    Test { name: "errors/growth_without_space_is_refused", run: || when_mountable(no_space_to_grow) },
    Test { name: "errors/missing_arena_and_daemon_are_named", run: no_arena },
    Test { name: "errors/damaged_superblock_is_refused", run: || when_mountable(damaged) },
    Test { name: "errors/check_asks_no_dying_daemon", run: || when_mountable(dying) },
];

fn bad_flag() -> Outcome<Verdict> {
    run(&mut ashlar(&["mount", "--sizes", "1G", "/mnt"]))?.failure(2, &["--sizes", "--size"])?;
    run(&mut ashlar(&["mount"]))?.failure(2, &["<DIR>", "Usage"])?;
    run(&mut ashlar(&["mount", "--size", "big", "/mnt"]))?.failure(2, &["512M"])?;
    run(&mut ashlar(&["moint", "/mnt"]))?.failure(2, &["mount"])?;
    passed()
}

fn not_root() -> Outcome<Verdict> {
    let directory = tempfile::tempdir().map_err(tried("making a directory"))?;
    // The command must be readable to a user that may not search root's directories.
    let copy = directory.path().join("ashlar");
    fs::copy(program(), &copy).map_err(tried("copying the command"))?;
    let main = "ashlar-main";
    fs::copy(program().with_file_name(main), directory.path().join(main)).map_err(tried("copying the command"))?;
    shell(directory.path(), "chmod 755 . ashlar ashlar-main; mkdir -m 777 point")?.success()?;
    let as_nobody = |verb: &str| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&copy).arg(verb);
        command.arg(directory.path().join("point"));
        run(&mut command)
    };
    as_nobody("mount")?.failure(1, &["takes root", "sudo"])?;
    as_nobody("umount")?.failure(1, &["takes root", "sudo"])?;
    let arena = directory.path().join("arena");
    shell(directory.path(), "mkdir -m 755 arena && umask 077 && touch arena/ARENA")?.success()?;
    for words in [&["status"][..], &["fsck"], &["arena", "resize", "64M"]] {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&copy).args(words);
        let done = run(command.arg("--arena").arg(&arena))?;
        let said = format!("{}{}", done.output, done.errors);
        ensure!(said.contains("another user") && said.contains("sudo"), "{words:?} says: {}", done.describe());
    }
    passed()
}

/// In a mount namespace of its own, with an empty /dev.
fn no_device() -> Outcome<Verdict> {
    let directory = tempfile::tempdir().map_err(tried("making a directory"))?;
    let script =
        format!("mount -t tmpfs none /dev && exec {} mount {}", program().display(), directory.path().display());
    run(Command::new("unshare").args(["--mount", "sh", "-c", &script]))?.failure(1, &["/dev/fuse", "modprobe fuse"])?;
    passed()
}

fn no_directory() -> Outcome<Verdict> {
    let site = TestArena::new(Medium::Disk, "64M")?;
    let missing = site.outside().join("missing");
    site.ashlar(&["mount", &missing.display().to_string()])?.failure(1, &["no directory", "mkdir -p"])?;
    let deep = missing.join("deeper");
    site.ashlar(&["mount", &deep.display().to_string()])?.failure(1, &["no directory", "mkdir -p"])?;
    let file = site.outside().join("file");
    fs::write(&file, "").map_err(tried("making a file"))?;
    site.ashlar(&["mount", &file.display().to_string()])?.failure(1, &["not a directory"])?;
    ensure!(!site.arena().exists(), "an arena was made for a mount that failed");
    passed()
}

fn mounted_already() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let point = site.point(0).display().to_string();
    site.ashlar(&["mount", &point])?.failure(1, &["mounted already", "ashlar umount"])?;
    // It is still the one mount, and it works.
    fs::write(site.point(0).join("f"), "x").map_err(tried("writing"))?;
    site.umount(0)?;
    run(ashlar(&["umount"]).arg(&point))?.failure(1, &["no Ashlar", "ashlar status"])?;
    run(&mut ashlar(&["umount", "/proc"]))?.failure(1, &["no Ashlar"])?;
    passed()
}

fn busy() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let mut child = Command::new("sleep")
        .arg("600")
        .current_dir(site.point(0))
        .stdin(Stdio::null())
        .spawn()
        .map_err(tried("starting"))?;
    let refused = run(ashlar(&["umount"]).arg(site.point(0)));
    child.kill().map_err(tried("ending the program"))?;
    child.wait().map_err(tried("ending the program"))?;
    let process = format!("sleep (process {})", child.id());
    refused?.failure(1, &["busy", &process, "--lazy"])?;
    site.umount(0)?;
    passed()
}

/// This very process holds the arena's lock, like a check that is under way.
fn in_use() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    site.umount(0)?;
    let lock = fs::File::open(site.arena().join("lock")).map_err(tried("opening the lock"))?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(tried("taking the lock"))?;
    site.ashlar(&["fsck"])?.failure(1, &["in use by process", "kill"])?;
    site.ashlar(&["mount", &site.point(0).display().to_string()])?.failure(1, &["in use by process", "kill"])?;
    drop(lock);
    site.check()?;
    passed()
}

/// The superblock's versions (bytes 8 to 15) are ones that no release has written yet.
fn wrong_version() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    site.umount(0)?;
    let superblock = site.arena().join("ARENA");
    let sound = fs::read(&superblock).map_err(tried("reading the superblock"))?;
    let mut changed = sound.clone();
    changed[8..16].copy_from_slice(&[999u32.to_le_bytes(); 2].concat());
    fs::write(&superblock, changed).map_err(tried("writing the superblock"))?;
    let point = site.point(0).display().to_string();
    for words in [&["mount", &point][..], &["fsck"], &["arena", "resize", "128M"]] {
        site.ashlar(words)?.failure(1, &["version 999", "reads version 2"])?;
    }
    let status = site.ashlar(&["status"])?.success()?.output;
    ensure!(status.contains("version 999"), "status says: {status}");
    fs::write(&superblock, sound).map_err(tried("writing the superblock"))?;
    site.check()?;
    passed()
}

fn no_space() -> Outcome<Verdict> {
    let directory = tempfile::tempdir().map_err(tried("making a directory"))?;
    let small = directory.path().join("small");
    shell(directory.path(), "mkdir small point && mount -t tmpfs -o size=64M none small")?.success()?;
    let mount = |size: &str| {
        run(ashlar(&["mount", "--size", size, "--arena"]).arg(small.join("arena")).arg(directory.path().join("point")))
    };
    let verdict = mount("1G").and_then(|done| done.failure(1, &["no room", "1.0 GiB", "--size", "--arena"]));
    let tiny = mount("1M").and_then(|done| done.failure(1, &["too small", "16.0 MiB"]));
    let left = small.join("arena").exists();
    ashlar_tests::reference::unmount(&small);
    verdict?;
    tiny?;
    ensure!(!left, "a refused arena leaves a directory behind");
    passed()
}

/// A growth without room takes nothing from the host, and leaves an arena that can change its size as before.
fn no_space_to_grow() -> Outcome<Verdict> {
    let directory = tempfile::tempdir().map_err(tried("making a directory"))?;
    let small = directory.path().join("small");
    // There is room for a first segment of 256 MiB, and none for a second one.
    shell(directory.path(), "mkdir small && mount -t tmpfs -o size=400M none small")?.success()?;
    let grow = || -> Outcome {
        let site = TestArena::within(&small, "16M")?;
        site.mount(0)?;
        let free = || rustix::fs::statvfs(&small).map(|numbers| numbers.f_bavail).map_err(tried("statvfs"));
        let before = free()?;
        site.ashlar(&["arena", "resize", "1T"])?.failure(1, &["no room", "1.0 TiB", "free some"])?;
        // The daemon's log takes a page or two.
        ensure!(free()? + 100 > before, "a growth that failed left {} blocks free of {before}", free()?);
        for size in ["32M", "16M"] {
            site.ashlar(&["arena", "resize", size])?.success()?;
        }
        site.umount(0)?;
        site.check().map(drop)
    };
    let grown = grow();
    ashlar_tests::reference::unmount(&small);
    grown?;
    passed()
}

fn no_arena() -> Outcome<Verdict> {
    let site = TestArena::new(Medium::Disk, "64M")?;
    for words in [&["fsck"][..], &["status"], &["arena", "resize", "64M"]] {
        site.ashlar(words)?.failure(1, &["no arena in", "ashlar mount"])?;
    }
    let long = site.outside().join("x".repeat(120));
    run(ashlar(&["fsck", "--arena"]).arg(long))?.failure(1, &["too long", "--arena"])?;
    passed()
}

fn damaged() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    site.umount(0)?;
    let superblock = site.arena().join("ARENA");
    let mut bytes = fs::read(&superblock).map_err(tried("reading the superblock"))?;
    bytes[24] ^= 1;
    fs::write(&superblock, bytes).map_err(tried("writing the superblock"))?;
    site.ashlar(&["mount", &site.point(0).display().to_string()])?.failure(1, &["superblock", "damaged"])?;
    passed()
}

/// A socket that takes connections and answers none belongs to a daemon that was killed just now. Its arena is checked
/// as one that is not in use.
fn dying() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    site.umount(0)?;
    let socket = socket_of(site.arena());
    let _ = fs::remove_file(&socket);
    let listener = UnixListener::bind(&socket).map_err(tried("listening"))?;
    let text = thread::scope(|threads| {
        threads.spawn(|| listener.accept().map(drop));
        site.ashlar(&["fsck"])?.success()
    })?
    .output;
    ensure!(text.contains("(not in use)"), "beside a dying daemon fsck says:\n{text}");
    passed()
}
