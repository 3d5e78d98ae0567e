# A terminal multiplexer: its server and socket here, windows that run commands which write files, text that is typed
# and shown.
export TERM=screen-256color SHELL=/bin/bash
# A socket's path must be short, so it's named from its directory.
unset TMUX TMUX_PANE
mux() { tmux -S ./socket -f ./tmux.conf "$@"; }
# No server is left behind, even after an error.
trap 'mux kill-server 2>/dev/null || true' EXIT
shows() { for _ in $(seq 1 1000); do ! eval "$1" || return 0; sleep 0.02; done; echo "not so: $1"; return 1; }
cat >tmux.conf <<'CONF'
set -g default-command "exec bash --norc --noprofile"
set -g history-limit 5000
set -g remain-on-exit off
CONF
mkdir work
mux new-session -d -s main -x 100 -y 30 -c "$PWD/work" 'for n in $(seq 1 100); do echo "line $n" >>first; done; echo done >first.done; exec bash --norc --noprofile'
shows '[ -s work/first.done ]'
wc -l <work/first
mux new-window -d -t main -n second -c "$PWD/work"
mux send-keys -t main:second "PS1='> '; echo typed >typed; pwd | sed 's|.*/||'; cat typed" Enter
shows '[ -s work/typed ]'
shows 'mux capture-pane -p -t main:second | grep -qx typed'
mux capture-pane -p -t main:second | grep -x -e work -e typed
mux split-window -d -t main:second -c "$PWD/work" 'seq 1 500 >split; sha256sum split >split.sum; mv split.sum split.done'
shows '[ -s work/split.done ]'
mux pipe-pane -t main:second "cat >>'$PWD/piped'"
mux send-keys -t main:second 'echo into the pipe' Enter
shows 'grep -q "into the pipe" piped 2>/dev/null'
mux set-buffer 'a buffer'
mux save-buffer saved
cat saved; echo
mux load-buffer work/first
mux show-buffer | tail -n 1
mux run-shell "echo from the server >'$PWD/ran'"
cat ran
mux list-windows -t main -F '#{window_index} #{window_panes}'
mux display-message -p -t main '#{session_name} #{session_windows}'
left="$(mux display-message -p '#{pid}') $(mux list-panes -a -F '#{pane_pid}')"
mux kill-server
# A process that has ended works no more, even if no process asks for its exit status.
for process in $left; do shows "! readlink /proc/$process/cwd >/dev/null"; done
rm -f socket
manifest work
