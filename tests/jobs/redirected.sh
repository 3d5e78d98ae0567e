# Programs write to and read from files that other processes have opened for them, in the current directory. The output
# is the same on every file system.
set -eu
numbers() { bash -c 'for i in {1..300}; do echo "$1 $i"; done' numbers "$1"; }
both='for i in {1..200}; do echo "out $i"; echo "err $i" >&2; done'

# The shell becomes the command.
bash -c "exec bash -c '$both' > together 2>&1"
bash -c "exec bash -c '$both' > out 2> err"
bash -c 'exec seq 1 5000 > numbers'
bash -c 'exec bash -c "exec bash -c \"exec seq 1 400\"" >> appended'
bash -c 'exec seq 401 800 >> appended'
bash -c 'exec wc -l < numbers > counted'

# Reading continues at the offset, also in another program.
bash -c 'for i in {1..150}; do read -r line; done; echo "$line"; exec tail -n +2' < numbers > tail
(for i in {1..100}; do read -r line; done; cat) < numbers > rest
{ numbers a; numbers b; echo c; } > group
bash -c 'for i in {1..100}; do echo $i; done; (echo inside); echo behind; seq 1 3; echo last; exec echo end' > turns

# Two descriptors of one open file, one of which is closed, and one that is opened for both.
bash -c 'exec 5>&1; for i in {1..90}; do echo "one $i"; done; exec 1>&-; for i in {1..90}; do echo "two $i" >&5; done; exec seq 1 9 >&5' > copies
bash -c 'exec 3<>both; for i in {1..100}; do echo "line $i" >&3; done; exec bash -c "echo more >&3; exec cat <&3"'
bash -c 'exec 7>kept 8>&7; exec bash -c "for i in {1..100}; do echo seven \$i >&7; echo eight \$i >&8; done; exec 8>&-; exec seq 1 3 >&7"'

# A loop of the shell's, with and without programs in it.
for i in {1..300}; do echo "$i"; done > loop
while read -r line; do echo "<$line>"; done < loop > copied
for i in {1..30}; do echo "$i"; /bin/echo "by another $i"; done > mixed
cut -d' ' -f2 < err | sort -n | uniq -c > sorted

# A name that is removed, and one that is reused, while the file is written to.
bash -c 'exec bash -c "rm gone; for i in {1..100}; do echo \$i; done; exec cat /dev/fd/9" > gone 9< loop' || true
bash -c 'exec bash -c "mv moved elsewhere; echo new > moved; for i in {1..100}; do echo \$i; done" > moved'
# A program gets a list of open files, which has become outdated when it passes the list on to the program that it
# becomes. A child has the list too.
again='stale=$(tr "\0" "\n" < /proc/$$/environ | grep ^ASHLAR_OPEN=) && export "$stale"
(for i in {1..2000}; do echo "child $i"; done; echo > done) &
exec bash -c "for i in {1..2000}; do echo own \$i; done; while [ ! -e done ]; do :; done"'
bash -c "exec bash -c '$again'" > shared
sort shared > all
rm shared
# The shell searches for a program in several places.
PATH=/none:/usr/none:$PATH bash -c 'exec env NAME=value bash -c "for i in {1..100}; do echo \$NAME \$i; done"' > looked

# A record lock belongs to the process, whatever it executes.
python3 -c '
import fcntl, os, sys
file = os.open("locked", os.O_CREAT | os.O_RDWR, 0o600)
fcntl.lockf(file, fcntl.LOCK_EX, 10, 5)
os.set_inheritable(file, True)
os.execv(sys.executable, [sys.executable, "-c", """
import fcntl, os, sys
file = int(sys.argv[1])
for number in range(200): os.write(file, b"line %d\\n" % number)
if os.fork() == 0:
    try: fcntl.lockf(os.open("locked", os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 7)
    except BlockingIOError: os._exit(3)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 3, "the lock is gone"
""", str(file)])'
