//! Descriptors inherited at a fork, whose open files others may still serve.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use super::open_file::OPEN;
use super::{HIGHEST, INHERITED, OpenFileRef, TABLE, file, ours, table_entry};
use crate::files::shared_file::SharedFile;

/// The open files of such descriptors.
///
/// Some may be closed by now: the table of descriptors is right.
pub(crate) type Inherited = BTreeMap<i32, SharedFile>;

/// Returns whether a descriptor is the kernel's and was inherited at a fork.
///
/// Others may serve its open file.
pub(crate) fn is_inherited(descriptor: i32) -> bool {
    table_entry(descriptor).is_some_and(|entry| entry.load(Ordering::Relaxed) == INHERITED)
}

/// Returns all such descriptors.
pub(crate) fn inherited() -> impl Iterator<Item = i32> {
    let all: Vec<i32> = TABLE.lock().keys().copied().collect();
    all.into_iter().filter(|&descriptor| is_inherited(descriptor))
}

/// Returns the open file of such a descriptor.
pub(crate) fn inherited_at(descriptor: i32) -> Option<SharedFile> {
    let inherited = TABLE.lock();
    inherited.get(&descriptor).filter(|_| is_inherited(descriptor)).cloned()
}

/// Returns all such descriptors of an open file.
pub(crate) fn inherited_alike(shared: &SharedFile) -> Vec<i32> {
    let inherited = TABLE.lock();
    let alike = inherited.iter().filter(|(number, other)| is_inherited(**number) && other.is_same(shared));
    alike.map(|(number, _)| *number).collect()
}

/// Makes all such descriptors of an open file lead to a LibFS open file.
///
/// Without one, they are left to the kernel.
pub(crate) fn replace_inherited(shared: &SharedFile, file: Option<&OpenFileRef>) {
    let mut inherited = TABLE.lock();
    inherited.retain(|&descriptor, other| {
        let Some(entry) = table_entry(descriptor).filter(|_| other.is_same(shared)) else { return true };
        let number = file.map_or(0, |file| file.number);
        if entry.compare_exchange(INHERITED, number, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            && let Some(file) = file
        {
            file.description().references.fetch_add(1, Ordering::AcqRel);
            HIGHEST.fetch_max(descriptor as u32 + 1, Ordering::AcqRel);
        }
        false
    });
}

/// Returns all descriptors whose open files a new process shares.
pub(crate) fn all_shared() -> Vec<(i32, SharedFile)> {
    let own = ours(0, u32::MAX).filter_map(|number| file(number)?.shared().cloned().map(|shared| (number, shared)));
    let mut all: Vec<(i32, SharedFile)> = own.collect();
    let inherited = TABLE.lock();
    let inherited = inherited.iter().filter(|(number, _)| is_inherited(**number));
    all.extend(inherited.map(|(number, shared)| (*number, shared.clone())));
    all
}

/// Turns LibFS descriptors into inherited ones in a forked process.
///
/// Its parent's shared open files are inherited. Files that threads of the parent opened at that moment lead nowhere.
pub(crate) fn forget_ours() {
    let mut inherited = TABLE.lock();
    let mut freed = Vec::new();
    for number in ours(0, u32::MAX) {
        let Some(entry) = table_entry(number) else { continue };
        let open = &OPEN[entry.load(Ordering::Relaxed) as usize - 1];
        // SAFETY: the entry is a reference, and no other thread exists that could drop it.
        match unsafe { open.shared.load(Ordering::Relaxed).as_ref() } {
            Some(shared) => {
                inherited.insert(number, shared.clone());
                entry.store(INHERITED, Ordering::Release);
            }
            None => entry.store(0, Ordering::Release),
        }
        freed.push(open);
    }
    // An open file that a thread had in use stays, with all that it held.
    for open in freed.into_iter().filter(|open| open.place.try_lock().is_some()) {
        // The session belongs to the parent, so it gets no message. Each number counts as a reference.
        if open.references.swap(0, Ordering::AcqRel) != 0 {
            // SAFETY: there is one thread, and no entry of the table leads here any more.
            std::mem::forget(unsafe { (*open.opened.get()).take() });
            // SAFETY: as above.
            unsafe { open.end_sharing() };
        }
    }
}
