//! Planted bugs that change what media hold.

use std::sync::Arc;

use ashlar_log::Log;
use ashlar_pmem::Persistent;
use ashlar_store::Store;
use ashlar_types::{Contents, InodeId, LogPosition};

use super::Simulation;
use crate::faults::SimBug;
use crate::journal_plants::{validate_end, write_ring};

/// The first byte of the key of an account's row.
const QUOTA_ROW: u8 = b'Q';
/// Bytes of a record before its body; the mark is first.
const HEADER_BYTES: u64 = 24;

impl Simulation {
    /// Changes what the medium keeps, if such a bug is planted.
    pub(super) fn plant_before_crash(&mut self) {
        if self.has_plant(SimBug::EarlyReuse) {
            self.plant_early_reuse();
        }
        if self.has_plant(SimBug::LostLockNotes) {
            self.plant_lost_notes();
        }
        if self.has_plant(SimBug::MiscountedUse) {
            self.plant_miscounted_use();
        }
    }

    /// Writes into a block that the applied state has freed, and the committed one has not.
    fn plant_early_reuse(&mut self) {
        let Some(node) = &self.machine.node else { return };
        let before = Arc::new(self.machine.arena.after_process_death());
        let Ok(committed) = Store::open_in_memory(before) else { return };
        let blocks = |store: &Store, inode: InodeId| match store.contents(inode) {
            Ok(Contents::Extents(extents) | Contents::Withheld(extents)) => {
                let each = |first: u64, blocks: u64| (first..first + blocks).collect::<Vec<_>>();
                extents.iter().filter_map(|e| e.address.map(|at| each(at.0, e.blocks))).flatten().collect()
            }
            _ => Vec::new(),
        };
        for inode in self.history.tree.model.inodes().map(|(id, _)| id) {
            let kept = blocks(&node.store, inode);
            let Some(freed) = blocks(&committed, inode).into_iter().find(|block| !kept.contains(block)) else {
                continue;
            };
            let Some(segment) = self.machine.arena.segments().first().copied() else { return };
            let Some(memory) = self.machine.arena.segment_memory(segment.number) else { return };
            let offset = segment.block_offset(freed as u32);
            let _ = memory.store(offset, &[0xee; 64]);
            let _ = memory.flush(offset, 64);
            memory.fence();
            let _ = memory.sync();
            return;
        }
    }

    /// Counts one block more in the committed row of an account that uses some.
    fn plant_miscounted_use(&self) {
        let database = self.machine.arena.database();
        if let Some((key, _)) = database.rows().into_iter().find(|(key, _)| key.first() == Some(&QUOTA_ROW)) {
            database.damage_row(&key, |value| value[0] = value[0].wrapping_add(1));
        }
    }

    /// Hides the last record of a log from recovery.
    pub(super) fn plant_skipped_record(&mut self) {
        for twins in self.machine.twins.values() {
            let Ok(log) = Log::open(Arc::clone(&twins.log)) else { continue };
            let (head, tail) = (log.head(), log.tail());
            let mut scanner = log.scanner(head, tail);
            let mut last = None;
            while let Some(Ok(record)) = scanner.next() {
                last = Some((record.body_position, record.end));
            }
            let Some((body, end)) = last else { continue };
            // Its mark says nothing any more, as on a medium that has never got it.
            let mark = log.parts(LogPosition(body.0 - HEADER_BYTES), end)[0].start;
            let _ = twins.log.store_u64(mark, 0);
            return;
        }
    }

    /// Takes all frames since SharedFS's start off the medium, before a loss of power.
    pub(super) fn plant_unflushed_journal(&self) {
        let journal = self.machine.node.as_ref().and_then(|node| node.journal.as_ref());
        let Some(journal) = journal.filter(|_| self.has_plant(SimBug::UnflushedJournal)) else { return };
        let ring = journal.ring();
        let first = ring.lineage().last().begin.max(ring.head());
        if first < ring.end() {
            // Without the header's first word the frame ends the journal, as on a medium that has never got it.
            write_ring(ring, ring.memory(), first, &[0; 8]);
        }
    }

    /// Makes a torn end of the node's journal valid, after a loss of power.
    pub(super) fn plant_unverified_end(&self) {
        if let Some(ring) = self.machine.ring.as_ref().filter(|_| self.has_plant(SimBug::UnverifiedEnd)) {
            validate_end(ring);
        }
    }
}
