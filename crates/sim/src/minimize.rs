//! Makes a failing run short: fewer operations, and fewer kinds of faults.

use crate::faults::FaultKind;
use crate::simulation::{SimOptions, run_seed};

/// Returns the options of a shorter run of the same seed that breaks a check too; `None` if the run breaks none.
///
/// Which check it breaks does not count: any is a finding.
#[must_use]
pub fn minimize(options: SimOptions) -> Option<SimOptions> {
    let fails = |options: SimOptions| run_seed(SimOptions { is_traced: false, ..options }).broken.is_some();
    if !fails(options) {
        return None;
    }
    let mut best = options;
    loop {
        let before = best;
        for kind in FaultKind::ALL {
            let fewer = SimOptions { faults: best.faults.without(kind), ..best };
            if best.faults.has(kind) && fails(fewer) {
                best = fewer;
            }
        }
        // A shorter run may draw other numbers, so not only every longer one fails: smaller cuts follow larger ones.
        let mut cut = best.steps / 2;
        while cut > 0 {
            let shorter = SimOptions { steps: best.steps - cut, ..best };
            if shorter.steps > 0 && fails(shorter) {
                best = shorter;
                cut = cut.min(best.steps / 2);
            } else {
                cut /= 2;
            }
        }
        if (best.steps, best.faults) == (before.steps, before.faults) {
            return Some(best);
        }
    }
}
