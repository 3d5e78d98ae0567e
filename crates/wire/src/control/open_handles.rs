//! Open handles in the control page: SharedFS frees no inode that stands here.

use ashlar_pmem::{PartAt, Persistent};
use ashlar_types::InodeId;

use super::{
    CONTROL_BYTES, ControlPage, ControlWord, FIRST, HANDLE_ROWS, HANDLE_SLOTS, HANDLE_SLOTS_NEAR, HANDLES, SECOND,
    SLOT_BYTES, TABLE,
};

/// Slots in which an inode's handles may be counted.
///
/// The window is short, so that SharedFS's look-ups are short. Other inodes take 64 slots in a row only when the table
/// is almost full.
const HANDLE_WINDOW: u64 = 64;

/// The number of the control page's slot that held an inode's handle last, counted from 1.
///
/// Another inode may have the slot by now. The default means that the slot is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandleSlot(pub u64);

const TABLE_PART: PartAt<CONTROL_BYTES, { HANDLE_SLOTS * SLOT_BYTES }> = PartAt::new(TABLE);

/// Returns the word of a slot that names its inode.
#[inline]
fn inode_at(slot: u64) -> ControlWord {
    HANDLE_ROWS.row(slot).word(FIRST)
}

/// Returns the word of a slot that counts its handles.
#[inline]
fn count_at(slot: u64) -> ControlWord {
    HANDLE_ROWS.row(slot).word(SECOND)
}

impl<M: Persistent> ControlPage<M> {
    /// Records one more open handle on an inode; `false` if the table is full.
    ///
    /// One writer at a time: LibFS calls this under its own lock.
    pub fn open_handle(&self, inode: InodeId) -> bool {
        self.open_handle_at(inode, HandleSlot::default()).is_some()
    }

    /// Records one more open handle, for a caller that knows the inode's last slot.
    ///
    /// Returns the slot that the handle has now. State that the caller reads after this call, such as a lease, is read
    /// when SharedFS can see the handle.
    pub fn open_handle_at(&self, inode: InodeId, HandleSlot(last): HandleSlot) -> Option<HandleSlot> {
        let slot = match last.checked_sub(1) {
            None => self.probe(inode)?,
            Some(last) if self.0.load(inode_at(last)) == inode.0 => last,
            // Another inode has taken the slot, so this inode has none.
            Some(_) => self.windows(inode).find(|slot| self.0.load(count_at(*slot)) == 0)?,
        };
        let (found, count) = (self.0.load(inode_at(slot)), self.0.load(count_at(slot)));
        // The count is stored before the inode, so that SharedFS never sees an inode without a count. The last of the
        // two stores is an exchange, which no later load overtakes.
        if found == inode.0 {
            let _ = self.0.exchange(count_at(slot), count, count + 1);
        } else {
            self.0.store(count_at(slot), count + 1);
            let _ = self.0.exchange(inode_at(slot), found, inode.0);
        }
        Some(HandleSlot(slot + 1))
    }

    /// Removes one handle, and returns whether it was the last. A slot keeps its inode until another inode takes it.
    pub fn close_handle(&self, inode: InodeId) -> bool {
        self.close_handle_at(inode, HandleSlot::default())
    }

    /// Removes one handle, for a caller that knows the inode's last slot.
    pub fn close_handle_at(&self, inode: InodeId, HandleSlot(last): HandleSlot) -> bool {
        let known = last.checked_sub(1).filter(|last| self.0.load(inode_at(*last)) == inode.0);
        let Some(slot) = known.or_else(|| self.probe(inode)) else { return false };
        let count = self.0.load(count_at(slot)).saturating_sub(1);
        self.0.store(count_at(slot), count);
        count == 0
    }

    /// Whether the session has the inode open.
    pub fn has_open(&self, inode: InodeId) -> bool {
        let is_open = |slot| self.0.load(inode_at(slot)) == inode.0 && self.0.load(count_at(slot)) > 0;
        self.probe(inode).is_some_and(is_open)
    }

    /// Whether all slots for handles are in use.
    pub fn has_all_handle_slots(&self) -> bool {
        self.0.load(HANDLES) != HANDLE_SLOTS_NEAR
    }

    /// Lets all slots for handles be used, after [`super::CONTROL_ROOM_FAR`] has got room. SharedFS calls this.
    pub fn set_all_handle_slots(&self) {
        self.0.store(HANDLES, HANDLE_SLOTS);
    }

    /// Returns all inodes that the session has open.
    pub fn open_inodes(&self) -> Vec<InodeId> {
        let slots = if self.has_all_handle_slots() { HANDLE_SLOTS } else { HANDLE_SLOTS_NEAR };
        let mut table = vec![0; (slots * SLOT_BYTES) as usize];
        // A word that changes meanwhile is the old one or the new one.
        self.0.load_bytes(TABLE_PART, &mut table);
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
        let slots = table.chunks_exact(SLOT_BYTES as usize).map(|slot| slot.split_at(8));
        slots.filter(|(_, count)| word(count) > 0).map(|(inode, _)| InodeId(word(inode))).collect()
    }

    /// Returns the numbers of the slots at which an inode may stand, in the windows that its hash names.
    fn windows(&self, inode: InodeId) -> impl Iterator<Item = u64> {
        let start = inode.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48;
        let window = |first: u64, slots: u64| (0..HANDLE_WINDOW).map(move |step| first + (start + step) % slots);
        let near = window(0, HANDLE_SLOTS_NEAR);
        let far = self.has_all_handle_slots().then(|| window(HANDLE_SLOTS_NEAR, HANDLE_SLOTS - HANDLE_SLOTS_NEAR));
        near.chain(far.into_iter().flatten())
    }

    /// Returns the inode's slot, or a free one. An inode has at most one slot.
    fn probe(&self, inode: InodeId) -> Option<u64> {
        let mut free = None;
        for slot in self.windows(inode) {
            match self.0.load(inode_at(slot)) {
                found if found == inode.0 => return Some(slot),
                // This slot was never used. Each inode took the first free slot, so none stands behind it.
                0 => return Some(free.unwrap_or(slot)),
                _ => {}
            }
            if free.is_none() && self.0.load(count_at(slot)) == 0 {
                free = Some(slot);
            }
        }
        free
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use ashlar_pmem::{Mapping, MappingAccess};
    use ashlar_types::SessionId;

    use super::super::tests::page;
    use super::*;

    #[test]
    fn far_handle_slots_are_used_once_they_have_room() {
        const MANY: u64 = 5000;
        let page = page(MappingAccess::ReadWrite);
        page.format(SessionId(7));
        let is_open = |page: &ControlPage<Mapping>, range: Range<u64>| {
            let mut open = page.open_inodes();
            open.sort_unstable();
            assert!(open.into_iter().eq(range.clone().map(InodeId)));
            (1..MANY).all(|inode| page.has_open(InodeId(inode)) == range.contains(&inode))
        };
        let near = (1..MANY).find(|inode| !page.open_handle(InodeId(*inode))).expect("there is an end");
        assert!(
            (64..=HANDLE_SLOTS_NEAR + 1).contains(&near) && !page.has_all_handle_slots() && is_open(&page, 1..near)
        );
        page.set_all_handle_slots();
        assert!((near..MANY).all(|inode| page.open_handle(InodeId(inode))) && is_open(&page, 1..MANY));
        // Inodes that are opened again keep their slots, even if nearer slots have become free.
        assert!((1..near).all(|inode| page.close_handle(InodeId(inode))) && is_open(&page, near..MANY));
        assert!((near..MANY).all(|inode| page.open_handle(InodeId(inode)) && !page.close_handle(InodeId(inode))));
        assert!((near..MANY).all(|inode| page.close_handle(InodeId(inode))) && is_open(&page, 1..1));
    }

    #[test]
    fn handle_moves_when_another_inode_took_its_slot() {
        let page = page(MappingAccess::ReadWrite);
        page.format(SessionId(7));
        let open = |inode: u64, known| page.open_handle_at(InodeId(inode), known).expect("room");
        let first = open(1, HandleSlot::default());
        assert_eq!(open(1, first), first);
        assert!(!page.close_handle_at(InodeId(1), first) && page.close_handle_at(InodeId(1), first));
        // Another inode with the same slot takes it, and then the first inode moves.
        let other = (2..).find(|&inode| page.probe(InodeId(inode)) == Some(first.0 - 1)).expect("one of them");
        assert_eq!(open(other, HandleSlot::default()), first);
        let moved = open(1, first);
        assert_ne!(moved, first);
        assert!(page.close_handle_at(InodeId(1), first), "found where it is");
        assert!(!page.has_open(InodeId(1)) && page.has_open(InodeId(other)));
        assert_eq!(open(1, moved), moved);
    }
}
