//! Paths as LibFS follows and remembers them.

mod common;

use ashlar_libfs::{AttributeChange, FinalLink, NewInode, PathPurpose, RenameFlags};
use ashlar_tests::random::Random;
use ashlar_types::{Errno, FileKind, InodeId};
use common::Site;
use common::libfs::{ROOT, SingleUser, connect, make};

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

/// Remembered paths lead where paths lead that are not remembered.
///
/// The directories on their way may change in any way.
#[test]
fn remembered_path_leads_where_fresh_path_leads() {
    const STEPS: u64 = 1500;
    const NAMES: [&str; 4] = ["a", "b", "c", "link"];
    let site = Site::new(64 << 20);
    let sessions = [connect(&site), connect(&site)];
    let mut random = Random::new(20_261_122);
    let user = || [SingleUser::of(0), SingleUser::of(1000)];
    let remembering = [user(), user()];
    let mut remembered = 0;
    for step in 0..STEPS {
        let name = |random: &mut Random| *random.pick(&NAMES).expect("a name");
        let path = |random: &mut Random| (0..=random.below(3)).map(|_| name(random)).collect::<Vec<_>>().join("/");
        // For a while one session is alone, and no lease moves.
        let company = if step / 50 % 2 == 0 { 1 } else { sessions.len() };
        let fs = &sessions[random.below(company as u64) as usize];
        // Returns the directory and the last name of a random path, if there is such a directory.
        let place = |random: &mut Random| {
            let path = path(random);
            let (way, name) = path.rsplit_once('/').unwrap_or(("", &path));
            let directory = SingleUser::of(0).walk(fs, way, FinalLink::Follow).ok()??;
            Some((directory, name.to_owned()))
        };
        if let Some((directory, name)) = place(&mut random) {
            let name = name.as_bytes();
            // Most of them fail, as they should where the name exists or does not.
            let _ = match random.below(8) {
                0 | 1 => fs.make(&ROOT, directory, name, &make(FileKind::Directory)).map(drop),
                2 => fs.make(&ROOT, directory, name, &make(FileKind::Regular)).map(drop),
                3 => {
                    let target = ["a/b", "b", "../c", "."][random.below(4) as usize];
                    let link = NewInode { target: target.as_bytes(), ..make(FileKind::Symlink) };
                    fs.make(&ROOT, directory, name, &link).map(drop)
                }
                4 => fs.unlink(&ROOT, directory, name).or_else(|_| fs.remove_directory(&ROOT, directory, name, None)),
                5 => fs.lookup(&ROOT, directory, name).and_then(|found| {
                    let mode = if random.one_in(2) { 0o755 } else { 0o700 };
                    fs.set_attributes(
                        &ROOT,
                        found.id,
                        &AttributeChange { mode: Some(mode), ..AttributeChange::default() },
                    )
                    .map(drop)
                }),
                _ => place(&mut random).map_or(Ok(()), |(into, new)| {
                    let flags = RenameFlags { exchange: random.one_in(3), ..RenameFlags::default() };
                    fs.rename(&ROOT, (directory, name), (into, new.as_bytes()), flags)
                }),
            };
        }
        for _ in 0..8 {
            let path = path(&mut random);
            let last = if random.one_in(2) { FinalLink::Follow } else { FinalLink::Keep };
            for (fs, users) in sessions.iter().zip(&remembering).take(company) {
                for user in users {
                    let fresh = SingleUser::of(user.credentials.uid).walk(fs, &path, last);
                    let found = user.walk(fs, &path, last);
                    assert_eq!(found, fresh, "'{path}' at step {step}, for user {}", user.credentials.uid);
                    remembered += u64::from(matches!(found, Ok(Some(_))));
                }
            }
        }
    }
    assert!(remembered > STEPS, "only {remembered} paths led anywhere");
}

/// A name that is too long fails as such.
///
/// LibFS once asked for it before it checked the length, and failed with another error.
#[test]
fn too_long_name_fails_with_enametoolong() {
    let site = Site::new(64 << 20);
    let (one, two) = (connect(&site), connect(&site));
    let top = NewInode { mode: 0o700, ..make(FileKind::Directory) };
    one.make(&ROOT, InodeId::ROOT, b"top", &top).expect("made");
    let name = "x".repeat(256);
    let path = format!("top/{name}");
    for fs in [&two, &one, &two] {
        assert_eq!(SingleUser::of(0).walk(fs, &name, FinalLink::Follow), Err(Errno::ENAMETOOLONG));
        assert_eq!(SingleUser::of(0).walk(fs, &path, FinalLink::Follow), Err(Errno::ENAMETOOLONG));
        assert_eq!(SingleUser::of(1000).walk(fs, &path, FinalLink::Follow), Err(Errno::EACCES));
    }
}

/// Two sessions move one name at once: one of them gets it.
///
/// The other one may see the file at both names, before and after.
#[test]
fn name_moved_by_two_sessions_is_moved_once() {
    let site = Site::new(64 << 20);
    let (one, other) = (connect(&site), connect(&site));
    let file = one.make(&ROOT, InodeId::ROOT, b"job", &make(FileKind::Regular)).expect("made").id;
    let root = SingleUser::of(0);
    let aim = || FinalLink::Keep.to(PathPurpose::Name);
    for theirs in [&other, &one] {
        let source = root.place(&one, "job", aim()).expect("followed");
        theirs
            .rename(&ROOT, (InodeId::ROOT, b"job"), (InodeId::ROOT, b"taken"), RenameFlags::default())
            .expect("moved");
        let target = root.place(&one, "taken", aim()).expect("followed");
        assert_eq!([&source, &target].map(|place| place.found.as_ref().map(|found| found.id)), [Some(file); 2]);
        let moved = one.rename_at(&root.credentials, &source, &target, RenameFlags::default());
        assert_eq!(moved, Err(Errno::ENOENT));
        one.rename(&ROOT, (InodeId::ROOT, b"taken"), (InodeId::ROOT, b"job"), RenameFlags::default()).expect("back");
    }
    // If both names lead to one file, nothing is done.
    one.link(&ROOT, file, InodeId::ROOT, b"second").expect("linked");
    let (source, target) =
        (root.place(&one, "job", aim()).expect("there"), root.place(&one, "second", aim()).expect("there"));
    assert_eq!(one.rename_at(&root.credentials, &source, &target, RenameFlags::default()), Ok(()));
    assert_eq!(one.attributes(file).expect("there").inode.links, 2);
    // A missing source fails before the new name matters.
    let (none, there) = (root.place(&one, "none", aim()).expect("followed"), target);
    let flags = RenameFlags { no_replace: true, ..RenameFlags::default() };
    assert_eq!(one.rename_at(&root.credentials, &none, &there, flags), Err(Errno::ENOENT));
    assert_eq!(one.rename_at(&root.credentials, &source, &there, flags), Err(Errno::EEXIST));
}

/// LibFS checks names, rights, sticky bits and kinds in the kernel's order.
#[test]
fn removal_names_the_error_that_the_kernel_names() {
    let site = Site::new(64 << 20);
    let fs = connect(&site);
    let user = SingleUser::of(1000);
    let directory = |parent, name: &[u8], mode| {
        fs.make(&ROOT, parent, name, &NewInode { mode, ..make(FileKind::Directory) }).expect("made").id
    };
    let (open, closed) = (directory(InodeId::ROOT, b"open", 0o1777), directory(InodeId::ROOT, b"closed", 0o755));
    let own = directory(InodeId::ROOT, b"own", 0o777);
    for (parent, name) in [(open, b"file"), (closed, b"file"), (own, b"file")] {
        fs.make(&ROOT, parent, name, &make(FileKind::Regular)).expect("made");
        directory(parent, b"room", 0o755);
    }
    let long = "x".repeat(256);
    let place = |path: &str| user.place(&fs, path, FinalLink::Keep.to(PathPurpose::Name)).expect("followed");
    for (path, is_rmdir, errno) in [
        ("open/file", false, Errno::EPERM),
        ("open/file", true, Errno::EPERM),
        ("open/room", false, Errno::EPERM),
        ("open/none", false, Errno::ENOENT),
        ("closed/none", false, Errno::ENOENT),
        ("closed/none", true, Errno::ENOENT),
        ("closed/file", true, Errno::EACCES),
        ("closed/room", false, Errno::EACCES),
        ("closed/room/", false, Errno::EISDIR),
        ("closed/file/", false, Errno::ENOTDIR),
        ("own/file", true, Errno::ENOTDIR),
        ("own/room", false, Errno::EISDIR),
        (&format!("closed/{long}"), true, Errno::ENAMETOOLONG),
    ] {
        assert_eq!(fs.remove_at(&user.credentials, &place(path), is_rmdir), Err(errno), "{path}, {is_rmdir}");
    }
    let plain = RenameFlags::default();
    let exchange = RenameFlags { exchange: true, ..plain };
    for (from, to, flags, errno) in [
        ("open/file", "closed/file", plain, Errno::EPERM),
        ("open/file", "own/room", plain, Errno::EPERM),
        ("own/file", "open/room", plain, Errno::EPERM),
        ("own/file", "closed/room", plain, Errno::EACCES),
        ("own/file", "own/room", plain, Errno::EISDIR),
        ("own/room", "own/file", plain, Errno::ENOTDIR),
        ("closed/none", &format!("own/{long}"), plain, Errno::ENOENT),
        ("own/file", &format!("own/{long}"), plain, Errno::ENAMETOOLONG),
        ("own/room", "own/room/none", exchange, Errno::ENOENT),
        ("own/room", "own/room/none", plain, Errno::EINVAL),
        ("own/file/", "own/none", exchange, Errno::ENOENT),
    ] {
        let renamed = fs.rename_at(&user.credentials, &place(from), &place(to), flags);
        assert_eq!(renamed, Err(errno), "{from} to {to}, {flags:?}");
    }
}
