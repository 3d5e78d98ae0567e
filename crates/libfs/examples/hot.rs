//! The costs of LibFS's warm operations beside their floors.
//!
//! One run measures all of them on a real daemon over an arena in memory.
//!
//! `cargo run --release -p ashlar-libfs --example hot [FILTER [LAPS]]`: cases whose names hold FILTER; steady writes go
//! round the log LAPS times (5).
//!
//! For the floor of a write, the same bytes are copied into mapped memory of the log's size, checksummed and persisted.
//! The floor of a read is a plain copy of the same bytes. Medians are over batches. *short* writes fit in the log, so
//! that no digest is in the way. *steady* writes go round the log several times, so that they wait for the digest if it
//! is slower.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_libfs::{DescriptorPolicy, LibFs, NewInode, Options, RenameFlags, WriteAt};
use ashlar_pmem::{Arena, ArenaOptions, Crc32c, Mapping, MappingAccess, Medium, Persistent};
use ashlar_types::{Access, Credentials, FileKind, InodeId, Timestamp};
use ashlar_wire::SessionKind;

const DAEMON_ENV: &str = "ASHLAR_HOT_DAEMON";
const ROOT: Credentials = Credentials::checked(0, 0);
const ARENA_BYTES: u64 = 2 << 30;
/// The default length of an update log in an arena of this size.
const RING_BYTES: u64 = 64 << 20;
/// Bytes that a *short* case writes: a third of the log, before the digest begins by itself.
const SHORT_BYTES: u64 = 12 << 20;
const FILE_BYTES: u64 = 64 << 20;
const PAGE: usize = 4096;

fn main() {
    if let Some(directory) = std::env::var_os(DAEMON_ENV) {
        return run_daemon(Path::new(&directory));
    }
    let laps = std::env::args().nth(2).map_or(5, |laps| laps.parse().expect("a number of laps"));
    let bench = Bench::new(std::env::args().nth(1), laps);
    println!("{:<34} {:>10} {:>10} {:>7}", "case", "ns", "floor", "ratio");
    bench.writes();
    bench.reads();
    bench.names();
    bench.fs.close_session();
}

fn run_daemon(directory: &Path) {
    let config = ashlar_daemon::Config {
        socket: directory.join("socket"),
        ..ashlar_daemon::Config::new(directory.join("arena"))
    };
    if let Err(error) = ashlar_daemon::run(config) {
        eprintln!("{error}");
    }
}

/// A daemon over an arena of its own.
struct Daemon {
    directory: PathBuf,
    child: Child,
}

impl Daemon {
    fn start() -> Self {
        let directory = PathBuf::from(format!("/dev/shm/ashlar-hot-{}", std::process::id()));
        std::fs::create_dir(&directory).expect("a directory");
        let options = ArenaOptions::new(ARENA_BYTES);
        let arena = Arena::create(&directory.join("arena"), &options).expect("an arena");
        ashlar_store::Store::format(&arena, Timestamp::default()).expect("formatted");
        drop(arena);
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        let child = command.env(DAEMON_ENV, &directory).stdout(Stdio::null()).spawn().expect("a process");
        Self { directory, child }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

struct Bench {
    filter: Option<String>,
    laps: usize,
    fs: Arc<LibFs>,
    _daemon: Daemon,
}

/// Returns the median of the batches' times per operation, in nanoseconds.
fn median(batches: usize, per_batch: usize, mut operation: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..batches)
        .map(|_| {
            let start = Instant::now();
            (0..per_batch).for_each(|_| operation());
            start.elapsed().as_nanos() as f64 / per_batch as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// As [`median`]; also returns the mean over all operations.
fn median_and_mean(batches: usize, per_batch: usize, operation: impl FnMut()) -> (f64, f64) {
    let start = Instant::now();
    let middle = median(batches, per_batch, operation);
    (middle, start.elapsed().as_nanos() as f64 / (batches * per_batch) as f64)
}

fn crc(bytes: &[u8]) -> u32 {
    Crc32c::of(bytes)
}

fn make(kind: FileKind) -> NewInode<'static> {
    NewInode { kind, mode: 0o755, umask: 0, device: 0, target: &[] }
}

impl Bench {
    fn new(filter: Option<String>, laps: usize) -> Self {
        let daemon = Daemon::start();
        let options = Options {
            socket: daemon.directory.join("socket"),
            kind: SessionKind::Process,
            label: "hot".into(),
            patience_ms: 20_000,
            notice: |_| {},
            descriptors: DescriptorPolicy::ANY,
            beside: 0,
            yields_to_kernel: false,
        };
        let deadline = Instant::now() + Duration::from_secs(20);
        let fs = loop {
            match LibFs::connect(&options) {
                Ok(fs) => break fs,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        Self { filter, laps, fs, _daemon: daemon }
    }

    fn wants(&self, name: &str) -> bool {
        self.filter.as_ref().is_none_or(|filter| name.contains(filter.as_str()))
    }

    fn report(&self, name: &str, ns: f64, floor: f64) {
        if !self.wants(name) {
            return;
        }
        if floor > 0.0 {
            println!("{name:<34} {ns:>10.1} {floor:>10.1} {:>7.2}", ns / floor);
        } else {
            println!("{name:<34} {ns:>10.1}");
        }
    }

    fn file(&self, name: &str) -> InodeId {
        let name = name.replace(' ', "-");
        self.fs.make_open(&ROOT, InodeId::ROOT, name.as_bytes(), &make(FileKind::Regular)).expect("made").id
    }

    /// Digests everything, so that the next case begins with an empty log.
    fn digest(&self) {
        self.fs.make_room().expect("digested");
    }

    /// Measures copying `bytes` bytes round a log-sized memory, checksumming and persisting them.
    fn write_floor(bytes: usize, count: usize) -> f64 {
        let file = tempfile::tempfile_in("/dev/shm").expect("a file");
        file.set_len(RING_BYTES).expect("its length");
        let ring = Mapping::map(&file, RING_BYTES, MappingAccess::ReadWrite, Medium::MEMORY).expect("mapped");
        (0..RING_BYTES).step_by(PAGE).for_each(|at| ring.store_u64(at, 1).expect("a page"));
        let data = vec![7u8; bytes];
        let mut at = 0;
        let batch = (count / 64).max(1);
        median(64, batch, || {
            if at + bytes as u64 > RING_BYTES {
                at = 0;
            }
            ring.store_flushed(at, &data).expect("stored");
            std::hint::black_box(crc(std::hint::black_box(&data)));
            ring.fence();
            at += bytes as u64;
        })
    }

    fn writes(&self) {
        for (label, bytes) in [("128 B", 128), ("4 KB", 4 << 10), ("64 KB", 64 << 10)] {
            let short = (SHORT_BYTES as usize / bytes).min(32_768);
            let steady = self.laps * RING_BYTES as usize / (bytes + 56);
            let data = vec![7u8; bytes];
            for (what, overwrites) in [("append", false), ("overwrite", true)] {
                for (how, count) in [("short", short), ("steady", steady)] {
                    let name = format!("{what} {label} {how}");
                    if !self.wants(&name) {
                        continue;
                    }
                    let floor = Self::write_floor(bytes, count);
                    let file = self.file(&name);
                    let span = 64 * bytes as u64;
                    if overwrites {
                        let all = vec![1u8; span as usize];
                        self.fs.write(&ROOT, file, WriteAt::Offset(0), &all, false).expect("written");
                        self.digest();
                    }
                    self.warm_log(how == "short");
                    let mut at = 0;
                    // Small batches, so that most of a steady case's batches don't wait for the digest.
                    let (ns, mean) = median_and_mean((count / 256).max(64), 256.min(count / 64), || {
                        let offset = if overwrites { at % span } else { at };
                        self.fs.write(&ROOT, file, WriteAt::Offset(offset), &data, false).expect("written");
                        at += bytes as u64;
                    });
                    self.report(&name, ns, floor);
                    if how == "steady" {
                        self.report(&format!("{name} (mean)"), mean, floor);
                    }
                    self.fs.close(file);
                    self.fs.unlink(&ROOT, InodeId::ROOT, name.replace(' ', "-").as_bytes()).expect("removed");
                    self.digest();
                }
            }
        }
    }

    /// Brings every page of the log into this process's page table; if `empty`, then empties the log.
    fn warm_log(&self, empty: bool) {
        static WARM: std::sync::Once = std::sync::Once::new();
        WARM.call_once(|| {
            let file = self.file("warm");
            let data = vec![3u8; 1 << 20];
            for _ in 0..2 * (RING_BYTES >> 20) {
                self.fs.write(&ROOT, file, WriteAt::Offset(0), &data, false).expect("written");
            }
            self.fs.close(file);
        });
        if empty {
            self.digest();
        }
    }

    fn reads(&self) {
        if self.filter.as_ref().is_some_and(|filter| !filter.starts_with("read")) {
            return;
        }
        let mut source = vec![0u8; FILE_BYTES as usize];
        source.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i / 7) as u8);
        let mut buffer = [0u8; PAGE];
        let pages = FILE_BYTES as usize / PAGE;
        let orders: [(&str, Vec<usize>); 2] = [("sequential", (0..pages).collect()), ("random", shuffled(pages))];
        let digested = self.file("digested");
        for part in 0..64 {
            let bytes = &source[part << 20..(part + 1) << 20];
            self.fs.write(&ROOT, digested, WriteAt::Offset((part as u64) << 20), bytes, false).expect("written");
        }
        self.digest();
        for (how, order) in &orders {
            for length in [128, PAGE] {
                let name = format!("read {length} B digested {how}");
                if !self.wants(&name) {
                    continue;
                }
                let mut next = order.iter().cycle();
                let floor = median(64, pages / 16, || {
                    let at = next.next().expect("one") * PAGE;
                    buffer[..length].copy_from_slice(std::hint::black_box(&source[at..at + length]));
                    std::hint::black_box(&mut buffer);
                });
                let mut read = |page: usize| {
                    let at = page * PAGE;
                    let count = self.fs.read(digested, at as u64, &mut buffer[..length]).expect("read");
                    assert!(count == length && buffer[0] == source[at]);
                };
                (0..pages).for_each(&mut read);
                let mut next = order.iter().cycle();
                let ns = median(64, pages / 16, || read(*next.next().expect("one")));
                self.report(&name, ns, floor);
            }
        }
        self.log_reads(&source);
        self.fs.close(digested);
    }

    fn log_reads(&self, source: &[u8]) {
        let logged = self.file("logged");
        let pages = (SHORT_BYTES as usize) / PAGE;
        for page in 0..pages {
            let at = page * PAGE;
            self.fs.write(&ROOT, logged, WriteAt::Offset(at as u64), &source[at..at + PAGE], false).expect("written");
        }
        let mut buffer = [0u8; PAGE];
        for (how, order) in [("sequential", (0..pages).collect()), ("random", shuffled(pages))] {
            let name = format!("read 4096 B in the log {how}");
            if !self.wants(&name) {
                continue;
            }
            let mut next = order.iter().cycle();
            let floor = median(64, pages, || {
                let at = next.next().expect("one") * PAGE;
                buffer.copy_from_slice(std::hint::black_box(&source[at..at + PAGE]));
                std::hint::black_box(&mut buffer);
            });
            let mut next = order.iter().cycle();
            let ns = median(64, pages / 4, || {
                let at = next.next().expect("one") * PAGE;
                let count = self.fs.read(logged, at as u64, &mut buffer).expect("read");
                assert!(count == PAGE && buffer[0] == source[at]);
            });
            self.report(&name, ns, floor);
        }
        self.fs.close(logged);
    }

    fn names(&self) {
        const ALL: [&str; 6] =
            ["lookup", "attributes", "check_access", "open+close", "create+write 4 KB+close+rename", "create"];
        if !ALL.iter().any(|name| self.wants(name)) {
            return;
        }
        let fs = &self.fs;
        let user = Credentials { checked: false, uid: 1000, gid: 1000, ..ROOT };
        let directory = fs.make(&ROOT, InodeId::ROOT, b"directory", &make(FileKind::Directory)).expect("made").id;
        for number in 0..1000 {
            let name = format!("file-{number}");
            fs.make(&ROOT, directory, name.as_bytes(), &make(FileKind::Regular)).expect("made");
        }
        self.digest();
        let names: Vec<String> = (0..1000).map(|number| format!("file-{number}")).collect();
        for credentials in [&ROOT, &user].into_iter().filter(|_| self.wants("lookup")) {
            let label = if credentials.checked { "" } else { ", permissions checked" };
            let mut next = names.iter().cycle();
            let ns = median(64, 4000, || {
                let name = next.next().expect("one");
                std::hint::black_box(fs.lookup(credentials, directory, name.as_bytes()).expect("found"));
            });
            self.report(&format!("lookup{label}"), ns, 0.0);
        }
        let file = fs.lookup(&ROOT, directory, b"file-7").expect("found").id;
        let ns = median(if self.wants("attributes") { 64 } else { 1 }, 10_000, || {
            drop(std::hint::black_box(fs.attributes(file).expect("there")))
        });
        self.report("attributes", ns, 0.0);
        let ns = median(if self.wants("check_access") { 64 } else { 1 }, 10_000, || {
            fs.check_access(&user, file, Access::READ).expect("allowed")
        });
        self.report("check_access", ns, 0.0);
        let ns = median(if self.wants("open+close") { 64 } else { 1 }, 4000, || {
            fs.open(file).expect("opened");
            fs.close(file);
        });
        self.report("open+close", ns, 0.0);
        self.makes(directory);
    }

    fn makes(&self, directory: InodeId) {
        let fs = &self.fs;
        if !self.wants("create") {
            return;
        }
        self.warm_log(true);
        let data = vec![9u8; PAGE];
        let mut number = 0;
        let (ns, mean) = median_and_mean(64, 500, || {
            let name = format!("new-{}", number % 100);
            let made = fs.make_open(&ROOT, directory, b"temporary", &make(FileKind::Regular)).expect("made");
            fs.write(&ROOT, made.id, WriteAt::Offset(0), &data, false).expect("written");
            fs.close(made.id);
            let (from, to) = ((directory, &b"temporary"[..]), (directory, name.as_bytes()));
            fs.rename(&ROOT, from, to, RenameFlags::default()).expect("renamed");
            number += 1;
        });
        self.report("create+write 4 KB+close+rename", ns, Self::write_floor(PAGE, 32_000));
        self.report("create+write 4 KB+close+rename (mean)", mean, 0.0);
        self.digest();
        let mut number = 0;
        let ns = median(64, 300, || {
            let name = format!("create-{number}");
            fs.make(&ROOT, directory, name.as_bytes(), &make(FileKind::Regular)).expect("made");
            number += 1;
        });
        self.report("create", ns, 0.0);
        self.digest();
    }
}

/// Returns the numbers below `count` in a random order that is the same each time.
fn shuffled(count: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (0..count).collect();
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for last in (1..count).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        all.swap(last, (state % (last as u64 + 1)) as usize);
    }
    all
}
