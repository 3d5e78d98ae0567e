//! Shadows: each daemon of a test keeps a replica, whose tree must be the same when the test ends.
//!
//! `ashlar-suite --shadow` runs tests so. Daemons learn it from the environment.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use crate::Outcome;
use crate::command::{ashlar, eventually, run, start_daemon};

/// The variable that gives each daemon a shadow, if it is not empty.
pub const SHADOWS: &str = "ASHLAR_SHADOWS";

/// How long a daemon may take to apply the logs that a test left.
const PATIENCE: Duration = Duration::from_secs(60);

/// The results of the comparisons in this process.
static FOUND: Mutex<Comparisons> = Mutex::new(Comparisons { equal: 0, problems: Vec::new() });

/// The results of comparisons.
#[derive(Debug, Default)]
pub struct Comparisons {
    /// How many trees were equal.
    pub equal: usize,
    /// The differences, and what went wrong.
    pub problems: Vec<String>,
}

/// Takes the results of all comparisons so far.
pub fn take_comparisons() -> Comparisons {
    FOUND.lock().map(|mut found| std::mem::take(&mut *found)).unwrap_or_default()
}

/// Compares an arena with its shadow, if it has one, and keeps the result.
pub fn compare_with_shadow(arena: &Path) {
    let Some(shadow) = shadow_of(arena) else { return };
    note_comparison(compare(arena, &shadow));
}

/// Keeps the result of a comparison.
pub fn note_comparison(result: Outcome) {
    let Ok(mut found) = FOUND.lock() else { return };
    match result {
        Ok(()) => found.equal += 1,
        Err(problem) => found.problems.push(problem),
    }
}

/// The shadow of an arena, beside it.
fn shadow_of(arena: &Path) -> Option<PathBuf> {
    let is_on = std::env::var_os(SHADOWS).is_some_and(|value| !value.is_empty());
    Some(arena.with_extension("shadow")).filter(|shadow| is_on && arena.join("ARENA").exists() && shadow.exists())
}

fn compare(arena: &Path, shadow: &Path) -> Outcome {
    ensure_served(arena)?;
    let done = run(ashlar(&["fsck", "--compare"]).arg(arena).arg(shadow))?;
    done.success().map(drop).map_err(|problem| format!("the shadow is not equal: {problem}"))
}

/// Starts a daemon unless one serves the arena: the test may have ended it, and logs are left.
pub fn ensure_served(arena: &Path) -> Outcome {
    let is_served = || {
        let status = run(ashlar(&["status", "--json", "--arena"]).arg(arena));
        status.is_ok_and(|done| done.output.contains("\"uptime_seconds\""))
    };
    if !is_served() {
        start_daemon(arena, &["--linger-seconds", "60"])?;
        eventually("a daemon serves the comparison", PATIENCE, is_served)?;
    }
    Ok(())
}
