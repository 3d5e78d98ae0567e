//! Files whose blocks a process maps out of the data segments (DAX).

use std::os::fd::BorrowedFd;

use ashlar_types::{BLOCK_BYTES, Errno, Extent, InodeId};
use ashlar_wire::{Reply, Request};

use crate::LibFs;
use crate::api::Outcome;
use crate::leases::claim::Claim;

/// Bytes of a mapping up to which its checksums are verified at once.
///
/// A process that maps more may read only a part of it, and would wait for the whole. `ashlar fsck` verifies the rest
/// with the whole arena.
const CHECKED_BYTES_MAX: u64 = 1 << 20;
/// Attempts to get a lease to write before another session revokes it and the file can't be mapped.
const LEASE_ATTEMPTS_MAX: u32 = 16;

/// A file's blocks that stay where they are until [`LibFs::unmap`].
#[derive(Debug)]
pub struct MappedFile {
    /// The mapping's number in this session.
    pub number: u32,
    /// The blocks, in the file's order.
    pub pieces: Vec<MappedPiece>,
}

/// Blocks of a file that follow each other in a segment.
#[derive(Clone, Copy, Debug)]
pub struct MappedPiece {
    /// The segment's number, for [`LibFs::with_segment_file`].
    pub segment: u32,
    /// The first block in the segment.
    pub block: u32,
    /// Bytes, in whole blocks.
    pub bytes: u64,
}

impl LibFs {
    /// Pins `blocks` blocks of a file from the block `first` on, so that the process can map them.
    ///
    /// The caller has the file open. With `follows`, every later write to the file, by any session, shows in the
    /// mapping when it returns. The blocks stay until [`LibFs::unmap`] or the session's end. After that the memory may
    /// show other files' content.
    ///
    /// `None` if the blocks can't be mapped: holes, small files, files in many pieces, files that a check finds
    /// damaged.
    ///
    /// # Errors
    /// `EBADF`, `ESTALE`, `EACCES`, `EINVAL`; `EIO` if SharedFS is away.
    pub fn map(&self, id: InodeId, first: u64, blocks: u64, follows: bool) -> Outcome<Option<MappedFile>> {
        let number = self.mapping_numbers.lock().take_number();
        let request = Request::Map { inode: id, first, blocks, follows, number };
        let asked = if follows { self.map_followed(id, &request) } else { self.map_as_is(id, &request) };
        // SharedFS may have pinned the blocks all the same. The next request with this number ends that.
        let extents = asked.inspect_err(|_| self.mapping_numbers.lock().mark_unsure(number))?;
        if extents.is_empty() {
            return Ok(None);
        }
        let found: Outcome<Vec<MappedPiece>> =
            extents.iter().map(|extent| self.checked_piece(extent, blocks)).collect();
        match found {
            Ok(pieces) => Ok(Some(MappedFile { number, pieces })),
            Err(errno) => {
                self.unmap(id, number);
                // A read by another way reports the damage.
                if errno == Errno::EIO { Ok(None) } else { Err(errno) }
            }
        }
    }

    /// Returns an extent as a piece of a mapping of `all` blocks, if the checksums match.
    fn checked_piece(&self, &Extent { address, blocks, .. }: &Extent, all: u64) -> Outcome<MappedPiece> {
        let address = address.ok_or(Errno::EIO)?;
        let bytes = blocks * BLOCK_BYTES;
        let is_checked = all * BLOCK_BYTES <= CHECKED_BYTES_MAX;
        if is_checked && !self.segment(address.segment())?.are_sound(address.block(), blocks).map_err(|_| Errno::EIO)? {
            return Err(Errno::EIO);
        }
        Ok(MappedPiece { segment: address.segment(), block: address.block(), bytes })
    }

    fn map_as_is(&self, id: InodeId, request: &Request) -> Outcome<Vec<Extent>> {
        // The grant of the lease waits until other sessions' earlier writes are applied.
        drop(self.view_node(Claim::read(id))?);
        self.request_blocks(request)
    }

    fn map_followed(&self, id: InodeId, request: &Request) -> Outcome<Vec<Extent>> {
        let note = || {
            self.change_nodes(&[Claim::write(id)], |locked| {
                locked.nodes.iter_mut().filter(|node| node.0 == id).for_each(|node| node.1.is_followed = true);
                Ok(())
            })
        };
        for _ in 0..LEASE_ATTEMPTS_MAX {
            // Another thread's writes during the request must show too.
            note()?;
            match self.request_blocks(request) {
                Err(Errno::EAGAIN) => {}
                Ok(extents) if !extents.is_empty() => {
                    // The lease may have gone and come back meanwhile, before SharedFS knew that the file is followed.
                    note()?;
                    self.show_writes(id);
                    return Ok(extents);
                }
                done => {
                    self.drop_followed_lease(id);
                    return done;
                }
            }
        }
        self.drop_followed_lease(id);
        Ok(Vec::new())
    }

    fn request_blocks(&self, request: &Request) -> Outcome<Vec<Extent>> {
        match self.call(request)? {
            Reply::Mapped(extents) => Ok(extents),
            _ => Err(Errno::EIO),
        }
    }

    /// Ends a mapping of [`LibFs::map`] that the process has unmapped.
    pub fn unmap(&self, id: InodeId, number: u32) {
        // A SharedFS that is away keeps the blocks until the session's end.
        let _ = self.call(&Request::Unmap { number });
        self.drop_followed_lease(id);
    }

    /// Drops the lease of a followed file: the next grant says whether writes must be shown.
    fn drop_followed_lease(&self, id: InodeId) {
        if let Some(node) = self.nodes.existing(id) {
            let mut state = node.write();
            if state.is_followed {
                state.lease = None;
            }
        }
    }

    /// Calls `use_it` with a data segment's read-only file and a block's offset in it.
    ///
    /// # Errors
    /// `EIO` if SharedFS is away.
    pub fn with_segment_file<R>(
        &self,
        piece: &MappedPiece,
        use_it: impl FnOnce(BorrowedFd<'_>, u64) -> R,
    ) -> Outcome<R> {
        let segment = self.segment(piece.segment)?;
        Ok(use_it(segment.file(), segment.offset_of(piece.block)))
    }

    /// Shows the latest writes to a file where it is mapped.
    #[cold]
    pub(crate) fn show_writes(&self, id: InodeId) {
        // The write succeeds even if SharedFS is away; a restarted SharedFS shows it when it has applied the log.
        let _ = self.call(&Request::Show { inode: id });
    }
}
