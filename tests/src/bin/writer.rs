//! `ashlar-writer DIRECTORY JOURNAL SEED COUNT`: the ledger's writer.
//!
//! It is a process of its own, so that it can be killed.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args().skip(1).collect();
    let [directory, journal, seed, count] = &words[..] else {
        eprintln!("usage: ashlar-writer DIRECTORY JOURNAL SEED COUNT");
        return ExitCode::from(2);
    };
    let (Ok(seed), Ok(count)) = (seed.parse(), count.parse()) else {
        eprintln!("ashlar-writer: SEED and COUNT are numbers");
        return ExitCode::from(2);
    };
    // The model has the permission bits that were requested, so the umask must not change them.
    rustix::process::umask(rustix::fs::Mode::empty());
    match ashlar_tests::ledger::writer::run(Path::new(directory), Path::new(journal), seed, count) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ashlar-writer: {error}");
            ExitCode::FAILURE
        }
    }
}
