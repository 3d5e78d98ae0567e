//! Rights to open files that other sessions narrow, wherever SharedFS is killed.

mod common;

use ashlar_types::{Contents, FileKind, InodeId};
use ashlar_update::{SetAttributes, Update, XATTR_ACL_ACCESS};
use ashlar_wire::Request;
use common::{Client, NOW, Site, as_user};

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

const USER: u32 = 65534;
const MIB: u64 = 1 << 20;

/// Opens a session of an ordinary user, of this process.
fn open_as_user(site: &Site) -> Client {
    as_user(USER, || Client::open(&site.socket()))
}

/// A way to narrow the rights to a file.
///
/// It has the rights before, and the updates that narrow them.
struct Narrowing {
    name: &'static str,
    before: fn(&mut Client, InodeId),
    updates: fn(&mut Client, InodeId),
}

fn set(client: &mut Client, inode: InodeId, mode: Option<u32>, uid: Option<u32>, gid: Option<u32>) {
    let set = SetAttributes { inode, mode, uid, gid, accessed: None, modified: None, at: NOW };
    client.append(&Update::SetAttributes(set));
}

fn for_modes(client: &mut Client, inode: InodeId, modes: &[u32]) {
    modes.iter().for_each(|mode| set(client, inode, Some(*mode), None, None));
}

fn set_list(client: &mut Client, inode: InodeId, user: u16) {
    // Owner rw, the user as given, group nothing, mask rw, others nothing.
    let entries: [(u16, u16, u32); 5] =
        [(1, 6, u32::MAX), (2, user, USER), (4, 0, u32::MAX), (0x10, 6, u32::MAX), (0x20, 0, u32::MAX)];
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        value.extend(tag.to_le_bytes().iter().chain(&permissions.to_le_bytes()).chain(&id.to_le_bytes()));
    }
    let name = XATTR_ACL_ACCESS;
    client.append(&Update::SetXattr { inode, name, value: &value, mode: Some(0o660), at: NOW });
}

const NARROWINGS: [Narrowing; 7] = [
    Narrowing {
        name: "chmod",
        before: |root, file| set(root, file, Some(0o666), None, None),
        updates: |root, file| set(root, file, Some(0o600), None, None),
    },
    Narrowing {
        name: "chmod, and back, and again",
        before: |root, file| set(root, file, Some(0o666), None, None),
        updates: |root, file| for_modes(root, file, &[0o600, 0o666, 0o640]),
    },
    Narrowing {
        name: "chown",
        before: |root, file| set(root, file, Some(0o600), Some(USER), Some(USER)),
        updates: |root, file| set(root, file, None, Some(1), None),
    },
    Narrowing {
        name: "chown of a file that its owner might not write",
        before: |root, file| set(root, file, Some(0o400), Some(USER), Some(USER)),
        updates: |root, file| set(root, file, None, Some(0), Some(0)),
    },
    Narrowing {
        name: "chgrp",
        before: |root, file| set(root, file, Some(0o660), None, Some(USER)),
        updates: |root, file| set(root, file, None, None, Some(1)),
    },
    Narrowing {
        name: "a list that names the user no more",
        before: |root, file| set_list(root, file, 6),
        updates: |root, file| set_list(root, file, 4),
    },
    Narrowing {
        name: "a list that is removed",
        before: |root, file| set_list(root, file, 6),
        updates: |root, file| {
            root.append(&Update::RemoveXattr { inode: file, name: XATTR_ACL_ACCESS, mode: Some(0o600), at: NOW });
        },
    },
];

/// The point at which SharedFS is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Point {
    /// The narrowing update stands in the log and is not applied.
    Logged,
    /// It is applied, and not committed.
    Applied,
    /// It is committed.
    Committed,
}

const POINTS: [Point; 3] = [Point::Logged, Point::Applied, Point::Committed];

/// A file that a user has open, and sessions of root and of that user.
struct Story {
    site: Site,
    root: Client,
    user: Client,
    file: InodeId,
}

impl Story {
    fn begin(narrowing: &Narrowing) -> Self {
        let site = Site::new(64 * MIB);
        let mut root = Client::open(&site.socket());
        root.acquire(&[(InodeId::ROOT, true)]).expect("granted");
        let file = root.make(InodeId::ROOT, b"f", FileKind::Regular);
        (narrowing.before)(&mut root, file);
        root.digest().expect("digested");
        let mut user = open_as_user(&site);
        assert!(user.control.open_handle(file));
        user.acquire(&[(file, false)]).expect("granted");
        Self { site, root, user, file }
    }

    fn narrow(&mut self, narrowing: &Narrowing) {
        self.root.acquire(&[(self.file, true)]).expect("granted");
        (narrowing.updates)(&mut self.root, self.file);
    }

    /// Writes as a user does that has the file open.
    fn write(&mut self, data: &[u8]) {
        let (_, dependencies) = self.user.acquire_with(&[(self.file, true)]).expect("granted");
        for (session, position) in dependencies {
            self.user.append(&Update::Depend { session, position });
        }
        self.user.append(&Update::Write { inode: self.file, offset: 0, at: NOW, strip: true, data });
    }

    fn restart(&mut self) {
        self.site.kill();
        self.site.start();
    }

    fn resume(&mut self) {
        for client in [&mut self.root, &mut self.user] {
            client.resume(&self.site.socket());
        }
    }

    fn content(&self) -> Vec<u8> {
        let mut reader = Client::open(&self.site.socket());
        let found = reader.acquire(&[(self.file, false)]).expect("granted");
        assert!(reader.call(&Request::Goodbye).is_ok());
        match &found[0].state.contents {
            Some(Contents::Inline(bytes)) => bytes.clone(),
            Some(Contents::Extents(extents)) if extents.is_empty() => Vec::new(),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn narrowed_open_file_is_written_wherever_sharedfs_is_killed() {
    if !common::may_change_users() {
        return;
    }
    for narrowing in &NARROWINGS {
        for point in POINTS {
            let case = format!("{}, {point:?}", narrowing.name);
            let mut story = Story::begin(narrowing);
            story.narrow(narrowing);
            if point == Point::Committed {
                story.root.digest().expect("digested");
            }
            if point != Point::Logged {
                story.write(b"first");
            }
            story.restart();
            story.resume();
            story.write(b"later");
            story.user.digest().unwrap_or_else(|error| panic!("{case}: {error:?}"));
            assert_eq!(story.content(), b"later", "{case}");
            // The second session knows this only from the first.
            story.restart();
            story.resume();
            story.write(b"again");
            story.user.digest().unwrap_or_else(|error| panic!("{case}, a second time: {error:?}"));
            assert_eq!(story.content(), b"again", "{case}");
            story.site.check();
        }
    }
}

#[test]
fn write_before_close_counts_though_the_file_is_closed_by_then() {
    if !common::may_change_users() {
        return;
    }
    let other = &NARROWINGS[2];
    for narrowing in &NARROWINGS {
        for point in [Point::Applied, Point::Committed] {
            let case = format!("{}, {point:?}", narrowing.name);
            let mut story = Story::begin(narrowing);
            story.root.acquire(&[(InodeId::ROOT, true)]).expect("granted");
            let beside = story.root.make(InodeId::ROOT, b"beside", FileKind::Regular);
            (other.before)(&mut story.root, beside);
            story.narrow(narrowing);
            if point == Point::Committed {
                story.root.digest().expect("digested");
            }
            story.write(b"late");
            story.user.control.close_handle(story.file);
            // Other files that are narrowed meanwhile take nothing away.
            assert!(story.user.control.open_handle(beside));
            story.root.acquire(&[(beside, true)]).expect("granted");
            (other.updates)(&mut story.root, beside);
            story.root.digest().expect("digested");
            story.restart();
            story.resume();
            story.user.digest().unwrap_or_else(|error| panic!("{case}: {error:?}"));
            assert_eq!(story.content(), b"late", "{case}");
            story.site.check();
        }
    }
}

/// The records of both sessions are there, and their processes have ended.
#[test]
fn write_under_a_kept_right_survives_a_machine_restart() {
    if !common::may_change_users() {
        return;
    }
    for narrowing in &NARROWINGS {
        for point in [Point::Applied, Point::Committed] {
            let mut story = Story::begin(narrowing);
            story.narrow(narrowing);
            if point == Point::Committed {
                story.root.digest().expect("digested");
            }
            story.write(b"late");
            story.site.kill();
            story.site.age(story.root.welcome.peer.session);
            story.site.age(story.user.welcome.peer.session);
            story.site.start();
            assert_eq!(story.content(), b"late", "{}, {point:?}", narrowing.name);
            story.site.check();
        }
    }
}

#[test]
fn narrowed_file_without_a_name_is_written_after_a_kill() {
    if !common::may_change_users() {
        return;
    }
    let narrowing = &NARROWINGS[0];
    for point in POINTS {
        let mut story = Story::begin(narrowing);
        story.root.acquire(&[(InodeId::ROOT, true), (story.file, true)]).expect("granted");
        let (inode, parent) = (story.file, InodeId::ROOT);
        story.root.append(&Update::Unlink { inode, parent, name: b"f", release: true, at: NOW });
        (narrowing.updates)(&mut story.root, inode);
        if point == Point::Committed {
            story.root.digest().expect("digested");
        }
        if point != Point::Logged {
            story.write(b"first");
        }
        story.restart();
        story.resume();
        story.write(b"later");
        story.user.digest().unwrap_or_else(|error| panic!("{point:?}: {error:?}"));
        assert_eq!(story.content(), b"later", "{point:?}");
        story.site.check();
    }
}

/// A session that opened the file too late claims after the kill that it has.
#[test]
fn handle_claimed_after_the_narrowing_gives_no_right() {
    if !common::may_change_users() {
        return;
    }
    let narrowing = &NARROWINGS[0];
    for point in [Point::Applied, Point::Committed] {
        let mut story = Story::begin(narrowing);
        story.user.control.close_handle(story.file);
        story.narrow(narrowing);
        // A request of another session makes SharedFS apply it.
        story.user.acquire(&[(story.file, false)]).expect("granted");
        if point == Point::Committed {
            story.root.digest().expect("digested");
        }
        story.restart();
        assert!(story.user.control.open_handle(story.file));
        story.resume();
        story.write(b"forged");
        assert!(story.user.digest().is_err(), "{point:?}: the record is refused");
        story.user.wait_fenced();
        assert_eq!(story.content(), b"", "{point:?}");
        story.site.check();
    }
}

/// Sessions that end leave their files to the next ones of the same user.
#[test]
fn session_in_the_files_of_another_keeps_none_of_its_rights() {
    if !common::may_change_users() {
        return;
    }
    let narrowing = &NARROWINGS[0];
    let mut story = Story::begin(narrowing);
    story.narrow(narrowing);
    story.write(b"first");
    story.user.control.close_handle(story.file);
    let before = story.user.welcome.peer.session;
    assert!(story.user.call(&Request::Goodbye).is_ok());
    let gone = std::mem::replace(&mut story.user, open_as_user(&story.site));
    drop(gone);
    story.site.await_prepared_of(before);
    while story.user.welcome.peer.session != before && story.site.has_files_of(before) {
        story.user = open_as_user(&story.site);
    }
    assert!(story.user.control.open_handle(story.file));
    story.restart();
    story.resume();
    story.write(b"forged");
    assert!(story.user.digest().is_err(), "the record is refused");
    story.user.wait_fenced();
    assert_eq!(story.content(), b"first");
    story.site.check();
}
