# A login shell with its home here: profile, history, job control, redirections, pipelines, here-documents, background
# jobs.
export HISTFILE="$PWD/.bash_history" TERM=dumb
cat >.bash_profile <<'PROFILE'
echo "the profile of $(basename "$HOME") runs in a login shell: $(shopt -q login_shell && echo yes)"
export FROM_PROFILE=profile PATH="$HOME/bin:$PATH"
alias said='echo an alias says'
[ ! -f ~/.bashrc ] || . ~/.bashrc
PROFILE
echo 'double() { echo $(($1 * 2)); }' >.bashrc
echo 'echo "bye" >>"$HOME/left"' >.bash_logout
mkdir bin
printf '#!/bin/bash\necho "a command of the home directory: $*"\n' >bin/mine
chmod +x bin/mine

# A script that a login shell runs, with everything that a person types, but without the terminal.
cat >session.sh <<'SESSION'
echo "$FROM_PROFILE $(double 21)"
mine one two
# Redirections of all kinds, also some that stay open while programs run.
exec 3>log 4<>both
echo first >&3
ls no-such-file 2>&1 >/dev/null | sed 's/^/complaint: /' >&3
echo read and written >&4
{ echo to both; echo complaint >&2; } &>mixed
echo appended >>mixed
: >|mixed2; set -C; (: >mixed2) 2>/dev/null || echo 'kept by noclobber'; set +C
read -r line <both; echo "$line"
exec 3>&- 4>&-
cat log mixed
cat <<HERE >document
expanded: $FROM_PROFILE
HERE
cat <<-'HERE' >>document
	as it is: $FROM_PROFILE
	HERE
tac <<<"$(cat document)"
# Pipelines, with a status of each part, and files as their ends.
seq 1 2000 | tee numbers | grep 7 | sort -r >sevens
echo "$(wc -l <numbers) $(wc -l <sevens) $(head -n 1 sevens)"
false | true | (exit 3); echo "${PIPESTATUS[*]}"
diff <(sort numbers) <(sort -u numbers) && echo 'the same both ways'
coproc BACK { while read -r word; do echo "<$word>" >>coproc.log; echo "back: $word"; done; }
echo there >&"${BACK[1]}"; read -r answer <&"${BACK[0]}"; echo "$answer"
exec {BACK[1]}>&-; wait "$BACK_PID"; cat coproc.log
# Jobs in the background that all write to one file, and are waited for one by one.
for job in 1 2 3 4 5 6; do
  (for line in $(seq 1 50); do echo "job $job line $line" >>shared; done; exit "$job") &
  jobs[job]=$!
done
for job in 1 2 3 4 5 6; do wait "${jobs[job]}" || echo "job $job ended with $?"; done
sort -u shared | wc -l; sort -o shared shared
# Job control: groups of their own, stopped and continued.
set -m
(while :; do echo tick >>ticks; sleep 0.01; done) &
until [ -s ticks ]; do sleep 0.01; done
kill -STOP %1
until jobs -s | grep -q Stopped; do sleep 0.01; done
before=$(wc -l <ticks); sleep 0.05; [ "$before" = "$(wc -l <ticks)" ] && echo 'stopped'
bg %1 >/dev/null
until [ "$(wc -l <ticks)" -gt "$before" ]; do sleep 0.01; done; echo 'goes on'
kill %1; wait %1 2>/dev/null; echo "ended with $?"
sleep 0.1 | cat >piped & fg %+ >/dev/null; echo "in front: $?"
rm ticks
set +m
# Traps, subshells that change their directory, and temporary files.
(cd bin && pwd -P | xargs basename && echo in bin >../from-bin); cat from-bin
trap 'echo caught >>caught' USR1; kill -USR1 $$; cat caught; trap - USR1
temporary=$(mktemp ./temporary.XXXXXX); echo x >"$temporary"; mv "$temporary" kept; cat kept
shopt -s globstar nullglob; echo ./**/*.sh; echo {a,b}{1,2} | tee >(cat >tee.out) >/dev/null; sleep 0.05; cat tee.out
mapfile -t lines <numbers; echo "${#lines[@]} ${lines[1999]}"
time sleep 0 2>/dev/null
logout
SESSION
# -i as well, for history and aliases: its messages about the missing terminal go elsewhere.
bash -l session.sh
for turn in 1 2; do
  bash -l -i 2>/dev/null <<TYPED
said turn $turn
echo $turn >>turns
history | wc -l
logout
TYPED
done
cat turns left .bash_history
manifest . | grep -v history
