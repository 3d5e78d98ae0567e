//! The memory twin of LMDB: ordered rows on pages that states share.
//!
//! A state is three tables. A table is a list of pages, and a transaction copies only the pages that it changes, so a
//! snapshot costs one pointer for each page. There is no clock, no randomness and no file: equal transactions leave
//! equal states.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::StoreError;
use crate::database::fault::{CommitFault, DatabaseError};
use crate::database::layout::{KEY_BYTES_MAX, MAP_BYTES_MIN, PAGE_BYTES, TableName};

/// Rows on a page: few enough to copy one for a single change, and many enough for short lists of pages.
const PAGE_ROWS_MAX: usize = 32;
/// Bytes that LMDB takes for a row beside its key and value.
const ROW_HEAD_BYTES: u64 = 10;

#[derive(Clone, Debug)]
struct MemoryRow {
    key: Arc<[u8]>,
    value: Arc<[u8]>,
}

impl MemoryRow {
    fn bytes(&self) -> u64 {
        ROW_HEAD_BYTES + self.key.len() as u64 + self.value.len() as u64
    }

    fn parts(&self) -> (&[u8], &[u8]) {
        (&self.key, &self.value)
    }
}

/// Rows in key order. No page is empty.
#[derive(Clone, Debug, Default)]
struct RowTable {
    pages: Vec<Arc<Vec<MemoryRow>>>,
    rows: u64,
    bytes: u64,
}

impl RowTable {
    /// Returns the page that holds the key if any does: the last one that begins at or before it.
    fn page_of(&self, key: &[u8]) -> usize {
        self.pages.partition_point(|page| *page[0].key <= *key).saturating_sub(1)
    }

    fn get(&self, key: &[u8]) -> Option<&[u8]> {
        let page = self.pages.get(self.page_of(key))?;
        let index = page.binary_search_by(|row| (*row.key).cmp(key)).ok()?;
        Some(&page[index].value)
    }

    fn from<'a>(&'a self, from: &'a [u8]) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
        self.pages[self.page_of(from)..]
            .iter()
            .flat_map(|page| page.iter())
            .skip_while(move |row| *row.key < *from)
            .map(MemoryRow::parts)
    }

    fn all(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.pages.iter().flat_map(|page| page.iter()).map(MemoryRow::parts)
    }

    fn last_key(&self) -> Option<&[u8]> {
        Some(&self.pages.last()?.last()?.key)
    }

    fn put(&mut self, key: &[u8], value: &[u8]) {
        let row = MemoryRow { key: key.into(), value: value.into() };
        let number = self.page_of(key);
        self.bytes += row.bytes();
        let Some(page) = self.pages.get_mut(number).map(Arc::make_mut) else {
            self.pages.push(Arc::new(vec![row]));
            self.rows = 1;
            return;
        };
        match page.binary_search_by(|row| (*row.key).cmp(key)) {
            Ok(index) => {
                let old = std::mem::replace(&mut page[index], row);
                self.bytes -= old.bytes();
            }
            Err(index) => {
                page.insert(index, row);
                self.rows += 1;
                if page.len() > PAGE_ROWS_MAX {
                    let upper = page.split_off(PAGE_ROWS_MAX / 2);
                    self.pages.insert(number + 1, Arc::new(upper));
                }
            }
        }
    }

    fn delete(&mut self, key: &[u8]) {
        let number = self.page_of(key);
        let Some(page) = self.pages.get_mut(number) else { return };
        let Ok(index) = page.binary_search_by(|row| (*row.key).cmp(key)) else { return };
        let page = Arc::make_mut(page);
        let old = page.remove(index);
        self.rows -= 1;
        self.bytes -= old.bytes();
        if page.is_empty() {
            self.pages.remove(number);
        }
    }
}

/// One state of the whole database.
#[derive(Clone, Debug, Default)]
struct RowTables {
    inodes: RowTable,
    entries: RowTable,
    rows: RowTable,
}

impl RowTables {
    fn of(&self, key: &[u8]) -> &RowTable {
        match TableName::of(key) {
            TableName::Inodes => &self.inodes,
            TableName::Entries => &self.entries,
            TableName::Rows => &self.rows,
        }
    }

    fn of_mut(&mut self, key: &[u8]) -> &mut RowTable {
        match TableName::of(key) {
            TableName::Inodes => &mut self.inodes,
            TableName::Entries => &mut self.entries,
            TableName::Rows => &mut self.rows,
        }
    }

    fn all(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.inodes.all().chain(self.entries.all()).chain(self.rows.all())
    }

    fn used_bytes(&self) -> u64 {
        let pages = |table: &RowTable| table.bytes.div_ceil(PAGE_BYTES);
        (pages(&self.inodes) + pages(&self.entries) + pages(&self.rows)) * PAGE_BYTES
    }
}

#[derive(Debug)]
struct MemoryState {
    committed: Arc<RowTables>,
    /// The state that the commit under way writes.
    under_way: Option<Arc<RowTables>>,
    /// How many commits were tried.
    commits: u64,
    planned: BTreeMap<u64, CommitFault>,
    limit_bytes: u64,
    is_crashed: bool,
}

/// The callback of [`MemoryDatabase::on_commit`].
pub type CommitObserver = Box<dyn FnMut() + Send>;

/// A metadata database in memory, with planned faults.
///
/// It outlives the stores that work on it, as LMDB's files outlive the process.
pub struct MemoryDatabase {
    state: Mutex<MemoryState>,
    /// Held by the transaction under way.
    writing: Mutex<()>,
    map_bytes: u64,
    observer: Mutex<Option<CommitObserver>>,
}

impl fmt::Debug for MemoryDatabase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryDatabase").field("state", &self.state).finish_non_exhaustive()
    }
}

/// Locks. A panic of another thread leaves a committed state, so it is not passed on.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl MemoryDatabase {
    /// Makes an empty database with LMDB's smallest map.
    #[must_use]
    pub fn new() -> Self {
        Self::with(Arc::default(), MAP_BYTES_MIN, MAP_BYTES_MIN)
    }

    fn with(committed: Arc<RowTables>, map_bytes: u64, limit_bytes: u64) -> Self {
        let state = MemoryState {
            committed,
            under_way: None,
            commits: 0,
            planned: BTreeMap::new(),
            limit_bytes,
            is_crashed: false,
        };
        Self { state: Mutex::new(state), writing: Mutex::new(()), map_bytes, observer: Mutex::new(None) }
    }

    /// Calls `observer` in the middle of each commit, while the meta page is written.
    ///
    /// A crash there may leave the old rows or the new ones: [`Self::after_crash`].
    pub fn on_commit(&self, observer: CommitObserver) {
        *lock(&self.observer) = Some(observer);
    }

    /// Stops calling the observer.
    pub fn stop_observing(&self) {
        *lock(&self.observer) = None;
    }

    /// Whether a commit is in its middle.
    #[must_use]
    pub fn is_committing(&self) -> bool {
        lock(&self.state).under_way.is_some()
    }

    /// Plans the failure of a commit: the next one, counted from [`Self::commits`], or a later one.
    pub fn plan_fault(&self, commit: u64, fault: CommitFault) {
        lock(&self.state).planned.insert(commit, fault);
    }

    /// Returns how many commits were tried, the failed ones included.
    #[must_use]
    pub fn commits(&self) -> u64 {
        lock(&self.state).commits
    }

    /// Sets the bytes of pages above which each commit fails with [`DatabaseError::Full`].
    pub fn set_limit_bytes(&self, limit_bytes: u64) {
        lock(&self.state).limit_bytes = limit_bytes;
    }

    /// Whether a planned crash has ended this database.
    #[must_use]
    pub fn is_crashed(&self) -> bool {
        lock(&self.state).is_crashed
    }

    /// Returns all committed rows, keys and values: the tables one after the other, each in key order.
    #[must_use]
    pub fn rows(&self) -> Vec<(Vec<u8>, Vec<u8>)> {
        let committed = Arc::clone(&lock(&self.state).committed);
        committed.all().map(|(key, value)| (key.to_vec(), value.to_vec())).collect()
    }

    /// Damages the value of a committed row, if there is such a row.
    pub fn damage_row(&self, key: &[u8], damage: impl FnOnce(&mut Vec<u8>)) {
        let mut state = lock(&self.state);
        let mut tables = RowTables::clone(&state.committed);
        if let Some(mut value) = tables.of(key).get(key).map(<[u8]>::to_vec) {
            damage(&mut value);
            tables.of_mut(key).put(key, &value);
            state.committed = Arc::new(tables);
        }
    }

    /// Returns the database that a crash at this moment leaves: what is committed, and no planned fault.
    ///
    /// In the middle of a commit, `choose` says which of two states that is: 0 for the old one.
    #[must_use]
    pub fn after_crash(&self, choose: &mut dyn FnMut(usize) -> usize) -> Self {
        let state = lock(&self.state);
        let left = state.under_way.as_ref().filter(|_| choose(2) == 1).unwrap_or(&state.committed);
        Self::with(Arc::clone(left), self.map_bytes, state.limit_bytes)
    }

    /// Calls the observer. It is taken out meanwhile, so it may use the database.
    fn report_commit(&self) {
        let observer = lock(&self.observer).take();
        if let Some(mut observer) = observer {
            observer();
            lock(&self.observer).get_or_insert(observer);
        }
    }

    pub(super) fn map_bytes(&self) -> u64 {
        self.map_bytes
    }

    pub(super) fn snapshot(&self) -> Result<MemorySnapshot, StoreError> {
        let state = lock(&self.state);
        if state.is_crashed {
            return Err(DatabaseError::Crashed.into());
        }
        Ok(MemorySnapshot { tables: Arc::clone(&state.committed) })
    }

    pub(super) fn write(&self) -> Result<MemoryTransaction<'_>, StoreError> {
        let writing = lock(&self.writing);
        let tables = RowTables::clone(&self.snapshot()?.tables);
        Ok(MemoryTransaction { database: self, _writing: writing, tables, last_inode: Vec::new() })
    }
}

impl Default for MemoryDatabase {
    fn default() -> Self {
        Self::new()
    }
}

/// A view of one committed state.
pub struct MemorySnapshot {
    tables: Arc<RowTables>,
}

impl MemorySnapshot {
    pub(super) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.tables.of(key).get(key)
    }

    pub(super) fn from<'a>(&'a self, from: &'a [u8]) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
        self.tables.of(from).from(from)
    }

    pub(super) fn prefix<'a>(&'a self, prefix: &'a [u8]) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
        self.tables.of(prefix).from(prefix).take_while(move |(key, _)| key.starts_with(prefix))
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.tables.all()
    }

    pub(super) fn last_inode(&self) -> Option<&[u8]> {
        self.tables.inodes.last_key()
    }

    pub(super) fn rows(&self) -> u64 {
        self.tables.inodes.rows + self.tables.entries.rows + self.tables.rows.rows
    }

    pub(super) fn inodes_and_entries(&self) -> (u64, u64) {
        (self.tables.inodes.rows, self.tables.entries.rows)
    }

    pub(super) fn used_bytes(&self) -> u64 {
        self.tables.used_bytes()
    }
}

/// A write transaction on a copy of the committed state.
pub struct MemoryTransaction<'a> {
    database: &'a MemoryDatabase,
    _writing: MutexGuard<'a, ()>,
    tables: RowTables,
    /// The key of the last inode written, to check the order on which LMDB's appending relies.
    last_inode: Vec<u8>,
}

impl MemoryTransaction<'_> {
    pub(super) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.tables.of(key).get(key)
    }

    pub(super) fn put(&mut self, key: &[u8], value: &[u8]) {
        assert!((1..=KEY_BYTES_MAX).contains(&key.len()), "LMDB takes no key of {} bytes", key.len());
        self.tables.of_mut(key).put(key, value);
    }

    pub(super) fn put_inode(&mut self, key: &[u8], value: &[u8]) {
        assert!(TableName::of(key) == TableName::Inodes, "the key of another table");
        assert!(key > self.last_inode.as_slice(), "inodes are written in order");
        self.last_inode.clear();
        self.last_inode.extend_from_slice(key);
        self.put(key, value);
    }

    pub(super) fn clear(&mut self) {
        self.tables = RowTables::default();
        self.last_inode.clear();
    }

    pub(super) fn delete(&mut self, key: &[u8]) {
        self.tables.of_mut(key).delete(key);
    }

    pub(super) fn commit(self) -> Result<(), StoreError> {
        let mut state = lock(&self.database.state);
        if state.is_crashed {
            return Err(DatabaseError::Crashed.into());
        }
        let number = state.commits;
        state.commits += 1;
        match state.planned.remove(&number) {
            Some(CommitFault::Full) => return Err(DatabaseError::Full.into()),
            None if self.tables.used_bytes() > state.limit_bytes => return Err(DatabaseError::Full.into()),
            None => {}
            Some(CommitFault::Cut | CommitFault::Torn { is_new: false }) => {
                state.is_crashed = true;
                return Err(DatabaseError::Crashed.into());
            }
            Some(CommitFault::Torn { is_new: true }) => state.is_crashed = true,
        }
        let tables = Arc::new(self.tables);
        state.under_way = Some(Arc::clone(&tables));
        drop(state);
        self.database.report_commit();
        let mut state = lock(&self.database.state);
        (state.committed, state.under_way) = (tables, None);
        if state.is_crashed { Err(DatabaseError::Crashed.into()) } else { Ok(()) }
    }
}
