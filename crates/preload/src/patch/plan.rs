//! A plan: the places of one build of a library that can be patched, and how it is kept in a file.
//!
//! ```text
//! magic:8 "ASHLPAT2"  build id length:8  build id:32  sites:8  then of each site, 48 bytes:
//!   offset:4  number:4  length:1  call:1  displacement:1  unused:5  bytes:32
//! ```

use std::ffi::{CStr, CString};

use super::Library;
use crate::arch::system_call;

/// The longest window of instructions that is patched, in bytes.
pub(crate) const WINDOW_MAX: usize = 32;

const MAGIC: &[u8; 8] = b"ASHLPAT2";
const HEAD_BYTES: usize = 56;
const SITE_BYTES: usize = 48;
const BUILD_ID_MAX: usize = 32;
/// More system calls than any libc has.
const SITES_MAX: usize = 4096;

/// One place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Site {
    /// Where the window begins, from the library's base.
    pub(crate) offset: u32,
    /// The call's number, or [`Site::ANY_NUMBER`].
    pub(crate) number: i32,
    /// Bytes of the window.
    pub(crate) length: u8,
    /// Where in it `syscall` stands.
    pub(crate) call: u8,
    /// Where in it a displacement stands that is relative to the code, or [`Site::NO_DISPLACEMENT`].
    pub(crate) displacement: u8,
    /// The window as the scan found it.
    pub(crate) bytes: [u8; WINDOW_MAX],
}

impl Site {
    /// The number is not known before the call.
    pub(crate) const ANY_NUMBER: i32 = -1;
    /// Nothing in the window is relative.
    pub(crate) const NO_DISPLACEMENT: usize = 255;

    /// The window's code.
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

/// All places of a library that can be patched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Of which build.
    pub(crate) build_id: Vec<u8>,
    /// Where.
    pub(crate) sites: Vec<Site>,
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

    fn decode(bytes: &[u8], library: &Library) -> Option<Self> {
        let word = |at: usize| bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
        let length = usize::try_from(word(8)?).ok().filter(|length| *length <= BUILD_ID_MAX)?;
        let build_id = bytes.get(16..16 + length)?;
        let count = usize::try_from(word(48)?).ok().filter(|count| *count <= SITES_MAX)?;
        if bytes.get(..8)? != MAGIC || build_id != library.build_id || bytes.len() != HEAD_BYTES + count * SITE_BYTES {
            return None;
        }
        let sites = bytes[HEAD_BYTES..].chunks_exact(SITE_BYTES).map(Site::decode).collect::<Option<_>>()?;
        Some(Self { build_id: build_id.to_vec(), sites })
    }
}

/// The file in which a plan is kept. Whoever can write it says where a program jumps, though only to the hook: it is believed where it
/// belongs to the super-user or to who runs the program, and nobody else may write it.
#[derive(Debug)]
pub(crate) struct Kept {
    path: CString,
    draft: CString,
}

const PERMISSIONS: u64 = 0o644;

impl Kept {
    /// The plan of a build, in a directory.
    pub(crate) fn at(directory: &CStr, build_id: &[u8]) -> Option<Self> {
        if build_id.is_empty() || build_id.len() > BUILD_ID_MAX {
            return None;
        }
        let mut path = directory.to_bytes().to_vec();
        path.push(b'/');
        for byte in build_id {
            path.extend(format!("{byte:02x}").bytes());
        }
        let draft = [&path[..], format!(".{}", std::process::id()).as_bytes()].concat();
        Some(Self { path: CString::new(path).ok()?, draft: CString::new(draft).ok()? })
    }

    /// Reads it.
    pub(crate) fn load(&self, library: &Library) -> Option<Plan> {
        let flags = (libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NOFOLLOW) as u64;
        // SAFETY: the path is a string that outlives the call.
        let file = unsafe { system_call(libc::SYS_open as u64, [self.path.as_ptr() as u64, flags, 0, 0, 0, 0]) };
        if file < 0 {
            return None;
        }
        let plan = Self::load_from(file as u64, library);
        // SAFETY: the descriptor was opened above, and nobody else knows it.
        unsafe { system_call(libc::SYS_close as u64, [file as u64, 0, 0, 0, 0, 0]) };
        plan
    }

    fn load_from(file: u64, library: &Library) -> Option<Plan> {
        // SAFETY: zeros are a `stat`, which the call fills.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the buffer is a `stat`.
        let done = unsafe { system_call(libc::SYS_fstat as u64, [file, (&raw mut stat) as u64, 0, 0, 0, 0]) };
        // SAFETY: it takes nothing, and can't fail.
        let user = unsafe { system_call(libc::SYS_geteuid as u64, [0; 6]) };
        let is_believed = (stat.st_uid == 0 || i64::from(stat.st_uid) == user) && stat.st_mode & 0o022 == 0;
        let length = usize::try_from(stat.st_size).ok()?;
        if done < 0 || !is_believed || length > HEAD_BYTES + SITES_MAX * SITE_BYTES {
            return None;
        }
        let mut bytes = vec![0; length];
        // SAFETY: the buffer has that many bytes.
        let count =
            unsafe { system_call(libc::SYS_read as u64, [file, bytes.as_mut_ptr() as u64, length as u64, 0, 0, 0]) };
        if count == length as i64 { Plan::decode(&bytes, library) } else { None }
    }

    /// Writes it, under another name first: others may read it at any moment. Where that fails, the next program scans again.
    pub(crate) fn store(&self, plan: &Plan) {
        let bytes = plan.encode();
        let flags = (libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC) as u64;
        let (path, draft) = (self.path.as_ptr() as u64, self.draft.as_ptr() as u64);
        // SAFETY: the paths are strings and the buffer is as long as said; the descriptor is nobody else's.
        unsafe {
            let file = system_call(libc::SYS_open as u64, [draft, flags, PERMISSIONS, 0, 0, 0]);
            if file < 0 {
                return;
            }
            let (at, length) = (bytes.as_ptr() as u64, bytes.len() as u64);
            let count = system_call(libc::SYS_write as u64, [file as u64, at, length, 0, 0, 0]);
            system_call(libc::SYS_close as u64, [file as u64, 0, 0, 0, 0, 0]);
            if count == bytes.len() as i64 {
                system_call(libc::SYS_rename as u64, [draft, path, 0, 0, 0, 0]);
            } else {
                system_call(libc::SYS_unlink as u64, [draft, 0, 0, 0, 0, 0]);
            }
        }
    }
}
