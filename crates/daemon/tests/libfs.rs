//! Sessions of LibFS on a real daemon, without a kernel.
//!
//! They try calls that the kernel never passes on, and effects that it hides.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_libfs::{
    Allocation, AttributeChange, FinalLink, LibFs, OpenInode, PathPurpose, RenameFlags, Seek, WriteAt, XattrFlags,
};
use ashlar_tests::random::Random;
use ashlar_types::{
    Access, BLOCK_BYTES, ByteRange, Credentials, DEPTH_MAX, Errno, FILE_SIZE_MAX, FileKind, InodeId, LockAction,
    LockKind, SessionId, XATTR_NAME_MAX, XATTR_VALUE_MAX,
};
use ashlar_wire::SessionKind;
use common::Site;
use common::libfs::{ROOT, SingleUser, connect, connect_as, make, user};

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

#[test]
fn removed_file_gets_no_new_name() {
    let site = Site::new(64 << 20);
    let (one, two) = (connect(&site), connect(&site));
    let file = one.make_open(&ROOT, InodeId::ROOT, b"file", &make(FileKind::Regular)).expect("made").id;
    assert_eq!(two.lookup(&ROOT, InodeId::ROOT, b"file").expect("found").id, file);
    one.unlink(&ROOT, InodeId::ROOT, b"file").expect("removed");
    // As a kernel does that has looked the old name up before it was removed.
    for session in [&two, &one] {
        assert_eq!(session.link(&ROOT, file, InodeId::ROOT, b"again").err(), Some(Errno::ENOENT));
    }
    one.close(file);
    let unnamed = two.make_unnamed(&ROOT, InodeId::ROOT, &make(FileKind::Regular)).expect("made").id;
    assert_eq!(two.link(&ROOT, unnamed, InodeId::ROOT, b"named").expect("linked").inode.links, 1);
    two.unlink(&ROOT, InodeId::ROOT, b"named").expect("removed");
    assert_eq!(two.link(&ROOT, unnamed, InodeId::ROOT, b"named").err(), Some(Errno::ENOENT));
    two.close(unnamed);
}

/// A freed file must not be changed by a session that still knows it.
///
/// The session knows it by the lease of its directory. Its maker once changed it after SharedFS had freed it, and was
/// fenced for that.
#[test]
fn freed_file_is_changed_by_no_session() {
    let site = Site::new(64 << 20);
    let (zero, one, two) = (connect(&site), connect(&site), connect(&site));
    let directory = zero.make(&ROOT, InodeId::ROOT, b"directory", &make(FileKind::Directory)).expect("made").id;
    let theirs = two.make_open(&ROOT, directory, b"theirs", &make(FileKind::Regular)).expect("made").id;
    let file = one.make_open(&ROOT, directory, b"file", &make(FileKind::Regular)).expect("made").id;
    let chmod = || {
        one.set_attributes(&ROOT, file, &AttributeChange { mode: Some(0o600), ..AttributeChange::default() }).map(drop)
    };
    one.unlink(&ROOT, directory, b"file").expect("removed");
    assert_eq!(chmod(), Ok(()), "of an open file without a name");
    two.list(directory, 0, &mut |_| true).expect("listed");
    one.close(file);
    let freed = || site.status().counters.iter().find(|(name, _)| name == "orphans_freed").expect("a counter").1 > 0;
    let start = Instant::now();
    while !freed() {
        assert!(start.elapsed() < Duration::from_secs(30), "the file is not freed");
        std::thread::sleep(Duration::from_millis(20));
    }
    one.make(&ROOT, directory, b"other", &make(FileKind::Regular)).expect("made");
    assert_eq!(chmod(), Err(Errno::ESTALE));
    one.make_room().expect("digested");
    one.make(&ROOT, directory, b"another", &make(FileKind::Regular)).expect("made");
    two.close(theirs);
}

/// A mount that removes a file without a handle of its own believes that the file is gone. Another session has the file
/// open, and needs a descriptor of it.
#[test]
fn file_released_by_one_session_opens_for_another() {
    let site = Site::new(64 << 20);
    let (process, mount) = (connect(&site), connect_as(&site, SessionKind::Mount));
    let checked = Credentials::checked(0, 0);
    let file = process.make_open(&ROOT, InodeId::ROOT, b"file", &make(FileKind::Regular)).expect("made").id;
    mount.unlink(&checked, InodeId::ROOT, b"file").expect("removed");
    for round in 0..3 {
        assert_eq!(mount.lookup(&checked, file, b".").map(|found| found.inode.links), Ok(0), "{round}");
        assert_eq!(mount.open(file).map(|found| found.id), Ok(file), "{round}");
        // The last handle that this session has: it frees the file again.
        mount.close(file);
    }
    assert_eq!(mount.open(file).map(|found| found.id), Ok(file));
    mount.close(file);
    process.close(file);
}

/// `flock(2)` gives up a shared lock before it waits for an exclusive one. Another owner may get its own exclusive lock
/// meanwhile, and keeps it over the death of SharedFS.
#[test]
fn flock_that_a_conversion_gave_up_stays_with_its_new_owner() {
    let mut site = Site::new(64 << 20);
    let mount = connect_as(&site, SessionKind::Mount);
    let other = connect_as(&site, SessionKind::Mount);
    let lock =
        |fs: &LibFs, file, owner, action, wait| fs.lock(file, LockKind::Flock, owner, 1, ByteRange::ALL, action, wait);
    // SharedFS learns of the locks in no certain order, so several files make a wrong one likely.
    let files: Vec<_> = (0..8u64)
        .map(|number| {
            let name = format!("file-{number}");
            mount.make_open(&ROOT, InodeId::ROOT, name.as_bytes(), &make(FileKind::Regular)).expect("made").id
        })
        .collect();
    let (keeps, converts) = (1, 2);
    let mut waiting = Vec::new();
    for &file in &files {
        for owner in [keeps, converts] {
            assert_eq!(lock(&mount, file, owner, LockAction::Read, None), Ok(()));
        }
        let of_thread = Arc::clone(&mount);
        waiting.push(std::thread::spawn(move || lock(&of_thread, file, converts, LockAction::Write, Some(file.0))));
        // No lock is in the way once the other owner has given its own up.
        let deadline = Instant::now() + Duration::from_secs(20);
        let in_the_way = || mount.query_lock(file, LockKind::Flock, keeps, ByteRange::ALL, LockAction::Write);
        while in_the_way().expect("answered").is_some() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(lock(&mount, file, keeps, LockAction::Write, None), Ok(()));
    }
    site.kill();
    site.start();
    for &file in &files {
        assert_eq!(lock(&other, file, 3, LockAction::Read, None), Err(Errno::EAGAIN), "the owner has lost its lock");
        assert_eq!(lock(&mount, file, keeps, LockAction::Unlock, None), Ok(()));
    }
    for thread in waiting {
        assert_eq!(thread.join().expect("ended"), Ok(()));
    }
    for &file in &files {
        assert_eq!(lock(&other, file, 3, LockAction::Read, None), Err(Errno::EAGAIN), "the waiting owner has it");
    }
}

/// A descriptor shows a file's number before any applied log has the file.
#[test]
fn inode_number_is_known_before_its_log_is_applied() {
    let site = Site::new(64 << 20);
    let (one, two) = (connect(&site), connect(&site));
    let made = one.make(&ROOT, InodeId::ROOT, b"directory", &make(FileKind::Directory)).expect("made").id;
    assert!(two.attributes(made).expect("known").inode.is_directory());
    let file = one.make_open(&ROOT, made, b"file", &make(FileKind::Regular)).expect("made").id;
    assert_eq!(two.write(&ROOT, file, WriteAt::End, b"text", false).expect("written").bytes, 4);
    assert_eq!(one.attributes(file).expect("known").inode.size, 4);
    assert_eq!(two.attributes(InodeId(file.0 + 1)).err(), Some(Errno::ESTALE));
    one.close(file);
}

/// A file that is replaced all the time is there all the time.
///
/// An answer about the file before once denied that.
#[test]
fn replaced_file_is_there_at_all_times() {
    const SECONDS: u64 = 2;
    let site = Site::new(64 << 20);
    let sessions: Vec<_> = (0..4).map(|_| connect(&site)).collect();
    let top = sessions[0].make(&ROOT, InodeId::ROOT, b"top", &make(FileKind::Directory)).expect("made").id;
    sessions[0].make(&ROOT, top, b"file", &make(FileKind::Regular)).expect("made");
    let end = Instant::now() + Duration::from_secs(SECONDS);
    let replace = |number: usize| {
        let (fs, new) = (&sessions[number], format!("new-{number}"));
        while Instant::now() < end {
            fs.make(&ROOT, top, new.as_bytes(), &make(FileKind::Regular)).expect("made");
            fs.rename(&ROOT, (top, new.as_bytes()), (top, b"file"), RenameFlags::default()).expect("renamed");
        }
    };
    let look = |number: usize| {
        let (fs, user) = (&sessions[number], SingleUser::of(0));
        let mut found = 0;
        while Instant::now() < end {
            let aim = FinalLink::Follow.to(if found % 2 == 0 { PathPurpose::Read } else { PathPurpose::Write });
            match user.place(fs, "top/file", aim) {
                Ok(place) => assert!(place.found.is_some(), "it is denied"),
                // A front end tries again.
                Err(errno) => assert_eq!(errno, Errno::ESTALE),
            }
            found += 1;
        }
        assert!(found > 10, "only {found} looks");
    };
    std::thread::scope(|scope| {
        for number in 0..2 {
            let (replace, look) = (&replace, &look);
            scope.spawn(move || replace(number));
            scope.spawn(move || look(2 + number));
        }
    });
}

/// Reads and writes of an inode without contents must fail.
///
/// LibFS once asked for its contents again and again, for ever. The kernel refuses such calls itself, so this never
/// showed.
#[test]
fn inode_without_contents_is_refused_at_once() {
    let site = Site::new(64 << 20);
    let fs = connect(&site);
    let id = fs.make(&ROOT, InodeId::ROOT, b"pipe", &make(FileKind::Fifo)).expect("made").id;
    let cut = AttributeChange { size: Some(0), ..AttributeChange::default() };
    let mut room = [0; 8];
    for (id, errno) in [(InodeId::ROOT, Errno::EISDIR), (id, Errno::EINVAL)] {
        assert_eq!(fs.set_attributes(&ROOT, id, &cut).err(), Some(errno));
        assert_eq!(fs.read(id, 0, &mut room), Err(errno));
        assert_eq!(fs.write(&ROOT, id, WriteAt::Offset(0), b"x", false), Err(errno));
        assert_eq!(fs.seek(id, Seek::Data, 0), Err(Errno::EINVAL));
        assert!(fs.allocate(&ROOT, id, Allocation::Reserve, 0, 1, false).is_err());
    }
}

/// A change of owner that names none strips set-id bits of own files only.
///
/// It names neither owner nor group. SharedFS would refuse a record that does it to another user's file, and fence the
/// session.
#[test]
fn other_user_takes_no_set_id_bits_away() {
    let site = Site::new(64 << 20);
    let fs = connect(&site);
    let (owner, stranger) = (user(5), user(7));
    fs.set_attributes(&ROOT, InodeId::ROOT, &AttributeChange { mode: Some(0o777), ..AttributeChange::default() })
        .expect("opened to all");
    let file = fs.make(&owner, InodeId::ROOT, b"file", &make(FileKind::Regular)).expect("made").id;
    fs.set_attributes(&owner, file, &AttributeChange { mode: Some(0o4755), ..AttributeChange::default() })
        .expect("changed");
    let neither = AttributeChange { strip: true, ..AttributeChange::default() };
    assert_eq!(fs.set_attributes(&stranger, file, &neither).err(), Some(Errno::EPERM));
    assert_eq!(fs.attributes(file).expect("there").inode.mode, 0o4755);
    assert_eq!(fs.set_attributes(&owner, file, &neither).expect("changed").inode.mode, 0o755);
}

/// A rename that leaves a whiteout is one update.
///
/// The session that made it knows the whiteout at once, and others find it. From then on it is a file like any other.
#[test]
fn whiteout_of_rename_is_seen_by_all_sessions() {
    let mut site = Site::new(64 << 20);
    let (one, two) = (connect(&site), connect(&site));
    let user = Credentials::checked(5, 6);
    let directory = one.make(&ROOT, InodeId::ROOT, b"directory", &make(FileKind::Directory)).expect("made").id;
    let change = AttributeChange { gid: Some(9), mode: Some(0o2777), ..AttributeChange::default() };
    one.set_attributes(&ROOT, directory, &change).expect("changed");
    let flags = RenameFlags { whiteout: true, ..RenameFlags::default() };
    let (from, to) = ((directory, &b"file"[..]), (InodeId::ROOT, &b"moved"[..]));
    for (round, session) in [&one, &two, &one].into_iter().enumerate() {
        let file = session.make(&user, directory, b"file", &make(FileKind::Regular)).expect("made").id;
        session.rename(&user, from, to, flags).expect("moved");
        for looking in [session, &one, &two] {
            assert_eq!(looking.lookup(&ROOT, to.0, to.1).expect("found").id, file, "{round}");
            let left = looking.lookup(&ROOT, from.0, from.1).expect("found");
            let inode = &left.inode;
            assert_eq!((inode.kind, inode.device, inode.mode, inode.links), (FileKind::CharDevice, 0, 0, 1));
            assert_eq!((inode.uid, inode.gid), (5, 9), "as all new files in a directory with set-group-id");
            assert_eq!(looking.attributes(directory).expect("there").inode.entries, 1);
        }
        let both = RenameFlags { exchange: true, ..flags };
        assert_eq!(session.rename(&user, from, to, both), Err(Errno::EINVAL));
        let neither = RenameFlags { no_replace: true, ..flags };
        assert_eq!(session.rename(&user, from, to, neither), Err(Errno::EEXIST));
        // The whiteout moves over the file, and is removed.
        session.rename(&ROOT, from, to, RenameFlags::default()).expect("moved");
        assert_eq!(session.lookup(&ROOT, from.0, from.1).err(), Some(Errno::ENOENT));
        session.unlink(&ROOT, to.0, to.1).expect("removed");
    }
    assert_eq!(site.check()["sessions_fenced"], 0);
}

/// The fast path is taken exactly where it can serve the call.
///
/// The kernel passes neither collapsing nor inserting on to FUSE, so they are tried here, between all else that changes
/// a file. Each case that the fast path does not handle must send the caller to the slow path.
#[test]
fn fast_path_is_taken_only_on_warm_state() {
    let site = Site::new(64 << 20);
    let (one, two) = (connect(&site), connect(&site));
    let file = one.make_open(&ROOT, InodeId::ROOT, b"file", &make(FileKind::Regular)).expect("made").id;
    let way = one.open_inode(file);
    let write = |at: WriteAt, limit: u64| one.write_open(&way, at, b"short", true, limit);
    let read = |fs: &LibFs, way: &OpenInode| {
        let mut room = [0; 16];
        let count = fs.read_open(way, 0, room.len(), |length| room.get_mut(..length))?;
        Some(room[..count].to_vec())
    };
    // The slow path asks for credit.
    let set_id = AttributeChange { mode: Some(0o4755), ..AttributeChange::default() };
    one.write(&ROOT, file, WriteAt::Offset(0), b"long way", false).expect("written");
    one.set_attributes(&ROOT, file, &set_id).expect("set");
    assert_eq!(write(WriteAt::Offset(4), 100).map(|written| (written.offset, written.bytes)), Some((4, 5)));
    assert_eq!(write(WriteAt::End, 100).map(|written| (written.offset, written.bytes)), Some((9, 5)));
    let now = one.attributes(file).expect("known").inode;
    assert_eq!((now.size, now.blocks, now.mode), (14, 1, 0o755), "a change of content clears set-id bits");
    assert_eq!(write(WriteAt::End, 18), None, "beyond the limit");
    assert_eq!(write(WriteAt::Offset(FILE_SIZE_MAX - 1), FILE_SIZE_MAX), None);
    let mut room = [0; 16];
    assert_eq!(one.read(file, 0, &mut room), Ok(14), "which moves the time of the access");
    assert_eq!(&room[..14], b"longshortshort");
    let fresh = read(&one, &way);
    assert!(fresh.is_none() || fresh.as_deref() == Some(b"longshortshort"));
    // A buffer that is not there yet, and one that is not requested behind the end.
    assert_eq!(one.read_open(&way, 0, 16, |_| None), None);
    assert_eq!(one.read_open(&way, 14, 16, |_| panic!("nothing is to be copied")), Some(0));
    // The other session takes the lease away, and sees the writes.
    let theirs = two.open(file).map(|found| two.open_inode(found.id)).expect("opened");
    assert_eq!(two.write_open(&theirs, WriteAt::Offset(0), b"x", false, FILE_SIZE_MAX), None, "nothing is known yet");
    two.write(&ROOT, file, WriteAt::Offset(0), b"LONG", false).expect("written");
    assert_eq!((write(WriteAt::Offset(0), 100), read(&one, &way)), (None, None), "the lease is gone");
    assert!(two.write_open(&theirs, WriteAt::End, b"!", false, FILE_SIZE_MAX).is_some());
    assert_eq!(one.read(file, 0, &mut room), Ok(15));
    assert_eq!(&room[..15], b"LONGshortshort!");
    assert_eq!((read(&one, &theirs), read(&two, &way)), (None, None), "an open inode is good in its own session");
    // Capabilities are removed by a record of their own.
    one.set_xattr(&ROOT, file, b"security.capability", b"value", XattrFlags::default(), false).expect("set");
    one.write(&ROOT, file, WriteAt::Offset(0), b"l", false).expect("written");
    one.set_xattr(&ROOT, file, b"security.capability", b"value", XattrFlags::default(), false).expect("set");
    assert_eq!(write(WriteAt::Offset(0), 100), None);
    one.write(&ROOT, file, WriteAt::Offset(0), b"l", false).expect("written");
    assert_eq!(one.xattr(file, b"security.capability"), Err(Errno::ENODATA));
    assert!(write(WriteAt::Offset(0), 100).is_some());
    // Without a name the file goes on for as long as it is open.
    two.close(file);
    one.unlink(&ROOT, InodeId::ROOT, b"file").expect("removed");
    let _ = one.write(&ROOT, file, WriteAt::Offset(0), b"l", false).expect("written");
    assert!(write(WriteAt::Offset(0), 100).is_some());
    one.close(file);
    assert_eq!((write(WriteAt::Offset(0), 100), read(&one, &way)), (None, None), "it is gone");
    // A directory.
    let directory = one.make(&ROOT, InodeId::ROOT, b"directory", &make(FileKind::Directory)).expect("made").id;
    let way = one.open_inode(directory);
    assert_eq!((one.write_open(&way, WriteAt::End, b"x", false, 100), read(&one, &way)), (None, None));
}

/// Invalid names of extended attributes fail as on ext4.
///
/// They are names outside of all namespaces, namespaces without a name, and absent access lists.
#[test]
fn xattr_invalid_name_is_refused_as_by_ext4() {
    let site = Site::new(64 << 20);
    let one = connect(&site);
    let file = one.make_open(&ROOT, InodeId::ROOT, b"file", &make(FileKind::Regular)).expect("made").id;
    let set = |name: &[u8], value: &[u8]| one.set_xattr(&ROOT, file, name, value, XattrFlags::default(), false);
    for name in [&b"user."[..], b"trusted.", b"security."] {
        let expected = Err(Errno::EINVAL);
        assert_eq!((set(name, b"x"), one.remove_xattr(&ROOT, file, name)), (expected, expected), "{name:?}");
        assert_eq!(one.xattr(file, name), Err(Errno::EINVAL), "{name:?}");
    }
    for name in [&b"user"[..], b"USER.one", b"other.one", b"system.other"] {
        let expected = Err(Errno::EOPNOTSUPP);
        assert_eq!((set(name, b"x"), one.remove_xattr(&ROOT, file, name)), (expected, expected), "{name:?}");
        assert_eq!(one.xattr(file, name), Err(Errno::EOPNOTSUPP), "{name:?}");
    }
    for name in [&b"system.posix_acl_access"[..], b"system.posix_acl_default"] {
        assert_eq!(one.xattr(file, name), Err(Errno::ENODATA), "{name:?}");
        // A list without entries removes the list, and so does a removal; it is no error if there is none.
        for empty in [&b""[..], b"\x02\0\0\0"] {
            assert_eq!(set(name, empty), Ok(()), "{name:?}");
        }
        assert_eq!(one.remove_xattr(&ROOT, file, name), Ok(()), "{name:?}");
        assert_eq!(set(name, b"\x03\0\0\0"), Err(Errno::EOPNOTSUPP), "{name:?}");
        assert_eq!(set(name, b"\x02\0"), Err(Errno::EINVAL), "{name:?}");
    }
}

#[test]
fn file_ranges_match_model() {
    const SIZE_MAX: u64 = 192 << 10;
    let mut site = Site::new(64 << 20);
    let sessions = [connect(&site), connect(&site)];
    for seed in 1..=3 {
        let (mut random, mut model) = (Random::new(seed), Vec::<u8>::new());
        let name = format!("ranges{seed}");
        let file = sessions[0].make(&ROOT, InodeId::ROOT, name.as_bytes(), &make(FileKind::Regular)).expect("made").id;
        // A session that has not looked a file up can't know it.
        assert_eq!(sessions[1].lookup(&ROOT, InodeId::ROOT, name.as_bytes()).expect("found").id, file);
        for number in 0..1500 {
            // Mostly the same session: it then reads from its own log.
            let fs = &sessions[usize::from(random.below(20) == 0)];
            let size = model.len() as u64;
            let (mut offset, mut length) = (random.below(SIZE_MAX - (16 << 10)), 1 + random.below(16 << 10));
            match random.below(10) {
                0..3 => {
                    let bytes = random.bytes(length as usize);
                    fs.write(&ROOT, file, WriteAt::Offset(offset), &bytes, false).expect("written");
                    put(&mut model, offset, &bytes);
                }
                3 => {
                    let change = ashlar_libfs::AttributeChange { size: Some(offset), ..Default::default() };
                    fs.set_attributes(&ROOT, file, &change).expect("truncated");
                    model.resize(offset as usize, 0);
                }
                4 if size > length => {
                    offset = random.below(size - length);
                    let to = random.below(SIZE_MAX - length);
                    if to >= offset + length || offset >= to + length {
                        assert_eq!(fs.copy_range(&ROOT, file, offset, file, to, length, false), Ok(length));
                        let bytes = model[offset as usize..(offset + length) as usize].to_vec();
                        put(&mut model, to, &bytes);
                    }
                }
                5..9 => {
                    let how = Allocation::ALL[random.below(7) as usize];
                    if matches!(how, Allocation::Collapse | Allocation::Insert) {
                        offset = random.below(size + 1) / BLOCK_BYTES * BLOCK_BYTES;
                        length = BLOCK_BYTES * (1 + random.below(4));
                    }
                    if how != Allocation::Insert || size + length <= SIZE_MAX {
                        let result = fs.allocate(&ROOT, file, how, offset, length, false);
                        assert_eq!(result, allocate(&mut model, how, offset, length), "seed {seed}, {number}: {how:?}");
                    }
                }
                _ => drop(fs.sync_inode(file)),
            }
            if number % 10 == 0 {
                let mut found = vec![0; SIZE_MAX as usize];
                let count = fs.read(file, 0, &mut found).expect("read");
                let wrong = found[..count].iter().zip(&model).position(|(one, two)| one != two);
                assert_eq!((count, wrong), (model.len(), None), "seed {seed}, operation {number}");
            }
        }
    }
    sessions.iter().for_each(|session| session.close_session());
    site.check();
}

fn put(model: &mut Vec<u8>, offset: u64, bytes: &[u8]) {
    let (start, end) = (offset as usize, offset as usize + bytes.len());
    model.resize(model.len().max(end), 0);
    model[start..end].copy_from_slice(bytes);
}

fn allocate(model: &mut Vec<u8>, how: Allocation, offset: u64, length: u64) -> Result<(), Errno> {
    let (start, end) = (offset as usize, (offset + length) as usize);
    let inside = start.min(model.len())..end.min(model.len());
    match how {
        Allocation::Reserve => model.resize(model.len().max(end), 0),
        Allocation::ReserveKeepSize => {}
        Allocation::Punch | Allocation::ZeroKeepSize => model[inside].fill(0),
        Allocation::Zero => put(model, offset, &vec![0; length as usize]),
        Allocation::Collapse if end >= model.len() => return Err(Errno::EINVAL),
        Allocation::Collapse => drop(model.drain(start..end)),
        Allocation::Insert if start >= model.len() => return Err(Errno::EINVAL),
        Allocation::Insert => drop(model.splice(start..start, vec![0; length as usize])),
    }
    Ok(())
}

/// A session can open more files and hold more leases than it begins with.
///
/// That also holds over the death of SharedFS. Open files are not freed.
#[test]
fn session_gets_room_for_more_handles_and_leases() {
    const FILES: u64 = 3000;
    let mut site = Site::new(128 << 20);
    let maker = connect(&site);
    let top = maker.make(&ROOT, InodeId::ROOT, b"top", &make(FileKind::Directory)).expect("made").id;
    let name = |number: u64| format!("file-{number}").into_bytes();
    let made = (0..FILES).map(|number| maker.make(&ROOT, top, &name(number), &make(FileKind::Regular)));
    let files: Vec<_> = made.map(|made| made.expect("made").id).collect();
    maker.close_session();
    let (one, other) = (connect(&site), connect(&site));
    // While another session holds a lease below a directory, no session gets one on all of it.
    other.write(&ROOT, files[0], WriteAt::Offset(0), b"other", false).expect("written");
    for file in &files[1..] {
        one.open_for(&ROOT, *file, Access::READ | Access::WRITE).expect("opened");
        one.write(&ROOT, *file, WriteAt::Offset(0), b"one", false).expect("written");
    }
    let held = site.status().counters.into_iter().find(|(name, _)| name == "leases_held").expect("a counter").1;
    assert!(held > FILES / 2, "only {held} leases are held");
    site.kill();
    site.start();
    for file in &files[1..] {
        one.write(&ROOT, *file, WriteAt::Offset(3), b" and two", false).expect("written");
    }
    let is_whole = |fs: &LibFs, file: InodeId| {
        let mut room = [0; 20];
        let count = fs.read(file, 0, &mut room).expect("read");
        assert_eq!(&room[..count], b"one and two");
    };
    for (number, file) in (0..).zip(&files).skip(1) {
        is_whole(&other, *file);
        other.unlink(&ROOT, top, &name(number)).expect("removed");
    }
    files[1..].iter().for_each(|file| is_whole(&one, *file));
    files[1..].iter().for_each(|file| one.close(*file));
    one.close_session();
    other.close_session();
    assert_eq!(site.check()["sessions_fenced"], 0);
}

/// Returns how many bytes of a session's log are mapped without a fault.
///
/// This process has mapped them.
fn mapped_bytes_of_log(site: &Site, session: SessionId) -> u64 {
    let log = site.arena().join(format!("sessions/{session}.log"));
    let maps = std::fs::read_to_string("/proc/self/smaps").expect("read");
    let of_log = maps.lines().skip_while(|line| !line.ends_with(log.to_str().expect("text")));
    let resident = of_log.filter_map(|line| line.strip_prefix("Rss:")).next().expect("a log is mapped");
    resident.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

/// A session that goes on in a retired session's log maps pages in steps.
///
/// A session in a new log does the same. That also holds where the log has gone round.
#[test]
fn log_of_retired_session_is_mapped_in_steps() {
    const WRITES: u64 = 1000;
    let site = Site::new(128 << 20);
    // A prepared session may come in between: each goes on in its own log.
    let mut logged_by = std::collections::BTreeMap::new();
    let mut is_round = false;
    while !is_round {
        let fs = connect(&site);
        let sessions = site.status().sessions;
        let [session] = &sessions[..] else { panic!("{sessions:?}") };
        let ring = session.log_bytes;
        let logged = logged_by.entry(session.session).or_insert(0);
        let file = fs.make_open(&ROOT, InodeId::ROOT, b"file", &make(FileKind::Regular)).expect("made").id;
        for number in 0..WRITES {
            fs.write(&ROOT, file, WriteAt::Offset(number % 64 * BLOCK_BYTES), &[number as u8; 4096], false)
                .expect("written");
        }
        let (mapped, written) = (mapped_bytes_of_log(&site, session.session), WRITES * BLOCK_BYTES);
        assert!(
            mapped > written + written / 2,
            "{mapped} bytes are mapped, after {logged} of {ring} before this session"
        );
        *logged += written;
        is_round = *logged > 2 * ring;
        fs.close(file);
        fs.unlink(&ROOT, InodeId::ROOT, b"file").expect("removed");
        fs.close_session();
        drop(fs);
        site.await_prepared_of(session.session);
        assert!(logged_by.len() <= 8, "{logged_by:?}");
    }
}

/// A session holds no room of a kind that it does not use.
///
/// One that only writes data holds none for names, and one that only makes files holds none for data. Otherwise other
/// sessions would be granted crumbs, and ask for each file.
#[test]
fn session_hoards_no_credit_that_it_does_not_use() {
    const CHUNK_BLOCKS: u64 = 4096;
    const CHUNK_INODES: u64 = 4096;
    let site = Site::new(512 << 20);
    let fs = connect(&site);
    let before = site.status().space;
    let file = fs.make_open(&ROOT, InodeId::ROOT, b"file", &make(FileKind::Regular)).expect("made").id;
    let data = vec![7; 1 << 20];
    for number in 0..256_u64 {
        fs.write(&ROOT, file, WriteAt::Offset((number % 16) << 20), &data, false).expect("written");
    }
    let inodes = before.inodes_free - site.status().space.inodes_free;
    assert!(inodes < 2 * CHUNK_INODES, "a session that wrote 256 MB holds room for {inodes} inodes");
    fs.make_room().expect("digested");
    let other = connect(&site);
    let directory = other.make(&ROOT, InodeId::ROOT, b"directory", &make(FileKind::Directory)).expect("made").id;
    let before = site.status().space;
    for number in 0..12_000 {
        let name = format!("{number}");
        other.make(&ROOT, directory, name.as_bytes(), &make(FileKind::Regular)).expect("made");
    }
    let blocks = before.blocks_free - site.status().space.blocks_free;
    assert!(blocks < CHUNK_BLOCKS, "a session that made 12,000 files holds {blocks} blocks");
    fs.close(file);
}

#[test]
fn directories_nest_up_to_the_limit() {
    let site = Site::new(64 << 20);
    let (one, two) = (connect(&site), connect(&site));
    let directory = make(FileKind::Directory);
    let mut way = vec![InodeId::ROOT];
    for _ in 0..DEPTH_MAX {
        way.push(one.make(&ROOT, way[way.len() - 1], b"d", &directory).expect("made").id);
    }
    let bottom = way[way.len() - 1];
    for fs in [&one, &two] {
        assert_eq!(fs.make(&ROOT, bottom, b"d", &directory).err(), Some(Errno::ENAMETOOLONG));
        assert_eq!(fs.make(&ROOT, bottom, b"f", &make(FileKind::Regular)).err(), None, "a file is no level");
        fs.unlink(&ROOT, bottom, b"f").expect("removed");
    }
    let beside = one.make(&ROOT, InodeId::ROOT, b"beside", &directory).expect("made").id;
    one.make(&ROOT, beside, b"below", &directory).expect("made");
    let (flags, exchange) = (RenameFlags::default(), RenameFlags { exchange: true, ..RenameFlags::default() });
    let beside = (InodeId::ROOT, &b"beside"[..]);
    assert_eq!(one.rename(&ROOT, beside, (bottom, b"in"), flags), Err(Errno::ENAMETOOLONG));
    // Only the moved directory itself is looked at: what lies in it may come to lie deeper.
    one.rename(&ROOT, beside, (way[way.len() - 2], b"in"), flags).expect("moved");
    let moved = one.lookup(&ROOT, way[way.len() - 2], b"in").expect("found").id;
    let below = one.lookup(&ROOT, moved, b"below").expect("found").id;
    assert_eq!(one.make(&ROOT, below, b"deeper", &directory).err(), Some(Errno::ENAMETOOLONG));
    one.make(&ROOT, bottom, b"file", &make(FileKind::Regular)).expect("made");
    one.make(&ROOT, InodeId::ROOT, b"top", &directory).expect("made");
    let exchanged = one.rename(&ROOT, (bottom, b"file"), (InodeId::ROOT, b"top"), exchange);
    assert_eq!(exchanged, Err(Errno::ENAMETOOLONG));
    // All of it can be removed, and moved up.
    one.rename(&ROOT, (moved, b"below"), (InodeId::ROOT, b"up"), flags).expect("moved up");
    one.remove_directory(&ROOT, way[way.len() - 2], b"in", None).expect("removed");
    one.unlink(&ROOT, bottom, b"file").expect("removed");
    for parent in way[..way.len() - 1].iter().rev() {
        one.remove_directory(&ROOT, *parent, b"d", None).expect("removed");
    }
}

#[test]
fn attributes_of_an_inode_fill_up() {
    let site = Site::new(64 << 20);
    let fs = connect(&site);
    let file = fs.make(&ROOT, InodeId::ROOT, b"file", &make(FileKind::Regular)).expect("made").id;
    let set =
        |name: &[u8], bytes: usize| fs.set_xattr(&ROOT, file, name, &vec![b'x'; bytes], XattrFlags::default(), false);
    let long_name = [&b"user."[..], &[b'n'; XATTR_NAME_MAX - 5]].concat();
    assert_eq!(set(&long_name, XATTR_VALUE_MAX), Ok(()), "the largest one fits");
    assert_eq!(set(b"user.a", XATTR_VALUE_MAX + 1), Err(Errno::E2BIG));
    assert_eq!(set(b"user.a", 10_000), Err(Errno::ENOSPC));
    assert_eq!(set(b"user.a", 1000), Ok(()));
    assert_eq!(set(&long_name, 1000), Ok(()));
    assert_eq!(set(b"user.a", 60_000), Ok(()));
    fs.make_room().expect("honest");
    let mut count = 0;
    while set(format!("trusted.{count}").as_bytes(), 0) == Ok(()) {
        count += 1;
    }
    assert!((50..2000).contains(&count), "{count} empty ones beside");
    let names = fs.xattr_names(file).expect("listed");
    assert_eq!(names.len(), count + 2);
    fs.make_room().expect("honest");
}

/// From the fence on, a session acknowledges nothing: what it does is lost.
#[test]
fn fenced_session_fails_every_call() {
    let mut site = Site::new(64 << 20);
    let fs = connect(&site);
    let file = fs.make_open(&ROOT, InodeId::ROOT, b"file", &make(FileKind::Regular)).expect("made").id;
    let open = fs.open_inode(file);
    fs.write(&ROOT, file, WriteAt::Offset(0), b"kept", false).expect("written");
    fs.list(InodeId::ROOT, 0, &mut |_| true).expect("listed");
    fs.make_room().expect("digested");
    let session = site.status().sessions[0].session;
    let log = site.arena().join(format!("sessions/{session}.log"));
    let log = std::fs::File::options().write(true).open(log).expect("a log");
    for at in 0..4 {
        rustix::io::pwrite(&log, &[0xff; 4096], at * 4096).expect("written");
    }
    assert_eq!(fs.make_room(), Err(Errno::EIO));
    let mut buffer = [0; 4];
    assert_eq!(fs.attributes(file).err(), Some(Errno::EIO));
    assert!(fs.attributes_open(&open).is_none());
    assert_eq!(fs.lookup(&ROOT, InodeId::ROOT, b"file").err(), Some(Errno::EIO));
    assert_eq!(fs.list(InodeId::ROOT, 0, &mut |_| true).err(), Some(Errno::EIO));
    assert_eq!(fs.read(file, 0, &mut buffer).err(), Some(Errno::EIO));
    assert!(fs.read_open(&open, 0, 4, |_| Some(&mut buffer)).is_none());
    assert_eq!(fs.write(&ROOT, file, WriteAt::Offset(0), b"lost", false).err(), Some(Errno::EIO));
    assert!(fs.write_open(&open, WriteAt::End, b"lost", false, FILE_SIZE_MAX).is_none());
    assert_eq!(fs.allocate(&ROOT, file, Allocation::Reserve, 0, 1, false).err(), Some(Errno::EIO));
    assert_eq!(fs.seek(file, Seek::Data, 0).err(), Some(Errno::EIO));
    assert_eq!(fs.make(&ROOT, InodeId::ROOT, b"new", &make(FileKind::Regular)).err(), Some(Errno::EIO));
    assert_eq!(fs.link(&ROOT, file, InodeId::ROOT, b"new").err(), Some(Errno::EIO));
    let (name, new_name) = ((InodeId::ROOT, &b"file"[..]), (InodeId::ROOT, &b"new"[..]));
    assert_eq!(fs.rename(&ROOT, name, new_name, RenameFlags::default()).err(), Some(Errno::EIO));
    assert_eq!(fs.unlink(&ROOT, InodeId::ROOT, b"file").err(), Some(Errno::EIO));
    let mode = AttributeChange { mode: Some(0o600), ..AttributeChange::default() };
    assert_eq!(fs.set_attributes(&ROOT, file, &mode).err(), Some(Errno::EIO));
    assert_eq!(fs.set_xattr(&ROOT, file, b"user.x", b"x", XattrFlags::default(), false).err(), Some(Errno::EIO));
    assert_eq!(fs.remove_xattr(&ROOT, file, b"user.x").err(), Some(Errno::EIO));
    assert_eq!(fs.xattr(file, b"user.x").err(), Some(Errno::EIO));
    assert_eq!(fs.xattr_names(file).err(), Some(Errno::EIO));
    assert_eq!(fs.open(file).err(), Some(Errno::EIO));
    assert_eq!(fs.sync_inode(file).err(), Some(Errno::EIO));
    assert_eq!(fs.sync_all().err(), Some(Errno::EIO));
    assert_eq!(fs.space(file).err(), Some(Errno::EIO));
    let other = connect(&site);
    assert_eq!(other.read(file, 0, &mut buffer), Ok(4));
    assert_eq!(&buffer, b"kept");
    site.check();
}
