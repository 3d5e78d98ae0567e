//! What one thread applies and commits: creations, small writes, and block writes per second through the whole store.
//!
//! The rows of the table are phases of one run: files created in one directory, 128 bytes written to each, one file
//! overwritten at random in blocks, another appended to in blocks. Apply is timed on the applying thread's processor time; commits
//! run on the same thread between batches and are timed apart, as the daemon runs them on another one.
//!
//! `cargo run --release --example creation_rate -p ashlar-store -- [DIRECTORY] [FILES] [BATCH]`

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use ashlar_pmem::{Arena, ArenaOptions};
use ashlar_store::{Store, StoreError};
use ashlar_types::{FileKind, InodeId, LogGeneration, LogPosition, SessionId, Timestamp};
use ashlar_update::{Create, Update};

const SESSION: SessionId = SessionId(1);
const BLOCKS: u64 = 131_072;

fn on_processor_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0)
}

struct Run {
    store: Store,
    position: u64,
    batch: u64,
}

impl Run {
    fn apply(&mut self, update: &Update<'_>) -> Result<(), StoreError> {
        self.position += 1;
        self.store.apply(SESSION, LogPosition(self.position), update, &|_| true)?;
        Ok(())
    }

    /// Applies `count` updates in batches, each followed by a commit.
    fn phase(
        &mut self,
        name: &str,
        count: u64,
        mut each: impl FnMut(&mut Self, u64) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let (mut apply_ns, mut commit_ns, begin) = (0, 0, Instant::now());
        for batch in 0..count.div_ceil(self.batch) {
            let start = on_processor_ns();
            for index in batch * self.batch..(batch + 1) * self.batch {
                each(self, index.min(count - 1))?;
            }
            let applied = on_processor_ns();
            self.store.commit()?;
            self.store.release(SESSION, LogPosition(self.position));
            apply_ns += applied - start;
            commit_ns += on_processor_ns() - applied;
        }
        let rate = |ns: u64| count as f64 * 1e9 / ns.max(1) as f64;
        println!(
            "{name:<28} {:>6.0} ns apply  {:>6.0} ns commit  {:>10.0} /s commit alone  {:>10.0} /s both by the wall",
            apply_ns as f64 / count as f64,
            commit_ns as f64 / count as f64,
            rate(commit_ns),
            count as f64 / begin.elapsed().as_secs_f64(),
        );
        Ok(())
    }
}

fn create(inode: u64, name: &[u8]) -> Update<'_> {
    Update::Create(Create {
        inode: InodeId(inode),
        parent: InodeId::ROOT,
        name,
        kind: FileKind::Regular,
        mode: 0o644,
        uid: 0,
        gid: 0,
        device: 0,
        at: Timestamp { seconds: 1, nanoseconds: 2 },
        target: &[],
        acl_access: &[],
        acl_default: &[],
    })
}

fn write(inode: u64, offset: u64, data: &[u8]) -> Update<'_> {
    Update::Write { inode: InodeId(inode), offset, at: Timestamp::default(), strip: false, data }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let directory = tempfile::tempdir_in(arguments.first().map_or(Path::new("/dev/shm"), Path::new))?;
    let number = |index: usize, default: u64| arguments.get(index).map_or(Ok(default), |text| text.parse::<u64>());
    let (files, batch) = (number(1, 1_000_000)?, number(2, 50_000)?);
    let options = ArenaOptions { size_bytes: 4 << 30, emulate_pmem: false };
    let arena = Arc::new(Arena::create(&directory.path().join("arena"), &options)?);
    Store::format(&arena)?;
    let mut store = Store::open(arena)?;
    store.set_session(SESSION, LogGeneration(1), LogPosition(0));
    let first = store.allocate_inodes(files + 2)?.start;
    let mut run = Run { store, position: 0, batch };

    run.phase("create in one directory", files, |run, index| {
        run.apply(&create(first + index, format!("file-{index:07}").as_bytes()))
    })?;
    run.phase("write 128 B to a new file", files.min(200_000), |run, index| run.apply(&write(first + index, 0, &[7; 128])))?;
    let (sequential, random) = (first + files, first + files + 1);
    run.apply(&create(sequential, b"sequential"))?;
    run.apply(&create(random, b"random"))?;
    let block = [9; 4096];
    run.phase("append 4 KiB", BLOCKS, |run, index| run.apply(&write(sequential, index * 4096, &block)))?;
    run.phase("append 4 KiB, used blocks", BLOCKS, |run, index| run.apply(&write(random, index * 4096, &block)))?;
    run.phase("overwrite 4 KiB at random", BLOCKS, |run, index| {
        run.apply(&write(sequential, index.wrapping_mul(0x9e37_79b9_7f4a_7c15) % BLOCKS * 4096, &block))
    })?;
    run.phase("append 128 B", BLOCKS, |run, index| run.apply(&write(random, (BLOCKS * 4096) + index * 128, &[3; 128])))?;
    println!("{:?}", run.store.space());
    Ok(())
}
