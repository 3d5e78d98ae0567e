//! `ashlar top`: shows the work of sessions, live.
//!
//! It asks SharedFS for its status again and again. The difference between two answers is the work in between.

use std::collections::HashMap;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ashlar_types::{BLOCK_BYTES, QuotaKey, SessionId, escape_controls};
use ashlar_wire::{OperationCounts, OperationKind, SessionKind, SessionStatus, StatusReply};
use serde::Serialize;

use crate::arguments::TopArguments;
use crate::error::CliError;
use crate::output::size::Size;
use crate::output::table::{grouped, table};
use crate::system::arena::ArenaLocation;
use crate::system::background::daemon_status;
use crate::system::names;
use crate::verbs::status::{chosen_arenas, percent};
use crate::verbs::top::cluster_pace::ClusterPace;

mod cluster_pace;

/// Moves the cursor to the top and clears the terminal.
const HOME: &str = "\x1b[H\x1b[2J";
/// The height of a terminal that does not report one. If there are more sessions than lines, the table shows the
/// busiest.
const LINES_DEFAULT: usize = 24;
/// Lines above the sessions of an arena.
const HEADER_LINES: usize = 4;

/// Shows the work of sessions until it is interrupted, or once.
pub fn run(arguments: &TopArguments) -> Result<ExitCode, CliError> {
    let mut users = HashMap::new();
    let mut before = take_sample(arguments)?;
    if before.arenas.is_empty() {
        return Err(CliError::NothingRuns);
    }
    let mut output = std::io::stdout();
    let is_terminal = output.is_terminal() && !arguments.once && !arguments.json;
    loop {
        std::thread::sleep(arguments.interval());
        let now = take_sample(arguments)?;
        let passed = now.at.duration_since(before.at);
        let arenas: Vec<_> = now
            .arenas
            .iter()
            .map(|(place, status)| {
                let earlier = before.arenas.iter().find(|(earlier, _)| earlier == place).map(|(_, status)| status);
                ArenaPace::new(earlier, status, passed, &mut |uid| {
                    users.entry(uid).or_insert_with(|| names::account_name(QuotaKey::User(uid), None)).clone()
                })
            })
            .collect();
        let shown = if arguments.json {
            let interval = Interval { seconds: passed.as_secs_f64(), arenas };
            serde_json::to_string(&interval).map_err(CliError::system("writing JSON"))? + "\n"
        } else {
            let lines = if is_terminal { terminal_lines() } else { usize::MAX };
            let start = if is_terminal { HOME } else { "" };
            let texts: Vec<_> = arenas.iter().map(|arena| arena.text(lines / arenas.len().max(1))).collect();
            format!("{start}{}{}", texts.join("\n"), if is_terminal || arguments.once { "" } else { "\n" })
        };
        match output.write_all(shown.as_bytes()).and_then(|()| output.flush()) {
            // The reader has closed the pipe.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(ExitCode::SUCCESS),
            written => written.map_err(CliError::system("writing"))?,
        }
        if arguments.once {
            return Ok(ExitCode::SUCCESS);
        }
        before = now;
    }
}

/// The state of all arenas at one moment.
struct StatusSample {
    at: Instant,
    arenas: Vec<(ArenaLocation, StatusReply)>,
}

/// Asks all daemons that run. A daemon that is being restarted is missing in one sample, and back in the next.
fn take_sample(arguments: &TopArguments) -> Result<StatusSample, CliError> {
    let mut arenas = Vec::new();
    for place in chosen_arenas(arguments.arena.as_ref())? {
        if let Ok(Some(status)) = daemon_status(&place) {
            arenas.push((place, status));
        }
    }
    Ok(StatusSample { at: Instant::now(), arenas })
}

fn terminal_lines() -> usize {
    rustix::termios::tcgetwinsize(std::io::stdout()).map_or(LINES_DEFAULT, |size| usize::from(size.ws_row))
}

/// One line of JSON.
#[derive(Serialize)]
struct Interval {
    seconds: f64,
    arenas: Vec<ArenaPace>,
}

/// The work of an arena and its sessions in an interval; numbers are for one second.
#[derive(Debug, Serialize)]
struct ArenaPace {
    arena: String,
    medium: String,
    blocks_total: u64,
    blocks_free: u64,
    total: Rates,
    /// The busiest first.
    sessions: Vec<SessionPace>,
    /// Replication, if the arena is a member of a cluster.
    cluster: Option<ClusterPace>,
}

/// The work of one session.
#[derive(Debug, Serialize)]
struct SessionPace {
    session: SessionId,
    kind: SessionKind,
    pid: u32,
    /// The program, or the mount point.
    command: String,
    user: String,
    log_used_bytes: u64,
    log_bytes: u64,
    is_fenced: bool,
    #[serde(flatten)]
    rates: Rates,
}

/// Operations in one second; times are of a sample.
#[derive(Debug, Default, Serialize)]
struct Rates {
    operations: f64,
    reads: f64,
    writes: f64,
    names: f64,
    syncs: f64,
    p50_ns: Option<u64>,
    p99_ns: Option<u64>,
    digested_records: f64,
    digested_bytes: f64,
    leases_granted: f64,
    leases_revoked: f64,
    #[serde(skip)]
    counts: OperationCounts,
}

impl Rates {
    /// Returns the work of a session between two samples. If the session was not there before, or its SharedFS was
    /// restarted, it began at zero.
    fn new(earlier: Option<&SessionStatus>, now: &SessionStatus, passed: Duration) -> Self {
        let seconds = passed.as_secs_f64().max(1e-3);
        let of_kind = |status: Option<&SessionStatus>, kind: OperationKind| {
            status.and_then(|status| status.operations.get(kind as usize).cloned()).unwrap_or_default()
        };
        let mut rates = Self::default();
        let mut rate = |kind| {
            let since = of_kind(Some(now), kind).since(&of_kind(earlier, kind));
            rates.counts.add(&since);
            since.operations as f64 / seconds
        };
        let [reads, writes, names, syncs] = OperationKind::ALL.map(&mut rate);
        let counted = |of: fn(&SessionStatus) -> u64| {
            let before = earlier.map_or(0, of);
            // The counts of SharedFS begin anew when it does.
            of(now).checked_sub(before).unwrap_or_else(|| of(now)) as f64 / seconds
        };
        rates.operations = rates.counts.operations as f64 / seconds;
        (rates.reads, rates.writes, rates.names, rates.syncs) = (reads, writes, names, syncs);
        rates.digested_records = counted(|status| status.records);
        rates.digested_bytes = counted(|status| status.digested_bytes);
        rates.leases_granted = counted(|status| status.leases_granted);
        rates.leases_revoked = counted(|status| status.leases_revoked);
        rates.find_percentiles();
        rates
    }

    fn find_percentiles(&mut self) {
        (self.p50_ns, self.p99_ns) = (self.counts.percentile(0.5), self.counts.percentile(0.99));
    }

    fn sum<'a>(all: impl Iterator<Item = &'a Self>) -> Self {
        let mut sum = all.fold(Self::default(), |mut sum, rates| {
            sum.operations += rates.operations;
            sum.reads += rates.reads;
            sum.writes += rates.writes;
            sum.names += rates.names;
            sum.syncs += rates.syncs;
            sum.digested_records += rates.digested_records;
            sum.digested_bytes += rates.digested_bytes;
            sum.leases_granted += rates.leases_granted;
            sum.leases_revoked += rates.leases_revoked;
            sum.counts.add(&rates.counts);
            sum
        });
        sum.find_percentiles();
        sum
    }

    fn latency(&self) -> String {
        format!("{} / {}", time(self.p50_ns), time(self.p99_ns))
    }

    fn digest(&self) -> String {
        format!("{} rec, {}", count(self.digested_records), Size(self.digested_bytes as u64))
    }
}

impl ArenaPace {
    fn new(
        earlier: Option<&StatusReply>,
        now: &StatusReply,
        passed: Duration,
        user: &mut dyn FnMut(u32) -> String,
    ) -> Self {
        let before = |session: &SessionStatus| {
            let sessions = earlier.map(|status| status.sessions.as_slice()).unwrap_or_default();
            // The number of a session that has ended may be another's.
            sessions.iter().find(|earlier| (earlier.session, earlier.pid) == (session.session, session.pid))
        };
        let mut sessions: Vec<_> = now
            .sessions
            .iter()
            .map(|session| SessionPace {
                session: session.session,
                kind: session.kind,
                pid: session.pid,
                command: session.label.clone(),
                user: user(session.uid),
                log_used_bytes: session.log_used_bytes,
                log_bytes: session.log_bytes,
                is_fenced: session.fenced.is_some(),
                rates: Rates::new(before(session), session, passed),
            })
            .collect();
        sessions.sort_by(|a, b| b.rates.operations.total_cmp(&a.rates.operations).then(a.session.0.cmp(&b.session.0)));
        Self {
            arena: now.arena.clone(),
            medium: now.medium.clone(),
            blocks_total: now.space.blocks_total,
            blocks_free: now.space.blocks_free,
            total: Rates::sum(sessions.iter().map(|session| &session.rates)),
            sessions,
            cluster: now
                .cluster
                .as_deref()
                .map(|cluster| ClusterPace::new(earlier.and_then(|status| status.cluster.as_deref()), cluster, passed)),
        }
    }

    /// Formats the work for people, in no more than so many lines.
    fn text(&self, lines: usize) -> String {
        let replication = self.cluster.as_ref().map_or(String::new(), |cluster| cluster.text() + "\n");
        if self.cluster.as_ref().is_some_and(|cluster| !cluster.serves()) {
            return format!("{} ({}): serves no sessions\n{replication}", self.arena, self.medium);
        }
        let used = self.blocks_total.saturating_sub(self.blocks_free);
        let bytes = |blocks: u64| Size(blocks.saturating_mul(BLOCK_BYTES));
        let total = &self.total;
        let mut text = format!(
            "{} ({}): {} of {} used ({}), {} sessions\n",
            self.arena,
            self.medium,
            bytes(used),
            bytes(self.blocks_total),
            percent(used, self.blocks_total),
            self.sessions.len()
        );
        text += &format!(
            "{} ops/s (p50 / p99 {}), digest {}/s, leases +{} -{} /s\n{replication}\n",
            count(total.operations),
            total.latency(),
            total.digest(),
            count(total.leases_granted),
            count(total.leases_revoked)
        );
        let lines = lines.saturating_sub(replication.lines().count());
        let room = lines.saturating_sub(HEADER_LINES + 1).max(1);
        let rows: Vec<_> = self.sessions.iter().take(room).map(SessionPace::row).collect();
        text += &table(
            &[
                "PID", "COMMAND", "USER", "OPS/S", "READS", "WRITES", "NAMES", "SYNCS", "P50", "P99", "LOG", "REC/S",
                "DIGEST/S", "LEASES+", "LEASES-",
            ],
            &rows,
        );
        text
    }
}

impl SessionPace {
    fn row(&self) -> Vec<String> {
        let rates = &self.rates;
        let name = if self.is_fenced { format!("{} (fenced)", self.command) } else { self.command.clone() };
        vec![
            self.pid.to_string(),
            escape_controls(&name).into_owned(),
            self.user.clone(),
            count(rates.operations),
            count(rates.reads),
            count(rates.writes),
            count(rates.names),
            count(rates.syncs),
            time(rates.p50_ns),
            time(rates.p99_ns),
            percent(self.log_used_bytes, self.log_bytes),
            count(rates.digested_records),
            Size(rates.digested_bytes as u64).to_string(),
            count(rates.leases_granted),
            count(rates.leases_revoked),
        ]
    }
}

/// Formats a rate as a whole number; a rate above 0 is never shown as 0.
fn count(rate: f64) -> String {
    if rate > 0.0 && rate < 1.0 { format!("{rate:.1}") } else { grouped(rate.round() as u64) }
}

/// Formats a time in two or three digits.
fn time(ns: Option<u64>) -> String {
    match ns {
        None => "-".into(),
        Some(ns @ 0..=999) => format!("{ns} ns"),
        Some(ns @ 1_000..=999_999) => format!("{:.1} µs", ns as f64 / 1e3),
        Some(ns @ 1_000_000..=999_999_999) => format!("{:.1} ms", ns as f64 / 1e6),
        Some(ns) => format!("{:.1} s", ns as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use ashlar_wire::{NodeStanding, SpaceReply, latency_bucket};

    use super::*;

    fn session(number: u64, pid: u32, operations: [u64; 4], records: u64) -> SessionStatus {
        let counts = |operations: u64| {
            let mut sampled = vec![0; latency_bucket(1000) + 1];
            sampled[latency_bucket(1000)] = operations / 61;
            OperationCounts { operations, sampled }
        };
        SessionStatus {
            session: SessionId(number),
            kind: SessionKind::Mount,
            pid,
            uid: 0,
            label: format!("/mnt/{number}"),
            log_used_bytes: 16 << 20,
            log_bytes: 64 << 20,
            records,
            digested_bytes: records * 100,
            leases_granted: 4,
            leases_revoked: 2,
            operations: operations.map(counts).to_vec(),
            fenced: None,
            terms: None,
        }
    }

    fn status(sessions: Vec<SessionStatus>) -> StatusReply {
        StatusReply {
            version: "0.1.0".into(),
            pid: 1,
            uptime_seconds: 1,
            arena: "/arena".into(),
            medium: "memory".into(),
            arena_bytes: 1 << 30,
            space: SpaceReply { blocks_total: 100, blocks_free: 75, inodes_total: 0, inodes_free: 0 },
            sessions,
            counters: vec![],
            cluster: None,
        }
    }

    fn pace(before: Option<&StatusReply>, now: &StatusReply) -> ArenaPace {
        ArenaPace::new(before, now, Duration::from_secs(2), &mut |uid| format!("user{uid}"))
    }

    #[test]
    fn rates_are_what_differs_and_the_busiest_comes_first() {
        let before = status(vec![session(1, 11, [0; 4], 0), session(2, 12, [1000, 0, 0, 0], 500)]);
        let now = status(vec![session(1, 11, [10, 0, 0, 0], 0), session(2, 12, [1000, 6200, 0, 2], 700)]);
        let pace = pace(Some(&before), &now);
        assert_eq!(pace.sessions.iter().map(|session| session.pid).collect::<Vec<_>>(), [12, 11]);
        let rates = &pace.sessions[0].rates;
        assert_eq!((rates.operations, rates.reads, rates.writes, rates.syncs), (3101.0, 0.0, 3100.0, 1.0));
        assert_eq!((rates.digested_records, rates.digested_bytes), (100.0, 10_000.0));
        let p50 = rates.p50_ns.expect("a time");
        assert!((768..=1024).contains(&p50), "{p50}");
        assert_eq!((pace.total.operations, pace.total.leases_granted), (3106.0, 0.0));
        assert_eq!(pace.sessions[1].rates.p50_ns, None, "nothing was measured");
        let text = pace.text(usize::MAX);
        for part in ["(25 %)", "3,106 ops/s", "/mnt/2", "user0", "3,100"] {
            assert!(text.contains(part), "{part} is missing:\n{text}");
        }
        assert_eq!(pace.text(HEADER_LINES + 2).lines().count(), HEADER_LINES + 1, "one line is room for one session");
    }

    #[test]
    fn forged_or_restarted_counters_do_no_harm() {
        let mut wild = session(1, 11, [u64::MAX; 4], 50);
        wild.operations[0].sampled = vec![u64::MAX; 1000];
        wild.label = "\x1b[2Jname".into();
        let before = status(vec![session(1, 11, [100; 4], 1000)]);
        let now = status(vec![wild.clone(), SessionStatus { session: SessionId(2), operations: vec![], ..wild }]);
        for (before, now) in [(Some(&before), &now), (Some(&now), &before), (None, &now)] {
            let text = pace(before, now).text(usize::MAX);
            assert!(!text.contains('\x1b'), "{text:?}");
        }
        assert_eq!(pace(Some(&before), &now).sessions[0].rates.digested_records, 25.0, "it began anew");
    }

    #[test]
    fn replication_takes_one_line_below_the_totals() {
        let now = |standing, end| {
            let mut status = status(vec![session(1, 11, [0; 4], 0), session(2, 12, [0; 4], 0)]);
            status.cluster = Some(Box::new(cluster_pace::tests::report("writer", standing, end)));
            status
        };
        let pace = pace(Some(&now(NodeStanding::Serving, 1000)), &now(NodeStanding::Serving, 9000));
        assert_eq!(pace.text(HEADER_LINES + 3).lines().count(), HEADER_LINES + 2, "one line is room for one session");
        let text = pace.text(usize::MAX);
        assert!(text.lines().nth(2).is_some_and(|line| line.starts_with("node 0, writer, serving;")), "{text}");
        let waiting = self::pace(None, &now(NodeStanding::Waiting, 9000)).text(usize::MAX);
        assert!(waiting.contains("/arena (memory): serves no sessions\nnode 0, writer, waiting;"), "{waiting}");
        assert_eq!(waiting.lines().count(), 2, "{waiting}");
    }

    #[test]
    fn an_interval_is_one_line_of_json() {
        let arenas = vec![pace(None, &status(vec![session(1, 11, [62; 4], 5)]))];
        let text = serde_json::to_string(&Interval { seconds: 2.0, arenas }).expect("JSON");
        assert!(!text.contains('\n'));
        let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let session = &json["arenas"][0]["sessions"][0];
        assert_eq!((session["reads"].as_f64(), session["pid"].as_u64()), (Some(31.0), Some(11)));
    }

    #[test]
    fn small_rates_and_times_are_seen() {
        assert_eq!([0.0, 0.4, 1.4, 12_345.6].map(count), ["0", "0.4", "1", "12,346"]);
        assert_eq!([None, Some(9), Some(1_500), Some(2_000_000_000)].map(time), ["-", "9 ns", "1.5 µs", "2.0 s"]);
    }
}
