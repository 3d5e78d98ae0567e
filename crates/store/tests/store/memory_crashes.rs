//! Crashes of a store in memory: at every commit, and at every persist point.
//!
//! A script of random updates runs on the store and on the model. After a crash the store must be, byte for byte, the
//! model after the committed updates; the check must be clean; and the rest of the script must end as without a crash.
//!
//! The tests were tried on faults planted in the store by hand, each alone, and found all: no fence before the rows, no
//! flush of checksums, rows before data, and freed blocks that are used again before their commit.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ashlar_pmem::CrashMedium;
use ashlar_store::{CommitFault, DatabaseError, MemoryArena, MemoryArenaOptions, Store, StoreError};
use ashlar_types::{InodeId, LogGeneration, LogPosition, SessionId, Timestamp};
use ashlar_update::Update;
use ashlar_update::model::{ModelTree, UpdateChoice};

use crate::comparison::compare_trees;
use crate::media::choose;

/// The only session.
pub const SESSION: SessionId = SessionId(1);
/// Few blocks, so that they are soon used again, in two segments.
const SEGMENT_BLOCKS: [u32; 2] = [20, 50];
const COMMITS: usize = 20;

/// Updates that fit, the model after each of them and before the first, and how many each commit ends with.
pub struct UpdateScript {
    updates: Vec<Update<'static>>,
    trees: Vec<ModelTree>,
    pub commits: Vec<usize>,
    last_inode: u64,
}

impl UpdateScript {
    pub fn new(mut seed: u64) -> Self {
        let mut number = |choices: usize| choose(&mut seed, choices);
        let mut tree = ModelTree::new();
        let mut script = Self {
            updates: Vec::new(),
            trees: vec![tree.clone()],
            commits: Vec::new(),
            last_inode: InodeId::FIRST_FREE.0,
        };
        for _ in 0..COMMITS {
            let end = script.updates.len() + 4 + number(16);
            while script.updates.len() < end {
                // Most of them change content.
                let kind = if number(4) > 0 { 17 + number(8) } else { number(32) } as u8;
                let mut part = || number(1 << 16) as u16;
                let choice: UpdateChoice = (kind, part(), part(), part(), part());
                let update = tree.random_update(choice, InodeId(script.last_inode));
                let Some(update) = update.filter(|update| tree.apply(update).is_ok()) else { continue };
                script.last_inode += 1;
                script.updates.push(update);
                script.trees.push(tree.clone());
            }
            script.commits.push(script.updates.len());
        }
        script
    }

    /// Applies one update.
    pub fn apply(&self, store: &mut Store, index: usize) {
        let end = LogPosition(index as u64 + 1);
        store.apply(SESSION, end, &self.updates[index], &|_| true).unwrap();
        store.release(SESSION, end);
    }

    /// Applies the updates from the committed position on, and commits where the script does.
    ///
    /// # Errors
    /// Those of a commit. The store must then be opened again.
    fn run(&self, store: &mut Store) -> Result<(), StoreError> {
        let begin = store.committed(SESSION).0 as usize;
        for index in begin..self.updates.len() {
            self.apply(store, index);
            if self.commits.contains(&(index + 1)) {
                store.commit()?;
            }
        }
        Ok(())
    }

    /// Checks that the store is what a number of updates have made, and returns the number.
    pub fn check(&self, store: &mut Store) -> usize {
        let position = store.committed(SESSION).0 as usize;
        assert!(position == 0 || self.commits.contains(&position), "{position} is within a batch");
        compare_trees(store, &self.trees[position], self.last_inode);
        let report = store.check(&mut |_| {}).unwrap();
        assert!(report.is_clean(), "{:#?}", report.problems);
        position
    }
}

fn new_arena(medium: CrashMedium) -> Arc<MemoryArena> {
    arena_of(medium, &SEGMENT_BLOCKS)
}

fn arena_of(medium: CrashMedium, segment_blocks: &[u32]) -> Arc<MemoryArena> {
    let options = MemoryArenaOptions::new(medium, segment_blocks.to_vec());
    let arena = Arc::new(MemoryArena::new(&options));
    Store::format_in_memory(&arena, Timestamp::default()).unwrap();
    let mut store = Store::open_in_memory(Arc::clone(&arena)).unwrap();
    store.set_session(SESSION, LogGeneration(1), LogPosition(0));
    store.commit().unwrap();
    arena
}

/// Goes on after a crash to the script's end.
fn finish(script: &UpdateScript, arena: Arc<MemoryArena>) -> usize {
    let mut store = Store::open_in_memory(arena).unwrap();
    let position = script.check(&mut store);
    script.run(&mut store).unwrap();
    assert_eq!(script.check(&mut store), script.updates.len());
    position
}

fn is_crashed(result: Result<(), StoreError>) -> bool {
    matches!(result, Err(StoreError::Database(DatabaseError::Crashed)))
}

/// Each commit of a script is cut or torn once, and the rest of the script runs on what that leaves.
#[test]
fn crashed_commits_leave_the_old_or_the_new_state() {
    for (seed, medium) in [(1, CrashMedium::Words), (2, CrashMedium::Pages), (3, CrashMedium::Words)] {
        let script = UpdateScript::new(seed);
        for (number, &end) in script.commits.iter().enumerate() {
            let before = number.checked_sub(1).map_or(0, |before| script.commits[before]);
            for (fault, expected) in [
                (CommitFault::Cut, before),
                (CommitFault::Torn { is_new: false }, before),
                (CommitFault::Torn { is_new: true }, end),
            ] {
                let arena = new_arena(medium);
                let first = arena.database().commits();
                let mut store = Store::open_in_memory(Arc::clone(&arena)).unwrap();
                arena.database().plan_fault(first + number as u64, fault);
                assert!(is_crashed(script.run(&mut store)), "commit {number} of script {seed} did not meet {fault:?}");
                drop(store);
                let mut crash_seed = seed ^ number as u64;
                let left = arena.after_crash(&mut |choices| choose(&mut crash_seed, choices));
                assert_eq!(finish(&script, Arc::new(left)), expected, "{fault:?} at commit {number} of script {seed}");
                // The death of the process alone takes no byte away.
                assert_eq!(finish(&script, Arc::new(arena.after_process_death())), expected);
            }
        }
    }
}

/// A crash at each flush, fence and sync, with several subsets of the unsettled words, leaves what was committed.
#[test]
fn crash_at_any_persist_point_leaves_the_committed_state() {
    for (seed, medium) in [(4, CrashMedium::Words), (5, CrashMedium::Pages)] {
        let script = Arc::new(UpdateScript::new(seed));
        let arena = new_arena(medium);
        let points = Arc::new(AtomicU64::new(0));
        let latest = Arc::new(Mutex::new(0));
        let (seen, known, committed) = (Arc::clone(&script), Arc::clone(&points), Arc::clone(&latest));
        arena.on_persist(Box::new(move |arena| {
            let point = known.fetch_add(1, Ordering::Relaxed);
            for image in 0..3 {
                let mut crash_seed = seed ^ point << 8 ^ image;
                let mut subset = |choices: usize| match image {
                    0 => 0,
                    1 => choices - 1,
                    _ => choose(&mut crash_seed, choices),
                };
                let left = Arc::new(arena.after_crash(&mut subset));
                let position = seen.check(&mut Store::open_in_memory(Arc::clone(&left)).unwrap());
                let mut committed = committed.lock().unwrap();
                assert!(position >= *committed, "{position} after {committed} were committed");
                *committed = position;
                if image == 2 && point % 16 == 0 {
                    finish(&seen, left);
                }
            }
        }));
        let mut store = Store::open_in_memory(Arc::clone(&arena)).unwrap();
        script.run(&mut store).unwrap();
        arena.stop_observing();
        assert_eq!(script.check(&mut store), script.updates.len());
        let points = points.load(Ordering::Relaxed);
        assert!(points >= COMMITS as u64, "{points} persist points");
        assert!(*latest.lock().unwrap() > 0);
    }
}

#[test]
fn full_database_keeps_the_batch_for_the_next_commit() {
    let script = UpdateScript::new(6);
    let arena = new_arena(CrashMedium::Words);
    let mut store = Store::open_in_memory(Arc::clone(&arena)).unwrap();
    let first = arena.database().commits();
    for number in (0..2 * COMMITS as u64).step_by(2) {
        arena.database().plan_fault(first + number, CommitFault::Full);
    }
    let mut refused = 0;
    for (index, update) in script.updates.iter().enumerate() {
        store.apply(SESSION, LogPosition(index as u64 + 1), update, &|_| true).unwrap();
        if !script.commits.contains(&(index + 1)) {
            continue;
        }
        let committed = store.committed(SESSION);
        if let Err(error) = store.commit() {
            assert!(matches!(error, StoreError::Database(DatabaseError::Full)), "{error}");
            assert_eq!(store.committed(SESSION), committed);
            compare_trees(&store, &script.trees[index + 1], script.last_inode);
            refused += 1;
            store.commit().unwrap();
        }
    }
    assert_eq!(refused, COMMITS);
    drop(store);
    let left = arena.after_crash(&mut |_| 0);
    assert_eq!(finish(&script, Arc::new(left)), script.updates.len());
}

#[test]
fn equal_scripts_leave_equal_bytes() {
    let run = || {
        let (script, arena) = (UpdateScript::new(7), new_arena(CrashMedium::Words));
        let mut store = Store::open_in_memory(Arc::clone(&arena)).unwrap();
        script.run(&mut store).unwrap();
        drop(store);
        let segments = arena.segments().into_iter().map(|info| arena.segment_memory(info.number).unwrap());
        let bytes: Vec<Vec<u8>> = segments.map(|memory| memory.state().current()).collect();
        (bytes, arena.database().rows())
    };
    let (one, other) = (run(), run());
    assert!(one.0 == other.0, "the segments differ");
    assert!(one.1.len() > 20);
    assert_eq!(one.1, other.1);
}

/// The blocks of a tree are elsewhere in an arena of another shape, and its dump is the same.
#[test]
fn equal_scripts_leave_equal_dumps_in_other_segments() {
    let run = |segment_blocks: &[u32]| {
        let (script, arena) = (UpdateScript::new(8), arena_of(CrashMedium::Words, segment_blocks));
        let mut store = Store::open_in_memory(Arc::clone(&arena)).unwrap();
        script.run(&mut store).unwrap();
        let mut dump = Vec::new();
        store.dump(&mut dump).unwrap();
        (String::from_utf8(dump).unwrap(), arena.database().rows())
    };
    let (one, other) = (run(&SEGMENT_BLOCKS), run(&[30, 9, 90]));
    assert_eq!(one.0, other.0);
    assert_ne!(one.1, other.1);
}
