//! Credit, handles and mapped blocks that an ordinary user's sessions hold: none of it harms others, or has no end.

mod common;

use std::time::{Duration, Instant};

use ashlar_libfs::{AttributeChange, LibFs, WriteAt, XattrFlags};
use ashlar_types::{Credentials, Errno, FileKind, InodeId, QuotaAmount, QuotaId, QuotaKey, QuotaLimits};
use ashlar_update::{SetAttributes, Update};
use ashlar_wire::{Connection, Credit, QuotaRequest, Reply, Request, SpaceReply};
use common::{Client, NOW, Site, as_user, libfs};

const USER: u32 = 65534;
const OTHER_USER: u32 = 65533;
const MIB: u64 = 1 << 20;
const BLOCK: usize = 4096;
/// For what SharedFS does each second.
const SOON: Duration = Duration::from_secs(20);

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

/// Opens a session of an ordinary user, of this process.
fn open_as(site: &Site, user: u32) -> Client {
    as_user(user, || Client::open(&site.socket()))
}

/// Makes a file of root's with so many blocks, which all users may read.
fn make_file(root: &mut Client, name: &[u8], blocks: usize) -> InodeId {
    root.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let file = root.make(InodeId::ROOT, name, FileKind::Regular);
    for first in (0..blocks).step_by(50) {
        let (offset, data) = ((first * BLOCK) as u64, vec![1; (blocks - first).min(50) * BLOCK]);
        root.append(&Update::Write { inode: file, offset, at: NOW, strip: false, data: &data });
    }
    root.digest().expect("digested");
    file
}

fn set_mode(root: &mut Client, inode: InodeId, mode: u32) {
    let set = SetAttributes { inode, mode: Some(mode), uid: None, gid: None, accessed: None, modified: None, at: NOW };
    root.append(&Update::SetAttributes(set));
}

fn set_limit(site: &Site, user: u32, blocks: u64) {
    let (key, limits) = (QuotaKey::User(user), QuotaLimits { blocks: Some(blocks), inodes: None });
    let mut line = Connection::connect(&site.socket()).expect("connected");
    let reply = line.call::<_, Reply>(&Request::SetQuota { key, limits }, &[]).expect("answered").0;
    assert!(matches!(reply, Reply::Done), "{reply:?}");
}

fn space(client: &mut Client) -> SpaceReply {
    match client.call(&Request::Space { subtree: QuotaId::NONE }) {
        Ok(Reply::Space(space)) => space,
        other => panic!("{other:?}"),
    }
}

/// Asks for all credit that there is, and says in the page that all of it is used.
fn hoard(hoarder: &mut Client) -> Credit {
    let mut held = Credit::default();
    for is_of_blocks in [true, false] {
        let mut want = 1 << 40;
        while want > 0 {
            let (blocks, metadata_bytes) = if is_of_blocks { (want, 0) } else { (0, want) };
            match hoarder.credit(blocks, metadata_bytes) {
                Ok(credit) => {
                    held.blocks += credit.blocks;
                    held.metadata_bytes += credit.metadata_bytes;
                    hoarder.control.recall_credit();
                    // Each grant takes the user's former ones back, so it would go on for ever.
                    if want < 16 {
                        break;
                    }
                    want /= 2;
                }
                Err(Errno::ENOSPC) => want /= 2,
                Err(errno) => panic!("{errno:?}"),
            }
        }
    }
    held
}

#[test]
fn hidden_credit_is_taken_back_for_others() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(64 * MIB);
    let mut root = Client::open(&site.socket());
    make_file(&mut root, b"file", 1);
    let free = space(&mut root);
    let mut hoarders: Vec<_> = (0..4).map(|_| open_as(&site, USER)).collect();
    for round in 0..3 {
        for hoarder in &mut hoarders {
            hoard(hoarder);
        }
        let shown = space(&mut root);
        assert!(shown.blocks_free > free.blocks_free / 2, "hoarded space is as good as free: {shown:?}");
        let mut other = open_as(&site, OTHER_USER);
        let want = free.blocks_free / 4;
        assert!(other.credit(want, 1 << 20).expect("the hoarders use none of it").blocks >= want);
        assert!(root.credit(want, 1 << 20).expect("nor of this").blocks >= want, "round {round}");
        assert!(other.call(&Request::Goodbye).is_ok());
    }
    assert!(hoarders.iter().all(|hoarder| !hoarder.control.is_fenced()), "they may ask again");
    // Credit that was taken back pays for nothing.
    let hoarder = &mut hoarders[0];
    hoarder.control.give_credit(Credit { blocks: 100, metadata_bytes: 1 << 20 }, ashlar_wire::CreditKind::Common);
    let accessed = Update::Write { inode: InodeId::ROOT, offset: 0, at: NOW, strip: true, data: &[1; 50 * BLOCK] };
    hoarder.append(&accessed);
    assert!(hoarder.digest().is_err());
    hoarder.wait_fenced();
    site.check();
}

#[test]
fn credit_of_user_with_quota_is_small() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(256 * MIB);
    let mut root = Client::open(&site.socket());
    make_file(&mut root, b"file", 1);
    set_limit(&site, USER, MIB / BLOCK as u64);
    let mut users: Vec<_> = (0..4).map(|_| open_as(&site, USER)).collect();
    let before = space(&mut root).blocks_free;
    for _ in 0..50 {
        for user in &mut users {
            let granted = user.credit(1, 256).expect("there is plenty").blocks;
            user.control.recall_credit();
            assert!(granted <= MIB / BLOCK as u64, "{granted}");
        }
    }
    let held = before.saturating_sub(space(&mut root).blocks_free);
    assert!(held <= MIB / BLOCK as u64, "together they hold no more than one of them may: {held}");
    site.check();
}

/// The user says that it has a root's file open, before it may open it, and root lets all users in for a moment.
#[test]
fn handle_claimed_in_advance_gives_no_right() {
    if !common::may_change_users() {
        return;
    }
    for is_restarted in [false, true] {
        let mut site = Site::new(64 * MIB);
        let mut root = Client::open(&site.socket());
        let file = make_file(&mut root, b"file", 1);
        root.acquire(&[(file, true)]).expect("granted");
        set_mode(&mut root, file, 0o600);
        root.digest().expect("digested");
        let mut user = open_as(&site, USER);
        assert!(user.control.open_handle(file));
        if is_restarted {
            site.kill();
            site.start();
            root.resume(&site.socket());
            user.resume(&site.socket());
            root.acquire(&[(file, true)]).expect("granted");
        }
        set_mode(&mut root, file, 0o666);
        root.digest().expect("digested");
        set_mode(&mut root, file, 0o600);
        root.digest().expect("digested");
        // A lease on a file without a right to it may be refused, and so may the record.
        if user.acquire(&[(file, true)]).is_ok() {
            user.append(&Update::Write { inode: file, offset: 0, at: NOW, strip: true, data: b"forged" });
            assert!(user.digest().is_err(), "restarted: {is_restarted}");
        }
        site.check();
    }
}

/// Waits until an inode without a name is freed; returns whether it is.
fn is_freed(site: &Site, inode: InodeId, within: Duration) -> bool {
    let deadline = Instant::now() + within;
    let mut reader = Client::open(&site.socket());
    loop {
        if reader.acquire(&[(inode, false)]).err() == Some(Errno::ESTALE) {
            return true;
        }
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Deletes a file of root's that other sessions may have open.
fn delete(root: &mut Client, inode: InodeId, name: &[u8]) {
    root.acquire(&[(InodeId::ROOT, true), (inode, true)]).expect("granted");
    root.append(&Update::Unlink { inode, parent: InodeId::ROOT, name, release: true, at: NOW });
    root.digest().expect("digested");
}

#[test]
fn claimed_handle_keeps_no_deleted_file() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(64 * MIB);
    let mut root = Client::open(&site.socket());
    let mut user = open_as(&site, USER);
    // Numbers of inodes that root makes later, and of one that the user may not open.
    assert!((0..500).all(|number| user.control.open_handle(InodeId(number))));
    let (file, secret) = (make_file(&mut root, b"file", 1), make_file(&mut root, b"secret", 1));
    assert!(file.0 < 500 && secret.0 < 500);
    root.acquire(&[(secret, true)]).expect("granted");
    set_mode(&mut root, secret, 0o600);
    root.digest().expect("digested");
    delete(&mut root, file, b"file");
    assert!(is_freed(&site, file, SOON), "the user was never granted it");
    // A lease on the other one may be refused; if not, it is no right to open the file.
    let _ = user.acquire(&[(secret, false)]);
    delete(&mut root, secret, b"secret");
    assert!(is_freed(&site, secret, SOON), "the user may not open it");
    site.check();
}

#[test]
fn opened_file_stays_until_it_is_closed() {
    if !common::may_change_users() {
        return;
    }
    for is_restarted in [false, true] {
        let mut site = Site::new(64 * MIB);
        let mut root = Client::open(&site.socket());
        let (own, read) = (make_file(&mut root, b"own", 1), make_file(&mut root, b"read", 1));
        let mut user = open_as(&site, USER);
        // Of one file it has a lease. The other one stands in the grant cache.
        assert!(user.control.open_handle(own) && user.control.open_handle(read));
        user.acquire(&[(own, false)]).expect("granted");
        let mut reader = Client::open(&site.socket());
        reader.acquire(&[(read, false)]).expect("granted and published");
        if is_restarted {
            site.kill();
            site.start();
            root.resume(&site.socket());
            user.resume(&site.socket());
        }
        for (inode, name) in [(own, &b"own"[..]), (read, b"read")] {
            delete(&mut root, inode, name);
            assert!(!is_freed(&site, inode, Duration::from_millis(2500)), "{}", name.escape_ascii());
            user.control.close_handle(inode);
            assert!(is_freed(&site, inode, SOON), "{}", name.escape_ascii());
        }
        site.check();
    }
}

/// A file that a session makes and opens is its own at once, also without a name.
#[test]
fn made_file_stays_open_for_its_maker() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(64 * MIB);
    let mut root = Client::open(&site.socket());
    root.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let shared = root.make(InodeId::ROOT, b"shared", FileKind::Directory);
    set_mode(&mut root, shared, 0o777);
    root.digest().expect("digested");
    let mut user = open_as(&site, USER);
    user.acquire(&[(shared, true)]).expect("granted");
    let inode = user.inode();
    assert!(user.control.open_handle(inode));
    as_user(USER, || user.append(&Update::Create(common::create(inode, shared, b"made", FileKind::Regular))));
    user.append(&Update::Unlink { inode, parent: shared, name: b"made", release: false, at: NOW });
    user.digest().expect("digested");
    assert!(!is_freed(&site, inode, Duration::from_millis(2500)));
    user.control.close_handle(inode);
    assert!(is_freed(&site, inode, SOON));
    site.check();
}

fn map(user: &mut Client, inode: InodeId, blocks: u64, number: u32) -> bool {
    match user.call(&Request::Map { inode, first: 0, blocks, follows: false, number }) {
        Ok(Reply::Mapped(extents)) => !extents.is_empty(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn mapped_blocks_of_deleted_files_count_against_quota() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(64 * MIB);
    let mut root = Client::open(&site.socket());
    let file = make_file(&mut root, b"file", 20);
    set_limit(&site, USER, 30);
    let mut user = open_as(&site, USER);
    user.acquire(&[(file, false)]).expect("granted");
    assert!(user.control.open_handle(file) && map(&mut user, file, 20, 1));
    let ask = |user: &mut Client, blocks| {
        let amount = QuotaAmount { blocks, inodes: 0 };
        user.call(&Request::Quota(vec![QuotaRequest { key: QuotaKey::User(USER), amount, exempt: false }])).map(drop)
    };
    assert_eq!(ask(&mut user, 25), Ok(()), "the file has its blocks itself");
    delete(&mut root, file, b"file");
    user.control.close_handle(file);
    assert!(is_freed(&site, file, SOON));
    assert_eq!(ask(&mut user, 15), Err(Errno::EDQUOT));
    assert_eq!(ask(&mut user, 10), Ok(()));
    let other = make_file(&mut root, b"other", 10);
    user.acquire(&[(other, false)]).expect("granted");
    assert!(user.control.open_handle(other) && map(&mut user, other, 10, 2));
    delete(&mut root, other, b"other");
    user.control.close_handle(other);
    assert!(is_freed(&site, other, SOON));
    let third = make_file(&mut root, b"third", 10);
    user.acquire(&[(third, false)]).expect("granted");
    assert!(user.control.open_handle(third));
    assert!(!map(&mut user, third, 10, 3), "it keeps as much as it may use");
    for number in [1, 2] {
        user.call(&Request::Unmap { number }).expect("unmapped");
    }
    assert!(map(&mut user, third, 10, 3));
    assert_eq!(ask(&mut user, 15), Ok(()));
    site.check();
}

#[test]
fn user_maps_no_more_than_its_part_of_the_arena() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(64 * MIB);
    let mut root = Client::open(&site.socket());
    let file = make_file(&mut root, b"file", 1000);
    let total = space(&mut root).blocks_total;
    let mut users: Vec<_> = (0..2).map(|_| open_as(&site, USER)).collect();
    let mut mapped = 0;
    for number in 0..20 {
        let user = &mut users[number as usize % 2];
        user.acquire(&[(file, false)]).expect("granted");
        assert!(number > 1 || user.control.open_handle(file));
        mapped += 1000 * u64::from(map(user, file, 1000, number));
    }
    assert!((total / 8..=total / 4).contains(&mapped), "{mapped} of {total}");
    root.acquire(&[(file, false)]).expect("granted");
    assert!(root.control.open_handle(file) && map(&mut root, file, 1000, 1), "root is not held by it");
    site.check();
}

/// Returns what a user uses.
fn used(site: &Site, user: u32) -> QuotaAmount {
    let mut line = Connection::connect(&site.socket()).expect("connected");
    let Reply::Quotas(all) = line.call::<_, Reply>(&Request::Quotas, &[]).expect("answered").0 else {
        panic!("no list")
    };
    all.into_iter().find(|status| status.key == QuotaKey::User(user)).map(|status| status.used).unwrap_or_default()
}

/// A user with room for 16 blocks fills them with extended attributes, and with names.
#[test]
fn metadata_counts_against_quota() {
    const MOST: u64 = 16;
    let mut site = Site::new(64 * MIB);
    let fs = libfs::connect(&site);
    let root = fs.make(&libfs::ROOT, InodeId::ROOT, b"top", &libfs::make(FileKind::Directory)).expect("made").id;
    let owner = AttributeChange { uid: Some(USER), gid: Some(USER), ..AttributeChange::default() };
    fs.set_attributes(&libfs::ROOT, root, &owner).expect("given to the user");
    set_limit(&site, USER, MOST);
    let user = Credentials { uid: USER, gid: USER, groups: Vec::new(), checked: false };
    let used_blocks = |fs: &LibFs| {
        fs.make_room().expect("digested");
        used(&site, USER).blocks
    };
    // Attributes: a first kibibyte comes with each inode. Each has 64 bytes beside its name and its value.
    let file = fs.make(&user, root, b"file", &libfs::make(FileKind::Regular)).expect("made").id;
    let set = |number: u32, bytes: usize| {
        let name = format!("user.{number:04}");
        fs.set_xattr(&user, file, name.as_bytes(), &vec![1; bytes], XattrFlags::default(), false)
    };
    set(0, 900).expect("it comes with the inode");
    assert_eq!(used_blocks(&fs), 0);
    let refused = (1..100).find(|number| set(*number, 1927) == Err(Errno::EDQUOT)).expect("there is an end");
    assert_eq!((used_blocks(&fs), refused), (MOST, 33));
    assert_eq!(fs.write(&user, file, WriteAt::Offset(0), &[1; 10], false).map(drop), Err(Errno::EDQUOT));
    (1..refused)
        .for_each(|number| fs.remove_xattr(&user, file, format!("user.{number:04}").as_bytes()).expect("removed"));
    assert_eq!(used_blocks(&fs), 0);
    // Names, of one file.
    let name = |number: u32| format!("name {number:04}").into_bytes();
    let refused =
        (1..2000).find(|number| fs.link(&user, file, root, &name(*number)).is_err()).expect("there is an end");
    assert_eq!(fs.link(&user, file, root, &name(refused)).map(drop), Err(Errno::EDQUOT));
    assert_eq!((used_blocks(&fs), refused), (MOST, 64 * (MOST as u32 + 1) - 1));
    for number in 1..refused {
        fs.unlink(&user, root, &name(number)).expect("removed");
    }
    assert_eq!(used_blocks(&fs), 0);
    // The count of a file moves with it to another owner, and ends with it.
    set(1, 8000).expect("there is room");
    let owner = AttributeChange { uid: Some(OTHER_USER), ..AttributeChange::default() };
    fs.set_attributes(&libfs::ROOT, file, &owner).expect("given away");
    assert_eq!((used_blocks(&fs), used(&site, OTHER_USER).blocks), (0, 3));
    fs.unlink(&libfs::ROOT, root, b"file").expect("removed");
    assert_eq!((used_blocks(&fs), used(&site, OTHER_USER).blocks), (0, 0));
    site.check();
}
