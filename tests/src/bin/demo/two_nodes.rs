//! Two nodes: the writer is lost in the middle of the work, the replica takes over, and a new one is added.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

use ashlar_tests::{Outcome, ensure, tried};
use serde_json::Value;

use crate::jobs::SYNC_JOBS;
use crate::node::{Node, SIZE, compare, is_in_sync, problems};
use crate::running::{Running, await_progress};
use crate::story::Story;

/// The least progress of a copy that is worth a line.
const COPY_LINE_BYTES: u64 = 24 << 20;
/// How long programs work before the writer is killed.
const WORK: Duration = Duration::from_secs(4);
/// The size of a file that lies on the file system, so that its copy takes a moment.
const ARCHIVE_BYTES: u64 = 64 << 20;
const ARCHIVE: &str = "archive";

/// Tells the story.
pub fn tell() -> Outcome {
    let story = Story::begin("\nTwo nodes: a machine is lost, and the other one has everything that was fsynced");
    let [mut a, mut b] = Node::pair()?;
    story.add("Machine A is the writer, on which programs work; machine B is the replica. Both are this machine here:");
    story.add("each has an address, processes and an arena of its own. In the commands, A and B are the arenas:");
    [&a, &b].iter().for_each(|node| story.add(&format!("  {}   {}", node.name, node.site.arena().display())));
    make_cluster(&story, &mut a, &mut b)?;
    let archive = write_archive(&a.site.point(0))?;
    let mut running = start_jobs(&a, "")?;
    story.say("these work on A under 'ashlar run', and report to this demo whatever was fsynced:");
    SYNC_JOBS.iter().for_each(|job| story.add(&format!("{:<8} {}", job.name, job.description)));
    await_progress(&mut running, 1)?;
    std::thread::sleep(WORK);
    running.iter_mut().try_for_each(Running::expect_running)?;
    lose_writer(&story, &mut a, &b, &mut running)?;
    verify(&story, &b, &running)?;
    let found = fs::read(b.site.point(0).join(ARCHIVE)).map_err(tried("reading the archive"))?;
    ensure!(found == archive, "the archive on B is not the one that was fsynced on A");
    bring_former_writer_back(&story, &mut a, &b)?;
    let mut running = start_jobs(&b, "-again")?;
    await_progress(&mut running, 1)?;
    add_replica(&story, &mut a, &b, &mut running)?;
    running.iter_mut().try_for_each(Running::kill)?;
    let pause = running.iter().map(Running::longest_pause).max().unwrap_or_default();
    story.add(&format!("the longest pause between two results of a program: {} ms", pause.as_millis()));
    verify(&story, &b, &running)?;
    compare_at_rest(&story, &mut a, &mut b)
}

/// Makes a cluster of two, mounts it on A, and waits until B is in sync.
fn make_cluster(story: &Story, a: &mut Node, b: &mut Node) -> Outcome {
    story.show(&format!("ashlar cluster init --address {} --size {SIZE} --arena A", a.address));
    a.ashlar(&["cluster", "init", "--address", &a.address, "--size", SIZE])?;
    invite(story, a, b)?;
    story.show("ashlar daemon --arena A        # and on B: ashlar daemon --arena B");
    a.start()?;
    b.start()?;
    show_members(story, &a.wait_for("has its replica in sync", is_in_sync)?);
    story.add("B is in sync: from now on, fsync on A returns once B has the data too");
    story.show("ashlar mount DIR --arena A");
    a.site.mount(0).map(drop)
}

/// Invites a new node into the cluster of a writer, and makes its arena.
fn invite(story: &Story, writer: &Node, new: &Node) -> Outcome {
    let path = new.invitation();
    let invitation = path.display().to_string();
    let (writer_name, name) = (writer.name, new.name);
    story.show(&format!("ashlar node add {} --invitation FILE --arena {writer_name}", new.address));
    writer.ashlar(&["node", "add", &new.address, "--invitation", &invitation])?;
    story.show(&format!("ashlar node join FILE --arena {name}      # the file was carried to {name}"));
    new.ashlar(&["node", "join", &invitation])?;
    fs::remove_file(path).map_err(tried("removing an invitation"))
}

/// Prints the members of the cluster as a node sees them.
fn show_members(story: &Story, state: &Value) {
    let members = state["members"].as_array().map(Vec::as_slice).unwrap_or_default();
    for member in members {
        let role = member["role"].as_str().unwrap_or_default();
        let address = member["address"].as_str().unwrap_or_default();
        story.add(&format!("node {}   {role:<9} {address}", member["node"]));
    }
}

fn write_archive(point: &Path) -> Outcome<Vec<u8>> {
    let write = || -> std::io::Result<Vec<u8>> {
        let mut content = Vec::new();
        File::open("/dev/urandom")?.take(ARCHIVE_BYTES).read_to_end(&mut content)?;
        let mut file = File::create(point.join(ARCHIVE))?;
        std::io::Write::write_all(&mut file, &content)?;
        file.sync_all()?;
        Ok(content)
    };
    write().map_err(tried("writing and syncing the archive"))
}

/// Starts the jobs on a node, in directories with their names and a suffix.
fn start_jobs(node: &Node, suffix: &str) -> Outcome<Vec<Running>> {
    let (point, outside) = (node.site.point(0), node.site.outside());
    SYNC_JOBS.iter().map(|job| Running::start(job, point.join(format!("{}{suffix}", job.name)), outside)).collect()
}

/// Describes how much jobs have got done.
fn describe_progress(running: &[Running]) -> String {
    let parts = running.iter().map(|it| format!("{}: {}", it.job.name, it.count()));
    parts.collect::<Vec<_>>().join(", ")
}

/// Kills everything on A in the middle of the work, promotes B, and mounts it there.
fn lose_writer(story: &Story, a: &mut Node, b: &Node, running: &mut [Running]) -> Outcome {
    let lost = Instant::now();
    // The file system's processes first, so that they die in the middle of the programs' calls.
    a.kill_everything()?;
    running.iter_mut().try_for_each(Running::kill)?;
    story.say("kill -9 of everything on A, in the middle of the work: supervisor, daemon, mount, programs");
    story.add(&format!("fsynced until then: {}", describe_progress(running)));
    story.show("ashlar node promote --arena B");
    let start = Instant::now();
    b.promote()?;
    story.say(&format!("B is the writer now: the promotion took {} ms", start.elapsed().as_millis()));
    story.show("ashlar mount DIR --arena B");
    b.site.mount(0)?;
    let point = b.site.point(0);
    let bytes = fs::read(point.join("bank/bank.db")).map_err(tried("the first read on B"))?.len();
    ensure!(bytes > 0, "the first read on B found nothing");
    story.say(&format!("mounted: the first read on B is done {} ms after the kill", lost.elapsed().as_millis()));
    a.site.clear_mounts();
    Ok(())
}

/// Verifies the results of jobs on a node, and checks its file system.
fn verify(story: &Story, node: &Node, running: &[Running]) -> Outcome {
    for it in running {
        let verdict = it.verify(&node.site.point(0))?;
        story.say(&format!("{:<8} {verdict}", it.job.name));
    }
    let counts = node.site.check()?;
    let (inodes, blocks) = (&counts["inodes"], &counts["blocks"]);
    story.say(&format!("fsck     clean: {inodes} inodes, {blocks} blocks"));
    Ok(())
}

/// Starts the former writer's daemon again: it learns that it was replaced, and serves nothing.
fn bring_former_writer_back(story: &Story, a: &mut Node, b: &Node) -> Outcome {
    story.say("A comes back with its old arena");
    story.show("ashlar daemon --arena A");
    let start = Instant::now();
    a.start()?;
    // Its SharedFS starts again when it has learned of the other writer. The next one says so in a sentence.
    let is_replaced = |state: &Value| {
        state["standing"] == "replaced" && problems(state).iter().any(|it| it.contains("there, run 'ashlar node add'"))
    };
    let state = a.wait_for("learns that it was replaced", is_replaced)?;
    let took = start.elapsed().as_millis();
    story.say(&format!("A learned from B that it was replaced, {took} ms after its start; its 'ashlar status' says:"));
    problems(&state).into_iter().for_each(|problem| story.add(problem));
    story.show("ashlar mount DIR --arena A");
    let point = a.site.point(0).display().to_string();
    let refused = a.site.ashlar(&["mount", &point])?.failure(1, &["was replaced"])?;
    story.add(&refused.errors);
    ensure!(b.state()?["standing"] == "serving", "B does not serve any more");
    a.stop()
}

/// Makes machine A anew, as B's replica, while programs work on B.
fn add_replica(story: &Story, a: &mut Node, b: &Node, running: &mut [Running]) -> Outcome {
    story.say("the same programs work on B, in directories of their own; meanwhile A is made anew, as a replica");
    let before: usize = running.iter().map(Running::count).sum();
    a.remove_arena()?;
    invite(story, b, a)?;
    story.show("ashlar daemon --arena A");
    let start = Instant::now();
    a.start()?;
    let mut shown = 0;
    let state = b.wait_for("has its replica in sync", |state| {
        let copied = state["copied_bytes"].as_u64().unwrap_or(0);
        if copied >= shown + COPY_LINE_BYTES {
            story.say(&format!("'ashlar status' on B: {} MiB are copied so far", copied >> 20));
            shown = copied;
        }
        is_in_sync(state)
    })?;
    story.say(&format!("A is in sync with B, {} ms after its start", start.elapsed().as_millis()));
    show_members(story, &state);
    await_progress(running, 1)?;
    let after: usize = running.iter().map(Running::count).sum();
    story.add(&format!("the programs on B worked on: {} results were fsynced meanwhile", after - before));
    Ok(())
}

/// Stops both nodes in order, and compares their arenas.
fn compare_at_rest(story: &Story, a: &mut Node, b: &mut Node) -> Outcome {
    b.site.umount(0)?;
    let state = b.wait_for("has sent its whole journal", |state| {
        let progress = &state["replication"];
        is_in_sync(state) && !progress.is_null() && progress["durable"] == state["journal_end"]
    })?;
    let end = &state["journal_end"];
    a.wait_for("has applied the whole journal", |state| state["replication"]["applied"] == *end)?;
    b.stop()?;
    a.stop()?;
    story.say("unmounted; both daemons stopped in order, B first");
    story.show("ashlar fsck --compare A B");
    let tree = compare(a, b)?;
    let (inodes, bytes) = (&tree["inodes"], &tree["bytes"]);
    story.say(&format!("equal: no difference found in {inodes} inodes, {bytes} bytes"));
    a.site.check()?;
    b.site.check().map(drop)
}
