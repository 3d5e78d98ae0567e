//! `ashlar-bench personality NAME DIRECTORY FILES LOOPS`: Filebench's workloads.
//!
//! The workloads are *varmail* and *fileserver*: threads of one process on a set of files, with the parameters of
//! Filebench's own descriptions (`workloads/varmail.f`, `fileserver.f`; Filebench is not in Debian).
//!
//! Differences from Filebench: every thread goes round a fixed number of times, and not for a minute. Only one thread
//! at a time uses a file. Each read is compared with the written bytes, at its ends and in its length. The set may be
//! smaller.
//!
//! The program makes four fifths of the files (Filebench: `prealloc=80`), prints a line, waits for a line, and then
//! measures.

mod files;

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use ashlar_tests::random::Random;
use ashlar_tests::{Outcome, ensure, tried};
use serde_json::json;

use files::{Files, TRANSFER};

/// The longest append; the mean is half of it.
const APPEND_MAX: u64 = 16 << 10;
/// A function that makes one round of a thread. Returns its number of operations, Filebench's flow operations.
type Round = fn(&Files, &mut Random, &mut [u8]) -> Outcome<u64>;

/// A workload by Filebench's description.
struct Personality {
    name: &'static str,
    threads: u64,
    mean_length: u64,
    /// Files in a directory.
    directory_width: u64,
    round: Round,
}

const PERSONALITIES: [Personality; 2] = [
    Personality { name: "varmail", threads: 16, mean_length: 16 << 10, directory_width: 1_000_000, round: varmail },
    Personality { name: "fileserver", threads: 50, mean_length: 128 << 10, directory_width: 20, round: fileserver },
];

/// Measures, and returns the text to print.
pub fn main(arguments: &mut dyn Iterator<Item = String>) -> Outcome<String> {
    let arguments: Vec<_> = arguments.collect();
    let [name, directory, files, loops] = arguments.as_slice() else {
        return Err("usage: ashlar-bench personality varmail|fileserver DIRECTORY FILES LOOPS".into());
    };
    let known = PERSONALITIES.iter().find(|personality| personality.name == name);
    let personality = known.ok_or_else(|| format!("there is no personality '{name}'"))?;
    let count = |text: &str| text.parse().map_err(tried(format!("'{text}' is no number")));
    personality.run(&PathBuf::from(directory), count(files)?, count(loops)?)
}

impl Personality {
    fn run(&self, directory: &Path, count: u64, loops: u64) -> Outcome<String> {
        // Each thread uses at most one file at a time, and one more must be free to take.
        ensure!(count / 5 > self.threads, "{} takes more than {} files", self.name, self.threads * 5);
        let files = Files::make(directory, count, self.directory_width, self.mean_length)?;
        println!("ready");
        std::io::stdout().flush().map_err(tried("saying that it's ready"))?;
        std::io::stdin().read_exact(&mut [0]).map_err(tried("waiting for the start"))?;
        let started = Instant::now();
        let operations = std::thread::scope(|scope| {
            let one = |seed| {
                let (files, round) = (&files, self.round);
                scope.spawn(move || {
                    let mut random = Random::new(seed);
                    // One buffer for the whole time, as Filebench's threads have (`memsize`).
                    let mut buffer = vec![0; TRANSFER];
                    (0..loops).try_fold(0, |done, _| Ok::<_, String>(done + round(files, &mut random, &mut buffer)?))
                })
            };
            let threads: Vec<_> = (0..self.threads).map(one).collect();
            let results =
                threads.into_iter().map(|thread| thread.join().map_err(|_| "a thread panicked".to_owned())?);
            results.sum::<Outcome<u64>>()
        })?;
        let took = started.elapsed().as_secs_f64();
        files.check()?;
        Ok(json!({ "operations": operations, "operations_a_second": operations as f64 / took }).to_string())
    }
}

/// Deletes a file; makes one, appends, syncs; opens one, reads it, appends, syncs; opens one and reads it. Each is
/// closed.
fn varmail(files: &Files, random: &mut Random, buffer: &mut [u8]) -> Outcome<u64> {
    files.take(true, random)?.delete()?;
    let mut made = files.take(false, random)?;
    made.create()?;
    made.append(1 + random.below(APPEND_MAX), buffer)?;
    made.sync()?;
    drop(made);
    let mut read = files.take(true, random)?;
    read.open()?;
    read.read_whole(buffer)?;
    read.append(1 + random.below(APPEND_MAX), buffer)?;
    read.sync()?;
    drop(read);
    let mut read = files.take(true, random)?;
    read.open()?;
    read.read_whole(buffer)?;
    Ok(13)
}

/// Makes a file and writes it; opens one and appends; opens one and reads it; deletes one; stats one. Each is closed.
fn fileserver(files: &Files, random: &mut Random, buffer: &mut [u8]) -> Outcome<u64> {
    let mut made = files.take(false, random)?;
    made.create()?;
    made.write_whole(buffer)?;
    drop(made);
    let mut appended = files.take(true, random)?;
    appended.open()?;
    appended.append(1 + random.below(APPEND_MAX), buffer)?;
    drop(appended);
    let mut read = files.take(true, random)?;
    read.open()?;
    read.read_whole(buffer)?;
    drop(read);
    files.take(true, random)?.delete()?;
    files.take(true, random)?.stat()?;
    Ok(11)
}
