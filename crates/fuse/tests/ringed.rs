//! Tests the front end through the kernel, by rings (FUSE over io_uring).
//!
//! It runs all tests of `mounted.rs`, and tests of faults that only rings can have.

#[path = "mounted.rs"]
mod mounted;

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Scope;
use std::time::Duration;

use mounted::{Mounted, may_mount, mount_with_file, serve_beside_syncs, wait_until};
use rustix::fs::FlockOperation;
use rustix::mount::UnmountFlags;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Binds the calling thread, so that all its requests come by one queue.
fn stay_on_one_core() {
    let allowed = sched_getaffinity(None).unwrap();
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|core| allowed.is_set(*core)).unwrap());
    sched_setaffinity(None, &one).unwrap();
}

/// Starts `count` threads that wait for the lock on `f`.
fn lock_later<'scope>(scope: &'scope Scope<'scope, '_>, mounted: &Mounted, count: usize) {
    for _ in 0..count {
        let file = mounted.open("f");
        scope.spawn(move || {
            stay_on_one_core();
            rustix::fs::flock(&file, FlockOperation::LockExclusive).unwrap();
        });
    }
}

#[test]
fn held_up_requests_do_not_delay_others_on_their_core() {
    if !may_mount() {
        return;
    }
    let (shared, mounted) = mount_with_file();
    // Threads that have waited for a lock before have given their entries back.
    let holder = mounted.open("f");
    rustix::fs::flock(&holder, FlockOperation::LockExclusive).unwrap();
    std::thread::scope(|scope| {
        lock_later(scope, &mounted, 10);
        std::thread::sleep(Duration::from_millis(100));
        drop(holder);
    });
    serve_beside_syncs(&shared, &mounted, 30, stay_on_one_core);
}

/// An answer that has to wait keeps its entry. More of them wait at once than a core has entries, again and again.
/// Beside them a thread looks names up; it would never be served if no entry was left.
#[test]
fn waiting_locks_leave_entries_for_others_on_their_core() {
    if !may_mount() {
        return;
    }
    let (shared, mounted) = mount_with_file();
    let (done, lookups) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            stay_on_one_core();
            while !done.load(Ordering::Relaxed) {
                // A new name each time, of which the kernel has not cached that it is absent.
                let name = format!("none{}", lookups.fetch_add(1, Ordering::Relaxed));
                assert!(fs::metadata(mounted.at(&name)).is_err());
            }
        });
        for _ in 0..20 {
            let holder = mounted.open("f");
            rustix::fs::flock(&holder, FlockOperation::LockExclusive).unwrap();
            std::thread::scope(|scope| {
                lock_later(scope, &mounted, 40);
                let before = lookups.load(Ordering::Relaxed);
                wait_until("others are served", || lookups.load(Ordering::Relaxed) > before + 20);
                rustix::fs::flock(&holder, FlockOperation::Unlock).unwrap();
            });
        }
        done.store(true, Ordering::Relaxed);
    });
    wait_until("all locks are gone", || shared.lock_count() == 0);
}

#[test]
fn forced_unmount_aborts_requests_under_way() {
    if !may_mount() {
        return;
    }
    for _ in 0..10 {
        let (_shared, mounted) = mount_with_file();
        let holder = mounted.open("f");
        rustix::fs::flock(&holder, FlockOperation::LockExclusive).unwrap();
        std::thread::scope(|scope| {
            let held = mounted.open("f");
            scope.spawn(move || {
                let _ = rustix::fs::flock(held, FlockOperation::LockShared);
            });
            for number in 0..3 {
                let path = mounted.at("");
                // New names, which no kernel knows.
                let mut names = (0..).map(move |count| path.join(format!("none{number}-{count}")));
                let is_served = |error: std::io::Error| error.kind() == std::io::ErrorKind::NotFound;
                scope.spawn(move || while fs::metadata(names.next().unwrap()).is_err_and(is_served) {});
            }
            std::thread::sleep(Duration::from_millis(20));
            // The mount is in use, so it stays, but a process that sends it a request gets an error: no process serves
            // it.
            let busy = rustix::mount::unmount(mounted.at("").as_path(), UnmountFlags::FORCE);
            assert_eq!(busy, Err(rustix::io::Errno::BUSY));
        });
    }
}
