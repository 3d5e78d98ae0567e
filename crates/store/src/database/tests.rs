use std::path::Path;
use std::sync::Arc;

use ashlar_pmem::{Arena, ArenaOptions};
use proptest::prelude::*;

use super::layout::{PAGE_BYTES, TableName};
use super::*;
use crate::metadata::rows::kind;

type OwnedRow = (Vec<u8>, Vec<u8>);

/// One change: which key, and the value's length; an even number of these deletes the row.
type RowChange = (u8, u8, u8, u16);

/// A transaction's changes, and how it ends: 0 drops it, 1 meets a full database, all others commit.
type RowBatch = (Vec<RowChange>, u8);

fn lmdb() -> (tempfile::TempDir, Database) {
    let memory = Path::new("/dev/shm");
    let directory = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
    let options = ArenaOptions::new(16 << 20);
    let arena = Arena::create(&directory.path().join("arena"), &options).unwrap();
    let database = Database::open(&arena).unwrap();
    (directory, database)
}

fn memory() -> (Arc<MemoryDatabase>, Database) {
    let memory = Arc::new(MemoryDatabase::new());
    (Arc::clone(&memory), Database::Memory(memory))
}

fn all(snapshot: &Snapshot) -> Vec<OwnedRow> {
    snapshot.all().unwrap().map(Result::unwrap).map(|(key, value)| (key.to_vec(), value.to_vec())).collect()
}

fn key((table, first, second, _): RowChange) -> Vec<u8> {
    let (first, second) = (u64::from(first % 24), u64::from(second % 5));
    match table % 6 {
        0 | 1 => rows::key1(kind::INODE, first * 256 + second).to_vec(),
        2 => rows::EntryKey::new(first % 3, first, &b"name"[..second as usize]).as_bytes().to_vec(),
        3 => rows::key2(kind::CHUNK, first % 4, first * 8 + second).to_vec(),
        4 => rows::key1(kind::ORPHAN, first).to_vec(),
        _ => vec![kind::COUNTERS],
    }
}

fn write(database: &Database, (changes, end): &RowBatch) {
    let mut transaction = database.write(changes.len() as u64, 1 << 20).unwrap();
    let mut changes = changes.clone();
    changes.sort_by_key(|change| key(*change));
    changes.dedup_by_key(|change| key(*change));
    for change in changes {
        let (key, length) = (key(change), usize::from(change.3 % 700));
        if change.3 % 2 == 0 {
            transaction.delete(&key).unwrap();
            assert_eq!(transaction.get(&key).unwrap(), None);
            continue;
        }
        let value = vec![length as u8; length];
        if TableName::of(&key) == TableName::Inodes {
            transaction.value.extend_from_slice(&value);
            transaction.put_inode(&key).unwrap();
            assert!(transaction.value.is_empty());
        } else {
            transaction.put(&key, &value).unwrap();
        }
        assert_eq!(transaction.get(&key).unwrap(), Some(&*value));
    }
    match end % 8 {
        0 => drop(transaction),
        1 => match database {
            Database::Lmdb(_) => drop(transaction),
            Database::Memory(memory) => {
                memory.plan_fault(memory.commits(), CommitFault::Full);
                let refused = transaction.commit();
                assert!(matches!(refused, Err(StoreError::Database(DatabaseError::Full))), "{refused:?}");
            }
        },
        _ => transaction.commit().unwrap(),
    }
}

/// Compares all reads of two snapshots.
fn compare(one: &Snapshot, other: &Snapshot) {
    assert_eq!(all(one), all(other));
    assert_eq!((one.rows().unwrap(), one.inode_end().unwrap()), (other.rows().unwrap(), other.inode_end().unwrap()));
    for number in 0..=255 {
        let change = (number, number / 6, number / 30, 1);
        let key = key(change);
        assert_eq!(one.get(&key).unwrap(), other.get(&key).unwrap());
        let read = |snapshot: &Snapshot, key: &[u8], is_prefix| -> Vec<OwnedRow> {
            let owned = |row: Row<'_>| row.map(|(key, value)| (key.to_vec(), value.to_vec())).unwrap();
            if is_prefix {
                snapshot.prefix(key).unwrap().map(owned).collect()
            } else {
                snapshot.from(key).unwrap().map(owned).collect()
            }
        };
        assert_eq!(read(one, &key, false), read(other, &key, false));
        for length in 1..=key.len().min(9) {
            assert_eq!(read(one, &key[..length], true), read(other, &key[..length], true));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// The same transactions leave the same rows in LMDB and in its twin, and no snapshot ever changes.
    #[test]
    fn same_batches_leave_same_rows(
        batches in prop::collection::vec((prop::collection::vec(any::<RowChange>(), 0..120), any::<u8>()), 1..12),
    ) {
        let ((_directory, lmdb), (_, memory)) = (lmdb(), memory());
        let mut older = Vec::new();
        for batch in &batches {
            let before = [lmdb.snapshot().unwrap(), memory.snapshot().unwrap()];
            older.push((all(&before[0]), before));
            write(&lmdb, batch);
            write(&memory, batch);
            compare(&lmdb.snapshot().unwrap(), &memory.snapshot().unwrap());
        }
        for (rows, snapshots) in &older {
            assert!(snapshots.iter().all(|snapshot| all(snapshot) == *rows));
        }
    }
}

fn put_all(database: &Database, rows: std::ops::Range<u64>) -> Result<(), StoreError> {
    let mut transaction = database.write(rows.end - rows.start, 1 << 20)?;
    for number in rows {
        transaction.put(&rows::key1(kind::ORPHAN, number), &[7; 100])?;
    }
    transaction.commit()
}

#[test]
fn crashed_commit_leaves_one_state_whole() {
    for (fault, left) in
        [(CommitFault::Cut, 300), (CommitFault::Torn { is_new: false }, 300), (CommitFault::Torn { is_new: true }, 700)]
    {
        let (memory, database) = memory();
        put_all(&database, 0..300).unwrap();
        let before = database.snapshot().unwrap();
        memory.plan_fault(memory.commits(), fault);
        let crashed = put_all(&database, 300..700);
        assert!(matches!(crashed, Err(StoreError::Database(DatabaseError::Crashed))), "{fault:?}: {crashed:?}");
        assert!(memory.is_crashed() && database.snapshot().is_err() && put_all(&database, 0..1).is_err());
        assert_eq!(before.rows().unwrap(), 300);
        let survivor = Database::Memory(Arc::new(memory.after_crash(&mut |_| 0)));
        assert_eq!(survivor.snapshot().unwrap().rows().unwrap(), left, "{fault:?}");
        put_all(&survivor, 300..700).unwrap();
        assert_eq!(survivor.snapshot().unwrap().rows().unwrap(), 700);
    }
}

#[test]
fn full_database_keeps_its_state_and_goes_on() {
    let (memory, database) = memory();
    put_all(&database, 0..10).unwrap();
    memory.set_limit_bytes(4 * PAGE_BYTES);
    let full = put_all(&database, 10..500);
    assert!(matches!(full, Err(StoreError::Database(DatabaseError::Full))), "{full:?}");
    let snapshot = database.snapshot().unwrap();
    assert_eq!((snapshot.rows().unwrap(), snapshot.used_bytes().unwrap()), (10, PAGE_BYTES));
    put_all(&database, 10..20).unwrap();
    memory.set_limit_bytes(u64::MAX);
    put_all(&database, 10..500).unwrap();
    assert_eq!(database.snapshot().unwrap().rows().unwrap(), 500);
}

#[test]
fn planned_fault_strikes_its_commit_only() {
    let (memory, database) = memory();
    memory.plan_fault(2, CommitFault::Full);
    let failed: Vec<bool> = (0..5).map(|number| put_all(&database, number..number + 1).is_err()).collect();
    assert_eq!(failed, [false, false, true, false, false]);
    assert_eq!((memory.commits(), database.snapshot().unwrap().rows().unwrap()), (5, 4));
}
