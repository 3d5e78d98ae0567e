//! Remembers the names that the kernel may keep, and until when.
//!
//! A kernel keeps names only for a sole mount (`ControlPage::is_shared`). When another session begins, the kernel must
//! forget them first. The one notification that covers all names (`FUSE_NOTIFY_INC_EPOCH`) takes working directories
//! away from under programs, and so does forgetting a name altogether. But each name can be marked as expired
//! (`FUSE_EXPIRE_ONLY`), so that the kernel looks it up before it uses it again. For that the mount must know which
//! names the kernel has.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ashlar_types::InodeId;
use parking_lot::Mutex;

use crate::kernel_cache::shown_directories::EntryName;

/// Names known at once, about 2 MiB. If a mount gives more within their validity, a new session waits that long.
const NAMES_MAX: usize = 16_384;
/// How long a thread that makes the kernel forget names sleeps before it checks again for answers on their way.
const PAUSE: Duration = Duration::from_micros(20);

#[derive(Debug, Default)]
struct KeptNames {
    /// Until when each may be kept; in this order.
    order: VecDeque<(Instant, EntryName)>,
    /// Until then the kernel may keep names that are no longer known here.
    lost_until: Option<Instant>,
}

/// The names that the kernel was given.
#[derive(Debug, Default)]
pub(crate) struct DentryTtls {
    names: Mutex<KeptNames>,
    /// Requests that have asked how long names may be kept, and whose answers are not recorded yet.
    answering: AtomicUsize,
}

impl DentryTtls {
    /// Begins a request that is about to ask how long names may be kept.
    pub(crate) fn begin_answer(&self) {
        self.answering.fetch_add(1, Ordering::SeqCst);
    }

    /// Ends it: its answer was sent, and its names are recorded.
    pub(crate) fn end_answer(&self) {
        self.answering.fetch_sub(1, Ordering::SeqCst);
    }

    /// Records the names of one answer, which the kernel may keep for `ttl` from now on.
    pub(crate) fn record_names<'a>(&self, given: impl IntoIterator<Item = (InodeId, &'a [u8])>, ttl: Duration) {
        let now = Instant::now();
        let mut names = self.names.lock();
        while names.order.front().is_some_and(|(until, _)| *until <= now) {
            names.order.pop_front();
        }
        for (directory, name) in given {
            if names.order.len() >= NAMES_MAX {
                names.order.clear();
                names.lost_until = Some(now + ttl);
            }
            names.order.push_back((now + ttl, (directory, name.into())));
        }
    }

    /// Takes all names that the kernel may have, and the time until which it may have others. Waits for every request
    /// that began when names could still be kept.
    pub(crate) fn take_names(&self) -> (Vec<EntryName>, Option<Instant>) {
        while self.answering.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(PAUSE);
        }
        let now = Instant::now();
        let mut names = self.names.lock();
        let lost_until = names.lost_until.take().filter(|until| *until > now);
        let kept = names.order.drain(..).filter(|(until, _)| *until > now);
        (kept.map(|(_, place)| place).collect(), lost_until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(1000);

    #[test]
    fn kept_names_are_taken_once() {
        let ttls = DentryTtls::default();
        ttls.record_names([(InodeId(1), &b"gone"[..])], Duration::ZERO);
        ttls.record_names([(InodeId(1), &b"a"[..]), (InodeId(2), b"b")], LONG);
        let (names, lost) = ttls.take_names();
        let names: Vec<_> = names.iter().map(|(directory, name)| (directory.0, &name[..])).collect();
        assert_eq!((names, lost), (vec![(1, &b"a"[..]), (2, b"b")], None));
        assert!(ttls.take_names().0.is_empty());
    }

    #[test]
    fn too_many_names_leave_only_their_validity() {
        let ttls = DentryTtls::default();
        ttls.record_names(std::iter::repeat_n((InodeId(1), &b"a"[..]), NAMES_MAX + 1), LONG);
        let (names, lost) = ttls.take_names();
        assert_eq!(names.len(), 1);
        assert!(lost.is_some_and(|until| until > Instant::now()));
        assert_eq!(ttls.take_names().1, None);
    }

    #[test]
    fn take_waits_for_answers_on_their_way() {
        let ttls = DentryTtls::default();
        ttls.begin_answer();
        std::thread::scope(|scope| {
            let taken = scope.spawn(|| ttls.take_names().0.len());
            std::thread::sleep(Duration::from_millis(5));
            assert!(!taken.is_finished());
            ttls.record_names([(InodeId(1), &b"late"[..])], LONG);
            ttls.end_answer();
            assert_eq!(taken.join().unwrap(), 1);
        });
    }
}
