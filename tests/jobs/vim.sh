# An editor's ways to write a file: each keeps or changes other attributes. Also the recovery of unwritten changes after
# the editor was killed.
# Without 'backupskip=', files below /tmp would be written in one way only.
editor=$(command -v vim.tiny || command -v vim)
edit() { "$editor" -u NONE -i NONE -n -es "$@" </dev/null; }
make() {
  printf 'one\ntwo\nthree\n' >"$1"
  chmod 640 "$1"
  chown 1234:4321 "$1"
  setfattr -n user.colour -v green "$1"
}
for copy in yes no auto; do
  for backup in backup nobackup; do
    file=$copy-$backup
    make "$file"
    make "$file.lone"
    ln "$file" "$file.hard"
    ln -s "$file" "$file.soft"
    for name in "$file.soft" "$file.hard" "$file.lone"; do
      before=$(stat -L -c %i "$name")
      edit -c "set backupskip= backupcopy=$copy $backup writebackup" -c '%s/$/x/' -c 'wq' "$name"
      after=$(stat -L -c %i "$name")
      echo "$name: $([ "$before" = "$after" ] && echo same || echo other) inode, $(stat -c '%F %a %u %g %h %s' "$name")"
      getfattr -d "$name"
    done
  done
done
sha256sum yes-* no-* auto-*

# Killed with changes that are in the swap file only.
make lost
mkfifo keys
"$editor" -u NONE -i NONE -es -c 'set updatecount=1' lost <keys >/dev/null 2>&1 &
process=$!
exec 3>keys
printf '%%s/three/THREE/\n$append\nfour\n.\npreserve\n' >&3
until [ -s .lost.swp ] && grep -qa four .lost.swp; do sleep 0.05; done
kill -9 "$process"
exec 3>&-
wait "$process" 2>/dev/null || echo 'killed'
cat lost
"$editor" -u NONE -i NONE -es -r lost -c 'w recovered' -c 'q!' </dev/null >/dev/null 2>&1 || true
cat recovered
ls -A | grep -v keys
rm -f keys .lost.swp
