//! Crashes in the middle of LMDB's commits.
//!
//! LMDB syncs all new pages before it writes the page with the new roots, which is one of the two first ones. So a
//! crash before that leaves these two as they were, and any part of the new pages.

use std::fs::File;
use std::os::unix::fs::FileExt;

use ashlar_types::{LogGeneration, LogPosition};

use crate::media::{StoreTestArena, TestMedium, choose};
use crate::memory_crashes::{SESSION, UpdateScript};

const PAGE_BYTES: usize = 4096;
/// The first page behind those with the roots.
const FIRST_PAGE: usize = 2;
/// Pages at the file's start that are more than the rows need. The file is much longer.
const PAGES: usize = 1024;
/// Torn files of each commit.
const IMAGES: u64 = 3;

fn read_pages(file: &File) -> Vec<u8> {
    let mut pages = vec![0; PAGES * PAGE_BYTES];
    file.read_exact_at(&mut pages, 0).unwrap();
    assert!(pages[(PAGES - 1) * PAGE_BYTES..].iter().all(|&byte| byte == 0), "the last page is used");
    pages
}

#[test]
fn torn_commit_of_lmdb_leaves_the_old_state() {
    let script = UpdateScript::new(7);
    let arena = StoreTestArena::new(TestMedium::Lmdb, 16 << 20);
    let StoreTestArena::Files(files, _) = &arena else { panic!("it has files") };
    let file = File::options().read(true).write(true).open(files.metadata_dir().join("data.mdb")).unwrap();
    let mut store = arena.open();
    store.set_session(SESSION, LogGeneration(1), LogPosition(0));
    store.commit().unwrap();
    let (mut begin, mut pages_lost, mut pages_kept) = (0, 0, 0);
    for &end in &script.commits {
        (begin..end).for_each(|index| script.apply(&mut store, index));
        let old = read_pages(&file);
        store.commit().unwrap();
        drop(store);
        let new = read_pages(&file);
        for image in 0..IMAGES {
            let (mut seed, mut torn) = (end as u64 * IMAGES + image, old.clone());
            for (there, page) in torn.chunks_mut(PAGE_BYTES).zip(new.chunks(PAGE_BYTES)).skip(FIRST_PAGE) {
                if there == page {
                    continue;
                }
                if choose(&mut seed, 2) == 1 {
                    there.copy_from_slice(page);
                    pages_kept += 1;
                } else {
                    pages_lost += 1;
                }
            }
            file.write_all_at(&torn, 0).unwrap();
            assert_eq!(script.check(&mut arena.open()), begin, "image {image} of the commit up to {end}");
        }
        file.write_all_at(&new, 0).unwrap();
        store = arena.open();
        begin = script.check(&mut store);
        assert_eq!(begin, end);
    }
    assert!(pages_lost > 50 && pages_kept > 50, "{pages_lost} new pages were lost, and {pages_kept} kept");
}
