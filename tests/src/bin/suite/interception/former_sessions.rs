//! Sessions of a parent, or of a former user, leave nothing in a process.

use ashlar_tests::command::run;
use ashlar_tests::harness::{Test, Verdict, passed};
use ashlar_tests::mount::{Front, Medium, TestArena, obstacle};
use ashlar_tests::{Outcome, ensure};

/// The tests of this group.
pub const TESTS: &[Test] =
    &[Test { name: "run/process_keeps_nothing_of_former_sessions", run: process_keeps_nothing_of_former_sessions }];

/// The answers: the files of sessions that are mapped and open, and what works after it.
const ANSWERS: &str = "the process has a session: True True
fork: ([], [])
direct fork: ([], [])
direct clone: ([], [])
fork past the library: []
fork and use: 2
inner: ([], [])
fork of a fork: None
another user: ([], [], 1)
change of user: (True, ([], []), True, 2000)
change of user beside a thread: (True, ([], []), True, 2000)
change of the root: (([], []), True)
taking turns: True
the process goes on: 3
";

fn process_keeps_nothing_of_former_sessions() -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    for medium in [Medium::Memory, Medium::Disk] {
        let site = TestArena::mounted(medium, "64M")?;
        let mut command = Front::RunAtOnce.command("python3");
        command.args(["-c", include_str!("../../../../jobs/former_sessions.py")]).current_dir(site.point(0));
        let done = run(&mut command)?.success()?;
        ensure!(done.output == ANSWERS, "{medium:?}: the process says:\n{}{}", done.output, done.errors);
        site.check()?;
        ensure!(site.counter("sessions_fenced")? == 0, "a session was fenced");
        site.umount(0)?;
    }
    passed()
}
