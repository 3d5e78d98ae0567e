//! The parts of one inode that later records of the batch overwrite before anything reads them.

use std::collections::HashSet;

use ashlar_types::{BLOCK_BYTES, InodeId, Timestamp, blocks_for};

use super::ranges::Ranges;
use super::{Action, planted};
use crate::{Allocation, SetAttributes, Update};

/// A write of fewer bytes is not replaced by a reservation, which would cost as much.
const RESERVE_BYTES_MIN: u64 = BLOCK_BYTES;

/// The dead parts of an inode's state: later records overwrite them, whatever their values.
#[derive(Debug, Default)]
pub(super) struct Later<'a> {
    /// The time of the last change of content.
    pub(super) modified: bool,
    /// The time of the last change of attributes.
    pub(super) changed: bool,
    accessed: bool,
    /// If the access time is not dead: the time to which a later record moves it forward at least.
    accessed_least: Option<Timestamp>,
    mode: bool,
    uid: bool,
    gid: bool,
    /// Set-id bits are stripped, or the mode is set, further on. Nothing else reads them, and stripping twice is
    /// stripping once.
    strip: bool,
    xattrs: HashSet<&'a [u8]>,
    /// The next record that sets attributes, which can take an earlier one's in.
    next_set: Option<(usize, SetAttributes)>,
    /// Set-id bits are stripped before the next record that sets attributes: that reads the mode.
    strip_before_set: bool,
    /// The time of access is moved forward before the next record that sets attributes: that reads it.
    access_before_set: bool,
    content: Content,
}

/// The result for a record that sets attributes.
pub(super) enum Folded {
    /// It stays.
    Kept,
    /// All that it sets is overwritten.
    Dead,
    /// The record at this index sets it in its place, and now reads so.
    Into(usize, SetAttributes),
}

impl<'a> Later<'a> {
    /// Notes a record that sets or removes an extended attribute, and says whether it is dead.
    pub(super) fn xattr_is_dead(&mut self, name: &'a [u8], sets_mode: bool) -> bool {
        let is_dead = !self.xattrs.insert(name) && self.changed && (self.mode || !sets_mode);
        self.changed = true;
        self.mode |= sets_mode;
        self.strip |= sets_mode;
        is_dead
    }

    /// Notes a record that moves the time of access forward, and says whether it is dead.
    pub(super) fn access_is_dead(&mut self, at: Timestamp) -> bool {
        if self.accessed || self.accessed_least.is_some_and(|least| at <= least) {
            return true;
        }
        self.accessed_least = Some(at);
        self.access_before_set = true;
        false
    }

    /// Notes a record that sets attributes and stays.
    pub(super) fn record_attributes(&mut self, index: usize, set: &SetAttributes) {
        self.overwrite(set);
        self.changed = true;
        self.next_set = Some((index, *set));
        self.strip_before_set = false;
        self.access_before_set = false;
    }

    fn overwrite(&mut self, set: &SetAttributes) {
        self.mode |= set.mode.is_some();
        self.strip |= set.mode.is_some();
        self.uid |= set.uid.is_some();
        self.gid |= set.gid.is_some();
        self.accessed |= set.accessed.is_some();
        self.modified |= set.modified.is_some();
    }

    /// Records an update of attributes.
    ///
    /// It is dropped if all of it is overwritten. It is joined with the next one if nothing in between reads its
    /// values.
    pub(super) fn fold_attributes(&mut self, index: usize, set: &SetAttributes) -> Folded {
        let live = SetAttributes {
            mode: set.mode.filter(|_| !self.mode),
            uid: set.uid.filter(|_| !self.uid),
            gid: set.gid.filter(|_| !self.gid),
            accessed: set.accessed.filter(|_| !self.accessed),
            modified: set.modified.filter(|_| !self.modified),
            ..*set
        };
        let is_all_dead =
            live == SetAttributes { mode: None, uid: None, gid: None, accessed: None, modified: None, ..*set };
        if is_all_dead && self.changed {
            return Folded::Dead;
        }
        let is_read = live.mode.is_some() && self.strip_before_set || live.accessed.is_some() && self.access_before_set;
        let Some((at, next)) = self.next_set.filter(|_| !is_read || planted!(IgnoreReaders)) else {
            self.record_attributes(index, set);
            return Folded::Kept;
        };
        let joined = SetAttributes {
            mode: next.mode.or(live.mode),
            uid: next.uid.or(live.uid),
            gid: next.gid.or(live.gid),
            accessed: next.accessed.or(live.accessed),
            modified: next.modified.or(live.modified),
            ..next
        };
        self.next_set = Some((at, joined));
        self.overwrite(&live);
        Folded::Into(at, joined)
    }

    /// Returns the action for a record that changes content, and records the parts that it overwrites.
    pub(super) fn content_action(&mut self, update: &Update<'a>) -> Action<'a> {
        let (strips, action) = match *update {
            Update::Write { inode, offset, at, strip, data } => (strip, self.write(inode, offset, at, strip, data)),
            Update::Resize { size, strip, .. } => {
                let is_dead = self.attributes_are_dead(strip) && self.content.resize_is_dead(size);
                (strip, if is_dead { Action::Drop } else { Action::Keep })
            }
            Update::Allocate { how, offset, length, strip, .. } => {
                let is_dead = self.attributes_are_dead(strip) && self.content.allocation_is_dead(how, offset, length);
                (strip, if is_dead { Action::Drop } else { Action::Keep })
            }
            _ => return Action::Keep,
        };
        if action == Action::Drop {
            return action;
        }
        match (&action, update) {
            (Action::Replace(Update::Write { offset, data, .. }), _) | (_, Update::Write { offset, data, .. }) => {
                self.content.record_taken(*offset, data.len() as u64, true, true);
            }
            (_, Update::Resize { size, .. }) => self.content.record_resize(*size),
            (_, Update::Allocate { how, offset, length, .. }) => self.content.record_allocation(*how, *offset, *length),
            _ => {}
        }
        self.modified = true;
        self.changed = true;
        // Validation of the next write reads the set-id bits: only a write that strips them may replace this one.
        self.strip = strips || self.mode;
        self.strip_before_set |= strips;
        action
    }

    /// Whether the times that a change of content sets, and the bits that it may strip, are dead.
    fn attributes_are_dead(&self, strips: bool) -> bool {
        (self.modified && self.changed || planted!(IgnoreTimes)) && (self.strip || !strips || planted!(IgnoreStrip))
    }

    fn write(&mut self, inode: InodeId, offset: u64, at: Timestamp, strip: bool, data: &'a [u8]) -> Action<'a> {
        let length = data.len() as u64;
        let Some(end) = offset.checked_add(length) else { return Action::Keep };
        let content = &mut self.content;
        let (Some(first), Some(last)) = (content.bytes.first_gap(offset, end), content.bytes.last_gap_end(offset, end))
        else {
            if self.attributes_are_dead(strip) && self.content.taking_is_dead(offset, end) {
                return Action::Drop;
            }
            if length < RESERVE_BYTES_MIN {
                return Action::Keep;
            }
            return Action::Replace(Update::Allocate { inode, how: Allocation::Reserve, offset, length, strip, at });
        };
        // The rest still makes the file this long, cut or not.
        content.record_size(last);
        let kept = (first / BLOCK_BYTES, blocks_for(last));
        let is_rest_dead = (last == end || content.size_is_dead(end))
            && content.are_blocks_dead(offset / BLOCK_BYTES, kept.0)
            && content.are_blocks_dead(kept.1, blocks_for(end));
        if !is_rest_dead || (first, last) == (offset, end) {
            return Action::Keep;
        }
        let data = &data[(first - offset) as usize..(last - offset) as usize];
        Action::Replace(Update::Write { inode, offset: first, at, strip, data })
    }
}

/// The parts of a file's content that are dead.
#[derive(Debug, Default)]
struct Content {
    /// Bytes that are overwritten, or cut off.
    bytes: Ranges,
    /// Blocks that are taken up or freed further on, whether or not they are taken up here.
    blocks: Ranges,
    /// The size is dead as far as it is made this or less.
    size_upto: u64,
    /// The next record that cuts or grows the file to a size, before any other that reads the size. It reads whether
    /// the file is at least that long: then it also frees the blocks reserved behind.
    next_resize: Option<u64>,
}

impl Content {
    fn size_is_dead(&self, end: u64) -> bool {
        end <= self.size_upto || planted!(IgnoreSize)
    }

    fn are_blocks_dead(&self, first: u64, last: u64) -> bool {
        self.blocks.contains(first, last) || planted!(IgnoreBlocks)
    }

    /// Whether it leaves nothing behind that a record takes up the blocks of `offset..end` and makes the file that
    /// long.
    fn taking_is_dead(&self, offset: u64, end: u64) -> bool {
        offset == end || self.size_is_dead(end) && self.are_blocks_dead(offset / BLOCK_BYTES, blocks_for(end))
    }

    /// A record that stays makes the file `end` bytes long, or finds it longer.
    fn record_size(&mut self, end: u64) {
        match self.next_resize {
            None => self.size_upto = self.size_upto.max(end),
            // So that record truncates for sure, and frees the blocks behind.
            Some(size) if end >= size => {
                self.blocks.insert(blocks_for(size), u64::MAX);
                self.size_upto = u64::MAX;
            }
            Some(_) => {}
        }
    }

    /// A record that stays takes up the blocks of a range; it may overwrite the range's bytes, and may lengthen the
    /// file.
    fn record_taken(&mut self, offset: u64, length: u64, overwrites: bool, lengthens: bool) {
        let Some(end) = offset.checked_add(length).filter(|_| length > 0) else { return };
        if overwrites {
            self.bytes.insert(offset, end);
        }
        self.blocks.insert(offset / BLOCK_BYTES, blocks_for(end));
        if lengthens {
            self.record_size(end);
        }
    }

    fn resize_is_dead(&self, size: u64) -> bool {
        self.next_resize.is_some()
            && self.size_upto == u64::MAX
            && self.bytes.contains(size, u64::MAX)
            && self.are_blocks_dead(blocks_for(size), u64::MAX)
    }

    fn record_resize(&mut self, size: u64) {
        if self.next_resize.is_some() {
            self.record_size(size);
        }
        self.bytes.insert(size, u64::MAX);
        if size == 0 {
            // Every file is at least that long.
            self.blocks.insert(0, u64::MAX);
        }
        self.next_resize = Some(size);
        self.size_upto =
            if self.blocks.contains(blocks_for(size), u64::MAX) { u64::MAX } else { size.saturating_sub(1) };
    }

    fn allocation_is_dead(&self, how: Allocation, offset: u64, length: u64) -> bool {
        let Some(end) = offset.checked_add(length) else { return false };
        let (first, last) = (offset / BLOCK_BYTES, blocks_for(end));
        match how {
            Allocation::Reserve => self.taking_is_dead(offset, end),
            Allocation::ReserveKeepSize => self.are_blocks_dead(first, last),
            Allocation::Zero => self.bytes.contains(offset, end) && self.taking_is_dead(offset, end),
            Allocation::ZeroKeepSize => self.bytes.contains(offset, end) && self.are_blocks_dead(first, last),
            Allocation::Punch => {
                self.bytes.contains(offset, end) && self.are_blocks_dead(blocks_for(offset), end / BLOCK_BYTES)
            }
            Allocation::Collapse | Allocation::Insert => false,
        }
    }

    fn record_allocation(&mut self, how: Allocation, offset: u64, length: u64) {
        let overwrites = matches!(how, Allocation::Zero | Allocation::ZeroKeepSize);
        let lengthens = matches!(how, Allocation::Zero | Allocation::Reserve);
        match how {
            Allocation::Punch => {
                let Some(end) = offset.checked_add(length) else { return };
                self.bytes.insert(offset, end);
                self.blocks.insert(blocks_for(offset), end / BLOCK_BYTES);
            }
            // These move content, and read the size.
            Allocation::Collapse | Allocation::Insert if planted!(IgnoreMoves) => {}
            Allocation::Collapse | Allocation::Insert => *self = Self::default(),
            _ => self.record_taken(offset, length, overwrites, lengthens),
        }
    }
}
