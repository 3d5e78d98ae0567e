//! `ashlar-worker POINT`: makes random operations on a mount, round by round.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args().skip(1).collect();
    let [point] = &words[..] else {
        eprintln!("usage: ashlar-worker POINT");
        return ExitCode::from(2);
    };
    match ashlar_tests::linear::worker::run(Path::new(point)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ashlar-worker: {error}");
            ExitCode::FAILURE
        }
    }
}
