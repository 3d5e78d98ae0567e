//! Keeps the kernel's caches of a mount coherent.
//!
//! A reply lists the items that the kernel caches from it. After the reply was sent they are checked once more. The
//! kernel is made to forget an item that no longer holds: at once if the kernel can't wait then, else on the thread of
//! [`Invalidations`].

use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use ashlar_helper::{Helper, Line};
use ashlar_libfs::{Outcome, Seek};
use ashlar_types::InodeId;

use crate::connection::device::FuseDevice;
use crate::connection::notify::{self, Pages};
use crate::connection::reply_buffer::{CachedItem, ReplyBuffer};
use crate::connection::reply_route::ReplyRoute;
use crate::file_system::FileSystem;
use crate::kernel_cache::dentry_ttl::DentryTtls;
use crate::kernel_cache::dirty_pages::seek_past_dirty;
use crate::kernel_cache::invalidation::{Invalidations, KernelTask, SeekRequest, StaleItem};
use crate::kernel_cache::mappable::MappableFiles;
use crate::kernel_cache::page_fills::PageFills;
use crate::kernel_cache::shown_directories::ShownDirectories;
use crate::proto::OffsetOut;

/// The mount's records of the kernel's caches, and the ways to make it forget.
#[derive(Debug)]
pub(crate) struct KernelCache<F> {
    file_system: Arc<F>,
    device: Arc<FuseDevice>,
    pub(crate) invalidations: Invalidations,
    pub(crate) page_fills: PageFills,
    pub(crate) mappable: MappableFiles,
    pub(crate) shown_directories: ShownDirectories,
    pub(crate) dentry_ttls: DentryTtls,
    /// Whether the kernel lets names expire.
    may_expire_names: bool,
    /// Notifications that may wait: pages and single names.
    forgetting: Line,
    /// Notifications for all names that the kernel keeps, for which a new session waits.
    expiring: Line,
}

impl<F> KernelCache<F> {
    pub(crate) fn new(file_system: Arc<F>, device: Arc<FuseDevice>, may_expire_names: bool, helper: Helper) -> Self {
        let helper = Arc::new(helper);
        Self {
            file_system,
            device,
            invalidations: Invalidations::default(),
            page_fills: PageFills::default(),
            mappable: MappableFiles::default(),
            shown_directories: ShownDirectories::default(),
            dentry_ttls: DentryTtls::default(),
            may_expire_names,
            forgetting: Line::new(Arc::clone(&helper)),
            expiring: Line::new(helper),
        }
    }
}

impl<F: FileSystem> KernelCache<F> {
    /// Makes the kernel ask for an inode's attributes again, at once. Unlike all other invalidations this never waits
    /// for a lock of the kernel, so a serving thread may do it.
    pub(crate) fn forget_attributes(&self, inode: InodeId) {
        if let Err(errno) = notify::inval_inode(&self.device.as_fd(), inode, Pages::Keep) {
            tracing::debug!(inode = inode.0, %errno, "the kernel keeps its attributes until they expire");
        }
    }

    /// Carries out a task that the thread has taken from the queue.
    pub(crate) fn carry_out_task(&self, task: KernelTask) {
        match task {
            KernelTask::Forget(stale) => self.forget_and_wait(&stale),
            KernelTask::DropPagesAndSend(inode, route, reply) => {
                let began = self.page_fills.begin_drop();
                self.forget_and_wait(&StaleItem::Inode(inode, Pages::ALL));
                self.page_fills.end_drop(inode, began);
                self.send_answer(&route, inode, &reply);
            }
            KernelTask::WriteBackAndSeek(SeekRequest { inode, what, offset, unique, route }) => {
                let mut reply = ReplyBuffer::new(size_of::<OffsetOut>());
                let found = self.seek_written_back(inode, what, offset);
                let result = found.and_then(|offset| reply.structure(&OffsetOut { offset }));
                self.send_answer(&route, inode, reply.seal(unique, result));
            }
        }
    }

    fn send_answer(&self, route: &ReplyRoute, inode: InodeId, reply: &[u8]) {
        if let Err(errno) = route.send(&self.device, reply) {
            tracing::error!(inode = inode.0, %errno, "the kernel took no answer that waited for an invalidation");
        }
    }

    /// Makes the kernel forget something, and waits until it has.
    pub(crate) fn forget_and_wait(&self, stale: &StaleItem) {
        let (device, line) = (self.device.as_fd(), &self.forgetting);
        let result = match stale {
            StaleItem::Inode(inode, Pages::Keep) => notify::inval_inode(&device, *inode, Pages::Keep),
            StaleItem::Inode(inode, pages) => notify::inval_inode(&line.to(device), *inode, *pages),
            StaleItem::Entry(directory, name) => notify::inval_entry(&line.to(device), *directory, name),
            // A kernel without epochs forgets names by itself when their validity ends.
            StaleItem::Names => notify::inc_epoch(device).map(|_| ()),
        };
        if let Err(errno) = result {
            tracing::debug!(?stale, %errno, "the kernel took no notification");
        }
    }

    /// Records that the kernel is about to fill pages of a file, by READ or WRITE.
    pub(crate) fn record_fill(&self, inode: InodeId) {
        self.page_fills.record_fill(inode);
        if self.mappable.record_fill(inode) {
            self.forget_no_blocks(inode);
        }
    }

    /// Records that a handle was made through which a file may be mapped for writing.
    pub(crate) fn record_mappable(&self, inode: InodeId) {
        if self.mappable.add_handle(inode, self.page_fills.must_drop(inode)) {
            self.forget_no_blocks(inode);
        }
    }

    /// Makes the kernel ask again how many blocks a file takes up, if the last answer was 0.
    fn forget_no_blocks(&self, inode: InodeId) {
        let found = self.file_system.attributes(inode);
        if found.is_ok_and(|found| found.inode.blocks == 0 && found.inode.size > 0) {
            self.forget_attributes(inode);
        }
    }

    /// Finds data or a hole, once the kernel has written back all pages of the hole that is found. Waits for the
    /// kernel.
    pub(crate) fn seek_written_back(&self, inode: InodeId, what: Seek, offset: u64) -> Outcome<u64> {
        let seek = |what, offset| self.file_system.seek(inode, what, offset);
        let write_back = |hole: Range<u64>| {
            let length = if hole.end == u64::MAX { 0 } else { hole.end - hole.start };
            self.forget_and_wait(&StaleItem::Inode(inode, Pages::Range { offset: hole.start, length }));
        };
        seek_past_dirty(&seek, &write_back, what, offset)
    }

    /// Makes the kernel write back and forget pages of files that programs may have mapped for writing. No other
    /// session existed when those were filled, so the files are not reserved. The next touch fills the pages anew.
    pub(crate) fn drop_mappable_pages(&self) {
        let device = self.device.as_fd();
        for inode in self.mappable.inodes() {
            if let Err(errno) = notify::inval_inode(&self.expiring.to(device), inode, Pages::ALL) {
                tracing::debug!(inode = inode.0, %errno, "the kernel has no pages to forget");
            }
        }
    }

    /// Makes the kernel forget all names that it keeps. Returns whether it could.
    pub(crate) fn forget_names(&self) -> bool {
        if !self.may_expire_names {
            return false;
        }
        // Names may be exchanged while the first call waits for their directories. They are recorded meanwhile, and the
        // second call forgets them.
        self.forget_recorded_names() && self.forget_recorded_names()
    }

    fn forget_recorded_names(&self) -> bool {
        let (names, lost_until) = self.dentry_ttls.take_names();
        let device = self.device.as_fd();
        let entries = names.iter().map(|(directory, name)| (*directory, &**name));
        if let Err(errno) = notify::expire_entries(&self.expiring.to(device), entries) {
            tracing::debug!(%errno, "the kernel keeps a name until it expires");
            return false;
        }
        lost_until.is_none()
    }

    /// Checks whether the items that the kernel caches of a reply still hold. If a lease was lost since, SharedFS made
    /// the kernel forget the item before the reply came. So the kernel is made to forget it once more.
    pub(crate) fn recheck_cached(&self, request: &[u8], reply: &ReplyBuffer) {
        let mut last = (InodeId(0), true);
        let mut holds = |inode: InodeId| {
            if last.0 != inode {
                last = (inode, self.file_system.is_valid(inode));
            }
            last.1
        };
        let forget = |stale| self.invalidations.push_stale(stale);
        let named = |item: &CachedItem| match item {
            CachedItem::Name(directory, place) => Some((*directory, request.get(place.clone()).unwrap_or_default())),
            CachedItem::Listed(directory, _, place) => Some((*directory, reply.body(place.clone()))),
            CachedItem::Attributes(_) | CachedItem::Pages(_) => None,
        };
        if reply.has_name_ttls {
            let ttl = Duration::from_millis(self.file_system.cache_ttl_max_ms());
            self.dentry_ttls.record_names(reply.cached_items().iter().filter_map(named), ttl);
        }
        for item in reply.cached_items() {
            if let Some((directory, name)) = named(item).filter(|(directory, _)| !holds(*directory)) {
                forget(StaleItem::Entry(directory, name.into()));
            }
            match item {
                CachedItem::Attributes(inode) if !holds(*inode) => self.forget_attributes(*inode),
                CachedItem::Pages(inode) if !holds(*inode) => forget(StaleItem::Inode(*inode, Pages::ALL)),
                // This does not use `holds`: that would then remember the entries, and ask for the directory again for
                // each.
                CachedItem::Listed(_, inode, _) if !self.file_system.is_valid(*inode) => {
                    self.forget_attributes(*inode);
                }
                CachedItem::Attributes(_) | CachedItem::Pages(_) | CachedItem::Name(..) | CachedItem::Listed(..) => {}
            }
        }
    }

    /// Ends the work on a reply.
    pub(crate) fn end_answer(&self, reply: &mut ReplyBuffer) {
        if std::mem::take(&mut reply.has_name_ttls) {
            self.dentry_ttls.end_answer();
        }
    }
}
