//! Counts of events since the start, for `status`.

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident)*) => {
        /// Counts of events since the start.
        #[derive(Clone, Copy, Debug, Default)]
        pub struct EventCounters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl EventCounters {
            /// Returns names and numbers, in a fixed order.
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
    /// Sessions that a process closed.
    sessions_ended
    /// Sessions whose process died.
    sessions_died
    /// Sessions fenced for forgery.
    sessions_fenced
    /// Requests served.
    requests
    /// Requests that came through request slots in shared memory.
    questions
    /// Records applied.
    records_applied
    /// Bytes of log applied.
    bytes_applied
    /// Records that coalescing dropped, since later ones of their batch replace them.
    coalesced_records
    /// Bytes of records that coalescing dropped.
    coalesced_bytes
    /// Commits of a batch.
    commits
    /// Commits that failed and will be tried again.
    commits_failed
    /// Leases granted.
    leases_granted
    /// Lease words revoked, narrowed or renewed.
    leases_revoked
    /// Grants published in the grant cache.
    posts
    /// Logs sealed because a lease moved.
    seals
    /// Notifications queued for mounts.
    invalidations
    /// Huge pages made of small ones.
    huge_pages
    /// Orphans freed because no session had them open any more.
    orphans_freed
    /// Requests for credit that were refused.
    credit_refused
    /// Requests to use more of what a quota limits that were refused.
    quota_refused
    /// Batches of root's sessions that used more of a quota than was granted.
    ///
    /// An honest LibFS has none.
    quota_unpaid
    /// Logs cut at recovery.
    ///
    /// Their dependencies were lost with the machine's memory.
    logs_cut
}
