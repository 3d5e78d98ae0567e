//! A process may continue to use its open files after rights to them are narrowed.
//!
//! That holds for each way to narrow them, and wherever SharedFS is killed.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use ashlar_tests::command::wait;
use ashlar_tests::harness::{Test, Verdict, passed};
use ashlar_tests::mount::{Front, Medium, TestArena, obstacle};
use ashlar_tests::{Outcome, ensure, tried};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "run/narrowed_open_files_are_written_after_a_kill", run: || narrowed(Front::RunAtOnce) },
    Test { name: "run/narrowed_open_files_of_a_later_session_are_written", run: || narrowed(Front::Run) },
    Test { name: "kill/narrowed_open_files_of_the_kernel_are_written", run: || narrowed(Front::Mount) },
    Test { name: "run/leaving_a_group_keeps_open_files", run: group_left },
];

const USER: u32 = 2000;
const GROUP: u32 = 4242;
/// Ways to narrow the rights, by the names of the files on which they are used.
const FILES: [&str; 6] = ["chmod", "chown", "chgrp", "list", "inner/closed", "unlinked"];
const PATIENCE: Duration = Duration::from_secs(60);

/// A program that has files open.
struct Opener {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Opener {
    fn start(front: Front, directory: &Path, keeps: &str, files: &[&str]) -> Outcome<Self> {
        let mut command = front.command("python3");
        command.args(["-c", include_str!("../../../../jobs/rights.py"), keeps]).args(files).current_dir(directory);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.map_err(tried("starting python3"))?;
        let (to, from) = (child.stdin.take(), child.stdout.take());
        let mut opener = Self { child, to: to.ok_or("no input")?, from: BufReader::new(from.ok_or("no output")?) };
        opener.expect("ready")?;
        Ok(opener)
    }

    fn expect(&mut self, expected: &str) -> Outcome {
        let mut line = String::new();
        self.from.read_line(&mut line).map_err(tried("reading an answer"))?;
        ensure!(line.trim_end() == expected, "the program says '{}', not '{expected}'", line.trim_end());
        Ok(())
    }

    fn write(&mut self, how: &str, text: &str) -> Outcome {
        writeln!(self.to, "{how} {text}").map_err(tried("asking"))?;
        self.expect("written").map_err(|error| format!("{how} {text}: {error}"))
    }

    fn finish(self) -> Outcome {
        let Self { mut child, to, from } = self;
        drop((to, from));
        let status = wait(&mut child, PATIENCE)?;
        ensure!(status.success(), "the program ended with {status}");
        Ok(())
    }
}

fn set_mode(path: &Path, mode: u32) -> Outcome {
    fs::set_permissions(path, Permissions::from_mode(mode)).map_err(tried("chmod"))
}

/// Gives a file an access list that grants the user these permissions.
fn set_list(path: &Path, permissions: u16) -> Outcome {
    let none = u32::MAX;
    let entries: [(u16, u16, u32); 5] =
        [(1, 6, none), (2, permissions, USER), (4, 0, none), (0x10, 6, none), (0x20, 0, none)];
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        list.extend(tag.to_le_bytes().iter().chain(&permissions.to_le_bytes()).chain(&id.to_le_bytes()));
    }
    rustix::fs::setxattr(path, "system.posix_acl_access", &list, rustix::fs::XattrFlags::empty())
        .map_err(tried("setting a list"))
}

/// Makes the files; the user may write all of them.
fn make_files(root: &Path) -> Outcome {
    let at = |name: &str| root.join(name);
    fs::create_dir(at("inner")).map_err(tried("making a directory"))?;
    for file in FILES {
        fs::write(at(file), "before").map_err(tried("writing"))?;
        set_mode(&at(file), 0o666)?;
    }
    set_mode(&at("chown"), 0o600)?;
    chown(at("chown"), Some(USER), Some(USER)).map_err(tried("chown"))?;
    set_mode(&at("chgrp"), 0o660)?;
    chown(at("chgrp"), None, Some(GROUP)).map_err(tried("chgrp"))?;
    set_mode(&at("list"), 0o600)?;
    set_list(&at("list"), 6)
}

/// Takes the rights away, each in its way.
fn narrow_rights(root: &Path) -> Outcome {
    let at = |name: &str| root.join(name);
    set_mode(&at("chmod"), 0o600)?;
    chown(at("chown"), Some(1), Some(1)).map_err(tried("chown"))?;
    chown(at("chgrp"), None, Some(1)).map_err(tried("chgrp"))?;
    set_list(&at("list"), 4)?;
    set_mode(&at("inner"), 0o700)?;
    set_mode(&at("unlinked"), 0o600)?;
    fs::remove_file(at("unlinked")).map_err(tried("removing"))
}

fn expect_content(root: &Path, text: &str) -> Outcome {
    for file in FILES.iter().filter(|file| **file != "unlinked") {
        let found = fs::read_to_string(root.join(file)).map_err(tried("reading"))?;
        ensure!(found.starts_with(text), "{file} holds '{found}', not '{text}'");
    }
    Ok(())
}

fn narrowed(front: Front) -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    for (medium, is_committed) in [(Medium::Memory, false), (Medium::Memory, true), (Medium::Disk, true)] {
        let failure = |error: String| format!("{medium:?}, committed {is_committed}: {error}");
        check_narrowed(front, medium, is_committed).map_err(failure)?;
    }
    passed()
}

fn check_narrowed(front: Front, medium: Medium, is_committed: bool) -> Outcome {
    let site = TestArena::mounted(medium, "64M")?;
    let root = site.point(0);
    make_files(&root)?;
    let mut opener = Opener::start(front, &root, "nothing", &FILES)?;
    site.let_daemon_run()?;
    narrow_rights(&root)?;
    if is_committed {
        // A check commits everything.
        site.check()?;
    }
    site.kill_daemon_at_once()?;
    opener.write("write", "first.")?;
    expect_content(&root, "first.")?;
    site.kill_daemon()?;
    opener.write("write", "again.")?;
    opener.write("child", "child.")?;
    expect_content(&root, "child.")?;
    opener.write("program", "other.")?;
    opener.write("write", "last..")?;
    expect_content(&root, "last..")?;
    opener.finish()?;
    expect_content(&root, "last..")?;
    ensure!(site.counter("sessions_fenced")? == 0, "a session was fenced");
    site.check()?;
    site.umount(0)?;
    Ok(())
}

fn group_left() -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    for front in [Front::RunAtOnce, Front::Mount] {
        let site = TestArena::mounted(Medium::Memory, "64M")?;
        let root = site.point(0);
        make_files(&root)?;
        let mut opener = Opener::start(front, &root, "keeps", &["chgrp"])?;
        opener.write("write", "member")?;
        opener.write("without_group", "none..")?;
        site.kill_daemon()?;
        opener.write("write", "killed")?;
        opener.finish()?;
        let found = fs::read_to_string(root.join("chgrp")).map_err(tried("reading"))?;
        ensure!(found == "killed", "{front:?}: the file holds '{found}'");
        ensure!(site.counter("sessions_fenced")? == 0, "a session was fenced");
        site.check()?;
        site.umount(0)?;
    }
    passed()
}
