//! Files that a process maps out of the data segments (DAX).

use std::os::fd::BorrowedFd;

use ashlar_types::{BLOCK_BYTES, Errno, InodeId};
use ashlar_wire::{Extent, Reply, Request};

use crate::LibFs;
use crate::api::Outcome;
use crate::grants::Claim;

/// So much is checked against its checksums when it's mapped. Who maps more may look at a part, and would wait for all of it; that is checked with the
/// whole arena (`ashlar fsck`).
const CHECKED_BYTES_MAX: u64 = 1 << 20;
/// How often a lease to write is asked for that others take again before the file is mapped.
const TRIES: u32 = 16;

/// The numbers of a session's mappings.
#[derive(Debug, Default)]
pub(crate) struct MappingNumbers {
    next: u32,
    /// Of those that were asked for in vain, or so it seems.
    unsure: Vec<u32>,
}

impl MappingNumbers {
    fn take(&mut self) -> u32 {
        self.unsure.pop().unwrap_or_else(|| {
            let number = self.next;
            self.next = number.wrapping_add(1);
            number
        })
    }
}

/// A file's blocks that stay where they are until [`LibFs::unmap`].
#[derive(Debug)]
pub struct MappedFile {
    /// What the session calls it.
    pub number: u32,
    /// Where the blocks are, one behind the other.
    pub pieces: Vec<MappedPiece>,
}

/// Blocks of a file that follow each other in a segment.
#[derive(Clone, Copy, Debug)]
pub struct MappedPiece {
    /// The segment's number, for [`LibFs::with_segment_file`].
    pub segment: u32,
    /// The first block in the segment.
    pub block: u32,
    /// Bytes, whole blocks.
    pub bytes: u64,
}

impl LibFs {
    /// Has `blocks` blocks of a file from the block `first` on stay where they are, for the process to map; the caller has the file open. With
    /// `follows` all that is written to the file from now on, by whomever, is to be seen there when the write returns; else nothing need be. It
    /// holds until [`LibFs::unmap`], or the session's end, after which the memory may show other files' content.
    ///
    /// `None` where that can't be: holes, small files, files in many pieces, damaged ones as far as they are checked.
    ///
    /// # Errors
    /// `EBADF`, `ESTALE`, `EACCES`, `EINVAL`; `EIO` where SharedFS is away.
    pub fn map(&self, id: InodeId, first: u64, blocks: u64, follows: bool) -> Outcome<Option<MappedFile>> {
        let number = self.mapping_numbers.lock().take();
        let request = Request::Map { inode: id, first, blocks, follows, number };
        let asked = if follows { self.map_followed(id, &request) } else { self.map_as_is(id, &request) };
        // SharedFS may have done it all the same. Who is given the number next has that end.
        let extents = asked.inspect_err(|_| self.mapping_numbers.lock().unsure.push(number))?;
        if extents.is_empty() {
            return Ok(None);
        }
        let found: Outcome<Vec<MappedPiece>> = extents.iter().map(|extent| self.piece(extent, blocks)).collect();
        match found {
            Ok(pieces) => Ok(Some(MappedFile { number, pieces })),
            Err(errno) => {
                self.unmap(id, number);
                // Who reads it otherwise is told what is wrong with it.
                if errno == Errno::EIO { Ok(None) } else { Err(errno) }
            }
        }
    }

    /// An extent as a piece of a mapping of so many blocks, if it is sound.
    fn piece(&self, &Extent { address, blocks, .. }: &Extent, all: u64) -> Outcome<MappedPiece> {
        let address = address.ok_or(Errno::EIO)?;
        let bytes = blocks * BLOCK_BYTES;
        let is_checked = all * BLOCK_BYTES <= CHECKED_BYTES_MAX;
        if is_checked && !self.segment(address.segment())?.are_sound(address.block(), blocks).map_err(|_| Errno::EIO)? {
            return Err(Errno::EIO);
        }
        Ok(MappedPiece { segment: address.segment(), block: address.block(), bytes })
    }

    fn map_as_is(&self, id: InodeId, request: &Request) -> Outcome<Vec<Extent>> {
        // What others have written by now is applied when the lease is granted.
        drop(self.view(Claim::read(id))?);
        self.ask_for_blocks(request)
    }

    fn map_followed(&self, id: InodeId, request: &Request) -> Outcome<Vec<Extent>> {
        let note = || {
            self.change(&[Claim::write(id)], |locked| {
                locked.nodes.iter_mut().filter(|node| node.0 == id).for_each(|node| node.1.is_followed = true);
                Ok(())
            })
        };
        for _ in 0..TRIES {
            // What another thread writes while SharedFS is asked is shown too.
            note()?;
            match self.ask_for_blocks(request) {
                Err(Errno::EAGAIN) => {}
                Ok(extents) if !extents.is_empty() => {
                    // The lease may have gone and come back meanwhile, before SharedFS could tell that the file is followed.
                    note()?;
                    self.show(id);
                    return Ok(extents);
                }
                done => {
                    self.ask_anew(id);
                    return done;
                }
            }
        }
        self.ask_anew(id);
        Ok(Vec::new())
    }

    fn ask_for_blocks(&self, request: &Request) -> Outcome<Vec<Extent>> {
        match self.call(request)? {
            Reply::Mapped(extents) => Ok(extents),
            _ => Err(Errno::EIO),
        }
    }

    /// Ends what [`LibFs::map`] began: the process has unmapped it.
    pub fn unmap(&self, id: InodeId, number: u32) {
        // A SharedFS that is away keeps the blocks until the session's end.
        let _ = self.call(&Request::Unmap { number });
        self.ask_anew(id);
    }

    /// Whether writes are to be shown is told with the next lease.
    fn ask_anew(&self, id: InodeId) {
        if let Some(node) = self.nodes.existing(id) {
            let mut state = node.write();
            if state.is_followed {
                state.lease = None;
            }
        }
    }

    /// A data segment's file, which can only be read, and where in it a block begins.
    ///
    /// # Errors
    /// `EIO` where SharedFS is away.
    pub fn with_segment_file<R>(
        &self,
        piece: &MappedPiece,
        use_it: impl FnOnce(BorrowedFd<'_>, u64) -> R,
    ) -> Outcome<R> {
        let segment = self.segment(piece.segment)?;
        Ok(use_it(segment.file(), segment.offset_of(piece.block)))
    }

    /// Has what was just written to a file be seen where it is mapped.
    #[cold]
    pub(crate) fn show(&self, id: InodeId) {
        // It is written all the same where SharedFS is away: one that comes back shows it when it has applied the log.
        let _ = self.call(&Request::Show { inode: id });
    }
}
