//! Work in deep directories: a path is climbed once.

use std::cell::Cell;

use ashlar_types::{InodeId, LeaseMode, LeaseScope, SessionId, WantedLease};

use crate::{Ancestry, Command, InodeHome, LeaseManager, Limits, RequestedLease};

const DEPTH: u64 = 1000;
const SESSION: SessionId = SessionId(1);

/// A directory in each directory, and files in the last one. It counts how often it is asked.
#[derive(Default)]
struct DeepTree {
    asked: Cell<u64>,
}

impl Ancestry for DeepTree {
    fn home(&self, inode: InodeId) -> InodeHome {
        self.asked.set(self.asked.get() + 1);
        let directory = (inode.0 > 1).then(|| InodeId((inode.0 - 1).min(DEPTH)));
        InodeHome { directory, is_directory: inode.0 <= DEPTH }
    }
}

/// Returns a manager whose session holds a lease on everything below this directory.
fn holding(directory: InodeId, tree: &DeepTree) -> LeaseManager {
    let mut manager = LeaseManager::new(Limits::default());
    let want = RequestedLease {
        lease: WantedLease { inode: directory, mode: LeaseMode::Write, scope: LeaseScope::Subtree },
        may_widen: false,
    };
    manager.handle_request(1, SESSION, &[want], tree).expect("queued");
    let mut is_granted = false;
    while let Some(command) = manager.poll_command(1, tree, &|_| false) {
        is_granted |= matches!(command, Command::Grant { .. });
    }
    assert!(is_granted);
    tree.asked.set(0);
    manager
}

#[test]
fn records_in_a_deep_directory_climb_once() {
    let tree = DeepTree::default();
    let manager = holding(InodeId::ROOT, &tree);
    for file in 1..=1000 {
        assert!(manager.may_write(SESSION, InodeId(DEPTH + file), &tree));
    }
    assert!(tree.asked.get() <= 2 * DEPTH + 1000, "asked {} times", tree.asked.get());
}

#[test]
fn moved_directory_is_climbed_anew() {
    /// As [`DeepTree`], with the directory in the middle moved to the root.
    struct Moved(DeepTree);

    impl Ancestry for Moved {
        fn home(&self, inode: InodeId) -> InodeHome {
            let home = self.0.home(inode);
            if inode == InodeId(DEPTH / 2) { InodeHome { directory: Some(InodeId::ROOT), ..home } } else { home }
        }
    }

    let tree = DeepTree::default();
    let (top, moved, file) = (InodeId(DEPTH / 4), InodeId(DEPTH / 2), InodeId(DEPTH + 1));
    let mut manager = holding(top, &tree);
    assert!(manager.has_below(SESSION, InodeId(DEPTH), &tree) && manager.may_write(SESSION, file, &tree));
    let after = Moved(tree);
    manager.handle_moved(moved, Some(InodeId(DEPTH / 2 - 1)), Some(InodeId::ROOT), true, &after);
    // The lease goes with the directory, and the directory no longer lies below the other one.
    assert!(manager.may_write(SESSION, file, &after));
    assert_eq!(manager.leases.governing_subtree(Some(InodeId(DEPTH)), &after), Some(moved));
}

#[test]
fn writers_and_dependencies_climb_a_deep_path_once() {
    let tree = DeepTree::default();
    let manager = holding(InodeId::ROOT, &tree);
    assert!(manager.writers(InodeId(DEPTH + 1), &tree).contains(&SESSION));
    assert!(manager.path_dependencies(SESSION, InodeId(DEPTH + 1), &tree).is_empty());
    assert!(tree.asked.get() <= 2 * DEPTH + 10, "asked {} times", tree.asked.get());
}

#[test]
fn directory_asked_for_before_it_is_made_is_governed_then() {
    /// A root with one directory, once that is made.
    struct Growing(Cell<bool>);

    impl Ancestry for Growing {
        fn home(&self, inode: InodeId) -> InodeHome {
            let is_there = inode == InodeId::ROOT || self.0.get();
            let directory = (inode != InodeId::ROOT && is_there).then_some(InodeId::ROOT);
            InodeHome { directory, is_directory: is_there }
        }
    }

    let (tree, made) = (Growing(Cell::new(false)), InodeId(9));
    let mut manager = holding(InodeId::ROOT, &DeepTree::default());
    assert!(!manager.has_below(SESSION, made, &tree));
    tree.0.set(true);
    manager.handle_made(SESSION, made, InodeId::ROOT, true, &tree);
    assert!(manager.has_below(SESSION, made, &tree));
}
