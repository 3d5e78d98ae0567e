//! The databases: SQLite, by its own command, and RocksDB, by its own benchmark.

use std::fmt::Write;
use std::path::Path;

use ashlar_tests::random::Random;
use ashlar_tests::{Outcome, ensure, tried};

use crate::applications::job::{Measured, Turn, Unit, seconds};
use crate::applications::size::Size;

const TABLE: &str =
    "CREATE TABLE entry(id INTEGER PRIMARY KEY, word TEXT, text TEXT); CREATE INDEX by_word ON entry(word);\n";

fn transactions(size: Size) -> u64 {
    size.of(500, 10)
}

fn rows(size: Size) -> u64 {
    size.of(200_000, 1000)
}

/// Makes the scripts: one with a transaction for each row, one with one for all. The words of the index are random;
/// rows have some 130 bytes.
pub fn prepare_sqlite(inputs: &Path, size: Size) -> Outcome {
    let write = |name: &str, text: String| std::fs::write(inputs.join(name), text).map_err(tried("writing a script"));
    let mut random = Random::new(1);
    let mut inserts = |count: u64| {
        (0..count).fold(String::new(), |mut text, row| {
            let word = random.draw();
            // Writing to a string can't fail.
            let _ = writeln!(text, "INSERT INTO entry VALUES({row}, '{word:016x}', '{}');", "text ".repeat(20));
            text
        })
    };
    let one_each = inserts(transactions(size));
    write("delete.sql", format!("PRAGMA journal_mode=delete; PRAGMA synchronous=FULL;\n{TABLE}{one_each}"))?;
    write("wal.sql", format!("PRAGMA journal_mode=wal; PRAGMA synchronous=FULL;\n{TABLE}{one_each}"))?;
    write("bulk.sql", format!("{TABLE}BEGIN;\n{}COMMIT;\n", inserts(rows(size))))
}

/// Inserts rows by a transaction each, with both kinds of journal and every transaction synced, and many rows by one
/// transaction.
pub fn sqlite(turn: &Turn) -> Outcome<Vec<Measured>> {
    let one_each = transactions(turn.size);
    let cases = [
        ("sqlite, a transaction a row", "delete", one_each),
        ("the same with a write-ahead log", "wal", one_each),
        ("sqlite, all rows in one", "bulk", rows(turn.size)),
    ];
    let mut measured = Vec::new();
    for (action, name, rows) in cases {
        let database = format!("{name}.db");
        let script = format!(".read {}", turn.inputs.join(format!("{name}.sql")).display());
        let (took, _) = turn.time(turn.command("sqlite3").args(["-batch", "-bail", &database, &script]))?;
        let question = "SELECT count(*), count(DISTINCT word), sum(id) FROM entry; PRAGMA integrity_check;";
        let said = turn.output_of(turn.plainly("sqlite3").args([&database, question]))?;
        let expected = format!("{rows}|{rows}|{}\nok\n", rows * (rows - 1) / 2);
        ensure!(said == expected, "{action}: the database says '{said}', where '{expected}' was written");
        measured.push(seconds(action, took, format!("{rows} rows")));
    }
    Ok(measured)
}

/// LevelDB's five benchmarks, with LevelDB's sizes of keys, values and buffers, by RocksDB's descendant of LevelDB's
/// `db_bench`. Nothing is compressed. The figure is the benchmark's own.
pub fn rocksdb(turn: &Turn) -> Outcome<Vec<Measured>> {
    let (entries, synced) = (turn.size.of(200_000, 2000), turn.size.of(1000, 20));
    // `fillsync` divides its number by a thousand; the number here is the quotient. Keys are read in another random
    // sequence than they were written in, so some are missing.
    let cases: [(&str, &str, &str, u64, &[&str]); 5] = [
        ("fillseq", "fillseq", "sequential", entries, &["--seed=7"]),
        ("fillrandom", "fillrandom", "random", entries, &["--seed=7"]),
        ("fillsync", "fillrandom", "synced", synced, &["--seed=7", "--sync=1"]),
        ("readseq", "readseq", "random", entries, &["--seed=7", "--use_existing_db=1"]),
        ("readrandom", "readrandom", "random", entries, &["--seed=8", "--use_existing_db=1"]),
    ];
    let mut measured = Vec::new();
    for (name, benchmark, database, count, options) in cases {
        let mut command = turn.command("db_bench");
        command.arg(format!("--db={}", turn.directory.join(database).display()));
        command.arg(format!("--benchmarks={benchmark}")).arg(format!("--num={count}"));
        command.args(["--key_size=16", "--value_size=100", "--compression_type=none"]);
        command.args(["--write_buffer_size=4194304", "--cache_size=8388608"]).args(options);
        let (_, said) = turn.time(&mut command)?;
        let (value, found) = outcome(benchmark, &said)?;
        measured.push(Measured { action: format!("db_bench {name}"), unit: Unit::Micros, value, found });
    }
    Ok(measured)
}

/// Reads `db_bench`'s output: the microseconds of an operation, and the number of operations or of hits.
fn outcome(benchmark: &str, said: &str) -> Outcome<(f64, String)> {
    let unclear = || format!("db_bench prints nothing about {benchmark}: {said}");
    // Its progress stands on the same line.
    let lines = said.lines().map(|line| line.rsplit('\r').next().unwrap_or(line));
    let mut results = lines.filter_map(|line| line.strip_prefix(benchmark)?.trim_start().strip_prefix(": "));
    let result = results.next().ok_or_else(unclear)?;
    let before = |text: &'static str| result.split_once(text).and_then(|(before, _)| before.split_whitespace().last());
    let micros = before(" micros/op").and_then(|number| number.parse().ok()).ok_or_else(unclear)?;
    let operations = before(" operations").ok_or_else(unclear)?;
    let found = result.split_once('(').and_then(|(_, rest)| rest.split_once(')')).map(|(inside, _)| inside.to_owned());
    Ok((micros, found.unwrap_or_else(|| format!("{operations} operations"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_db_bench_says_is_understood() {
        let said = "Keys: 16\nreadrandom   :       7.694 micros/op 129954 ops/sec 1.539 seconds 200000 operations;    \
                    9.1 MB/s (126365 of 200000 found)\n";
        assert_eq!(outcome("readrandom", said), Ok((7.694, "126365 of 200000 found".into())));
        let said = "... finished 900 ops\rfillsync     :     702.1 micros/op 1424 ops/sec 0.702 seconds 1000 operations;    0.2 MB/s\n";
        assert_eq!(outcome("fillsync", said), Ok((702.1, "1000 operations".into())));
        assert!(outcome("fillseq", said).is_err());
    }
}
