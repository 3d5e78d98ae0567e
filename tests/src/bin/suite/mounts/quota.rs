//! Quotas: limits hold to the block and to the file.
//!
//! They hold for users, groups and subtrees, whichever processes work beside and whichever die.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ashlar_tests::command::{Done, ashlar, run, shell};
use ashlar_tests::harness::{Test, Verdict, passed};
use ashlar_tests::mount::{Medium, TestArena, obstacle};
use ashlar_tests::{Outcome, ensure, number, tried};
use serde_json::Value;

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "quota/user_gets_space_to_the_last_block", run: || when_mountable(user_space) },
    Test { name: "quota/user_gets_files_to_the_last_one", run: || when_mountable(user_files) },
    Test { name: "quota/every_call_that_takes_space_is_refused", run: || when_mountable(calls) },
    Test { name: "quota/group_limit_covers_directory_and_chgrp", run: || when_mountable(group) },
    Test { name: "quota/subtree_counts_its_files_and_lets_none_out", run: || when_mountable(subtree) },
    Test { name: "quota/every_change_of_a_file_is_paid_for", run: || when_mountable(fsx) },
    Test { name: "quota/two_mounts_never_exceed_one_limit", run: || when_mountable(two_mounts) },
    Test { name: "quota/killed_sharedfs_keeps_the_account", run: || when_mountable(killed) },
    Test { name: "quota/limits_survive_umount_and_mount", run: || when_mountable(survives) },
    Test { name: "quota/refusals_say_what_to_do", run: || when_mountable(refusals) },
];

const USER: u32 = 54_321;
const GROUP: u32 = 54_322;
const KIB: u64 = 1024;
const EXDEV: i32 = 18;

fn when_mountable(test: fn(&TestArena) -> Outcome<Verdict>) -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let site = TestArena::mounted(Medium::Memory, "128M")?;
    // Other users must be able to reach the mount, and may write in its root.
    shell(site.outside(), "chmod 755 .")?.success()?;
    shell(&site.point(0), "chmod 1777 .")?.success()?;
    let verdict = test(&site)?;
    let unpaid = site.counter("quota_unpaid")?;
    ensure!(unpaid == 0, "LibFS used {unpaid} times more than it had asked for");
    site.check()?;
    Ok(verdict)
}

/// A shell script as an ordinary user, a member of the test's group too.
fn as_user(directory: &Path, script: &str) -> Command {
    let mut command = Command::new("setpriv");
    let user = format!("--reuid={USER}");
    command.args([&user, &format!("--regid={USER}"), &format!("--groups={USER},{GROUP}")]);
    command.args(["bash", "-euo", "pipefail", "-c", script]).current_dir(directory);
    command
}

fn run_as_user(site: &TestArena, script: &str) -> Outcome<Done> {
    run(&mut as_user(&site.point(0), script))
}

fn expect_exceeded(done: Done) -> Outcome {
    done.failure(1, &["quota exceeded"]).map(drop)
}

fn set_quota(site: &TestArena, words: &[&str]) -> Outcome<Done> {
    site.ashlar(&[&["quota", "set"], words].concat())?.success()
}

fn set_user_quota(site: &TestArena, words: &[&str]) -> Outcome<Done> {
    set_quota(site, &[&["--user", &USER.to_string()], words].concat())
}

/// The output of `quota show` for an owner or subtree.
fn quota_status(site: &TestArena, kind: &str, id: u64) -> Outcome<Value> {
    let text = site.ashlar(&["quota", "show", "--json"])?.success()?.output;
    let all: Value = serde_json::from_str(&text).map_err(tried("reading the JSON of quota show"))?;
    let lines = all["quotas"].as_array().cloned().unwrap_or_default();
    Ok(lines.into_iter().find(|line| line["kind"] == kind && line["id"] == id).unwrap_or(Value::Null))
}

fn quota_use(site: &TestArena, kind: &str, id: u64) -> Outcome<(u64, u64)> {
    let line = quota_status(site, kind, id)?;
    Ok((line["space_used_bytes"].as_u64().unwrap_or(0), line["files_used"].as_u64().unwrap_or(0)))
}

fn file_size(path: &Path) -> Outcome<u64> {
    Ok(fs::metadata(path).map_err(tried(format!("looking at {}", path.display())))?.len())
}

fn user_space(site: &TestArena) -> Outcome<Verdict> {
    let file = site.point(0).join("f");
    set_user_quota(site, &["--space", "1M"])?;
    // Whatever the size of the writes, bytes up to the limit are written, and the rest is refused.
    for block in ["4k", "64k", "1M", "3333"] {
        expect_exceeded(run_as_user(site, &format!("dd if=/dev/zero of=f bs={block} count=2000"))?)?;
        let length = file_size(&file)?;
        ensure!(length == 1024 * KIB, "with blocks of {block}, {length} bytes were written");
        ensure!(quota_use(site, "user", USER.into())? == (1024 * KIB, 1), "blocks of {block} are not counted right");
        run_as_user(site, "dd if=/dev/urandom of=f bs=4k count=256 conv=notrunc")?.success()?;
        expect_exceeded(run_as_user(site, "echo more > g")?)?;
        run_as_user(site, "truncate -s 1M g && rm g f && echo room > g && rm g")?.success()?;
    }
    // The same through the kernel's pages.
    expect_exceeded(run_as_user(site, "exec 3<>f; head -c 2M /dev/zero >&3")?)?;
    ensure!(file_size(&file)? == 1024 * KIB, "{} bytes were written through the kernel's pages", file_size(&file)?);
    // The limit does not hold the super-user, whose writes count all the same.
    shell(&site.point(0), "dd if=/dev/zero of=f bs=4k count=10 oflag=append conv=notrunc")?.success()?;
    ensure!(quota_use(site, "user", USER.into())?.0 == 1064 * KIB, "what root wrote for the user is not counted");
    run_as_user(site, "truncate -s 1M f")?.success()?;
    expect_exceeded(run_as_user(site, "echo more > g")?)?;
    set_user_quota(site, &["--space", "1028K"])?;
    run_as_user(site, "echo more > g")?.success()?;
    // A removed limit stops holding at once.
    site.ashlar(&["quota", "remove", "--user", &USER.to_string()])?.success()?;
    run_as_user(site, "dd if=/dev/zero of=f bs=64k count=100")?.success()?;
    passed()
}

/// Renames `d/1` so that a whiteout is left there.
const LEAVE_WHITEOUT: &str = "python3 -c '
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.renameat2(-100, b\"d/1\", -100, b\"d/moved\", 4):
    sys.exit(os.strerror(ctypes.get_errno()))
'";

fn user_files(site: &TestArena) -> Outcome<Verdict> {
    run_as_user(site, "mkdir d && touch d/old")?.success()?;
    set_user_quota(site, &["--files", "10"])?;
    run_as_user(site, "cd d && touch 1 2 3 4 && mkdir 5 && ln -s x 6 && mkfifo 7 && ln 1 second-name && touch 8")?
        .success()?;
    for script in ["touch d/9", "mkdir d/9", "ln -s x d/9", "mkfifo d/9", LEAVE_WHITEOUT] {
        expect_exceeded(run_as_user(site, script)?)?;
    }
    ensure!(quota_use(site, "user", USER.into())?.1 == 10, "{}", quota_status(site, "user", USER.into())?);
    run_as_user(site, "mv d/7 d/renamed && ln d/2 d/third-name && rm d/renamed")?.success()?;
    run_as_user(site, LEAVE_WHITEOUT)?.success()?;
    expect_exceeded(run_as_user(site, "mkdir d/9")?)?;
    run_as_user(site, "test -c d/1 && rm -f d/1 && mkdir d/9")?.success()?;
    expect_exceeded(run_as_user(site, "touch d/10")?)?;
    passed()
}

fn calls(site: &TestArena) -> Outcome<Verdict> {
    run_as_user(site, "head -c 64K /dev/zero > f")?.success()?;
    set_user_quota(site, &["--space", "64K"])?;
    expect_exceeded(run_as_user(site, "fallocate -l 68K g")?)?;
    expect_exceeded(run_as_user(site, "fallocate -o 64K -l 1 f")?)?;
    expect_exceeded(run_as_user(
        site,
        "python3 -c 'import os; os.copy_file_range(os.open(\"f\", 0), os.open(\"g\", 1), 4096)'",
    )?)?;
    // Holes, cuts, and ranges that already have space, need no more space.
    run_as_user(site, "truncate -s 1M g && fallocate -l 64K f && fallocate -p -o 0 -l 4K f && fallocate -l 4K f")?
        .success()?;
    // A new owner is charged for a file: here by a process that may give files away, and is not the super-user.
    shell(&site.point(0), "head -c 8K /dev/zero > given && chmod 666 given")?.success()?;
    let chown = format!("--reuid={GROUP} --regid={GROUP} --clear-groups --inh-caps=+chown --ambient-caps=+chown");
    let give = || shell(&site.point(0), &format!("setpriv {chown} chown {USER} given"));
    expect_exceeded(give()?)?;
    run_as_user(site, "truncate -s 56K f")?.success()?;
    give()?.success()?;
    ensure!(quota_use(site, "user", USER.into())?.0 == 64 * KIB, "{}", quota_status(site, "user", USER.into())?);
    expect_exceeded(run_as_user(site, "echo more > g")?)?;
    passed()
}

fn group(site: &TestArena) -> Outcome<Verdict> {
    shell(&site.point(0), &format!("mkdir g && chgrp {GROUP} g && chmod 2777 g"))?.success()?;
    let words = ["--group", &GROUP.to_string(), "--space", "64K", "--files", "5"];
    set_quota(site, &words)?;
    expect_exceeded(run_as_user(site, "dd if=/dev/zero of=g/f bs=4k count=100")?)?;
    ensure!(file_size(&site.point(0).join("g/f"))? == 64 * KIB, "not all of the group's space was used");
    ensure!(quota_use(site, "group", GROUP.into())? == (64 * KIB, 2), "{}", quota_status(site, "group", GROUP.into())?);
    run_as_user(site, "head -c 4K /dev/zero > own")?.success()?;
    expect_exceeded(run_as_user(site, &format!("chgrp {GROUP} own"))?)?;
    run_as_user(site, &format!("truncate -s 60K g/f && chgrp {GROUP} own && touch g/1 g/2"))?.success()?;
    expect_exceeded(run_as_user(site, "mkdir g/3")?)?;
    // Group and owner are counted separately.
    ensure!(quota_use(site, "user", USER.into())? == (64 * KIB, 4), "{}", quota_status(site, "user", USER.into())?);
    passed()
}

fn subtree(site: &TestArena) -> Outcome<Verdict> {
    let (root, tree) = (site.point(0), site.point(0).join("tree"));
    let tree_name = tree.display().to_string();
    shell(
        &root,
        "mkdir -p tree/deep/er out && head -c 100K /dev/zero > tree/deep/er/f && ln tree/deep/er/f tree/link",
    )?
    .success()?;
    shell(&root, "ln -s nowhere tree/symbolic && mkfifo tree/fifo && chmod -R a+rwX tree out && touch out/f")?
        .success()?;
    set_quota(site, &["--subtree", &tree_name, "--space", "1M", "--files", "20"])?;
    let id = fs::metadata(&tree).map_err(tried("looking at the tree"))?.ino();
    ensure!(quota_use(site, "subtree", id)? == (100 * KIB, 6), "{}", quota_status(site, "subtree", id)?);
    ensure!(quota_status(site, "subtree", id)?["name"] == "/tree", "{}", quota_status(site, "subtree", id)?);
    let free = shell(&tree, "stat -f -c '%b %f %c %d' .")?.success()?.output;
    ensure!(free == "256 231 20 14\n", "df within the tree would show {free}");
    // The subtree's limit counts all users together, and holds the super-user too.
    run_as_user(site, "mkdir tree/mine && head -c 100K /dev/zero > tree/mine/f")?.success()?;
    expect_exceeded(shell(&root, "dd if=/dev/zero of=tree/big bs=4k count=1000")?)?;
    ensure!(quota_use(site, "subtree", id)? == (1024 * KIB, 9), "{}", quota_status(site, "subtree", id)?);
    expect_exceeded(run_as_user(site, "echo more > tree/mine/g")?)?;
    // No name moves over the border; a copy counts where it is made.
    for (from, to) in [("tree/big", "out/big"), ("out/f", "tree/f"), ("tree/mine", "out/mine")] {
        let error = fs::rename(root.join(from), root.join(to)).err().and_then(|error| error.raw_os_error());
        ensure!(error == Some(EXDEV), "moving {from} to {to} gave {error:?}");
    }
    let error = fs::hard_link(root.join("tree/big"), root.join("out/big")).err().and_then(|error| error.raw_os_error());
    ensure!(error == Some(EXDEV), "a link out of the tree gave {error:?}");
    expect_exceeded(shell(&root, "head -c 8K /dev/zero > out/g; mv out/g tree/g")?)?;
    shell(&root, "rm -f tree/g; mv tree/big out/big && mv out/f tree/f && mv tree/f tree/deep/f && mv tree renamed")?
        .success()?;
    ensure!(quota_use(site, "subtree", id)? == (200 * KIB, 10), "{}", quota_status(site, "subtree", id)?);
    ensure!(quota_status(site, "subtree", id)?["name"] == "/renamed", "{}", quota_status(site, "subtree", id)?);
    // The subtree is no attribute that copies would take along, and no impossible number.
    let check = format!(
        "python3 -c 'import os; name = \"trusted.ashlar.quota\"; assert os.listxattr(\"renamed\") == []; \
         assert os.getxattr(\"renamed/deep\", name) == b\"{id}\"; os.setxattr(\"renamed\", name, b\"72057594037927936\")'"
    );
    shell(&root, &check)?.failure(1, &["Invalid argument"])?;
    // The innermost subtree counts.
    let inner = root.join("renamed/deep").display().to_string();
    set_quota(site, &["--subtree", &inner, "--files", "4"])?;
    ensure!(quota_use(site, "subtree", id)? == (100 * KIB, 6), "{}", quota_status(site, "subtree", id)?);
    expect_exceeded(shell(&root, "touch renamed/deep/one-more")?)?;
    site.ashlar(&["quota", "remove", "--subtree", &inner])?.success()?;
    ensure!(quota_use(site, "subtree", id)? == (200 * KIB, 10), "{}", quota_status(site, "subtree", id)?);
    site.ashlar(&["quota", "remove", "--subtree", &root.join("renamed").display().to_string()])?.success()?;
    ensure!(quota_status(site, "subtree", id)?.is_null(), "{}", quota_status(site, "subtree", id)?);
    shell(&root, "mv renamed/mine out/mine && dd if=/dev/zero of=renamed/big bs=64k count=30")?.success()?;
    passed()
}

/// Random changes of a file by a user that has a limit and never reaches it. `with` checks that LibFS pays for all of
/// it.
fn fsx(site: &TestArena) -> Outcome<Verdict> {
    let Some(program) = crate::mounts::conformance::tool("fsx") else {
        return Ok(Verdict::Skipped("fsx is not built; 'scripts/tools.sh' builds it".into()));
    };
    // In a directory that the user may read.
    let (copy, configuration) = (site.outside().join("fsx"), site.outside().join("fsx.toml"));
    fs::copy(program, &copy).map_err(tried("copying fsx"))?;
    fs::write(&configuration, include_str!("../../../../fsx.toml")).map_err(tried("writing the configuration"))?;
    shell(site.outside(), "chmod 755 fsx && mkdir -m 777 out")?.success()?;
    set_user_quota(site, &["--space", "64M", "--files", "100"])?;
    set_quota(site, &["--subtree", &site.point(0).display().to_string(), "--space", "100M"])?;
    let operations = number("ASHLAR_FSX_OPS", 20_000);
    let words = format!("../fsx -q -N {operations} -S 7 -f ../fsx.toml -P ../out file");
    run_as_user(site, &words)?.success()?;
    let blocks = fs::metadata(site.point(0).join("file")).map_err(tried("looking at the file"))?.blocks();
    let (space, files) = quota_use(site, "user", USER.into())?;
    ensure!(
        (space, files) == (blocks * 512, 1),
        "{space} bytes in {files} files are counted, and {blocks} sectors used"
    );
    Ok(Verdict::Passed(format!("{operations} operations")))
}

/// Two writers on two mounts fill one limit again and again: their sum is the limit, to the block.
fn two_mounts(site: &TestArena) -> Outcome<Verdict> {
    const LIMIT: u64 = 2048 * KIB;
    site.mount(1)?;
    set_user_quota(site, &["--space", "2M"])?;
    let rounds = number("ASHLAR_QUOTA_ROUNDS", 10);
    for round in 0..rounds {
        let block = ["4k", "16k", "100k"][(round % 3) as usize];
        let write = |mount: usize| {
            let script = format!("dd if=/dev/zero of=f{mount} bs={block} count=2000");
            as_user(&site.point(mount), &script)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
        };
        let mut writers = [write(0), write(1)].into_iter().collect::<Result<Vec<_>, _>>().map_err(tried("starting"))?;
        while writers.iter_mut().any(|writer| writer.try_wait().is_ok_and(|ended| ended.is_none())) {
            let now = quota_use(site, "user", USER.into())?.0;
            ensure!(now <= LIMIT, "round {round}: {now} bytes are used");
        }
        let sizes = (0..2).map(|mount| file_size(&site.point(1 - mount).join(format!("f{mount}"))));
        let sum: u64 = sizes.collect::<Outcome<Vec<_>>>()?.iter().sum();
        ensure!(sum == LIMIT, "round {round}: the two got {sum} bytes");
        ensure!(quota_use(site, "user", USER.into())? == (LIMIT, 2), "{}", quota_status(site, "user", USER.into())?);
        run(&mut as_user(&site.point((round % 2) as usize), "rm f0 f1"))?.success()?;
        ensure!(quota_use(site, "user", USER.into())? == (0, 0), "{}", quota_status(site, "user", USER.into())?);
    }
    site.umount(1)?;
    Ok(Verdict::Passed(format!("{rounds} rounds")))
}

/// A writer that makes, fills and removes files until there is a file called `stop`.
fn start_busy_writer(site: &TestArena, number: usize) -> Outcome<Child> {
    let script = format!(
        "while [ ! -e stop ]; do dd if=/dev/zero of=k{number} bs=8k count=100 || true; touch k{number}-{{1..9}} || true; \
         rm -f k{number}*; done"
    );
    let mut command = as_user(&site.point(number % 2), &script);
    let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().map_err(tried("starting a writer"))
}

fn killed(site: &TestArena) -> Outcome<Verdict> {
    const LIMIT: u64 = 1024 * KIB;
    site.mount(1)?;
    set_user_quota(site, &["--space", "1M", "--files", "12"])?;
    let mut writers = (0..3).map(|number| start_busy_writer(site, number)).collect::<Outcome<Vec<_>>>()?;
    let kills = number("ASHLAR_QUOTA_KILLS", 5);
    let hammered = (0..kills).try_for_each(|kill| -> Outcome {
        std::thread::sleep(Duration::from_millis(100 + 37 * kill));
        site.kill_daemon()?;
        for _ in 0..5 {
            let (space, files) = quota_use(site, "user", USER.into())?;
            ensure!(space <= LIMIT && files <= 12, "kill {kill}: {space} bytes in {files} files are used");
        }
        site.check().map(drop)
    });
    fs::write(site.point(0).join("stop"), "").map_err(tried("stopping the writers"))?;
    for writer in &mut writers {
        writer.wait().map_err(tried("waiting for a writer"))?;
    }
    hammered?;
    ensure!(quota_use(site, "user", USER.into())? == (0, 0), "{}", quota_status(site, "user", USER.into())?);
    expect_exceeded(run_as_user(site, "dd if=/dev/zero of=f bs=4k count=1000")?)?;
    ensure!(file_size(&site.point(1).join("f"))? == LIMIT, "after the kills, the limit is not what it was");
    site.umount(1)?;
    Ok(Verdict::Passed(format!("{kills} kills")))
}

fn survives(site: &TestArena) -> Outcome<Verdict> {
    let tree = site.point(0).join("tree");
    fs::create_dir(&tree).map_err(tried("making a directory"))?;
    set_user_quota(site, &["--space", "64K"])?;
    set_quota(site, &["--subtree", &tree.display().to_string(), "--files", "3"])?;
    shell(&site.point(0), "chmod 777 tree")?.success()?;
    run_as_user(site, "head -c 60K /dev/zero > f && touch tree/1")?.success()?;
    site.umount(0)?;
    site.check()?;
    site.mount(0)?;
    run_as_user(site, "head -c 4K /dev/zero > g && touch tree/2")?.success()?;
    expect_exceeded(run_as_user(site, "echo more > h")?)?;
    expect_exceeded(run_as_user(site, "touch tree/3")?)?;
    // Limits can also be set while nothing is mounted.
    site.umount(0)?;
    set_user_quota(site, &["--space", "68K"])?;
    site.mount(0)?;
    run_as_user(site, "echo more > h")?.success()?;
    passed()
}

fn refusals(site: &TestArena) -> Outcome<Verdict> {
    let refused = |words: &[&str], expected: &[&str]| site.ashlar(&[&["quota"], words].concat())?.failure(1, expected);
    refused(&["set", "--user", "nobody-at-all", "--space", "1G"], &["no user nobody-at-all", "getent passwd"])?;
    refused(&["set", "--group", "nobody-at-all", "--files", "1"], &["no group nobody-at-all", "getent group"])?;
    refused(&["set", "--subtree", "/proc", "--files", "1"], &["/proc", "not in an Ashlar", "ashlar status"])?;
    refused(&["remove", "--user", "daemon"], &["user daemon has no limit", "ashlar quota show"])?;
    refused(&["remove", "--subtree", &site.point(0).display().to_string()], &["has no limit"])?;
    fs::write(site.point(0).join("file"), "").map_err(tried("making a file"))?;
    refused(
        &["set", "--subtree", &site.point(0).join("file").display().to_string(), "--files", "1"],
        &["not a directory"],
    )?;
    run(&mut ashlar(&["quota", "set", "--user", "root"]))?.failure(2, &["--space"])?;
    run(&mut ashlar(&["quota", "set", "--space", "1G"]))?.failure(2, &["--user"])?;
    run(&mut ashlar(&["quota", "show", "/proc"]))?.failure(1, &["no Ashlar", "ashlar status"])?;
    let shown = site.ashlar(&["quota", "show"])?.success()?.output;
    ensure!(shown.contains("user root") && shown.contains("no account has a limit"), "quota show says: {shown}");
    passed()
}
