//! `ashlar-repeat-io read|write FILE`: repeats one read or write until it is killed.
//!
//! Reads the same 64 KiB of a file, or writes them, until the call fails or a kill ends the program.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::process::ExitCode;

use rustix::fs::{Advice, fadvise};

const BYTES: usize = 64 << 10;

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args().skip(1).collect();
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    let ended = match words[..] {
        ["read", file] => read(file),
        ["write", file] => write(file),
        _ => {
            eprintln!("usage: ashlar-repeat-io read|write FILE");
            return ExitCode::from(2);
        }
    };
    if let Err(error) = ended {
        eprintln!("ashlar-repeat-io: {error}");
    }
    ExitCode::FAILURE
}

/// Makes the kernel read anew each time: it locks the pages meanwhile.
fn read(path: &str) -> io::Result<()> {
    let (file, mut bytes) = (File::open(path)?, vec![0u8; BYTES]);
    loop {
        fadvise(file.as_fd(), 0, None, Advice::DontNeed)?;
        file.read_exact_at(&mut bytes, 0)?;
    }
}

/// A write-only descriptor bypasses the kernel's pages, and makes the kernel drop those of readers.
fn write(path: &str) -> io::Result<()> {
    let (file, mut bytes) = (File::options().write(true).open(path)?, vec![0u8; BYTES]);
    loop {
        let turn = bytes[0].wrapping_add(1);
        bytes.fill(turn);
        file.write_all_at(&bytes, 0)?;
    }
}
