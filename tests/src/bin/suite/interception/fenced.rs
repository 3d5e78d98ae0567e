//! A fenced session does nothing any more, and says so at each call.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::process::Stdio;
use std::time::Duration;

use ashlar_tests::command::{eventually, run, wait};
use ashlar_tests::harness::{Test, Verdict, passed};
use ashlar_tests::mount::{Front, Medium, TestArena, obstacle};
use ashlar_tests::{Outcome, ensure, tried};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "run/fenced_session_fails_each_call", run: || fenced(Front::RunAtOnce) },
    Test { name: "life/fenced_mount_fails_each_call", run: || fenced(Front::Mount) },
    Test { name: "run/chown_without_owner_is_allowed", run: owner_unchanged },
];

const PATIENCE: Duration = Duration::from_secs(60);
/// The offset of a log's tail in its file.
const TAIL_AT: u64 = 192;

/// The sessions of a kind, by number and whether they are fenced.
fn sessions(site: &TestArena, kind: &str) -> Outcome<Vec<(u64, bool)>> {
    let status = site.status()?;
    let sessions = status["daemon"]["sessions"].as_array().cloned().unwrap_or_default();
    let of_kind = sessions.iter().filter(|session| session["kind"] == kind);
    Ok(of_kind.filter_map(|session| Some((session["session"].as_u64()?, !session["fenced"].is_null()))).collect())
}

/// The program has everything that it uses on warm state. Then SharedFS finds a violation in its session's log.
fn fenced(front: Front) -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    for medium in [Medium::Memory, Medium::Disk] {
        let site = TestArena::mounted(medium, "64M")?;
        let mut command = front.command("python3");
        command.args(["-c", include_str!("../../../../jobs/fenced.py")]).arg(site.point(0));
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.map_err(tried("starting python3"))?;
        let (to, from) = (child.stdin.take(), child.stdout.take());
        let (mut to, mut from) = (to.ok_or("no input")?, BufReader::new(from.ok_or("no output")?));
        let mut line = String::new();
        from.read_line(&mut line).map_err(tried("reading an answer"))?;
        ensure!(line == "ready\n", "the program says '{line}'");
        let kind = if front == Front::Mount { "Mount" } else { "Process" };
        let (number, _) = *sessions(&site, kind)?.first().ok_or("no session")?;
        let log = site.arena().join(format!("sessions/{number}.log"));
        let log = File::options().write(true).open(log).map_err(tried("opening the log"))?;
        log.write_all_at(&[0xff; 8], TAIL_AT).map_err(tried("forging the log"))?;
        // SharedFS reads the log of a session when another session wants its lease, or when the session asks for the
        // free space.
        let is_fenced = || {
            let _ = fs::write(site.point(0).join("file"), "theirs");
            let _ = rustix::fs::statvfs(site.point(0));
            sessions(&site, kind).is_ok_and(|all| all.contains(&(number, true)))
        };
        eventually("the session is fenced", PATIENCE, is_fenced)?;
        writeln!(to).map_err(tried("asking"))?;
        let mut answers = String::new();
        from.read_to_string(&mut answers).map_err(tried("reading answers"))?;
        // The kernel still has the mount's answers of a moment ago.
        let is_kernels = |line: &str| front == Front::Mount && line.starts_with("look, ");
        let is_right = |line: &&str| line.ends_with(": Input/output error") || is_kernels(line);
        let wrong: Vec<_> = answers.lines().filter(|line| !is_right(line)).collect();
        ensure!(
            wrong.is_empty() && answers.lines().count() > 30,
            "{medium:?}: the program says {wrong:?} of {answers}"
        );
        wait(&mut child, PATIENCE)?;
        site.clear_mounts();
    }
    passed()
}

/// `chown(path, -1, -1)` of files of others, as on ext4, and operations after it.
fn owner_unchanged() -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let script = "import os, sys
cap = bytes.fromhex('0100000200040000000000000000000000000000')
def become():
    os.setgroups([]); os.setgid(2000); os.setuid(2000)
def attempt(what):
    try: what(); return 'done'
    except OSError as error: return error.strerror
modes = (0o644, 0o666, 0o4755, 0o2755, 0o2644, 0o6755)
owners = ((0, 0), (2000, 4242), (2000, 2000))
for mode in modes:
    for uid, gid in owners:
        name = '%o-%d-%d' % (mode, uid, gid)
        for copy in (name, name + '-same'):
            open(copy, 'w').close(); os.chown(copy, uid, gid); os.chmod(copy, mode)
        open(name + '-able', 'w').close(); os.setxattr(name + '-able', 'security.capability', cap); os.chmod(name + '-able', 0o666)
os.mkdir('directory'); os.symlink('x', 'link'); os.mkdir('mine'); os.chown('mine', 2000, 2000)
before = {name: os.lstat(name).st_ctime_ns for name in os.listdir('.')}
child = os.fork()
if child == 0:
    become()
    for _ in range(100): os.stat('.')
    for name in sorted(before):
        if name.endswith('-same'): said = attempt(lambda: os.chown(name, 2000, -1))
        elif name.endswith('-able'): said = attempt(lambda: open(name, 'a').write('x'))
        else: said = attempt(lambda: os.chown(name, -1, -1, follow_symlinks=False))
        found = os.lstat(name)
        able = attempt(lambda: os.getxattr(name, 'security.capability', follow_symlinks=False))
        print(name, said, oct(found.st_mode), found.st_ctime_ns != before[name], able)
    for times in ('both', 'one'):
        now = (1 << 30) - 1
        print(times, attempt(lambda: os.utime('666-0-0', None if times == 'both' else (1, 1))))
    made = os.open('mine/after', os.O_CREAT | os.O_RDWR); os.write(made, b'y'); os.fsync(made); os.close(made)
    sys.stdout.flush(); os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(os.listdir('mine'))";
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    let mut answers = Vec::new();
    for (place, front) in
        [(site.outside().join("reference"), Front::Mount), (site.point(0).join("run"), Front::RunAtOnce)]
    {
        fs::create_dir(&place).map_err(tried("making a directory"))?;
        run(std::process::Command::new("chmod").arg("755").arg(&place).arg(site.outside()))?.success()?;
        answers.push(run(front.command("python3").args(["-c", script]).current_dir(&place))?.success()?.output);
    }
    let differs = answers[0].lines().zip(answers[1].lines()).find(|(kernel, ours)| kernel != ours);
    ensure!(differs.is_none() && answers[0] == answers[1], "the kernel says, and LibFS: {differs:#?}");
    // SharedFS validates all of it before it ends the program's session.
    eventually("the session has ended", PATIENCE, || sessions(&site, "Process").is_ok_and(|all| all.is_empty()))?;
    ensure!(site.counter("sessions_fenced")? == 0, "a session was fenced");
    ensure!(fs::read(site.point(0).join("run/mine/after")).is_ok_and(|found| found == b"y"), "what was synced is lost");
    site.check()?;
    site.umount(0)?;
    passed()
}
