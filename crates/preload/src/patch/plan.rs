//! Plans: the sites of one build of a library that can be patched, kept in a file.
//!
//! ```text
//! magic:8 "ASHLPAT3"  build id length:8  build id:32  sites:8  then of each site, 48 bytes:
//!   offset:4  number:4  length:1  call:1  displacement:1  unused:5  bytes:32
//! ```

use std::os::unix::fs::FileExt;

use super::Library;
use super::kept_file::{BUILD_ID_MAX, KeptFile};

/// The longest window of instructions that is patched, in bytes.
pub(crate) const WINDOW_MAX: usize = 32;

const MAGIC: &[u8; 8] = b"ASHLPAT3";
const HEAD_BYTES: usize = 56;
const SITE_BYTES: usize = 48;

/// More system calls than any library has.
const SITES_MAX: usize = 4096;

/// One system call that can be patched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PatchSite {
    /// The start of the window, from the library's base.
    pub(crate) offset: u32,
    /// The call's number, or [`PatchSite::ANY_NUMBER`].
    pub(crate) number: i32,
    /// Bytes of the window.
    pub(crate) length: u8,
    /// The offset of `syscall` in the window.
    pub(crate) call: u8,
    /// The offset of a displacement in the window that is relative to the code, or [`PatchSite::NO_DISPLACEMENT`].
    pub(crate) displacement: u8,
    /// The window as the scan found it.
    pub(crate) bytes: [u8; WINDOW_MAX],
}

impl PatchSite {
    /// The number is unknown before the call.
    pub(crate) const ANY_NUMBER: i32 = -1;
    /// Nothing in the window is relative.
    pub(crate) const NO_DISPLACEMENT: usize = 255;

    /// Returns the window's code.
    pub(crate) fn code(&self) -> &[u8] {
        self.bytes.get(..self.length.into()).unwrap_or_default()
    }

    fn encode(&self, into: &mut Vec<u8>) {
        into.extend(self.offset.to_le_bytes());
        into.extend(self.number.to_le_bytes());
        into.extend([self.length, self.call, self.displacement, 0, 0, 0, 0, 0]);
        into.extend(self.bytes);
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes);
        let site = Self {
            offset: word(0)?,
            number: word(4)? as i32,
            length: bytes[8],
            call: bytes[9],
            displacement: bytes[10],
            bytes: bytes.get(16..SITE_BYTES)?.try_into().ok()?,
        };
        let is_call = site.code().get(site.call.into()..usize::from(site.call) + 2) == Some(&[0x0f, 0x05]);
        is_call.then_some(site)
    }
}

/// All sites of a library that can be patched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The build id of the library.
    pub(crate) build_id: Vec<u8>,
    /// The sites.
    pub(crate) sites: Vec<PatchSite>,
}

impl Plan {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD_BYTES + self.sites.len() * SITE_BYTES);
        bytes.extend(MAGIC);
        bytes.extend((self.build_id.len() as u64).to_le_bytes());
        bytes.extend(&self.build_id);
        bytes.resize(16 + BUILD_ID_MAX, 0);
        bytes.extend((self.sites.len() as u64).to_le_bytes());
        self.sites.iter().for_each(|site| site.encode(&mut bytes));
        bytes
    }

    /// Loads the plan that is kept for a library.
    pub(super) fn load(kept: &KeptFile, library: &Library) -> Option<Self> {
        let (file, length) = kept.open()?;
        if length > (HEAD_BYTES + SITES_MAX * SITE_BYTES) as u64 {
            return None;
        }
        // One read: reading on until the end takes four calls.
        let mut bytes = vec![0; length as usize];
        file.read_exact_at(&mut bytes, 0).ok()?;
        Self::decode(&bytes, library)
    }

    /// Stores the plan. If that fails, the next program scans again.
    pub(super) fn store(&self, kept: &KeptFile) {
        kept.store(&self.encode());
    }

    fn decode(bytes: &[u8], library: &Library) -> Option<Self> {
        let word = |at: usize| bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
        let length = usize::try_from(word(8)?).ok().filter(|length| *length <= BUILD_ID_MAX)?;
        let build_id = bytes.get(16..16 + length)?;
        let count = usize::try_from(word(48)?).ok().filter(|count| *count <= SITES_MAX)?;
        if bytes.get(..8)? != MAGIC || build_id != library.build_id || bytes.len() != HEAD_BYTES + count * SITE_BYTES {
            return None;
        }
        let sites = bytes[HEAD_BYTES..].chunks_exact(SITE_BYTES).map(PatchSite::decode).collect::<Option<_>>()?;
        Some(Self { build_id: build_id.to_vec(), sites })
    }
}
