//! Ends the process at a panic that is not contained.
//!
//! The node says which code is contained, and bars the session that caused another panic ([`ashlar_node::blame`]). The
//! next start recovers from the logs; all sessions resume, as after any kill.

use ashlar_node::blame::is_contained_else_bar;

/// Ends the process at a panic that is not contained, and bars the session that caused it.
///
/// The whole process is SharedFS.
pub fn confine_panics() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        if !is_contained_else_bar() {
            std::process::abort();
        }
    }));
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use ashlar_node::blame::{Blame, Panicked, contain};

    use super::*;
    use crate::shared_state::SharedState;
    use crate::test_sessions::{add_session, make_arena, start};

    /// Names the arena of the process that is to panic.
    const ARENA_ENV: &str = "ASHLAR_TEST_PANIC_ARENA";

    fn recover(place: &Path) -> SharedState {
        start(crate::Config::new(place))
    }

    #[test]
    fn request_that_panics_costs_only_its_session() {
        let place = tempfile::tempdir().expect("a directory");
        make_arena(place.path());
        let shared = recover(place.path());
        let (one, two) = (add_session(&shared, std::process::id()), add_session(&shared, std::process::id()));
        assert_eq!(contain(|| panic!("planted")), Err::<(), _>(Panicked));
        crate::node_requests::fence_after_panic(&shared, Some(one));
        let state = shared.lock();
        assert!(state.live(one).is_none() && state.live(two).is_some());
    }

    #[test]
    #[ignore = "this is the process that panics, which another test starts"]
    fn panicking_process() {
        let Some(place) = std::env::var_os(ARENA_ENV) else { return };
        let shared = recover(Path::new(&place));
        let pid = rustix::process::getppid().expect("a parent").as_raw_nonzero().get().unsigned_abs();
        let (blamed, _other) = (add_session(&shared, pid), add_session(&shared, pid));
        confine_panics();
        let contained = contain(|| panic!("planted, without the lock"));
        assert_eq!(contained, Err::<(), _>(Panicked), "the process goes on");
        let _ = contain(|| {
            let state = shared.lock();
            let _blame = Blame::for_request(&state.sessions[&blamed]);
            panic!("planted, in the middle of a change");
        });
        unreachable!("the process has ended");
    }

    /// A change that a panic cuts must reach neither other threads nor the next start.
    #[test]
    fn panic_under_the_lock_ends_the_process_and_bars_its_session() {
        let place = tempfile::tempdir().expect("a directory");
        make_arena(place.path());
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        let name = "panics::tests::panicking_process";
        command.args(["--exact", name, "--ignored", "--nocapture", "--test-threads=1"]).env(ARENA_ENV, place.path());
        let status = command.status().expect("run");
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGABRT), "{status}");
        let shared = recover(place.path());
        assert_eq!(shared.lock().live_ids().len(), 1, "the other session goes on");
        let kept = std::fs::read_dir(place.path().join("sessions")).expect("listed");
        let is_fenced = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with("fenced-");
        assert_eq!(kept.filter(|file| file.as_ref().is_ok_and(|file| is_fenced(&file.file_name()))).count(), 3);
    }
}
