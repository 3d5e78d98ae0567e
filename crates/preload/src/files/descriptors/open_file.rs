//! LibFS's open files, which descriptors lead to.
//!
//! They are in a table of their own. A [`OpenFileRef`] is a reference to one, which keeps it there.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};

use ashlar_libfs::OpenInode;
use ashlar_types::{Errno, FileKind, InodeId};
use rustix_futex_sync::{Mutex, MutexGuard};

use super::{TABLE, highest, is_file, record_path_base, table_entry};
use crate::files::shared_file::{self, HeldPlace, SharedFile};
use crate::files::{materialise, unnamed_files};
use crate::sessions::session::MountSession;

/// The most open files that LibFS serves. The kernel serves more.
pub(super) const OPEN_MAX: usize = 65_536;
/// `O_TMPFILE` without `O_DIRECTORY`, which it includes.
pub(crate) const TMPFILE: i32 = libc::O_TMPFILE & !libc::O_DIRECTORY;
/// Flags that `F_SETFL` can change.
pub(crate) const CHANGEABLE: i32 = libc::O_APPEND | libc::O_NONBLOCK | libc::O_DIRECT | libc::O_NOATIME;
/// In place of the number of references: the last one is gone, and the close is not finished yet.
const CLOSING: u32 = u32::MAX;

/// The state of an open file that only one call at a time may use: its offset.
#[derive(Debug, Default)]
pub(crate) struct FilePlace {
    /// The file offset; for a directory, the cookie after which the listing goes on.
    pub(crate) offset: u64,
    /// The open file was handed over to the kernel: a call that waited for it checks the descriptor again.
    pub(crate) is_gone: bool,
}

/// The fate of an open file's only descriptor when another program is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum OnExec {
    /// It may have been changed, or there were more descriptors.
    Unknown,
    Stays,
    Closes,
}

/// An open file description.
#[derive(Debug)]
pub(super) struct OpenDescription {
    /// The number of descriptors and of calls in progress; 0 means that the slot is free.
    pub(super) references: AtomicU32,
    /// The session that it is open in.
    session: AtomicPtr<MountSession>,
    inode: AtomicU64,
    kind: AtomicU32,
    flags: AtomicU32,
    hint: AtomicU32,
    /// The known fate of its one descriptor: an [`OnExec`].
    on_exec: AtomicU8,
    /// The open inode, for holders of a reference.
    pub(super) opened: UnsafeCell<Option<OpenInode>>,
    /// The state that it shares with other processes, or null. It lives as long as there are references.
    pub(super) shared: AtomicPtr<SharedFile>,
    pub(super) place: Mutex<FilePlace>,
}

// SAFETY: `opened` is written by a thread that has taken a free slot, before others can find it, and by the thread that
// has dropped the last reference. In between, threads only read it. All threads may use the other fields.
unsafe impl Sync for OpenDescription {}

/// The place of an open file, held by one call.
#[derive(Debug)]
pub(crate) struct PlaceGuard {
    place: MutexGuard<'static, FilePlace>,
    /// The lock against other processes.
    held: Option<HeldPlace>,
}

impl PlaceGuard {
    /// Reserves the part before an offset for the data about to be written, against other processes.
    ///
    /// Returns `false` if the others have not waited.
    #[inline]
    #[must_use]
    pub(crate) fn reserve(&self, next: u64) -> bool {
        self.held.as_ref().is_none_or(|held| held.reserve(next))
    }

    /// Returns whether other processes may share the open file.
    #[inline]
    pub(crate) fn is_shared(&self) -> bool {
        self.held.is_some()
    }

    /// Takes the offset that all processes share, if LibFS serves the open file in them.
    #[cold]
    fn take_shared_offset(mut self, shared: &SharedFile) -> Option<Self> {
        let held = shared.hold_place()?;
        self.offset = held.offset();
        self.held = Some(held);
        Some(self)
    }
}

impl Deref for PlaceGuard {
    type Target = FilePlace;

    #[inline]
    fn deref(&self) -> &FilePlace {
        &self.place
    }
}

impl DerefMut for PlaceGuard {
    #[inline]
    fn deref_mut(&mut self) -> &mut FilePlace {
        &mut self.place
    }
}

impl Drop for PlaceGuard {
    #[inline]
    fn drop(&mut self) {
        if let Some(held) = &self.held {
            held.set_offset(self.place.offset);
        }
    }
}

pub(super) static OPEN: [OpenDescription; OPEN_MAX] = [const { OpenDescription::FREE }; OPEN_MAX];
/// The number of open files that are `O_PATH`.
pub(super) static O_PATH_COUNT: AtomicU32 = AtomicU32::new(0);
/// The slot that was freed last: it lies in the processor's cache.
static FREED_SLOT: AtomicU32 = AtomicU32::new(0);
/// Where the search for a free slot begins otherwise.
static NEXT_SLOT: AtomicU32 = AtomicU32::new(0);
impl OpenDescription {
    #[allow(clippy::declare_interior_mutable_const, reason = "it is what the table is filled with")]
    const FREE: Self = Self {
        references: AtomicU32::new(0),
        session: AtomicPtr::new(ptr::null_mut()),
        inode: AtomicU64::new(0),
        kind: AtomicU32::new(0),
        flags: AtomicU32::new(0),
        hint: AtomicU32::new(0),
        on_exec: AtomicU8::new(OnExec::Unknown as u8),
        opened: UnsafeCell::new(None),
        shared: AtomicPtr::new(ptr::null_mut()),
        place: Mutex::new(FilePlace { offset: 0, is_gone: false }),
    };

    /// Returns the session that it is open in; `None` if that has ended.
    #[inline]
    fn session(&self) -> Option<&'static MountSession> {
        // SAFETY: the caller has a reference, and no session is freed while open files of it exist (`user_sessions`).
        unsafe { self.session.load(Ordering::Relaxed).as_ref() }.filter(|session| !session.is_over())
    }

    /// Ends the sharing with other processes.
    ///
    /// # Safety
    /// No reference to it exists.
    pub(super) unsafe fn end_sharing(&self) {
        let shared = self.shared.swap(ptr::null_mut(), Ordering::AcqRel);
        if !shared.is_null() {
            // SAFETY: it was made as a box, and all its users had references.
            drop(unsafe { Box::from_raw(shared) });
        }
    }

    /// Changes the number of references as `next` says.
    ///
    /// Returns the old number, as an error if `next` returned none.
    #[inline]
    fn count_references(&self, next: impl Fn(u32) -> Option<u32>) -> Result<u32, u32> {
        let mut before = self.references.load(Ordering::Relaxed);
        loop {
            let Some(after) = next(before) else { return Err(before) };
            match self.references.compare_exchange(before, after, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Ok(before),
                Err(found) => before = found,
            }
        }
    }
}

/// An open file in use by a call.
#[derive(Debug)]
pub(crate) struct OpenFileRef {
    pub(super) number: u32,
}

impl Drop for OpenFileRef {
    #[inline]
    fn drop(&mut self) {
        let less = |references: u32| Some(if references == 1 { CLOSING } else { references - 1 });
        if self.description().count_references(less) == Ok(1) {
            finish_close(self.number);
            self.description().references.store(0, Ordering::Release);
        }
    }
}

impl OpenFileRef {
    /// Returns a reference to the open file of a number, if there is one.
    #[inline]
    pub(super) fn of_number(number: u32) -> Option<Self> {
        let more = |references: u32| (references != 0 && references != CLOSING).then(|| references + 1);
        // Only a counted reference may become an `OpenFileRef`: dropping one gives a reference back.
        OPEN[number as usize - 1].count_references(more).ok().map(|_| Self { number })
    }

    pub(super) fn description(&self) -> &'static OpenDescription {
        &OPEN[self.number as usize - 1]
    }

    /// Returns the open inode, if there is one.
    #[inline]
    pub(crate) fn opened(&self) -> Option<&OpenInode> {
        // SAFETY: this is a reference, so no thread writes it.
        unsafe { (*self.description().opened.get()).as_ref() }
    }

    /// Returns the session that it is open in, even if the process has changed its user since.
    ///
    /// # Errors
    /// `EIO` if the session has ended.
    pub(crate) fn session(&self) -> Result<&'static MountSession, Errno> {
        self.description().session().ok_or(Errno::EIO)
    }

    /// Returns whether its session is the process's current one with that mount.
    ///
    /// A session of another user gives no more than the kernel gives with an open file.
    pub(crate) fn is_in_current_session(&self) -> bool {
        self.session().is_ok_and(MountSession::is_current)
    }

    /// Returns whether it was opened in a session.
    pub(crate) fn is_in_session(&self, session: &MountSession) -> bool {
        ptr::eq(self.description().session.load(Ordering::Relaxed), session)
    }

    /// Returns its inode.
    pub(crate) fn inode(&self) -> InodeId {
        InodeId(self.description().inode.load(Ordering::Relaxed))
    }

    /// Returns whether it is a directory.
    pub(crate) fn is_directory(&self) -> bool {
        self.description().kind.load(Ordering::Relaxed) == FileKind::Directory as u32
    }

    /// Returns the state that it shares with other processes, if it does.
    #[inline]
    pub(crate) fn shared(&self) -> Option<&SharedFile> {
        // SAFETY: it is freed with the last reference, and this is one.
        unsafe { self.description().shared.load(Ordering::Acquire).as_ref() }
    }

    /// Returns whether it was shared and then handed over to the kernel: its descriptors must follow.
    #[inline]
    pub(crate) fn was_handed_over(&self) -> bool {
        self.shared().is_some_and(SharedFile::was_handed_over)
    }

    fn flags_word(&self) -> &AtomicU32 {
        self.shared().map_or(&self.description().flags, SharedFile::flags)
    }

    /// Returns the access mode and status flags, as `open` and `F_SETFL` set them.
    #[inline]
    pub(crate) fn flags(&self) -> i32 {
        let own = self.description().flags.load(Ordering::Relaxed) as i32;
        match self.shared() {
            None => own,
            Some(shared) => own & !CHANGEABLE | shared.flags().load(Ordering::Relaxed) as i32 & CHANGEABLE,
        }
    }

    /// Changes status flags.
    pub(crate) fn set_flags(&self, change: i32, to: i32) {
        let update = |flags: u32| Some(flags & !(change as u32) | (to & change) as u32);
        // It can't fail: the closure always returns a value.
        let _ = self.flags_word().fetch_update(Ordering::Relaxed, Ordering::Relaxed, update);
    }

    /// Returns the expected lifetime of its data that `F_SET_RW_HINT` has set: LibFS only stores it.
    pub(crate) fn lifetime_hint(&self) -> &AtomicU32 {
        &self.description().hint
    }

    /// Returns whether it was opened with `O_PATH`: it is neither read nor written.
    pub(crate) fn is_o_path(&self) -> bool {
        self.flags() & libc::O_PATH != 0
    }

    /// Returns whether its access mode allows reading.
    pub(crate) fn may_read(&self) -> bool {
        self.flags() & libc::O_ACCMODE != libc::O_WRONLY
    }

    /// Returns whether its access mode allows writing.
    pub(crate) fn may_write(&self) -> bool {
        self.flags() & libc::O_ACCMODE != libc::O_RDONLY
    }

    /// Locks its place for one call; returns `None` if it was handed over to the kernel.
    #[inline(always)]
    pub(crate) fn place(&self) -> Option<PlaceGuard> {
        let place = self.description().place.lock();
        if place.is_gone {
            return None;
        }
        let place = PlaceGuard { place, held: None };
        match self.shared() {
            None => Some(place),
            Some(shared) => place.take_shared_offset(shared),
        }
    }

    /// Returns whether it was handed over to the kernel.
    pub(crate) fn is_kernels(&self) -> bool {
        self.description().place.lock().is_gone || self.was_handed_over()
    }

    /// Returns the known fate of its descriptor when another program is run.
    pub(crate) fn on_exec(&self) -> OnExec {
        [OnExec::Stays, OnExec::Closes]
            .into_iter()
            .find(|known| *known as u8 == self.description().on_exec.load(Ordering::Relaxed))
            .unwrap_or(OnExec::Unknown)
    }

    /// Discards the known fate of its descriptor: the descriptor has another flag, or is no longer the only one.
    pub(crate) fn forget_on_exec(&self) {
        self.description().on_exec.store(OnExec::Unknown as u8, Ordering::Relaxed);
    }

    /// Returns whether it is the same open file as another.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.number == other.number
    }

    /// Returns whether a descriptor leads to it.
    pub(crate) fn is_at(&self, descriptor: i32) -> bool {
        table_entry(descriptor).is_some_and(|entry| entry.load(Ordering::Acquire) == self.number)
    }

    /// Makes a descriptor lead to it too, with the known fate of that descriptor if it is the only one.
    pub(super) fn add_descriptor(&self, descriptor: i32, on_exec: OnExec) {
        let _one_at_a_time = TABLE.lock();
        // It may have been shared since its placeholder was put there.
        let is_shared = self.shared().is_some_and(|shared| {
            let real = self.numbers().map(|(number, _)| number).find(|&number| shared.is_at(number));
            if !shared.is_at(descriptor)
                && let Some(real) = real
            {
                // If this fails, calls on the descriptor fail.
                let _ = materialise::duplicate_at(real, descriptor);
            }
            true
        });
        let known = if is_shared { OnExec::Unknown } else { on_exec };
        self.description().on_exec.store(known as u8, Ordering::Relaxed);
        self.description().references.fetch_add(1, Ordering::AcqRel);
        let old = table_entry(descriptor).map_or(0, |entry| entry.swap(self.number, Ordering::SeqCst));
        drop(_one_at_a_time);
        drop(is_file(old).then(|| Self { number: old }));
    }

    /// Hands its descriptors over to the kernel: `replace` is called with each number, while the place is locked.
    ///
    /// If `is_noted`, they are recorded, so that the library sees their closing.
    pub(crate) fn hand_over(
        &self,
        is_noted: bool,
        mut replace: impl FnMut(Option<i32>, &FilePlace) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut place = self.description().place.lock();
        if place.is_gone {
            return Ok(());
        }
        let shared = self.shared();
        if shared.is_none() {
            replace(None, &place)?;
        }
        let _one_at_a_time = TABLE.lock();
        let mut left = Vec::new();
        for (descriptor, entry) in self.numbers() {
            match shared {
                None => replace(Some(descriptor), &place)?,
                // The kernel has a real open file there. With the first of them it is handed over.
                Some(shared) => drop(shared.hand_over(descriptor)),
            }
            if is_noted || self.is_directory() {
                record_path_base(descriptor);
            } else {
                entry.store(0, Ordering::Release);
            }
            left.push(Self { number: self.number });
        }
        place.is_gone = true;
        drop(place);
        drop(_one_at_a_time);
        Ok(())
    }

    /// Returns all its descriptors; the caller holds the table.
    fn numbers(&self) -> impl Iterator<Item = (i32, &'static AtomicU32)> {
        let number = self.number;
        let all = (0..highest()).filter_map(|descriptor| Some((descriptor, table_entry(descriptor)?)));
        all.filter(move |(_, entry)| entry.load(Ordering::Acquire) == number)
    }

    /// Begins to share it with processes that will be forked.
    ///
    /// A real open file replaces the placeholder at all its numbers (`put`), and LibFS goes on serving it.
    ///
    /// # Errors
    /// Those of `put`.
    pub(crate) fn share(&self, shared: SharedFile, mut put: impl FnMut(i32) -> Result<(), Errno>) -> Result<(), Errno> {
        let place = self.description().place.lock();
        if place.is_gone || self.shared().is_some() {
            return Ok(());
        }
        let _one_at_a_time = TABLE.lock();
        self.numbers().try_for_each(|(descriptor, _)| put(descriptor))?;
        self.forget_on_exec();
        shared.begin_sharing(place.offset, self.flags() & CHANGEABLE);
        self.join_sharing(shared);
        Ok(())
    }

    /// Joins the sharing by other processes, if it is not shared yet.
    pub(crate) fn join_sharing(&self, shared: SharedFile) {
        shared_file::record_sharing();
        self.description().shared.store(Box::into_raw(Box::new(shared)), Ordering::Release);
    }
}

/// Returns whether other processes share the open file of a number.
pub(super) fn is_shared(number: u32) -> bool {
    !OPEN[number as usize - 1].shared.load(Ordering::Relaxed).is_null()
}

/// Opens a file that the session has opened.
///
/// The caller has no descriptor for it yet.
///
/// # Errors
/// `ENFILE`.
pub(crate) fn open_in_session(
    session: &'static MountSession,
    inode: InodeId,
    kind: FileKind,
    flags: i32,
) -> Result<OpenFileRef, Errno> {
    open_known_inode(session, session.fs.open_inode(inode), kind, flags)
}

/// As [`open_in_session`], with the open inode.
///
/// # Errors
/// `ENFILE`.
pub(crate) fn open_known_inode(
    session: &'static MountSession,
    way: OpenInode,
    kind: FileKind,
    flags: i32,
) -> Result<OpenFileRef, Errno> {
    let index = take_slot().ok_or(Errno::ENFILE)?;
    let open = &OPEN[index];
    open.session.store(ptr::from_ref(session).cast_mut(), Ordering::Relaxed);
    open.inode.store(way.id().0, Ordering::Relaxed);
    open.kind.store(kind as u32, Ordering::Relaxed);
    open.flags.store(flags as u32, Ordering::Relaxed);
    open.hint.store(0, Ordering::Relaxed);
    open.on_exec.store(OnExec::Unknown as u8, Ordering::Relaxed);
    if flags & libc::O_PATH != 0 {
        O_PATH_COUNT.fetch_add(1, Ordering::Relaxed);
    }
    *open.place.lock() = FilePlace::default();
    // SAFETY: the slot was free, and no other thread can find it yet.
    unsafe { *open.opened.get() = Some(way) };
    Ok(OpenFileRef { number: index as u32 + 1 })
}

/// Takes a free slot, with a reference; returns `None` if there is none.
fn take_slot() -> Option<usize> {
    let take = |index: &usize| {
        let references = &OPEN[*index].references;
        references.load(Ordering::Relaxed) == 0
            && references.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_ok()
    };
    let freed = FREED_SLOT.load(Ordering::Relaxed) as usize;
    if take(&freed) {
        return Some(freed);
    }
    let start = NEXT_SLOT.load(Ordering::Relaxed) as usize;
    let index = (0..OPEN_MAX).map(|step| (start + step) % OPEN_MAX).find(take)?;
    NEXT_SLOT.store((index + 1) as u32, Ordering::Relaxed);
    Some(index)
}

/// Removes the extra state of an `O_PATH` open file, or of one that was made without a name.
#[cold]
fn forget_special_state(open: &OpenDescription, flags: i32) {
    if flags & libc::O_PATH != 0 {
        O_PATH_COUNT.fetch_sub(1, Ordering::Relaxed);
    } else if !open.place.lock().is_gone
        && let Some(session) = open.session()
    {
        unnamed_files::forget_unnamed(session, InodeId(open.inode.load(Ordering::Relaxed)));
    }
}

/// Closes an open file after its last reference is gone.
fn finish_close(number: u32) {
    let open = &OPEN[number as usize - 1];
    let flags = open.flags.load(Ordering::Relaxed) as i32;
    if flags & (libc::O_PATH | TMPFILE) != 0 {
        forget_special_state(open, flags);
    }
    // SAFETY: the last reference is gone, and no thread takes the slot before this is done.
    let way = unsafe { (*open.opened.get()).take() };
    // SAFETY: as above.
    unsafe { open.end_sharing() };
    // A session that has ended has closed its handles.
    if let (Some(session), Some(way)) = (open.session(), way) {
        session.fs.close_open(way);
    }
    FREED_SLOT.store(number - 1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread may have read the number of an open file that another thread closes meanwhile.
    #[test]
    fn lookup_of_closed_file_changes_no_references() {
        // The last place is free: other tests take the first ones.
        let (number, references) = (OPEN_MAX as u32, &OPEN[OPEN_MAX - 1].references);
        for closed in [0, CLOSING] {
            references.store(closed, Ordering::Relaxed);
            assert!(OpenFileRef::of_number(number).is_none());
            assert_eq!(references.load(Ordering::Relaxed), closed);
        }
        references.store(1, Ordering::Relaxed);
        let file = OpenFileRef::of_number(number).expect("open");
        assert_eq!(references.load(Ordering::Relaxed), 2);
        drop(file);
        assert_eq!(references.swap(0, Ordering::Relaxed), 1);
    }
}
