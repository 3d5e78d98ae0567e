//! SharedFS's hand on the board, where sessions read what others were told ([`ashlar_wire::Board`]).
//!
//! What a session is told of an inode that it only reads is posted too, if the board can read along without anything being taken from
//! anybody ([`LeaseManager::join`]). So where one process alone uses a tree, under a lease to write on all of it, nothing is posted; where many
//! short ones look at the same directories and files, as the programs of a build do, the first asks for all of them.
//!
//! - A post is true while its lease stands, which is taken like any other: by a store, with nobody to wait for.
//! - Nothing is posted while a kernel may still believe what was so before: who reads the board waits for no kernel.
//! - A post names the updates of others that it shows and that may be lost yet, and the batch with which they are committed: from then on
//!   its readers need not write down that they depend on them.
//! - When a file was last accessed is noted without a lease, so that takes its post away.
//! - Leases of the board that are a minute old go: it can't be seen whether they are of use, and they keep others from wider ones.
//! - The board lives as long as this SharedFS. Sessions that outlive it see that by their own control page, before anybody is granted anything.
//! - All sessions can read all posts, as they can read all data segments and ask for any inode: LibFS is trusted to read, not to write.
//!
//! [`LeaseManager::join`]: ashlar_lease::LeaseManager::join

use std::fs::File;
use std::io;
use std::sync::Arc;

use ashlar_lease::SlotWord;
use ashlar_pmem::{Mapping, MappingAccess, Medium};
use ashlar_types::{InodeId, SessionId};
use ashlar_wire::{BOARD_BYTES, BoardWriter, Contents, GrantReply, LeaseWord, Need, Post, ScopeKind};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::grant::{lease_word, now_us};
use crate::leasing::Ancestors;
use crate::session::read_only;
use crate::state::State;

/// Posts of one answer: what else a directory holds is posted with those that follow.
const POSTS_MAX: u64 = 1024;
/// The most entries of a directory, and pieces of a file, that are posted.
const ENTRIES_MAX: usize = 2048;
const EXTENTS_MAX: usize = 4096;

/// The board.
pub struct Board {
    /// The session of no process that holds its leases.
    session: SessionId,
    writer: BoardWriter<Arc<Mapping>>,
    /// Batches of updates that were begun to be committed: what is applied now is in the next one at the latest.
    batches: u64,
    file: Arc<File>,
}

impl Board {
    /// An empty board.
    ///
    /// # Errors
    /// Where the system gives no memory for it, or no address space.
    pub fn make(session: SessionId) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("ashlar-board", flags)?);
        file.set_len(BOARD_BYTES)?;
        let memory = Mapping::map(&file, BOARD_BYTES, MappingAccess::ReadWrite, Medium::MEMORY);
        let memory = memory.map_err(|error| io::Error::other(error.to_string()))?;
        // Whoever has a descriptor could open it again to write: from here on nobody can, but by the mapping that is there.
        let seals = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        let writer = BoardWriter::new(Arc::new(memory)).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { session, writer, batches: 0, file: Arc::new(read_only(&file)?) })
    }

    /// What sessions map.
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// A commit of all that is applied begins.
    pub fn begin_batch(&mut self) {
        self.batches += 1;
    }

    /// It has ended, and no other has begun.
    pub fn end_batch(&self) {
        self.writer.set_persistent(self.batches);
    }

    /// Takes away what stands of an inode: it's no longer the newest, though no lease says so.
    pub fn forget(&mut self, inode: InodeId) {
        self.writer.forget(inode);
    }

    /// Whether all that is needed of an inode stands there and is true.
    pub fn has(&self, inode: InodeId, need: Need) -> bool {
        self.writer.board().has(inode, need)
    }

    /// Writes a word, if it is one of the board's.
    pub fn write(&self, word: &SlotWord) {
        if word.session == self.session {
            self.writer.board().set_word(word.slot, lease_word(word), word.inode);
        }
    }
}

/// Posts what a session is told, as far as it may only read that and nobody else may write it.
pub fn post(state: &mut State, replies: &[GrantReply]) {
    let State { board: Some(board), leasing, store, counters, .. } = state else { return };
    // The files of a directory stand under one lease, so the board joins its readers once for all of them.
    let mut joined: Option<(LeaseWord, u32, SlotWord)> = None;
    let mut posts = 0;
    for reply in replies.iter().filter(|reply| may_be_posted(reply)) {
        let (told, word) = (&reply.state, LeaseWord(reply.word));
        let (contents, entries) = (told.contents.is_some(), told.entries.is_some());
        if posts == POSTS_MAX || board.has(reply.inode, Need { contents, entries, xattrs: true, children: false }) {
            continue;
        }
        let is_under_it = |joined: &(LeaseWord, u32, SlotWord)| (joined.0, joined.1) == (word, reply.slot);
        let lease = match joined.filter(|joined| word.scope() == ScopeKind::Files && is_under_it(joined)) {
            Some((_, _, lease)) => lease,
            None => match leasing.manager.join(now_us(), board.session, reply.inode, &Ancestors(store)) {
                Some(lease) => lease.word,
                None => continue,
            },
        };
        board.write(&lease);
        joined = Some((word, reply.slot, lease));
        let dependencies = leasing.manager.dependencies(board.session, reply.inode, &Ancestors(store));
        let (slot, word, mut posted) = (lease.slot, lease_word(&lease), told.clone());
        // What stands there already is as true as this.
        let before = board.writer.board().find(reply.inode, Need::default());
        if let Some(before) = before.filter(|before| (before.slot, before.word) == (slot, word)) {
            posted.contents = posted.contents.or(before.state.contents);
            posted.entries = posted.entries.or(before.state.entries);
            posted.xattrs = posted.xattrs.or(before.state.xattrs);
        }
        if posted.xattrs.is_none() {
            // Who asked has been told already.
            let Ok(xattrs) = store.xattrs(reply.inode) else { continue };
            posted.xattrs = Some(xattrs);
        }
        let post = Post { slot, word, state: posted, dependencies };
        posts += u64::from(board.writer.post(&post, reply.inode, board.batches + 1));
    }
    counters.posts += posts;
}

/// Whether it is something to read for all, and has room on the board.
fn may_be_posted(reply: &GrantReply) -> bool {
    let (told, word) = (&reply.state, LeaseWord(reply.word));
    let is_long = match (&told.entries, &told.contents) {
        (Some(entries), _) => entries.len() > ENTRIES_MAX,
        (_, Some(Contents::Extents(extents))) => extents.len() > EXTENTS_MAX,
        _ => false,
    };
    let is_read = !word.may_write() && word.scope() != ScopeKind::Subtree;
    // What has no name may be freed under leases that say nothing of it.
    is_read && reply.inode != InodeId::RENAME && told.attributes.links > 0 && !is_long
}
