//! Measures the rate of one thread that applies and commits: creations, small writes, and block writes per second
//! through the whole store.
//!
//! Two runs. The first creates files in one directory and writes 128 bytes to each. The second first fills a small
//! arena and empties it again, so that the kernel has no pages left to clear, and then writes blocks. Apply is timed by
//! the thread's time on a processor; commits run on the same thread between batches and are timed apart, as the daemon
//! runs them on another one.
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
/// Blocks that each phase of the second run writes; its arena holds four times as many.
const BLOCKS: u64 = 65_536;

fn on_processor_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
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
            for index in batch * self.batch..((batch + 1) * self.batch).min(count) {
                each(self, index)?;
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

fn open(directory: &Path, size_bytes: u64, batch: u64) -> Result<Run, Box<dyn std::error::Error>> {
    let arena = Arc::new(Arena::create(directory, &ArenaOptions::new(size_bytes))?);
    Store::format(&arena, Timestamp::default())?;
    let mut store = Store::open(arena)?;
    store.set_session(SESSION, LogGeneration(1), LogPosition(0));
    Ok(Run { store, position: 0, batch })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let directory = tempfile::tempdir_in(arguments.first().map_or(Path::new("/dev/shm"), Path::new))?;
    let number = |index: usize, default: u64| arguments.get(index).map_or(Ok(default), |text| text.parse::<u64>());
    let (files, batch) = (number(1, 1_000_000)?, number(2, 50_000)?);

    let mut run = open(&directory.path().join("metadata"), 4 << 30, batch)?;
    let first = run.store.allocate_inodes(files)?.start;
    run.phase("create in one directory", files, |run, index| {
        run.apply(&create(first + index, format!("file-{index:07}").as_bytes()))
    })?;
    run.phase("write 128 B to new files", files, |run, index| run.apply(&write(first + index, 0, &[7; 128])))?;
    println!("{:?}", run.store.space());
    drop(run);

    let mut run = open(&directory.path().join("data"), 4 * BLOCKS * 4096, batch)?;
    let (one, two) = (run.store.allocate_inodes(2)?.start, run.store.allocate_inodes(2)?.start);
    run.apply(&create(one, b"one"))?;
    run.apply(&create(two, b"two"))?;
    let block = [9; 4096];
    for index in 0..4 * BLOCKS - 64 {
        run.apply(&write(one, index * 4096, &block))?;
    }
    run.apply(&Update::Resize { inode: InodeId(one), size: 0, strip: false, at: Timestamp::default() })?;
    run.store.commit()?;
    run.store.release(SESSION, LogPosition(run.position));
    run.phase("append 4 KiB", BLOCKS, |run, index| run.apply(&write(one, index * 4096, &block)))?;
    run.phase("overwrite 4 KiB at random", BLOCKS, |run, index| {
        run.apply(&write(one, index.wrapping_mul(0x9e37_79b9_7f4a_7c15) % BLOCKS * 4096, &block))
    })?;
    run.phase("append 128 B", BLOCKS, |run, index| run.apply(&write(two, index * 128, &[3; 128])))?;
    println!("{:?}", run.store.space());
    Ok(())
}
