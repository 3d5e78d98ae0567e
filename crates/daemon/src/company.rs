//! The word for programs that begin: whether the arena has company ([`ashlar_wire::company_of`]).

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// What programs are told.
pub struct Company {
    path: PathBuf,
    /// What was said last; `None` before the first time, and where it could not be said: what stands there is anybody's guess.
    told: Option<bool>,
}

impl Company {
    /// The word beside a socket. An earlier SharedFS may have left one.
    pub fn new(socket: &Path) -> Self {
        Self { path: ashlar_wire::company_of(socket), told: None }
    }

    /// Whether that is to be told now.
    pub fn is_news(&self, is_there: bool) -> bool {
        self.told != Some(is_there)
    }

    /// Says whether there is company. Where it can't be said, programs find out later, and it stays news.
    pub fn tell(&mut self, is_there: bool) {
        let told = if is_there { put(&self.path) } else { take_away(&self.path) };
        if let Err(error) = &told {
            tracing::debug!(%error, path = %self.path.display(), "programs can't be told whether there are others");
        }
        self.told = told.is_ok().then_some(is_there);
    }
}

/// Has a file stand at a path: an empty one, or what is there.
fn put(path: &Path) -> io::Result<()> {
    match File::options().write(true).create_new(true).open(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Has no file stand at a path.
fn take_away(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory that was away for a moment left programs without the word until company went and came again.
    #[test]
    fn what_could_not_be_said_is_said_again() {
        let directory = tempfile::tempdir().expect("a directory");
        let away = directory.path().join("away");
        let socket = away.join("socket");
        let mut company = Company::new(&socket);
        company.tell(true);
        assert!(company.is_news(true));
        std::fs::create_dir(&away).expect("it's back");
        company.tell(true);
        assert!(!company.is_news(true) && ashlar_wire::company_of(&socket).exists());
        assert!(company.is_news(false));
        company.tell(false);
        assert!(!company.is_news(false) && !ashlar_wire::company_of(&socket).exists());
    }

    /// A SharedFS that was killed leaves the word; nothing is written to what stands there, and nothing behind a link.
    #[test]
    fn what_stands_there_is_taken_for_the_word() {
        let directory = tempfile::tempdir().expect("a directory");
        let (socket, other) = (directory.path().join("socket"), directory.path().join("other"));
        let path = ashlar_wire::company_of(&socket);
        std::fs::write(&other, b"kept").expect("written");
        std::os::unix::fs::symlink(&other, &path).expect("linked");
        let mut company = Company::new(&socket);
        company.tell(true);
        assert!(!company.is_news(true));
        company.tell(false);
        assert!(!company.is_news(false) && std::fs::symlink_metadata(&path).is_err());
        assert_eq!(std::fs::read(&other).expect("read"), b"kept");
    }
}
