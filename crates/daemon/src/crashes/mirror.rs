//! Follows an arena's files, and makes images that a crash may leave.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ashlar_pmem::witness::{Deed, FileNumber};
use ashlar_pmem::{CrashMedium, CrashTwin, MediumKind, Persistent};
use ashlar_tests::random::Random;

use super::image::{FileImage, Image, read, read_metadata, torn_metadata};
use ashlar_node::sessions::identity::{AT_BOOT, AT_START};

/// Bytes of control pages and lease tables that are followed.
///
/// The tables behind them matter only to living processes.
const PAGE_BYTES: u64 = 4096;

/// The processes that a crash ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// The machine.
    Power,
    /// SharedFS alone: its session goes on.
    SharedFs,
    /// SharedFS and its session.
    Processes,
}

/// A twin for each mapped file of an arena.
pub struct Mirror {
    directory: PathBuf,
    medium: CrashMedium,
    files: BTreeMap<FileNumber, Option<Followed>>,
    /// LMDB's file after the last commit, or in the middle of the commit after it.
    metadata: FileImage,
    superblock: FileImage,
}

struct Followed {
    path: PathBuf,
    length: u64,
    twin: CrashTwin,
}

impl Mirror {
    /// Follows the files of an arena, all of which are settled now.
    pub fn new(directory: &Path, kind: MediumKind) -> Self {
        let medium = if kind == MediumKind::Disk { CrashMedium::Pages } else { CrashMedium::Words };
        let mut mirror = Self {
            directory: directory.to_owned(),
            medium,
            files: BTreeMap::new(),
            metadata: read_metadata(&directory.join("metadata/data.mdb")),
            superblock: read(&directory.join("ARENA"), usize::MAX),
        };
        for (number, path) in mirror.listed() {
            let content = read(&directory.join(&path), followed_bytes(&path));
            mirror.follow(number, path, &content);
        }
        mirror
    }

    fn follow(&mut self, number: FileNumber, path: PathBuf, content: &FileImage) {
        let twin = CrashTwin::from_image(self.medium, &content.bytes);
        self.files.insert(number, Some(Followed { path, length: content.length, twin }));
    }

    /// Returns the files that may be mapped.
    fn listed(&self) -> Vec<(FileNumber, PathBuf)> {
        let mut listed = Vec::new();
        for folder in ["segments", "sessions"] {
            for entry in fs::read_dir(self.directory.join(folder)).expect("listed").flatten() {
                let found = entry.metadata().expect("known");
                let number = FileNumber { device: found.dev(), inode: found.ino() };
                listed.push((number, Path::new(folder).join(entry.file_name())));
            }
        }
        listed.sort();
        listed
    }

    /// Returns the twin of a file.
    ///
    /// A file that is met for the first time was made since, of zeros.
    fn twin(&mut self, number: FileNumber) -> Option<&CrashTwin> {
        if !self.files.contains_key(&number) {
            match self.listed().into_iter().find(|(found, _)| *found == number) {
                Some((_, path)) => {
                    let length = fs::metadata(self.directory.join(&path)).expect("known").len();
                    let bytes = vec![0; followed_bytes(&path).min(length as usize)];
                    self.follow(number, path, &FileImage { length, bytes });
                }
                None => drop(self.files.insert(number, None)),
            }
        }
        self.files.get(&number)?.as_ref().map(|followed| &followed.twin)
    }

    fn twins(&self) -> impl Iterator<Item = &Followed> {
        self.files.values().flatten()
    }

    /// Applies a deed to the twins.
    pub fn see(&mut self, deed: &Deed<'_>) {
        match *deed {
            Deed::Store { file, offset, bytes } => {
                let Some(twin) = self.twin(file) else { return };
                let end = twin.len().saturating_sub(offset).min(bytes.len() as u64) as usize;
                twin.store(offset.min(twin.len()), &bytes[..end]).expect("inside");
            }
            Deed::Flush { file, offset, length } => {
                let Some(twin) = self.twin(file) else { return };
                let offset = offset.min(twin.len());
                twin.flush(offset, length.min(twin.len() - offset)).expect("inside");
            }
            Deed::Fence => self.twins().for_each(|followed| followed.twin.fence()),
            Deed::Sync { file } => {
                if let Some(twin) = self.twin(file) {
                    twin.sync().expect("synced");
                }
            }
            Deed::TransactionBegins => {}
            Deed::TransactionEnds => self.metadata = read_metadata(&self.directory.join("metadata/data.mdb")),
        }
    }

    /// Settles a page of any file, as the kernel may at any moment.
    pub fn write_back(&self, random: &mut Random) {
        let all: Vec<_> = self.twins().collect();
        let Some(followed) = all.get(random.below(all.len().max(1) as u64) as usize) else { return };
        followed.twin.write_back_page(random.below(followed.twin.len().div_ceil(PAGE_BYTES)) as usize);
    }

    /// Returns what a crash at this moment may leave.
    ///
    /// `in_commit`: LMDB has written its pages, and not reached the end of the commit.
    pub fn image(&self, crash: Crash, in_commit: bool, random: &mut Random) -> Image {
        let mut image = Image::default();
        image.0.insert("ARENA".into(), self.superblock.clone());
        let database = self.directory.join("metadata/data.mdb");
        let metadata = match crash {
            Crash::Power if in_commit => torn_metadata(&self.metadata, &read_metadata(&database), &mut chooser(random)),
            Crash::Power => self.metadata.clone(),
            Crash::SharedFs | Crash::Processes => read_metadata(&database),
        };
        image.0.insert("metadata/data.mdb".into(), metadata);
        for followed in self.twins().filter(|followed| self.directory.join(&followed.path).exists()) {
            let mut content = match crash {
                Crash::Power => {
                    FileImage { length: followed.length, bytes: followed.twin.crash_image(&mut chooser(random)) }
                }
                // The page cache outlives the processes, and so do the tables behind the first pages.
                Crash::SharedFs | Crash::Processes => read(&self.directory.join(&followed.path), usize::MAX),
            };
            if followed.path.extension().is_some_and(|extension| extension == "leases") {
                match crash {
                    Crash::Power => content.bytes[AT_BOOT as usize..][..16].fill(0x77),
                    Crash::Processes => content.bytes[AT_START as usize..][..8].fill(0x77),
                    Crash::SharedFs => {}
                }
            }
            image.0.insert(followed.path.clone(), content);
        }
        image
    }
}

fn followed_bytes(path: &Path) -> usize {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("control" | "leases") => PAGE_BYTES as usize,
        _ => usize::MAX,
    }
}

/// Chooses how the unsettled words or pages of one file come out.
///
/// All are new, all are old, one differs from all others, or each is drawn. If one file is all new and another one all
/// old, an order between files shows as broken.
fn chooser(random: &mut Random) -> impl FnMut(usize) -> usize {
    let (shape, mut ahead) = (random.below(6), random.below(40));
    let mut random = Random::new(random.draw());
    move |options| {
        let is_the_one = ahead == 0;
        ahead = ahead.wrapping_sub(1);
        match shape {
            0 => 0,
            1 => options - 1,
            2 => {
                if is_the_one {
                    options - 1
                } else {
                    0
                }
            }
            3 => {
                if is_the_one {
                    0
                } else {
                    options - 1
                }
            }
            _ => random.below(options as u64) as usize,
        }
    }
}
