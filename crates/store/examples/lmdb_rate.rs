//! How many file creations per second one LMDB writer sustains: the measurement behind the layout of the shared area.
//!
//! A creation is an inode row (in inode order) and an entry row in one large directory (in random hash order), written
//! in batches in key order, one transaction a batch. Time is the thread's time on a processor, so that neighbours on
//! the machine do not count, and wall time beside it.
//!
//! `cargo run --release --example lmdb_rate -p ashlar-store -- [DIRECTORY] [CREATIONS] [BATCH] [one|two] [map|write]`

use std::time::Instant;

use heed::types::Bytes;
use heed::{CommitOrAbort, Database, EnvFlags, EnvOpenOptions, PutFlags};

const INODE_ROW_BYTES: usize = 112;
const ENTRY_ROW_BYTES: usize = 9;

fn on_processor_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn scramble(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

fn entry_key(number: u64) -> Vec<u8> {
    let mut key = vec![b'D'];
    key.extend_from_slice(&1u64.to_be_bytes());
    key.extend_from_slice(&(scramble(number) >> 1).to_be_bytes());
    key.extend_from_slice(format!("file-{number:07}").as_bytes());
    key
}

fn inode_key(number: u64) -> [u8; 9] {
    let mut key = [b'I'; 9];
    key[1..].copy_from_slice(&number.to_be_bytes());
    key
}

fn main() -> Result<(), heed::Error> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |index: usize, default: &str| arguments.get(index).map_or(default, String::as_str).to_owned();
    let number = |index: usize, default: &str| argument(index, default).parse::<u64>().expect("a number is wanted");
    let (creations, batch) = (number(1, "2000000"), number(2, "50000"));
    let (two, map) = (argument(3, "one") == "two", argument(4, "map") == "map");
    let directory = tempfile::tempdir_in(argument(0, "/dev/shm")).expect("the directory takes a temporary one");

    let mut options = EnvOpenOptions::new();
    options.map_size(8 << 30).max_dbs(2);
    let mut flags = EnvFlags::NO_SYNC | EnvFlags::NO_READ_AHEAD | EnvFlags::NO_MEM_INIT;
    flags.set(EnvFlags::WRITE_MAP, map);
    // SAFETY: the environment is in a fresh directory that no other process knows, and lives as long as this one.
    let env = unsafe { options.flags(flags).open(directory.path())? };
    let (inodes, entries): (Database<Bytes, Bytes>, Database<Bytes, Bytes>) = env
        .create_databases_and_commit(env.write_txn()?, |opener, txn| -> Result<_, heed::Error> {
            let first = opener.create_database(txn, two.then_some("inodes"))?;
            let second = if two { opener.create_database(txn, Some("entries"))? } else { first };
            Ok(CommitOrAbort::<_, ()>::Commit((first, second)))
        })?
        .unwrap_commit();

    let row = [7u8; INODE_ROW_BYTES];
    let (mut total_ns, mut next_report) = (0, creations / 8);
    let (begin, mut done, mut since) = (Instant::now(), 0, (0, 0));
    while done < creations {
        let mut keys: Vec<Vec<u8>> = (done..done + batch).map(entry_key).collect();
        keys.sort_unstable();
        let start = on_processor_ns();
        let mut txn = env.write_txn()?;
        for key in &keys {
            entries.put(&mut txn, key, &[8u8; ENTRY_ROW_BYTES])?;
        }
        let put = if two { PutFlags::APPEND } else { PutFlags::empty() };
        for inode in done..done + batch {
            inodes.put_with_flags(&mut txn, put, &inode_key(inode), &row)?;
        }
        txn.commit()?;
        total_ns += on_processor_ns() - start;
        done += batch;
        if done >= next_report {
            let (count, ns) = (done - since.0, total_ns - since.1);
            println!("{done:>9} files  {:>9.0} creations/s", count as f64 * 1e9 / ns as f64);
            (since, next_report) = ((done, total_ns), next_report + creations / 8);
        }
    }
    let stat = env.info();
    println!(
        "whole run: {:.0} creations/s on the processor; {:.0} by the wall clock with key generation; {} MiB",
        creations as f64 * 1e9 / total_ns as f64,
        creations as f64 / begin.elapsed().as_secs_f64(),
        stat.last_page_number * 4096 / (1 << 20),
    );
    Ok(())
}
