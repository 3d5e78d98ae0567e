//! Grants that sessions read from the grant cache.
//!
//! They take no request, and are never stale.

mod common;

use std::os::fd::AsRawFd;
use std::sync::Arc;

use ashlar_libfs::{AttributeChange, LibFs, RenameFlags, WriteAt};
use ashlar_pmem::{Mapping, MappingAccess, Medium};
use ashlar_tests::random::Random;
use ashlar_types::{Access, Credentials, Errno, FileKind, InodeId};
use ashlar_wire::{GRANT_CACHE_BYTES, SessionKind};
use common::Site;
use common::libfs::{ROOT, connect, make, requests, user};

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

const FILES: u64 = 40;

fn name(number: u64) -> String {
    format!("file-{number:03}")
}

/// Returns a file's text.
///
/// Some texts stand in the published grant itself, some in blocks.
fn text(number: u64, version: u64) -> Vec<u8> {
    vec![(number + 41 * version) as u8; (number * 331 % 9000) as usize]
}

/// Makes a directory of files, below another directory.
///
/// The session that makes it has ended. So it's all applied, and no session holds leases to write it.
fn make_tree(site: &Site) -> InodeId {
    let fs = connect(site);
    let outer = fs.make(&ROOT, InodeId::ROOT, b"outer", &make(FileKind::Directory)).expect("made").id;
    let directory = fs.make(&ROOT, outer, b"inner", &make(FileKind::Directory)).expect("made").id;
    for number in 0..FILES {
        let file = fs.make(&ROOT, directory, name(number).as_bytes(), &make(FileKind::Regular)).expect("made").id;
        fs.write(&ROOT, file, WriteAt::Offset(0), &text(number, 0), false).expect("written");
    }
    fs.close_session();
    directory
}

fn read(fs: &LibFs, directory: InodeId, name: &str) -> Result<Vec<u8>, Errno> {
    let credentials = Credentials { checked: false, ..ROOT };
    let found = fs.lookup(&credentials, directory, name.as_bytes())?;
    fs.open_for(&credentials, found.id, Access::READ)?;
    let mut room = vec![0xff; 10_000];
    let count = fs.read(found.id, 0, &mut room);
    fs.close(found.id);
    room.truncate(count?);
    Ok(room)
}

fn read_all(fs: &LibFs, directory: InodeId, version: u64) {
    for number in 0..FILES {
        assert_eq!(read(fs, directory, &name(number)).expect("read"), text(number, version), "{}", name(number));
        assert_eq!(read(fs, directory, &format!("no-{number}")).err(), Some(Errno::ENOENT));
    }
}

/// Checks that a new session reads all without a request.
fn check_reads_without_request(site: &Site, directory: InodeId) {
    let fs = connect(site);
    let asked = requests(site);
    read_all(&fs, directory, 0);
    let asked = requests(site) - asked;
    // The status request itself, and the segment that holds the blocks.
    assert!(asked <= 2, "{asked} requests");
}

/// Opens two sessions that read at the same time.
///
/// They share their leases, and from then on no session asks. Two earlier ones record the access times.
fn read_by_two(site: &Site, directory: InodeId, version: u64) -> [Arc<LibFs>; 2] {
    let open_and_read = || {
        let sessions = [connect(site), connect(site)];
        for fs in [&sessions[0], &sessions[1], &sessions[0], &sessions[1]] {
            read_all(fs, directory, version);
        }
        sessions
    };
    open_and_read().iter().for_each(|fs| fs.close_session());
    open_and_read()
}

/// Programs of a build read the grants that the first one asked for.
///
/// Each once asked for the same directories and headers again.
#[test]
fn published_grants_are_read_without_a_request() {
    let site = Site::new(64 << 20);
    let directory = make_tree(&site);
    let before = read_by_two(&site, directory, 0);
    for _ in 0..3 {
        check_reads_without_request(&site, directory);
    }
    // It does not matter that the sessions that asked are gone.
    drop(before);
    check_reads_without_request(&site, directory);
    let posts = site.status().counters.iter().find(|(name, _)| name == "posts").expect("a counter").1;
    assert!(posts > FILES, "{posts} posts");
}

/// The first reader must leave grants for the next ones.
///
/// It once got a write lease on the whole tree where no other session had anything. So the next session asked for all
/// of it again.
#[test]
fn grants_of_one_reader_serve_the_next_sessions() {
    let site = Site::new(64 << 20);
    let directory = make_tree(&site);
    let first = connect(&site);
    read_all(&first, directory, 0);
    first.close_session();
    for _ in 0..2 {
        check_reads_without_request(&site, directory);
    }
}

/// A session that reads files before it changes them asks once for all.
#[test]
fn reader_that_changes_files_asks_once_for_all() {
    let site = Site::new(64 << 20);
    let directory = make_tree(&site);
    // One that reads the files by itself, and one that knows them from the grant cache.
    for is_published in [false, true] {
        if is_published {
            read_by_two(&site, directory, 0).iter().for_each(|fs| fs.close_session());
        }
        let fs = connect(&site);
        let ids: Vec<_> =
            (0..FILES).map(|number| fs.lookup(&ROOT, directory, name(number).as_bytes()).expect("found").id).collect();
        let asked = requests(&site);
        for id in &ids {
            let change =
                AttributeChange { mode: Some(if is_published { 0o640 } else { 0o600 }), ..AttributeChange::default() };
            assert_ne!(fs.attributes(*id).expect("known").inode.mode, change.mode.unwrap_or(0));
            fs.set_attributes(&ROOT, *id, &change).expect("changed");
        }
        let asked = requests(&site) - asked;
        assert!(asked <= 8, "{asked} requests, in the grant cache: {is_published}");
        fs.close_session();
    }
}

/// Each change of a file or its directory shows at once.
///
/// It shows to a reader of the grant cache and to a new session.
#[test]
fn change_shows_at_once_to_readers_of_grant_cache() {
    let site = Site::new(64 << 20);
    let directory = make_tree(&site);
    let _first = read_by_two(&site, directory, 0);
    let (writer, reader) = (connect(&site), connect(&site));
    read_all(&reader, directory, 0);
    let seen = |check: &dyn Fn(&LibFs)| {
        check(&reader);
        check(&connect(&site));
        check(&writer);
    };
    let id = |number: u64| writer.lookup(&ROOT, directory, name(number).as_bytes()).expect("found").id;
    for number in 0..8 {
        let (file, first) = (id(number), name(number));
        writer.write(&ROOT, file, WriteAt::Offset(0), &text(number, 1), false).expect("written");
        seen(&|fs| assert_eq!(read(fs, directory, &first), Ok(text(number, 1))));
        let second = format!("new-{number}");
        let (from, to) = ((directory, first.as_bytes()), (directory, second.as_bytes()));
        writer.rename(&ROOT, from, to, RenameFlags::default()).expect("renamed");
        seen(&|fs| assert_eq!(read(fs, directory, &first).err(), Some(Errno::ENOENT)));
        seen(&|fs| assert_eq!(read(fs, directory, &second), Ok(text(number, 1))));
        let change = AttributeChange { mode: Some(0o600), ..AttributeChange::default() };
        writer.set_attributes(&ROOT, file, &change).expect("changed");
        seen(&|fs| {
            let opened = fs.open_for(&user(1000), file, Access::READ);
            assert_eq!(opened.err(), Some(Errno::EACCES));
        });
        writer.link(&ROOT, file, directory, first.as_bytes()).expect("linked");
        seen(&|fs| assert_eq!(read(fs, directory, &first), Ok(text(number, 1))));
        writer.unlink(&ROOT, directory, second.as_bytes()).expect("removed");
        seen(&|fs| assert_eq!(read(fs, directory, &second).err(), Some(Errno::ENOENT)));
        // A session that has it open reads on.
        reader.open(file).expect("opened");
        writer.unlink(&ROOT, directory, first.as_bytes()).expect("removed");
        seen(&|fs| assert_eq!(read(fs, directory, &first).err(), Some(Errno::ENOENT)));
        let mut room = vec![0; 10_000];
        assert_eq!(reader.read(file, 0, &mut room), Ok(text(number, 1).len()));
        reader.close(file);
        // SharedFS frees it within a while.
        let left = reader.attributes(file);
        assert!(
            left.as_ref().is_err_and(|errno| *errno == Errno::ESTALE) || left.is_ok_and(|left| left.inode.links == 0)
        );
    }
}

/// Short sessions, one after the other and beside each other.
///
/// Each reads much and writes little.
#[test]
fn short_sessions_see_each_others_writes() {
    let site = Site::new(64 << 20);
    let directory = make_tree(&site);
    let mut versions = vec![0; FILES as usize];
    let mut random = Random::new(7);
    let mut running: Vec<Arc<LibFs>> = Vec::new();
    for round in 1..60 {
        running.push(connect(&site));
        if running.len() > 3 {
            running.remove(random.below(4) as usize);
        }
        for _ in 0..60 {
            let fs = &running[random.below(running.len() as u64) as usize];
            let number = random.below(FILES);
            let version = &mut versions[number as usize];
            if random.below(12) == 0 {
                *version = round;
                let file = fs.lookup(&ROOT, directory, name(number).as_bytes()).expect("found").id;
                fs.write(&ROOT, file, WriteAt::Offset(0), &text(number, round), false).expect("written");
            }
            assert_eq!(read(fs, directory, &name(number)), Ok(text(number, *version)), "round {round}, file {number}");
        }
    }
}

/// A session that outlives SharedFS still maps the old grant cache.
///
/// SharedFS takes the leases of that one no more.
#[test]
fn grant_cache_of_dead_sharedfs_is_not_believed() {
    let mut site = Site::new(64 << 20);
    let directory = make_tree(&site);
    let _first = read_by_two(&site, directory, 0);
    let reader = connect(&site);
    read_all(&reader, directory, 0);
    site.kill();
    // All of it was known from the grant cache; while there is no SharedFS to ask, it is not.
    site.start();
    let writer = connect(&site);
    for number in 0..FILES {
        let file = writer.lookup(&ROOT, directory, name(number).as_bytes()).expect("found").id;
        writer.write(&ROOT, file, WriteAt::Offset(0), &text(number, 1), false).expect("written");
        assert_eq!(read(&reader, directory, &name(number)), Ok(text(number, 1)));
    }
    read_all(&reader, directory, 1);
    writer.close_session();
    // The new SharedFS has a grant cache, too.
    let _second = read_by_two(&site, directory, 1);
    let fs = connect(&site);
    let asked = requests(&site);
    read_all(&fs, directory, 1);
    assert!(requests(&site) - asked <= 2);
}

/// A read records the access time, without a lease.
#[test]
fn access_time_shows_through_grant_cache() {
    let site = Site::new(64 << 20);
    let directory = make_tree(&site);
    let stat = |fs: &LibFs| fs.lookup(&ROOT, directory, name(7).as_bytes()).expect("found");
    let _first = [connect(&site), connect(&site)].map(|fs| (stat(&fs), fs));
    let before = stat(&connect(&site)).inode;
    let reader = connect(&site);
    assert_eq!(read(&reader, directory, &name(7)), Ok(text(7, 0)));
    reader.close_session();
    let next = connect(&site);
    let asked = requests(&site);
    assert!(stat(&next).inode.accessed > before.accessed);
    assert!(requests(&site) - asked <= 1, "it stands in the grant cache");
    // It is recorded once, and not by each session.
    assert_eq!(read(&next, directory, &name(7)), Ok(text(7, 0)));
    next.close_session();
    let records = site.status().counters.iter().find(|(name, _)| name == "records_applied").expect("a counter").1;
    assert_eq!(read(&connect(&site), directory, &name(7)), Ok(text(7, 0)));
    let after = site.status().counters.iter().find(|(name, _)| name == "records_applied").expect("a counter").1;
    assert_eq!(after, records);
}

/// A session can't change the grant cache for others.
///
/// It gets the grant cache's file, and could open it again.
#[test]
fn session_cannot_write_grant_cache() {
    let site = Site::new(64 << 20);
    let (_line, _, files) = common::hello(&site.socket(), SessionKind::Process, None).expect("answered");
    // The placeholder of open files is last, if this process may mount.
    assert!(files.len() == 5 || files.len() == 6, "{} files", files.len());
    let grant_cache = &files[4];
    let path = format!("/proc/self/fd/{}", grant_cache.as_raw_fd());
    let again = std::fs::OpenOptions::new().read(true).write(true).open(path).expect("it's root's file");
    assert!(again.set_len(0).is_err() && again.set_len(GRANT_CACHE_BYTES * 2).is_err(), "it stays as long as it is");
    assert!(
        std::os::unix::fs::FileExt::write_at(&again, &[1; 8], GRANT_CACHE_BYTES / 2).is_err(),
        "nothing is written"
    );
    let map = |access| Mapping::map(&again, GRANT_CACHE_BYTES, access, Medium::MEMORY);
    assert!(map(MappingAccess::ReadWrite).is_err() && map(MappingAccess::ReadOnly).is_ok());
    let (_mount, _, files) = common::hello(&site.socket(), SessionKind::Mount, None).expect("answered");
    assert_eq!(files.len(), 3, "a mount asks for all that its kernel caches");
}
