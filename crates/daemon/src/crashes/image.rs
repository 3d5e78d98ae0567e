//! An arena's files as a crash left them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const PAGE_BYTES: usize = 4096;

/// A file: its length, and its first bytes; zeros follow them.
#[derive(Clone, Debug)]
pub struct FileImage {
    pub length: u64,
    pub bytes: Vec<u8>,
}

/// The files of an arena, by their paths in its directory.
#[derive(Clone, Debug, Default)]
pub struct Image(pub BTreeMap<PathBuf, FileImage>);

impl Image {
    /// Makes `directory` hold these files and nothing else.
    pub fn write(&self, directory: &Path) {
        if directory.exists() {
            fs::remove_dir_all(directory).expect("removed");
        }
        for folder in ["metadata", "segments", "sessions"] {
            fs::create_dir_all(directory.join(folder)).expect("made");
        }
        for (path, content) in &self.0 {
            let file = File::create(directory.join(path)).expect("made");
            file.set_len(content.length).expect("sized");
            for (number, page) in content.bytes.chunks(PAGE_BYTES).enumerate() {
                if page.iter().any(|&byte| byte != 0) {
                    file.write_all_at(page, (number * PAGE_BYTES) as u64).expect("written");
                }
            }
        }
    }
}

/// Reads a file as it is now, up to a number of bytes.
pub fn read(path: &Path, limit: usize) -> FileImage {
    let file = File::open(path).expect("opened");
    let length = file.metadata().expect("known").len();
    let mut bytes = vec![0; limit.min(length as usize)];
    file.read_exact_at(&mut bytes, 0).expect("read");
    FileImage { length, bytes }
}

/// Reads as much of LMDB's file as its two first pages count.
///
/// A page more than one of them knows does no harm.
pub fn read_metadata(path: &Path) -> FileImage {
    const LAST_PAGE_AT: usize = 136;
    let first = read(path, 2 * PAGE_BYTES);
    let last_page = |page: usize| {
        let at = page * PAGE_BYTES + LAST_PAGE_AT;
        u64::from_le_bytes(first.bytes[at..at + 8].try_into().expect("eight bytes"))
    };
    read(path, (last_page(0).max(last_page(1)) as usize + 1) * PAGE_BYTES)
}

/// Returns LMDB's file as it may be in the middle of a commit.
///
/// The new pages are there in part. The two first pages are the old ones, as LMDB writes them after all others are
/// synced.
pub fn torn_metadata(old: &FileImage, new: &FileImage, choose: &mut dyn FnMut(usize) -> usize) -> FileImage {
    let mut torn = FileImage { length: old.length.max(new.length), bytes: old.bytes.clone() };
    torn.bytes.resize(old.bytes.len().max(new.bytes.len()), 0);
    for (number, page) in new.bytes.chunks(PAGE_BYTES).enumerate().skip(2) {
        let there = &mut torn.bytes[number * PAGE_BYTES..][..page.len()];
        if there != page && choose(2) == 1 {
            there.copy_from_slice(page);
        }
    }
    torn
}
