//! The jobs of the demo, and the checks of their results.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use ashlar_tests::command::shell;
use ashlar_tests::ledger::checker::{Bound, check};
use ashlar_tests::tree::Tree;
use ashlar_tests::{Outcome, ensure, tried};

/// How a job reports its acknowledged results, a line each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// It appends them to `$JOURNAL`.
    File,
    /// It prints them on a pipe to the demo, as a server answers its clients.
    Pipe,
}

/// A program at work.
pub struct Job {
    /// The job's name, and its directory.
    pub name: &'static str,
    /// Its description for the story.
    pub description: &'static str,
    /// The script.
    pub work: &'static str,
    /// How it reports each acknowledged result.
    pub report: Report,
    /// Compares the results with the journal, and describes the outcome in a sentence.
    pub verify: fn(&Path, &Path) -> Outcome<String>,
}

/// The environment of every job.
pub const PRELUDE: &str = include_str!("../../../jobs/prelude.sh");

/// The jobs on one node: they reach their files through the mount.
pub const MOUNT_JOBS: &[Job] = &[
    Job {
        name: "git",
        description: "a repository that grows by a commit at a time",
        work: GIT,
        report: Report::File,
        verify: verify_git,
    },
    Job {
        name: "sqlite",
        description: "transfers between accounts in an SQLite database",
        work: SQLITE,
        report: Report::File,
        verify: verify_sqlite,
    },
    Job {
        name: "make",
        description: "a C project, compiled and run over and over",
        work: MAKE,
        report: Report::File,
        verify: verify_sums,
    },
    Job {
        name: "python",
        description: "a Python job that saves its results by fsync and rename",
        work: PYTHON,
        report: Report::File,
        verify: verify_sums,
    },
    Job {
        name: "ledger",
        description: "random creates, writes, renames, links and removals",
        work: LEDGER,
        report: Report::File,
        verify: verify_ledger,
    },
];

/// The jobs on two nodes: they run under `ashlar run`, and report a result once it was fsynced.
pub const SYNC_JOBS: &[Job] = &[
    Job {
        name: "bank",
        description: "transfers in an SQLite database, committed with synchronous=FULL",
        work: BANK,
        report: Report::Pipe,
        verify: verify_sqlite,
    },
    Job {
        name: "mail",
        description: "mails, a file each: write, fsync, rename, fsync of the directory",
        work: MAIL,
        report: Report::Pipe,
        verify: verify_sums,
    },
];

const GIT: &str = r#"
git init -q -b main .
for commit in $(seq 1 1000000); do
  mkdir -p "d$((commit % 7))"
  echo "commit $commit" >>"d$((commit % 7))/f$((commit % 5))"
  git add -A
  git -c gc.auto=0 commit -q -m "commit $commit"
  git rev-parse HEAD >>"$JOURNAL"
done
"#;

fn verify_git(directory: &Path, journal: &Path) -> Outcome<String> {
    // A killed git leaves a lock behind, and its manual says to remove it.
    let script = "rm -f .git/*.lock .git/refs/heads/*.lock && git fsck --strict --no-progress && git log --format=%H";
    let log = shell(directory, script)?.success()?.output;
    let commits: BTreeSet<_> = log.lines().collect();
    let acknowledged = read(journal)?;
    let lost = acknowledged.lines().filter(|commit| !commits.contains(commit)).count();
    ensure!(lost == 0, "{lost} commits are lost");
    Ok(format!("git fsck is clean, {} acknowledged commits are all in the history", acknowledged.lines().count()))
}

const SQLITE: &str = r#"
sqlite3 bank.db "PRAGMA journal_mode=WAL;
  CREATE TABLE account(id INTEGER PRIMARY KEY, balance INTEGER);
  CREATE TABLE transfer(id INTEGER PRIMARY KEY, source INTEGER, target INTEGER);
  WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 99) INSERT INTO account SELECT i, 1000 FROM n;"
for transfer in $(seq 1 1000000); do
  source=$((transfer * 7 % 100)) target=$((transfer * 13 % 100))
  sqlite3 -cmd '.timeout 60000' bank.db "PRAGMA synchronous=FULL; BEGIN IMMEDIATE;
    UPDATE account SET balance = balance - 1 WHERE id = $source;
    UPDATE account SET balance = balance + 1 WHERE id = $target;
    INSERT INTO transfer VALUES ($transfer, $source, $target); COMMIT;"
  echo "$transfer" >>"$JOURNAL"
done
"#;

fn verify_sqlite(directory: &Path, journal: &Path) -> Outcome<String> {
    let query = "sqlite3 bank.db 'PRAGMA integrity_check; SELECT sum(balance) FROM account; SELECT id FROM transfer ORDER BY id;'";
    let found = shell(directory, query)?.success()?.output;
    let mut rows = found.lines();
    ensure!(rows.next() == Some("ok"), "the integrity check fails: {}", &found[..found.len().min(200)]);
    ensure!(rows.next() == Some("100000"), "money was made or lost");
    let transfers: BTreeSet<_> = rows.collect();
    let acknowledged = read(journal)?;
    let lost = acknowledged.lines().filter(|transfer| !transfers.contains(transfer)).count();
    ensure!(lost == 0, "{lost} transfers are lost");
    ensure!(transfers.len() <= acknowledged.lines().count() + 1, "there are transfers that no program made");
    Ok(format!("integrity and sum hold, {} acknowledged transfers are all there", acknowledged.lines().count()))
}

const MAKE: &str = r#"
for build in $(seq 1 1000000); do
  mkdir "build$build"
  (
    cd "build$build"
    for n in 1 2 3 4; do printf 'long f%s(long x) { return x * %s + %s; }\n' $n $n "$build" >f$n.c; done
    printf '#include <stdio.h>\nlong f1(long), f2(long), f3(long), f4(long);\n' >main.c
    printf 'int main(void) { printf("%%ld\\n", f1(f2(f3(f4(1))))); return 0; }\n' >>main.c
    printf 'program: main.o f1.o f2.o f3.o f4.o\n\t$(CC) -o $@ $^\n' >Makefile
    make -s
    ./program >result
  )
  for file in program result main.c; do sha256sum "build$build/$file"; done >"$JOURNAL.new"
  cat "$JOURNAL.new" >>"$JOURNAL"
done
"#;

const PYTHON: &str = r#"
python3 - <<'END'
import hashlib, json, os, random
random.seed(1)
journal = open(os.environ["JOURNAL"], "a", buffering=1)
for step in range(1000000):
    path = f"result{step % 50}-{step}.json"
    data = json.dumps([random.random() for _ in range(random.randrange(5000))]).encode()
    with open("new", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename("new", path)
    journal.write(f"{hashlib.sha256(data).hexdigest()}  {path}\n")
END
"#;

const BANK: &str = r#"
exec "$ASHLAR" run -- python3 -u - <<'END'
import sqlite3
bank = sqlite3.connect("bank.db", isolation_level=None)
bank.execute("PRAGMA journal_mode=WAL")
bank.execute("PRAGMA synchronous=FULL")
bank.execute("BEGIN")
bank.execute("CREATE TABLE account(id INTEGER PRIMARY KEY, balance INTEGER)")
bank.execute("CREATE TABLE transfer(id INTEGER PRIMARY KEY, source INTEGER, target INTEGER)")
bank.executemany("INSERT INTO account VALUES (?, 1000)", ((account,) for account in range(100)))
bank.execute("COMMIT")
for transfer in range(1, 1000000):
    source, target = transfer * 7 % 100, transfer * 13 % 100
    bank.execute("BEGIN IMMEDIATE")
    bank.execute("UPDATE account SET balance = balance - 1 WHERE id = ?", (source,))
    bank.execute("UPDATE account SET balance = balance + 1 WHERE id = ?", (target,))
    bank.execute("INSERT INTO transfer VALUES (?, ?, ?)", (transfer, source, target))
    bank.execute("COMMIT")
    print(transfer)
END
"#;

const MAIL: &str = r#"
exec "$ASHLAR" run -- python3 -u - <<'END'
import hashlib, os, random
random.seed(2)
os.mkdir("tmp")
os.mkdir("new")
new = os.open("new", os.O_RDONLY)
for number in range(1000000):
    mail = f"Message-Id: <{number}@example.org>\n\n".encode() + random.randbytes(random.randrange(10000))
    with open(f"tmp/{number}", "wb") as file:
        file.write(mail)
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"tmp/{number}", f"new/{number}")
    os.fsync(new)
    print(f"{hashlib.sha256(mail).hexdigest()}  new/{number}")
END
"#;

/// Verifies a journal of lines in the format of sha256sum.
fn verify_sums(directory: &Path, journal: &Path) -> Outcome<String> {
    let count = read(journal)?.lines().count();
    shell(directory, &format!("sha256sum --quiet --strict -c '{}'", journal.display()))?.success()?;
    Ok(format!("{count} acknowledged files have the right content"))
}

const LEDGER: &str = r#"exec "$WRITER" . "$JOURNAL" 42 1000000"#;

fn verify_ledger(directory: &Path, journal: &Path) -> Outcome<String> {
    // The call that was under way when everything was killed failed, as expected.
    let text = read(journal)?;
    if let Some(at) = text.rfind("\nfailed ") {
        fs::write(journal, &text[..=at]).map_err(tried("writing the journal"))?;
    }
    let verdict = check(directory, journal, &Tree::new(), 42, Bound::Acknowledged)?;
    let pending = if verdict.survived > verdict.acknowledged {
        "and the one under way is done whole"
    } else {
        "and nothing is half done"
    };
    Ok(format!("{} acknowledged updates are all there, in order, {pending}", verdict.acknowledged))
}

fn read(journal: &Path) -> Outcome<String> {
    fs::read_to_string(journal).map_err(tried("reading the journal"))
}
