//! Programs that LibFS serves in their own processes, beside a mount.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ashlar_libfs::{DescriptorPolicy, LibFs, NewInode, Options, RenameFlags, WriteAt};
use ashlar_tests::command::{ashlar, eventually, program, run};
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::mount::{Front, Medium, TestArena};
use ashlar_tests::{Outcome, ensure, number, tried};
use ashlar_types::{Credentials, Errno, FileKind, InodeId};
use ashlar_wire::{DEFER_VARIABLE, SessionKind};
use rustix::fs::OFlags;

use crate::commands::report::count;

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "run/session_gets_real_descriptors", run: || when_mountable(descriptors) },
    Test { name: "run/descriptors_need_the_users_rights", run: || when_mountable(rights) },
    Test { name: "run/descriptors_are_made_while_sharedfs_is_killed", run: || when_mountable(kills) },
    Test { name: "run/session_may_begin_at_any_call", run: || when_mountable(begins) },
    Test { name: "run/program_takes_over_files_that_the_shell_opened", run: || when_mountable(redirected) },
    Test { name: "run/select_and_epoll_treat_files_as_the_kernel", run: || when_mountable(no_set) },
    Test { name: "run/program_with_another_environment_has_the_library", run: || when_mountable(environments) },
    Test { name: "run/server_becomes_each_of_its_users", run: || when_mountable(users) },
    Test { name: "run/little_address_space_is_left_to_the_program", run: || when_mountable(little_address_space) },
    Test { name: "run/extended_attributes_answer_as_the_kernel", run: || when_mountable(xattrs) },
    Test { name: "run/copies_answer_as_the_kernel", run: || when_mountable(copied) },
    Test { name: "run/calls_are_refused_as_by_the_kernel", run: || when_mountable(refused_alike) },
    Test { name: "run/refused_calls_leave_the_file_to_libfs", run: || when_mountable(refused) },
    Test { name: "run/appending_file_writes_at_requested_offset", run: || when_mountable(appended) },
    Test { name: "run/leases_on_files_of_libfs_are_refused", run: || when_mountable(leases) },
    Test { name: "run/loop_device_takes_an_open_file", run: || when_mountable(loop_device) },
    Test { name: "run/repeated_look_ups_answer_as_the_kernel", run: || when_mountable(at_hand) },
    Test { name: "run/user_sees_what_the_kernel_shows", run: || when_mountable(seen_by_user) },
    Test { name: "run/unlistable_mount_root_blocks_no_program", run: || when_mountable(closed_root) },
    Test { name: "run/short_program_needs_no_session", run: || when_mountable(short) },
    Test { name: "run/library_costs_little_private_memory", run: || when_mountable(little) },
    Test { name: "run/new_session_makes_kernel_forget_names_at_once", run: || when_mountable(newcomer) },
    Test { name: "run/log_grows_and_reports_full_disk", run: || when_mountable(grows) },
];

const ROOT: Credentials = Credentials::checked(0, 0);
/// The user `nobody`.
const USER: u32 = 65534;
const SOON: Duration = Duration::from_secs(30);

fn connect(site: &TestArena) -> Outcome<Arc<LibFs>> {
    let socket = site.arena().join("socket");
    let options = Options {
        socket,
        kind: SessionKind::Process,
        label: "suite".into(),
        patience_ms: 60_000,
        notice: |_| {},
        descriptors: DescriptorPolicy::ANY,
        beside: 0,
        yields_to_kernel: false,
    };
    LibFs::connect(&options).map_err(tried("opening a session"))
}

/// A session, and a directory on the mount beside it.
struct SessionBesideMount {
    session: Arc<LibFs>,
    directory: File,
}

impl SessionBesideMount {
    fn new(site: &TestArena) -> Outcome<Self> {
        let directory = File::open(site.point(0)).map_err(tried("opening the mount's root directory"))?;
        Ok(Self { session: connect(site)?, directory })
    }

    fn make(&self, name: &str, kind: FileKind) -> Outcome<InodeId> {
        let make = NewInode { kind, mode: 0o755, umask: 0, device: 0, target: &[] };
        let made = match kind {
            FileKind::Regular => self.session.make_open(&ROOT, InodeId::ROOT, name.as_bytes(), &make),
            _ => self.session.make(&ROOT, InodeId::ROOT, name.as_bytes(), &make),
        };
        Ok(made.map_err(tried(format!("making {name}")))?.id)
    }

    fn write(&self, id: InodeId, offset: u64, text: &str) -> Outcome {
        let written = self.session.write(&ROOT, id, WriteAt::Offset(offset), text.as_bytes(), false);
        written.map(drop).map_err(tried("writing through the session"))
    }

    fn read(&self, id: InodeId) -> Outcome<String> {
        let mut bytes = [0; 256];
        let count = self.session.read(id, 0, &mut bytes).map_err(tried("reading through the session"))?;
        Ok(String::from_utf8_lossy(&bytes[..count]).into_owned())
    }

    fn ask(&self, id: InodeId, flags: OFlags) -> Result<OwnedFd, Errno> {
        self.session.materialise(self.directory.as_fd(), id, flags.bits())
    }

    fn materialise(&self, id: InodeId, flags: OFlags) -> Outcome<File> {
        self.ask(id, flags).map(File::from).map_err(tried(format!("a descriptor with {flags:?}")))
    }

    /// Writes and reads one file through the session and through a descriptor.
    fn check_both_ways(&self, id: InodeId) -> Outcome {
        self.write(id, 0, "by the session")?;
        let file = self.materialise(id, OFlags::RDWR)?;
        ensure!(read(&file)? == "by the session", "the descriptor reads {}", read(&file)?);
        file.write_all_at(b"by the kernel.", 0).map_err(tried("writing through the descriptor"))?;
        ensure!(self.read(id)? == "by the kernel.", "the session reads {}", self.read(id)?);
        self.write(id, 3, "both")?;
        ensure!(read(&file)? == "by bothkernel.", "the descriptor reads {}", read(&file)?);
        let found = file.metadata().map_err(tried("fstat"))?;
        let root = self.directory.metadata().map_err(tried("fstat of the root directory"))?;
        ensure!((found.dev(), found.ino()) == (root.dev(), id.0), "it's {}:{}", found.dev(), found.ino());
        Ok(())
    }
}

fn read(file: &File) -> Outcome<String> {
    let mut bytes = [0; 256];
    let count = file.read_at(&mut bytes, 0).map_err(tried("reading through the descriptor"))?;
    Ok(String::from_utf8_lossy(&bytes[..count]).into_owned())
}

/// Numbers of calls after which sessions begin: in the middle of everything that the program does.
const BEGINNINGS: [u32; 14] = [0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 100_000];

/// A program opens files through the kernel; when its session begins, they continue at the same offsets.
fn begins() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let script = include_str!("../../../jobs/session_begin.py");
    for after in BEGINNINGS {
        let before = site.counter("sessions_opened")?;
        let mut command = Front::Run.command("python3");
        command.args(["-c", script]).arg(site.point(0)).arg(after.to_string());
        let done = run(command.env(DEFER_VARIABLE, after.to_string()))?.success()?;
        ensure!(done.output.trim() == "the same", "after {after} calls: {}", done.describe());
        let sessions = site.counter("sessions_opened")? - before;
        let expected = u64::from(after < 100_000);
        ensure!(sessions == expected, "after {after} calls: {sessions} sessions, not {expected}");
    }
    site.check()?;
    site.umount(0)?;
    passed()
}

/// Files that a shell opens for its programs show the same as anywhere. Programs write to them as to files that they
/// opened.
fn redirected() -> Outcome<Verdict> {
    let script = include_str!("../../../jobs/redirected.sh");
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let reference = site.outside().join("reference");
    fs::create_dir(&reference).map_err(tried("making a directory"))?;
    let there = contents(Command::new("bash").args(["-c", script]).current_dir(&reference), &reference)?;
    ensure!(there.len() > 20, "the script makes {} files", there.len());
    for after in BEGINNINGS {
        let directory = site.point(0).join(format!("after-{after}"));
        fs::create_dir(&directory).map_err(tried("making a directory"))?;
        let mut command = Front::Run.command("bash");
        command.args(["-c", script]).current_dir(&directory).env(DEFER_VARIABLE, after.to_string());
        let here = contents(&mut command, &directory)?;
        let differs = |name: &&String| here.get(*name) != there.get(*name);
        let different: Vec<_> = there.keys().chain(here.keys()).filter(differs).collect();
        ensure!(different.is_empty(), "after {after} calls, these differ from a local directory's: {different:?}");
    }
    site.check()?;
    site.umount(0)?;
    passed()
}

/// Extended attributes answer and change under `ashlar run` as in the kernel.
fn xattrs() -> Outcome<Verdict> {
    says_the_same(include_str!("../../../jobs/xattrs.py"), 100)
}

/// Copies between descriptors of all kinds answer as in the kernel.
fn copied() -> Outcome<Verdict> {
    says_the_same(include_str!("../../../jobs/copies.py"), 1000)
}

/// The kernel's answer comes for arguments that it reads, requests that it refuses, names for files without one, and
/// descriptors that are passed in structures.
fn refused_alike() -> Outcome<Verdict> {
    says_the_same(include_str!("../../../jobs/calls.py"), 4000)
}

/// If the kernel refuses a call, only the call fails: LibFS serves the file before and after.
fn refused() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let report_path = site.outside().join("report");
    let script = include_str!("../../../jobs/refused.py");
    let mut command = ashlar(&["run", "--report-json", "--report-to", &report_path.display().to_string()]);
    command.args(["python3", "-c", script]).current_dir(site.point(0)).env(DEFER_VARIABLE, "0");
    run(&mut command)?.success()?;
    let report = fs::read_to_string(&report_path).map_err(tried("reading the report"))?;
    let report: serde_json::Value = serde_json::from_str(&report).map_err(tried("reading the report"))?;
    let found = ["accelerated", "delegated"].map(|what| ["pread64", "pwrite64"].map(|call| count(&report, call, what)));
    ensure!(found == [[1000; 2], [0; 2]], "1000 accelerated reads and writes expected, and no others:\n{report:#}");
    site.check()?;
    site.umount(0)?;
    passed()
}

/// `pwritev2` with flags that name the place of the write acts on an appending open file as on a local file system.
fn appended() -> Outcome<Verdict> {
    let script = include_str!("../../../jobs/appended.py");
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    for (name, front) in [("run", Front::RunAtOnce), ("later", Front::Run)] {
        let (here, there) = (site.point(0).join(name), site.outside().join(name));
        for directory in [&here, &there] {
            fs::create_dir(directory).map_err(tried("making a directory"))?;
        }
        let mut command = front.command("python3");
        let done = run(command.args(["-c", script]).arg(&there).current_dir(&here))?.success()?;
        ensure!(done.output == "alike\n".repeat(6), "{}", done.output);
    }
    site.check()?;
    site.umount(0)?;
    passed()
}

/// The kernel can't break a lease if LibFS opens the file, so none is granted.
fn leases() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let expected: String = ["open to read", "open to write", "the kernel's"]
        .iter()
        .map(|what| format!("{what} EAGAIN\n{what} EAGAIN\n{what} True\n"))
        .collect();
    for front in [Front::RunAtOnce, Front::Run] {
        let mut command = front.command("python3");
        let script = include_str!("../../../jobs/leases.py");
        let done = run(command.args(["-c", script]).current_dir(site.point(0)))?.success()?;
        ensure!(done.output == expected, "{}", done.output);
    }
    site.check()?;
    site.umount(0)?;
    passed()
}

/// A device that is set up with a descriptor in a structure shows the file.
fn loop_device() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let image = site.point(0).join("image");
    fs::write(&image, [7; 1 << 20]).map_err(tried("writing"))?;
    // Whether this machine allows loop devices.
    let free = || run(Command::new("losetup").args(["--find", "--show"]).arg(&image));
    let detach = |device: &str| run(Command::new("losetup").args(["--detach", device.trim()]));
    match free() {
        Ok(done) if !done.output.is_empty() => drop(detach(&done.output)?.success()?),
        _ => return Ok(Verdict::Skipped("no loop devices".into())),
    }
    let done = run(Front::RunAtOnce.command("losetup").args(["--find", "--show"]).arg(&image))?.success()?;
    let shown = fs::read(done.output.trim());
    detach(&done.output)?.success()?;
    ensure!(shown.is_ok_and(|bytes| bytes == [7; 1 << 20]), "the device does not show the file");
    site.check()?;
    site.umount(0)?;
    passed()
}

/// A server that becomes each of its users, and threads of different users, get the kernel's answers.
fn users() -> Outcome<Verdict> {
    says_the_same(include_str!("../../../jobs/users.py"), 15)
}

/// With a limited address space, as by `ulimit -v`, a program finds the writes of others, with or without room for a
/// session.
fn little_address_space() -> Outcome<Verdict> {
    // A data segment of 256 MiB.
    let site = TestArena::mounted(Medium::Memory, "512M")?;
    let text: String = (0..400_000).map(|number| format!("{number}\n")).collect();
    fs::write(site.point(0).join("file"), &text).map_err(tried("writing"))?;
    for kilobytes in ["100000", "300000", "1000000", "unlimited"] {
        let script = format!("ulimit -v {kilobytes}; cat file; cp file copy; exec cmp file copy");
        let done =
            run(Front::RunAtOnce.command("bash").args(["-euc", &script]).current_dir(site.point(0)))?.success()?;
        ensure!(done.output == text && done.errors.is_empty(), "with {kilobytes}: {}", done.errors);
    }
    // Too little for the library itself; the dynamic linker would print an error.
    let script = "ulimit -v 6000; for i in 1 2; do /bin/echo $i; done; exec /bin/echo 3";
    for shell in ["dash", "bash"] {
        let done = run(Front::RunAtOnce.command(shell).args(["-c", script]).current_dir(site.point(0)))?.success()?;
        ensure!((&done.output[..], &done.errors[..]) == ("1\n2\n3\n", ""), "{shell}: {}", done.describe());
    }
    site.check()?;
    site.umount(0)?;
    passed()
}

/// Runs a program in each possible way, with no environment and with one that loads another library first. The program
/// prints its environment.
const ENVIRONMENTS: &str = "import ctypes, errno, os, subprocess
program = ['/bin/sh', '-c', 'echo ${LD_PRELOAD#*:} ${LD_PRELOAD%:*} ${ASHLAR_RUN:+set}']
def forked(environment):
    if os.fork() == 0:
        os.execve(program[0], program, environment)
    os.wait()
def spawned(environment):
    os.waitpid(os.posix_spawn(program[0], program, environment), 0)
def lent(environment):
    subprocess.run(program, env=environment, check=True)
def by_descriptor(environment):
    if os.fork() == 0:
        os.execve(os.open(program[0], os.O_RDONLY), program, environment)
    os.wait()
for way in forked, spawned, lent, by_descriptor:
    way({})
    way({'LD_PRELOAD': 'libm.so.6', 'OTHER': 'x' * 5000})
libc = ctypes.CDLL(None, use_errno=True)
def listed(*texts):
    return (ctypes.c_char_p * (len(texts) + 1))(*[text.encode() for text in texts], None)
def refused(environment):
    libc.execve(b'/bin/true', listed('true'), ctypes.c_void_p(environment))
    return errno.errorcode[ctypes.get_errno()]
bad = (ctypes.c_uint64 * 2)(1, 0)
print(refused(-1), refused(8), refused(ctypes.addressof(bad)), flush=True)
# If two variables have the same name, the last one counts.
libc.execve(program[0].encode(), listed(*program), listed('LD_PRELOAD=' + os.environ['LD_PRELOAD'], 'LD_PRELOAD=libm.so.6'))
";

fn environments() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let library = program().with_file_name("libashlar_preload.so").display().to_string();
    for front in [Front::Run, Front::RunAtOnce] {
        let done = run(front.command("python3").args(["-c", ENVIRONMENTS]).current_dir(site.point(0)))?.success()?;
        let said: Vec<_> = done.output.lines().collect();
        let (without, with) = (format!("{library} {library} set"), format!("libm.so.6 {library} set"));
        let mut expected = [&without[..], &with].repeat(4);
        expected.extend(["EFAULT EFAULT EFAULT", &with]);
        ensure!(said == expected, "{front:?}: {}", done.describe());
    }
    site.check()?;
    site.umount(0)?;
    passed()
}

/// `select` and `epoll` treat a file and a directory as the kernel does, before and after the session begins. The
/// descriptors keep working afterwards.
const SETS: &str = "import errno, os, select
def error(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
files = [os.open('file', os.O_CREAT | os.O_RDWR, 0o644), os.open('.', os.O_RDONLY), os.open('file', os.O_PATH)]
events = select.epoll()
for file in files:
    print(error(events.register, file), error(events.modify, file, 1), error(events.unregister, file))
ends = os.pipe()
events.register(ends[0])
print(os.write(files[0], b'text'), os.pread(files[0], 9, 0), events.poll(0))
os.write(ends[1], b'x')
print(events.poll(0) == [(ends[0], select.EPOLLIN)])
";

fn no_set() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    for front in [Front::Run, Front::RunAtOnce] {
        let done = run(front.command("python3").args(["-c", SETS]).current_dir(site.point(0)))?.success()?;
        let [file, path] = ["EPERM", "EBADF"].map(|error| format!("{error} {error} {error}\n"));
        let refused = format!("{file}{file}{path}");
        ensure!(done.output == refused + "4 b'text' []\nTrue\n", "{front:?}: {}", done.output);
    }
    site.check()?;
    site.umount(0)?;
    passed()
}

/// A repeated look-up on warm state answers as the kernel does, whichever process changed the file, and whichever asks.
fn at_hand() -> Outcome<Verdict> {
    let script = include_str!("../../../jobs/repeated_look_ups.py");
    says_the_same_to(Some(USER), script, 10_000)?;
    says_the_same(script, 10_000)
}

/// A script gives more answers than `least`, and the same ones through the mount and under `ashlar run`. It gets a
/// directory beside the mount as its argument.
fn says_the_same(script: &str, least: usize) -> Outcome<Verdict> {
    says_the_same_to(None, script, least)
}

/// Does the same as [`says_the_same`], as another user than the super-user.
fn says_the_same_to(user: Option<u32>, script: &str, least: usize) -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let mut answers = Vec::new();
    for (name, front) in [("kernel", Front::Mount), ("run", Front::RunAtOnce), ("later", Front::Run)] {
        let (here, there) = (site.point(0).join(name), site.outside().join(name));
        for directory in [&here, &there] {
            fs::create_dir(directory).map_err(tried("making a directory"))?;
            // OtherUser users may search it.
            fs::set_permissions(directory, Permissions::from_mode(0o777)).map_err(tried("chmod"))?;
        }
        let mut command = front.command("python3");
        if let Some(user) = user {
            command.uid(user).gid(user);
        }
        let done = run(command.args(["-c", script]).arg(&there).current_dir(&here))?.success()?;
        answers.push(done.output);
    }
    let (kernel, ours) = (&answers[0], &answers[1..]);
    ensure!(kernel.lines().count() > least, "the script has few answers:\n{kernel}");
    for answer in ours {
        let differs = kernel.lines().zip(answer.lines()).find(|(kernel, ours)| kernel != ours);
        ensure!(differs.is_none() && kernel == answer, "the kernel says, and LibFS: {differs:#?}");
    }
    site.check()?;
    site.umount(0)?;
    passed()
}

/// A mount whose root its user may search and not list: LibFS can still hand over the open files of a program.
fn closed_root() -> Outcome<Verdict> {
    let script = "import mmap, os
os.setgroups([]); os.setgid(65534); os.setuid(65534)
file = os.open('public/file', os.O_RDWR | os.O_CREAT, 0o600)
os.write(file, b'before, ')
child = os.fork()
if child == 0:
    os.write(file, b'child, ')
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
os.write(file, b'after')
with mmap.mmap(os.open('public/file', os.O_RDWR), 0) as shared:
    shared[:6] = b'BEFORE'
assert os.pread(file, 100, 0) == b'BEFORE, child, after', os.pread(file, 100, 0)
try:
    os.listdir('.')
    raise SystemExit('the root is listed')
except PermissionError:
    print('done')
";
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let (root, public) = (site.point(0), site.point(0).join("public"));
    for (directory, mode) in [(&public, 0o777), (&root, 0o711)] {
        fs::create_dir_all(directory).map_err(tried("making a directory"))?;
        fs::set_permissions(directory, Permissions::from_mode(mode)).map_err(tried("chmod"))?;
    }
    for front in [Front::Mount, Front::RunAtOnce, Front::Run] {
        let done = run(front.command("python3").args(["-c", script]).current_dir(&root))?.success()?;
        ensure!(done.output == "done\n" && done.errors.is_empty(), "{}", done.describe());
        fs::remove_file(public.join("file")).map_err(tried("removing"))?;
    }
    site.check()?;
    site.umount(0)?;
    passed()
}

/// Two users on one mount: an ordinary user sees and may do what the kernel says, in a tree of the super-user's.
fn seen_by_user() -> Outcome<Verdict> {
    let tree = "set -e; umask 0; mkdir -m 700 private; mkdir -m 711 search; mkdir -m 1733 drop; mkdir -m 744 list
mkdir -m 1777 tmp; mkdir -m 755 open
for file in private/file search/file drop/roots list/file tmp/roots secret written both read long; do
    echo \"root's $file\" > $file; chmod 666 $file
    python3 -c 'import os, sys; os.setxattr(sys.argv[1], \"user.a\", b\"v\")' $file
done
truncate -s 40000 long; ln private/file open/shown
chmod 600 secret; chmod 622 written long; chmod 644 read search/file";
    let work = "exec 5<>private/file; top=$PWD; cd private; exec python3 -c \"$1\" \"$top\"";
    let script = include_str!("../../../jobs/seen_by_user.py");
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let mut answers = Vec::new();
    for (name, front) in [("kernel", Front::Mount), ("run", Front::RunAtOnce), ("later", Front::Run)] {
        let directory = site.point(0).join(name);
        fs::create_dir(&directory).map_err(tried("making a directory"))?;
        // A program that made the tree under `ashlar run` leaves other state behind than one on the mount.
        run(front.command("bash").args(["-c", tree]).current_dir(&directory))?.success()?;
        let done = run(front.command("bash").args(["-c", work, "work", script]).current_dir(&directory))?.success()?;
        ensure!(done.output.ends_with("done\n"), "{}", done.describe());
        answers.push(done.output);
    }
    for answer in &answers[1..] {
        let differs = answers[0].lines().zip(answer.lines()).find(|(kernel, ours)| kernel != ours);
        ensure!(differs.is_none() && answers[0] == *answer, "the kernel says, and LibFS: {differs:#?}");
    }
    ensure!(site.counter("sessions_fenced")? == 0, "a session was fenced");
    site.check()?;
    site.umount(0)?;
    passed()
}

/// The files that a command makes in a directory, by name.
fn contents(command: &mut Command, directory: &Path) -> Outcome<BTreeMap<String, Vec<u8>>> {
    let done = run(command)?.success()?;
    let mut found = BTreeMap::from([("its output".into(), done.output.into_bytes())]);
    for entry in fs::read_dir(directory).map_err(tried("listing"))?.flatten() {
        let bytes = fs::read(entry.path()).map_err(tried(format!("reading {}", entry.path().display())))?;
        found.insert(entry.file_name().to_string_lossy().into_owned(), bytes);
    }
    Ok(found)
}

fn short() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let shell = |script: &str| {
        let mut command = Front::Run.command("sh");
        // The default number of calls, whatever earlier runs of programs with these names did.
        command.args(["-euc", script]).current_dir(site.point(0)).env(DEFER_VARIABLE, "64");
        run(&mut command)?.success()
    };
    let before = site.counter("sessions_opened")?;
    let script = "echo one > a; cp a b; cat b; mv b c; ls; test -f c; wc -l < c; rm c";
    let done = shell(script)?;
    ensure!(done.output.split_whitespace().eq(["one", "a", "c", "1"]), "the commands say {}", done.describe());
    ensure!(site.counter("sessions_opened")? == before, "short commands have opened sessions");
    let script = "i=0; while [ $i -lt 100 ]; do echo $i > f$i; cat f$i > g; i=$((i+1)); done; cat g";
    let done = shell(script)?;
    ensure!(
        done.output.trim() == "99" && site.counter("sessions_opened")? == before,
        "a shell that has others do the work has a session"
    );
    let script = "i=0; while [ $i -lt 100 ]; do echo $i > f$i; i=$((i+1)); done; cat f99";
    let done = shell(script)?;
    ensure!(
        done.output.trim() == "99" && site.counter("sessions_opened")? == before + 1,
        "a long script has no session of its own"
    );
    site.umount(0)?;
    passed()
}

/// Private pages of the library in each program, in KiB. With a table for each kind of checksum they were three times
/// as many.
const OWN_KIB: u64 = 128;

/// Limits the cost of a program's start: the dynamic linker copies the pages that it fills addresses into. A crate with
/// tables shows here.
fn little() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let mut own = 0;
    let mut is_library = false;
    for line in run(Front::Run.command("cat").arg("/proc/self/smaps"))?.success()?.output.lines() {
        // A mapping's line begins with its addresses.
        if line.split('-').next().is_some_and(|start| u64::from_str_radix(start, 16).is_ok()) {
            is_library = line.ends_with("libashlar_preload.so");
        } else if let Some(kib) = line.strip_prefix("Anonymous:").filter(|_| is_library) {
            own += kib.trim().trim_end_matches(" kB").parse::<u64>().map_err(tried("reading smaps"))?;
        }
    }
    ensure!((1..=OWN_KIB).contains(&own), "each program copies {own} KiB of the library");
    site.umount(0)?;
    passed()
}

/// How often a new session begins beside a sole mount.
const NEWCOMERS: usize = 4;
/// Names that the kernel keeps then, and uses all the time.
const KEPT: usize = 150;
/// Shorter than the time after which names expire by themselves.
const AT_ONCE: Duration = Duration::from_millis(700);

/// The kernel of a sole mount keeps names. A new session waits for no timer, and its changes of names show at once. A
/// process keeps its working directory.
fn newcomer() -> Outcome<Verdict> {
    let mut longest = Duration::ZERO;
    for _ in 0..NEWCOMERS {
        let site = TestArena::mounted(Medium::Memory, "64M")?;
        let directory = site.point(0).join("directory");
        fs::create_dir(&directory).map_err(tried("making a directory"))?;
        let names: Vec<_> = (0..KEPT).map(|number| directory.join(format!("name-{number}"))).collect();
        names.iter().try_for_each(|name| fs::write(name, "x")).map_err(tried("writing"))?;
        let mut sleeper = Command::new("sleep").arg("1000").current_dir(&directory).spawn().map_err(tried("sleep"))?;
        let stopped = AtomicBool::new(false);
        let outcome = std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stopped.load(Ordering::Relaxed) {
                        // A thread renames some of them meanwhile.
                        names.iter().for_each(|name| drop(fs::symlink_metadata(name)));
                    }
                });
            }
            let outcome = renamed(&site, &names);
            stopped.store(true, Ordering::Relaxed);
            outcome
        });
        let working = fs::read_link(format!("/proc/{}/cwd", sleeper.id())).map_err(tried("reading cwd"));
        sleeper.kill().and_then(|()| sleeper.wait()).map_err(tried("ending sleep"))?;
        longest = longest.max(outcome?);
        ensure!(working.as_deref() == Ok(&directory), "the working directory is {working:?}");
        site.umount(0)?;
    }
    ensure!(longest < AT_ONCE, "a session took {longest:?} to begin");
    Ok(Verdict::Passed(format!("sessions began within {:.1} ms", longest.as_secs_f64() * 1000.0)))
}

/// Opens a session and renames all files by it; each new name must show at once. Returns the time that the opening
/// took.
fn renamed(site: &TestArena, names: &[PathBuf]) -> Outcome<Duration> {
    let begin = Instant::now();
    let session = connect(site)?;
    let took = begin.elapsed();
    let directory = session.lookup(&ROOT, InodeId::ROOT, b"directory").map_err(tried("looking up"))?.id;
    for (number, name) in names.iter().enumerate() {
        let (old, new) = (format!("name-{number}"), format!("new-{number}"));
        let (from, to) = ((directory, old.as_bytes()), (directory, new.as_bytes()));
        session.rename(&ROOT, from, to, RenameFlags::default()).map_err(tried("renaming"))?;
        ensure!(fs::symlink_metadata(name).is_err(), "{old} is still there");
        fs::symlink_metadata(name.with_file_name(&new)).map_err(tried(&new))?;
    }
    session.close_session();
    Ok(took)
}

/// An arena lies on a file system that becomes full: a program gets the error, and continues when there is room again.
fn grows() -> Outcome<Verdict> {
    let disk = tempfile::tempdir().map_err(tried("making a directory"))?;
    run(Command::new("mount").args(["-t", "tmpfs", "-o", "size=112M", "none"]).arg(disk.path()))?.success()?;
    let site = TestArena::within(disk.path(), "64M")?.without_copy();
    site.mount(0)?;
    let filler = disk.path().join("filler");
    let mut command = Front::RunAtOnce.command("python3");
    command.args(["-c", include_str!("../../../jobs/full_host.py")]).arg(site.point(0)).arg(&filler);
    let done = run(&mut command)?.success()?;
    ensure!(done.output.trim() == "No space left on device", "it says {}", done.describe());
    site.umount(0)?;
    run(Command::new("umount").arg(disk.path()))?.success()?;
    passed()
}

fn descriptors() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let beside = SessionBesideMount::new(&site)?;
    let file = beside.make("file", FileKind::Regular)?;
    beside.check_both_ways(file)?;
    flags_hold(&beside, file)?;
    nameless(&beside)?;
    directories(&site, &beside)?;
    refusals(&site, &beside, file)?;
    let kept = beside.materialise(file, OFlags::RDWR)?;
    site.kill_daemon()?;
    beside.check_both_ways(file)?;
    ensure!(read(&kept)? == "by bothkernel.", "a descriptor from before the kill reads {}", read(&kept)?);
    nameless(&beside)?;
    beside.session.close(file);
    beside.session.close_session();
    drop((beside, kept));
    site.check()?;
    site.umount(0)?;
    passed()
}

fn flags_hold(beside: &SessionBesideMount, id: InodeId) -> Outcome {
    let only_read = beside.materialise(id, OFlags::RDONLY | OFlags::NOATIME | OFlags::LARGEFILE)?;
    let refused = only_read.write_at(b"x", 0).err().and_then(|error| error.raw_os_error());
    ensure!(refused == Some(Errno::EBADF.0), "a write to a descriptor for reading gives {refused:?}");
    let mut append = beside.materialise(id, OFlags::WRONLY | OFlags::APPEND)?;
    append.write_all(b" Appended.").map_err(tried("appending"))?;
    let text = beside.read(id)?;
    ensure!(text.ends_with(". Appended."), "after an append it reads {text}");
    let has = rustix::fs::fcntl_getfl(&append).map_err(tried("F_GETFL"))?;
    ensure!(has.contains(OFlags::WRONLY | OFlags::APPEND), "its flags are {has:?}");
    let has = rustix::io::fcntl_getfd(&append).map_err(tried("F_GETFD"))?;
    ensure!(has.contains(rustix::io::FdFlags::CLOEXEC), "it stays open on exec");
    let change = ashlar_libfs::AttributeChange { size: Some(0), ..Default::default() };
    beside.session.set_attributes(&ROOT, id, &change).map(drop).map_err(tried("truncating"))
}

/// Files without names live as long as a session or a descriptor has them open.
fn nameless(beside: &SessionBesideMount) -> Outcome {
    let session = &beside.session;
    let removed = beside.make("removed", FileKind::Regular)?;
    session.unlink(&ROOT, InodeId::ROOT, b"removed").map_err(tried("unlink"))?;
    let make = NewInode { kind: FileKind::Regular, mode: 0o600, umask: 0, device: 0, target: &[] };
    let unnamed = session.make_unnamed(&ROOT, InodeId::ROOT, &make).map_err(tried("O_TMPFILE"))?.id;
    for id in [removed, unnamed] {
        beside.check_both_ways(id)?;
        let file = beside.materialise(id, OFlags::RDONLY)?;
        session.close(id);
        ensure!(read(&file)? == "by bothkernel.", "it is gone while a descriptor has it open");
        ensure!(file.metadata().map_err(tried("fstat"))?.nlink() == 0, "it has a name");
        drop(file);
        // The kernel reports a last close only afterwards.
        eventually("it is gone", SOON, || beside.ask(id, OFlags::RDONLY).err() == Some(Errno::ESTALE))?;
    }
    Ok(())
}

fn directories(site: &TestArena, beside: &SessionBesideMount) -> Outcome {
    let outer = beside.make("outer", FileKind::Directory)?;
    let make = NewInode { kind: FileKind::Directory, mode: 0o700, umask: 0, device: 0, target: &[] };
    let inner = beside.session.make(&ROOT, outer, b"inner", &make).map_err(tried("making a directory"))?.id;
    for (id, path) in [(inner, "outer/inner"), (outer, "outer"), (InodeId::ROOT, "")] {
        let directory = beside.materialise(id, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let path = site.point(0).join(path).components().collect::<std::path::PathBuf>();
        let link = format!("/proc/self/fd/{}", directory.as_raw_fd());
        let link = fs::read_link(link).map_err(tried("reading the descriptor's link"))?;
        ensure!(link == path, "{} is {}", path.display(), link.display());
        rustix::process::fchdir(&directory).map_err(tried("fchdir"))?;
        let here = std::env::current_dir();
        std::env::set_current_dir("/").map_err(tried("leaving the directory"))?;
        let here = here.map_err(tried("getcwd"))?;
        ensure!(here == path, "{} is {} for getcwd", path.display(), here.display());
    }
    let inside = beside.materialise(outer, OFlags::RDONLY)?;
    let names = fs::read_dir(format!("/proc/self/fd/{}", inside.as_raw_fd())).map_err(tried("listing"))?;
    let names: Vec<_> = names.flatten().map(|entry| entry.file_name()).collect();
    ensure!(names == ["inner"], "it lists {names:?}");
    let refused = beside.ask(outer, OFlags::RDWR).err();
    ensure!(refused == Some(Errno::EISDIR), "a directory opened for writing gives {refused:?}");
    Ok(())
}

fn refusals(site: &TestArena, beside: &SessionBesideMount, file: InodeId) -> Outcome {
    let session = &beside.session;
    let elsewhere = File::open(site.outside()).map_err(tried("opening a directory outside"))?;
    let no_directory = File::open(site.point(0).join("file")).map_err(tried("opening the file"))?;
    let path_only = |path: &Path| {
        rustix::fs::open(path, OFlags::PATH, rustix::fs::Mode::empty()).map_err(tried("opening with O_PATH"))
    };
    let [path_elsewhere, path_of_file] = [path_only(site.outside())?, path_only(&site.point(0).join("file"))?];
    for (what, given) in [
        ("a directory elsewhere", elsewhere.as_fd()),
        ("a file", no_directory.as_fd()),
        ("the path of one elsewhere", path_elsewhere.as_fd()),
        ("the path of a file", path_of_file.as_fd()),
    ] {
        let refused = session.materialise(given, file, OFlags::RDONLY.bits()).err();
        ensure!(refused == Some(Errno::EINVAL), "{what} for the mount gives {refused:?}");
    }
    let shown = session.materialise(path_only(&site.point(0))?.as_fd(), file, OFlags::RDONLY.bits());
    ensure!(shown.is_ok(), "the path of the mount itself gives {shown:?}");
    for flags in [OFlags::TRUNC, OFlags::CREATE, OFlags::RWMODE] {
        let refused = beside.ask(file, flags).err();
        ensure!(refused == Some(Errno::EINVAL), "{flags:?} gives {refused:?}");
    }
    let pipe = beside.make("pipe", FileKind::Fifo)?;
    let refused = beside.ask(pipe, OFlags::RDONLY).err();
    ensure!(refused == Some(Errno::EINVAL), "a pipe gives {refused:?}");
    let alone = beside.materialise(pipe, OFlags::PATH | OFlags::NOFOLLOW)?;
    let alone = rustix::fs::fstat(&alone).map_err(tried("looking at a pipe's path"))?;
    ensure!(alone.st_ino == pipe.0, "the path of a pipe shows inode {}", alone.st_ino);
    for flags in [OFlags::RDONLY, OFlags::PATH] {
        let refused = beside.ask(InodeId(1 << 40), flags).err();
        ensure!(refused == Some(Errno::ESTALE), "an inode that never was gives {refused:?}");
    }
    let refused = beside.ask(file, OFlags::RDONLY | OFlags::DIRECTORY).err();
    ensure!(refused == Some(Errno::ENOTDIR), "a file as a directory gives {refused:?}");
    Ok(())
}

/// `ashlar-session` as an ordinary user.
struct OtherUser {
    child: Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl OtherUser {
    fn start(site: &TestArena) -> Outcome<Self> {
        // Neither the arena nor this program's directory is open to all users.
        let arena = site.arena();
        fs::set_permissions(arena, Permissions::from_mode(0o711)).map_err(tried("opening the arena's directory"))?;
        let program = std::env::current_exe().map_err(tried("finding this program"))?.with_file_name("ashlar-session");
        let copy = site.outside().join("ashlar-session");
        fs::copy(program, &copy).map_err(tried("copying a program"))?;
        let mut child = Command::new(copy)
            .arg(arena.join("socket"))
            .arg(site.point(0))
            .uid(USER)
            .gid(USER)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(tried("starting a session of an ordinary user"))?;
        let output = child.stdout.take().ok_or("it has no output")?;
        Ok(Self { child, answers: BufReader::new(output) })
    }

    fn ask(&mut self, line: &str) -> Outcome<String> {
        let input = self.child.stdin.as_mut().ok_or("it has no input")?;
        writeln!(input, "{line}").map_err(tried("asking the ordinary user's session"))?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer).map_err(tried("its answer"))?;
        Ok(answer.trim_end().to_owned())
    }

    fn materialise(&mut self, inode: &str, flags: OFlags) -> Outcome<String> {
        self.ask(&format!("materialise {inode} {}", flags.bits()))
    }
}

impl Drop for OtherUser {
    fn drop(&mut self) {
        // The process ends with its input, or by the kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn rights() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Disk, "64M")?;
    let chmod = |name: &str, mode| {
        let path = site.point(0).join(name);
        fs::set_permissions(path, Permissions::from_mode(mode)).map_err(tried(format!("chmod of {name}")))
    };
    for (name, mode) in [("readable", 0o644), ("writable", 0o666), ("private", 0o600)] {
        fs::write(site.point(0).join(name), name).map_err(tried(format!("writing {name}")))?;
        chmod(name, mode)?;
    }
    let hidden = site.point(0).join("hidden");
    fs::create_dir(&hidden).map_err(tried("making a directory"))?;
    fs::write(hidden.join("inside"), "inside").map_err(tried("writing a file"))?;
    chmod("hidden", 0o700)?;
    let inside = fs::metadata(hidden.join("inside")).map_err(tried("looking at a file"))?.ino().to_string();
    let mut other = OtherUser::start(&site)?;
    let mut inodes = Vec::new();
    for name in ["readable", "writable", "private"] {
        inodes.push(other.ask(&format!("open {name}"))?);
    }
    let [readable, writable, private] = &inodes[..] else { return Err(format!("{inodes:?}")) };
    for narrowed in [false, true] {
        for (inode, flags, expected) in [
            (readable, OFlags::RDONLY, "readable"),
            (readable, OFlags::WRONLY, "EACCES"),
            (readable, OFlags::RDWR, "EACCES"),
            (readable, OFlags::RDONLY | OFlags::NOATIME, "EPERM"),
            (writable, OFlags::RDWR, "writable"),
            (private, OFlags::RDONLY, "EACCES"),
            (private, OFlags::WRONLY, "EACCES"),
            // An `O_PATH` descriptor needs no right to the file, but the path to it must be searchable.
            (private, OFlags::PATH, ""),
            (&inside, OFlags::PATH, "EACCES"),
        ] {
            let answer = other.materialise(inode, flags)?;
            ensure!(answer == expected, "{expected} expected, {flags:?} gives {answer} (narrowed: {narrowed})");
        }
        // Files that it had open stay usable; a file that it opens afterwards gets no such right.
        chmod("readable", 0o600)?;
        chmod("writable", 0o600)?;
    }
    drop(other);
    let mut late = OtherUser::start(&site)?;
    let inode = late.ask("open readable")?;
    ensure!(&inode == readable, "it is {inode} now");
    let answer = late.materialise(&inode, OFlags::RDONLY)?;
    ensure!(answer == "EACCES", "a file opened after its rights narrowed gives {answer}");
    drop(late);
    site.check()?;
    passed()
}

/// Kills SharedFS at any point of its part in an open, for which the mount's process may need an answer of SharedFS.
/// When SharedFS itself waited for the mount, one kill in twenty or so left it half dead, and all sessions waiting.
fn kills() -> Outcome<Verdict> {
    const FILES: usize = 64;
    let kills = number("ASHLAR_KILL_HELPER", 10);
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let beside = SessionBesideMount::new(&site)?;
    let files: Vec<InodeId> =
        (0..FILES).map(|n| beside.make(&format!("file{n}"), FileKind::Regular)).collect::<Outcome<_>>()?;
    let (is_done, made) = (AtomicBool::new(false), AtomicU64::new(0));
    let open_and_write = |half: &[InodeId]| -> Outcome {
        while !is_done.load(Ordering::Relaxed) {
            for &id in half {
                // A write of the session's makes the mount's process ask for its state again.
                let turn = made.fetch_add(1, Ordering::Relaxed);
                beside.write(id, 0, &format!("{turn:20}"))?;
                let text = read(&beside.materialise(id, OFlags::RDONLY)?)?;
                ensure!(text == format!("{turn:20}"), "{text} is read instead of {turn}");
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let (left, right) = files.split_at(FILES / 2);
        let workers = [left, right].map(|half| scope.spawn(move || open_and_write(half)));
        let killed = (0..kills).try_for_each(|_| {
            let before = made.load(Ordering::Relaxed);
            site.kill_daemon()?;
            eventually("descriptors are made again", SOON, || made.load(Ordering::Relaxed) > before + 100)
        });
        is_done.store(true, Ordering::Relaxed);
        for worker in workers {
            worker.join().map_err(|_| "a worker has panicked".to_owned())??;
        }
        killed
    })?;
    beside.session.close_session();
    let sum = made.into_inner();
    drop(beside);
    site.check()?;
    site.umount(0)?;
    Ok(Verdict::Passed(format!("{sum} descriptors, {kills} kills")))
}
