//! Sessions step by step: their ends, and what a loss of power leaves of them.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ashlar_node::digest::commit::{await_no_copy, commit_with};
use ashlar_node::pending::progress::Progress;
use ashlar_node::pending::{NodeRequest, RequestTerms};
use ashlar_pmem::{MediumKind, Persistent};
use ashlar_sim::client::SimClient;
use ashlar_sim::machine::{CrashKind, Machine, MachineOptions};
use ashlar_types::{FileKind, InodeId, Timestamp};
use ashlar_update::{Create, Update};
use ashlar_wire::{Credit, CreditKind, LeaseRequest, Need, Request};

/// Sessions that end together are removed only after each log is applied as a whole.
///
/// Their ends are done one after the other, and other requests are served in between.
#[test]
fn sessions_ending_together_stay_until_logs_are_applied() {
    let options = MachineOptions { medium: MediumKind::Pmem, blocks: 64, lease_hold_us: 0, ring_bytes: None };
    let mut machine = Machine::new(options).expect("an arena");
    machine.start(0, None).expect("started");
    let mut ends = Vec::new();
    for _ in 0..2 {
        let client = SimClient::begin(&mut machine, 0, 0).expect("begun");
        // More than one batch, so that the first end takes several steps.
        for second in 1..400 {
            let at = Timestamp { seconds: second, nanoseconds: 0 };
            let update = Update::Accessed { inode: InodeId::ROOT, at };
            let seal = client.log.seal_count();
            client.log.append(seal, update.kind() as u8, &update.encode().parts()).expect("appended");
        }
        ends.push((client.session, client.log.tail()));
    }
    let node = machine.node.as_mut().expect("running");
    // As the daemon does before it begins the request.
    node.sessions.values_mut().for_each(|session| session.is_ending = true);
    let ids = ends.iter().map(|(id, _)| *id).collect();
    let ticket = node.begin_request(NodeRequest::EndSessions(ids), RequestTerms::OWN);
    let mut steps = 0;
    while !matches!(node.advance(ticket), Progress::Done(_)) {
        steps += 1;
        let removable = node.ended_sessions();
        assert!(removable.is_empty(), "step {steps} would remove {removable:?}");
    }
    assert!(steps > 1, "other requests are served in between");
    for (id, end) in ends {
        assert!(node.store.applied(id) >= end, "session {id} is applied up to its end");
    }
}

/// A session that frees a removed file without its lease frees nothing.
///
/// The session that had the file open may have closed it, with writes to it in its log that are not applied yet.
#[test]
fn release_without_lease_leaves_orphan_to_its_writer() {
    let options = MachineOptions { medium: MediumKind::Pmem, blocks: 640, lease_hold_us: 0, ring_bytes: None };
    let mut machine = Machine::new(options).expect("an arena");
    machine.start(0, None).expect("started");
    let mut clients = Vec::new();
    for uid in [0, 1001] {
        clients.push(SimClient::begin(&mut machine, uid, 0).expect("begun"));
    }
    let [writer, other] = &clients[..] else { panic!("two clients") };
    let root = LeaseRequest::on_inode(InodeId::ROOT, true, Need::default());
    machine.serve(writer.session, Request::Acquire(vec![root])).expect("granted");
    let (inode, at) = (InodeId(writer.inodes.start), Timestamp { seconds: 1, nanoseconds: 0 });
    writer.control.open_handle(inode);
    append(&mut machine, writer, &Update::Create(Create { name: b"", ..file(inode, at) }));
    machine.apply_log(writer.session);
    append(&mut machine, writer, &Update::Write { inode, offset: 0, at, strip: false, data: &[7; 100] });
    writer.control.close_handle(inode);
    append(&mut machine, other, &Update::Release { inode });
    machine.apply_log(other.session);
    machine.apply_log(writer.session);
    let node = machine.node.as_ref().expect("running");
    let fenced: Vec<_> = node.sessions.values().filter_map(|session| session.fenced.clone()).collect();
    assert!(fenced.is_empty(), "{fenced:?}");
    assert_eq!(node.store.inode(inode).expect("read").map(|found| found.size), Some(100));
}

/// A batch frees a file and makes another one, whose lease gets the slot of the first one's.
///
/// If SharedFS is killed anywhere in between, the next one validates the writes to the first file again.
#[test]
fn kill_as_a_lease_slot_passes_on_fences_no_session() {
    let options = MachineOptions { medium: MediumKind::Pmem, blocks: 640, lease_hold_us: 0, ring_bytes: None };
    let at = Timestamp { seconds: 1, nanoseconds: 0 };
    let mut cut_off = 0;
    for writes in 0..40 {
        let mut machine = Machine::new(options).expect("an arena");
        machine.start(0, None).expect("started");
        let client = SimClient::begin(&mut machine, 0, 0).expect("begun");
        let root = LeaseRequest::on_inode(InodeId::ROOT, true, Need::default());
        machine.serve(client.session, Request::Acquire(vec![root])).expect("granted");
        let [one, other] = [0, 1].map(|number| InodeId(client.inodes.start + number));
        let unnamed = |inode| Update::Create(Create { name: b"", ..file(inode, at) });
        client.control.open_handle(one);
        append(&mut machine, &client, &unnamed(one));
        machine.apply_log(client.session);
        append(&mut machine, &client, &Update::Write { inode: one, offset: 0, at, strip: false, data: &[7; 100] });
        client.control.close_handle(one);
        append(&mut machine, &client, &Update::Release { inode: one });
        client.control.open_handle(other);
        append(&mut machine, &client, &unnamed(other));
        machine.gate.plan_end(writes);
        let applied = catch_unwind(AssertUnwindSafe(|| machine.apply_log(client.session)));
        cut_off += u64::from(applied.is_err());
        machine.kill_shared_fs();
        let report = machine.start(1000, None).expect("started");
        assert!(report.fenced.is_empty(), "killed after {writes} writes: {:?}", report.fenced);
    }
    assert!(cut_off > 3, "only {cut_off} kills came in the middle");
}

/// A session writes to a file that it made, while SharedFS does not run.
///
/// The next SharedFS knows the session's lease on the file, even if the last one was killed right after it journalled
/// that the file was made: it applies those records again out of the journal.
#[test]
fn maker_writes_after_a_kill_at_any_write_unfenced() {
    let ring_bytes = Some(256 << 10);
    let options = MachineOptions { medium: MediumKind::Pmem, blocks: 640, lease_hold_us: 0, ring_bytes };
    let at = Timestamp { seconds: 1, nanoseconds: 0 };
    let mut cut_off = 0;
    for writes in 0..60 {
        let mut machine = Machine::new(options).expect("an arena");
        machine.start(0, None).expect("started");
        let client = SimClient::begin(&mut machine, 0, 0).expect("begun");
        let root = LeaseRequest::on_inode(InodeId::ROOT, true, Need::default());
        machine.serve(client.session, Request::Acquire(vec![root])).expect("granted");
        let inode = InodeId(client.inodes.start);
        client.control.open_handle(inode);
        append(&mut machine, &client, &Update::Create(Create { name: b"", ..file(inode, at) }));
        let write = Update::Write { inode, offset: 0, at, strip: false, data: &[7; 100] };
        take_credit(&mut machine, &client, &write);
        machine.gate.plan_end(writes);
        let applied = catch_unwind(AssertUnwindSafe(|| machine.apply_log(client.session)));
        cut_off += u64::from(applied.is_err());
        machine.kill_shared_fs();
        log(&client, &write);
        let report = machine.start(1000, None).expect("started");
        assert!(report.fenced.is_empty(), "killed after {writes} writes: {:?}", report.fenced);
        let node = machine.node.as_ref().expect("running");
        assert_eq!(node.store.inode(inode).expect("read").map(|found| found.size), Some(100));
    }
    assert!(cut_off > 3, "only {cut_off} kills came in the middle");
}

/// A session reaches a file by a name that SharedFS does not know, since it had the file open when another name went.
///
/// After it has closed the file, it opens the file by that name and writes under the lease that it still has.
#[test]
fn file_opened_again_by_its_other_name_is_written_unfenced() {
    let options = MachineOptions { medium: MediumKind::Pmem, blocks: 640, lease_hold_us: 0, ring_bytes: None };
    let at = Timestamp { seconds: 1, nanoseconds: 0 };
    let mut machine = Machine::new(options).expect("an arena");
    machine.start(0, None).expect("started");
    let [root, user] = [0, 1001].map(|uid| SimClient::begin(&mut machine, uid, 0).expect("begun"));
    let lease = |machine: &mut Machine, client: &SimClient, inode| {
        let lease = LeaseRequest::on_inode(inode, true, Need::default());
        machine.serve(client.session, Request::Acquire(vec![lease])).expect("granted");
    };
    let directory = InodeId(root.inodes.start);
    lease(&mut machine, &root, InodeId::ROOT);
    let made = Create { kind: FileKind::Directory, mode: 0o777, ..file(directory, at) };
    append(&mut machine, &root, &Update::Create(made));
    machine.apply_log(root.session);
    let [inode, other] = [0, 1].map(|number| InodeId(user.inodes.start + number));
    lease(&mut machine, &user, directory);
    user.control.open_handle(inode);
    for (inode, name) in [(inode, &b"a"[..]), (other, b"other")] {
        let made = Create { parent: directory, name, uid: 1001, gid: 1001, ..file(inode, at) };
        append(&mut machine, &user, &Update::Create(made));
    }
    machine.apply_log(user.session);
    [directory, inode].into_iter().for_each(|inode| lease(&mut machine, &root, inode));
    append(&mut machine, &root, &Update::Link { inode, parent: directory, name: b"b", at });
    append(&mut machine, &root, &Update::Unlink { inode, parent: directory, name: b"a", release: false, at });
    machine.apply_log(root.session);
    commit(&mut machine);
    machine.kill_shared_fs();
    machine.start(1000, None).expect("started");
    [inode, other].into_iter().for_each(|inode| lease(&mut machine, &user, inode));
    user.control.close_handle(inode);
    commit(&mut machine);
    // SharedFS notes another open file, in the first free word.
    user.control.open_handle(other);
    lease(&mut machine, &root, other);
    append(&mut machine, &user, &Update::Write { inode, offset: 0, at, strip: true, data: &[7; 100] });
    machine.apply_log(user.session);
    let node = machine.node.as_ref().expect("running");
    let fenced: Vec<_> = node.sessions.values().filter_map(|session| session.fenced.clone()).collect();
    assert!(fenced.is_empty(), "{fenced:?}");
    assert_eq!(node.store.inode(inode).expect("read").map(|found| found.size), Some(100));
}

fn commit(machine: &mut Machine) {
    commit_with(machine.node.as_mut().expect("running"), &mut await_no_copy).expect("committed");
}

/// Makes a file in the root directory.
fn file(inode: InodeId, at: Timestamp) -> Create<'static> {
    Create {
        inode,
        parent: InodeId::ROOT,
        name: b"file",
        kind: FileKind::Regular,
        mode: 0o644,
        uid: 0,
        gid: 0,
        device: 0,
        at,
        target: &[],
        acl_access: &[],
        acl_default: &[],
    }
}

/// Appends an update that has its own credit.
fn append(machine: &mut Machine, client: &SimClient, update: &Update<'_>) {
    take_credit(machine, client, update);
    log(client, update);
}

/// Asks for the credit of an update, and takes it.
fn take_credit(machine: &mut Machine, client: &SimClient, update: &Update<'_>) {
    let credit = Credit::from(update.cost());
    machine.serve(client.session, Request::Credit { want: credit, replaces: false }).expect("granted");
    client.control.take_credit(credit, CreditKind::Common).expect("granted just now");
}

/// Appends an update whose credit was taken.
fn log(client: &SimClient, update: &Update<'_>) {
    let seal = client.log.seal_count();
    client.log.append(seal, update.kind() as u8, &update.encode().parts()).expect("appended");
}

/// A disk may have a record without its grant. The log then ends before it, and synced content stays, even if the
/// record would have overwritten it.
#[test]
fn log_cut_at_lost_grant_keeps_synced_content() {
    let options = MachineOptions { medium: MediumKind::Disk, blocks: 640, lease_hold_us: 0, ring_bytes: None };
    let mut machine = Machine::new(options).expect("an arena");
    machine.start(0, None).expect("started");
    let client = SimClient::begin(&mut machine, 0, 0).expect("begun");
    let first = InodeId(client.inodes.start);
    let root = LeaseRequest::on_inode(InodeId::ROOT, true, Need::default());
    machine.serve(client.session, Request::Acquire(vec![root])).expect("granted");
    let at = Timestamp { seconds: 1, nanoseconds: 0 };
    append(&mut machine, &client, &Update::Create(file(first, at)));
    let data = [7; 5000];
    append(&mut machine, &client, &Update::Write { inode: first, offset: 0, at, strip: false, data: &data });
    client.leases.memory().sync().expect("synced");
    client.log.memory().sync().expect("synced");
    // The grants that last are used up, without a change of content.
    while client.control.credit_left(CreditKind::Common).blocks > 0 {
        append(&mut machine, &client, &Update::Write { inode: first, offset: 0, at, strip: false, data: &data[..1] });
    }
    // The disk gets this record, and not its grant.
    append(&mut machine, &client, &Update::Resize { inode: first, size: 0, strip: false, at });
    client.log.memory().sync().expect("written back");
    machine = machine.after_crash(CrashKind::PowerLoss, &mut |_, _| 0);
    let report = machine.start(1000, None).expect("started");
    assert_eq!((report.fenced.len(), report.cut), (0, 1), "the log is cut at the lost grant");
    let mut found = [0; 5000];
    machine.node.as_ref().expect("running").store.read(first, 0, &mut found).expect("read");
    assert!(found == data, "the synced content is there");
}
