//! The contenders: Ashlar, pass-through FUSE file systems, and tmpfs itself.
//!
//! Ashlar has a `memory` arena; the pass-through file systems lie over tmpfs.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ashlar_tests::command::{call, eventually, run};
use ashlar_tests::mount::{Medium, TestArena};
use ashlar_tests::reference::unmount;
use ashlar_tests::{Outcome, tried};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tempfile::TempDir;

use crate::settle::settle;

/// The longest time until a mount appears.
const PATIENCE: Duration = Duration::from_secs(10);
/// The mount options of `passthrough_ll`: for all users, whose permissions the kernel checks, as for Ashlar and bindfs.
const OPTIONS: &str = "allow_other,default_permissions";
/// Open files that `passthrough_ll` may have: more than the inodes of any case.
const OPEN_FILES: u64 = 200_000;
/// Ashlar's arena: room for every case, and a log of the default length.
const ARENA: &str = "3G";

/// A file system to measure.
#[derive(Debug)]
pub struct Contender {
    /// Its name in the table.
    pub name: &'static str,
    /// The directory to work in.
    pub root: PathBuf,
}

/// A pass-through file system, served by a process of this benchmark.
#[derive(Debug)]
struct Passthrough {
    process: Child,
    root: PathBuf,
}

impl Drop for Passthrough {
    fn drop(&mut self) {
        unmount(&self.root);
        // The process ends with its mount; if not, it is not reaped yet, so its number is still its own.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// All of them, mounted.
#[derive(Debug)]
pub struct Contenders {
    site: TestArena,
    all: Vec<Contender>,
    _passthroughs: Vec<Passthrough>,
    _places: TempDir,
}

impl Contenders {
    /// Mounts all contenders that are available.
    pub fn mounted() -> Outcome<Self> {
        let site = TestArena::mounted(Medium::Memory, ARENA)?;
        let places = TempDir::with_prefix_in("ashlar-bench-", "/dev/shm").map_err(tried("making a directory"))?;
        let mut all = vec![Contender { name: "ashlar", root: site.point(0) }];
        let mut passthroughs = Vec::new();
        let options = std::env::var("ASHLAR_BENCH_OPTIONS").unwrap_or_else(|_| OPTIONS.into());
        match build_passthrough_ll(places.path()) {
            Ok(program) => {
                let command = |source: &Path, root: &Path| {
                    let mut command = Command::new(&program);
                    command.args(["-f", "-o"]).arg(format!("source={},{options}", source.display())).arg(root);
                    command
                };
                passthroughs.push(start("passthrough_ll", places.path(), command, &mut all)?);
            }
            Err(error) => eprintln!("no passthrough_ll: {error}"),
        }
        let command = |source: &Path, root: &Path| {
            let mut command = Command::new("bindfs");
            command.arg("-f").arg(source).arg(root);
            command
        };
        match start("bindfs", places.path(), command, &mut all) {
            Ok(passthrough) => passthroughs.push(passthrough),
            Err(error) => eprintln!("no bindfs: {error}"),
        }
        if passthroughs.is_empty() {
            return Err("there is nothing to compare with: install libfuse3-dev and gcc, or bindfs".into());
        }
        let root = places.path().join("tmpfs");
        std::fs::create_dir(&root).map_err(tried("making a directory"))?;
        all.push(Contender { name: "tmpfs", root });
        Ok(Self { site, all, _passthroughs: passthroughs, _places: places })
    }

    /// The contenders' names, the one to compare with second.
    pub fn names(&self) -> Vec<&'static str> {
        self.all.iter().map(|contender| contender.name).collect()
    }

    /// The mounted Ashlar.
    pub const fn ashlar(&self) -> &TestArena {
        &self.site
    }

    /// All contenders; each round begins with another.
    pub fn in_turn(&self, round: u64) -> impl Iterator<Item = &Contender> {
        let first = round as usize % self.all.len();
        self.all[first..].iter().chain(&self.all[..first])
    }

    /// Waits until Ashlar's background work is done: it must not burden the next contender.
    pub fn settle(&self) -> Outcome {
        settle(&[self.site.daemon()?]);
        Ok(())
    }
}

fn start(
    name: &'static str,
    places: &Path,
    command: impl Fn(&Path, &Path) -> Command,
    all: &mut Vec<Contender>,
) -> Outcome<Passthrough> {
    let (source, root) = (places.join(format!("{name}-source")), places.join(name));
    for directory in [&source, &root] {
        std::fs::create_dir(directory).map_err(tried("making a directory"))?;
    }
    let mut command = command(&source, &root);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let process = command.spawn().map_err(tried(format!("starting {name}")))?;
    let passthrough = Passthrough { process, root: root.clone() };
    let before = std::fs::metadata(places).map_err(tried("looking at a directory"))?;
    eventually(&format!("{name} is mounted"), PATIENCE, || {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(&root).is_ok_and(|now| now.dev() != before.dev())
    })?;
    all.push(Contender { name, root });
    Ok(passthrough)
}

/// Builds libfuse's example, whose source the distribution ships with the library's headers.
fn build_passthrough_ll(into: &Path) -> Outcome<PathBuf> {
    let files = call("dpkg", &["-L", "libfuse3-dev"])?.success()?.output;
    let find = |name: &str| {
        let found = files.lines().find(|line| line.trim_end_matches(".gz").ends_with(name));
        found.map(str::to_owned).ok_or_else(|| format!("libfuse3-dev does not bring {name}"))
    };
    for name in ["passthrough_ll.c", "passthrough_helpers.h"] {
        let script = "case $0 in *.gz) zcat \"$0\";; *) cat \"$0\";; esac > \"$1\"";
        run(Command::new("sh").args(["-c", script, &find(name)?]).arg(into.join(name)))?.success()?;
    }
    let script = "gcc -O2 -o passthrough_ll_program passthrough_ll.c $(pkg-config --cflags --libs fuse3)";
    run(Command::new("sh").args(["-c", script]).current_dir(into))?.success()?;
    Ok(into.join("passthrough_ll_program"))
}

/// Raises the limit of open files as far as this process may, and returns it: `passthrough_ll` holds a descriptor for
/// every inode that the kernel knows.
pub fn allow_open_files() -> Outcome<usize> {
    let wish = |maximum| Rlimit { current: Some(maximum), maximum: Some(maximum) };
    let now = getrlimit(Resource::Nofile).maximum.unwrap_or(OPEN_FILES);
    if now < OPEN_FILES && setrlimit(Resource::Nofile, wish(OPEN_FILES)).is_ok() {
        return Ok(OPEN_FILES as usize);
    }
    setrlimit(Resource::Nofile, wish(now)).map_err(tried("raising the limit of open files"))?;
    Ok(now as usize)
}
