//! Quotas over the bare protocol.
//!
//! Grants stay within the limit, whatever sessions hold, and whatever dies.

mod common;

use ashlar_log::AppendError;
use ashlar_types::{Errno, FileKind, InodeId, QuotaAmount, QuotaId, QuotaKey, QuotaLimits, QuotaVersion};
use ashlar_update::{Create, Update};
use ashlar_wire::{Connection, QuotaGrant, QuotaRequest, QuotaStatus, Reply, Request};
use common::{Client, NOW, Site, create};

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

const USER: u32 = 7;
const KEY: QuotaKey = QuotaKey::User(USER);
const BLOCK: usize = 4096;

fn command(site: &Site, request: &Request) -> Reply {
    let mut line = Connection::connect(&site.socket()).expect("the daemon listens");
    line.call(request, &[]).expect("answered").0
}

fn limit(site: &Site, blocks: Option<u64>, inodes: Option<u64>) {
    let request = Request::SetQuota { key: KEY, limits: QuotaLimits { blocks, inodes } };
    assert!(matches!(command(site, &request), Reply::Done));
}

fn status(site: &Site) -> QuotaStatus {
    let Reply::Quotas(all) = command(site, &Request::Quotas) else { panic!("no list") };
    all.into_iter().find(|status| status.key == KEY).expect("the user is known")
}

fn ask_as(client: &mut Client, blocks: u64, inodes: u64, exempt: bool) -> Result<(QuotaVersion, QuotaGrant), Errno> {
    let want = QuotaRequest { key: KEY, amount: QuotaAmount { blocks, inodes }, exempt };
    match client.call(&Request::Quota(vec![want]))? {
        Reply::Quota { version, grants } => Ok((version, grants[0])),
        other => panic!("{other:?}"),
    }
}

fn ask(client: &mut Client, blocks: u64, inodes: u64) -> Result<QuotaGrant, Errno> {
    ask_as(client, blocks, inodes, false).map(|(version, grant)| {
        assert_eq!(version, client.control.quota_version());
        grant
    })
}

/// A limit of a number too long for the shared area's key became another subtree's limit.
#[test]
fn subtree_of_impossible_number_gets_no_limit() {
    let mut site = Site::new(16 << 20);
    for number in [0, 1 << QuotaId::BITS | 5, u64::MAX] {
        let limits = QuotaLimits { blocks: Some(1), inodes: None };
        let request = Request::SetQuota { key: QuotaKey::Subtree(QuotaId(number)), limits };
        assert!(matches!(command(&site, &request), Reply::Error(Errno::EINVAL)), "{number}");
    }
    let Reply::Quotas(all) = command(&site, &Request::Quotas) else { panic!("no list") };
    assert!(all.iter().all(|status| status.limits.is_none()), "{all:?}");
    site.check();
}

/// Makes a file of the user's, by root.
fn user_file(client: &mut Client, name: &[u8]) -> InodeId {
    client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let inode = client.inode();
    client.append(&Update::Create(Create { uid: USER, ..create(inode, InodeId::ROOT, name, FileKind::Regular) }));
    inode
}

fn write(inode: InodeId, block: u64, data: &[u8]) -> Update<'_> {
    Update::Write { inode, offset: block * BLOCK as u64, at: NOW, strip: false, data }
}

#[test]
fn balance_of_one_session_is_taken_back_for_another() {
    let mut site = Site::new(64 << 20);
    let (mut one, mut two) = (Client::open(&site.socket()), Client::open(&site.socket()));
    assert!(!one.control.quota_version().has_limits(), "without limits no session has to ask");
    let seal = one.log.seal_count();
    limit(&site, Some(160), None);
    assert!(one.control.quota_version().has_limits());
    let stale = one.log.append(seal, 12, &[&[0; 20]]);
    assert!(matches!(stale, Err(AppendError::Sealed)), "an unpaid record comes too late: {stale:?}");
    let first = ask(&mut one, 1, 1).expect("there is plenty");
    assert_eq!((first.blocks, first.inodes), (Some(10), None), "a part of the free blocks; files are not limited");
    let version = one.control.quota_version();
    assert_eq!(ask(&mut two, 160, 0).expect("all of it").blocks, Some(160));
    assert!(one.control.quota_version() > version, "the first one's balance is worth nothing now");
    assert_eq!(ask(&mut one, 161, 0), Err(Errno::EDQUOT));
    let half = QuotaRequest { key: KEY, amount: QuotaAmount { blocks: 160, inodes: 0 }, exempt: false };
    assert_eq!(one.call(&Request::Quota(vec![half, half])).err(), Some(Errno::EINVAL), "no limit is given twice");
    let file = user_file(&mut one, b"file");
    assert_eq!(ask(&mut one, 100, 0).expect("the second has used nothing").blocks, Some(100));
    one.append(&write(file, 0, &vec![1; 100 * BLOCK]));
    assert_eq!(ask(&mut two, 61, 0), Err(Errno::EDQUOT));
    assert_eq!(ask(&mut two, 60, 0).expect("the rest").blocks, Some(60));
    assert_eq!(status(&site).used, QuotaAmount { blocks: 100, inodes: 1 });
    // Freed blocks can be granted as soon as a session asks for them.
    one.append(&Update::Resize { inode: file, size: 0, strip: false, at: NOW });
    assert_eq!(ask(&mut two, 160, 0).expect("all of it").blocks, Some(160));
    limit(&site, None, None);
    assert!(!one.control.quota_version().has_limits() && !two.control.quota_version().has_limits());
    let counters = site.check();
    assert_eq!((counters["quota_refused"], counters["quota_unpaid"], counters["sessions_fenced"]), (2, 0, 0));
}

#[test]
fn super_user_is_never_refused_and_its_use_counts() {
    let mut site = Site::new(64 << 20);
    let mut client = Client::open(&site.socket());
    let file = user_file(&mut client, b"file");
    limit(&site, Some(10), Some(1));
    let (_, grant) = ask_as(&mut client, 30, 0, true).expect("granted all the same");
    assert_eq!(grant.blocks, Some(30));
    client.append(&write(file, 0, &vec![1; 30 * BLOCK]));
    client.digest().expect("digested");
    assert_eq!(status(&site).used, QuotaAmount { blocks: 30, inodes: 1 });
    assert_eq!(ask(&mut client, 1, 0), Err(Errno::EDQUOT));
    assert_eq!(ask(&mut client, 0, 1), Err(Errno::EDQUOT));
    assert_eq!(site.check()["quota_unpaid"], 0);
    client.append(&write(file, 30, &[1; BLOCK]));
    client.digest().expect("root's sessions are trusted");
    assert_eq!(site.check()["quota_unpaid"], 1, "but it is counted");
}

#[test]
fn killed_daemon_forgets_grants_and_keeps_use() {
    let mut site = Site::new(64 << 20);
    limit(&site, Some(100), None);
    let mut client = Client::open(&site.socket());
    let mut other = Client::open(&site.socket());
    let file = user_file(&mut client, b"file");
    // There is no SharedFS to ask for credit later.
    client.credit(1000, 1 << 20).expect("granted");
    for round in 0..3u64 {
        client.acquire(&[(file, true)]).expect("granted");
        ask(&mut client, 20, 0).expect("granted");
        let version = client.control.quota_version();
        client.append(&write(file, round * 20, &vec![1; 10 * BLOCK]));
        site.kill();
        // A granted balance may still be used while there is no SharedFS.
        client.append(&write(file, round * 20 + 10, &vec![2; 10 * BLOCK]));
        site.start();
        client.resume(&site.socket());
        other.resume(&site.socket());
        assert!(client.control.quota_version() > version, "the new daemon has granted nothing yet");
        let used = 20 * (round + 1);
        assert_eq!(status(&site).used.blocks, used);
        assert_eq!(ask(&mut other, 101 - used, 0), Err(Errno::EDQUOT));
        assert_eq!(ask(&mut other, 100 - used, 0).expect("all the rest").blocks, Some(100 - used));
        site.check();
    }
    assert!(!client.control.is_fenced() && !other.control.is_fenced());
}
