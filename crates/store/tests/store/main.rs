//! Tests of the store, over LMDB and over its twin in memory.

mod comparison;
mod copy_bench;
mod copy_faults;
mod copying;
mod life;
mod lmdb_crashes;
mod media;
mod memory_crashes;
mod model;
