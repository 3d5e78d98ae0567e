//! Measures how fast logs are applied.
//!
//! `cargo test --release --test digest_rate -- --ignored --nocapture digest_rate`

mod common;

use std::time::Instant;

use ashlar_types::{FileKind, InodeId};
use ashlar_update::Update;
use common::{Client, NOW, Site};

const RECORDS: usize = 100_000;
const WRITES: usize = 8_000;

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

/// Makes SharedFS apply everything in the log, and prints how long that took.
fn apply(client: &mut Client, what: &str, records: usize) {
    let start = Instant::now();
    client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let applied = start.elapsed();
    client.make_room();
    println!(
        "{what}: {:.0} records/s applied, {:.0} with the commit",
        records as f64 / applied.as_secs_f64(),
        records as f64 / start.elapsed().as_secs_f64()
    );
}

#[test]
#[ignore = "a measurement"]
fn digest_rate() {
    let site = Site::new(1 << 30);
    let mut client = Client::open(&site.socket());
    client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    client.credit(20_000, 100 << 20).expect("credit");
    let inodes: Vec<InodeId> = (0..RECORDS).map(|_| client.inode()).collect();
    for (number, inode) in inodes.iter().enumerate() {
        let name = format!("file-{number}");
        let create = common::create(*inode, InodeId::ROOT, name.as_bytes(), FileKind::Regular);
        client.append(&Update::Create(create));
    }
    apply(&mut client, "creates", RECORDS);
    for inode in &inodes[..WRITES] {
        client.append(&Update::Write { inode: *inode, offset: 0, at: NOW, strip: false, data: &[7; 4096] });
    }
    apply(&mut client, "4 KiB writes", WRITES);
}
