//! Inodes that a mount has reserved for its kernel.
//!
//! Programs' sessions are refused, and hold no leases there.

mod common;

use std::sync::Arc;

use ashlar_libfs::{AttributeChange, LibFs, RenameFlags, ReserveReason, WriteAt};
use ashlar_types::{Errno, FileKind, InodeId};
use ashlar_wire::SessionKind;
use common::Site;
use common::libfs::{ROOT, connect, connect_as, make};

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

fn mount(site: &Site) -> Arc<LibFs> {
    connect_as(site, SessionKind::Mount)
}

fn write(fs: &LibFs, file: InodeId, data: &[u8]) -> Result<usize, Errno> {
    fs.write(&ROOT, file, WriteAt::Offset(0), data, false).map(|written| written.bytes)
}

fn read(fs: &LibFs, file: InodeId) -> Result<Vec<u8>, Errno> {
    let mut bytes = vec![0; 64];
    let count = fs.read(file, 0, &mut bytes)?;
    bytes.truncate(count);
    Ok(bytes)
}

const REFUSED: Errno = Errno::RESERVED;

#[test]
fn reserved_file_is_refused_to_programs_until_freed() {
    let mut site = Site::new(64 << 20);
    let (program, mount) = (connect(&site), mount(&site));
    let directory = program.make(&ROOT, InodeId::ROOT, b"directory", &make(FileKind::Directory)).expect("made").id;
    let make = |name: &[u8]| program.make_open(&ROOT, directory, name, &make(FileKind::Regular)).expect("made").id;
    let (file, other) = (make(b"file"), make(b"other"));
    write(&program, file, b"before").expect("written");
    // SharedFS has not seen yet that it was made.
    mount.reserve(file, ReserveReason::Mapped).expect("reserved");
    assert_eq!(read(&program, file), Err(REFUSED));
    assert_eq!(write(&program, file, b"lost"), Err(REFUSED));
    assert_eq!(program.attributes(file).map(drop), Err(REFUSED));
    assert_eq!(program.lookup(&ROOT, directory, b"file").map(drop), Err(REFUSED));
    assert_eq!(program.unlink(&ROOT, directory, b"file"), Err(REFUSED));
    let rename = program.rename(&ROOT, (directory, b"file"), (directory, b"name"), RenameFlags::default());
    assert_eq!(rename, Err(REFUSED));
    let change = AttributeChange { size: Some(0), ..AttributeChange::default() };
    assert_eq!(program.set_attributes(&ROOT, file, &change).map(drop), Err(REFUSED));
    assert_eq!(program.copy_range(&ROOT, file, 0, other, 0, 6, false), Err(REFUSED));
    // All other files go on.
    write(&program, other, b"other").expect("written");
    assert_eq!(program.lookup(&ROOT, directory, b"other").expect("found").id, other);
    assert_eq!(read(&mount, file).expect("read"), b"before");
    write(&mount, file, b"mapped").expect("written");
    mount.free_reserved(file, ReserveReason::Mapped);
    assert_eq!(read(&program, file).expect("read"), b"mapped");
    write(&program, file, b"after!").expect("written");
    assert_eq!(read(&mount, file).expect("read"), b"after!");
    site.check();
}

#[test]
fn reserved_directory_is_refused_with_its_files() {
    let mut site = Site::new(64 << 20);
    let (program, mount) = (connect(&site), mount(&site));
    let directory = program.make(&ROOT, InodeId::ROOT, b"directory", &make(FileKind::Directory)).expect("made").id;
    let file = program.make_open(&ROOT, directory, b"file", &make(FileKind::Regular)).expect("made").id;
    let inner = program.make(&ROOT, directory, b"inner", &make(FileKind::Directory)).expect("made").id;
    let below = program.make_open(&ROOT, inner, b"below", &make(FileKind::Regular)).expect("made").id;
    mount.reserve(directory, ReserveReason::Watched).expect("reserved");
    assert_eq!(write(&program, file, b"lost"), Err(REFUSED));
    assert_eq!(program.make(&ROOT, directory, b"new", &make(FileKind::Regular)).map(drop), Err(REFUSED));
    assert_eq!(program.list(directory, 0, &mut |_| true), Err(REFUSED));
    // A directory in it is reserved too, since the watch reports its changes; a file in that one is not.
    assert_eq!(program.make(&ROOT, inner, b"new", &make(FileKind::Regular)).map(drop), Err(REFUSED));
    write(&program, below, b"below").expect("written");
    let move_out = program.rename(&ROOT, (InodeId::ROOT, b"directory"), (inner, b"x"), RenameFlags::default());
    assert!(move_out.is_err());
    // As long as one reason is left, the file stays reserved.
    mount.reserve(file, ReserveReason::Mapped).expect("reserved");
    mount.free_reserved(directory, ReserveReason::Watched);
    program.make(&ROOT, directory, b"new", &make(FileKind::Regular)).expect("made");
    assert_eq!(write(&program, file, b"lost"), Err(REFUSED));
    mount.free_reserved(file, ReserveReason::Mapped);
    write(&program, file, b"after").expect("written");
    site.check();
}

#[test]
fn reservations_outlive_a_killed_daemon_and_not_their_mount() {
    let mut site = Site::new(64 << 20);
    let (program, mount) = (connect(&site), mount(&site));
    let file = program.make_open(&ROOT, InodeId::ROOT, b"file", &make(FileKind::Regular)).expect("made").id;
    mount.reserve(file, ReserveReason::Mapped).expect("reserved");
    site.kill();
    site.start();
    // Its first call makes it resume.
    mount.attributes(InodeId::ROOT).expect("there");
    mount.reserve(InodeId::ROOT, ReserveReason::Mapped).expect("reserved");
    mount.free_reserved(InodeId::ROOT, ReserveReason::Mapped);
    assert_eq!(write(&program, file, b"lost"), Err(REFUSED));
    mount.close_session();
    let written = (0..1000).find_map(|_| {
        std::thread::sleep(std::time::Duration::from_millis(5));
        write(&program, file, b"after").ok()
    });
    assert_eq!(written, Some(5), "its reservations end with the mount");
    site.check();
}

#[test]
fn program_may_reserve_nothing() {
    let site = Site::new(64 << 20);
    let program = connect(&site);
    assert_eq!(program.reserve(InodeId::ROOT, ReserveReason::Mapped), Err(Errno::EPERM));
}
