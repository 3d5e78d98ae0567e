//! The simulator's checks: they pass as things are, and find each bug that is planted.

use ashlar_sim::faults::SimBug;
use ashlar_sim::minimize::minimize;
use ashlar_sim::simulation::{SimOptions, run_seed};

/// The seeds within which each planted bug is found.
const SEEDS_WITH_BUG: u64 = 500;

#[test]
fn seeds_without_bug_break_no_check() {
    for seed in 0..40 {
        let outcome = run_seed(SimOptions::new(seed));
        assert_eq!(outcome.broken, None, "seed {seed}");
        assert!(outcome.counts.updates > 0 && outcome.counts.trees > 0, "seed {seed}: {}", outcome.counts);
    }
}

#[test]
fn same_seed_gives_same_trace() {
    for seed in [3, 8] {
        let trace = || run_seed(SimOptions { is_traced: true, ..SimOptions::new(seed) }).trace;
        assert_eq!(trace(), trace(), "seed {seed}");
    }
}

#[test]
fn each_planted_bug_is_found() {
    for bug in SimBug::ALL {
        let options = |seed| SimOptions { plant: Some(bug), ..SimOptions::new(seed) };
        let found = (0..SEEDS_WITH_BUG).find(|seed| run_seed(options(*seed)).broken.is_some());
        assert!(found.is_some(), "no seed finds {}", bug.name());
    }
}

#[test]
fn minimized_run_fails_with_fewer_steps() {
    let options = |seed| SimOptions { plant: Some(SimBug::UnrevokedLease), ..SimOptions::new(seed) };
    let seed = (0..SEEDS_WITH_BUG).find(|seed| run_seed(options(*seed)).broken.is_some()).expect("a finding");
    let short = minimize(options(seed)).expect("a failing run");
    assert!(short.steps < options(seed).steps, "{short:?}");
    assert!(run_seed(short).broken.is_some());
}
