//! Planted bugs that change what media hold.

use super::Simulation;

impl Simulation {
    /// Changes what the medium keeps, if such a bug is planted.
    pub(super) fn plant_before_crash(&mut self) {}

    /// Hides the last record of a log from recovery.
    pub(super) fn plant_skipped_record(&mut self) {}
}
