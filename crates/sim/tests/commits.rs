//! Commits that fail and are tried again, on a machine with a replica.

use std::sync::Arc;

use ashlar_node::NodeCore;
use ashlar_node::digest::commit::{begin_commit, finish_commit};
use ashlar_node::journal::{CopySender, NodeJournal};
use ashlar_pmem::{CrashMedium, MediumKind, Persistent};
use ashlar_sim::client::SimClient;
use ashlar_sim::machine::{CrashKind, Machine, MachineOptions};
use ashlar_sim::replica_machine::{ReplicaMachine, ReplicaOptions};
use ashlar_store::{CommitFault, StoreError};
use ashlar_types::{InodeId, JournalPosition, Timestamp};
use ashlar_update::Update;

const RING_BYTES: u64 = 256 << 10;

/// A replica acknowledges whatever it is sent.
fn acknowledge(state: &mut NodeCore, upto: JournalPosition) -> Result<(), StoreError> {
    state.journal.iter_mut().for_each(|journal| journal.handle_ack(upto));
    Ok(())
}

fn options(medium: MediumKind) -> MachineOptions {
    MachineOptions { medium, blocks: 640, lease_hold_us: 0, ring_bytes: Some(RING_BYTES) }
}

fn start(medium: MediumKind) -> (Machine, SimClient) {
    let mut machine = Machine::new(options(medium)).expect("an arena");
    machine.start_with(0, None, &mut acknowledge).expect("started");
    let client = SimClient::begin(&mut machine, 0, 0).expect("begun");
    (machine, client)
}

/// Logs an update, and applies it.
fn apply(machine: &mut Machine, client: &SimClient, second: i64) {
    let update = Update::Accessed { inode: InodeId::ROOT, at: Timestamp { seconds: second, nanoseconds: 0 } };
    let seal = client.log.seal_count();
    client.log.append(seal, update.kind() as u8, &update.encode().parts()).expect("appended");
    machine.apply_log(client.session);
}

/// Commits once. The medium is full, or not.
fn commit(machine: &mut Machine, is_full: bool) -> Result<(), StoreError> {
    let database = machine.arena.database();
    if is_full {
        database.plan_fault(database.commits(), CommitFault::Full);
    }
    let node = machine.node.as_mut().expect("running");
    let job = begin_commit(node).expect("something to commit");
    finish_commit(node, job.run())
}

/// The frames behind the batch are needed: SharedFS may die before the next commit.
#[test]
fn retried_commit_keeps_later_frames() {
    let (mut machine, client) = start(MediumKind::Pmem);
    apply(&mut machine, &client, 1);
    commit(&mut machine, true).expect_err("the medium is full");
    apply(&mut machine, &client, 2);
    commit(&mut machine, false).expect("committed");
    machine.kill_shared_fs();
    machine.start_with(1000, None, &mut acknowledge).expect("the journal has all frames");
}

/// Sends the replica what is new, which it makes durable and applies.
fn follow(journal: &NodeJournal, sender: &mut CopySender, copy: &mut ReplicaMachine) {
    let replica = copy.replica.as_mut().expect("running");
    while let Some(part) = sender.next_part(journal, 1000).expect("frames") {
        replica.take_frames(&part).expect("the next frames");
        replica.flush().expect("durable");
        while replica.apply_frames(3).expect("applied") {}
    }
}

/// A replica commits apart from the writing node: its batches may lag behind the journal too.
#[test]
fn retried_commit_of_replica_keeps_later_frames() {
    let mut machine = Machine::new(options(MediumKind::Pmem)).expect("an arena");
    let options = ReplicaOptions { medium: CrashMedium::Words, blocks: 1280, ring_bytes: RING_BYTES, fault: None };
    let mut copy = ReplicaMachine::new(options).expect("an arena");
    copy.start().expect("started");
    machine.start_with(0, None, &mut acknowledge).expect("started");
    let state = copy.replica.as_ref().expect("running").copy_state();
    let journal = machine.node.as_mut().expect("running").journal.as_mut().expect("a journal");
    let (plan, mut sender) = CopySender::begin(journal, &state).expect("its copy");
    copy.replica.as_mut().expect("running").follow(plan).expect("followed");
    let client = SimClient::begin(&mut machine, 0, 0).expect("begun");
    for is_full in [true, false] {
        apply(&mut machine, &client, 1);
        let node = machine.node.as_mut().expect("running");
        let job = begin_commit(node).expect("something to commit");
        follow(node.journal.as_ref().expect("a journal"), &mut sender, &mut copy);
        finish_commit(node, job.run()).expect("committed");
        follow(node.journal.as_ref().expect("a journal"), &mut sender, &mut copy);
        let arena = Arc::clone(&copy.arena);
        if is_full {
            arena.database().plan_fault(arena.database().commits(), CommitFault::Full);
        }
        assert_eq!(copy.commit().is_err(), is_full);
    }
    copy.kill();
    copy.start().expect("the copy has all frames");
}

/// The journal is durable before a commit, and a session's log need not be.
#[test]
fn log_shorter_than_journal_fences_no_session() {
    let (mut machine, client) = start(MediumKind::Disk);
    client.leases.memory().sync().expect("synced");
    apply(&mut machine, &client, 1);
    let node = machine.node.as_mut().expect("running");
    begin_commit(node).expect("something to commit").flush();
    // Nothing is left of the log.
    machine = machine.after_crash(CrashKind::PowerLoss, &mut |_, _| 0);
    let report = machine.start_with(1000, None, &mut acknowledge).expect("started");
    assert!(report.fenced.is_empty(), "{:?}", report.fenced);
    let root = machine.node.as_ref().expect("running").store.inode(InodeId::ROOT).expect("read").expect("a root");
    assert_eq!(root.accessed.seconds, 1, "the journal has the update");
}
