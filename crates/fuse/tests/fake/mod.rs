//! A file system in memory, as simple as it can be, to test the front end with.
//!
//! Its sessions hold leases, as those of LibFS do.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use ashlar_fuse::notify::{self, Pages};
use ashlar_libfs::{
    Allocation, AttributeChange, ByteRange, ConflictingLock, FoundInode, Listed, LockAction, LockKind, LockedRange,
    NewInode, Outcome, RenameFlags, ReserveReason, Seek, SetTime, Space, WriteAt, Written, XattrFlags,
};
use ashlar_types::{Credentials, Errno, FileKind, Inode, InodeId, NameHashKey, Timestamp, blocks_for, name_cookie};
use ashlar_wire::MountTerms;

/// Long enough that a test only passes if invalidation works.
const TTL_MS: u64 = 600_000;

#[derive(Debug)]
struct Node {
    inode: Inode,
    data: Vec<u8>,
    entries: BTreeMap<Vec<u8>, InodeId>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

#[derive(Debug, Clone, Copy)]
struct Lock {
    inode: InodeId,
    kind: LockKind,
    owner: (usize, u64),
    pid: u32,
    range: ByteRange,
    action: LockAction,
}

#[derive(Debug, Default)]
struct State {
    nodes: HashMap<InodeId, Node>,
    open: HashMap<InodeId, u64>,
    next: u64,
    locks: Vec<Lock>,
    cancelled: HashSet<(usize, u64)>,
    /// The inodes that each session has read and no other session has changed since.
    valid: Vec<HashSet<InodeId>>,
    devices: Vec<Option<Arc<OwnedFd>>>,
    syncs_blocked: bool,
    syncs: u64,
    reads: u64,
    /// How often the mount became shared or a sole mount, and the last such change whose names are all forgotten.
    company: u64,
    forgotten: u64,
}

/// The state that all sessions share.
#[derive(Debug, Default)]
pub struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    ttl_ms: u64,
    forgetting: Mutex<Vec<std::thread::JoinHandle<()>>>,
}

/// One session.
#[derive(Debug)]
pub struct Fake {
    shared: Arc<Shared>,
    number: usize,
}

fn now() -> Timestamp {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    Timestamp { seconds: time.as_secs() as i64, nanoseconds: time.subsec_nanos() }
}

fn node(kind: FileKind, mode: u32, credentials: &Credentials, parent: InodeId) -> Node {
    let inode = Inode { uid: credentials.uid, gid: credentials.gid, ..Inode::new(kind, mode, parent, now()) };
    Node { inode, data: Vec::new(), entries: BTreeMap::new(), xattrs: BTreeMap::new() }
}

impl Shared {
    pub fn new() -> Arc<Self> {
        Self::with_ttl_ms(TTL_MS)
    }

    /// Makes a file system of which kernels may keep answers for `ttl_ms`.
    pub fn with_ttl_ms(ttl_ms: u64) -> Arc<Self> {
        let shared = Self { ttl_ms, ..Self::default() };
        let mut state = shared.state.lock().unwrap();
        state.next = 16;
        state.nodes.insert(InodeId::ROOT, node(FileKind::Directory, 0o755, &Credentials::root(), InodeId::ROOT));
        drop(state);
        Arc::new(shared)
    }

    pub fn session(self: &Arc<Self>) -> Arc<Fake> {
        let mut state = self.state.lock().unwrap();
        state.valid.push(HashSet::new());
        state.devices.push(None);
        Arc::new(Fake { shared: Arc::clone(self), number: state.valid.len() - 1 })
    }

    /// Exchanges two names in the root directory, without a notification to any kernel.
    pub fn exchange_unseen(&self, one: &str, two: &str) {
        let mut state = self.state.lock().unwrap();
        let root = state.nodes.get_mut(&InodeId::ROOT).unwrap();
        let (first, second) = (root.entries[one.as_bytes()], root.entries[two.as_bytes()]);
        root.entries.insert(one.into(), second);
        root.entries.insert(two.into(), first);
    }

    /// Makes a mount shared, and waits until its kernel has forgotten names.
    pub fn bring_company(&self) {
        let mut state = self.state.lock().unwrap();
        state.company += 1;
        let company = state.company;
        self.changed.notify_all();
        drop(self.changed.wait_while(state, |state| state.forgotten != company).unwrap());
    }

    /// Blocks calls of `sync`, or lets them go on.
    pub fn block_syncs(&self, blocked: bool) {
        self.state.lock().unwrap().syncs_blocked = blocked;
        self.changed.notify_all();
    }

    pub fn syncs(&self) -> u64 {
        self.state.lock().unwrap().syncs
    }

    pub fn reads(&self) -> u64 {
        self.state.lock().unwrap().reads
    }

    pub fn open_count(&self) -> u64 {
        self.state.lock().unwrap().open.values().sum()
    }

    pub fn lock_count(&self) -> usize {
        self.state.lock().unwrap().locks.len()
    }
}

impl State {
    fn node(&self, id: InodeId) -> Outcome<&Node> {
        self.nodes.get(&id).ok_or(Errno::ESTALE)
    }

    fn node_mut(&mut self, id: InodeId) -> Outcome<&mut Node> {
        self.nodes.get_mut(&id).ok_or(Errno::ESTALE)
    }

    fn found(&self, id: InodeId) -> Outcome<FoundInode> {
        Ok(FoundInode { id, inode: self.node(id)?.inode.clone() })
    }

    fn child(&self, directory: InodeId, name: &[u8]) -> Outcome<InodeId> {
        self.node(directory)?.entries.get(name).copied().ok_or(Errno::ENOENT)
    }

    fn touch(&mut self, id: InodeId) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.inode.modified = now();
            node.inode.changed = now();
            if node.inode.kind == FileKind::Regular {
                node.inode.size = node.data.len() as u64;
                node.inode.blocks = blocks_for(node.inode.size);
            }
            node.inode.entries = node.entries.len() as u64;
        }
    }

    fn drop_if_unused(&mut self, id: InodeId) {
        if self.nodes.get(&id).is_some_and(|node| node.inode.links == 0) && !self.open.contains_key(&id) {
            self.nodes.remove(&id);
        }
    }

    fn add(&mut self, credentials: &Credentials, directory: InodeId, make: &NewInode<'_>) -> InodeId {
        let id = InodeId(self.next);
        self.next += 1;
        let mut made = node(make.kind, make.mode & !make.umask, credentials, directory);
        made.inode.device = make.device;
        made.inode.target = make.target.to_vec();
        if make.kind == FileKind::Symlink {
            made.inode.size = make.target.len() as u64;
        }
        self.nodes.insert(id, made);
        id
    }

    fn conflict(&self, wanted: &Lock) -> Option<Lock> {
        self.locks.iter().copied().find(|lock| {
            lock.inode == wanted.inode
                && lock.kind == wanted.kind
                && lock.owner != wanted.owner
                && lock.range.overlaps(wanted.range)
                && (lock.action == LockAction::Write || wanted.action == LockAction::Write)
        })
    }
}

impl Fake {
    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap()
    }

    fn see(&self, state: &mut State, id: InodeId) {
        state.valid[self.number].insert(id);
    }

    /// Acts as SharedFS does when a lease moves: other sessions lose theirs, and their kernels forget.
    fn revoke(&self, mut state: MutexGuard<'_, State>, ids: &[InodeId]) {
        let mut revoked = Vec::new();
        for (number, _) in state.devices.clone().iter().enumerate().filter(|(number, _)| *number != self.number) {
            for id in ids {
                if state.valid[number].remove(id) {
                    revoked.extend(state.devices[number].clone().map(|device| (device, *id)));
                }
            }
        }
        for id in ids {
            self.see(&mut state, *id);
        }
        drop(state);
        for (device, id) in revoked {
            // Attributes and names are forgotten at once; pages may have to wait for requests of the other mount.
            notify::inval_inode(&device.as_fd(), id, Pages::Keep).unwrap();
            assert!(notify::inc_epoch(device.as_fd()).unwrap(), "this test needs a kernel with epochs");
            self.shared.forgetting.lock().unwrap().push(std::thread::spawn(move || {
                let _ = notify::inval_inode(&device.as_fd(), id, Pages::ALL);
            }));
        }
    }
}

impl ashlar_fuse::FileSystem for Fake {
    fn register_mount(&self, device: OwnedFd, _number: u64, _terms: MountTerms) -> Outcome<()> {
        self.state().devices[self.number] = Some(Arc::new(device));
        Ok(())
    }

    fn name_ttl_ms(&self, directory: InodeId) -> u64 {
        if self.is_shared() { 0 } else { self.cache_ttl_ms(directory) }
    }

    fn cache_ttl_ms(&self, inode: InodeId) -> u64 {
        if self.is_valid(inode) { self.shared.ttl_ms } else { 0 }
    }

    fn reserve(&self, _: InodeId, _: ReserveReason) -> Outcome<()> {
        Ok(())
    }

    fn free_reserved(&self, _: InodeId, _: ReserveReason) {}

    fn programs(&self) -> u64 {
        0
    }

    fn wait_programs(&self) {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }

    fn is_shared(&self) -> bool {
        self.company() % 2 == 1
    }

    fn cache_ttl_max_ms(&self) -> u64 {
        self.shared.ttl_ms
    }

    fn company(&self) -> u64 {
        self.state().company
    }

    fn wait_company(&self, company: u64) {
        let (state, pause) = (self.state(), std::time::Duration::from_millis(20));
        drop(self.shared.changed.wait_timeout_while(state, pause, |state| state.company == company).unwrap());
    }

    fn confirm_names_dropped(&self, company: u64) {
        self.state().forgotten = company;
        self.shared.changed.notify_all();
    }

    fn is_valid(&self, inode: InodeId) -> bool {
        self.state().valid[self.number].contains(&inode)
    }

    fn lookup(&self, _: &Credentials, directory: InodeId, name: &[u8]) -> Outcome<FoundInode> {
        let mut state = self.state();
        self.see(&mut state, directory);
        let id = state.child(directory, name)?;
        self.see(&mut state, id);
        state.found(id)
    }

    fn attributes(&self, inode: InodeId) -> Outcome<FoundInode> {
        let mut state = self.state();
        self.see(&mut state, inode);
        state.found(inode)
    }

    fn set_attributes(&self, _: &Credentials, inode: InodeId, change: &AttributeChange) -> Outcome<FoundInode> {
        let mut state = self.state();
        let node = state.node_mut(inode)?;
        if let Some(size) = change.size {
            node.data.resize(size as usize, 0);
            node.inode.modified = now();
            node.inode.size = size;
            node.inode.blocks = blocks_for(size);
        }
        let attributes = &mut node.inode;
        if change.strip && attributes.kind == FileKind::Regular {
            attributes.mode &= !0o6000;
        }
        attributes.mode = change.mode.unwrap_or(attributes.mode);
        attributes.uid = change.uid.unwrap_or(attributes.uid);
        attributes.gid = change.gid.unwrap_or(attributes.gid);
        let time = |set: Option<SetTime>, old| match set {
            Some(SetTime::At(at)) => at,
            Some(SetTime::Now) => now(),
            None => old,
        };
        attributes.accessed = time(change.accessed, attributes.accessed);
        attributes.modified = time(change.modified, attributes.modified);
        attributes.changed = now();
        let found = state.found(inode)?;
        self.revoke(state, &[inode]);
        Ok(found)
    }

    fn read_link(&self, inode: InodeId) -> Outcome<Vec<u8>> {
        Ok(self.state().node(inode)?.inode.target.clone())
    }

    fn make(
        &self,
        credentials: &Credentials,
        directory: InodeId,
        name: &[u8],
        make: &NewInode<'_>,
    ) -> Outcome<FoundInode> {
        let mut state = self.state();
        if state.child(directory, name).is_ok() {
            return Err(Errno::EEXIST);
        }
        let id = state.add(credentials, directory, make);
        state.node_mut(directory)?.entries.insert(name.to_vec(), id);
        if make.kind == FileKind::Directory {
            state.node_mut(directory)?.inode.links += 1;
        }
        state.touch(directory);
        let found = state.found(id)?;
        self.revoke(state, &[directory, id]);
        Ok(found)
    }

    fn make_open(
        &self,
        credentials: &Credentials,
        directory: InodeId,
        name: &[u8],
        make: &NewInode<'_>,
    ) -> Outcome<FoundInode> {
        let found = self.make(credentials, directory, name, make)?;
        self.open(found.id)
    }

    fn make_unnamed(&self, credentials: &Credentials, directory: InodeId, make: &NewInode<'_>) -> Outcome<FoundInode> {
        let mut state = self.state();
        let id = state.add(credentials, directory, make);
        state.node_mut(id)?.inode.links = 0;
        drop(state);
        self.open(id)
    }

    fn link(&self, _: &Credentials, inode: InodeId, directory: InodeId, name: &[u8]) -> Outcome<FoundInode> {
        let mut state = self.state();
        if state.child(directory, name).is_ok() {
            return Err(Errno::EEXIST);
        }
        state.node_mut(inode)?.inode.links += 1;
        state.node_mut(directory)?.entries.insert(name.to_vec(), inode);
        state.touch(directory);
        let found = state.found(inode)?;
        self.revoke(state, &[directory, inode]);
        Ok(found)
    }

    fn unlink(&self, _: &Credentials, directory: InodeId, name: &[u8]) -> Outcome<()> {
        let mut state = self.state();
        let id = state.child(directory, name)?;
        state.node_mut(directory)?.entries.remove(name);
        state.node_mut(id)?.inode.links -= 1;
        state.touch(directory);
        state.drop_if_unused(id);
        self.revoke(state, &[directory, id]);
        Ok(())
    }

    fn remove_directory(&self, _: &Credentials, directory: InodeId, name: &[u8], _: Option<InodeId>) -> Outcome<()> {
        let mut state = self.state();
        let id = state.child(directory, name)?;
        if !state.node(id)?.entries.is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        state.node_mut(id)?.inode.links = 0;
        state.node_mut(directory)?.entries.remove(name);
        state.node_mut(directory)?.inode.links -= 1;
        state.touch(directory);
        state.drop_if_unused(id);
        self.revoke(state, &[directory, id]);
        Ok(())
    }

    fn rename(
        &self,
        credentials: &Credentials,
        from: (InodeId, &[u8]),
        to: (InodeId, &[u8]),
        flags: RenameFlags,
    ) -> Outcome<()> {
        let mut state = self.state();
        let id = state.child(from.0, from.1)?;
        let target = state.child(to.0, to.1).ok();
        if flags.no_replace && target.is_some() {
            return Err(Errno::EEXIST);
        }
        state.node_mut(from.0)?.entries.remove(from.1);
        state.node_mut(to.0)?.entries.insert(to.1.to_vec(), id);
        if flags.exchange {
            state.node_mut(from.0)?.entries.insert(from.1.to_vec(), target.ok_or(Errno::ENOENT)?);
        } else if let Some(target) = target {
            state.node_mut(target)?.inode.links -= 1;
            state.drop_if_unused(target);
        }
        if flags.whiteout {
            let make = NewInode { kind: FileKind::CharDevice, mode: 0, umask: 0, device: 0, target: &[] };
            let whiteout = state.add(credentials, from.0, &make);
            state.node_mut(from.0)?.entries.insert(from.1.to_vec(), whiteout);
        }
        state.touch(from.0);
        state.touch(to.0);
        let mut ids = vec![from.0, to.0, id];
        ids.extend(target);
        self.revoke(state, &ids);
        Ok(())
    }

    fn open(&self, inode: InodeId) -> Outcome<FoundInode> {
        let mut state = self.state();
        state.node(inode)?;
        *state.open.entry(inode).or_default() += 1;
        self.see(&mut state, inode);
        state.found(inode)
    }

    fn close(&self, inode: InodeId) {
        let mut state = self.state();
        let count = state.open.get_mut(&inode).expect("closed more often than opened");
        *count -= 1;
        if *count == 0 {
            state.open.remove(&inode);
            state.drop_if_unused(inode);
        }
    }

    fn read(&self, inode: InodeId, offset: u64, buffer: &mut [u8]) -> Outcome<usize> {
        let mut state = self.state();
        state.reads += 1;
        self.see(&mut state, inode);
        let data = &state.node(inode)?.data;
        let rest = data.get(offset as usize..).unwrap_or_default();
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }

    fn write(&self, _: &Credentials, inode: InodeId, at: WriteAt, data: &[u8], strip: bool) -> Outcome<Written> {
        let mut state = self.state();
        let node = state.node_mut(inode)?;
        let offset = match at {
            WriteAt::Offset(offset) => offset as usize,
            WriteAt::End => node.data.len(),
        };
        let end = offset + data.len();
        if node.data.len() < end {
            node.data.resize(end, 0);
        }
        node.data[offset..end].copy_from_slice(data);
        if strip {
            node.inode.mode &= !0o6000;
        }
        state.touch(inode);
        self.revoke(state, &[inode]);
        Ok(Written { offset: offset as u64, bytes: data.len() })
    }

    fn sync_inode(&self, _: InodeId) -> Outcome<()> {
        self.sync_all()
    }

    fn sync_all(&self) -> Outcome<()> {
        let mut state = self.state();
        state.syncs += 1;
        while state.syncs_blocked {
            state = self.shared.changed.wait(state).unwrap();
        }
        Ok(())
    }

    fn allocate(
        &self,
        _: &Credentials,
        inode: InodeId,
        how: Allocation,
        offset: u64,
        length: u64,
        _: bool,
    ) -> Outcome<()> {
        let mut state = self.state();
        let data = &mut state.node_mut(inode)?.data;
        let (start, end) = (offset as usize, (offset + length) as usize);
        if matches!(how, Allocation::Reserve | Allocation::Zero) && data.len() < end {
            data.resize(end, 0);
        }
        if matches!(how, Allocation::Punch | Allocation::Zero | Allocation::ZeroKeepSize) {
            let end = end.min(data.len());
            data[start..end].fill(0);
        }
        state.touch(inode);
        self.revoke(state, &[inode]);
        Ok(())
    }

    fn seek(&self, inode: InodeId, what: Seek, offset: u64) -> Outcome<u64> {
        let state = self.state();
        let data = &state.node(inode)?.data;
        let start = offset as usize;
        if start >= data.len() {
            return Err(Errno::ENXIO);
        }
        let found = data[start..].iter().position(|byte| (*byte != 0) == (what == Seek::Data));
        match (found, what) {
            (Some(at), _) => Ok((start + at) as u64),
            (None, Seek::Hole) => Ok(data.len() as u64),
            (None, Seek::Data) => Err(Errno::ENXIO),
        }
    }

    fn copy_range(
        &self,
        credentials: &Credentials,
        from: InodeId,
        from_offset: u64,
        to: InodeId,
        to_offset: u64,
        length: u64,
        strip: bool,
    ) -> Outcome<u64> {
        let mut bytes = vec![0; length.min(1 << 20) as usize];
        let count = self.read(from, from_offset, &mut bytes)?;
        self.write(credentials, to, WriteAt::Offset(to_offset), &bytes[..count], strip)?;
        Ok(count as u64)
    }

    fn list(&self, directory: InodeId, after: u64, each: &mut dyn FnMut(Listed) -> bool) -> Outcome<()> {
        let mut state = self.state();
        self.see(&mut state, directory);
        let mut entries: Vec<_> = state.node(directory)?.entries.iter().map(|(name, id)| (name.clone(), *id)).collect();
        entries.sort_by_key(|(name, _)| name_cookie(&NameHashKey([7; 16]), name));
        for (name, id) in entries {
            let cookie = name_cookie(&NameHashKey([7; 16]), &name);
            if cookie <= after {
                continue;
            }
            self.see(&mut state, id);
            let inode = state.node(id)?.inode.clone();
            // Every other name has no attributes, as names under another lease have none.
            let has_attributes = id.0 % 2 == 0;
            if !each(Listed { cookie, name, id, kind: inode.kind, inode: has_attributes.then_some(inode) }) {
                break;
            }
        }
        Ok(())
    }

    fn xattr(&self, inode: InodeId, name: &[u8]) -> Outcome<Vec<u8>> {
        self.state().node(inode)?.xattrs.get(name).cloned().ok_or(Errno::ENODATA)
    }

    fn xattr_names(&self, inode: InodeId) -> Outcome<Vec<Vec<u8>>> {
        Ok(self.state().node(inode)?.xattrs.keys().cloned().collect())
    }

    fn set_xattr(
        &self,
        _: &Credentials,
        inode: InodeId,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
        _: bool,
    ) -> Outcome<()> {
        let mut state = self.state();
        let xattrs = &mut state.node_mut(inode)?.xattrs;
        if flags.create && xattrs.contains_key(name) {
            return Err(Errno::EEXIST);
        }
        if flags.replace && !xattrs.contains_key(name) {
            return Err(Errno::ENODATA);
        }
        xattrs.insert(name.to_vec(), value.to_vec());
        Ok(())
    }

    fn remove_xattr(&self, _: &Credentials, inode: InodeId, name: &[u8]) -> Outcome<()> {
        self.state().node_mut(inode)?.xattrs.remove(name).map(|_| ()).ok_or(Errno::ENODATA)
    }

    fn space(&self, _: InodeId) -> Outcome<Space> {
        Ok(Space { blocks_total: 1000, blocks_free: 600, inodes_total: 500, inodes_free: 400 })
    }

    fn lock(
        &self,
        inode: InodeId,
        kind: LockKind,
        owner: u64,
        pid: u32,
        range: ByteRange,
        action: LockAction,
        wait: Option<u64>,
    ) -> Outcome<()> {
        let wanted = Lock { inode, kind, owner: (self.number, owner), pid, range, action };
        let mut state = self.state();
        while action != LockAction::Unlock && state.conflict(&wanted).is_some() {
            let Some(ticket) = wait else { return Err(Errno::EAGAIN) };
            if state.cancelled.contains(&(self.number, ticket)) {
                return Err(Errno::EINTR);
            }
            state = self.shared.changed.wait(state).unwrap();
        }
        // Ranges that overlap in part are beyond this model.
        state.locks.retain(|lock| (lock.inode, lock.kind, lock.owner) != (inode, kind, wanted.owner));
        if action != LockAction::Unlock {
            state.locks.push(wanted);
        }
        self.shared.changed.notify_all();
        Ok(())
    }

    fn cancel_lock(&self, ticket: u64) -> Outcome<()> {
        self.state().cancelled.insert((self.number, ticket));
        self.shared.changed.notify_all();
        Ok(())
    }

    fn query_lock(
        &self,
        inode: InodeId,
        kind: LockKind,
        owner: u64,
        range: ByteRange,
        action: LockAction,
    ) -> Outcome<Option<ConflictingLock>> {
        let wanted = Lock { inode, kind, owner: (self.number, owner), pid: 0, range, action };
        let conflict = self.state().conflict(&wanted);
        Ok(conflict.and_then(|lock| Some((LockedRange { mode: lock.action.mode()?, range: lock.range }, lock.pid))))
    }

    fn release_locks(&self, inode: InodeId, owner: u64, kind: LockKind) -> Outcome<()> {
        let owner = (self.number, owner);
        self.state().locks.retain(|lock| (lock.inode, lock.kind, lock.owner) != (inode, kind, owner));
        self.shared.changed.notify_all();
        Ok(())
    }
}
