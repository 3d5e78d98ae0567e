//! Tests the front end through the kernel: real mounts of a file system in memory.
//!
//! The requests come from the device; `ringed.rs` runs the same tests by rings. If the caller may not mount, the tests
//! are skipped, with a line that says so.

pub(crate) mod fake;

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ashlar_fuse::{FuseMount, MountError, MountOptions, is_ashlar_mount, unmount};
use ashlar_types::RING_SWITCH;
use fake::{Fake, Shared};
use rustix::fs::{AtFlags, CWD, FallocateFlags, FlockOperation, Mode, OFlags, RenameFlags, XattrFlags};

/// Names the order for [`child_half`], which this test program runs as a child process.
const ORDER: &str = "ASHLAR_FUSE_TEST_ORDER";
const PLACE: &str = "ASHLAR_FUSE_TEST_PLACE";

pub(crate) struct Mounted {
    path: PathBuf,
    serving: Option<JoinHandle<Result<(), MountError>>>,
    _directory: tempfile::TempDir,
}

impl Mounted {
    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub(crate) fn open(&self, name: &str) -> File {
        File::open(self.at(name)).unwrap()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        unmount(&self.path, true).unwrap();
        self.serving.take().unwrap().join().unwrap().unwrap();
    }
}

/// Whether the tests run as a part of `ringed.rs`.
fn is_ringed() -> bool {
    module_path!().starts_with("ringed")
}

pub(crate) fn may_mount() -> bool {
    let may = rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists();
    if !may {
        eprintln!("skipped: mounting takes root and /dev/fuse");
    } else if is_ringed() && !Path::new(RING_SWITCH).exists() {
        eprintln!("skipped: this kernel has no FUSE over io_uring");
        return false;
    }
    may
}

fn options() -> MountOptions {
    MountOptions { without_rings: !is_ringed(), ..MountOptions::default() }
}

/// Mounts; `ringed.rs` turns the kernel's switch for rings on meanwhile.
fn mount_at(session: Arc<Fake>, path: &Path, options: MountOptions) -> Result<FuseMount<Fake>, MountError> {
    // The lock is shared with the other tests, and with their children.
    let switching = File::create(std::env::temp_dir().join("ashlar-fuse-ringed")).unwrap();
    rustix::fs::flock(&switching, FlockOperation::LockExclusive).unwrap();
    let before = is_ringed().then(|| fs::read(RING_SWITCH).unwrap());
    if is_ringed() {
        fs::write(RING_SWITCH, "Y").unwrap();
    }
    let mount = FuseMount::new(session, path, options);
    before.into_iter().for_each(|before| fs::write(RING_SWITCH, before).unwrap());
    if let Ok(mount) = &mount {
        assert_eq!(mount.has_rings(), is_ringed());
    }
    mount
}

pub(crate) fn mount(session: Arc<Fake>) -> Mounted {
    let directory = tempfile::tempdir().unwrap();
    let mount = mount_at(session, directory.path(), options()).unwrap();
    let path = mount.mount_point().to_owned();
    let serving = Some(std::thread::spawn(move || mount.run()));
    Mounted { path, serving, _directory: directory }
}

/// Makes a mount with an empty file `f`.
pub(crate) fn mount_with_file() -> (Arc<Shared>, Mounted) {
    let shared = Shared::new();
    let mounted = mount(shared.session());
    fs::write(mounted.at("f"), "").unwrap();
    (shared, mounted)
}

pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(10), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn child(order: &str, place: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let name = if is_ringed() { "mounted::child_half" } else { "child_half" };
    command.args(["--exact", name, "--nocapture"]).env(ORDER, order).env(PLACE, place);
    command.stdin(Stdio::piped()).stdout(Stdio::null());
    command
}

/// Carries out the tests' orders in another process. Run on its own, it does nothing.
#[test]
fn child_half() {
    let (Ok(order), Some(place)) = (std::env::var(ORDER), std::env::var_os(PLACE)) else { return };
    let place = PathBuf::from(place);
    match order.as_str() {
        "mount" => mount_at(Shared::new().session(), &place, options()).unwrap().run().unwrap(),
        "lock" => {
            let file = OpenOptions::new().read(true).write(true).open(place).unwrap();
            rustix::fs::fcntl_lock(&file, FlockOperation::LockExclusive).unwrap();
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        }
        "try-lock" => {
            let file = OpenOptions::new().read(true).write(true).open(place).unwrap();
            let code = i32::from(rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).is_err());
            std::process::exit(code);
        }
        order => panic!("unknown order {order}"),
    }
}

#[test]
fn names_and_attributes_round_trip() {
    if !may_mount() {
        return;
    }
    let mounted = mount(Shared::new().session());
    let at = |name: &str| mounted.at(name);
    assert!(!at("a").exists());
    fs::create_dir(at("d")).unwrap();
    fs::write(at("a"), "hello").unwrap();
    fs::rename(at("a"), at("d/b")).unwrap();
    assert!(!at("a").exists());
    fs::hard_link(at("d/b"), at("c")).unwrap();
    assert_eq!(fs::metadata(at("c")).unwrap().nlink(), 2);
    symlink("d/b", at("s")).unwrap();
    assert_eq!(fs::read_link(at("s")).unwrap(), Path::new("d/b"));
    assert_eq!(fs::read_to_string(at("s")).unwrap(), "hello");
    let error = rustix::fs::renameat_with(CWD, at("c"), CWD, at("s"), RenameFlags::NOREPLACE).unwrap_err();
    assert_eq!(error, rustix::io::Errno::EXIST);
    rustix::fs::renameat_with(CWD, at("c"), CWD, at("s"), RenameFlags::EXCHANGE).unwrap();
    assert!(at("c").is_symlink() && !at("s").is_symlink());
    rustix::fs::renameat_with(CWD, at("c"), CWD, at("moved"), RenameFlags::WHITEOUT).unwrap();
    let left = fs::symlink_metadata(at("c")).unwrap();
    assert!(at("moved").is_symlink() && left.file_type().is_char_device());
    assert_eq!((left.rdev(), left.mode() & 0o7777), (0, 0));
    let both = RenameFlags::WHITEOUT | RenameFlags::NOREPLACE;
    assert_eq!(rustix::fs::renameat_with(CWD, at("moved"), CWD, at("c"), both), Err(rustix::io::Errno::EXIST));
    rustix::fs::renameat_with(CWD, at("moved"), CWD, at("c"), RenameFlags::empty()).unwrap();
    let kind = rustix::fs::FileType::CharacterDevice;
    rustix::fs::mknodat(CWD, at("null"), kind, Mode::from(0o666), rustix::fs::makedev(1, 3)).unwrap();
    assert!(fs::metadata(at("null")).unwrap().file_type().is_char_device());
    File::create(at("null")).unwrap().write_all(b"gone").unwrap();
    assert_eq!(fs::metadata(at("null")).unwrap().rdev(), rustix::fs::makedev(1, 3));

    fs::set_permissions(at("s"), fs::Permissions::from_mode(0o640)).unwrap();
    std::os::unix::fs::chown(at("s"), Some(12), Some(34)).unwrap();
    let metadata = fs::metadata(at("s")).unwrap();
    assert_eq!((metadata.mode(), metadata.uid(), metadata.gid()), (0o100_640, 12, 34));
    let old = std::time::UNIX_EPOCH - Duration::from_millis(1500);
    File::open(at("s")).unwrap().set_modified(old).unwrap();
    let metadata = fs::metadata(at("s")).unwrap();
    assert_eq!((metadata.mtime(), metadata.mtime_nsec()), (-2, 500_000_000));
    assert!(metadata.created().unwrap() > std::time::UNIX_EPOCH);
    assert!(fs::remove_dir(at("d")).is_err());
    fs::remove_file(at("d/b")).unwrap();
    fs::remove_dir(at("d")).unwrap();
    let space = rustix::fs::statvfs(&mounted.path).unwrap();
    assert_eq!((space.f_blocks, space.f_bfree, space.f_files, space.f_namemax), (1000, 600, 500, 255));
}

#[test]
fn directories_of_any_size_are_listed_whole() {
    if !may_mount() {
        return;
    }
    let mounted = mount(Shared::new().session());
    let mut names: Vec<String> = (0..3000).map(|number| format!("entry-{number:0>40}")).collect();
    for name in &names {
        File::create(mounted.at(name)).unwrap();
    }
    names.sort();
    for _ in 0..2 {
        let mut listed = Vec::new();
        for entry in fs::read_dir(&mounted.path).unwrap() {
            let entry = entry.unwrap();
            assert!(entry.metadata().unwrap().is_file());
            listed.push(entry.file_name().into_string().unwrap());
        }
        listed.sort();
        assert_eq!(listed, names);
    }
    let kept = fs::read_dir(&mounted.path).unwrap();
    fs::remove_file(mounted.at(&names[0])).unwrap();
    assert_eq!(fs::read_dir(&mounted.path).unwrap().count(), 2999, "a listing that was kept is not used again");
    drop(kept);
}

#[test]
fn file_contents_round_trip() {
    if !may_mount() {
        return;
    }
    let shared = Shared::new();
    let mounted = mount(shared.session());
    let big: Vec<u8> = (0..3_500_000_u32).map(|number| (number % 251) as u8).collect();
    fs::write(mounted.at("big"), &big).unwrap();
    assert_eq!(fs::read(mounted.at("big")).unwrap(), big);
    let before = shared.reads();
    assert_eq!(fs::read(mounted.at("big")).unwrap(), big);
    assert_eq!(shared.reads(), before, "pages are kept from one open to the next");

    let file = OpenOptions::new().read(true).write(true).open(mounted.at("big")).unwrap();
    file.set_len(100_000).unwrap();
    file.write_all_at(&[0; 50_000], 20_000).unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 4096).unwrap();
    assert_eq!(rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(0)).unwrap(), 4096 + u64::from(4096 % 251 == 0));
    let mut start = [1; 10];
    file.read_exact_at(&mut start, 10).unwrap();
    assert_eq!(start, [0; 10]);
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 200_000).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 200_000);
    let copy = File::create(mounted.at("copy")).unwrap();
    assert_eq!(rustix::fs::copy_file_range(&file, Some(&mut 90_000), &copy, None, 5000).unwrap(), 5000);
    assert_eq!(fs::read(mounted.at("copy")).unwrap(), big[90_000..95_000]);
    file.sync_all().unwrap();
    assert_eq!(shared.syncs(), 1);

    fs::remove_file(mounted.at("big")).unwrap();
    assert_eq!(file.metadata().unwrap().nlink(), 0, "an open file lives on without a name");
    file.read_exact_at(&mut start, 99_000).unwrap();
    drop((file, copy));
    wait_until("handles are closed", || shared.open_count() == 0);

    let unnamed = rustix::fs::open(&mounted.path, OFlags::TMPFILE | OFlags::RDWR, Mode::from(0o600)).unwrap();
    rustix::io::write(&unnamed, b"named late").unwrap();
    let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&unnamed));
    rustix::fs::linkat(CWD, link, CWD, mounted.at("late"), AtFlags::SYMLINK_FOLLOW).unwrap();
    assert_eq!(fs::read(mounted.at("late")).unwrap(), b"named late");
}

#[test]
fn direct_and_cached_handles_agree() {
    if !may_mount() {
        return;
    }
    let shared = Shared::new();
    let mounted = mount(shared.session());
    fs::write(mounted.at("f"), vec![1; 8192]).unwrap();
    let cached = File::open(mounted.at("f")).unwrap();
    let direct = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(mounted.at("f")).unwrap();
    let mut bytes = [0; 4096];
    cached.read_exact_at(&mut bytes, 0).unwrap();
    direct.write_all_at(&[2; 4096], 0).unwrap();
    cached.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, [2; 4096]);
    let syncs = shared.syncs();
    let flags = libc::O_DIRECT | libc::O_DSYNC;
    let durable = OpenOptions::new().write(true).custom_flags(flags).open(mounted.at("f")).unwrap();
    durable.write_all_at(&[3; 4096], 4096).unwrap();
    assert!(shared.syncs() > syncs, "O_DSYNC holds without the kernel's pages");
    direct.read_exact_at(&mut bytes, 4096).unwrap();
    assert_eq!(bytes, [3; 4096]);
}

#[test]
fn new_session_expires_names_but_keeps_directories() {
    if !may_mount() {
        return;
    }
    let shared = Shared::new();
    let mounted = mount(shared.session());
    fs::create_dir(mounted.at("d")).unwrap();
    fs::write(mounted.at("a"), "first").unwrap();
    fs::write(mounted.at("b"), "second").unwrap();
    let read = |name: &str| fs::read_to_string(mounted.at(name)).unwrap();
    let mut sleeper = std::process::Command::new("sleep").arg("1000").current_dir(mounted.at("d")).spawn().unwrap();
    assert_eq!((read("a"), read("b")), ("first".into(), "second".into()));
    shared.exchange_unseen("a", "b");
    assert_eq!(read("a"), "first", "the kernel keeps the name");
    shared.bring_company();
    assert_eq!((read("a"), read("b")), ("second".into(), "first".into()));
    let working = fs::read_link(format!("/proc/{}/cwd", sleeper.id())).unwrap();
    assert_eq!(working, fs::canonicalize(mounted.at("d")).unwrap());
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
}

/// A kernel keeps a name for a second. Here the old name's second is over, and that of the other name is not.
#[test]
fn exchanged_names_are_forgotten_in_both_places() {
    if !may_mount() {
        return;
    }
    let shared = Shared::with_ttl_ms(1000);
    let mounted = mount(shared.session());
    fs::write(mounted.at("old"), "old").unwrap();
    let begin = Instant::now();
    let wait_until_ms = |ms| std::thread::sleep(Duration::from_millis(ms).saturating_sub(begin.elapsed()));
    wait_until_ms(700);
    fs::write(mounted.at("new"), "new").unwrap();
    fs::write(mounted.at("other"), "other").unwrap();
    let root = fs::File::open(mounted.at("")).unwrap();
    rustix::fs::renameat_with(&root, "old", &root, "new", rustix::fs::RenameFlags::EXCHANGE).unwrap();
    wait_until_ms(1100);
    shared.exchange_unseen("old", "other");
    shared.bring_company();
    assert_eq!(fs::read_to_string(mounted.at("old")).unwrap(), "other");
}

#[test]
fn two_mounts_never_show_stale_data() {
    if !may_mount() {
        return;
    }
    let shared = Shared::new();
    let (one, two) = (mount(shared.session()), mount(shared.session()));
    assert!(!two.at("f").exists(), "this absence is cached");
    fs::write(one.at("f"), "first").unwrap();
    assert_eq!(fs::read(two.at("f")).unwrap(), b"first");
    let open = File::open(two.at("f")).unwrap();
    for round in 0..200 {
        let text = format!("round {round:04}");
        let (writer, reader) = if round % 2 == 0 { (&one, &two) } else { (&two, &one) };
        fs::write(writer.at("f"), &text).unwrap();
        assert_eq!(fs::read_to_string(reader.at("f")).unwrap(), text);
        let mut bytes = vec![0; text.len()];
        open.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, text.as_bytes());
        fs::set_permissions(writer.at("f"), fs::Permissions::from_mode(0o600 | round)).unwrap();
        assert_eq!(fs::metadata(reader.at("f")).unwrap().mode() & 0o7777, 0o600 | round);
        assert_eq!(fs::read_dir(&reader.path).unwrap().count(), 1);
        fs::rename(writer.at("f"), writer.at("g")).unwrap();
        assert!(!reader.at("f").exists() && reader.at("g").exists());
        fs::rename(writer.at("g"), writer.at("f")).unwrap();
    }
    fs::remove_file(one.at("f")).unwrap();
    assert!(!two.at("f").exists());
    assert_eq!(open.metadata().unwrap().nlink(), 0);
}

/// It also guards against a deadlock. The pages of a cached write are locked until it is answered. If an answer waited
/// until the other mount has dropped its pages, each mount's write would wait for the other's.
#[test]
fn appends_of_two_mounts_never_overwrite() {
    if !may_mount() {
        return;
    }
    let shared = Shared::new();
    let (one, two) = (mount(shared.session()), mount(shared.session()));
    let appender = |mounted: &Mounted, read: bool| {
        OpenOptions::new().read(read).append(true).create(true).open(mounted.at("log")).unwrap()
    };
    std::thread::scope(|scope| {
        for (index, mounted) in [&one, &two, &one, &two].into_iter().enumerate() {
            let mut file = appender(mounted, index < 2);
            scope.spawn(move || {
                for line in 0..250 {
                    file.write_all(format!("{index} {line:05}\n").as_bytes()).unwrap();
                }
            });
        }
    });
    for mounted in [&one, &two] {
        wait_until("pages in the wrong place are forgotten", || {
            let text = fs::read_to_string(mounted.at("log")).unwrap();
            let mut lines: Vec<&str> = text.lines().collect();
            lines.sort_unstable();
            lines.dedup();
            lines.len() == 1000 && lines.iter().all(|line| line.len() == 7)
        });
    }
}

#[test]
fn flock_waits_and_can_be_interrupted() {
    if !may_mount() {
        return;
    }
    let (shared, mounted) = mount_with_file();
    let open = || mounted.open("f");
    let (holder, other) = (open(), open());
    rustix::fs::flock(&holder, FlockOperation::LockExclusive).unwrap();
    let busy = rustix::fs::flock(&other, FlockOperation::NonBlockingLockShared).unwrap_err();
    assert_eq!(busy, rustix::io::Errno::WOULDBLOCK);
    // flock(1) arms a timer whose signal interrupts the waiting call.
    let mut command = Command::new("flock");
    let status = command.args(["-w", "0.2"]).arg(mounted.at("f")).arg("true").status().unwrap();
    assert_eq!(status.code(), Some(1));
    std::thread::scope(|scope| {
        // More threads than serve.
        for _ in 0..20 {
            scope.spawn(|| rustix::fs::flock(open(), FlockOperation::LockShared).unwrap());
        }
        assert_eq!(fs::metadata(mounted.at("f")).unwrap().len(), 0, "others are served meanwhile");
        rustix::fs::flock(&holder, FlockOperation::Unlock).unwrap();
    });
    rustix::fs::flock(&other, FlockOperation::LockExclusive).unwrap();
    drop(other);
    wait_until("a lock goes with its handle", || shared.lock_count() == 0);
}

#[test]
fn record_locks_end_with_their_process() {
    if !may_mount() {
        return;
    }
    let shared = Shared::new();
    let mounted = mount(shared.session());
    let path = mounted.at("f");
    fs::write(&path, "").unwrap();
    let mut holder = child("lock", &path).spawn().unwrap();
    wait_until("the child has its lock", || shared.lock_count() == 1);
    assert_eq!(child("try-lock", &path).status().unwrap().code(), Some(1));
    let mut waiter = child("lock", &path).spawn().unwrap();
    holder.kill().unwrap();
    holder.wait().unwrap();
    wait_until("the lock moves on", || shared.lock_count() == 1);
    assert_eq!(child("try-lock", &path).status().unwrap().code(), Some(1));
    drop(waiter.stdin.take());
    assert!(waiter.wait().unwrap().success());
    assert_eq!(child("try-lock", &path).status().unwrap().code(), Some(0));
}

#[test]
fn set_id_bits_are_cleared_when_ordinary_user_writes() {
    if !may_mount() {
        return;
    }
    let mounted = mount(Shared::new().session());
    let path = mounted.at("f");
    let set = || {
        fs::write(&path, "x").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o6777)).unwrap();
    };
    // Only the mode is requested: with the size, the kernel would ask for all attributes anew.
    let mode = || {
        let stat = rustix::fs::statx(CWD, &path, AtFlags::empty(), rustix::fs::StatxFlags::MODE).unwrap();
        u32::from(stat.stx_mode) & 0o7777
    };
    set();
    assert_eq!(mode(), 0o6777);
    let shell = |script: &str| {
        let script = script.replace('F', path.to_str().unwrap());
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "1000", "--regid", "1000", "--clear-groups", "sh", "-c", &script]);
        assert!(command.status().unwrap().success(), "{script}");
    };
    // The mount point's own directory belongs to root alone.
    let directory = mounted.path.parent().unwrap();
    assert_eq!(fs::metadata(directory).unwrap().mode() & 0o7 & 0o1, 1, "{directory:?} must let others through");
    for script in ["printf y >>F", "printf y >F", ": >F", "printf y 1<>F", "truncate -s 5 F", "fallocate -l 9000 F"] {
        set();
        shell(script);
        assert_eq!(mode(), 0o777, "{script}");
    }
    set();
    std::os::unix::fs::chown(&path, Some(5), None).unwrap();
    assert_eq!(mode(), 0o777);
}

#[test]
fn extended_attributes_round_trip() {
    if !may_mount() {
        return;
    }
    let mounted = mount(Shared::new().session());
    let path = mounted.at("f");
    fs::write(&path, "").unwrap();
    rustix::fs::setxattr(&path, "user.one", b"value", XattrFlags::CREATE).unwrap();
    let again = rustix::fs::setxattr(&path, "user.one", b"", XattrFlags::CREATE).unwrap_err();
    assert_eq!(again, rustix::io::Errno::EXIST);
    let mut bytes = [0; 64];
    assert_eq!(rustix::fs::getxattr(&path, "user.one", &mut bytes).unwrap(), 5);
    assert_eq!(&bytes[..5], b"value");
    assert_eq!(rustix::fs::getxattr_query(&path, "user.one").unwrap(), 5);
    assert_eq!(rustix::fs::getxattr(&path, "user.one", &mut [0; 2]).unwrap_err(), rustix::io::Errno::RANGE);
    assert_eq!(rustix::fs::listxattr(&path, &mut bytes).unwrap(), 9);
    assert_eq!(&bytes[..9], b"user.one\0");
    rustix::fs::removexattr(&path, "user.one").unwrap();
    assert_eq!(rustix::fs::getxattr(&path, "user.one", &mut bytes).unwrap_err(), rustix::io::Errno::NODATA);
}

#[test]
fn programs_run_from_the_mount() {
    if !may_mount() {
        return;
    }
    let mounted = mount(Shared::new().session());
    fs::copy("/bin/echo", mounted.at("echo")).unwrap();
    fs::write(mounted.at("script"), format!("#!/bin/sh\n{} \"$@\"\n", mounted.at("echo").display())).unwrap();
    fs::set_permissions(mounted.at("script"), fs::Permissions::from_mode(0o755)).unwrap();
    let output = Command::new(mounted.at("script")).arg("works").output().unwrap();
    assert_eq!(output.stdout, b"works\n");
}

/// A running program is not truncated, not even by an open that could only read afterwards. The kernel checks for this
/// only once the file is open.
#[test]
fn running_program_is_not_truncated() {
    if !may_mount() {
        return;
    }
    let mounted = mount(Shared::new().session());
    let program = mounted.at("cat");
    fs::copy("/bin/cat", &program).unwrap();
    let length = fs::metadata(&program).unwrap().len();
    let mut running = Command::new(&program).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    for access in [OFlags::RDONLY, OFlags::WRONLY, OFlags::RDWR] {
        let opened = rustix::fs::open(&program, access | OFlags::TRUNC, Mode::empty());
        assert_eq!(opened.unwrap_err(), rustix::io::Errno::TXTBSY);
        assert_eq!(fs::metadata(&program).unwrap().len(), length);
    }
    drop(running.stdin.take());
    assert!(running.wait().unwrap().success());
    drop(rustix::fs::open(&program, OFlags::RDONLY | OFlags::TRUNC, Mode::empty()).unwrap());
    assert_eq!(fs::metadata(&program).unwrap().len(), 0);
}

#[test]
fn held_up_calls_do_not_delay_others() {
    if !may_mount() {
        return;
    }
    let (shared, mounted) = mount_with_file();
    serve_beside_syncs(&shared, &mounted, 8, || {});
}

/// Checks that a write is served while `count` threads are held up in `fsync`. Each thread begins with `prepare`.
pub(crate) fn serve_beside_syncs(shared: &Shared, mounted: &Mounted, count: u64, prepare: fn()) {
    shared.block_syncs(true);
    std::thread::scope(|scope| {
        for name in 0..count {
            let file = File::create(mounted.at(&name.to_string())).unwrap();
            scope.spawn(move || {
                prepare();
                file.sync_all().unwrap();
            });
        }
        wait_until("all syncs are under way", || shared.syncs() == count);
        scope.spawn(|| {
            prepare();
            fs::write(mounted.at("free"), "served").unwrap();
            shared.block_syncs(false);
        });
    });
    assert_eq!(fs::read(mounted.at("free")).unwrap(), b"served");
}

#[test]
fn read_only_mount_refuses_changes() {
    if !may_mount() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let options = MountOptions { read_only: true, threads: 1, ..options() };
    let mount = mount_at(Shared::new().session(), directory.path(), options).unwrap();
    let path = mount.mount_point().to_owned();
    let serving = std::thread::spawn(move || mount.run());
    let error = fs::write(path.join("f"), "").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EROFS));
    unmount(&path, false).unwrap();
    serving.join().unwrap().unwrap();
}

#[test]
fn mounting_twice_and_unmounting_in_use_are_refused() {
    if !may_mount() {
        return;
    }
    let mounted = mount(Shared::new().session());
    assert!(is_ashlar_mount(&mounted.path));
    let again = mount_at(Shared::new().session(), &mounted.path, options());
    assert!(matches!(again, Err(MountError::AlreadyMounted { .. })), "{again:?}");
    let mut open = File::create(mounted.at("f")).unwrap();
    let busy = unmount(&mounted.path, false);
    assert!(matches!(busy, Err(MountError::Busy { .. })), "{busy:?}");
    open.write_all(b"still there").unwrap();
    open.seek(SeekFrom::Start(0)).unwrap();
}

#[test]
fn unserved_mount_is_unmounted_when_dropped() {
    if !may_mount() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mount = mount_at(Shared::new().session(), directory.path(), options()).unwrap();
    assert!(is_ashlar_mount(directory.path()));
    drop(mount);
    assert!(!is_ashlar_mount(directory.path()));
}

#[test]
fn mount_of_dead_process_is_replaced() {
    if !may_mount() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut process = child("mount", directory.path()).spawn().unwrap();
    wait_until("the child has mounted", || is_ashlar_mount(directory.path()));
    process.kill().unwrap();
    process.wait().unwrap();
    assert!(is_ashlar_mount(directory.path()));
    let mount = mount_at(Shared::new().session(), directory.path(), options()).unwrap();
    let path = mount.mount_point().to_owned();
    let serving = std::thread::spawn(move || mount.run());
    fs::write(path.join("f"), "new").unwrap();
    unmount(&path, false).unwrap();
    serving.join().unwrap().unwrap();
}
