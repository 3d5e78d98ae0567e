//! Credit, handles and mapped blocks that an ordinary user's sessions hold: none of it harms others, or has no end.

mod common;

use ashlar_types::{Errno, FileKind, InodeId, QuotaId, QuotaKey, QuotaLimits};
use ashlar_update::Update;
use ashlar_wire::{Connection, Credit, Reply, Request, SpaceReply};
use common::{Client, NOW, Site};
use rustix::process::{Gid, Uid};

const USER: u32 = 65534;
const OTHER_USER: u32 = 65533;
const MIB: u64 = 1 << 20;
const BLOCK: usize = 4096;

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: only root can become another user");
    }
    is_root
}

/// Runs a closure in a thread that has become a user.
fn as_user<R: Send>(user: u32, run: impl FnOnce() -> R + Send) -> R {
    let become_user = || {
        let (gid, uid) = (Gid::from_raw(user), Uid::from_raw(user));
        rustix::thread::set_thread_res_gid(gid, gid, gid).expect("another group");
        rustix::thread::set_thread_res_uid(uid, uid, uid).expect("another user");
        run()
    };
    std::thread::scope(|scope| scope.spawn(become_user).join().expect("done"))
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
    if !is_root() {
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
    if !is_root() {
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
