//! Arbitrary records of a session, validated and applied by SharedFS.
//!
//! Nothing may panic, and a record may change only what its user and its leases allow.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    ashlar_node::fuzzing::validate_records(data);
});
