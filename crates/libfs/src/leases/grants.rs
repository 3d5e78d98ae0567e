//! Requesting leases, installing granted state, and locking nodes under leases.

use std::sync::atomic::Ordering;

use ashlar_types::{
    Access, Credentials, Errno, FileKind, InodeId, LeaseMode, LeaseScope, LogPosition, Name, SessionId, WantedLease,
    name_cookie,
};
use ashlar_update::Entry;
use ashlar_wire::{Credit, GrantReply, InodeState, LeaseRequest, LeaseWord, Need, QuotaRequest, Reply, Request};
use smallvec::SmallVec;

use crate::LibFs;
use crate::api::{Outcome, check_name};
use crate::cache::children::CachedEntry;
use crate::cache::node::{GrantContext, Lease, NodeReadGuard, NodeState, NodeWriteGuard};
use crate::leases::claim::{CLAIMS_MAX, Claim, MissingGrant, Nodes};
use crate::log::update_log::leased_append::{LeasesChecked, SealRead};

/// Returns a grant's lease.
fn lease_of_grant(grant: &GrantReply) -> Lease {
    Lease { is_published: false, slot: grant.slot, word: LeaseWord(grant.word) }
}

/// Returns whether a granted lease is one to write, if that was wanted.
fn gives(want: &LeaseRequest, grant: &GrantReply) -> bool {
    !want.lease.mode.is_write() || LeaseWord(grant.word).may_write()
}

/// Why an operation must unlock its nodes, and the remedy before it tries again.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The operation failed.
    Errno(Errno),
    /// The log was sealed meanwhile: a lease may be gone.
    Sealed,
    /// The log is full.
    Full {
        /// How many bytes are lacking; 0 if another thread's record is in the way.
        needed: u64,
    },
    /// The log must be made ready up to a position.
    Unready {
        /// That position.
        upto: LogPosition,
    },
    /// SharedFS must let appends go up to a position.
    Limited {
        /// That position.
        upto: LogPosition,
    },
    /// The table of open handles must get room.
    Handles,
    /// Credit has run out, for an update that replaces existing blocks or for another one.
    Credit { want: Credit, replaces: bool },
    /// A user, group or subtree with a limit would use more than is granted so far.
    Quota(Vec<QuotaRequest>),
    /// An entry that was looked up before has changed.
    Changed,
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

/// A nameless inode that is kept open for one operation.
struct HeldOrphan<'a> {
    fs: &'a LibFs,
    id: InodeId,
}

impl Drop for HeldOrphan<'_> {
    fn drop(&mut self) {
        self.fs.close(self.id);
    }
}

/// Nodes locked for writing, in inode order, under valid leases.
pub(crate) struct LockedNodes<'a> {
    pub(crate) fs: &'a LibFs,
    /// The right to log updates.
    ///
    /// `None` if SharedFS gave leases to read only, as the user may change nothing of an inode. The operation then runs
    /// to find its error, and logs nothing.
    pub(crate) leases: Option<LeasesChecked<'a>>,
    pub(crate) nodes: Nodes,
    /// The operation acts for the super-user: the limits of users and groups do not apply.
    pub(crate) is_exempt: bool,
    /// A file whose content was changed and must be shown where it is mapped.
    pub(crate) to_show: Option<InodeId>,
    /// The names that were looked up under the locks, which the update will change.
    pub(crate) found_names: FoundNames,
}

/// The entries that an operation has found in its locked directories. A rename has two names.
pub(crate) type FoundNames = SmallVec<[FoundName; 2]>;

/// A name and the entry that was found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FoundName {
    directory: InodeId,
    /// The address of the name's bytes. The operation has them from its caller and ends before they go.
    at: *const [u8],
    pub(crate) cookie: u64,
    pub(crate) entry: Option<Entry>,
}

impl FoundName {
    pub(crate) fn is_for(&self, directory: InodeId, name: &[u8]) -> bool {
        self.directory == directory && std::ptr::eq(self.at, name)
    }
}

impl LockedNodes<'_> {
    /// Sets the operation's user.
    pub(crate) fn act_for(&mut self, user: &Credentials) {
        self.is_exempt = user.uid == 0;
    }

    /// Checks that `user` may change the names of a directory that the operation has claimed ([`Claim::to_change`]).
    ///
    /// Another session may have narrowed the rights since the check without a lock.
    pub(crate) fn check_change(&self, user: &Credentials, directory: InodeId) -> Result<(), Stop> {
        let may_change = self.fs.allows_access(self.state(directory)?, user, Access::WRITE | Access::EXECUTE);
        if may_change { Ok(()) } else { Err(Errno::EACCES.into()) }
    }

    /// Returns the state of a node that the operation has claimed.
    pub(crate) fn state(&self, id: InodeId) -> Result<&NodeState, Stop> {
        self.nodes.iter().find(|(found, _)| *found == id).map(|(_, guard)| &**guard).ok_or(Stop::Errno(Errno::EIO))
    }

    /// Returns the attributes of a node that the operation has claimed.
    pub(crate) fn inode(&self, id: InodeId) -> Result<&ashlar_types::Inode, Stop> {
        self.state(id)?.inode.as_ref().ok_or(Stop::Errno(Errno::ESTALE))
    }

    /// Checks that `name` in a claimed directory still leads where it was found to lead.
    pub(crate) fn expect_entry(
        &mut self,
        directory: InodeId,
        name: &[u8],
        expected: Option<Entry>,
    ) -> Result<(), Stop> {
        let cookie = self.fs.cookie(name);
        match self.state(directory)?.children.find_cached(cookie, name) {
            CachedEntry::Known(entry) if entry == expected => {
                self.found_names.push(FoundName { directory, at: name, cookie, entry });
                Ok(())
            }
            _ => Err(Stop::Changed),
        }
    }
}

impl LibFs {
    /// Returns a name's cookie: its place in its directory's order.
    pub(crate) fn cookie(&self, name: &[u8]) -> u64 {
        name_cookie(&self.hash_key, name)
    }

    /// Returns whether a node's lease holds now.
    pub(crate) fn holds_lease(&self, state: &NodeState, write: bool) -> bool {
        state.lease.is_some_and(|lease| self.lease_holds(lease, write))
    }

    /// Returns whether a lease holds now.
    pub(crate) fn lease_holds(&self, lease: Lease, write: bool) -> bool {
        let word = self.current_lease_word(lease);
        word.generation() == lease.word.generation() && if write { word.may_write() } else { word.may_read() }
    }

    /// Returns the lease word of a lease's slot, as it is now.
    fn current_lease_word(&self, lease: Lease) -> LeaseWord {
        match &self.grant_cache {
            Some(grant_cache) if lease.is_published => grant_cache.word(lease.slot, &self.control),
            _ => self.leases.word(lease.slot),
        }
    }

    /// Returns the parts of a claim that a node's state lacks; `None` if it has all.
    pub(crate) fn find_missing(&self, state: &NodeState, claim: &Claim) -> Option<LeaseRequest> {
        let held = state.inode.is_some() && self.holds_lease(state, claim.write);
        let covered = !claim.subtree || state.lease.is_some_and(|lease| lease.word.scope() == LeaseScope::Subtree);
        let is_directory = state.inode.as_ref().is_none_or(ashlar_types::Inode::is_directory);
        let complete = state.children.is_complete()
            || state.hides_entries
            || state.inode.as_ref().is_some_and(|inode| inode.entries > Need::ENTRIES_MAX)
            || !is_directory;
        let entries = claim.entries && !(held && complete) && !state.prefers_single_names(held);
        // Other kinds of inodes have no contents, however often LibFS requests them. The operation itself then fails.
        let has_contents = state.inode.as_ref().is_none_or(|inode| inode.kind == FileKind::Regular);
        let contents =
            claim.contents && has_contents && !(held && state.content_at(self.control.extent_version()).is_some());
        let xattrs = claim.xattrs && !(held && state.xattrs.is_some());
        if held && covered && !entries && !contents && !xattrs {
            return None;
        }
        if claim.soon_written && !claim.write {
            // A lease to write replaces this lease, and all state that is known under it.
            return self.find_missing(state, &Claim { write: true, ..*claim });
        }
        Some(LeaseRequest {
            lease: WantedLease {
                inode: claim.id,
                mode: LeaseMode::new(claim.write),
                scope: if claim.subtree { LeaseScope::Subtree } else { LeaseScope::Node },
            },
            need: Need { contents, entries, children: entries, xattrs: xattrs || !held },
        })
    }

    /// Runs an operation that changes nodes, until no other session or thread is in the way.
    ///
    /// It claims and locks the nodes, runs the operation, and repeats both after each obstacle.
    pub(crate) fn change_nodes<R>(
        &self,
        claims: &[Claim],
        operation: impl FnMut(&mut LockedNodes<'_>) -> Result<R, Stop>,
    ) -> Outcome<R> {
        self.change_nodes_holding(claims, true, operation)
    }

    /// As [`LibFs::change_nodes`]. With `holds_orphans`, it opens a nameless inode that isn't open while the operation
    /// runs.
    ///
    /// Otherwise SharedFS could free the inode, and this session would change an inode that doesn't exist.
    pub(crate) fn change_nodes_holding<R>(
        &self,
        claims: &[Claim],
        holds_orphans: bool,
        mut operation: impl FnMut(&mut LockedNodes<'_>) -> Result<R, Stop>,
    ) -> Outcome<R> {
        let mut held: SmallVec<[HeldOrphan<'_>; 1]> = SmallVec::new();
        let mut claims: SmallVec<[Claim; CLAIMS_MAX]> = claims.into();
        claims.sort_unstable_by_key(|claim| claim.id);
        claims.dedup_by_key(|claim| claim.id);
        let mut is_refused = false;
        loop {
            self.check_alive()?;
            self.forget_committed_if_due();
            let seal = SealRead::read(self);
            let mut nodes = Nodes::new();
            for claim in &claims {
                let guard = self.nodes.write(claim.id);
                if guard.is_gone {
                    return Err(Errno::ESTALE);
                }
                nodes.push((claim.id, guard));
            }
            let leases = match seal.check_claims(&claims, &nodes) {
                Ok(leases) => Some(leases).filter(|_| !is_refused),
                Err(missing) => {
                    drop(nodes);
                    if !self.acquire_leases(&missing)? {
                        is_refused = true;
                        claims.iter_mut().for_each(|claim| *claim = claim.reading());
                    }
                    continue;
                }
            };
            let is_unheld = |node: &&(InodeId, NodeWriteGuard)| node.1.is_orphan() && !self.control.has_open(node.0);
            if let Some(id) = nodes.iter().find(is_unheld).map(|node| node.0).filter(|_| holds_orphans) {
                drop(nodes);
                self.open(id)?;
                held.push(HeldOrphan { fs: self, id });
                continue;
            }
            let mut locked = LockedNodes {
                fs: self,
                leases,
                nodes,
                is_exempt: false,
                to_show: None,
                found_names: FoundNames::new(),
            };
            match operation(&mut locked) {
                Ok(result) => {
                    let to_show = locked.to_show;
                    drop(locked);
                    to_show.into_iter().for_each(|id| self.show_writes(id));
                    return Ok(result);
                }
                Err(stop) => {
                    drop(locked);
                    self.recover_from(stop)?;
                }
            }
        }
    }

    /// Locks one node for reading under a valid lease.
    pub(crate) fn view_node(&self, claim: Claim) -> Outcome<NodeReadGuard> {
        loop {
            self.check_alive()?;
            let guard = self.nodes.read(claim.id);
            if guard.is_gone {
                return Err(Errno::ESTALE);
            }
            match self.find_missing(&guard, &claim) {
                None => {
                    return Ok(guard);
                }
                Some(_) => {
                    drop(guard);
                    self.acquire_missing(&claim)?;
                }
            }
        }
    }

    /// Requests the parts that a claim lacks, unless another thread has just done so.
    ///
    /// A request for a directory also brings its entries, so one request serves all threads that wait here.
    fn acquire_missing(&self, claim: &Claim) -> Outcome<()> {
        let _one_at_a_time = self.request_locks.lock_inode(claim.id);
        let (want, revision) = {
            let guard = self.nodes.read(claim.id);
            if guard.is_gone {
                return Err(Errno::ESTALE);
            }
            match self.find_missing(&guard, claim) {
                None => return Ok(()),
                Some(want) => (want, guard.revision),
            }
        };
        self.acquire_leases(&[(want, revision)]).map(drop)
    }

    /// Applies the remedy for a stopped operation, before it tries again.
    pub(crate) fn recover_from(&self, stop: Stop) -> Outcome<()> {
        match stop {
            Stop::Errno(errno) => Err(errno),
            Stop::Sealed | Stop::Changed => Ok(()),
            Stop::Full { needed } => self.make_log_room(needed),
            Stop::Unready { upto } => self.make_ready(upto),
            Stop::Limited { upto } => self.raise_limit(upto, false),
            Stop::Handles => self.call(&Request::HandleSpace).map(drop),
            Stop::Credit { want, replaces } => self.request_credit(want, replaces),
            Stop::Quota(wants) => self.request_quota(wants),
        }
    }

    /// Requests leases and state that the grant cache lacks, and installs them. The caller checks the nodes again.
    ///
    /// `false` if SharedFS gave a lease to read for one to write: the session's user may change nothing of the inode.
    fn acquire_leases(&self, wants: &[MissingGrant]) -> Outcome<bool> {
        if let [(want, revision)] = wants
            && self.read_grant_cache(want, *revision)
        {
            return Ok(true);
        }
        self.begin_use();
        let (version, evictions) = (self.control.extent_version(), self.nodes.evictions());
        let request = Request::Acquire(wants.iter().map(|(want, _)| *want).collect());
        let (grants, applied, dependencies) = match self.call(&request) {
            Ok(Reply::Granted { grants, applied, dependencies }) => (grants, applied, dependencies),
            Ok(_) => return Err(Errno::EIO),
            // SharedFS may not have seen yet that this session made the inode.
            Err(Errno::ESTALE) if wants.iter().any(|(want, _)| self.has_changes(want.lease.inode)) => {
                return self.make_room().map(|()| true);
            }
            Err(errno) => return Err(errno),
        };
        self.log_dependencies(&dependencies)?;
        let context = GrantContext { applied, version, evictions };
        let mut behind = false;
        for (index, grant) in grants.iter().enumerate() {
            // For children that came along, no revision was known.
            behind |= !self.install_grant(grant, context, wants.get(index).map(|(_, revision)| *revision));
        }
        if behind {
            self.make_room()?;
        }
        Ok(wants.iter().zip(&grants).all(|((want, _), grant)| gives(want, grant)))
    }

    fn has_changes(&self, id: InodeId) -> bool {
        self.nodes.existing(id).is_some_and(|node| !node.read().is_clean())
    }

    /// Installs a grant, unless it is stale: revoked again, or older than this session's changes since the request.
    ///
    /// `false` if the state lacks changes that this session has logged: SharedFS must apply them first.
    fn install_grant(&self, grant: &GrantReply, context: GrantContext, revision: Option<u64>) -> bool {
        self.install_state(&mut self.nodes.write(grant.inode), lease_of_grant(grant), &grant.state, context, revision)
    }

    /// As [`LibFs::install_grant`], into a node that is locked.
    pub(crate) fn install_state(
        &self,
        state: &mut NodeState,
        lease: Lease,
        granted: &InodeState,
        context: GrantContext,
        revision: Option<u64>,
    ) -> bool {
        // A node that was dropped and made again lacks the changes that it had before. This node can't be dropped now.
        let forgotten = self.nodes.evictions() != context.evictions;
        let current = self.current_lease_word(lease).generation() == lease.word.generation();
        if forgotten || state.is_gone || !current || revision.is_some_and(|r| r != state.revision) {
            return true;
        }
        if let Some(contents) = &granted.contents {
            self.segments.mark_unverified(contents);
        }
        let held = state.inode.is_some() && self.holds_lease(state, false);
        if held && revision.is_some() {
            // State that a lease has covered without a break is the newest; only parts may be missing.
            state.lease = Some(lease);
            state.merge_state(granted, context, &|name| self.cookie(name));
        } else if held {
            // The grant came along, and no revision was known. This session's changes since the request are still
            // noted, so they are applied to the new state again. If some were forgotten meanwhile, the state is not
            // merged.
            if context.has_all_since(self.tidied.load(Ordering::Acquire)) {
                state.merge_state(granted, context, &|name| self.cookie(name));
            }
        } else {
            // The state may lack changes that this session has made and forgotten since.
            if !context.has_all_since(self.tidied.load(Ordering::Acquire)) {
                return true;
            }
            if state.changes.iter().any(|(position, _)| *position >= context.applied) {
                return false;
            }
            state.replace_state(lease, granted, context, &|name| self.cookie(name));
        }
        true
    }

    /// Logs that later updates may depend on other sessions' updates, before they can.
    pub(crate) fn log_dependencies(&self, dependencies: &[(SessionId, LogPosition)]) -> Outcome<()> {
        for &(session, position) in dependencies {
            if self.dependencies.lock().logged.get(&session).is_some_and(|newest| *newest >= position) {
                continue;
            }
            // It counts as logged only when it is: another thread goes on from `logged`. Logging it twice does no harm.
            self.log_dependency(session, position)?;
            let known = &mut *self.dependencies.lock();
            for positions in [&mut known.logged, &mut known.unsynced] {
                let newest = positions.entry(session).or_default();
                *newest = position.max(*newest);
            }
        }
        Ok(())
    }

    /// Returns the entry of `name` in a directory. With `write`, the lease also allows the next change of the
    /// directory.
    pub(crate) fn find_entry(&self, directory: InodeId, name: &[u8], write: bool) -> Outcome<Option<Entry>> {
        let found = |id| Claim { soon_written: write, ..Claim::read(id) };
        self.find_entry_if(Claim { write, ..Claim::read(directory) }, &found, name, |_| Ok(())).map(|(entry, _)| entry)
    }

    /// Returns the entry of `name` in a directory, if `check` passes, and the lease by which it is known.
    ///
    /// If that takes a request, SharedFS also sends the state of the entry's inode, as far as `found` claims it.
    pub(crate) fn find_entry_if(
        &self,
        claim: Claim,
        found: &dyn Fn(InodeId) -> Claim,
        name: &[u8],
        check: impl Fn(&NodeState) -> Outcome<()>,
    ) -> Outcome<(Option<Entry>, Option<Lease>)> {
        if let Err(errno) = check_name(name) {
            check(&*self.view_node(claim)?)?;
            return Err(errno);
        }
        let mut claim = claim.with_entries();
        let cookie = self.cookie(name);
        loop {
            self.check_alive()?;
            let (want, revision) = {
                let guard = self.nodes.read(claim.id);
                if guard.is_gone {
                    return Err(Errno::ESTALE);
                }
                let want = self.find_missing(&guard, &claim);
                if want.is_none() {
                    check(&guard)?;
                    let inode = guard.inode.as_ref().ok_or(Errno::ESTALE)?;
                    if !inode.is_directory() {
                        return Err(Errno::ENOTDIR);
                    }
                    guard.count_lookup();
                    if let CachedEntry::Known(entry) = guard.children.find_cached(cookie, name) {
                        return Ok((entry, guard.lease));
                    }
                }
                (want, guard.revision)
            };
            match want {
                None => {
                    // The lease that is there becomes a lease to write, if the operation needs one.
                    let need = Need { xattrs: true, ..Need::default() };
                    let again = LeaseRequest::on_inode(claim.id, claim.soon_written, need);
                    let changes = claim.soon_written || claim.makes;
                    self.request_entry(&claim, found, name, changes.then_some(again), revision).map(drop)?;
                }
                Some(_) => {
                    // Another thread may just have made this request; it also brings the directory's entries.
                    let _one_at_a_time = self.request_locks.lock_inode(claim.id);
                    let (want, revision) = {
                        let guard = self.nodes.read(claim.id);
                        (self.find_missing(&guard, &claim), guard.revision)
                    };
                    if let Some(within) = want
                        && !self.read_grant_cache(&within, revision)
                    {
                        let is_given = self.request_entry(&claim, found, name, want, revision)?;
                        if !is_given {
                            claim = claim.reading();
                        }
                    }
                }
            }
        }
    }

    /// Requests an entry and the state of its inode; and, if `within` is given, a lease on the directory.
    ///
    /// `false` as of [`Self::acquire_leases`], for the directory.
    fn request_entry(
        &self,
        claim: &Claim,
        found: &dyn Fn(InodeId) -> Claim,
        name: &[u8],
        within: Option<LeaseRequest>,
        revision: u64,
    ) -> Outcome<bool> {
        self.begin_use();
        let (version, evictions) = (self.control.extent_version(), self.nodes.evictions());
        let directory = claim.id;
        // The inode's state is requested as for a session that knows nothing of it.
        let want = self.find_missing(&NodeState::default(), &found(directory)).ok_or(Errno::EIO)?;
        let (write, need) = (want.lease.mode.is_write(), want.need);
        let request = Request::Lookup { directory, name: name.to_vec(), within, makes: claim.makes, write, need };
        let (entry, granted, grants, applied, dependencies) = match self.call(&request) {
            Ok(Reply::Entry { entry, directory, grants, applied, dependencies }) => {
                (entry, directory, grants, applied, dependencies)
            }
            Ok(_) => return Err(Errno::EIO),
            // SharedFS may not have seen yet that this session made the directory.
            Err(Errno::ESTALE) if self.has_changes(directory) => return self.make_room().map(|()| true),
            Err(errno) => return Err(errno),
        };
        self.log_dependencies(&dependencies)?;
        let context = GrantContext { applied, version, evictions };
        let mut behind = false;
        for grant in &grants {
            behind |= !self.install_grant(grant, context, None);
        }
        {
            let mut state = self.nodes.write(directory);
            let is_unchanged = state.revision == revision && self.nodes.evictions() == evictions;
            if let Some(granted) = &granted {
                behind |=
                    !self.install_state(&mut state, lease_of_grant(granted), &granted.state, context, Some(revision));
            }
            if is_unchanged && !behind && self.holds_lease(&state, false) && !state.children.is_complete() {
                let name = Name::new(name).map_err(|_| Errno::EINVAL)?;
                let entry = entry.map(|found| Entry { inode: found.inode, kind: found.kind });
                state.children.set_entry(self.cookie(name.as_bytes()), name, entry);
            }
        }
        if behind {
            self.make_room()?;
        }
        Ok(within.as_ref().zip(granted.as_ref()).is_none_or(|(within, granted)| gives(within, granted)))
    }
}
