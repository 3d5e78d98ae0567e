//! A machine with several users: whose sessions a mount has, and whose arenas root takes.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use ashlar_tests::command::{Done, ashlar, program, run};
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::mount::{Front, Medium, TestArena};
use ashlar_tests::{Outcome, ensure, tried};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "users/session_is_for_admitted_users_only", run: || when_mountable(admitted) },
    Test { name: "users/read_only_mount_has_no_sessions", run: || when_mountable(read_only) },
    Test { name: "users/arena_that_others_can_change_is_refused", run: || when_mountable(prepared_arena) },
    Test { name: "users/memory_arena_is_in_a_tmpfs_of_root", run: || when_mountable(memory_of_root) },
    Test { name: "users/two_users_get_what_the_host_gives", run: || when_mountable(two_users) },
];

/// The user `nobody`.
const USER: u32 = 65534;
/// The variable by which sudo names its caller.
const SUDO_USER: &str = "SUDO_UID";

/// Mounts with options, as root without sudo or as root behind it.
fn mount(site: &TestArena, number: usize, options: &[&str], sudo_user: Option<u32>) -> Outcome<Done> {
    let point = site.point(number);
    if !point.exists() {
        fs::create_dir(&point).map_err(tried("making a directory"))?;
    }
    let mut command = ashlar(&["mount", "--size", "64M", "--arena"]);
    command.arg(site.arena()).args(options).arg(&point).env_remove(SUDO_USER);
    if let Some(user) = sudo_user {
        command.env(SUDO_USER, user.to_string());
    }
    run(&mut command)?.success()
}

/// Runs a script in a directory under `ashlar run`, as a user, with a report.
fn run_script(directory: &Path, user: u32, script: &str) -> Outcome<Done> {
    let mut command = ashlar(&["run", "--report", "--", "sh", "-c", script]);
    command.env(ashlar_wire::DEFER_VARIABLE, "0").current_dir(directory).uid(user).gid(user);
    run(&mut command)
}

const SCRIPT: &str = "for n in 1 2 3; do echo $n > file$n; done; cat file1 file2 file3";

/// All users could open sessions, and thereby read all data.
fn admitted() -> Outcome<Verdict> {
    // All users reach the socket there.
    let site = TestArena::new(Medium::Disk, "64M")?;
    let check = |user: u32, is_admitted: bool| {
        let directory = site.point(0).join(format!("of{user}"));
        fs::create_dir(&directory).map_err(tried("making a directory"))?;
        chown(&directory, Some(user), Some(user)).map_err(tried("giving a directory away"))?;
        let done = run_script(&directory, user, SCRIPT)?.success()?;
        ensure!(done.output == "1\n2\n3\n", "user {user}: {}", done.describe());
        let refusal = format!("is served by the kernel: it has no sessions for user {user}");
        ensure!(done.errors.contains(&refusal) != is_admitted, "user {user}: {}", done.describe());
        ensure!(done.errors.contains("accelerated 0 %") != is_admitted, "user {user}: {}", done.describe());
        fs::remove_dir_all(&directory).map_err(tried("removing a directory"))
    };
    let says = |done: &Done, words: &str| {
        ensure!(done.output.contains(words), "'{words}' is missing: {}", done.describe());
        let status = site.ashlar(&["status"])?.success()?;
        let line = format!("mount     {}: {words}", site.point(0).display()).replace("sessions  ", "sessions ");
        ensure!(status.output.contains(&line), "'{line}' is missing: {}", status.describe());
        Ok(())
    };
    says(&mount(&site, 0, &[], None)?, "sessions  for root; the kernel serves all others")?;
    check(0, true)?;
    check(USER, false)?;
    site.umount(0)?;
    mount(&site, 0, &[], Some(USER))?;
    check(USER, true)?;
    check(1000, false)?;
    site.umount(0)?;
    mount(&site, 0, &["--sessions", "group=1000"], Some(USER))?;
    check(USER, false)?;
    check(1000, true)?;
    // A SharedFS that was started anew has the same sessions.
    site.kill_daemon()?;
    check(USER, false)?;
    check(1000, true)?;
    site.umount(0)?;
    says(&mount(&site, 0, &["--sessions", "all"], None)?, "sessions  for all users; each of them can read all data")?;
    check(USER, true)?;
    site.umount(0)?;
    let wrong = ["mount", "--sessions", "ann", &site.point(0).display().to_string()];
    site.ashlar(&wrong)?.failure(2, &["--sessions", "user=NAME"])?;
    passed()
}

/// A read-only mount binds programs under `ashlar run` too; another mount of the arena stays writable.
fn read_only() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let done = mount(&site, 1, &["--read-only", "--sessions", "all"], None)?;
    ensure!(done.output.contains("sessions  none, as it is read-only"), "{}", done.describe());
    run_script(&site.point(0), 0, SCRIPT)?.success()?;
    let written = run_script(&site.point(1), 0, "cat file1; echo x > file1")?.failure(2, &["Read-only file system"])?;
    ensure!(written.output == "1\n", "{}", written.describe());
    let said = "is served by the kernel: it is mounted for reading only";
    ensure!(written.errors.contains(said), "{}", written.describe());
    let read = run_script(&site.point(0), 0, "echo 4 > file1; cat file1")?.success()?;
    ensure!(read.output == "4\n" && !read.errors.contains("accelerated 0 %"), "{}", read.describe());
    site.umount(1)?;
    site.umount(0)?;
    passed()
}

/// Links in an arena that another user had prepared led root to its own files.
fn prepared_arena() -> Outcome<Verdict> {
    let site = TestArena::new(Medium::Memory, "64M")?;
    fs::create_dir(site.point(0)).map_err(tried("making a directory"))?;
    let place = site.arena().parent().ok_or("an arena without a directory")?;
    let (victim, shared) = (site.outside().join("victim"), place.join("shared"));
    fs::write(&victim, "precious").map_err(tried("writing"))?;
    fs::create_dir(&shared).map_err(tried("making a directory"))?;
    let theirs = shared.join("theirs");
    fs::create_dir(&theirs).map_err(tried("making a directory"))?;
    for name in ["unfinished", "lock", "daemon.log", "mount.log", "ARENA.new"] {
        symlink(&victim, theirs.join(name)).map_err(tried("making a link"))?;
    }
    chown(&theirs, Some(USER), Some(USER)).map_err(tried("giving a directory away"))?;
    let mode = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(tried("changing a mode"))
    };
    mode(&shared, 0o1777)?;
    let point = site.point(0).display().to_string();
    let refuse = |arena: &Path, words: &[&str]| {
        let verbs: [&[&str]; 3] = [&["mount", "--size", "16M", &point], &["fsck"], &["daemon", "--size", "16M"]];
        for words_of_verb in verbs {
            let done = run(ashlar(words_of_verb).arg("--arena").arg(arena))?;
            if words_of_verb[0] != "fsck" || arena.join("ARENA").exists() {
                done.failure(1, words)?;
            }
        }
        Ok::<_, String>(())
    };
    refuse(&theirs, &["theirs belongs to user 65534", "only root can change"])?;
    refuse(&theirs.join("deeper"), &["theirs belongs to user 65534"])?;
    let own = shared.join("own");
    mount_at(&own, &point)?;
    run(ashlar(&["umount", &point]).env_remove("ASHLAR_ARENA"))?.success()?;
    mode(&shared, 0o777)?;
    refuse(&own, &["shared can be written by other users (mode 777)"])?;
    mode(&shared, 0o755)?;
    chown(&own, Some(USER), None).map_err(tried("giving a directory away"))?;
    refuse(&own, &["own belongs to user 65534"])?;
    let text = fs::read_to_string(&victim).map_err(tried("reading"))?;
    ensure!(text == "precious", "root's file was changed: {text}");
    passed()
}

fn mount_at(arena: &Path, point: &str) -> Outcome<Done> {
    run(ashlar(&["mount", "--size", "16M", "--arena"]).arg(arena).arg(point))?.success()
}

/// `--arena memory` took a directory that another user had made in `/dev/shm`. The test has a `/run` and a `/dev/shm`
/// of its own.
fn memory_of_root() -> Outcome<Verdict> {
    const SCRIPT: &str = "
        mount --make-rprivate /; umount -l /run/ashlar/memory 2>/dev/null || true
        mount -t tmpfs none /run; mount -t tmpfs -o mode=1777 none /dev/shm; mkdir point
        setpriv --reuid=65534 --regid=65534 --clear-groups mkdir -p /dev/shm/ashlar/default
        \"$1\" mount --arena memory --size 16M \"$PWD/point\"; echo kept > point/file
        \"$1\" status --arena memory; \"$1\" status | grep -c '^arena     /run/ashlar/memory/default'
        stat -f -c %T /run/ashlar/memory; stat -c '%u %a' /run/ashlar /run/ashlar/memory /run/ashlar/memory/default
        \"$1\" umount \"$PWD/point\"; \"$1\" mount --arena memory \"$PWD/point\"; cat point/file
        grep -c ' /run/ashlar/memory ' /proc/self/mountinfo; ls -A /dev/shm/ashlar/default
        \"$1\" umount \"$PWD/point\"";
    let site = TestArena::new(Medium::Disk, "64M")?;
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-euc", SCRIPT, "sh"]).arg(program()).env_remove("ASHLAR_ARENA");
    let done = run(command.current_dir(site.outside()))?.success()?;
    for part in [
        "arena     /run/ashlar/memory/default (16.0 MiB, made now)\nmedium    memory",
        "\n1\ntmpfs\n0 755\n0 755\n0 755\n",
        "\nkept\n1\nunmounted",
    ] {
        ensure!(done.output.contains(part), "'{part}' is missing: {}", done.describe());
    }
    passed()
}

/// Root makes a tree, and another user tries every call on all of it, as on the host's file system: through the mount,
/// and under `ashlar run`. On the mount, a stranger could clear set-id bits by `chown(path, -1, -1)`.
fn two_users() -> Outcome<Verdict> {
    const SCRIPT: &str = include_str!("../../../../jobs/two_users.py");
    let site = TestArena::new(Medium::Disk, "64M")?;
    mount(&site, 0, &["--sessions", "all"], None)?;
    let open_to_all =
        |place: &Path| fs::set_permissions(place, fs::Permissions::from_mode(0o755)).map_err(tried("changing a mode"));
    open_to_all(site.outside())?;
    let answers = |front: Front, place: &Path| {
        fs::create_dir(place).map_err(tried("making a directory"))?;
        open_to_all(place)?;
        let part = |name: &str| run(front.command("python3").args(["-c", SCRIPT, name]).arg(place))?.success();
        part("make")?;
        part("attempt").map(|done| done.output)
    };
    let host = answers(Front::Mount, &site.outside().join("reference"))?;
    ensure!(host.lines().count() > 200, "the reference is short: {host}");
    for (front, name) in [(Front::Mount, "mount"), (Front::RunAtOnce, "run")] {
        let ours = answers(front, &site.point(0).join(name))?;
        let differs = host.lines().zip(ours.lines()).find(|(host, ours)| host != ours);
        ensure!(
            differs.is_none() && host.lines().count() == ours.lines().count(),
            "{name}, host and here: {differs:#?}"
        );
    }
    ensure!(site.counter("sessions_fenced")? == 0, "a session was fenced");
    site.check()?;
    site.umount(0)?;
    passed()
}
