//! Arbitrary records of a session, validated and applied as SharedFS does it.
//!
//! A case is read from bytes (`script`). They say which user the session acts for, which leases it holds, which files
//! it has open, and which records it logs. The records go through a real log, the real validation and the real store
//! (`bench`, `tree`). Leases may be such as SharedFS grants no such user: each check must hold by itself.
//!
//! Checked after each record:
//! * Nothing panics, and the store is sound.
//! * A refused record changes nothing.
//! * An accepted record changes only inodes under a write lease. Times of access and the release of an orphan need no
//!   lease.
//! * A user's record changes no owner, no attributes of another user's inode, and nothing that the user can't reach.
//!
//! And at the end: the lease manager's tables agree. No file's content changed without its attributes. In some cases,
//! all is committed, and the check is clean.
//!
//! The checks were tried on faults planted in the validation by hand, each alone. A few thousand cases caught records
//! that need no lease, that write what the user may not, that change others' attributes, that make inodes of
//! other users or of numbers that were not granted, and that reach below private directories; and a panic.

mod bench;
mod script;
mod tree;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;

use ashlar_types::{FileKind, Inode, InodeId, MODE_SETGID, MODE_SETUID, NEVER_NAMED, WHITEOUT_DEVICE};
use ashlar_update::Update;

use self::bench::ArenaBench;
use self::script::{RawRecord, RecordScript};
use self::tree::{ANN, BOB, NEW_INODES, TEAM, TreeInodes, WRITER};
use crate::Node;
use crate::digest::commit::commit;
use crate::leases::leasing::Ancestors;
use crate::records::apply::Slice;
use crate::records::validate::{Leases, Violation};

/// Kinds of records, with the number 0 for all that are none.
const KINDS: usize = 16;
/// One case in so many ends with a commit and a check of the arena.
///
/// That takes longer than some ten cases, so no byte alone decides on it: a fuzzer would change all others around it.
const CHECKED_IN: u64 = 128;

/// Records by kind: accepted and refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordCounts {
    /// Accepted records.
    pub accepted: [u64; KINDS],
    /// Refused records.
    pub refused: [u64; KINDS],
}

impl RecordCounts {
    /// Adds other counts.
    pub fn add(&mut self, other: &Self) {
        let add = |these: &mut [u64], more: &[u64]| these.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
        add(&mut self.accepted, &other.accepted);
        add(&mut self.refused, &other.refused);
    }

    fn record(&mut self, kind: u8, is_accepted: bool) {
        let kind = if usize::from(kind) < KINDS { usize::from(kind) } else { 0 };
        let counts = if is_accepted { &mut self.accepted } else { &mut self.refused };
        counts[kind] += 1;
    }
}

thread_local! {
    static BENCH: RefCell<Option<ArenaBench>> = const { RefCell::new(None) };
}

/// Runs the case that the bytes describe.
///
/// # Panics
/// If SharedFS does, or if one of this module's promises is broken.
pub fn validate_records(bytes: &[u8]) -> RecordCounts {
    BENCH.with_borrow_mut(|kept| {
        let bench = kept.get_or_insert_with(ArenaBench::make);
        let mut script = RecordScript::new(bytes);
        let mut hasher = DefaultHasher::new();
        hasher.write(bytes);
        let is_checked = hasher.finish() % CHECKED_IN == 0;
        let (state, tree) = bench.begin(&mut script);
        let mut case = RecordCase { state, tree, counts: RecordCounts::default() };
        while !script.is_over() && case.step(&mut script, bench) {}
        case.check_end(bench);
        if is_checked {
            case.check_arena();
        }
        bench.end(case.state);
        if is_checked {
            // The commit stays, and the next case needs the tree as it was.
            *kept = None;
        }
        case.counts
    })
}

/// An inode before a record, and whether the session holds a write lease that covers it.
type WatchedInodes = BTreeMap<InodeId, (Option<Inode>, bool)>;

struct RecordCase {
    state: Node,
    tree: TreeInodes,
    counts: RecordCounts,
}

impl RecordCase {
    fn inode(&self, id: InodeId) -> Option<Inode> {
        self.state.store.inode(id).expect("a sound store")
    }

    fn look(&self) -> WatchedInodes {
        let leases = self.state.leasing.leases_of(WRITER, &self.state.store);
        self.tree.watched().map(|id| (id, (self.inode(id), leases.may_write(id)))).collect()
    }

    /// Logs some records and applies them; returns whether the session goes on.
    fn step(&mut self, script: &mut RecordScript<'_>, bench: &ArenaBench) -> bool {
        // Several records are coalesced and joined.
        let count = if script.is_one_in(4) { 1 + script.byte() % 6 } else { 1 };
        let before = self.look();
        let log = Arc::clone(&self.state.sessions[&WRITER].log);
        let mut logged = Vec::new();
        for _ in 0..count {
            let record = script.record(&self.state, &self.tree);
            let Ok(appended) = log.append(log.seal_count(), record.kind, &[&record.body]) else { break };
            logged.push((record, appended.end));
        }
        let Some((_, end)) = logged.last() else { return false };
        let is_over = self.state.apply(WRITER, *end, Slice::All);
        assert!(is_over, "the log was not applied to its end");
        let applied = self.state.store.applied(WRITER);
        let first_refused = logged.iter().position(|(_, end)| *end > applied).unwrap_or(logged.len());
        for (index, (record, _)) in logged.iter().enumerate().take(first_refused + 1) {
            self.counts.record(record.kind, index < first_refused);
        }
        let after = self.look();
        match (&logged[..], first_refused) {
            (_, 0) => {
                let is_same = before.iter().all(|(id, (inode, _))| after[id].0 == *inode);
                assert!(is_same, "a refused record changed something: {:?}", logged[0].0);
            }
            ([(record, _)], _) => self.check_accepted(record, &before, &after),
            _ => {}
        }
        self.check_user(&before, &after, bench);
        self.is_sound() && first_refused == logged.len()
    }

    /// Returns whether the session goes on, and panics if SharedFS itself failed.
    fn is_sound(&self) -> bool {
        let failure = self.state.failure.as_ref();
        assert!(failure.is_none(), "the shared area failed: {failure:?}");
        self.state.store.check_sound().expect("a sound store");
        let Some(reason) = &self.state.sessions[&WRITER].fenced else { return true };
        assert_ne!(*reason, Violation::Panicked.to_string());
        // The log is as the session wrote it, and its credit covers each record.
        assert!(!reason.starts_with(&Violation::Log(String::new()).to_string()), "{reason}");
        false
    }

    /// Checks that an accepted record changed only inodes under a write lease.
    fn check_accepted(&self, record: &RawRecord, before: &WatchedInodes, after: &WatchedInodes) {
        let update = Update::decode(record.kind, &record.body).expect("it was accepted");
        for (id, (was, may_write)) in before {
            let Some(was) = was.as_ref().filter(|was| after[id].0.as_ref() != Some(was)) else { continue };
            let is_free = match (&update, &after[id].0) {
                (Update::Accessed { inode, .. }, Some(is)) => {
                    inode == id && *was == Inode { accessed: was.accessed, ..is.clone() }
                }
                (Update::Release { inode }, None) => inode == id && was.links == 0,
                _ => false,
            };
            assert!(is_free || *may_write, "{update:?} changed inode {id} without a lease");
        }
        let made = match &update {
            Update::Create(create) => Some(create.inode),
            Update::Rename(rename) => rename.whiteout.map(|whiteout| whiteout.inode),
            _ => None,
        };
        let granted = self.tree.first_new.0..self.tree.first_new.0 + NEW_INODES;
        assert!(made.is_none_or(|made| granted.contains(&made.0)), "{update:?} made an inode of a number not granted");
    }

    /// Checks what records of an ordinary user may never do.
    fn check_user(&self, before: &WatchedInodes, after: &WatchedInodes, bench: &ArenaBench) {
        let user = self.tree.user;
        if user == 0 {
            return;
        }
        for id in bench.hidden_from(user) {
            assert_eq!(before[id].0, after[id].0, "user {user} changed inode {id}, out of its reach");
        }
        for (id, (is, _)) in after {
            match (&before[id].0, is) {
                (Some(was), Some(is)) => check_kept(user, *id, was, is),
                (None, Some(is)) => self.check_made(*id, is),
                _ => {}
            }
        }
    }

    /// Checks a new inode of an ordinary user. Later records of its batch may have changed it.
    fn check_made(&self, id: InodeId, made: &Inode) {
        let user = self.tree.user;
        assert_eq!(made.uid, user, "user {user} made inode {id} for another user");
        let is_device = matches!(made.kind, FileKind::BlockDevice)
            || made.kind == FileKind::CharDevice && device(made) != WHITEOUT_DEVICE;
        assert!(!is_device, "user {user} made inode {id}, a device");
        let lends_group = made.kind != FileKind::Directory && made.mode & MODE_SETGID != 0 && made.mode & 0o010 != 0;
        assert!(!lends_group || is_member(user, made.gid), "user {user} made inode {id}, which lends a group");
    }

    fn check_end(&self, bench: &ArenaBench) {
        let checked = self.state.leasing.manager.check(&Ancestors(&self.state.store));
        checked.unwrap_or_else(|broken| panic!("{broken}"));
        let changed = bench.changed_content(&self.state);
        assert_eq!(changed, None, "a file's content changed without its attributes");
    }

    /// Commits all, and checks the arena.
    fn check_arena(&mut self) {
        commit(&mut self.state).expect("committed");
        let report = self.state.store.check(&mut |_| {}).expect("checked");
        assert!(report.is_clean(), "{:?}", report.problems);
    }
}

/// Returns an inode's device number, without the mark of a file that has no name yet.
fn device(inode: &Inode) -> u64 {
    inode.device & !NEVER_NAMED
}

fn is_member(user: u32, group: u32) -> bool {
    group == user || user == ANN && group == TEAM
}

/// Checks an inode that was there before records of an ordinary user.
fn check_kept(user: u32, id: InodeId, was: &Inode, is: &Inode) {
    assert!([ANN, BOB].contains(&user));
    let kept = |inode: &Inode| (inode.kind, inode.uid, inode.quota, device(inode), inode.born, inode.target.clone());
    assert_eq!(kept(was), kept(is), "user {user} changed inode {id}");
    assert!(is.gid == was.gid || was.uid == user && is_member(user, is.gid), "user {user} changed inode {id}'s group");
    if was.uid != user && was.mode & 0o022 == 0 {
        let kept = |inode: &Inode| (inode.size, inode.blocks, inode.entries, inode.modified);
        assert_eq!(kept(was), kept(is), "user {user} changed the content of inode {id}");
    }
    let rights_lost = was.mode & !is.mode;
    let is_stripped = is.mode & !was.mode == 0 && rights_lost & !(MODE_SETUID | MODE_SETGID) == 0;
    assert!(
        was.uid == user || is_stripped,
        "user {user} changed inode {id}'s mode from {:o} to {:o}",
        was.mode,
        is.mode
    );
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use ashlar_tests::random::Random;
    use ashlar_update::UpdateKind;

    use super::*;

    /// Cases without the variable.
    const CASES: u64 = 4000;
    /// The longest script, in bytes.
    const SCRIPT_BYTES_MAX: u64 = 400;

    fn number_of(name: &str, default: u64) -> u64 {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
    }

    /// `ASHLAR_RECORD_CASES` sets the number of cases, `ASHLAR_RECORD_SEED` the first of them.
    #[test]
    fn arbitrary_records_change_only_what_they_may() {
        let (first, cases) = (number_of("ASHLAR_RECORD_SEED", 1), number_of("ASHLAR_RECORD_CASES", CASES));
        let mut counts = RecordCounts::default();
        for seed in first..first + cases {
            let mut random = Random::new(seed);
            let length = 10 + random.below(SCRIPT_BYTES_MAX - 10) as usize;
            let bytes = random.bytes(length);
            let run = catch_unwind(AssertUnwindSafe(|| validate_records(&bytes)));
            counts.add(&run.unwrap_or_else(|_| panic!("seed {seed}")));
        }
        println!("{cases} cases from {first} on: {counts:?}");
        if cases >= CASES {
            let kinds = UpdateKind::Write as usize..=UpdateKind::SetQuota as usize;
            assert!(kinds.clone().all(|kind| counts.accepted[kind] > 0), "{counts:?}");
            assert!(kinds.clone().all(|kind| counts.refused[kind] > 0), "{counts:?}");
        }
    }
}
