//! `ashlar-session SOCKET DIRECTORY`: a LibFS session that obeys its caller.
//!
//! The session runs beside the mount that the directory stands on. It executes the lines on its standard input, and
//! answers each with a line: the result, or the symbol of an error.
//!
//! ```text
//! open NAME                   an inode number   opens a file of the root directory, without checking its own rights
//! materialise INODE FLAGS     the content that can be read through the descriptor, or nothing if it can't be read
//! ```
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{self, BufRead, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use ashlar_libfs::{DescriptorPolicy, LibFs, Options};
use ashlar_types::{Credentials, Errno, InodeId};
use ashlar_wire::SessionKind;

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args().skip(1).collect();
    let [socket, directory] = &words[..] else {
        eprintln!("usage: ashlar-session SOCKET DIRECTORY");
        return ExitCode::from(2);
    };
    match run(Path::new(socket), Path::new(directory)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ashlar-session: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(socket: &Path, directory: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let (kind, directory) = (SessionKind::Process, File::open(directory)?);
    let options = Options {
        socket: socket.to_owned(),
        kind,
        label: "ashlar-session".into(),
        patience_ms: 30_000,
        notice: |_| {},
        descriptors: DescriptorPolicy::ANY,
        beside: directory.metadata()?.dev(),
        yields_to_kernel: false,
    };
    let session = LibFs::connect(&options)?;
    for line in io::stdin().lock().lines() {
        let answer = serve(&session, &directory, &line?).unwrap_or_else(|errno| errno.symbol().to_owned());
        println!("{answer}");
        io::stdout().flush()?;
    }
    session.close_session();
    Ok(())
}

fn serve(session: &Arc<LibFs>, directory: &File, line: &str) -> Result<String, Errno> {
    let number = |word: &str| word.parse().map_err(|_| Errno::EINVAL);
    match line.split(' ').collect::<Vec<_>>()[..] {
        ["open", name] => {
            let found = session.lookup(&Credentials::checked(0, 0), InodeId::ROOT, name.as_bytes())?;
            Ok(session.open(found.id)?.id.to_string())
        }
        ["materialise", inode, flags] => {
            let flags = u32::try_from(number(flags)?).map_err(|_| Errno::EINVAL)?;
            let file = session.materialise(directory.as_fd(), InodeId(number(inode)?), flags)?;
            let mut text = String::new();
            // A file that is open only for writing gives nothing to read.
            let _ = File::from(file).read_to_string(&mut text);
            Ok(text)
        }
        _ => Err(Errno::EINVAL),
    }
}
