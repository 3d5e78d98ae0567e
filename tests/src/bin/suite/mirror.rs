//! Two nodes with one file system: either fails, under load.
//!
//! The nodes are real processes on this machine (`ashlar dev`), as root in network namespaces of their own.

mod copies;
mod development;
mod full_journal;
mod hostile;
mod load;
mod outages;
mod promotion;
mod refusals;

use ashlar_tests::harness::Test;

/// The groups of tests here.
pub const GROUPS: &[&[Test]] = &[
    promotion::TESTS,
    outages::TESTS,
    full_journal::TESTS,
    hostile::TESTS,
    copies::TESTS,
    refusals::TESTS,
    development::TESTS,
];
