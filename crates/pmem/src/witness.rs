//! Witnesses: tests see each operation on mapped files.
//!
//! A test mirrors the operations in [`crate::CrashTwin`]s and asks for the states that a crash at any moment leaves.
//! The module is compiled only with the feature `witness`, which only tests enable.
//!
//! A witness sees the operations of its own thread only, one after the other: flushes, fences and syncs just before
//! they take effect, stores in their order. It does not see its own operations on mappings.

use std::cell::{Cell, RefCell};

use crate::{Medium, MediumKind};

/// The device and inode number of a mapped file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileNumber {
    /// The device.
    pub device: u64,
    /// The inode's number.
    pub inode: u64,
}

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed<'a> {
    /// Bytes are stored into a file.
    Store {
        /// Which file.
        file: FileNumber,
        /// Where, in bytes from its start.
        offset: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// The write-back of lines begins.
    Flush {
        /// Which file.
        file: FileNumber,
        /// Where, in bytes from its start.
        offset: u64,
        /// How many bytes.
        length: u64,
    },
    /// All that was flushed is waited for.
    Fence,
    /// A file is synced.
    Sync {
        /// Which file.
        file: FileNumber,
    },
    /// A transaction of the metadata is about to be committed.
    TransactionBegins,
    /// It is committed.
    TransactionEnds,
}

/// The callback for each operation.
pub type Witness = Box<dyn FnMut(&Deed<'_>)>;

thread_local! {
    static WITNESS: RefCell<Option<Witness>> = const { RefCell::new(None) };
    static MEDIUM: Cell<Option<Medium>> = const { Cell::new(None) };
    static REFUSES: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` under a witness.
pub fn watch<T>(witness: Witness, work: impl FnOnce() -> T) -> T {
    let before = WITNESS.replace(Some(witness));
    let done = work();
    WITNESS.set(before);
    done
}

/// Runs `work` with this thread's arenas in memory treated as arenas on this kind of medium.
///
/// Persistent memory can't be mapped as such, so memory whose lines are flushed replaces it.
pub fn pretend<T>(kind: MediumKind, work: impl FnOnce() -> T) -> T {
    let medium = match kind {
        MediumKind::Pmem => Medium::emulated_pmem(),
        MediumKind::Memory => Medium::MEMORY,
        MediumKind::Disk => Medium::DISK,
    };
    let before = MEDIUM.replace(Some(medium));
    let done = work();
    MEDIUM.set(before);
    done
}

/// The medium that this thread pretends, if it does.
pub(crate) fn pretended() -> Option<Medium> {
    MEDIUM.get()
}

/// Runs `work` with every commit of a transaction of the metadata failing, by this thread.
pub fn refuse_transactions<T>(work: impl FnOnce() -> T) -> T {
    let before = REFUSES.replace(true);
    let done = work();
    REFUSES.set(before);
    done
}

/// Whether a transaction that this thread is about to commit must fail.
pub fn refuses_transactions() -> bool {
    REFUSES.get()
}

/// Calls this thread's witness, if it has one. The witness is taken out meanwhile, so it does not see its own
/// operations.
pub fn report_deed(deed: &Deed<'_>) {
    let Some(mut witness) = WITNESS.take() else { return };
    witness(deed);
    WITNESS.set(Some(witness));
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::{Mapping, MappingAccess, Persistent};

    #[test]
    fn witness_sees_all_operations_but_its_own() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let map = || Mapping::map(&file, 4096, MappingAccess::ReadWrite, Medium::emulated_pmem()).unwrap();
        let (mapping, other) = (map(), map());
        let seen = Rc::new(RefCell::new(Vec::new()));
        let seen_by_witness = Rc::clone(&seen);
        let witness = move |deed: &Deed<'_>| {
            other.store_u64(80, 1).unwrap();
            seen_by_witness.borrow_mut().push(match deed {
                Deed::Store { offset, bytes, .. } => format!("store {offset} {bytes:?}"),
                Deed::Flush { offset, length, .. } => format!("flush {offset} {length}"),
                Deed::Fence => "fence".to_owned(),
                Deed::Sync { .. } => "sync".to_owned(),
                Deed::TransactionBegins | Deed::TransactionEnds => "transaction".to_owned(),
            });
        };
        watch(Box::new(witness), || {
            mapping.store(3, &[7]).unwrap();
            mapping.store_flushed(5, &[8]).unwrap();
            mapping.store_u64(8, 2).unwrap();
            assert_eq!(mapping.compare_exchange_u64(8, 3, 9).unwrap(), Err(2));
            mapping.compare_exchange_u64(8, 2, 3).unwrap().unwrap();
            mapping.flush(0, 16).unwrap();
            mapping.fence();
            mapping.sync().unwrap();
        });
        mapping.store(3, &[9]).unwrap();
        let two = [2, 0, 0, 0, 0, 0, 0, 0];
        let three = [3, 0, 0, 0, 0, 0, 0, 0];
        let expected = [
            "store 3 [7]".to_owned(),
            "store 5 [8]".to_owned(),
            "flush 5 1".to_owned(),
            format!("store 8 {two:?}"),
            format!("store 8 {three:?}"),
            "flush 0 16".to_owned(),
            "fence".to_owned(),
            "sync".to_owned(),
        ];
        assert_eq!(*seen.borrow(), expected);
    }
}
