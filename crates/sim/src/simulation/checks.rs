//! The checks: after each event, after each recovery, and at the end.

use std::collections::BTreeMap;

use ashlar_node::Node;
use ashlar_node::leases::leasing::Ancestors;
use ashlar_types::{InodeId, LeaseScope, LogPosition, SessionId};

use super::Simulation;
use crate::machine::StartReport;
use crate::tree_picture::PicturedTree;

/// The tree and the lease manager are checked once in so many events.
const SAMPLE: u64 = 150;

impl Simulation {
    /// Checks what is true at any time.
    pub(super) fn check_event(&mut self) {
        if self.broken.is_some() {
            return;
        }
        self.observe_locks();
        let Some(node) = &self.machine.node else { return };
        self.counts.checks += 1;
        let found = check_sessions(node, &mut self.committed).and_then(|()| check_words(node));
        if let Err((check, detail)) = found {
            return self.break_check(check, detail);
        }
        if self.counts.events % SAMPLE == 0 {
            self.check_state();
        }
    }

    fn applied(&self) -> BTreeMap<SessionId, LogPosition> {
        let Some(node) = &self.machine.node else { return BTreeMap::new() };
        node.sessions.keys().map(|id| (*id, node.store.applied(*id))).collect()
    }

    /// Compares the applied tree with the model, and checks the lease manager.
    fn check_state(&mut self) {
        let applied = self.applied();
        self.check_tree(&applied);
        let Some(node) = &self.machine.node else { return };
        if node.sealed.is_empty() {
            self.counts.checks += 1;
            if let Err(wrong) = node.leasing.manager.check(&Ancestors(&node.store)) {
                self.break_check("leases", wrong);
            }
        }
    }

    fn check_tree(&mut self, applied: &BTreeMap<SessionId, LogPosition>) {
        let Some(node) = &self.machine.node else { return };
        self.counts.trees += 1;
        let tree = match self.history.tree_of(applied) {
            Ok(tree) => tree.model,
            Err(wrong) => return self.break_check("dependencies", wrong),
        };
        let expected = PicturedTree::of_model(&tree, &PicturedTree::default());
        match PicturedTree::of_store(&node.store) {
            Ok(found) => {
                if let Some(difference) = found.difference(&expected) {
                    self.break_check("tree", difference);
                }
            }
            Err(error) => self.break_check("tree", error.to_string()),
        }
        self.check_accounts(&tree);
    }

    /// Checks the committed state of the store.
    fn check_store(&mut self) {
        let Some(node) = &self.machine.node else { return };
        self.counts.checks += 1;
        match node.store.checker().and_then(|checker| checker.run(&mut |_| {})) {
            Ok(report) if report.is_clean() => {}
            Ok(report) => self.break_check("store", format!("{:?}", report.problems)),
            Err(error) => self.break_check("store", error.to_string()),
        }
    }

    /// Checks what a recovery has brought back.
    pub(super) fn check_start(&mut self, report: &StartReport) {
        self.counts.recoveries += 1;
        let after_power_loss = std::mem::take(&mut self.is_after_power_loss);
        self.trace("SharedFS", || format!("has started; logs are applied up to {:?}", report.applied));
        if let Some(fenced) = report.fenced.first() {
            return self.break_check("fenced", fenced.clone());
        }
        if report.cut > 0 && !(after_power_loss && self.machine.is_disk()) {
            return self.break_check("cut", format!("{} logs are cut", report.cut));
        }
        for (id, committed) in &self.committed {
            if report.applied.get(id).is_some_and(|applied| applied < committed) {
                return self.break_check("committed", format!("session {id} was committed up to {committed}"));
            }
        }
        for (index, logged) in self.history.updates.iter().enumerate() {
            let is_lost = report.applied.get(&logged.session).is_some_and(|applied| *applied < logged.end);
            if is_lost && (logged.is_durable || !after_power_loss) {
                let check = if after_power_loss { "durable" } else { "survives SharedFS" };
                let what = format!("update {index} of session {} up to {} is lost", logged.session, logged.end);
                return self.break_check(check, what);
            }
        }
        if let Err(wrong) = self.history.keep_applied(&report.applied) {
            return self.break_check("dependencies", wrong);
        }
        let applied = self.applied();
        self.committed = applied.clone();
        self.check_tree(&applied);
        self.check_store();
        self.check_state();
    }

    /// Reports what has not ended.
    pub(super) fn report_stall(&mut self) {
        let clients: Vec<_> = self
            .slots
            .iter()
            .filter_map(|slot| slot.client.as_ref().map(|client| format!("{:?} {:?}", client.goal, client.asked)))
            .collect();
        let waiters = format!("{:?}", self.shell.waiters);
        let journal = self.describe_journal();
        self.break_check("pending", format!("this never ends: {clients:?}; pending: {waiters}{journal}"));
    }

    /// Applies and commits everything, and checks it.
    pub(super) fn check_end(&mut self) {
        let Some(node) = &mut self.machine.node else { return self.break_check("end", "SharedFS does not run") };
        for id in node.live_ids() {
            if let Some(settled) = node.settled(id) {
                node.apply(id, settled, ashlar_node::records::apply::Slice::All);
            }
        }
        node.decide_all();
        // A commit that is under way is given up, as at the end of SharedFS.
        let ends: BTreeMap<_, _> = self.history.updates.iter().map(|logged| (logged.session, logged.end)).collect();
        let missing = ends.iter().find(|(id, end)| node.sessions.contains_key(id) && node.store.applied(**id) < **end);
        if let Some((id, end)) = missing {
            return self.break_check("end", format!("session {id} is not applied up to {end}"));
        }
        let found = check_sessions(node, &mut self.committed).and_then(|()| check_words(node));
        if let Err((check, detail)) = found {
            return self.break_check(check, detail);
        }
        self.check_state();
        self.check_store();
        // Once more after SharedFS has been killed.
        if self.broken.is_none() {
            self.machine.kill_shared_fs();
            self.reset_shell();
            self.start_shared_fs();
        }
        if self.broken.is_none() {
            self.check_replica_at_end();
        }
    }
}

type CheckResult = Result<(), (&'static str, String)>;

/// Checks that no session is fenced, and that positions are in order and grow.
fn check_sessions(node: &Node, committed_before: &mut BTreeMap<SessionId, LogPosition>) -> CheckResult {
    for session in node.sessions.values() {
        let id = session.id;
        if let Some(reason) = &session.fenced {
            return Err(("fenced", format!("session {id}: {reason}")));
        }
        let (applied, committed) = (node.store.applied(id), node.store.committed(id));
        let (tail, head, published) = (session.log.tail(), session.log.head(), session.control.committed());
        // A log may begin behind what the journal had applied at the start.
        let head_most = if node.journal.is_some() { applied } else { committed };
        if !(head <= head_most && published <= committed && committed <= applied && applied <= tail) {
            return Err((
                "positions",
                format!(
                    "session {id}: head {head}, published {published}, committed {committed}, applied {applied}, tail {tail}"
                ),
            ));
        }
        let before = committed_before.entry(id).or_default();
        if committed < *before {
            return Err(("positions", format!("session {id}: committed {committed}, and {before} before")));
        }
        *before = committed;
    }
    Ok(())
}

/// Checks that no two sessions hold lease words that conflict.
fn check_words(node: &Node) -> CheckResult {
    let mut held: BTreeMap<(InodeId, LeaseScope), (SessionId, bool)> = BTreeMap::new();
    for session in node.sessions.values() {
        for slot in 0..=session.lease_top {
            let word = session.leases.word(slot);
            if !word.may_read() {
                continue;
            }
            let (inode, scope) = (session.leases.inode(slot), word.scope());
            let is_alone = word.may_write() || scope == LeaseScope::Subtree;
            match held.insert((inode, scope), (session.id, is_alone)) {
                Some((other, other_alone)) if other != session.id && (is_alone || other_alone) => {
                    let detail = format!("sessions {other} and {} both hold {scope:?} of inode {inode}", session.id);
                    return Err(("one writer", detail));
                }
                _ => {}
            }
        }
    }
    Ok(())
}
