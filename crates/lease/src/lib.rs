//! Leases and file locks as sans-I/O state machines
