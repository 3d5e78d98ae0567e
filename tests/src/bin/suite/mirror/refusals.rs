//! Refusals of nodes, and the words that help.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::time::Duration;

use ashlar_tests::cluster::{ClusterOptions, TestCluster};
use ashlar_tests::command::{ashlar, run};
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::{Outcome, ensure, tried};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "mirror/replica_names_serving_node_to_mounts", run: || when_mountable(replica_refuses) },
    Test { name: "mirror/mount_waits_a_while_for_the_replica", run: || when_mountable(mount_waits) },
    Test { name: "mirror/promotion_refused_while_writer_answers", run: || when_mountable(promotion_refused) },
    Test { name: "mirror/other_min_replicas_are_refused", run: || when_mountable(other_min_replicas) },
    Test { name: "mirror/lost_state_is_written_again", run: || when_mountable(lost_state) },
    Test { name: "mirror/foreign_certificate_is_refused", run: || when_mountable(foreign_certificate) },
    Test { name: "mirror/ordinary_user_changes_no_cluster", run: || when_mountable(ordinary_user) },
];

/// A user that owns nothing of the cluster.
const USER: u32 = 65_534;

fn replica_refuses() -> Outcome<Verdict> {
    let cluster = TestCluster::up(ClusterOptions::default())?;
    let words = ["node 1 is a replica", "node 0 at 192.0.2.1:7900 serves", "ashlar node promote"];
    cluster.try_mount(1, 0)?.failure(1, &words)?;
    // Neither does a program get a session there whose mount was made while the node served: there is no mount at all.
    let status = cluster.ashlar(1, &["status"])?.success()?;
    ensure!(status.output.contains("following"), "the status does not say that it follows: {}", status.output);
    // Nothing was begun that must be ended.
    cluster.mount(0, 0)?;
    cluster.umount(0)?;
    cluster.compare_at_rest(0)?;
    passed()
}

/// Both machines may start at the same time.
fn mount_waits() -> Outcome<Verdict> {
    let cluster = TestCluster::up(ClusterOptions::default())?;
    cluster.stop(0)?;
    cluster.stop(1)?;
    cluster.start(0)?;
    cluster.wait_for(0, "it waits for its replica", |state| state["standing"] == "waiting")?;
    cluster.try_mount(0, 0)?.failure(1, &["node 0 serves no sessions yet", "ashlar node force"])?;
    std::thread::scope(|scope| {
        let mount = scope.spawn(|| cluster.mount(0, 0));
        std::thread::sleep(Duration::from_secs(1));
        ensure!(!mount.is_finished(), "the mount does not wait: {:?}", mount.join());
        cluster.start(1)?;
        mount.join().map_err(|_| "a panic")?
    })?;
    cluster.umount(0)?;
    cluster.compare_at_rest(0)?;
    passed()
}

fn promotion_refused() -> Outcome<Verdict> {
    let cluster = TestCluster::up(ClusterOptions::default())?;
    cluster.mount(0, 0)?;
    for is_forced in [false, true] {
        cluster.promote(1, is_forced)?.failure(1, &["node 0 answers", "stop it first"])?;
    }
    cluster.promote(0, false)?.failure(1, &["node 0 is the writer already"])?;
    fs::write(cluster.point(0).join("file"), "content").map_err(tried("writing"))?;
    for node in 0..2 {
        let state = cluster.state(node)?;
        ensure!(state["epoch"][1] == 0 && state["members"][0]["role"] == "writer", "a refusal changed {state}");
    }
    cluster.umount(0)?;
    cluster.compare_at_rest(0)?;
    passed()
}

/// An administrator edits `min_replicas` at one node.
fn other_min_replicas() -> Outcome<Verdict> {
    let cluster = TestCluster::up(ClusterOptions::default())?;
    let edit = |node: usize, from: &str, to: &str| {
        let path = cluster.arena(node).join("cluster/cluster.toml");
        let text = fs::read_to_string(&path).map_err(tried("reading a document"))?;
        ensure!(text.contains(from), "the document has no '{from}': {text}");
        fs::write(path, text.replace(from, to)).map_err(tried("editing a document"))
    };
    let (two, one) = ("min_replicas = 2", "min_replicas = 1");
    for (edited, words) in [
        (1, "min_replicas is 2 at the writer and 1 at the replica"),
        (0, "min_replicas is 1 at the writer and 2 at the replica"),
    ] {
        cluster.stop(0)?;
        cluster.stop(1)?;
        edit(edited, two, one)?;
        cluster.start(0)?;
        cluster.start(1)?;
        for node in 0..2 {
            cluster.wait_for(node, "it names both values", |state| {
                let problems = state["problems"].as_array().map_or(&[][..], Vec::as_slice);
                let said = problems.first().and_then(|problem| problem.as_str()).unwrap_or_default();
                problems.len() == 1 && said.contains(words) && said.contains("restart both daemons")
            })?;
        }
        let state = cluster.state(0)?;
        ensure!(state["standing"] == "waiting" && state["is_linked"] == false, "the writer serves: {state}");
        cluster.promote(1, true)?.failure(1, &["node 0 answers"])?;
        edit(edited, one, two)?;
    }
    cluster.try_mount(0, 0)?.failure(1, &["node 0 serves no sessions yet", "min_replicas is 1 at the writer"])?;
    cluster.stop(0)?;
    cluster.stop(1)?;
    cluster.start(0)?;
    cluster.start(1)?;
    cluster.wait_in_sync(0)?;
    cluster.compare_at_rest(0)?;
    passed()
}

/// A node does not start without its hard state. The error names what to write.
fn lost_state() -> Outcome<Verdict> {
    let cluster = TestCluster::up(ClusterOptions::default())?;
    for (node, faulty) in [(1, None), (0, None), (1, Some("in_sync = 7\n"))] {
        cluster.stop(node)?;
        let path = cluster.arena(node).join("cluster/state.toml");
        match faulty {
            Some(text) => fs::write(&path, text).map_err(tried("spoiling the hard state"))?,
            None => fs::remove_file(&path).map_err(tried("removing the hard state"))?,
        }
        let problem = if faulty.is_some() { "(line 1" } else { "(it is missing)" };
        let number = node.to_string();
        cluster.dev(&["start", &number])?.failure(1, &[problem, "ashlar node add", "in three lines"])?;
        let document = fs::read_to_string(cluster.arena(node).join("cluster/cluster.toml"));
        let document = document.map_err(tried("reading a document"))?;
        let epoch = document.lines().find_map(|line| line.strip_prefix("epoch")).ok_or("no epoch")?;
        let text = format!("format = 1\nnewest_epoch{epoch}\nin_sync = false\n");
        fs::write(&path, text).map_err(tried("writing the hard state"))?;
        cluster.start(node)?;
        cluster.wait_in_sync(0)?;
    }
    cluster.compare_at_rest(0)?;
    passed()
}

/// A node with the certificate of another cluster is refused, by itself and by the writer, and nothing changes.
fn foreign_certificate() -> Outcome<Verdict> {
    let (cluster, other) = (TestCluster::up(ClusterOptions::default())?, TestCluster::up(ClusterOptions::default())?);
    cluster.mount(0, 0)?;
    cluster.stop(1)?;
    other.stop(1)?;
    let before = documents(&cluster)?;
    // Its own arena knows that it is none of its certificates.
    let credentials = credentials(&cluster)?;
    let kept = credentials.iter().map(fs::read).collect::<Result<Vec<_>, _>>().map_err(tried("reading"))?;
    for path in &credentials {
        let name = path.strip_prefix(cluster.arena(1)).map_err(tried("naming a file"))?;
        fs::copy(other.arena(1).join(name), path).map_err(tried("copying a file of the other cluster"))?;
    }
    cluster.dev(&["start", "1"])?.failure(1, &["certificate of node 1", "issue it again"])?;
    for (path, content) in credentials.iter().zip(kept) {
        fs::write(path, content).map_err(tried("putting a file back"))?;
    }
    // A whole node of the other cluster, at the replica's address.
    exchange_replicas(&cluster, &other)?;
    cluster.start(1)?;
    cluster.wait_for(1, "the writer refuses it", |state| {
        state["is_linked"] == false && state["problems"][0].as_str().is_some_and(|it| it.contains("no link to node 0"))
    })?;
    let words = cluster.state(1)?["problems"][0].as_str().unwrap_or_default().to_owned();
    let writer = cluster.state(0)?;
    ensure!(writer["is_linked"] == false && writer["standing"] == "serving", "the writer has taken it: {writer}");
    cluster.stop(1)?;
    exchange_replicas(&cluster, &other)?;
    ensure!(documents(&cluster)? == before, "a refused node has changed a document");
    cluster.start(1)?;
    cluster.wait_in_sync(0)?;
    cluster.umount(0)?;
    cluster.compare_at_rest(0)?;
    Ok(Verdict::Passed(words))
}

/// Neither node takes a command of an ordinary user that can reach its socket.
fn ordinary_user() -> Outcome<Verdict> {
    let cluster = TestCluster::up(ClusterOptions::default())?;
    cluster.mount(0, 0)?;
    let arenas = cluster.arena(0);
    let arenas = arenas.parent().ok_or("the arenas lie nowhere")?;
    fs::set_permissions(arenas, fs::Permissions::from_mode(0o755)).map_err(tried("opening a directory to all"))?;
    let before = (documents(&cluster)?, cluster.state(0)?["epoch"].clone());
    let invitation = cluster.outside().join("invitation").display().to_string();
    let commands: [(usize, &[&str]); 4] = [
        (0, &["node", "force"]),
        (0, &["node", "add", "192.0.2.2:7900", "--replace", "--invitation", &invitation]),
        (1, &["node", "promote"]),
        (1, &["node", "promote", "--force"]),
    ];
    for (node, words) in commands {
        let done = run(ashlar(words).arg("--arena").arg(cluster.arena(node)).uid(USER).gid(USER))?;
        done.failure(1, &["run it as root"])?;
    }
    let after = (documents(&cluster)?, cluster.state(0)?["epoch"].clone());
    ensure!(before == after, "an ordinary user has changed the cluster");
    // The same command changes it, by root.
    cluster.kill(0)?;
    cluster.promote_in_time(1, true)?;
    passed()
}

/// Exchanges the arenas of two clusters' replicas.
fn exchange_replicas(a: &TestCluster, b: &TestCluster) -> Outcome {
    let (a, b) = (a.arena(1), b.arena(1));
    let between = a.with_extension("between");
    let exchange = || -> std::io::Result<()> {
        fs::rename(&a, &between)?;
        fs::rename(&b, &a)?;
        fs::rename(&between, &b)
    };
    exchange().map_err(tried("exchanging two arenas"))
}

/// The files of the replica's certificate.
fn credentials(cluster: &TestCluster) -> Outcome<Vec<PathBuf>> {
    let directory = cluster.arena(1).join("cluster");
    let files = fs::read_dir(&directory).map_err(tried(format!("reading {}", directory.display())))?.flatten();
    let found: Vec<_> =
        files.map(|file| file.path()).filter(|path| path.extension().is_some_and(|it| it == "pem")).collect();
    ensure!(!found.is_empty(), "there are no certificates in {}", directory.display());
    Ok(found)
}

/// The documents of both nodes.
fn documents(cluster: &TestCluster) -> Outcome<Vec<Vec<u8>>> {
    let read = |node| fs::read(cluster.arena(node).join("cluster/cluster.toml"));
    (0..2).map(read).collect::<Result<_, _>>().map_err(tried("reading a document"))
}
