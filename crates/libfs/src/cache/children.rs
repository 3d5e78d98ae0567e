//! The cached entries of a directory.

use std::collections::{BTreeSet, HashMap, hash_map};
use std::hash::BuildHasherDefault;
use std::ops::Bound;
use std::sync::OnceLock;

use ashlar_types::{InodeHasher, Name};
use ashlar_update::Entry;

/// The cached knowledge of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CachedEntry {
    /// The entry, or that there is none.
    Known(Option<Entry>),
    /// LibFS must ask SharedFS.
    Unknown,
}

/// A name and its entry; `None` if the name is known to be absent.
type CachedName = (Name, Option<Entry>);

#[derive(Clone, Debug)]
enum CookieSlot {
    One(CachedName),
    /// Names that share a cookie, sorted.
    Many(Vec<CachedName>),
}

impl CookieSlot {
    fn names(&self) -> &[CachedName] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Many(all) => all,
        }
    }
}

/// Cached entries by cookie.
///
/// If the directory isn't known as a whole, a name without an entry is kept too: as known to be absent. Lookups are far
/// more frequent than listings, so the sorted order is built at the first listing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Children {
    slots: HashMap<u64, CookieSlot, BuildHasherDefault<InodeHasher>>,
    /// All cookies.
    order: OnceLock<BTreeSet<u64>>,
    complete: bool,
}

/// Slots to keep for new names after nearly all names were removed.
const KEPT_PLACES: usize = 64;

/// Names to keep of a directory that isn't known as a whole; beyond, digested names are dropped.
///
/// It bounds the memory that lookups in a directory with millions of entries leave behind.
pub(crate) const PARTIAL_MAX: usize = 16_384;

impl Children {
    /// Returns a new directory's entries: none, and all known.
    pub(crate) fn empty_directory() -> Self {
        Self { complete: true, ..Self::default() }
    }

    /// Returns the entries of an unknown directory: no name is known to exist or to be absent.
    pub(crate) fn unknown() -> Self {
        Self::default()
    }

    pub(crate) fn set_complete(&mut self) {
        self.complete = true;
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.complete
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn find_cached(&self, cookie: u64, name: &[u8]) -> CachedEntry {
        let names = self.slots.get(&cookie).map_or(&[][..], CookieSlot::names);
        match names.iter().find(|(found, _)| found.as_bytes() == name) {
            Some((_, entry)) => CachedEntry::Known(*entry),
            None if self.complete => CachedEntry::Known(None),
            None => CachedEntry::Unknown,
        }
    }

    /// Records that `name` leads to `entry`, or to nothing. Returns whether it may have led anywhere before.
    pub(crate) fn set_entry(&mut self, cookie: u64, name: Name, entry: Option<Entry>) -> bool {
        if self.complete && entry.is_none() {
            self.remove_name(cookie, name.as_bytes());
            return true;
        }
        let is_unknown = !self.complete;
        match self.slots.get_mut(&cookie) {
            None => {
                self.slots.insert(cookie, CookieSlot::One((name, entry)));
                if let Some(order) = self.order.get_mut() {
                    order.insert(cookie);
                }
                is_unknown
            }
            Some(CookieSlot::One((found, old))) if *found == name => std::mem::replace(old, entry).is_some(),
            Some(slot @ CookieSlot::One(..)) => {
                if let CookieSlot::One(old) = std::mem::replace(slot, CookieSlot::Many(Vec::new())) {
                    let mut all = vec![old, (name, entry)];
                    all.sort_by(|a, b| a.0.cmp(&b.0));
                    *slot = CookieSlot::Many(all);
                }
                is_unknown
            }
            Some(CookieSlot::Many(all)) => match all.iter_mut().find(|(found, _)| *found == name) {
                Some((_, old)) => std::mem::replace(old, entry).is_some(),
                None => {
                    all.push((name, entry));
                    all.sort_by(|a, b| a.0.cmp(&b.0));
                    is_unknown
                }
            },
        }
    }

    /// Removes a name from a directory that is known as a whole.
    ///
    /// `None` if the name wasn't there, or the directory isn't known as a whole.
    pub(crate) fn remove_name(&mut self, cookie: u64, name: &[u8]) -> Option<Name> {
        if !self.complete {
            return None;
        }
        let hash_map::Entry::Occupied(mut slot) = self.slots.entry(cookie) else { return None };
        let at = slot.get().names().iter().position(|(found, _)| found.as_bytes() == name)?;
        if let CookieSlot::Many(all) = slot.get_mut()
            && all.len() > 1
        {
            return Some(all.remove(at).0);
        }
        let gone = match slot.remove() {
            CookieSlot::One((gone, _)) => Some(gone),
            CookieSlot::Many(mut all) => all.pop().map(|(gone, _)| gone),
        };
        if let Some(order) = self.order.get_mut() {
            order.remove(&cookie);
        }
        if self.slots.len() < self.slots.capacity() / 8 {
            self.slots.shrink_to(self.slots.len() * 2 + KEPT_PLACES);
        }
        gone
    }

    /// Returns the known names with cookies in `after < cookie <= until`, in order.
    pub(crate) fn between(&self, after: u64, until: u64) -> impl Iterator<Item = (u64, &Name, Option<Entry>)> {
        let order = self.order.get_or_init(|| self.slots.keys().copied().collect());
        let cookies =
            order.range((Bound::Excluded(after), Bound::Unbounded)).take_while(move |&&cookie| cookie <= until);
        let slots = cookies.filter_map(|&cookie| Some((cookie, self.slots.get(&cookie)?)));
        slots.flat_map(|(cookie, slot)| slot.names().iter().map(move |(name, entry)| (cookie, name, *entry)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ashlar_types::{FileKind, InodeId};

    fn name(text: &str) -> Name {
        Name::new(text.as_bytes()).expect("a name")
    }

    fn entry(number: u64) -> Option<Entry> {
        Some(Entry { inode: InodeId(number), kind: FileKind::Regular })
    }

    #[test]
    fn names_sharing_a_cookie_stay_separate() {
        let mut children = Children::empty_directory();
        for (text, number) in [("b", 2), ("a", 1), ("c", 3)] {
            children.set_entry(7, name(text), entry(number));
        }
        children.set_entry(9, name("z"), entry(9));
        children.set_entry(7, name("b"), None);
        assert_eq!(children.find_cached(7, b"a"), CachedEntry::Known(entry(1)));
        assert_eq!(children.find_cached(7, b"b"), CachedEntry::Known(None));
        let listed: Vec<_> = children.between(0, u64::MAX).map(|(c, n, e)| (c, n.clone(), e)).collect();
        assert_eq!(listed, vec![(7, name("a"), entry(1)), (7, name("c"), entry(3)), (9, name("z"), entry(9))]);
        assert_eq!(children.between(7, u64::MAX).count(), 1);
    }

    #[test]
    fn partly_known_directory_separates_absent_from_unknown() {
        let mut children = Children::unknown();
        assert_eq!(children.find_cached(7, b"a"), CachedEntry::Unknown);
        children.set_entry(7, name("a"), None);
        assert_eq!(children.find_cached(7, b"a"), CachedEntry::Known(None));
        assert_eq!(children.find_cached(7, b"b"), CachedEntry::Unknown);
    }

    #[test]
    fn listing_after_changes_is_in_cookie_order() {
        let mut children = Children::empty_directory();
        let listed =
            |children: &Children, after| children.between(after, 900).map(|(cookie, ..)| cookie).collect::<Vec<_>>();
        for cookie in [500, 3, 1000, 77] {
            children.set_entry(cookie, name("a"), entry(cookie));
        }
        assert_eq!(listed(&children, 0), [3, 77, 500]);
        children.set_entry(77, name("a"), None);
        children.set_entry(78, name("a"), entry(1));
        assert_eq!(listed(&children, 3), [78, 500]);
        for cookie in [78, 3, 1000] {
            children.set_entry(cookie, name("a"), None);
            assert!(listed(&children, cookie).iter().all(|&found| found == 500));
        }
        children.set_entry(78, name("a"), entry(1));
        assert_eq!(listed(&children, 0), [78, 500]);
    }
}
