//! `fsync` and `sync` make other processes' updates persistent.
//!
//! The power is cut as soon as they have returned.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use ashlar_tests::command::signal;
use ashlar_tests::harness::{Test, Verdict};
use ashlar_tests::mount::{Front, TestArena, obstacle};
use ashlar_tests::reference::Reference;
use ashlar_tests::{Outcome, ensure, tried};
use rustix::process::Signal;
use serde_json::{Value, json};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "power/fsync_covers_writes_of_another_process", run: || when_mountable(written) },
    Test { name: "power/fsync_covers_names_of_another_process", run: || when_mountable(named) },
    Test { name: "power/fsync_covers_writes_of_another_user", run: || when_mountable(by_users) },
    Test { name: "power/fsync_covers_a_file_passed_by_descriptor", run: || when_mountable(passed_on) },
    Test { name: "power/sync_covers_updates_of_all_sessions", run: || when_mountable(all) },
    Test { name: "power/sync_waits_for_no_stopped_process", run: || when_mountable(stopped) },
];

const NOBODY: u32 = 65534;
const MOUNTS: usize = 2;
/// The limit for a sync, even if a process is stopped.
const SOON: Duration = Duration::from_secs(20);
const OLD: &str = "old";
const NEW: &str = "new";

fn when_mountable(test: fn(&mut CuttableArena) -> Outcome<Verdict>) -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let disk = Reference::new(512)?;
    if let Some(why) = disk.power_cut_obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let site = TestArena::within(&disk.path(), "128M")?;
    let mut power = CuttableArena { site, disk, cuts: 0 };
    power.mount()?;
    test(&mut power)
}

/// An arena on a disk whose power can be cut.
struct CuttableArena {
    // This field comes first, so that the arena's processes end before the disk goes.
    site: TestArena,
    disk: Reference,
    cuts: usize,
}

impl CuttableArena {
    fn mount(&self) -> Outcome {
        (0..MOUNTS).try_for_each(|number| self.site.mount(number).map(drop))
    }

    /// A directory that every user may write to, with a file `file` in it that holds `old`, both of them persistent.
    fn prepare(&self, case: &str) -> Outcome {
        let directory = self.site.point(0).join(case);
        fs::create_dir(&directory).map_err(tried("making a directory"))?;
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o777)).map_err(tried("chmod"))?;
        let file = directory.join("file");
        fs::write(&file, OLD).map_err(tried("writing"))?;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).map_err(tried("chmod"))?;
        for path in [file, directory, self.site.point(0)] {
            fs::File::open(path).and_then(|file| file.sync_all()).map_err(tried("syncing"))?;
        }
        Ok(())
    }

    /// Cuts the power, ends the processes, restores the power, and mounts again.
    fn cut(&mut self, hands: impl IntoIterator<Item = OrderedProcess>) -> Outcome {
        self.disk.cut_power(&[])?;
        // A process whose mount is stopped ends only after the mount's process.
        self.site.kill_leftovers()?;
        hands.into_iter().for_each(drop);
        self.site.clear_mounts();
        self.disk.restore_power()?;
        self.cuts += 1;
        self.mount()
    }

    /// Checks a file's text after a cut.
    fn check(&self, case: &str, name: &str, text: &str) -> Outcome {
        let found = fs::read_to_string(self.site.point(0).join(case).join(name));
        let found = found.map_err(tried(format!("{case}: reading {name}")))?;
        ensure!(found == text, "{case}: after the cut, {name} says '{found}' and not '{text}'");
        Ok(())
    }

    /// A process that works in the directory of a case.
    fn start(&self, way: MountAccess, case: &str) -> Outcome<OrderedProcess> {
        self.start_as(way, case, None)
    }

    fn start_as(&self, (front, mount): MountAccess, case: &str, user: Option<u32>) -> Outcome<OrderedProcess> {
        OrderedProcess::start(front, &self.site.point(mount).join(case), user)
    }

    fn finish(&self) -> Outcome<Verdict> {
        (0..MOUNTS).try_for_each(|mount| self.site.umount(mount).map(drop))?;
        self.site.check()?;
        Ok(Verdict::Passed(format!("{} cuts, and what was synced was there after each", self.cuts)))
    }
}

/// A way to the files: with LibFS or through the kernel, and by which mount.
type MountAccess = (Front, usize);

const RUN: MountAccess = (Front::RunAtOnce, 0);
const MOUNT: MountAccess = (Front::Mount, 0);
const OTHER_MOUNT: MountAccess = (Front::Mount, 1);

/// A process that follows orders.
struct OrderedProcess {
    child: Child,
    /// `None` once the process has its order to end.
    orders: Option<ChildStdin>,
    says: BufReader<ChildStdout>,
}

impl OrderedProcess {
    fn start(front: Front, directory: &Path, user: Option<u32>) -> Outcome<Self> {
        let mut command = front.command("python3");
        command.args(["-c", include_str!("../../../../jobs/syncer.py")]).current_dir(directory);
        if let Some(user) = user {
            command.uid(user).gid(user);
        }
        let started = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = started.map_err(tried("starting a process"))?;
        let (orders, says) = (child.stdin.take(), child.stdout.take().ok_or("a process without a pipe")?);
        Ok(Self { child, orders, says: BufReader::new(says) })
    }

    /// Gives it an order, and waits until it confirms.
    fn obey(&mut self, deeds: &[Value]) -> Outcome {
        for deed in deeds {
            let orders = self.orders.as_mut().ok_or("a process that ends gets orders")?;
            writeln!(orders, "{deed}").map_err(tried("telling a process"))?;
            let mut line = String::new();
            self.says.read_line(&mut line).map_err(tried("reading what a process says"))?;
            ensure!(!line.is_empty(), "{deed} failed");
        }
        Ok(())
    }

    /// Ends it like a program that is finished.
    fn finish(mut self) -> Outcome {
        self.orders = None;
        self.child.wait().map(drop).map_err(tried("waiting for a process"))
    }
}

impl Drop for OrderedProcess {
    fn drop(&mut self) {
        // If it has ended, the kill fails.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One process writes, another syncs: with each way to the files on both sides, and each call that syncs a file.
fn written(power: &mut CuttableArena) -> Outcome<Verdict> {
    let cases: [(&str, MountAccess, MountAccess, &[Value]); 9] = [
        ("run-run", RUN, RUN, &[json!(["fsync", "file"])]),
        ("run-run-read", RUN, RUN, &[json!(["read", "file"]), json!(["fsync", "file"])]),
        ("run-run-data", RUN, RUN, &[json!(["fdatasync", "file"])]),
        ("run-run-syncfs", RUN, RUN, &[json!(["syncfs", "file"])]),
        ("run-run-mapped", RUN, RUN, &[json!(["map", "file"]), json!(["fsync", "file"])]),
        ("run-mount", RUN, MOUNT, &[json!(["fsync", "file"])]),
        ("mount-run", MOUNT, RUN, &[json!(["fsync", "file"])]),
        ("mount-other", MOUNT, OTHER_MOUNT, &[json!(["fsync", "file"])]),
        ("mount-other-read", MOUNT, OTHER_MOUNT, &[json!(["read", "file"]), json!(["fdatasync", "file"])]),
    ];
    for (case, writes, syncs, sync) in cases {
        power.prepare(case)?;
        let (mut writer, mut syncer) = (power.start(writes, case)?, power.start(syncs, case)?);
        let open = [json!(["open", "file"])];
        syncer.obey(&open)?;
        writer.obey(&open)?;
        writer.obey(&[json!(["write", "file", NEW])])?;
        syncer.obey(sync)?;
        power.cut([writer, syncer])?;
        power.check(case, "file", NEW)?;
    }
    power.finish()
}

/// A case: its name; the ways of the process that makes names and of the one that syncs; the first one's orders; the
/// file that the second has open and syncs; and which file then holds which text.
type NamingCase<'a> = (&'a str, [MountAccess; 2], &'a [Value], &'a str, [&'a str; 2]);

/// One process makes names, another syncs the directory or the file.
fn named(power: &mut CuttableArena) -> Outcome<Verdict> {
    let make = [json!(["open", "made", "w+"]), json!(["write", "made", NEW])];
    let rename = [json!(["rename", "file", "moved"])];
    let link = [json!(["link", "file", "second"])];
    let nested =
        [json!(["mkdir", "below"]), json!(["open", "below/made", "w+"]), json!(["rename", "file", "below/moved"])];
    let cases: [NamingCase<'_>; 5] = [
        ("made", [RUN, RUN], &make, ".", ["made", NEW]),
        ("made-mount", [RUN, MOUNT], &make, ".", ["made", NEW]),
        ("renamed", [RUN, RUN], &rename, "file", ["moved", OLD]),
        ("linked", [MOUNT, OTHER_MOUNT], &link, "file", ["second", OLD]),
        ("nested", [RUN, RUN], &nested, "file", ["below/moved", OLD]),
    ];
    for (case, [names, syncs], deeds, synced, [name, text]) in cases {
        power.prepare(case)?;
        let (mut maker, mut syncer) = (power.start(names, case)?, power.start(syncs, case)?);
        syncer.obey(&[json!(["open", synced, if synced == "." { "d" } else { "r+" }])])?;
        maker.obey(deeds)?;
        syncer.obey(&[json!(["fsync", synced])])?;
        power.cut([maker, syncer])?;
        power.check(case, name, text)?;
    }
    power.finish()
}

/// Writer and syncer are different users.
fn by_users(power: &mut CuttableArena) -> Outcome<Verdict> {
    for (case, writes, syncs) in [("to-root", Some(NOBODY), None), ("to-user", None, Some(NOBODY))] {
        power.prepare(case)?;
        let mut writer = power.start_as(RUN, case, writes)?;
        let mut syncer = power.start_as(RUN, case, syncs)?;
        let open = [json!(["open", "file"])];
        syncer.obey(&open)?;
        writer.obey(&open)?;
        writer.obey(&[json!(["write", "file", NEW])])?;
        syncer.obey(&[json!(["fsync", "file"])])?;
        power.cut([writer, syncer])?;
        power.check(case, "file", NEW)?;
    }
    power.finish()
}

/// A child has a file by a descriptor, writes to it, and says so through a pipe. Then its parent syncs the file.
fn passed_on(power: &mut CuttableArena) -> Outcome<Verdict> {
    for (case, way) in [("child-run", RUN), ("child-mount", MOUNT)] {
        power.prepare(case)?;
        let mut parent = power.start(way, case)?;
        parent.obey(&[
            json!(["open", "file"]),
            json!(["write", "file", "own"]),
            json!(["fork", "write", "file", NEW]),
            json!(["fsync", "file"]),
        ])?;
        power.cut([parent])?;
        power.check(case, "file", NEW)?;
    }
    power.finish()
}

/// `sync` by a process that does not know the writers, whose processes may have ended.
fn all(power: &mut CuttableArena) -> Outcome<Verdict> {
    for (name, sync) in [("sync", json!(["sync"])), ("syncfs", json!(["syncfs", "."]))] {
        for ends in [false, true] {
            let case = &format!("{name}-{ends}");
            power.prepare(case)?;
            let mut syncer = power.start(RUN, case)?;
            syncer.obey(&[json!(["open", ".", "d"])])?;
            let mut hands = vec![syncer];
            for (name, way) in [("run", RUN), ("mount", MOUNT), ("other", OTHER_MOUNT)] {
                let mut writer = power.start(way, case)?;
                writer.obey(&[json!(["open", name, "w+"]), json!(["write", name, NEW])])?;
                if ends {
                    writer.finish()?;
                } else {
                    hands.push(writer);
                }
            }
            hands[0].obey(std::slice::from_ref(&sync))?;
            power.cut(hands)?;
            for name in ["run", "mount", "other"] {
                power.check(case, name, NEW)?;
            }
        }
    }
    power.finish()
}

/// Neither `fsync` nor `sync` waits for the process that wrote, nor for one behind a mount.
fn stopped(power: &mut CuttableArena) -> Outcome<Verdict> {
    let cases = [
        ("run-fsync", RUN, json!(["fsync", "file"])),
        ("mount-fsync", MOUNT, json!(["fsync", "file"])),
        ("run-syncfs", RUN, json!(["syncfs", "file"])),
        ("mount-syncfs", MOUNT, json!(["syncfs", "file"])),
    ];
    for (name, writes, sync) in cases {
        let case = &format!("stopped-{name}");
        power.prepare(case)?;
        let (mut writer, mut syncer) = (power.start(writes, case)?, power.start(RUN, case)?);
        let open = [json!(["open", "file"])];
        syncer.obey(&open)?;
        writer.obey(&open)?;
        writer.obey(&[json!(["write", "file", NEW])])?;
        let writers = if writes == MOUNT { power.site.mount_processes()? } else { vec![writer.child.id()] };
        writers.into_iter().try_for_each(|pid| signal(pid, Signal::STOP))?;
        let began = Instant::now();
        syncer.obey(&[sync])?;
        ensure!(began.elapsed() < SOON, "{name} took {:?} while the writer was stopped", began.elapsed());
        power.cut([writer, syncer])?;
        power.check(case, "file", NEW)?;
    }
    power.finish()
}
