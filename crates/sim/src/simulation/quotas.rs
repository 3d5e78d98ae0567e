//! Quotas: the administrator's limits, and the checks of what is used under them.

use std::collections::{BTreeMap, BTreeSet};

use ashlar_node::pending::{NodeRequest, RequestTerms};
use ashlar_types::{Errno, InodeId, QuotaAmount, QuotaId, QuotaKey, QuotaLimits, SessionId};
use ashlar_update::model::ModelTree;
use ashlar_wire::Reply;

use super::{SimEvent, Simulation, Waiter};
use crate::faults::SimBug;
use crate::quota_balances::use_of_tree;

/// How long the administrator waits after a failure, or until SharedFS runs.
const RETRY_US: u64 = 20_000;

/// The administrator, and the limits that the administrator knows of.
#[derive(Debug, Default)]
pub(super) struct Administrator {
    /// Whether limits are set in this run.
    pub(super) is_active: bool,
    /// The limits that may stand: one, or two while they change.
    limits: BTreeMap<QuotaKey, Vec<QuotaLimits>>,
    /// The use by updates of the super-user that these limits did not bind, by account.
    ///
    /// Balances that other sessions had got before may be used on top.
    exempt: BTreeMap<QuotaKey, QuotaAmount>,
    /// The change that is under way.
    change: Option<(QuotaKey, QuotaLimits)>,
    /// Whether SharedFS has the request.
    is_asked: bool,
}

impl Administrator {
    pub(super) fn new(is_active: bool) -> Self {
        Self { is_active, ..Self::default() }
    }

    /// Forgets the request, which SharedFS has lost.
    pub(super) fn reset(&mut self) {
        self.is_asked = false;
    }

    /// All limits are lost with the medium.
    pub(super) fn forget_limits(&mut self) {
        self.limits.clear();
        if let Some((key, limits)) = self.change {
            self.limits.insert(key, vec![QuotaLimits::default(), limits]);
        }
    }

    fn limits_of(&self, key: QuotaKey) -> &[QuotaLimits] {
        self.limits.get(&key).map_or(&[QuotaLimits { blocks: None, inodes: None }], Vec::as_slice)
    }

    /// The highest limits that may stand.
    fn highest_limits(&self, key: QuotaKey) -> QuotaLimits {
        let highest = |limit: fn(&QuotaLimits) -> Option<u64>| {
            let amounts: Option<Vec<u64>> = self.limits_of(key).iter().map(limit).collect();
            amounts.and_then(|amounts| amounts.into_iter().max())
        };
        QuotaLimits { blocks: highest(|limits| limits.blocks), inodes: highest(|limits| limits.inodes) }
    }
}

impl Simulation {
    /// The administrator sets a limit, and comes again later.
    pub(super) fn administer(&mut self) {
        if self.administrator.is_asked {
            return;
        }
        if self.administrator.change.is_none() {
            if self.faults_end {
                return;
            }
            self.draw_limits();
        }
        let Some((key, limits)) = self.administrator.change else {
            let pause = self.limits.between(10_000, 300_000);
            return self.schedule(pause, SimEvent::Administer);
        };
        if self.has_plant(SimBug::UnsetLimits) {
            return self.take_limits(Ok(()));
        }
        if self.machine.node.is_none() {
            return self.schedule(RETRY_US, SimEvent::Administer);
        }
        self.administrator.is_asked = true;
        self.trace("administrator", || format!("sets limits of {key}: {limits:?}"));
        self.begin_request(NodeRequest::SetQuota(key, limits), RequestTerms::OWN, Waiter::Administrator);
    }

    fn draw_limits(&mut self) {
        let tree = &self.history.tree.model;
        let tops = tree.inodes().filter(|(id, inode)| inode.links > 0 && inode.quota == QuotaId::of(*id));
        let mut keys: Vec<_> = tops.map(|(id, _)| QuotaKey::Subtree(QuotaId::of(id))).collect();
        keys.extend([0, 1001, 1002].map(QuotaKey::User));
        keys.extend([1001, 1002].map(QuotaKey::Group));
        let Some(key) = self.limits.pick(&keys) else { return };
        let mut limit = |most: u64| {
            let amount = self.limits.below(most);
            (!self.limits.one_in(3)).then_some(amount)
        };
        let limits = QuotaLimits { blocks: limit(10), inodes: limit(7) };
        let before = self.administrator.highest_limits(key);
        self.administrator.limits.insert(key, vec![before, limits]);
        self.administrator.exempt.remove(&key);
        self.administrator.change = Some((key, limits));
    }

    /// Takes SharedFS's answer to the administrator.
    pub(super) fn take_limits(&mut self, answer: Result<(), Errno>) {
        self.administrator.is_asked = false;
        let pause = match answer {
            Ok(()) => {
                if let Some((key, limits)) = self.administrator.change.take() {
                    self.administrator.limits.insert(key, vec![limits]);
                }
                self.limits.between(10_000, 600_000)
            }
            Err(_) => RETRY_US,
        };
        self.trace("administrator", || format!("is answered: {answer:?}"));
        self.schedule(pause, SimEvent::Administer);
    }

    /// Grants a session twice what it was granted, if that bug is planted.
    pub(super) fn plant_double_grant(&mut self, id: SessionId, reply: &mut Reply) {
        let Reply::Quota { grants, .. } = reply else { return };
        let Some(session) = self.machine.node.as_mut().and_then(|node| node.sessions.get_mut(&id)) else { return };
        for grant in grants {
            let (blocks, inodes) = (grant.blocks.unwrap_or(0), grant.inodes.unwrap_or(0));
            session.outstanding.grant(grant.key, QuotaAmount { blocks, inodes });
            grant.blocks = grant.blocks.map(|blocks| blocks * 2);
            grant.inodes = grant.inodes.map(|inodes| inodes * 2);
        }
    }

    /// Returns the use of all that has a name, or is open in a session that goes on.
    ///
    /// SharedFS counts no less. Returns nothing if no limits are set in this run.
    pub(super) fn use_of_names(&self) -> BTreeMap<QuotaKey, QuotaAmount> {
        if !self.administrator.is_active {
            return BTreeMap::new();
        }
        let open: BTreeSet<InodeId> =
            self.slots.iter().filter_map(|slot| slot.client.as_ref()).flat_map(|c| c.handles.iter().copied()).collect();
        use_of_tree(&self.history.tree.model, &open)
    }

    /// Checks that a session's newest update takes no more than the limits leave.
    ///
    /// `before` is the use before the update.
    pub(super) fn check_use(&mut self, session: SessionId, is_root: bool, before: &BTreeMap<QuotaKey, QuotaAmount>) {
        let counts_anew = self.history.updates.last().is_some_and(|last| last.counts_subtree());
        for (key, used) in self.use_of_names() {
            let had = before.get(&key).copied().unwrap_or_default();
            if is_root && (counts_anew || !matches!(key, QuotaKey::Subtree(_))) {
                let exempt = self.administrator.exempt.entry(key).or_default();
                exempt.blocks += used.blocks.saturating_sub(had.blocks);
                exempt.inodes += used.inodes.saturating_sub(had.inodes);
                continue;
            }
            if !are_limits_in_force(&self.history.tree.model, key) {
                continue;
            }
            self.counts.checks += 1;
            let limits = self.administrator.highest_limits(key);
            let exempt = self.administrator.exempt.get(&key).copied().unwrap_or_default();
            let most = |limit: Option<u64>, exempt: u64| limit.map(|limit| limit + exempt);
            let limits =
                QuotaLimits { blocks: most(limits.blocks, exempt.blocks), inodes: most(limits.inodes, exempt.inodes) };
            let is_beyond =
                |had: u64, used: u64, limit: Option<u64>| used > had && limit.is_some_and(|most| used > most);
            if is_beyond(had.blocks, used.blocks, limits.blocks) || is_beyond(had.inodes, used.inodes, limits.inodes) {
                let detail = format!("session {session} makes {key} use {used:?} instead of {had:?} under {limits:?}");
                return self.break_check("quota", detail);
            }
        }
    }

    /// Checks the accounts of the store: their use by the tree that is applied, and their limits.
    pub(super) fn check_accounts(&mut self, tree: &ModelTree) {
        let Some(node) = &self.machine.node else { return };
        let orphans = match node.store.orphans() {
            Ok(orphans) => orphans.into_iter().collect(),
            Err(error) => return self.break_check("quota", error.to_string()),
        };
        let mut expected = use_of_tree(tree, &orphans);
        self.counts.checks += 1;
        for (key, used, limits) in node.store.quotas() {
            let wanted = expected.remove(&key).unwrap_or_default();
            let known = self.administrator.limits_of(key);
            let is_bound = are_limits_in_force(tree, key);
            let wrong = match () {
                () if used != wanted => format!("{key} uses {wanted:?}, and the store counts {used:?}"),
                () if is_bound && !known.contains(&limits) => format!("{key} has {limits:?} instead of {known:?}"),
                () => continue,
            };
            return self.break_check("quota", wrong);
        }
        let is_limited = |known: &[QuotaLimits]| known.iter().all(|limits| !limits.is_none());
        let stored: BTreeSet<_> = node.store.quotas().into_iter().map(|(key, ..)| key).collect();
        let unlimited =
            self.administrator.limits.iter().find(|(key, known)| {
                !matches!(key, QuotaKey::Subtree(_)) && is_limited(known) && !stored.contains(*key)
            });
        let wrong = match (expected.first_key_value(), unlimited) {
            (Some((key, used)), _) => format!("{key} uses {used:?}, and the store counts nothing"),
            (None, Some((key, known))) => format!("{key} has no limits instead of {known:?}"),
            (None, None) => return,
        };
        self.break_check("quota", wrong);
    }
}

/// Returns whether limits of an account are in force: those of a subtree end with the directory at its top.
fn are_limits_in_force(tree: &ModelTree, key: QuotaKey) -> bool {
    match key {
        QuotaKey::Subtree(top) => tree.inodes().any(|(id, inode)| id.0 == top.0 && inode.links > 0),
        QuotaKey::User(_) | QuotaKey::Group(_) => true,
    }
}
