# RocksDB through its own tools: each way in which it writes and reads files, and the resulting content.
bench() {
  local db=$1 benchmarks=$2
  shift 2
  db_bench --db="$PWD/$db" --benchmarks="$benchmarks" --num=20000 --value_size=100 --seed=7 --compression_type=none \
    --write_buffer_size=262144 --target_file_size_base=262144 --max_bytes_for_level_base=1048576 --verify_checksum=1 "$@" \
    >"$db.log" 2>&1 || { tail -n 20 "$db.log" >&2; return 1; }
  if grep -iE 'error|corrupt' "$db.log"; then return 1; fi
  rm "$db.log"
}
tell() {
  echo "$1: $(ldb --db="$1" scan --hex | sha256sum), $(ldb --db="$1" checkconsistency)"
}
bench plain fillseq,overwrite,deleterandom,compact,readrandom,readseq,readreverse,levelstats
tell plain
bench synced fillrandom --sync=1 --num=1000
tell synced
bench direct fillrandom,compact,readrandom --use_direct_reads=1 --use_direct_io_for_flush_and_compaction=1
tell direct
bench mapped fillrandom,compact,readrandom --mmap_read=1 --mmap_write=1
tell mapped
bench threads fillrandom,readwhilewriting --threads=4 --enable_pipelined_write=1 --allow_concurrent_memtable_write=1
ldb --db=threads checkconsistency
bench preallocated overwrite --wal_bytes_per_sync=4096 --bytes_per_sync=4096 --writable_file_max_buffer_size=4096
tell preallocated

# A database that is written, linked, moved away, backed up and restored.
ldb --db=small --create_if_missing put key value
for n in $(seq 1 20); do echo "key$n ==> value $n"; done | ldb --db=small load --disable_wal=false >load.log 2>&1
ldb --db=small batchput a 1 b 2
ldb --db=small delete key7
ldb --db=small get b
ldb --db=small checkpoint --checkpoint_dir="$PWD/checkpoint" >/dev/null
ldb --db=small deleterange a key2
ldb --db=small compact
ldb --db=small backup --backup_dir="$PWD/backup" >/dev/null 2>&1
ldb --db=restored restore --backup_dir="$PWD/backup" >/dev/null 2>&1
for db in small checkpoint restored; do
  echo "$db"
  ldb --db=$db scan
done
rm -f load.log */LOG* */*/LOG*
