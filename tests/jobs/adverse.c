/* adverse STORY: programs under adverse conditions, and hostile ones, each in a directory of its own. The output must
 * be the same on any file system. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include "story.h"

#define PAGE 4096L
#define UNSHARE 2
extern char **environ;

static char *self;

static void *close_all_of_mine(void *nothing)
{
    (void)nothing;
    say("a thread closes what it has", close_range(3, ~0u, UNSHARE));
    int file = make("theirs");
    say("its first descriptor", file);
    say("it writes", put(file, "by the thread"));
    say("it closes 5", close(5));
    return NULL;
}

/* Descriptors that a thread closes for itself alone, and that a single-threaded program closes for all. */
static void ranges(void)
{
    say("3", make("one"));
    say("4", make("two"));
    say("5", make("three"));
    say("4 is written", put(4, "before"));
    say("all are closed", close_range(4, ~0u, UNSHARE));
    say("5 is closed", fcntl(5, F_GETFD));
    say("5 is written", put(5, "lost"));
    say("3 is written", put(3, "kept"));
    say("4 is another one", make("four"));
    say("5 is another one", make("five"));
    say("4 is written", put(4, "fourth"));
    say("5 is written", put(5, "fifth"));
    pthread_t thread;
    pthread_create(&thread, NULL, close_all_of_mine, NULL);
    pthread_join(thread, NULL);
    say("4 is written", put(4, " and more"));
    say("5 is written", put(5, " and more"));
    say("6 is another one", make("six"));
    say("an unknown flag", close_range(3, ~0u, 64));
    const char *names[] = {"one", "two", "three", "four", "five", "six", "theirs"};
    for (int at = 0; at < 7; at++)
        show(names[at]);
}

static void *leave_files(void *nothing)
{
    (void)nothing;
    say("a thread keeps its descriptors to itself", unshare(CLONE_FILES));
    say("it closes 3", close(3));
    say("it opens", make("theirs"));
    say("it writes", put(3, "by the thread"));
    return NULL;
}

static void *leave_directory(void *nothing)
{
    (void)nothing;
    say("a thread keeps its directory to itself", unshare(CLONE_FS));
    say("it changes its directory", chdir("below"));
    int file = make("here");
    say("it writes", put(file, "by the thread"));
    return NULL;
}

static void separate(void)
{
    pthread_t thread;
    say("a directory", mkdir("below", 0755));
    say("3", make("ours"));
    say("a program with one thread", unshare(CLONE_FILES | CLONE_FS));
    say("3 is written", put(3, "first "));
    pthread_create(&thread, NULL, leave_directory, NULL);
    pthread_join(thread, NULL);
    show("here");
    show("below/here");
    pthread_create(&thread, NULL, leave_files, NULL);
    pthread_join(thread, NULL);
    say("3 is written", put(3, "second"));
    show("ours");
    show("theirs");
}

static volatile sig_atomic_t is_expected;
static sigjmp_buf back;

static void on_fault(int number)
{
    (void)number;
    if (is_expected)
        siglongjmp(back, 1);
    _exit(7);
}

/* The byte at an address; -1 and EFAULT if there is none. */
static long byte_at(const char *address)
{
    is_expected = 1;
    long byte = -1;
    errno = EFAULT;
    if (!sigsetjmp(back, 1))
        byte = *(const volatile unsigned char *)address;
    is_expected = 0;
    return byte;
}

/* A mapping that grows with its file, in place and elsewhere, with its modified bytes. */
static void growing(void)
{
    signal(SIGBUS, on_fault);
    int writer = make("file");
    char block[PAGE];
    memset(block, 'a', sizeof block);
    say("begun", write(writer, block, 100));
    int file = open("file", O_RDONLY);
    char *map = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, file, 0);
    say("its first byte", byte_at(map));
    for (int letter = 'b'; letter < 'e'; letter++) {
        memset(block, letter, sizeof block);
        say("more", write(writer, block, sizeof block));
    }
    char *longer = mremap(map, PAGE, 3 * PAGE, MREMAP_MAYMOVE);
    say("it grows", longer == MAP_FAILED ? -1 : 0);
    say("the first byte", byte_at(longer));
    say("byte 99", byte_at(longer + 99));
    say("byte 100", byte_at(longer + 100));
    say("the next page", byte_at(longer + PAGE + 200));
    say("the one behind", byte_at(longer + 2 * PAGE + 200));
    char *longest = mremap(longer, 3 * PAGE, 8 * PAGE, MREMAP_MAYMOVE);
    say("it grows again", longest == MAP_FAILED ? -1 : 0);
    say("the last page", byte_at(longest + 3 * PAGE + 50));
    say("behind the end", byte_at(longest + 5 * PAGE));
    close(file);

    /* Of a mapping that was moved, from its second page on, modified, and whose file has no descriptor any more. */
    memset(block, 'x', sizeof block);
    int other = make("other");
    for (int page = 0; page < 4; page++)
        say("more", write(other, block, sizeof block));
    file = open("other", O_RDONLY);
    map = mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, PAGE);
    map[PAGE] = 'w';
    close(file);
    char *place = mmap(NULL, 16 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    map = mremap(map, 3 * PAGE, 3 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place + 4 * PAGE);
    say("it is moved", map - place);
    for (int page = 0; page < 4; page++) {
        memset(block, 'x' + page % 3, sizeof block);
        say("more", write(other, block, sizeof block));
    }
    close(other);
    mprotect(map, 3 * PAGE, PROT_NONE);
    map = mremap(map, 3 * PAGE, 7 * PAGE, MREMAP_MAYMOVE);
    say("it grows", map == MAP_FAILED ? -1 : 0);
    say("it has no right", mprotect(map, 7 * PAGE, PROT_READ));
    for (int page = 0; page < 7; page++)
        say("a page", byte_at(map + page * PAGE));
    say("a byte behind what was written", byte_at(map + PAGE + 1));

    /* Of a removed file. */
    file = open("other", O_RDONLY);
    map = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    say("the file goes", unlink("other"));
    map = mremap(map, PAGE, 2 * PAGE, MREMAP_MAYMOVE);
    say("it grows", map == MAP_FAILED ? -1 : 0);
    say("its first byte", byte_at(map));

    /* Of memory without a file. */
    map = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *map = 'm';
    map = mremap(map, PAGE, 64 * PAGE, MREMAP_MAYMOVE);
    say("memory grows", map == MAP_FAILED ? -1 : byte_at(map));
}

static volatile int is_over;

/* Appends numbers to a file of its own, each of which must be there once. */
static void *count_up(void *name)
{
    int file = open(name, O_WRONLY | O_CREAT | O_APPEND, 0644);
    long number = 0;
    /* One at least: a thread may begin only when all others are done. */
    do {
        if (write(file, &number, sizeof number) != sizeof number)
            return (void *)-1L;
        number++;
    } while (!is_over);
    close(file);
    return (void *)number;
}

static void check_counted(const char *name, long count)
{
    int file = open(name, O_RDONLY);
    long found, number = 0;
    while (read(file, &found, sizeof found) == sizeof found && found == number)
        number++;
    say(number == count && count > 0 ? "all is there" : "something is wrong", number == count ? 0 : count);
    close(file);
}

/* Forks in the middle of threads' writes. The children continue with their files, and fork themselves. */
static void forks(void)
{
    pthread_t threads[3];
    char names[3][8] = {"t0", "t1", "t2"};
    int shared = open("shared", O_RDWR | O_CREAT | O_APPEND, 0644);
    for (int at = 0; at < 3; at++)
        pthread_create(&threads[at], NULL, count_up, names[at]);
    int bad = 0;
    for (int round = 0; round < 20; round++) {
        pid_t child = fork();
        if (child == 0) {
            char name[16];
            snprintf(name, sizeof name, "c%d", round);
            int file = make(name);
            if (put(file, "child") != 5 || put(shared, "c") != 1)
                _exit(1);
            pid_t grandchild = fork();
            if (grandchild == 0)
                _exit(put(file, " of child") != 9 || put(shared, "g") != 1);
            int status = -1;
            waitpid(grandchild, &status, 0);
            _exit(status != 0 || size_of(name) != 14);
        }
        int status = -1;
        if (put(shared, "p") != 1)
            bad++;
        waitpid(child, &status, 0);
        bad += status != 0;
    }
    is_over = 1;
    for (int at = 0; at < 3; at++) {
        void *count;
        pthread_join(threads[at], &count);
        check_counted(names[at], (long)count);
    }
    say("children that failed", bad);
    say("the file that all have", size_of("shared"));
}

/* Numbers that others use: a program puts its files at all numbers, and closes all. */
static void numbers(void)
{
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    int most = limit.rlim_cur > 1024 ? 1024 : (int)limit.rlim_cur;
    int file = make("file"), other = make("other");
    say("written", put(file, "one"));
    int nothing = memfd_create("nothing", 0), bad = 0;
    /* It replaces descriptors that it does not know by one that can be written. */
    for (int number = most - 1; number >= most - 64; number--)
        bad += dup2(nothing, number) != number;
    for (int number = 0; number < 40; number++) {
        char name[16];
        snprintf(name, sizeof name, "f%d", number);
        int next = make(name);
        bad += put(next, name) < 2 || size_of(name) != (number < 10 ? 2 : 3);
        close(next);
        if (number % 10 == 0) {
            /* It has to ask for changes of another process. */
            pid_t child = fork();
            if (child == 0) {
                int theirs = open(name, O_WRONLY | O_APPEND);
                _exit(put(theirs, "more") != 4);
            }
            int status = -1;
            waitpid(child, &status, 0);
            bad += status != 0 || size_of(name) != (number < 10 ? 6 : 7);
        }
    }
    say("that went wrong", bad);
    struct stat found, same;
    say("nobody has written to it", fstat(nothing, &found) ? -1 : (long)found.st_size);
    bad = 0;
    for (int number = most - 1; number >= most - 64; number--)
        bad += fstat(number, &same) || same.st_ino != found.st_ino;
    say("that lead elsewhere", bad);
    bad = 0;
    for (int number = 10; number < most; number++)
        bad += dup2(file, number) != number;
    say("numbers that could not be had", bad);
    bad = 0;
    for (int number = 10; number < most; number++)
        bad += put(number, "x") != 1;
    say("that could not be written", bad);
    say("one more", make("full") >= 0 && most < 4096 ? 0 : -(most < 4096));
    say("a number that there is none of", dup2(file, most));
    bad = 0;
    for (int number = 10; number < most; number++)
        bad += dup2(other, number) != number || put(number, "y") != 1;
    say("that could not be changed", bad);
    bad = 0;
    for (int number = most - 1; number >= 10; number--)
        bad += close(number) != 0;
    say("that could not be closed", bad);
    say("written", put(file, "two"));
    say("its length", size_of("file") == most - 10 + 6 ? 0 : size_of("file"));
    say("the other's", size_of("other") == most - 10 ? 0 : size_of("other"));
    say("all are closed", close_range(3, ~0u, 0));
    say("the first number", make("again"));
    say("written", put(3, "again"));
    say("closed twice", close(3) + close(3));
    show("again");
    /* A pipe over a file, a file over a pipe. */
    int ends[2];
    say("a pipe", pipe(ends));
    file = make("file");
    int twin = dup(file);
    say("the pipe over the file", dup2(ends[1], file));
    say("into the pipe", put(file, "pipe"));
    say("into the file", put(twin, "file"));
    say("the file over the pipe", dup3(twin, ends[1], O_CLOEXEC));
    say("into the file", put(ends[1], "more"));
    char text[8] = "";
    say("out of the pipe", read(ends[0], text, sizeof text));
    say("onto itself", dup3(twin, twin, 0));
    show("file");
}

/* A file takes over a number while another thread writes to it. */
static void *write_on(void *number)
{
    long written = 0;
    while (!is_over)
        written += write((int)(long)number, "abcdefgh", 8) == 8;
    return (void *)written;
}

static void races(void)
{
    pthread_t threads[2];
    int file = open("first", O_WRONLY | O_CREAT | O_APPEND, 0644);
    for (int at = 0; at < 2; at++)
        pthread_create(&threads[at], NULL, write_on, (void *)(long)file);
    for (int round = 0; round < 400; round++) {
        int next = open(round % 2 ? "first" : "second", O_WRONLY | O_APPEND | O_CREAT, 0644);
        dup2(next, file);
        close(next);
    }
    /* A closed file leaves its number to the next open, even if others write to it meanwhile. */
    int others = 0;
    for (int round = 0; round < 4000; round++) {
        close(file);
        int third = open("third", O_WRONLY | O_CREAT | O_APPEND, 0644);
        others += third != file;
        if (third != file && dup2(third, file) == file)
            close(third);
    }
    say("other numbers", others);
    is_over = 1;
    long written = 0;
    for (int at = 0; at < 2; at++) {
        void *count;
        pthread_join(threads[at], &count);
        written += (long)count;
    }
    long length = size_of("first") + size_of("second") + size_of("third");
    say("all that was written is there", written * 8 - length);
}

/* A file is replaced all the time, and never missing. */
static void replaced(void)
{
    close(make("name"));
    pid_t child = fork();
    while (child == 0) {
        int file = make("new");
        put(file, "x");
        close(file);
        rename("new", "name");
    }
    int missing = 0;
    for (int number = 0; number < 4000; number++) {
        int file = open("name", number % 2 ? O_RDONLY : O_RDWR | O_CREAT, 0644);
        missing += file < 0;
        close(file);
        missing += chmod("name", number % 2 ? 0644 : 0600) < 0;
        missing += size_of("name") < 0;
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    say("calls that did not find it", missing);
}

static volatile int alarms;
static int log_file;

static void on_alarm(int number)
{
    (void)number;
    int error = errno;
    alarms++;
    if (write(log_file, "!", 1) != 1)
        _exit(8);
    errno = error;
}

static void on_jump(int number)
{
    (void)number;
    siglongjmp(back, 1);
}

static void timer(long microseconds)
{
    struct itimerval value = {{0, microseconds}, {0, microseconds}};
    setitimer(ITIMER_REAL, &value, NULL);
}

/* Constant signals, whose handler writes too, and one handler that never returns. */
static void signals(void)
{
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    log_file = open("log", O_WRONLY | O_CREAT | O_APPEND, 0644);
    sigaction(SIGALRM, &action, NULL);
    static char block[30000], back_again[30000];
    int file = make("file"), bad = 0;
    timer(200);
    for (int round = 0; round < 3000; round++) {
        memset(block, round, sizeof block);
        bad += pwrite(file, block, sizeof block, round % 7 * 1000) != sizeof block;
        bad += pread(file, back_again, sizeof block, round % 7 * 1000) != sizeof block;
        bad += memcmp(block, back_again, sizeof block) != 0;
    }
    timer(0);
    say("calls that failed", bad);
    say("alarms that were not noted", alarms - size_of("log"));
    action.sa_handler = on_jump;
    action.sa_flags = SA_NODEFER;
    sigaction(SIGALRM, &action, NULL);
    int jumps = 0;
    while (jumps < 50) {
        if (sigsetjmp(back, 1)) {
            jumps++;
            continue;
        }
        timer(300 + jumps * 10);
        for (;;) {
            long written = pwrite(file, block, sizeof block, 0);
            if (written != sizeof block)
                _exit(6);
            struct stat found;
            if (stat("file", &found) || rename("log", "log"))
                _exit(5);
        }
    }
    timer(0);
    say("it goes on", pwrite(file, "end", 3, 0));
    say("its length", size_of("file"));
}

/* Two processes that append to one file: no line is cut, none is lost. */
static void appends(void)
{
    char line[64];
    for (int who = 0; who < 2; who++) {
        if (fork() == 0) {
            int file = open("lines", O_WRONLY | O_CREAT | O_APPEND, 0644);
            for (int number = 0; number < 1500; number++) {
                int length = snprintf(line, sizeof line, "%d %d %.*s\n", who, number, number % 30, "..............................");
                if (write(file, line, length) != length)
                    _exit(1);
            }
            _exit(0);
        }
    }
    int status, bad = 0, next[2] = {0, 0}, who, number;
    while (wait(&status) > 0)
        bad += status != 0;
    FILE *file = fopen("lines", "r");
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%d %d", &who, &number) != 2 || who < 0 || who > 1 || next[who]++ != number)
            bad++;
    }
    fclose(file);
    say("wrong lines", bad);
    say("lines", next[0] + next[1]);
}

/* A file that another one replaces while it is open, and a directory that is removed under the program. */
static void removed(void)
{
    int old = make("file"), new = make("new");
    struct stat found;
    say("old", put(old, "the old text"));
    say("new", put(new, "the new text"));
    say("replaced", rename("new", "file"));
    fstat(old, &found);
    say("links of the old one", found.st_nlink);
    say("more to the old one", put(old, ", and more"));
    say("more to the new one", put(new, "!"));
    char text[64] = "";
    say("read from the old one", pread(old, text, 63, 0));
    say("by its name in /proc", open("/proc/self/fd/3", O_RDONLY) >= 0 ? 0 : -1);
    say("cut", ftruncate(old, 3));
    show("file");
    say("a name for what has none", linkat(AT_FDCWD, "/proc/self/fd/3", AT_FDCWD, "back", AT_SYMLINK_FOLLOW));
    close(old);
    close(new);

    say("a directory", mkdir("below", 0755));
    say("there", chdir("below"));
    int here = open(".", O_RDONLY | O_DIRECTORY);
    say("it goes", rmdir("../below"));
    say("a file in it", make("file"));
    say("by its descriptor", openat(here, "file", O_CREAT | O_WRONLY, 0644));
    say("a directory in it", mkdir("more", 0755));
    say("a link in it", symlink("x", "link"));
    say("a name into it", rename("../file", "file"));
    say("looked at", stat(".", &found));
    say("its links", found.st_nlink);
    say("by its descriptor", fstat(here, &found));
    say("what is above", access("../file", F_OK));
    say("there again", chdir(".."));
    say("back", fchdir(here));
    say("a file in it", access("x", F_OK));
    chdir("..");
    show("file");
}

/* Vectors that are too many, too long, or invalid. */
static void vectors(void)
{
    static struct iovec many[1025];
    static char bytes[1025];
    int file = make("file");
    long sum = 0;
    for (int at = 0; at < 1025; at++) {
        bytes[at] = 'a' + at % 26;
        many[at].iov_base = &bytes[at];
        many[at].iov_len = at % 3 ? 1 : 0;
        sum += at < 1024 ? at % 3 != 0 : 0;
    }
    say("1024 parts", writev(file, many, 1024) - sum);
    say("1025 parts", writev(file, many, 1025));
    say("no parts", writev(file, many, 0));
    say("fewer than none", writev(file, many, -1));
    say("the length", size_of("file") - sum);
    say("read in parts", preadv(file, many, 1024, 0) - sum);
    struct iovec two[2] = {{bytes, 4}, {(void *)1, 4}};
    say("a part that is not there", pwritev(file, two, 1, 0));
    two[0].iov_base = (void *)1;
    say("none that is there", pwritev(file, two, 2, 0));
    two[0].iov_base = bytes;
    two[1].iov_base = bytes;
    two[0].iov_len = two[1].iov_len = 1UL << 62;
    say("longer than can be", writev(file, two, 2));
    two[0].iov_len = -1L;
    say("longer than there is", writev(file, two, 1));
    say("parts nowhere", writev(file, (void *)1, 2));
    say("a place before the beginning", pwrite(file, bytes, 1, -1));
    say("a place behind all", pwrite(file, bytes, 1, 0x7fffffffffffffff));
    say("read from nowhere", pread(file, (void *)1, 4, 0));
    say("a path that is nowhere", open((void *)1, O_RDONLY));
    say("an answer nowhere", stat("file", (void *)1));
    /* A path that ends where the memory ends. */
    char *map = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(map + PAGE, PAGE);
    memcpy(map + PAGE - 5, "file", 5);
    say("a path at the end of memory", access(map + PAGE - 5, R_OK));
    memcpy(map + PAGE - 4, "file", 4);
    say("one beyond it", access(map + PAGE - 4, R_OK));
    /* Memory that was read into, and later changes of it; the bytes beside it stay. */
    map = mmap(NULL, 12 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *end = sbrk(0);
    sbrk(4 * PAGE);
    for (int page = 0; page < 12; page++)
        say("read into a page", pread(file, map + page * PAGE, 4, 0));
    say("read into the heap", pread(file, end + 2 * PAGE, 4, 0));
    munmap(map + PAGE, PAGE);
    mprotect(map + 3 * PAGE, PAGE, PROT_READ);
    mprotect(map + 5 * PAGE, PAGE, PROT_NONE);
    mmap(map + 7 * PAGE, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    char *moved = mremap(map + 9 * PAGE, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, map + 11 * PAGE);
    sbrk(-4 * PAGE);
    for (int page = 0; page < 12; page++)
        say("read into it again", pread(file, map + page * PAGE, 4, 0));
    for (int page = 0; page < 12; page++)
        say("written from it", pwrite(file, map + page * PAGE, 4, 0));
    say("it was moved", moved - map);
    say("the heap has ended", pread(file, end + 2 * PAGE, 4, 0));
    mprotect(map + 3 * PAGE, PAGE, PROT_READ | PROT_WRITE);
    say("it may be written again", pread(file, map + 3 * PAGE, 4, 0));
    say("all of it", pread(file, map, 12 * PAGE, 0));
    /* A large buffer, of which little is needed. */
    char *room = mmap(NULL, 1L << 36, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    say("read into much room", pread(file, room, 1L << 35, 0) - sum);
    two[0].iov_base = room;
    two[0].iov_len = 1L << 30;
    say("into parts of it", preadv(file, two, 1, 0) - sum);
    getrusage(RUSAGE_SELF, &after);
    say("no memory was taken for it", after.ru_maxrss - before.ru_maxrss < 65536 ? 0 : after.ru_maxrss);
    /* Out of the file itself. */
    static char block[600000];
    memset(block, 'z', sizeof block);
    say("a long file", pwrite(file, block, sizeof block, 0));
    char *mapped = mmap(NULL, sizeof block, PROT_READ, MAP_PRIVATE, file, 0);
    for (int round = 0; round < 5; round++) {
        madvise(mapped, sizeof block, MADV_DONTNEED);
        say("out of itself", pwrite(file, mapped, 300000, 300000 - round));
    }
    char *shared = mmap(NULL, sizeof block, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    say("out of itself, shared", pwrite(file, shared + 1000, 200000, 0));
    say("cut under it", ftruncate(file, 100));
    signal(SIGBUS, on_fault);
    say("what is left", byte_at(shared));
    say("what is not", byte_at(shared + 8 * PAGE));
    say("longer again", ftruncate(file, 100000));
    say("what is there again", byte_at(shared + 8 * PAGE));
}

static volatile int excesses;

static void on_excess(int number)
{
    (void)number;
    excesses++;
}

/* Limits on the length and the number of files. */
static void limits(void)
{
    signal(SIGXFSZ, on_excess);
    struct rlimit limit = {10000, RLIM_INFINITY};
    static char block[9000];
    int file = make("file"), other = make("other");
    say("a longer file", ftruncate(other, 50000));
    say("the limit", setrlimit(RLIMIT_FSIZE, &limit));
    say("within", write(file, block, sizeof block));
    say("across", write(file, block, sizeof block));
    say("beyond", write(file, block, sizeof block));
    say("signals", excesses);
    say("beyond, elsewhere", pwrite(file, block, 1, 10000));
    say("nothing, beyond", pwrite(file, block, 0, 20000));
    say("made longer", ftruncate(file, 10001));
    say("by its name", truncate("file", 20000));
    say("reserved", fallocate(file, 0, 5000, 6000));
    say("shorter, though beyond", ftruncate(other, 40000));
    off_t from = 0, to = 9000;
    say("copied", copy_file_range(other, &from, file, &to, 5000, 0));
    to = 10000;
    say("copied beyond", copy_file_range(other, &from, file, &to, 5000, 0));
    int adds = open("other", O_WRONLY | O_APPEND);
    say("appended", write(adds, block, 10));
    say("within, and long", pwrite(other, block, 9000, 0));
    say("signals", excesses);
    limit.rlim_cur = RLIM_INFINITY;
    say("no limit", setrlimit(RLIMIT_FSIZE, &limit));
    say("beyond", pwrite(file, block, sizeof block, 10000));
    say("its length", size_of("file"));

    getrlimit(RLIMIT_NOFILE, &limit);
    rlim_t before = limit.rlim_cur;
    limit.rlim_cur = 12;
    say("few descriptors", setrlimit(RLIMIT_NOFILE, &limit));
    int last = 0, next;
    while ((next = open("file", O_RDONLY)) >= 0)
        last = next;
    say("no more", next);
    say("the last one", last);
    say("a duplicate", dup(last));
    say("a far duplicate", fcntl(last, F_DUPFD, 12));
    say("a look", size_of("file"));
    say("a name", rename("file", "renamed"));
    close(last);
    say("mapped without one", mmap(NULL, PAGE, PROT_READ, MAP_SHARED, 3, 0) == MAP_FAILED ? -1 : 0);
    limit.rlim_cur = before;
    say("more again", setrlimit(RLIMIT_NOFILE, &limit));
    say("one more", open("renamed", O_RDONLY) - last);
}

/* The files that another program finds open. */
static void passes(void)
{
    char name[16];
    for (int number = 0; number < 60; number++) {
        snprintf(name, sizeof name, "f%d", number);
        int how = O_RDWR | O_CREAT | (number % 3 == 1 ? O_CLOEXEC : 0) | (number % 5 == 2 ? O_APPEND : 0);
        int file = open(name, how, 0644);
        if (file != 3 + number || put(file, name) < 2 || (number % 7 == 3 && lseek(file, 1, SEEK_SET) != 1))
            say("opening", file);
    }
    say("one of another's number", dup2(5, 100));
    unlink("f8");
    char *words[] = {self, "passed", NULL};
    /* In a child that shares this memory, then in one that the library makes, then by execve. */
    fflush(stdout);
    for (int round = 0; round < 2; round++) {
        pid_t child;
        int status = -1;
        if (round == 0) {
            child = vfork();
            if (child == 0) {
                dup2(7, 3);
                close(6);
                execv(self, words);
                _exit(4);
            }
        } else {
            posix_spawn_file_actions_t actions;
            posix_spawn_file_actions_init(&actions);
            posix_spawn_file_actions_addopen(&actions, 3, "f1", O_RDONLY, 0);
            posix_spawn_file_actions_adddup2(&actions, 8, 6);
            posix_spawn_file_actions_addclose(&actions, 100);
            posix_spawn(&child, self, &actions, NULL, words, environ);
        }
        waitpid(child, &status, 0);
        say("a child", status);
    }
    say("still here", put(3, "more"));
    execv(self, words);
    say("execv", -1);
}

static void passed(void)
{
    char text[64], what[128];
    for (int number = 3; number <= 100; number++) {
        int flags = fcntl(number, F_GETFL);
        if (flags < 0)
            continue;
        struct stat found;
        fstat(number, &found);
        long length = pread(number, text, 63, 0);
        text[length < 0 ? 0 : length] = 0;
        snprintf(what, sizeof what, "%d at %ld of %ld, links %ld, reads %s", number, (long)lseek(number, 0, SEEK_CUR),
                 (long)found.st_size, (long)found.st_nlink, text);
        say(what, flags & (O_APPEND | O_ACCMODE));
    }
    say("written", put(20, "after"));
}

int main(int count, char **arguments)
{
    static const struct story stories[] = {{"ranges", ranges},     {"separate", separate}, {"growing", growing}, {"forks", forks},     {"numbers", numbers},
                                           {"races", races},       {"replaced", replaced}, {"signals", signals}, {"appends", appends}, {"removed", removed},
                                           {"vectors", vectors},   {"limits", limits},     {"passes", passes},   {"passed", passed}};
    self = arguments[0];
    return tell(stories, sizeof stories / sizeof *stories, count == 2 ? arguments[1] : "");
}
