# A program that leaves the process that started it: it forks twice, closes all descriptors, and writes a log here. It
# rotates the log by renaming, until a signal ends it.
cat >daemon.c <<'C'
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LINES_PER_FILE = 50, LINES_MIN = 400 };
static volatile sig_atomic_t is_over, is_reopened;

static void end(int number) { (void)number; is_over = 1; }
static void reopen(int number) { (void)number; is_reopened = 1; }

static int open_log(void) { return open("log", O_CREAT | O_WRONLY | O_APPEND, 0644); }

static void leave(int code) {
    /* No process reads its status: the file says what was wrong. */
    int file = open("failed", O_CREAT | O_WRONLY | O_APPEND, 0644);
    dprintf(file, "%d: %s\n", code, strerror(errno));
    _exit(code);
}

int main(int count, char **words) {
    if (count < 2) return 2;
    /* A file that is open when it leaves must not stay open, and its close must do no harm. */
    int before = open("before", O_CREAT | O_RDWR, 0600);
    if (before < 0 || write(before, "open before\n", 12) != 12) return 3;
    if (fork() != 0) _exit(0);
    if (setsid() < 0) leave(4);
    if (fork() != 0) _exit(0);
    if (!strcmp(words[1], "closefrom")) {
        closefrom(0);
    } else if (!strcmp(words[1], "close_range")) {
        if (close_range(0, ~0U, 0) != 0) leave(5);
    } else {
        for (long number = sysconf(_SC_OPEN_MAX); number >= 0; number--) close((int)number);
    }
    if (open("/dev/null", O_RDWR) != 0 || dup(0) != 1 || dup(0) != 2) leave(6);
    umask(027);
    struct sigaction action = {.sa_handler = end};
    sigaction(SIGTERM, &action, NULL);
    action.sa_handler = reopen;
    sigaction(SIGHUP, &action, NULL);
    int log = open_log();
    if (log != 3) leave(7);
    int identity = open("pid.new", O_CREAT | O_WRONLY | O_TRUNC, 0644);
    dprintf(identity, "%d\n", (int)getpid());
    if (fsync(identity) != 0 || close(identity) != 0 || rename("pid.new", "pid") != 0) leave(8);
    int written = 0, rotated = 0;
    while (!is_over || written < LINES_MIN) {
        char line[64], name[32];
        int length = snprintf(line, sizeof line, "line %d\n", written);
        if (write(log, line, (size_t)length) != length) leave(9);
        written++;
        if (written % LINES_PER_FILE == 0 && rotated < 7) {
            snprintf(name, sizeof name, "log.%d", ++rotated);
            if (rename("log", name) != 0) leave(10);
            close(log);
            if ((log = open_log()) != 3) leave(11);
        }
        if (is_reopened) {
            is_reopened = 0;
            close(log);
            if ((log = open_log()) != 3) leave(12);
            close(open("reopened", O_CREAT | O_WRONLY, 0644));
        }
        if (written > LINES_MIN) {
            /* The script waits for this file, so that the number of lines is the same everywhere. */
            close(open("ready", O_CREAT | O_WRONLY, 0644));
            while (!is_over && !is_reopened) usleep(1000);
        }
    }
    dprintf(log, "the end\n");
    if (fsync(log) != 0 || close(log) != 0) leave(13);
    if (unlink("pid") != 0) leave(14);
    _exit(0);
}
C
gcc -O1 -o daemon daemon.c
waits() { for _ in $(seq 1 1000); do ! eval "$1" || return 0; sleep 0.02; done; echo "not so: $1"; cat failed 2>/dev/null; return 1; }
program=$PWD/daemon
for way in closefrom close_range each; do
  mkdir "$way"
  cd "$way"
  # With files of the shell open, as when a person starts a service by hand.
  exec 8>inherited 9<"$program"
  "$program" "$way" >output 2>&1
  exec 8>&- 9<&-
  waits '[ -e ready ]'
  pid=$(cat pid)
  # Its terminal, its parent and all files that were open are gone.
  ls -l "/proc/$pid/fd" | grep -c -e inherited -e before -e output -e '/daemon$' || true
  kill -HUP "$pid"
  waits '[ -e reopened ]'
  kill -TERM "$pid"
  # A process that has ended works no more, even if no process asks for its exit status.
  waits '[ ! -e pid ] && ! readlink "/proc/$pid/cwd" >/dev/null'
  echo "$way: $(cat log.? log | grep -c line) lines, $(tail -n 1 log)"
  cat before inherited output failed 2>/dev/null || true
  cd ..
done
rm daemon
manifest .
