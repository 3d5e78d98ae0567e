//! The ends of sessions, step by step.

use ashlar_node::pending::progress::Progress;
use ashlar_node::pending::{NodeRequest, RequestTerms};
use ashlar_pmem::CrashMedium;
use ashlar_sim::client::SimClient;
use ashlar_sim::machine::{Machine, MachineOptions};
use ashlar_types::{InodeId, Timestamp};
use ashlar_update::Update;

/// Sessions that end together are removed only after each log is applied as a whole.
///
/// Their ends are done one after the other, and other requests are served in between.
#[test]
fn sessions_ending_together_stay_until_logs_are_applied() {
    let options = MachineOptions { medium: CrashMedium::Words, blocks: 64, lease_hold_us: 0 };
    let mut machine = Machine::new(options).expect("an arena");
    machine.start(0, None).expect("started");
    let mut ends = Vec::new();
    for _ in 0..2 {
        let pid = machine.start_process();
        let (id, first, count) = machine.begin_session(pid, 0, 0).expect("begun");
        let inodes = first.0..first.0 + count;
        let client = SimClient::attach(pid, id, 0, &machine.twins[&id], inodes).expect("attached");
        // More than one batch, so that the first end takes several steps.
        for second in 1..400 {
            let at = Timestamp { seconds: second, nanoseconds: 0 };
            let update = Update::Accessed { inode: InodeId::ROOT, at };
            let seal = client.log.seal_count();
            client.log.append(seal, update.kind() as u8, &update.encode().parts()).expect("appended");
        }
        ends.push((id, client.log.tail()));
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
