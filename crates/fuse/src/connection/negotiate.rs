//! INIT: the mount and the kernel agree on the protocol's version and flags.

use ashlar_types::Errno;
use ashlar_wire::BusyWait;
use zerocopy::IntoBytes;

use crate::connection::device::{FuseDevice, REQUEST_BYTES, TRANSFER_BYTES};
use crate::connection::reply_buffer::ReplyBuffer;
use crate::mount_error::MountError;
use crate::proto::{
    Arguments, InHeader, InitIn, InitOut, Opcode, VERSION_MAJOR, VERSION_MINOR, VERSION_MINOR_MIN, init,
};

/// How many requests for read-ahead and the like may be under way at once, and the number that makes the kernel slow
/// down their senders.
const BACKGROUND_MAX: u16 = 64;
const BACKGROUND_CONGESTED: u16 = 48;

/// The flags that the mount asks for, if the kernel has them. Three are left out:
///
/// - the write-back cache, which would let the kernel change the order of updates
/// - opening without a message, since handles keep removed files alive
/// - truncating with the message that opens, which comes before the kernel checks whether the file is a running program
const WANTED: u64 = init::ASYNC_READ
    | init::POSIX_LOCKS
    | init::EXPORT_SUPPORT
    | init::BIG_WRITES
    | init::DONT_MASK
    | init::FLOCK_LOCKS
    | init::AUTO_INVAL_DATA
    | init::DO_READDIRPLUS
    | init::READDIRPLUS_AUTO
    | init::ASYNC_DIO
    | init::PARALLEL_DIROPS
    | init::POSIX_ACL
    | init::MAX_PAGES
    | init::CACHE_SYMLINKS
    | init::HANDLE_KILLPRIV_V2
    | init::SETXATTR_EXT
    | init::INIT_EXT
    | init::HAS_EXPIRE_ONLY
    | init::DIRECT_IO_ALLOW_MMAP;

/// The protocol that both sides agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Agreement {
    /// The minor version that both speak.
    pub(crate) minor: u32,
    /// The flags that both know.
    pub(crate) flags: u64,
}

impl Agreement {
    /// Returns the agreement with a kernel that sent `asked` and offers the flags `offered` (both halves). Returns
    /// `None` if the kernel's version is not usable.
    fn with(asked: &InitIn, offered: u64, wanted: u64) -> Option<Self> {
        let is_usable = asked.major == VERSION_MAJOR && asked.minor >= VERSION_MINOR_MIN;
        is_usable.then(|| Self { minor: asked.minor.min(VERSION_MINOR), flags: offered & wanted })
    }

    fn reply(self, asked: &InitIn) -> InitOut {
        InitOut {
            major: VERSION_MAJOR,
            minor: self.minor,
            max_readahead: asked.max_readahead.max(TRANSFER_BYTES as u32),
            flags: (self.flags & 0xffff_ffff) as u32,
            max_background: BACKGROUND_MAX,
            congestion_threshold: BACKGROUND_CONGESTED,
            max_write: TRANSFER_BYTES as u32,
            time_gran: 1,
            max_pages: (TRANSFER_BYTES / 4096) as u16,
            flags2: (self.flags >> 32) as u32,
            ..InitOut::default()
        }
    }

    /// Whether files whose handles bypass the kernel's pages can be mapped all the same.
    pub(crate) const fn maps_direct(self) -> bool {
        self.flags & init::DIRECT_IO_ALLOW_MMAP != 0
    }

    /// Whether the mount can make names expire in the kernel.
    pub(crate) const fn expires(self) -> bool {
        self.flags & init::HAS_EXPIRE_ONLY != 0
    }

    /// Whether SETXATTR has its flags for ACLs.
    pub(crate) const fn setxattr_extended(self) -> bool {
        self.flags & init::SETXATTR_EXT != 0
    }
}

/// Answers INIT, which is the first request after mounting. If the kernel offers rings, `make_rings` makes them. If it
/// returns any, both sides agree on rings, and the kernel waits for them from then on.
pub(crate) fn negotiate<R>(
    device: &FuseDevice,
    make_rings: impl FnOnce() -> Option<R>,
) -> Result<(Agreement, Option<R>), MountError> {
    let mut buffer = vec![0; REQUEST_BYTES];
    let protocol = |reason: &str| MountError::Protocol { reason: reason.to_owned() };
    let count = device.receive(&mut buffer, &mut BusyWait::default()).map_err(|errno| protocol(&errno.to_string()))?;
    let count = count.ok_or_else(|| protocol("the mount ended at once"))?;
    let request = buffer.get(..count).unwrap_or_default();
    let (header, asked, flags) = parse_init(request).map_err(|_| protocol("the first request was malformed"))?;
    let mut reply = ReplyBuffer::new(size_of::<InitOut>());
    let rings = if flags & init::OVER_IO_URING != 0 { make_rings() } else { None };
    let wanted = WANTED | if rings.is_some() { init::OVER_IO_URING } else { 0 };
    let agreement = Agreement::with(&asked, flags, wanted);
    let result = match agreement {
        Some(agreement) => reply.bytes(agreement.reply(&asked).as_bytes()),
        None => Err(Errno::EPROTO),
    };
    device.send(reply.seal(header.unique, result)).map_err(|errno| protocol(&errno.to_string()))?;
    let agreement = agreement.ok_or(MountError::OldKernel { major: asked.major, minor: asked.minor })?;
    Ok((agreement, rings))
}

fn parse_init(request: &[u8]) -> Result<(InHeader, InitIn, u64), Errno> {
    let mut arguments = Arguments::new(request);
    let header: InHeader = arguments.structure()?;
    if header.opcode != Opcode::Init as u32 {
        return Err(Errno::EPROTO);
    }
    let asked: InitIn = arguments.structure()?;
    let low = u64::from(asked.flags);
    let high = if low & init::INIT_EXT != 0 { arguments.structure::<u32>()? } else { 0 };
    Ok((header, asked, u64::from(high) << 32 | low))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(opcode: u32, minor: u32, flags: u32, rest: &[u8]) -> Vec<u8> {
        let header = InHeader { opcode, unique: 2, ..InHeader::default() };
        let asked = InitIn { major: 7, minor, max_readahead: 131_072, flags };
        [header.as_bytes(), asked.as_bytes(), rest].concat()
    }

    #[test]
    fn both_halves_of_the_flags_count() {
        let (header, asked, flags) = parse_init(&request(26, 38, 1 << 30 | 1, &[0xff; 48])).unwrap();
        assert_eq!(header.unique, 2);
        let agreement = Agreement::with(&asked, flags, WANTED).unwrap();
        assert_eq!(agreement.minor, 38);
        assert_eq!(
            agreement.flags,
            init::ASYNC_READ | init::INIT_EXT | init::HAS_EXPIRE_ONLY | init::DIRECT_IO_ALLOW_MMAP
        );
        assert_eq!(agreement.reply(&asked).flags2, 0b11000);
    }

    #[test]
    fn agreement_omits_flags_that_break_order() {
        let (_, asked, flags) = parse_init(&request(26, 99, u32::MAX, &[0xff; 48])).unwrap();
        let agreement = Agreement::with(&asked, flags, WANTED).unwrap();
        assert_eq!(agreement.minor, VERSION_MINOR);
        assert_eq!(agreement.flags & (1 << 16), 0, "no write-back cache");
        assert_eq!(agreement.flags & (1 << 17 | 1 << 24), 0, "the kernel sends a request for each open");
    }

    #[test]
    fn older_kernels_send_less_and_too_old_ones_are_refused() {
        let (_, asked, flags) = parse_init(&request(26, 31, 1, &[])).unwrap();
        assert!(!Agreement::with(&asked, flags, WANTED).unwrap().setxattr_extended());
        let (_, asked, flags) = parse_init(&request(26, 30, 1, &[])).unwrap();
        assert_eq!(Agreement::with(&asked, flags, WANTED), None);
        assert_eq!(parse_init(&request(1, 38, 1, &[])).unwrap_err(), Errno::EPROTO);
        assert_eq!(parse_init(&request(26, 38, 1 << 30, &[])).unwrap_err(), Errno::EIO);
    }
}
