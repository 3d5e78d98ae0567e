//! The jobs: each prepares its inputs once, and then runs in every place.

mod build;
mod databases;
mod personalities;
mod trees;

use super::job::Job;

/// The jobs.
pub const JOBS: &[Job] = &[
    Job { name: "git", programs: &["git"], prepare: trees::prepare_clone, run: trees::clone },
    Job { name: "untar", programs: &["git", "tar"], prepare: trees::prepare_archive, run: trees::untar },
    Job {
        name: "copy",
        programs: &["cp", "diff", "grep", "sed", "rsync", "chown", "chmod", "find", "xargs", "python3", "tar"],
        prepare: trees::prepare_archive,
        run: trees::copy,
    },
    Job { name: "make", programs: &["make", "gcc", "ar", "tar", "xz"], prepare: build::prepare, run: build::make },
    Job { name: "sqlite", programs: &["sqlite3"], prepare: databases::prepare_sqlite, run: databases::sqlite },
    Job { name: "rocksdb", programs: &["db_bench"], prepare: |_, _| Ok(()), run: databases::rocksdb },
    Job { name: "varmail", programs: &[], prepare: |_, _| Ok(()), run: personalities::varmail },
    Job { name: "fileserver", programs: &[], prepare: |_, _| Ok(()), run: personalities::fileserver },
];
