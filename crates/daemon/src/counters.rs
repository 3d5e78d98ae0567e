//! What happened since the start, for `status`.

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident)*) => {
        /// Counts since the start.
        #[derive(Clone, Copy, Debug, Default)]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// Names and numbers, in a fixed order.
            pub fn list(&self) -> Vec<(String, u64)> {
                vec![$((stringify!($name).to_owned(), self.$name),)*]
            }
        }
    };
}

counters! {
    /// Sessions opened.
    sessions_opened
    /// Sessions that went on after a restart of SharedFS.
    sessions_resumed
    /// Sessions that ended in order.
    sessions_ended
    /// Sessions whose process died.
    sessions_died
    /// Sessions fenced for forgery.
    sessions_fenced
    /// Requests served.
    requests
    /// Those of them that were asked in shared memory.
    questions
    /// Records applied.
    records_applied
    /// Bytes of log applied.
    bytes_applied
    /// Records that later ones of their batch made needless.
    coalesced_records
    /// Bytes of records that were not applied for this reason.
    coalesced_bytes
    /// Commits of a batch.
    commits
    /// Commits that failed and will be tried again.
    commits_failed
    /// Leases granted.
    leases_granted
    /// Lease words taken away, narrowed or renewed.
    leases_revoked
    /// Inodes put on the board, for all to read.
    posts
    /// Logs sealed because a lease moved.
    seals
    /// Notifications queued for mounts.
    invalidations
    /// Huge pages made of small ones.
    huge_pages
    /// Orphans freed because nobody had them open any more.
    orphans_freed
    /// Requests for credit that were refused.
    credit_refused
    /// Requests to use more of what a quota limits that were refused.
    quota_refused
    /// Batches by which root's sessions used more of what a quota limits than they were granted: an honest LibFS has none.
    quota_unpaid
    /// Logs cut at recovery, because what they depend on was lost with the machine's memory.
    logs_cut
}
