//! Remembers which directories the kernel was last shown at which names.
//!
//! While an arena is shared, the kernel looks a name up right before it removes or replaces what it finds there. The
//! request then names no inode. If another mount was faster, the request would remove another directory than the kernel
//! believes.

use std::collections::HashMap;

use ashlar_types::InodeId;
use parking_lot::Mutex;

/// Names that are remembered. A needed name was shown a moment before. If there are more than this, all are forgotten,
/// as if none had been shown.
const NAMES_MAX: usize = 16_384;

/// A name in a directory.
pub(crate) type EntryName = (InodeId, Box<[u8]>);

/// The directories that were shown.
#[derive(Debug, Default)]
pub(crate) struct ShownDirectories(Mutex<HashMap<EntryName, InodeId>>);

impl ShownDirectories {
    /// Records that a look-up of `name` showed the directory `found`, or no directory.
    pub(crate) fn record_lookup(&self, parent: InodeId, name: &[u8], found: Option<InodeId>) {
        let mut shown = self.0.lock();
        match found {
            None if shown.is_empty() => {}
            None => drop(shown.remove(&(parent, Box::from(name)))),
            Some(found) => {
                if shown.len() >= NAMES_MAX {
                    shown.clear();
                }
                shown.insert((parent, name.into()), found);
            }
        }
    }

    /// Returns the directory that was last shown at `name`, if one was.
    pub(crate) fn directory_at(&self, parent: InodeId, name: &[u8]) -> Option<InodeId> {
        self.0.lock().get(&(parent, Box::from(name))).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_lookup_decides_shown_directory() {
        let shown = ShownDirectories::default();
        let at = |name: &[u8]| shown.directory_at(InodeId(1), name);
        shown.record_lookup(InodeId(1), b"a", Some(InodeId(30)));
        shown.record_lookup(InodeId(2), b"a", Some(InodeId(31)));
        assert_eq!((at(b"a"), at(b"b")), (Some(InodeId(30)), None));
        shown.record_lookup(InodeId(1), b"a", Some(InodeId(32)));
        assert_eq!(at(b"a"), Some(InodeId(32)));
        shown.record_lookup(InodeId(1), b"a", None);
        assert_eq!(at(b"a"), None);
        for number in 0..2 * NAMES_MAX as u64 {
            shown.record_lookup(InodeId(number), b"a", Some(InodeId(number)));
        }
        assert!(shown.0.lock().len() <= NAMES_MAX);
    }
}
