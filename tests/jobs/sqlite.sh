# Transfers between accounts by several processes at once, with a rollback journal and with a write-ahead log.
transfer() {
  for step in $(seq 1 40); do
    from=$(((step * 7 + $2 * 3) % 20 + 1))
    to=$(((step * 11 + $2 * 5) % 20 + 1))
    sqlite3 -cmd '.timeout 60000' "$1" "BEGIN IMMEDIATE;
      UPDATE account SET balance = balance - 1 WHERE id = $from;
      UPDATE account SET balance = balance + 1 WHERE id = $to;
      INSERT INTO entry(writer, step) VALUES ($2, $step); COMMIT;"
  done
}
for mode in delete truncate persist wal; do
  database=$mode.db
  sqlite3 "$database" "PRAGMA journal_mode=$mode; PRAGMA synchronous=FULL;
    CREATE TABLE account(id INTEGER PRIMARY KEY, balance INTEGER);
    CREATE TABLE entry(writer INTEGER, step INTEGER);
    WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20) INSERT INTO account SELECT i, 100 FROM n;"
  processes=()
  for writer in 1 2 3 4; do
    transfer "$database" $writer &
    processes+=($!)
  done
  for process in "${processes[@]}"; do wait "$process"; done
  sqlite3 "$database" 'SELECT sum(balance), count(*) FROM account; SELECT count(*), count(DISTINCT writer) FROM entry;
    SELECT id, balance FROM account ORDER BY id; PRAGMA integrity_check;'
done
